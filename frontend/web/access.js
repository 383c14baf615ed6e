// The key, where this server asks for one: kept for this tab alone, sent with every request of the page.

const NAME = "greenlane-key";

export class NeedsKey extends Error {}

export function useKey(key) {
  sessionStorage.setItem(NAME, key);
}

export function hasKey() {
  return sessionStorage.getItem(NAME) !== null;
}

function forgetKey() {
  sessionStorage.removeItem(NAME);
}

/** fetch with the key; throws NeedsKey where there is none or a wrong one, which is forgotten. */
export async function ask(path, init = {}) {
  const key = sessionStorage.getItem(NAME);
  const headers = { ...init.headers };
  if (key !== null) {
    headers.authorization = `Bearer ${key}`;
  }
  const answer = await fetch(path, { ...init, headers, cache: "no-store", credentials: "omit" });
  if (answer.status === 401) {
    if (sessionStorage.getItem(NAME) === key) {
      forgetKey();
    }
    throw new NeedsKey(key === null ? "" : "That key is not accepted.");
  }
  return answer;
}
