// An explanation of one decision: the choice in a sentence, then every candidate with its cost.

import { empty, h, metric, scroller, setWidth } from "./dom.js";
import { count, percent, seconds, whole, words } from "./format.js";

const QUEUED = "warmroute_worker_queued_tokens";

/** `explanation`: the answer of /explain or of /dashboard/decision. */
export function explained(explanation) {
  const { model, policy, prompt_tokens: tokens, chosen, reason, disaggregation, excluded } = explanation;
  const head = chosen ? [h("b", {}, place(chosen, explanation.chosen_rank)), ` by ${words(policy)}: `, h("span", { class: "pill" }, words(reason ?? ""))] : ["No worker can take this request."];
  const facts = h(
    "p",
    { class: "quiet" },
    metric(h("span", {}, `${whole(tokens)} prompt tokens`), "warmroute_routed_prompt_tokens_total"),
    ` of ${model}; `,
    explanation.tokens_known ? "the router knows their ids" : "estimated, looked up by text",
    explanation.name ? `, asked for as ${explanation.name.requested} (${words(explanation.name.reason)})` : "",
    explanation.queue_ms > 0 ? `; it waited ${seconds(explanation.queue_ms / 1000)} for a worker with room` : "",
    explanation.queue?.would_wait ? `; it would wait: ${whole(explanation.queue.waiting)} wait before it` : "",
    explanation.attempt > 1 ? `; attempt ${explanation.attempt}` : "",
    explanation.request_id ? `; request ${explanation.request_id}` : "",
  );
  const parts = [h("p", { class: "choice" }, head), explanation.explanation ? h("p", { class: "why" }, `${explanation.explanation}.`) : null, facts];
  if (disaggregation) {
    parts.push(h("h4", {}, disaggregation.is_disaggregated ? "Prefill worker" : "No prefill worker"), h("p", { class: "why" }, `${disaggregation.explanation}.`));
    if (disaggregation.is_disaggregated) parts.push(candidates(disaggregation.workers, place(disaggregation.prefill), tokens, "Prefill workers"));
    parts.push(h("h4", {}, "Decode worker"));
  }
  parts.push(candidates(explanation.workers, place(chosen, explanation.chosen_rank), tokens, "Candidates", explanation.candidates));
  if (excluded?.length > 0) {
    const shown = excluded.slice(0, 20).map((it) => h("li", {}, h("b", {}, it.worker), ` ${it.reason}`));
    parts.push(h("h4", {}, "Workers that take no requests"), h("ul", { class: "plainlist" }, shown, excluded.length > 20 ? h("li", { class: "quiet" }, `and ${excluded.length - 20} more`) : null));
  }
  return h("div", { class: "explained" }, parts.filter((part) => part !== null));
}

/** A worker's name, with the data-parallel rank if requests are pinned to it. */
function place(worker, rank) {
  return rank === undefined ? worker : `${worker} rank ${rank}`;
}

