// The playground: a conversation with this server, streamed, and how long its tokens took.

import { NeedsKey, ask } from "./access.js";
import { duration } from "./figures.js";
import { drawBars } from "./lanes.js";

const SHOWN_GAPS = 120;
const node = (id) => document.getElementById(id);

/** Arrivals of one answer's tokens. Times in seconds. */
export class Timings {
  constructor(sent) {
    this.sent = sent;
    this.tokens = 0;
    this.first = null;
    this.last = null;
    this.gaps = [];
  }

  /** `tokens`: of the answer so far. */
  note(tokens, at) {
    if (tokens <= this.tokens) {
      return;
    }
    if (this.first === null) {
      this.first = at;
    } else {
      this.gaps.push(at - this.last);
    }
    this.tokens = tokens;
    this.last = at;
  }

  text() {
    if (this.first === null) {
      return "";
    }
    const parts = [`first token ${duration(this.first - this.sent)}`, `${this.tokens} tokens`];
    if (this.gaps.length > 0) {
      const sorted = this.gaps.toSorted((a, b) => a - b);
      const at = (q) => duration(sorted[Math.min(sorted.length - 1, Math.floor(q * sorted.length))]);
      const rate = (this.tokens - 1) / (this.last - this.first);
      parts.push(`${rate.toFixed(rate < 10 ? 1 : 0)} tokens/s`, `between tokens p50 ${at(0.5)}, p99 ${at(0.99)}`);
    }
    return parts.join(" · ");
  }
}

/** The events of a stream of server-sent events, as objects. */
async function* events(body) {
  let rest = "";
  for await (const piece of pieces(body.pipeThrough(new TextDecoderStream()))) {
    const lines = (rest + piece).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: ") && line !== "data: [DONE]") {
        yield JSON.parse(line.slice(6));
      }
    }
  }
}

async function* pieces(stream) {
  const reader = stream.getReader();
  try {
    for (let { done, value } = await reader.read(); !done; { done, value } = await reader.read()) {
      yield value;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

const now = () => performance.now() / 1e3;

class Playground {
  constructor(onNeedsKey) {
    this.onNeedsKey = onNeedsKey;
    this.messages = [];
    this.running = null;
  }

  say(role, text) {
    const line = document.createElement("p");
    line.dataset.role = role;
    line.textContent = text;
    node("log").append(line);
    node("log").scrollTop = node("log").scrollHeight;
    return line;
  }

  async send(text) {
    this.stop();
    const running = new AbortController();
    this.running = running;
    this.messages.push({ role: "user", content: text });
    this.say("user", text);
    this.busy(true);
    let answer = "";
    try {
      const line = this.say("assistant", "");
      answer = await this.stream(line, running.signal);
    } catch (error) {
      this.failed(error);
    } finally {
      if (this.running === running) {
        this.settle(answer);
      }
    }
  }

  /** The answer's text as it comes, into `line`; the whole of it. */
  async stream(line, signal) {
    const timings = new Timings(now());
    const response = await ask("/v1/chat/completions", {
      method: "POST", signal, headers: { "content-type": "application/json" }, body: JSON.stringify(this.body()),
    });
    if (!response.ok) {
      throw new Error((await response.json()).error.message);
    }
    const [thinking, said] = [document.createElement("span"), document.createTextNode("")];
    thinking.className = "thinking";
    line.append(thinking, said);
    try {
      for await (const event of events(response.body)) {
        if (event.error) {
          throw new Error(event.error.message);
        }
        timings.note(event.usage?.completion_tokens ?? 0, now());
        const delta = event.choices[0]?.delta ?? {};
        thinking.append(delta.reasoning_content ?? "");
        said.appendData(delta.content ?? "");
        this.show(timings);
      }
    } catch (error) {
      if (error.name !== "AbortError") {
        throw error;
      }
    }
    return said.data;
  }

  body() {
    const body = {
      messages: this.messages, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true },
    };
    const [most, temperature] = [node("max-tokens").valueAsNumber, node("temperature").valueAsNumber];
    return {
      ...body, ...(Number.isNaN(most) ? {} : { max_tokens: most }), ...(Number.isNaN(temperature) ? {} : { temperature }),
    };
  }

  show(timings) {
    node("timings").textContent = timings.text();
    const gaps = timings.gaps.slice(-SHOWN_GAPS);
    const longest = Math.max(...gaps);
    drawBars(node("gaps"), gaps.map((gap, at) => ({ from: at, to: at + 1, value: gap / longest })));
    node("gaps-note").textContent = gaps.length === 0 ? ""
      : `time before each of the last ${gaps.length} tokens, the longest ${duration(longest)}`;
    node("log").scrollTop = node("log").scrollHeight;
  }

  failed(error) {
    if (error.name === "AbortError") {
      return;
    }
    if (error instanceof NeedsKey) {
      this.onNeedsKey(error.message);
    }
    const lost = error instanceof TypeError ? "the server can't be reached" : error.message;
    this.say("error", error instanceof NeedsKey ? "a key is needed" : lost);
  }

  /** An answer has ended: what came of it belongs to the conversation, or the question leaves it again. */
  settle(answer) {
    if (answer === "") {
      this.messages.pop();
    } else {
      this.messages.push({ role: "assistant", content: answer });
    }
    this.running = null;
    this.busy(false);
  }

  stop() {
    this.running?.abort();
  }

  clear() {
    this.stop();
    this.running = null;
    this.busy(false);
    this.messages = [];
    for (const id of ["log", "timings", "gaps", "gaps-note"]) {
      node(id).replaceChildren();
    }
    node("message").focus();
  }

  busy(yes) {
    node("log").setAttribute("aria-busy", String(yes));
    node("send").disabled = yes;
    node("stop").disabled = !yes;
  }
}

/** `onNeedsKey` is called with what to tell when the server wants a key. */
export function startPlayground(onNeedsKey) {
  const playground = new Playground(onNeedsKey);
  const submit = () => {
    const text = node("message").value.trim();
    if (text !== "" && playground.running === null && node("chat").reportValidity()) {
      node("message").value = "";
      playground.send(text);
    }
  };
  node("chat").addEventListener("submit", (event) => {
    event.preventDefault();
    submit();
  });
  node("message").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      submit();
    }
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      playground.stop();
    }
  });
  node("stop").addEventListener("click", () => playground.stop());
  node("clear").addEventListener("click", () => playground.clear());
}
