// Shows what /status.json says, once a second while somebody looks. Text only: nothing that the server says is markup.

import { NeedsKey, ask, hasKey, useKey } from "./access.js";
import { startPlayground } from "./chat.js";
import { History, count, duration, quantile, share } from "./figures.js";
import { drawLanes } from "./lanes.js";

const PERIOD_MS = 1000;
const PATIENCE_MS = 5000;
const SHOWN_EVENTS = 50;
const node = (id) => document.getElementById(id);
const history = new History();
let told = "";
let instance = null;
let answering = 1;

function put(id, text) {
  node(id).textContent = text;
}

function clock() {
  return performance.now() / 1e3;
}

// ---------------------------------------------------------------- what is shown

function happened(text) {
  const [line, time] = [document.createElement("li"), document.createElement("time")];
  time.textContent = new Date().toLocaleTimeString("en-GB");
  line.append(time, text);
  node("events").prepend(line);
  while (node("events").childElementCount > SHOWN_EVENTS) {
    node("events").lastElementChild.remove();
  }
}

function tellHealth(state, text = state) {
  if (state === told) {
    return;
  }
  told = state;
  node("health").dataset.state = state;
  put("health", text);
  happened(text);
}

/** Engine cores lost and found. A frontend with several tells of one after another, so these are counted alone. */
function tellCores({ engines, about }) {
  const before = instance;
  instance = about?.instance_id ?? null;
  if (engines.count === 1 && before !== null && instance !== before) {
    happened("the engine core was started again");
  }
  if (engines.count > 1 && engines.answered !== answering) {
    happened(`${engines.answered} of ${engines.count} engine cores answer`);
  }
  answering = engines.answered;
}

function tellEngine(status) {
  const { engine, about } = status;
  const known = engine !== null && about !== null;
  document.querySelector(".lanes").classList.toggle("stale", !known);
  if (!known) {
    for (const id of ["running", "waiting", "held", "kept", "free", "hits"]) {
      put(id, "–");
    }
    return;
  }
  const { gauges } = engine;
  put("running", `${count(gauges.running)} of ${count(about.limits.max_num_seqs * status.engines.answered)}`);
  put("waiting", count(gauges.waiting));
  tellPages(gauges);
  put("hits", share(history.growth("prefix_hits"), history.growth("prefix_queries")));
}

function tellPages(gauges) {
  const [held, total] = [gauges.pages_referenced + gauges.pages_retiring, gauges.pages_total];
  put("held", `${count(held)} of ${count(total)}`);
  put("kept", count(gauges.pages_cached));
  put("free", count(gauges.pages_free));
  node("pages-held").style.width = `${(100 * held) / Math.max(1, total)}%`;
  node("pages-kept").style.width = `${(100 * gauges.pages_cached) / Math.max(1, total)}%`;
}

function tellRequests(requests) {
  const { stop, length, cancelled, rejected, failed } = requests.outcomes;
  put("open", count(requests.open));
  put("ended", count(stop + length));
  put("failed", count(failed));
  put("refused", count(rejected));
  put("left", count(cancelled));
}

function tellLatencies() {
  for (const name of ["ttft", "itl"]) {
    const { bounds } = history.newest[name];
    const counts = history.observed(name);
    for (const rank of [50, 90, 99]) {
      put(`${name}-${rank}`, duration(quantile(bounds, counts, rank / 100), bounds));
    }
  }
  const rate = (name) => {
    const seconds = history.intervals().reduce((sum, each) => sum + each.seconds, 0);
    return seconds > 0 ? `${count(history.growth(name) / seconds)} /s` : "–";
  };
  put("tokens-out", rate("output_tokens"));
  put("tokens-in", rate("prompt_tokens"));
}

function tellAbout(status) {
  put("model", status.model);
  document.title = `${status.health === "serving" ? "" : `${status.health} – `}Greenlane`;
  const parts = [`Greenlane ${status.version}`];
  if (status.about !== null) {
    parts.push(`${status.about.device}, ${status.about.dtype}`, `context ${count(status.about.limits.max_model_len)}`);
  }
  for (const kind of ["engines", "frontends"]) {
    const { count: all, answered } = status[kind];
    parts.push(`${answered} of ${all} ${kind === "engines" ? "engine core" : "frontend"}${all === 1 ? "" : "s"} answering`);
  }
  put("about", parts.join(" · "));
}

function show(status) {
  history.add(status, clock());
  tellCores(status);
  tellEngine(status);
  tellHealth(status.health);
  tellAbout(status);
  tellRequests(status.requests);
  tellLatencies();
  drawLanes(history, clock());
}

// ---------------------------------------------------------------- asking

function askForKey(why) {
  tellHealth("locked", "needs a key");
  put("key-error", why);
  if (node("key-form").hidden) {
    node("key-form").hidden = false;
    node("key").focus();
  }
}

async function refresh() {
  try {
    const answer = await ask("/status.json", { signal: AbortSignal.timeout(PATIENCE_MS) });
    if (!answer.ok) {
      throw new Error(`HTTP ${answer.status}`);
    }
    const status = await answer.json();
    node("key-form").hidden = true;
    show(status);
  } catch (error) {
    if (error instanceof NeedsKey) {
      askForKey(error.message);
    } else {
      tellHealth("unreachable", "not reachable");
      document.querySelector(".lanes").classList.add("stale");
    }
  }
}

/** Ask a second after each answer, unless nobody looks or a key is missing; whatever changes that calls again. */
let asking = false;
async function watch() {
  if (asking) {
    return;
  }
  asking = true;
  while (!document.hidden && (node("key-form").hidden || hasKey())) {
    await refresh();
    await new Promise((resolve) => setTimeout(resolve, PERIOD_MS));
  }
  asking = false;
}

node("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(node("key").value.trim());
  node("key").value = "";
  watch();
});
document.addEventListener("visibilitychange", watch);
startPlayground(askForKey);
watch();
