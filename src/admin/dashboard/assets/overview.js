// The first section: the state of the fleet in a few numbers, then charts.

import { Chart, setMarks } from "./charts.js";
import { card, h, metric, setText } from "./dom.js";
import { amount, clock, count, percent, perSecond, seconds, timestamp, whole, words } from "./format.js";

const REQUESTS = "warmroute_requests_total";
const ERRORS = "warmroute_request_errors_total";
const EXPECTED = "warmroute_expected_cached_prompt_tokens_total / warmroute_routed_prompt_tokens_total";
const REPORTED = "warmroute_cached_prompt_tokens_total / warmroute_prompt_tokens_total";
const RANDOM = "warmroute_random_worker_cached_prompt_tokens_total / warmroute_random_worker_prompt_tokens_total";
const TTFT = "warmroute_time_to_first_token_seconds";
const ITL = "warmroute_inter_token_latency_seconds";
const DECISIONS = "warmroute_routing_decisions_total";

function tile(id, label, name) {
  const value = h("b", { class: "big" }, "–");
  const unit = h("span", { class: "unit" });
  const note = h("span", { class: "quiet" });
  const element = metric(h("div", { class: "tile", id, role: "group", "aria-label": label }, h("span", { class: "label" }, label), h("span", { class: "figure" }, value, " ", unit), note), name);
  return {
    element,
    /** `text`: a number, and its unit after a space. */
    set: (text, detail, state = "") => {
      const space = Math.max(text.lastIndexOf(" "), text.lastIndexOf("\u00a0"));
      setText(value, space < 0 ? text : text.slice(0, space));
      setText(unit, space < 0 ? "" : text.slice(space + 1));
      setText(note, detail);
      element.className = `tile ${state}`;
    },
  };
}

const lastOf = (list) => list.at(-1) ?? null;

export class Overview {
  constructor() {
    this.tiles = {
      cached: tile("tile-cached", "Prompts from cache", REPORTED),
      ttft: tile("tile-ttft", "First token", TTFT),
      itl: tile("tile-itl", "Between tokens", ITL),
      requests: tile("tile-requests", "Requests", REQUESTS),
      failed: tile("tile-failed", "Failed requests", REQUESTS),
      refused: tile("tile-refused", "Refused (429)", ERRORS),
      workers: tile("tile-workers", "Workers", "warmroute_worker_up"),
    };
    this.requests = new Chart({
      title: "Requests a second by how they ended",
      format: (value) => perSecond(value),
      lines: [
        { key: "complete", label: "complete", colour: "good", metric: REQUESTS, fill: true },
        { key: "client_disconnected", label: "client left", colour: "quiet", metric: REQUESTS, optional: true },
        { key: "other_4xx", label: "other 4xx", colour: "quiet", dash: "dashed", metric: REQUESTS, optional: true },
        { key: "failed", label: "failed", colour: "bad", metric: REQUESTS },
        { key: "too_many", label: "refused (429)", colour: "held", metric: ERRORS },
      ],
    });
    this.cached = new Chart({
      title: "Share of prompt tokens that were cached",
      format: (value) => percent(value),
      max: 1,
      marked: true,
      lines: [
        { key: "reported", label: "reported by engines", colour: "cached", metric: REPORTED, fill: true, spans: true },
        { key: "expected", label: "expected", colour: "expected", metric: EXPECTED, spans: true },
        { key: "random", label: "random worker", colour: "quiet", metric: RANDOM, dash: "dashed", spans: true },
      ],
    });
    const percentiles = (name) => [
      { key: "p50", label: "p50", colour: "p50", metric: name, fill: true, spans: true },
      { key: "p90", label: "p90", colour: "p90", metric: name, spans: true },
      { key: "p99", label: "p99", colour: "p99", metric: name, spans: true },
    ];
    this.ttft = new Chart({ title: "Time to first token", format: seconds, marked: true, least: 0.01, lines: percentiles(TTFT), blank: "No streamed answers in the last 15 minutes" });
    this.itl = new Chart({ title: "Time between tokens", format: seconds, least: 0.005, lines: percentiles(ITL), blank: "No streamed answers in the last 15 minutes" });
    // The colour of what is cached where the cache decided; else none, and lines of their own kind.
    const reason = (key, colour, dash) => ({ key, label: words(key), colour, dash, metric: DECISIONS, optional: true });
    this.decisions = new Chart({
      title: "Decisions a second by reason",
      format: (value) => perSecond(value),
      blank: "No decisions in the last 15 minutes",
      lines: [
        reason("longest_prefix", "cached"),
        reason("lower_cost", "text"),
        reason("cold", "text", "dashed"),
        reason("least_load", "quiet"),
        reason("round_robin", "text", "dotted"),
        reason("random", "quiet", "dotted"),
        reason("affinity", "affinity"),
        reason("affinity_overflow", "affinity", "dashed"),
        reason("prefix_hash", "quiet", "dashed"),
      ],
    });
    this.tokens = new Chart({
      title: "Tokens a second",
      format: (value) => perSecond(value, "tokens"),
      axis: (value) => `${count(value)} /s`,
      blank: "No tokens in the last 15 minutes",
      lines: [
        { key: "prompt", label: "prompt", colour: "prompt", metric: "warmroute_routed_prompt_tokens_total", fill: true },
        { key: "generated", label: "generated", colour: "answer", metric: "warmroute_generation_tokens_total" },
      ],
    });
    this.events = h("ol", { class: "events", "aria-label": "What happened to the fleet" });
    const note = h("p", { class: "note" }, "Rates and percentiles are over 5 s; percentiles are interpolated within the buckets of the histograms. Times are UTC, as in the log. “Random worker” is what up to 8 workers drawn at random had of the same prompts, for 1 % of requests and one each second.");
    this.element = h(
      "section",
      { id: "overview", class: "part", "aria-labelledby": "overview-title" },
      h("h2", { id: "overview-title", class: "unseen" }, "Overview"),
      h("div", { class: "tiles" }, Object.values(this.tiles).map((it) => it.element)),
      h(
        "div",
        { class: "grid charts" },
        card("chart-cached", "Cached share of prompts", this.cached.element),
        card("chart-ttft", "Time to first token", this.ttft.element),
        card("chart-requests", "Requests a second", this.requests.element),
        card("chart-itl", "Time between tokens", this.itl.element),
        card("chart-decisions", "Decisions a second, by reason", this.decisions.element),
        card("chart-tokens", "Tokens a second", this.tokens.element),
      ),
      note,
      card("events", "What happened", this.events),
    );
  }

