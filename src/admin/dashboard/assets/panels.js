// KV events, models, pairs, Responses, replicas, queue and tenants. What is not configured is not shown.

import { card, empty, h, metric, scroller, setText } from "./dom.js";
import { amount, count, percent, perSecond, seconds, whole, words } from "./format.js";
import { byLabel, facts, line, means } from "./lists.js";
import * as side from "./side_panels.js";
import { Table } from "./table.js";

/** The boxes of the last section, besides those of side_panels.js. */
const OF_RESPONSES = ["responses", "store", "peers", "queue", "waits"];

export class Panels {
  #shown = new Map();
  #model = null;

  constructor() {
    const number = (key, title, name, format = count) => ({ key, title, metric: name, number: true, value: (row) => row[key], text: (row) => format(row[key]) });
    this.ranks = new Table({
      label: "KV events of each rank",
      unit: "rank",
      sort: "state",
      key: (row) => row.key,
      search: (row) => `${row.worker} ${row.model} ${row.state} ${row.reason} ${row.error ?? ""}`,
      columns: [
        { key: "worker", title: "Worker", text: (row) => (row.rank > 0 ? `${row.worker} rank ${row.rank}` : row.worker) },
        { key: "state", title: "Tree", metric: "warmroute_kv_state", value: (row) => ["stale", "cold", "partial", "live"].indexOf(row.state), text: (row) => row.state, cell: (row, cell) => this.#tree(row, cell) },
        { key: "reason", title: "Because", text: (row) => words(row.error ?? row.reason) },
        number("lag_ms", "Lag", "warmroute_kv_last_lag_seconds", (value) => seconds(value === null ? null : value / 1000)),
        number("blocks", "Blocks", "warmroute_kv_blocks"),
        number("events", "Events", "warmroute_kv_events_total"),
        number("gaps", "Gaps", "warmroute_kv_gaps_total", whole),
        number("resyncs", "Resyncs", "warmroute_kv_resyncs_total", whole),
        number("ignored", "Ignored", "warmroute_kv_ignored_events_total"),
      ],
    });
    this.models = new Table({
      label: "Models",
      unit: "model",
      sort: "routed",
      descending: true,
      key: (row) => row.name,
      search: (row) => row.name,
      columns: [
        { key: "name", title: "Model", text: (row) => row.name },
        { key: "workers", title: "Workers", metric: "models of /fleet", number: true, value: (row) => row.workers + row.prefill, text: (row) => (row.prefill > 0 ? `${row.prefill} + ${row.workers}` : whole(row.workers)) },
        { key: "rate", title: "Requests", metric: "warmroute_requests_total", number: true, value: (row) => this.#model.modelRates(row).rate, text: (row) => perSecond(this.#model.modelRates(row).rate) },
        number("in_flight", "In flight", "warmroute_requests_in_flight", (value) => amount(value, "request")),
        { key: "ttft", title: "First token", metric: "warmroute_time_to_first_token_seconds (mean of 30 s)", number: true, value: (row) => this.#model.modelRates(row).ttft, text: (row) => seconds(this.#model.modelRates(row).ttft) },
        { key: "adapter_in_gpu", title: "In GPU at", metric: "loaded_adapters of /fleet: workers that have the LoRA adapter in their GPU, as far as known", number: true, value: (row) => row.adapter_in_gpu, text: (row) => amount(row.adapter_in_gpu, "worker", whole) },
        number("routed", "Prompt tokens", "warmroute_routed_prompt_tokens_total"),
        number("generated", "Generated tokens", "warmroute_generation_tokens_total"),
        { key: "cached", title: "From cache", metric: "warmroute_cached_prompt_tokens_total / warmroute_prompt_tokens_total", number: true, value: (row) => (row.prompt > 0 ? row.cached / row.prompt : null), text: (row) => percent(row.prompt > 0 ? row.cached / row.prompt : null) },
        { key: "expected", title: "Expected", metric: "warmroute_expected_cached_prompt_tokens_total / warmroute_routed_prompt_tokens_total", number: true, value: (row) => (row.routed > 0 ? row.expected / row.routed : null), text: (row) => percent(row.routed > 0 ? row.expected / row.routed : null) },
      ],
    });
    const ofTenant = (key, title, name, unit = "") => ({ key, title, metric: name, number: true, value: (row) => this.#model.tenantRates(row)[key], text: (row) => perSecond(this.#model.tenantRates(row)[key], unit) });
    this.tenants = new Table({
      label: "Tenants",
      unit: "tenant",
      sort: "rate",
      descending: true,
      key: (row) => row.name,
      search: (row) => row.name,
      columns: [
        { key: "name", title: "Tenant", text: (row) => row.name },
        ofTenant("rate", "Requests", "warmroute_usage_requests_total + warmroute_limit_refusals_total"),
        ofTenant("refused", "Refused (429)", "warmroute_limit_refusals_total"),
        ofTenant("uncached", "Uncached prompt", "warmroute_usage_prompt_tokens_total - warmroute_usage_cached_prompt_tokens_total", "tokens"),
        ofTenant("generated", "Generated", "warmroute_usage_generation_tokens_total", "tokens"),
        { key: "running", title: "Running", metric: "running_requests of /tenants", number: true, value: (row) => row.limits?.running_requests ?? null, text: (row) => running(row) },
        { key: "left", title: "Least left of its limits", metric: "warmroute_limit_admitted_total / warmroute_limit_refusals_total", number: true, value: (row) => tightest(row)?.share ?? null, text: (row) => left(row) },
        { key: "reasons", title: "Refused because of", text: (row) => reasons(row) },
      ],
    });
    this.limitsNote = h("p", { class: "note" });
    this.rankCount = metric(h("p", { class: "note" }), "warmroute_kv_state");
    this.boxes = {};
    const box = (id, title) => {
      const content = h("div", {});
      const element = card(id, title, content);
      element.hidden = true;
      this.boxes[id] = { element, content };
      return element;
    };
    this.kv = h(
      "section",
      { id: "kv", class: "part", "aria-labelledby": "kv-title" },
      h("h2", { id: "kv-title" }, "KV events"),
      card("kv-ranks", "Ranks", this.rankCount, this.ranks.element),
      h("div", { class: "grid three" }, box("tokenizer", "Tokenizer check"), box("tokenization", "Tokenization"), box("pairs", "Prefill / decode pairs"), box("transfers", "KV transfers")),
    );
    this.modelPart = h("section", { id: "models", class: "part", "aria-labelledby": "models-title" }, h("h2", { id: "models-title" }, "Models"), card("model-table", "Models", this.models.element));
    this.rest = h(
      "section",
      { id: "parts", class: "part", "aria-labelledby": "parts-title" },
      h("h2", { id: "parts-title" }, "Responses, gateways, replicas, queue, tenants"),
      h(
        "div",
        { class: "grid three" },
        box("responses", "Responses"),
        box("store", "Response store"),
        box("webhooks", "Webhooks"),
        box("batches", "Batches"),
        box("websockets", "WebSockets"),
        box("continuations", "Streams whose worker was lost"),
        box("gateways", "Gateways (endpoint picker)"),
        box("peers", "Replicas"),
        box("queue", "Queue"),
        box("waits", "Waits and refusals"),
        box("traces", "Traces"),
      ),
      this.tenantCard = card("tenants", "Tenants and limits", this.limitsNote, this.tenants.element),
    );
    this.elements = [this.kv, this.modelPart, this.rest];
  }

  #tree(row, cell) {
    if (!cell.firstChild) cell.append(h("span", { class: "pill" }));
    cell.firstChild.className = `pill tree ${row.state}`;
    setText(cell.firstChild, row.connected ? row.state : `${row.state}, not connected`);
  }

  render(model) {
    this.#model = model;
    const ranks = [...model.ranks.values()];
    this.ranks.rows = ranks;
    const live = ranks.filter((rank) => rank.state === "live" || rank.state === "partial").length;
    setText(this.rankCount, ranks.length === 0 ? "No worker publishes KV events: routing predicts what each worker has cached from what it was sent. See the guide on KV events." : `${whole(live)} of ${amount(ranks.length, "rank", whole)} have a tree that counts in decisions.`);
    this.ranks.element.hidden = ranks.length === 0;
    this.models.rows = [...model.models.values()];
    const { panels } = model;
    this.#box("tokenizer", panels.tokenizer?.length > 0 && panels.tokenizer, (rows) => rows.map(tokenizer));
    const tokenization = panels.tokenization;
    const isTokenized = tokenization && Object.values({ ...tokenization.prompts, ...tokenization.fallbacks }).some((value) => value > 0);
    this.#box("tokenization", isTokenized && tokenization, (it) => [h("h4", {}, "Prompts"), ...byLabel(it.prompts, "warmroute_tokenizer_prompts_total", "prompt"), h("h4", {}, "Without token ids"), ...byLabel(it.fallbacks, "warmroute_tokenization_fallbacks_total", "prompt")]);
    this.#box("pairs", panels.pairs, pairs);
    this.#box("transfers", panels.pairs, (it) => [h("h4", {}, "Phases, mean"), ...means(inOrder(it.phases), "warmroute_disaggregated_phase_seconds"), h("h4", {}, "Transfers"), ...byLabel(it.transfers, "warmroute_kv_transfers_total", "transfer"), h("h4", {}, "Prefill and decode on two workers"), ...byLabel(it.requests, "warmroute_disaggregated_requests_total", "request")]);
    const responses = panels.responses;
    const isStateful = responses?.page?.responses?.mode === "stateful";
    this.#box("responses", isStateful && responses, responsesOf);
    this.#box("store", isStateful && responses, store);
    this.#box("peers", panels.peers, peers);
    this.#box("queue", panels.queue, queue);
    this.#box("waits", panels.queue?.metrics.length > 0 && panels.queue.metrics, metrics);
    this.#tenants(panels.tenants);
    for (const [id, build] of Object.entries(side)) this.#box(id, panels[id], build);
    this.rest.hidden = this.tenantCard.hidden && [...OF_RESPONSES, ...Object.keys(side)].every((id) => this.boxes[id].element.hidden);
  }

  #tenants(panel) {
    this.tenantCard.hidden = !panel;
    if (!panel) return;
    const parts = [panel.all > panel.tenants.length ? `The ${whole(panel.tenants.length)} of ${whole(panel.all)} tenants that sent the most.` : ""];
    if (panel.without_store) parts.push("Redis does not answer: this replica holds the limits alone (limits.on_store_failure).");
    if (!panel.has_limits) parts.push("No tenant has limits.");
    if (panel.dropped > 0) parts.push(`${amount(panel.dropped, "charge", whole)} could not be settled.`);
    setText(this.limitsNote, parts.filter(Boolean).join(" "));
    this.limitsNote.className = panel.without_store || panel.dropped > 0 ? "problem" : "note";
    metric(this.limitsNote, "warmroute_limits_without_store", "warmroute_limit_settlements_dropped_total");
    this.tenants.rows = panel.tenants;
  }

  /** Builds a box anew when its data has changed. */
  #box(id, data, build) {
    const { element, content } = this.boxes[id];
    element.hidden = !data;
    if (!data) return;
    const key = JSON.stringify(data);
    if (this.#shown.get(id) === key) return;
    this.#shown.set(id, key);
    content.replaceChildren(...build(data));
  }
}

function tokenizer(row) {
  return h(
    "div",
    { class: `notice ${row.mismatch ? "bad" : ""}` },
    h("p", {}, h("b", {}, row.model), ` ${words(row.prompts)}: `, metric(h("span", { class: `pill ${row.mismatch ? "down" : "up"}` }, row.mismatch ? "mismatch" : "tokens agree"), "warmroute_tokenizer_mismatch")),
    facts(line("Confirmed", percent(row.confirmed_ratio), "warmroute_tokenizer_check_confirmed_ratio"), line("Checks", amount(Object.values(row.checks).reduce((sum, value) => sum + value, 0), "prompt"), "warmroute_tokenizer_checks_total"), row.untrusted > 0 ? line("Not trusted", amount(row.untrusted, "worker", whole), "tokenizer_check of /kv") : []),
  );
}

/** The limit of which a tenant has the least left. */
function tightest(row) {
  const limits = (row.limits?.limits ?? []).map((limit) => ({ ...limit, share: limit.burst > 0 ? limit.remaining / limit.burst : 0 }));
  return limits.sort((one, other) => one.share - other.share)[0];
}

function left(row) {
  const limit = tightest(row);
  return limit ? `${percent(limit.share)} of ${count(limit.per_minute)} ${words(limit.limit).replace(/ per minute$/, "")}/min${limit.model ? ` of ${limit.model}` : ""}` : "–";
}

function running(row) {
  if (!row.limits) return "–";
  const most = row.limits.max_concurrent_requests;
  return most ? `${whole(row.limits.running_requests)} of ${amount(most, "request", whole)}` : amount(row.limits.running_requests, "request", whole);
}

function reasons(row) {
  const refused = Object.entries(row.counts.refused).filter(([, value]) => value > 0);
  return refused.map(([reason, value]) => `${words(reason)} ${count(value)}`).join(", ");
}

/** The models whose workers have the most to do, each with what waits for them. */
function queue({ models }) {
  const shown = models.filter((it, index) => it.waiting > 0 || index < 4).slice(0, 12);
  return shown.map((it) => {
    const waiting = it.classes.filter((of) => of.requests > 0);
    const classes = waiting.map((of) => h("li", {}, h("span", {}, `class ${of.class}`), metric(h("span", { class: "quiet" }, `${amount(of.tokens, "token")}, the oldest waits for ${seconds(of.oldest_ms / 1000)}`), "warmroute_queue_tokens"), metric(h("b", { class: "value" }, amount(of.requests, "request", whole)), "warmroute_queue_requests")));
    return h(
      "div",
      { class: "notice" },
      h("p", {}, h("b", {}, it.model), " ", metric(h("span", { class: `pill ${it.saturation >= 1 ? "held" : ""}` }, `saturation ${it.saturation.toFixed(2)}`), "warmroute_saturation_ratio"), " ", metric(h("span", {}, `${amount(it.waiting, "request", whole)} waiting here, ${amount(it.queued_tokens, "token")} queued at ${amount(it.workers, "worker", whole)}`), "warmroute_queue_requests", "warmroute_worker_queued_tokens")),
      classes.length > 0 ? h("ul", { class: "tally" }, classes) : null,
    );
  });
}

/** The phases as they follow each other. */
function inOrder(phases) {
  const order = ["queue", "prefill", "dispatch", "decode"];
  return Object.fromEntries(Object.entries(phases).sort(([one], [other]) => order.indexOf(one) - order.indexOf(other)));
}

function pairs({ pairs: it }) {
  const broken = it.incompatible.map((reason) => h("li", { title: "pairs.incompatible of /fleet" }, h("b", {}, whole(reason.count)), ` ${reason.message}: `, h("span", { class: "quiet" }, reason.examples.map((pair) => pair.join(" → ")).join(", "))));
  return [
    facts(line("Connector", it.connector), line("Up", amount(it.count, "pair", whole), "pairs.count of /fleet"), line("Can transfer, as far as known", amount(it.unverified, "pair", whole), "pairs.unverified of /fleet: check --live --transfer tries them")),
    broken.length > 0 ? h("ul", { class: "plainlist" }, broken) : null,
    it.unpaired.length > 0 ? h("p", { class: "problem" }, `Without a partner: ${it.unpaired.slice(0, 10).join(", ")}${it.unpaired.length > 10 ? " …" : ""}`) : null,
  ].filter((part) => part !== null);
}

function responsesOf({ page }) {
  const { responses } = page;
  const { background } = responses;
  const owners = page.store?.details?.owners ?? [];
  return [
    facts(
      line("In progress", amount(responses.in_flight, "response", whole), "warmroute_responses_in_flight"),
      line("In the background", `${amount(background.running, "run", whole)}${background.queued > 0 ? `, ${whole(background.queued)} of them queued` : ""}`, "warmroute_background_running"),
      line("Left by a lost replica", amount(page.store?.details?.orphans ?? 0, "run", whole), "store.details.orphans of /responses / warmroute_background_orphans_total"),
      line("This replica runs them as", `${background.owner}${background.lease_held ? "" : ", but has lost its lease"}`, "background.owner of /responses"),
      line("Run by", Array.isArray(owners) ? amount(owners.length, "replica", whole) : "–", "store.details.owners of /responses"),
    ),
    h("h4", {}, "Finished"),
    ...byLabel(responses.finished, "warmroute_responses_finished_total", "response"),
  ];
}

/** Operations of the store whose names say little. */
const OPERATIONS = {
  orphans: "find runs of lost replicas",
  untracked: "find runs that it lost track of",
  take_over: "take over a run",
  check_ownership: "check who runs a response",
};

function store({ page, operations }) {
  const { is_up: isUp, reason } = page.health;
  return [facts(line("Kind", page.store?.kind ?? "–"), line("State", page.error ?? (isUp ? "up" : `down: ${reason}`), "warmroute_store_circuit_breaker_state")), h("h4", {}, "Operations, mean"), ...means(operations, "warmroute_store_operation_duration_seconds", OPERATIONS)];
}

function peers({ replica, peers: rows }) {
  const items = rows.map((peer) =>
    h(
      "li",
      {},
      h("b", {}, peer.name ?? peer.address ?? "unknown"),
      " ",
      metric(h("span", { class: `pill ${peer.state === "connected" ? "up" : "down"}` }, peer.is_draining ? "draining" : peer.state), "warmroute_peers"),
      " ",
      metric(h("span", { class: "quiet" }, peer.lag_ms === undefined ? (peer.error ?? "") : `lag ${whole(peer.lag_ms)} ms`), "warmroute_peer_lag_seconds"),
    ),
  );
  return [facts(line("This replica", replica.name), replica.is_alone ? line("Alone", "others are expected, and none is connected") : []), items.length > 0 ? h("ul", { class: "plainlist" }, items) : empty("No other replica.")];
}

/** Metrics of a part as they are. */
function metrics(rows) {
  const body = rows.map((row) => {
    const value = row.kind === "histogram" ? `${count(row.value)} × ${seconds(row.value > 0 ? row.sum / row.value : null)}` : count(row.value);
    const title = row.metric.replace(/^warmroute_/, "").replace(/_total$/, "");
    return h("tr", { title: row.metric, "data-metric": row.metric }, h("th", { scope: "row" }, words(title)), h("td", {}, row.labels), h("td", { class: "number" }, value));
  });
  return [scroller("Metrics", h("table", {}, h("caption", { class: "unseen" }, "Metrics"), h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "What"), h("th", { scope: "col" }, "Of"), h("th", { scope: "col", class: "number" }, "Value"))), h("tbody", {}, body)))];
}
