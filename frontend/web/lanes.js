// The lanes over the last minute: one bar for each second, the newest at the right.

import { WINDOW_S, count, share } from "./figures.js";

const SVG = "http://www.w3.org/2000/svg";
const SPACE = 0.12;

/** Bars `{from, to, value}` with values from 0 to 1, on an axis from 0 to `width`. */
export function drawBars(svg, bars) {
  svg.replaceChildren(...bars.filter((bar) => bar.value > 0).map((bar) => {
    const rect = document.createElementNS(SVG, "rect");
    rect.setAttribute("x", bar.from.toFixed(3));
    rect.setAttribute("y", (1 - bar.value).toFixed(4));
    rect.setAttribute("width", Math.max(0, bar.to - bar.from - SPACE).toFixed(3));
    rect.setAttribute("height", bar.value.toFixed(4));
    return rect;
  }));
}

function put(id, text) {
  document.getElementById(id).textContent = text;
}

/** `now`: seconds of the page's clock, as the history's. */
export function drawLanes(history, now) {
  const intervals = history.intervals();
  const place = (at) => WINDOW_S - (now - at);
  const bars = (read) => intervals
    .filter((each) => place(each.to) > 0)
    .map((each) => ({ from: Math.max(0, place(each.from)), to: place(each.to), value: read(each) }));
  const most = Math.max(1, ...intervals.map((each) => each.rate));
  drawBars(document.getElementById("primary"), bars((each) => each.primary));
  const beside = history.newest?.engine?.lanes.overlap !== "off";
  drawBars(document.getElementById("prefill"), bars((each) => (beside ? each.prefill : each.chunks)));
  drawBars(document.getElementById("rate"), bars((each) => each.rate / most));
  const fresh = history.newest?.engine ? intervals.at(-1) : undefined;
  put("primary-now", fresh ? `${share(fresh.primary, 1)} busy` : "–");
  put("rate-now", fresh ? `${count(fresh.rate)} /s` : "–");
  tellSplit(history.newest, fresh);
}

function tellSplit(status, fresh) {
  const lanes = status?.engine?.lanes;
  if (!lanes) {
    return;
  }
  const beside = lanes.overlap !== "off";
  const now = beside ? `${share(fresh?.prefill, 1)} busy` : `${share(fresh?.chunks, 1)} of steps`;
  put("prefill-now", fresh ? now : "–");
  put("primary-work", beside ? "decode" : "decode and prefill");
  put("prefill-work", beside ? "beside decode" : "chunks in its steps");
  put("split", splitText(lanes, (status.engine?.gauges.prefills_in_flight ?? 0) > 0));
}

/** What is computed where, in words. */
export function splitText(lanes, inFlight) {
  if (lanes.overlap === "off") {
    return "overlap off: prompts in chunks, in decode's forward";
  }
  if (lanes.overlap === "auto" && lanes.decode_sms === 0) {
    return "overlap auto: prefill where it disturbs decode least";
  }
  if (lanes.decode_sms === 0) {
    return `overlap ${lanes.overlap}: prefill on a second stream of the same SMs`;
  }
  const split = `${lanes.decode_sms} SMs decode, ${lanes.prefill_sms} prefill`;
  return `overlap ${lanes.overlap}: ${split} – ${inFlight ? "in force" : "decode has the whole GPU now"}`;
}
