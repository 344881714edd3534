// An explanation of one decision: the choice in a sentence, then the best and the worst candidates with their costs.

import { empty, h, metric, scroller, setWidth } from "./dom.js";
import { amount, percent, seconds, whole, words } from "./format.js";

const QUEUED = "warmroute_worker_queued_tokens";
/** The cheapest and the most expensive candidates that are shown, so many of each. */
const EACH_END = 10;

/** `explanation`: the answer of /explain or of /dashboard/decision. */
export function explained(explanation) {
  const { model, policy, prompt_tokens: tokens, chosen, reason, disaggregation, excluded } = explanation;
  const head = chosen ? [h("b", {}, place(chosen, explanation.chosen_rank)), " ", h("span", { class: "whole" }, `by ${words(policy)}: `, h("span", { class: "pill" }, words(reason ?? "")))] : ["No worker can take this request."];
  const facts = h(
    "p",
    { class: "quiet" },
    metric(h("span", {}, amount(tokens, "prompt token", whole)), "warmroute_routed_prompt_tokens_total"),
    ` of ${model}; `,
    explanation.tokens_known ? "the router knows their ids" : "estimated, looked up by text",
    explanation.name ? `, asked for as ${explanation.name.requested} (${words(explanation.name.reason)})` : "",
    explanation.queue_ms > 0 ? `; it waited ${seconds(explanation.queue_ms / 1000)} for a worker with room` : "",
    explanation.queue?.would_wait ? `; it would wait behind ${amount(explanation.queue.waiting, "request", whole)}` : "",
    explanation.attempt > 1 ? `; attempt ${explanation.attempt}` : "",
    explanation.request_id ? ["; request ", h("span", { class: "whole" }, explanation.request_id)] : "",
  );
  const parts = [h("p", { class: "choice" }, head), explanation.explanation ? h("p", { class: "why" }, `${explanation.explanation}.`) : null, facts];
  if (disaggregation) {
    parts.push(h("h4", {}, disaggregation.is_disaggregated ? "Prefill worker" : "No prefill worker"), h("p", { class: "why" }, `${disaggregation.explanation}.`));
    if (disaggregation.is_disaggregated) parts.push(candidates(disaggregation.workers, place(disaggregation.prefill, disaggregation.prefill_rank), tokens, "Prefill workers", disaggregation.candidates));
    parts.push(h("h4", {}, "Decode worker"));
  }
  parts.push(candidates(explanation.workers, place(chosen, explanation.chosen_rank), tokens, "Candidates", explanation.candidates));
  if (excluded?.length > 0) {
    const shown = excluded.slice(0, 20).map((it) => h("li", {}, h("b", {}, it.worker), ` ${it.reason}`));
    parts.push(h("h4", {}, "Workers that take no requests"), h("ul", { class: "plainlist" }, shown, excluded.length > 20 ? h("li", { class: "quiet" }, `and ${amount(excluded.length - 20, "worker", whole)} more`) : null));
  }
  return h("div", { class: "explained" }, parts.filter((part) => part !== null));
}

/** A worker's name, with the data-parallel rank if requests are pinned to it. */
function place(worker, rank) {
  return rank === undefined ? worker : `${worker} rank ${rank}`;
}

