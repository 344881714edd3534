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
  const sorted = [...workers].sort((a, b) => (place(b.worker, b.rank) === chosen) - (place(a.worker, a.rank) === chosen) || b.is_usable - a.is_usable || a.cost - b.cost);
  const highest = Math.max(1, ...sorted.map((it) => it.cost));
  const hasSpeeds = sorted.some((it) => Math.abs(it.time_weight - 1) > 0.005);
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
      metric(h("td", { class: "number" }, count(it.decode_tokens)), "warmroute_worker_decode_tokens"),
      metric(h("td", { class: "number" }, whole(it.requests)), "warmroute_worker_requests"),
      hasSpeeds ? metric(h("td", { class: "number" }, `× ${it.time_weight.toFixed(2)}`), "time_weight of /explain: what its queued and new tokens count; 1 is the mean speed of the model’s workers") : null,
      h("td", {}, costBar(it, highest)),
    );
  });
  const titles = [
    ["Worker", ""],
    ["Cached prefix", ""],
    ["New", "number"],
    ["Queued", "number"],
    ["Decoding", "number"],
    ["In flight", "number"],
    ...(hasSpeeds ? [["Time weight", "number"]] : []),
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

/** The cost's terms side by side: what waits, what is to be computed, what decodes, a LoRA adapter to load. */
function costBar(it, highest) {
  const { queued, new: fresh, decode, adapter } = it.cost_terms;
  const parts = [
    ["queued", queued],
    ["new", fresh],
    ["decode", decode],
    ["adapter", adapter],
  ].map(([name, value]) => {
    const part = h("i", { class: name });
    setWidth(part, value / highest);
    return part;
  });
  const load = adapter > 0 ? ` + adapter to load ${whole(adapter)}` : "";
  const text = `queued ${whole(queued)} + new ${whole(fresh)} + decode ${whole(decode)}${load}`;
  return h("span", { class: "meter", title: text }, h("span", { class: "track cost" }, parts), h("span", { class: "value" }, count(it.cost)));
}
