// What the router is, kept up to date: tables by key, counts over time, and what follows from them. No page here.

/** Rates and percentiles are over this time. */
const WINDOW_MS = 5_000;
/** The charts show a quarter of an hour. */
export const RANGE_MS = 15 * 60_000;
const MAX_DECISIONS = 200;
const MAX_CHANGES = 100;

export class Model {
  version = "";
  columns = null;
  samples = [];
  workers = new Map();
  models = new Map();
  ranks = new Map();
  panels = {};
  changes = [];
  decisions = [];
  /** Each worker's counters of some seconds ago, for rates. */
  #earlier = [];
  updatedAt = 0;

  apply(event, data) {
    if (event === "all") {
      this.version = data.version;
      this.columns = data.columns;
      this.samples = data.history;
      this.changes = [];
      this.decisions = [];
      this.panels = {};
      this.#earlier = [];
    }
    if (!this.columns) return;
    this.#table(this.workers, data.workers, "workers");
    this.#table(this.models, data.models, "models");
    this.#table(this.ranks, data.ranks, "ranks");
    Object.assign(this.panels, data.panels);
    this.changes = [...this.changes, ...(data.changes ?? [])].slice(-MAX_CHANGES);
    const decisions = (data.decisions ?? []).map((row) => this.#row("decisions", row));
    this.decisions = [...this.decisions, ...decisions].slice(-MAX_DECISIONS);
    const last = this.samples.at(-1);
    if (!last || data.sample.at_unix_ms > last.at_unix_ms) this.samples.push(data.sample);
    const oldest = data.sample.at_unix_ms - RANGE_MS;
    while (this.samples.length > 0 && this.samples[0].at_unix_ms < oldest) this.samples.shift();
    this.#remember(data.sample.at_unix_ms);
    this.updatedAt = Date.now();
  }

  #row(table, values) {
    const row = {};
    this.columns[table].forEach((column, index) => {
      row[column] = values[index];
    });
    return row;
  }

  #table(table, change, name) {
    if (!change) return;
    if (change.all) table.clear();
    for (const values of change.all ?? change.set ?? []) table.set(values[0], this.#row(name, values));
    for (const key of change.gone ?? []) table.delete(key);
  }

  #remember(at) {
    const counters = new Map();
    for (const [name, worker] of this.workers) counters.set(name, [worker.total, worker.prompt, worker.cached]);
    this.#earlier.push({ at, counters });
    // The page of a fleet under load: 30 s, for the cached share of each worker.
    while (this.#earlier.length > 1 && this.#earlier[1].at <= at - 30_000) this.#earlier.shift();
  }

  /** Requests a second and the cached share of a worker, over the last half minute. */
  workerRates(worker) {
    const first = this.#earlier[0];
    const last = this.#earlier.at(-1);
    const before = first?.counters.get(worker.name);
    const seconds = last ? (last.at - first.at) / 1000 : 0;
    const share = worker.prompt > 0 ? worker.cached / worker.prompt : null;
    if (!before || seconds < 1 || worker.total < before[0]) return { rate: null, recent: share, share };
    const prompt = worker.prompt - before[1];
    return {
      rate: (worker.total - before[0]) / seconds,
      recent: prompt > 0 ? (worker.cached - before[2]) / prompt : share,
      share,
    };
  }

  /** Index of a counter in a sample. */
  #at(group, name) {
    const { ends, reasons, sums } = this.columns.counts;
    if (group === "ends") return ends.indexOf(name);
    if (group === "reasons") return ends.length + reasons.indexOf(name);
    return ends.length + reasons.length + sums.indexOf(name);
  }

  #buckets(group) {
    const { ends, reasons, sums, ttft, itl } = this.columns.counts;
    const start = ends.length + reasons.length + sums.length;
    return group === "ttft" ? [start, ttft] : [start + ttft.length + 1, itl];
  }

  /** For each sample, the one a window before it; null where the history has a hole. */
  #windows() {
    let from = 0;
    return this.samples.map((sample, index) => {
      while (from < index && this.samples[from + 1].at_unix_ms <= sample.at_unix_ms - WINDOW_MS + 500) from += 1;
      const before = this.samples[from];
      const span = sample.at_unix_ms - before.at_unix_ms;
      return from < index && span >= 900 && span < 4 * WINDOW_MS ? before : null;
    });
  }

  /** The charts' data: times and lines, all over the same samples. */
  series() {
    const windows = this.#windows();
    const { ends, reasons, ttft, itl } = this.columns.counts;
    const times = this.samples.map((sample) => sample.at_unix_ms / 1000);
    const over = (compute) =>
      this.samples.map((sample, index) => {
        const before = windows[index];
        return before ? compute(before.counters, sample.counters, (sample.at_unix_ms - before.at_unix_ms) / 1000) : null;
      });
    const rateOf = (group, name) => {
      const at = this.#at(group, name);
      return over((before, now, seconds) => (now[at] - before[at]) / seconds);
    };
    const shareOf = (part, whole) => {
      const [partAt, wholeAt] = [this.#at("sums", part), this.#at("sums", whole)];
      return over((before, now) => {
        const all = now[wholeAt] - before[wholeAt];
        return all > 0 ? (now[partAt] - before[partAt]) / all : null;
      });
    };
    const percentileOf = (group, share) => {
      const [start, bounds] = this.#buckets(group);
      return over((before, now) => percentile(bounds, bounds.concat(0).map((_, index) => now[start + index] - before[start + index]), share));
    };
    const all = (group, names) => Object.fromEntries(names.map((name) => [name, rateOf(group, name)]));
    return {
      times,
      ends: all("ends", ends),
      reasons: all("reasons", reasons),
      expected: shareOf("expected", "routed"),
      reported: shareOf("cached", "prompt"),
      random: shareOf("random_cached", "random"),
      generated: rateOf("sums", "generated"),
      prompt: rateOf("sums", "routed"),
      ttft: { p50: percentileOf("ttft", 0.5), p90: percentileOf("ttft", 0.9), p99: percentileOf("ttft", 0.99) },
      itl: { p50: percentileOf("itl", 0.5), p90: percentileOf("itl", 0.9), p99: percentileOf("itl", 0.99) },
      bounds: { ttft, itl },
    };
  }

  /** A share over the last minutes of samples, steadier than that of a window. */
  recentShare(part, whole, ms = 60_000) {
    const last = this.samples.at(-1);
    if (!last) return null;
    const first = this.samples.find((sample) => sample.at_unix_ms >= last.at_unix_ms - ms) ?? last;
    const [partAt, wholeAt] = [this.#at("sums", part), this.#at("sums", whole)];
    const all = last.counters[wholeAt] - first.counters[wholeAt];
    return all > 0 ? (last.counters[partAt] - first.counters[partAt]) / all : null;
  }

  gauge(name) {
    const at = this.columns.counts.gauges.indexOf(name);
    return this.samples.at(-1)?.gauges[at] ?? null;
  }

  total(group, name) {
    return this.samples.at(-1)?.counters[this.#at(group, name)] ?? 0;
  }
}

/** A percentile from the counts of buckets, by linear interpolation within one; null without values. */
export function percentile(bounds, counts, share) {
  const all = counts.reduce((sum, count) => sum + count, 0);
  if (all <= 0) return null;
  let below = 0;
  for (let index = 0; index < bounds.length; index += 1) {
    const lower = index === 0 ? 0 : bounds[index - 1];
    if (below + counts[index] >= share * all && counts[index] > 0) {
      return lower + (bounds[index] - lower) * ((share * all - below) / counts[index]);
    }
    below += counts[index];
  }
  return bounds.at(-1);
}