function candidates(workers, chosen, tokens, title, all) {
  if (workers.length === 0) return empty("There are no candidates.");
  const { parts, between, isWhole } = ends(workers, chosen, all ?? workers.length);
  const highest = Math.max(1, ...parts.flat().map((it) => it.cost_ms));
  const row = (it) => {
    const share = tokens > 0 ? it.cached_tokens / tokens : 0;
    const name = place(it.worker, it.rank);
    const isChosen = name === chosen;
    return h(
      "tr",
      { class: `${isChosen ? "chosen" : ""}${it.is_usable ? "" : " unusable"}` },
      h("th", { scope: "row" }, isChosen ? "✓ " : "", name, isChosen ? h("span", { class: "unseen" }, " (chosen)") : null, it.is_usable ? null : h("span", { class: "problem" }, ` ${it.unusable_reason ?? "not usable"}`)),
      h("td", {}, cachedBar(share, it)),
      metric(h("td", { class: "number" }, amount(it.new_tokens, "token")), "tokens to compute; those in CPU memory or on disk count in part"),
      metric(h("td", { class: "number" }, amount(it.queued_tokens, "token")), `${QUEUED}${others(it.load)}`),
      metric(h("td", { class: "number" }, amount(it.context_tokens, "token")), "warmroute_worker_context_tokens"),
      metric(h("td", { class: "number", title: `${whole(it.slots)} slots` }, it.waiting > 0 ? `${amount(it.requests, "request", whole)} (${whole(it.waiting)} wait)` : amount(it.requests, "request", whole)), "warmroute_worker_requests"),
      metric(h("td", { class: "number", title: `${whole(it.speed.prompt_tokens_per_second)} prompt tokens/s, ${it.speed.step_ms.toFixed(1)} ms a step, learnt from ${amount(it.speed.samples, "observation", whole)} of its own` }, seconds(it.expected_first_token_ms / 1000)), "expected_first_token_ms of /explain"),
      metric(h("td", { class: "number" }, seconds(it.expected_end_ms / 1000)), "expected_end_ms of /explain"),
      h("td", {}, costBar(it, highest)),
    );
  };
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
  const gap = h("tr", { class: "gap" }, h("td", { colspan: titles.length }, `${amount(between, "candidate", whole)} between these`));
  const [best, worst] = parts;
  const rows = [...best.map(row), ...(between > 0 ? [gap] : []), ...worst.map(row)];
  const caption = isWhole ? title : `${title}: the best ${EACH_END} and the worst ${EACH_END} of ${whole(all)}, by cost`;
  const legend = TERMS.filter(([name]) => parts.flat().some((it) => it.cost_terms_ms[name] >= 0.5)).map(([, kind, text]) => h("li", {}, h("i", { class: `swatch block ${kind}`, "aria-hidden": "true" }), text));
  return h(
    "div",
    {},
    isWhole ? null : h("p", { class: "note above" }, caption),
    scroller(caption, h("table", { class: "candidates" }, h("caption", { class: "unseen" }, caption), h("thead", {}, h("tr", {}, titles.map(([text, kind]) => h("th", { scope: "col", class: kind }, text)))), h("tbody", {}, rows))),
    legend.length > 0 ? h("ul", { class: "legend below", "aria-label": "What the cost is of" }, h("li", {}, "Cost:"), legend) : null,
  );
}

/**
 * The candidates that are shown: the chosen one first, then the best, and apart from them the worst. Also the one with the
 * longest cached prefix, where that is neither. `all`: how many there are, of which a recorded decision has some.
 */
function ends(workers, chosen, all) {
  const sorted = [...workers].sort((a, b) => b.is_usable - a.is_usable || a.cost_ms - b.cost_ms);
  const isChosen = (it) => place(it.worker, it.rank) === chosen;
  const first = (list) => [...list].sort((a, b) => isChosen(b) - isChosen(a));
  if (all <= 2 * EACH_END || sorted.length < 2 * EACH_END) return { parts: [first(sorted), []], between: all - sorted.length, isWhole: true };
  const middle = sorted.slice(EACH_END, -EACH_END);
  const longest = sorted.reduce((most, it) => (it.cached_tokens > most.cached_tokens ? it : most));
  const extra = middle.filter((it) => isChosen(it) || it === longest);
  const worst = sorted.slice(-EACH_END);
  const best = [...sorted.slice(0, EACH_END), ...extra, ...worst.filter(isChosen)];
  const parts = [first(best), worst.filter((it) => !isChosen(it))];
  return { parts, between: all - parts.flat().length, isWhole: false };
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
  return h("span", { class: "meter", title: `${amount(it.cached_tokens, "token", whole)}${tiers}, ${it.known_by}` }, h("span", { class: "track cached" }, fill), h("span", { class: "value" }, `${amount(it.cached_tokens, "token")} · ${percent(share)}`), it.known_by === "exact" ? null : h("span", { class: "quiet" }, it.known_by));
}

/**
 * Of each term of the cost: its name in the answer, its colour, what it is. Prompt tokens, answers and the rest have a
 * colour each; what others wait for is paler.
 */
const TERMS = [
  ["wait", "wait", "to wait for prompts before it"],
  ["compute", "compute", "to compute its prompt"],
  ["delay", "delay", "delay of other requests"],
  ["answer", "answer", "answers slowed"],
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
  const shown = terms.filter(({ value }) => value >= 0.5).map(({ text, value }) => `${text} ${seconds(value / 1000)}`);
  return h("span", { class: "meter", title: shown.join(" + ") || "nothing" }, h("span", { class: "track cost" }, parts), h("span", { class: "value" }, seconds(it.cost_ms / 1000)));
}