function candidates(workers, chosen, tokens, title, all) {
  if (workers.length === 0) return empty("There are no candidates.");
  const sorted = [...workers].sort((a, b) => (place(b.worker, b.rank) === chosen) - (place(a.worker, a.rank) === chosen) || b.is_usable - a.is_usable || a.cost_ms - b.cost_ms);
  const highest = Math.max(1, ...sorted.map((it) => it.cost_ms));
  const rows = sorted.map((it) => {
    const share = tokens > 0 ? it.cached_tokens / tokens : 0;
    const name = place(it.worker, it.rank);
    const isChosen = name === chosen;
    return h(
      "tr",
      { class: `${isChosen ? "chosen" : ""}${it.is_usable ? "" : " unusable"}` },
      h("th", { scope: "row" }, isChosen ? "✓ " : "", name, isChosen ? h("span", { class: "unseen" }, " (chosen)") : null, it.is_usable ? null : h("span", { class: "problem" }, ` ${it.unusable_reason ?? "not usable"}`)),
      h("td", {}, cachedBar(share, it)),
      metric(h("td", { class: "number" }, count(it.new_tokens)), "tokens to compute; those in CPU memory or on disk count in part"),
      metric(h("td", { class: "number" }, count(it.queued_tokens)), `${QUEUED}${others(it.load)}`),
      metric(h("td", { class: "number" }, count(it.context_tokens)), "warmroute_worker_context_tokens"),
      metric(h("td", { class: "number", title: `${whole(it.slots)} slots` }, it.waiting > 0 ? `${whole(it.requests)} (${whole(it.waiting)} wait)` : whole(it.requests)), "warmroute_worker_requests"),
      metric(h("td", { class: "number", title: `${whole(it.speed.prompt_tokens_per_second)} prompt tokens/s, ${it.speed.step_ms.toFixed(1)} ms a step, learnt from ${whole(it.speed.samples)} observations of its own` }, seconds(it.expected_first_token_ms / 1000)), "expected_first_token_ms of /explain"),
      metric(h("td", { class: "number" }, seconds(it.expected_end_ms / 1000)), "expected_end_ms of /explain"),
      h("td", {}, costBar(it, highest)),
    );
  });
  const titles = [
    ["Worker", ""],
    ["Cached prefix", ""],
    ["New", "number"],
    ["Queued", "number"],
    ["Context", "number"],
    ["In flight", "number"],
    ["First token", "number"],
    ["End", "number"],
    ["Cost", ""],
  ];
  const caption = all > workers.length ? `${title}: the cheapest ${workers.length} of ${all}` : title;
  return scroller(
    caption,
    h("table", { class: "candidates" }, h("caption", { class: all > workers.length ? "note" : "unseen" }, caption), h("thead", {}, h("tr", {}, titles.map(([text, kind]) => h("th", { scope: "col", class: kind }, text)))), h("tbody", {}, rows)),
  );
}

/** Whose load it is, besides this router's. */
function others(load) {
  const peers = load?.peers?.queued_tokens ? `; of other replicas ${whole(load.peers.queued_tokens)}` : "";
  return load?.foreign_requests ? `${peers}; requests of others ${whole(load.foreign_requests)}` : peers;
}

function cachedBar(share, it) {
  const fill = h("i");
  setWidth(fill, share);
  const tiers = it.cached.cpu + it.cached.disk > 0 ? ` (GPU ${whole(it.cached.gpu)}, CPU ${whole(it.cached.cpu)}, disk ${whole(it.cached.disk)})` : "";
  return h("span", { class: "meter", title: `${whole(it.cached_tokens)} tokens${tiers}, ${it.known_by}` }, h("span", { class: "track cached" }, fill), h("span", { class: "value" }, `${count(it.cached_tokens)} · ${percent(share)}`), it.known_by === "exact" ? null : h("span", { class: "quiet" }, it.known_by));
}

/** Of each term of the cost: its name in the answer, its colour, what it is. */
const TERMS = [
  ["wait", "queued", "to wait"],
  ["compute", "new", "to compute"],
  ["delay", "delay", "delay of others"],
  ["answer", "decode", "answers slowed"],
  ["slot", "slot", "until a slot is free"],
  ["adapter", "adapter", "to load the adapter"],
];

/** The cost's terms side by side: what the request takes itself, and what it takes from others. */
function costBar(it, highest) {
  const terms = TERMS.map(([name, kind, text]) => ({ kind, text, value: it.cost_terms_ms[name] }));
  const parts = terms.map(({ kind, value }) => {
    const part = h("i", { class: kind });
    setWidth(part, value / highest);
    return part;
  });
  const shown = terms.filter(({ value }) => value >= 0.5).map(({ text, value }) => `${text} ${whole(Math.round(value))} ms`);
  return h("span", { class: "meter", title: shown.join(" + ") || "nothing" }, h("span", { class: "track cost" }, parts), h("span", { class: "value" }, `${count(Math.round(it.cost_ms))} ms`));
}
