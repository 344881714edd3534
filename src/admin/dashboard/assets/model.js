// What the router is, kept up to date: tables by key, counts over time, and what follows from them. No page here.

/** Rates and percentiles are over this time. */
const WINDOW_MS = 5_000;
/** A worker is slow if its mean is this many times the median of all workers, and by no less than these seconds more. */
const SLOW_FACTOR = 2;
const SLOW_LEAST = { ttft: 0.05, itl: 0.005 };
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
  /** Counters of the last half minute of each worker, model and tenant, for rates. */
  #earlier = [];
  updatedAt = 0;

  apply(event, data) {
    if (event === "all") {
      this.version = data.version;
      this.columns = data.columns;
      this.samples = data.history;
      this.changes = [];
      this.decisions = [];
      this.#earlier = [];
    }
    if (!this.columns) return;
    this.#table(this.workers, data.workers, "workers");
    this.#table(this.models, data.models, "models");
    this.#table(this.ranks, data.ranks, "ranks");
    this.panels = data.panels ?? this.panels;
    this.changes = [...this.changes, ...data.changes].slice(-MAX_CHANGES);
    const decisions = data.decisions.map((row) => this.#row("decisions", row));
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

  #table(table, rows, name) {
    if (!rows) return;
    table.clear();
    for (const values of rows) table.set(values[0], this.#row(name, values));
  }

  #remember(at) {
    const of = (rows, counters) => new Map([...rows].map(([name, row]) => [name, counters(row)]));
    this.#earlier.push({
      at,
      workers: of(this.workers, (it) => [it.total, it.prompt, it.cached, it.ttft_count, it.ttft_ms, it.itl_count, it.itl_ms]),
      models: of(this.models, (it) => [it.requests, it.ttft_count, it.ttft_ms]),
      tenants: of(this.tenants.map((it) => [it.name, it]), tenantCounters),
    });
    // The page of a fleet under load: 30 s, for the cached share of each worker.
    while (this.#earlier.length > 1 && this.#earlier[1].at <= at - 30_000) this.#earlier.shift();
  }

  get tenants() {
    return this.panels.tenants?.tenants ?? [];
  }

  /** What counters have grown by over the last half minute, and the seconds; null if that is not known. */
  #grown(group, name, now) {
    const first = this.#earlier[0];
    const last = this.#earlier.at(-1);
    const before = first?.[group].get(name);
    const seconds = last ? (last.at - first.at) / 1000 : 0;
    if (!before || seconds < 1 || now[0] < before[0]) return null;
    return { seconds, by: now.map((value, index) => value - before[index]) };
  }

  /** Requests a second, the cached share and the mean latencies of a worker, over the last half minute. */
  workerRates(worker) {
    const share = worker.prompt > 0 ? worker.cached / worker.prompt : null;
    const grown = this.#grown("workers", worker.name, [worker.total, worker.prompt, worker.cached, worker.ttft_count, worker.ttft_ms, worker.itl_count, worker.itl_ms]);
    if (!grown) return { rate: null, recent: share, share, ttft: null, itl: null };
    const [total, prompt, cached, firsts, firstMs, gaps, gapMs] = grown.by;
    return { rate: total / grown.seconds, recent: prompt > 0 ? cached / prompt : share, share, ttft: mean(firstMs, firsts), itl: mean(gapMs, gaps) };
  }

  modelRates(model) {
    const grown = this.#grown("models", model.name, [model.requests, model.ttft_count, model.ttft_ms]);
    if (!grown) return { rate: null, ttft: null };
    const [requests, firsts, firstMs] = grown.by;
    return { rate: requests / grown.seconds, ttft: mean(firstMs, firsts) };
  }

  tenantRates(tenant) {
    const grown = this.#grown("tenants", tenant.name, tenantCounters(tenant));
    if (!grown) return { rate: null, refused: null, uncached: null, generated: null };
    const [sent, refused, uncached, generated] = grown.by.map((value) => value / grown.seconds);
    return { rate: sent, refused, uncached, generated };
  }

  /** Workers whose latency stands out: {name, what, value, usual}, the worst first. */
  slowWorkers() {
    const rows = [...this.workers.values()].map((worker) => ({ name: worker.name, ...this.workerRates(worker) }));
    const found = ["ttft", "itl"].flatMap((what) => {
      const known = rows.filter((row) => row[what] !== null);
      const usual = median(known.map((row) => row[what]));
      return known.length < 3 ? [] : known.filter((row) => row[what] > SLOW_FACTOR * usual && row[what] - usual > SLOW_LEAST[what]).map((row) => ({ name: row.name, what, value: row[what], usual }));
    });
    return found.sort((left, right) => right.value / right.usual - left.value / left.usual);
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
      too_many: rateOf("sums", "too_many"),
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

function mean(ms, count) {
  return count > 0 ? ms / count / 1000 : null;
}

function median(values) {
  const sorted = [...values].sort((left, right) => left - right);
  return sorted[Math.floor(sorted.length / 2)] ?? 0;
}

/** Requests sent, refused, uncached prompt tokens and generated tokens. */
function tenantCounters(tenant) {
  const { requests, prompt, cached, generated, refused } = tenant.counts;
  const refusals = Object.values(refused).reduce((sum, value) => sum + value, 0);
  return [requests + refusals, refusals, prompt - cached, generated];
}