  render(model) {
    const series = model.series();
    const { times, ends } = series;
    const failed = ["status_5xx", "worker_failed", "router_failed", "stream_idle_timeout", "request_timeout", "other"];
    const sum = (names) => times.map((_, index) => names.reduce((all, name) => (ends[name][index] === null ? all : (all ?? 0) + ends[name][index]), null));
    const failures = sum(failed);
    const policies = model.changes.filter((change) => change.kind === "policy" || change.kind === "down" || change.kind === "breaker_open");
    setMarks(policies.map((change) => ({ at: change.at_unix_ms / 1000, kind: change.kind === "policy" ? "policy" : "down", text: change.kind === "policy" ? change.text.replace(/^policy (.* → )?/, "") : "" })));
    // The router's own 429 are among those that it refused.
    const { too_many: tooMany } = series;
    const others = times.map((_, index) => (ends.status_4xx[index] === null ? null : ends.status_4xx[index] + Math.max(0, ends.refused[index] - tooMany[index])));
    this.requests.update(times, { ...ends, failed: failures, other_4xx: others, too_many: tooMany });
    this.cached.update(times, series);
    this.ttft.update(times, series.ttft);
    this.itl.update(times, series.itl);
    this.decisions.update(times, series.reasons);
    this.tokens.update(times, series);
    this.#tiles(model, series, failures, others);
    this.#events(model);
  }

  #tiles(model, series, failures, others) {
    const { tiles } = this;
    const all = Object.values(series.ends).map(lastOf);
    const ended = all.some((value) => value !== null) ? all.reduce((sum, value) => sum + (value ?? 0), 0) : null;
    tiles.requests.set(perSecond(ended), `${amount(model.gauge("in_flight"), "request")} in flight`);
    const reported = model.recentShare("cached", "prompt") ?? model.recentShare("expected", "routed");
    const random = model.recentShare("random_cached", "random");
    const gain = random === null ? "" : `random: ${percent(random)}`;
    tiles.cached.set(percent(reported), gain, "accent");
    const latest = (list) => list.findLast((value) => value !== null) ?? null;
    tiles.ttft.set(seconds(latest(series.ttft.p50)), `p99 ${seconds(latest(series.ttft.p99))}`);
    tiles.itl.set(seconds(latest(series.itl.p50)), `p99 ${seconds(latest(series.itl.p99))}`);
    const failing = lastOf(failures);
    const retries = model.total("sums", "retries");
    const continued = model.panels.continuations?.outcomes.continued ?? 0;
    const tries = retries === 1 ? "1 retry" : `${whole(retries)} retries`;
    const saved = continued > 0 ? `${tries}, ${amount(continued, "stream")} went on` : `${tries} so far`;
    tiles.failed.set(perSecond(failing), saved, failing > 0 ? "alarm" : "");
    const refusing = lastOf(series.too_many);
    const other = lastOf(others);
    tiles.refused.set(perSecond(refusing), other > 0 ? `other 4xx: ${perSecond(other)}` : "limits and queue", refusing > 0 ? "held" : "");
    const [workers, usable] = [model.gauge("workers"), model.gauge("usable_workers")];
    const missing = workers - usable;
    tiles.workers.set(`${whole(usable)} of ${whole(workers)} up`, missing > 0 ? `${whole(missing)} ${missing === 1 ? "gets" : "get"} no requests` : "all can get requests", missing > 0 ? "alarm" : "");
  }

  #events(model) {
    const newest = model.changes.at(-1)?.number ?? 0;
    if (this.shown === newest && this.events.childElementCount > 0) return;
    this.shown = newest;
    const items = model.changes.slice(-12).reverse();
    const rows = items.map((change) => h("li", { class: change.kind }, h("time", { datetime: timestamp(change.at_unix_ms), title: timestamp(change.at_unix_ms) }, clock(change.at_unix_ms)), " ", change.text));
    this.events.replaceChildren(...(rows.length > 0 ? rows : [h("li", { class: "empty" }, "Nothing yet")]));
  }
}
