// What follows from the server's counters: rates, shares and percentiles. No document is touched here.

export const WINDOW_S = 60;

/** The newest minute of /status.json, oldest first. */
export class History {
  constructor() {
    this.samples = [];
  }

  /** `at`: seconds of this page's clock. */
  add(status, at) {
    this.samples.push({ status, at });
    while (this.samples.length > 1 && this.samples[0].at < at - WINDOW_S - 1) {
      this.samples.shift();
    }
  }

  get newest() {
    return this.samples.at(-1)?.status ?? null;
  }

  /** What happened between each pair of neighbours that one life of the engine core spans. */
  intervals() {
    const out = [];
    for (let i = 1; i < this.samples.length; i++) {
      const [before, after] = [this.samples[i - 1], this.samples[i]];
      if (sameCores(before.status, after.status)) {
        out.push(interval(before, after));
      }
    }
    spread(out, "primary");
    spread(out, "prefill");
    return out;
  }

  /** Sum of a counter's growth over the minute, restarts left out. */
  growth(name) {
    return this.intervals().reduce((sum, each) => sum + each.grown[name], 0);
  }

  /** Counts of a histogram's observations in the last minute, restarts left out. */
  observed(name) {
    const total = (this.newest?.[name].counts ?? []).map(() => 0);
    for (let i = 1; i < this.samples.length; i++) {
      const [before, after] = [this.samples[i - 1].status[name].counts, this.samples[i].status[name].counts];
      const grown = after.map((count, at) => count - before[at]);
      if (grown.every((count) => count >= 0)) {
        grown.forEach((count, at) => { total[at] += count; });
      }
    }
    return total;
  }
}

/** Whether both tell of the same engine cores, in the same life, and time has passed for them. */
function sameCores(before, after) {
  const counts = (status) => status.engine.counters;
  return before.engine !== null && after.engine !== null
    && after.engine.uptime_s > before.engine.uptime_s
    && before.engines.answered === after.engines.answered
    && before.about?.instance_id === after.about?.instance_id
    && Object.keys(counts(after)).every((name) => counts(after)[name] >= counts(before)[name]);
}

function interval(before, after) {
  const seconds = after.status.engine.uptime_s - before.status.engine.uptime_s;
  const grown = {};
  for (const [name, count] of Object.entries(after.status.engine.counters)) {
    grown[name] = count - before.status.engine.counters[name];
  }
  const time = seconds * after.status.engines.answered * 1e6;
  return {
    from: before.at,
    to: after.at,
    primary: grown.primary_busy_us / time,
    prefill: grown.prefill_busy_us / time,
    chunks: chunkShare(grown),
    rate: grown.output_tokens / seconds,
    grown,
    seconds,
  };
}

/** Share of the primary lane's forwards that held chunks of prompts. */
function chunkShare({ steps_decode: decode, steps_prefill: prefill, steps_mixed: mixed }) {
  return (prefill + mixed) / Math.max(1, decode + prefill + mixed);
}

/** Work is counted when it ends, so more than a whole interval of it belongs to the ones before. */
function spread(intervals, lane) {
  let left = 0;
  for (const each of intervals.toReversed()) {
    const due = each[lane] * each.seconds + left;
    const here = Math.min(due, each.seconds);
    each[lane] = here / each.seconds;
    left = due - here;
  }
}

/** The q-quantile of a histogram, linear within a bucket; null of nothing, Infinity beyond the last bound. */
export function quantile(bounds, counts, q) {
  const total = counts.reduce((sum, count) => sum + count, 0);
  if (total === 0) {
    return null;
  }
  let below = 0;
  for (let i = 0; i < counts.length; i++) {
    if (counts[i] > 0 && below + counts[i] >= q * total) {
      if (i === bounds.length) {
        return Infinity;
      }
      const low = i === 0 ? 0 : bounds[i - 1];
      return low + ((bounds[i] - low) * (q * total - below)) / counts[i];
    }
    below += counts[i];
  }
  return Infinity;
}

// ---------------------------------------------------------------- for people

export function duration(seconds, bounds) {
  if (seconds === null) {
    return "–";
  }
  if (seconds === Infinity) {
    return `> ${bounds.at(-1)} s`;
  }
  return seconds >= 1 ? `${seconds.toFixed(2)} s` : `${(1e3 * seconds).toFixed(seconds < 0.01 ? 1 : 0)} ms`;
}

export function share(part, whole) {
  return whole > 0 ? `${Math.round((100 * part) / whole)} %` : "–";
}

export function count(number) {
  return Math.round(number).toLocaleString("en");
}
