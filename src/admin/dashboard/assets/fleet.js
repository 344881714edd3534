// The workers: a map with a cell for each, a table, and the details of one.

import { card, empty, h, metric, scroller, setAttribute, setText, setWidth } from "./dom.js";
import { amount, bytes, count, percent, perSecond, seconds, whole, words } from "./format.js";
import { ask } from "./stream.js";
import { Table } from "./table.js";

/** From this number on, idle workers are one line of the table. */
const MIN_FOLDED = 5;
/** Of each colour of the map, what it means: the cached share has its own, so have latencies; the rest is an amount. */
const RAMPS = { cached: "of-cached", ttft: "of-latency", itl: "of-latency" };
/** Above this number the map's cells have no text. */
const MAX_CARDS = 24;
/** Up to this number they are larger. */
const MAX_ROOMY = 200;
const NAMES = new Intl.Collator("en", { numeric: true });

/** What stands out of a worker's condition. */
export function stateOf(worker) {
  if (worker.health === "down") return "down";
  if (worker.breaker !== "closed") return "breaker";
  if (worker.draining) return "draining";
  if (worker.health !== "up") return "unknown";
  return "up";
}

const STATES = { up: "up", down: "down", breaker: "circuit breaker not closed", draining: "draining", unknown: "not probed yet" };

/** The state of one worker in words: a half-open circuit breaker lets a request try. */
function stateText(worker) {
  const state = stateOf(worker);
  return state === "breaker" ? `breaker ${words(worker.breaker).replace("half open", "half-open")}` : STATES[state];
}

/** The requests pinned to each dp rank, of a worker that has several. */
function rankText(worker) {
  if (!worker.rank_load) return "";
  return `${worker.rank_load.length} ranks: ${worker.rank_load.map(([requests]) => whole(requests)).join(" · ")} requests`;
}

function runningText(worker) {
  return worker.running === null ? "–" : `${whole(worker.running)} / ${amount(worker.waiting, "request", whole)}`;
}

/** Requests and queued tokens at a worker, of this router and its peers. */
const requestsOf = (worker) => worker.requests + worker.peer_requests;
const queuedOf = (worker) => worker.queued + worker.peer_queued;

/** Why a worker has no KV events. */
function noEvents(events) {
  const because = events?.none_because ?? (events?.ranks > 0 ? "its publishers are not followed yet" : "it has no publisher");
  return metric(h("p", { class: "reason" }, h("b", {}, "No KV events: "), `${because}. Routing predicts its cache from what it was sent.`), "events.none_because of /fleet");
}

/** Why trees of a worker are not live. */
function notLive(ranks) {
  const reasons = ranks
    .filter((rank) => !rank.connected || rank.state !== "live")
    .map((rank) => `rank ${rank.rank} is ${rank.state}: ${rank.connected ? (rank.replay_error ?? rank.decode_error ?? words(rank.reason)) : `not connected, ${rank.disconnect_reason ?? "no connection yet"}`}`);
  if (reasons.length === 0) return [];
  const more = reasons.length > 4 ? `; ${whole(reasons.length - 4)} more` : "";
  return [metric(h("p", { class: "reason" }, h("b", {}, "KV events: "), `${reasons.slice(0, 4).join("; ")}${more}.`), "ranks of /kv")];
}

/** Details of the chosen worker are read again after this long. */
const DETAIL_MS = 2_000;

export class Fleet {
  #model = null;
  #cells = new Map();
  #selected = null;
  #filter = "all";
  #shade = "cached";
  #slow = [];
  #shown = "";
  #timer = 0;

  constructor() {
    this.slowNotice = h("p", { id: "slow-workers", class: "attention", role: "status" });
    this.counts = h("div", { class: "chips", role: "group", "aria-label": "Show workers by state" });
    this.map = h("div", { class: "map" });
    const shades = { cached: "cached share", queued: "queued tokens", kv_usage: "KV cache used", requests: "requests", ttft: "time to first token", itl: "time between tokens", prefill_rate: "prompt tokens computed a second" };
    const choice = h(
      "select",
      { "aria-label": "Colour of the map", on: { change: (event) => this.#setShade(event.target.value) } },
      Object.entries(shades).map(([value, text]) => h("option", { value }, text)),
    );
    this.ramp = h("span", { class: "ramp", "aria-hidden": "true" });
    this.legend = h("p", { class: "note" }, "Colour: ", choice, this.ramp, h("span", { class: "quiet" }, "low to high; a crossed cell gets no requests."));
    const number = (key, title, name, value, format) => ({ key, title, metric: name, number: true, value, text: (row) => format(value(row)) });
    const requests = (value) => amount(value, "request", whole);
    const tokens = (value) => amount(value, "token");
    this.table = new Table({
      label: "Workers",
      unit: "worker",
      alwaysSearch: true,
      // What happens comes first: the most loaded, then what was busy lately.
      sort: "requests",
      descending: true,
      ties: [queuedOf, (row) => row.running, (row) => this.#model.workerRates(row).rate, (row) => stateOf(row) !== "up"],
      folds: { least: MIN_FOLDED, isOn: () => this.#filter === "all", isIdle: (row) => this.#isIdle(row) },
      key: (row) => row.name,
      search: (row) => `${row.name} ${row.role} ${row.model ?? ""} ${stateOf(row)} ${STATES[stateOf(row)]} ${stateText(row)}`,
      state: (row) => `${stateOf(row)}${row.name === this.#selected ? " selected" : ""}`,
      onSelect: (row) => this.select(row.name),
      columns: [
        { key: "name", title: "Worker", text: (row) => row.name },
        { key: "state", title: "State", metric: "warmroute_worker_up / warmroute_circuit_breaker_state / warmroute_worker_draining", value: stateOf, text: stateText, cell: (row, cell) => this.#stateCell(row, cell) },
        { key: "role", title: "Role", metric: "role and ranks of /fleet: a worker with several data-parallel ranks is as many candidates", text: (row) => (row.rank_load ? `${row.role}, ${row.rank_load.length} ranks` : row.role) },
        number("requests", "In flight", "warmroute_worker_requests", requestsOf, requests),
        number("rate", "Requests", "warmroute_requests_total", (row) => this.#model.workerRates(row).rate, perSecond),
        number("queued", "Queued", "warmroute_worker_queued_tokens", queuedOf, tokens),
        number("decode", "Context", "warmroute_worker_context_tokens", (row) => row.decode, tokens),
        { ...number("waiting", "Engine run / wait", "warmroute_worker_reported_running / warmroute_worker_reported_waiting", (row) => row.waiting), text: runningText },
        number("kv_usage", "KV used", "vllm:kv_cache_usage_perc (of the engine)", (row) => (row.kv_usage === null ? null : row.kv_usage / 1000), percent),
        { ...number("ttft", "First token", "warmroute_time_to_first_token_seconds (mean of 30 s)", (row) => this.#model.workerRates(row).ttft, seconds), cell: (row, cell) => this.#latencyCell(row, cell, "ttft") },
        { ...number("itl", "Between tokens", "warmroute_inter_token_latency_seconds (mean of 30 s)", (row) => this.#model.workerRates(row).itl, seconds), cell: (row, cell) => this.#latencyCell(row, cell, "itl") },
        number("prefill_rate", "Computes", "warmroute_worker_prefill_tokens_per_second (prompt tokens, as learnt or configured)", (row) => row.prefill_rate, (value) => perSecond(value, "tokens")),
        number("cached", "From cache", "warmroute_worker_cached_prompt_tokens_total / warmroute_worker_prompt_tokens_total", (row) => this.#model.workerRates(row).recent, percent),
      ],
    });
    const waiting = this.table.search;
    waiting.id = "fleet-search";
    this.detail = h("div", { id: "worker-detail", class: "detail", "aria-live": "polite" }, empty("Choose a worker to see its ranks, models and errors."));
    this.element = h(
      "section",
      { id: "fleet", class: "part", "aria-labelledby": "fleet-title" },
      h("h2", { id: "fleet-title" }, "Fleet"),
      this.slowNotice,
      h("div", { class: "grid fleet" }, card("fleet-map", "Map", this.counts, this.map, this.legend), card("worker", "Worker", this.detail)),
      card("fleet-table", "Workers", this.table.element),
    );
  }

  #setShade(shade) {
    this.#shade = shade;
    this.render(this.#model);
  }

  /** Up, without requests here or in its engine, and without any in the last half minute. */
  #isIdle(worker) {
    const isBusy = requestsOf(worker) + queuedOf(worker) + (worker.running ?? 0) + (worker.waiting ?? 0) + (this.#model.workerRates(worker).rate ?? 0) > 0;
    return !isBusy && stateOf(worker) === "up" && worker.name !== this.#selected;
  }

  #latencyCell(row, cell, what) {
    setText(cell, seconds(this.#model.workerRates(row)[what]));
    cell.classList.toggle("slow", this.#slow.some((it) => it.name === row.name && it.what === what));
  }

  /** Says which workers are slow: the first question about a slow fleet. */
  #notice(model) {
    this.#slow = model.slowWorkers();
    const names = { ttft: "first tokens take", itl: "the time between tokens is" };
    const text = this.#slow.slice(0, 3).map((it) => `${it.name}: ${names[it.what]} ${seconds(it.value)}, the fleet’s median is ${seconds(it.usual)}`);
    const more = this.#slow.length > 3 ? `; ${whole(this.#slow.length - 3)} more` : "";
    this.slowNotice.hidden = text.length === 0;
    setText(this.slowNotice, text.length === 0 ? "" : `Slow: ${text.join("; ")}${more}`);
  }

  #stateCell(row, cell) {
    if (!cell.firstChild) cell.append(h("span", { class: "pill" }));
    const pill = cell.firstChild;
    const state = stateOf(row);
    setAttribute(pill, "class", `pill ${state}`);
    setText(pill, stateText(row));
  }

  render(model) {
    if (!model) return;
    this.#model = model;
    this.#notice(model);
    const workers = [...model.workers.values()];
    const tally = {};
    for (const worker of workers) tally[stateOf(worker)] = (tally[stateOf(worker)] ?? 0) + 1;
    this.#chips(workers.length, tally);
    const shown = this.#filter === "all" ? workers : workers.filter((worker) => stateOf(worker) === this.#filter);
    this.#map(shown);
    this.table.rows = shown;
  }

  #chips(all, tally) {
    const chips = [["all", all], ...Object.entries(tally).sort()];
    const key = JSON.stringify([chips, this.#filter]);
    if (this.chipKey === key) return;
    this.chipKey = key;
    const focused = document.activeElement?.dataset?.state;
    const make = ([state, number]) =>
      h(
        "button",
        {
          type: "button",
          class: `chip ${state}`,
          title: "health, circuit_breaker and is_draining of /fleet",
          "data-state": state,
          "aria-pressed": String(state === this.#filter),
          on: {
            click: () => {
              this.#filter = state;
              this.render(this.#model);
            },
          },
        },
        `${state === "all" ? "all" : STATES[state]} `,
        h("b", {}, whole(number)),
      );
    this.counts.replaceChildren(...chips.map(make));
    if (focused) this.counts.querySelector(`[data-state="${focused}"]`)?.focus();
  }

  #shadeOf(worker, most) {
    if (this.#shade === "cached") return this.#model.workerRates(worker).recent ?? 0;
    if (this.#shade === "kv_usage") return (worker.kv_usage ?? 0) / 1000;
    return most > 0 ? this.#amount(worker) / most : 0;
  }

  #amount(worker) {
    if (this.#shade === "ttft" || this.#shade === "itl") return this.#model.workerRates(worker)[this.#shade] ?? 0;
    if (this.#shade === "prefill_rate") return worker.prefill_rate ?? 0;
    return this.#shade === "queued" ? queuedOf(worker) : requestsOf(worker);
  }

  #map(workers) {
    const isSmall = workers.length <= MAX_CARDS;
    setAttribute(this.map, "class", isSmall ? "map cards" : `map ${workers.length <= MAX_ROOMY ? "roomy " : ""}${RAMPS[this.#shade] ?? "of-load"}`);
    // Cards have their numbers as text, and no colour.
    this.legend.hidden = isSmall;
    setAttribute(this.ramp, "class", `ramp ${RAMPS[this.#shade] ?? "of-load"}`);
    const least = this.#shade === "ttft" || this.#shade === "itl" ? 0 : 1;
    const most = Math.max(least, ...workers.map((worker) => this.#amount(worker)));
    const cells = new Map();
    const sorted = [...workers].sort((a, b) => NAMES.compare(a.name, b.name));
    // The cell that Tab reaches in a map without texts.
    const target = sorted.some((worker) => worker.name === this.#selected) ? this.#selected : sorted[0]?.name;
    const elements = sorted.map((worker) => {
        const cell = this.#cells.get(`${isSmall} ${worker.name}`) ?? this.#cell(worker.name, isSmall);
        cells.set(`${isSmall} ${worker.name}`, cell);
        this.#update(cell, worker, Math.round(this.#shadeOf(worker, most) * 8), target);
        return cell.element;
    });
    this.#cells = cells;
    if (elements.length !== this.map.childElementCount || elements.some((element, index) => element !== this.map.children[index])) {
      this.map.replaceChildren(...(elements.length > 0 ? elements : [empty("No workers here.")]));
    }
  }

  /** In a large map one cell can be reached with Tab; arrows go to the others. */
  #cell(name, isSmall) {
    const element = h("button", { type: "button", class: "cell", on: { click: () => this.select(name), keydown: (event) => this.#move(event) } });
    if (!isSmall) return { element };
    const value = (...names) => metric(h("span", {}), ...names);
    const cell = {
      element,
      title: metric(h("span", { class: "name" }, name), name),
      pill: h("span", { class: "pill" }),
      role: h("span", {}),
      cached: value("warmroute_worker_cached_prompt_tokens_total", "warmroute_worker_prompt_tokens_total"),
      load: value("warmroute_worker_requests"),
      queued: value("warmroute_worker_queued_tokens"),
      decode: value("warmroute_worker_context_tokens"),
      fill: h("i"),
      kv: h("i"),
      ranks: value("ranks of /fleet: requests pinned to each data-parallel rank"),
      speed: value("warmroute_worker_prefill_tokens_per_second"),
    };
    const line = (label, text) => h("span", { class: "line" }, h("span", { class: "quiet" }, label), text);
    cell.roleLine = line("role", cell.role);
    cell.speedLine = line("computes", cell.speed);
    cell.ranksLine = h("span", { class: "line" }, cell.ranks);
    const bar = (label, fill, text, name) => h("span", { class: "meter" }, h("span", { class: "quiet" }, label), metric(h("span", { class: `track ${label}` }, fill), name), text);
    cell.kvText = value("vllm:kv_cache_usage_perc (of the engine)");
    element.append(
      h("span", { class: "line" }, cell.title, cell.pill),
      bar("cached", cell.fill, cell.cached, "warmroute_worker_cached_prompt_tokens_total / warmroute_worker_prompt_tokens_total"),
      bar("kv", cell.kv, cell.kvText, "vllm:kv_cache_usage_perc (of the engine)"),
      line("in flight", cell.load),
      line("queued", cell.queued),
      line("context", cell.decode),
      cell.speedLine,
      cell.ranksLine,
      cell.roleLine,
    );
    return cell;
  }

  #update(cell, worker, shade, target) {
    const state = stateOf(worker);
    const { recent } = this.#model.workerRates(worker);
    setAttribute(cell.element, "class", `cell ${state} shade${shade}`);
    setAttribute(cell.element, "aria-pressed", String(worker.name === this.#selected));
    const kv = worker.kv_usage === null ? null : worker.kv_usage / 1000;
    const queued = queuedOf(worker);
    const requests = requestsOf(worker);
    const ranks = rankText(worker);
    const text = `${worker.name}: ${stateText(worker)}, ${worker.role}, ${amount(requests, "request", whole)} in flight, ${amount(queued, "queued token")}, ${amount(worker.decode, "token")} of contexts, ${percent(recent)} from cache, KV cache ${percent(kv)}${ranks && `, in flight at its ${ranks}`}`;
    setAttribute(cell.element, "aria-label", text);
    if (!cell.title) {
      setAttribute(cell.element, "title", text);
      setAttribute(cell.element, "tabindex", worker.name === target ? "0" : "-1");
      return;
    }
    setAttribute(cell.pill, "class", `pill ${state}`);
    setText(cell.pill, stateText(worker));
    setText(cell.cached, percent(recent));
    setWidth(cell.fill, recent ?? 0);
    setText(cell.kvText, percent(kv));
    setWidth(cell.kv, kv ?? 0);
    setText(cell.load, amount(requests, "request", whole));
    setText(cell.queued, amount(queued, "token"));
    setText(cell.decode, amount(worker.decode, "token"));
    setText(cell.speed, perSecond(worker.prefill_rate, "tokens"));
    cell.speedLine.hidden = !worker.prefill_rate;
    setText(cell.ranks, ranks);
    cell.ranksLine.hidden = !ranks;
    setText(cell.role, worker.role);
    cell.roleLine.hidden = worker.role === "both";
  }

  #move(event) {
    const cells = [...this.map.children];
    const at = cells.indexOf(event.currentTarget);
    const row = cells.filter((cell) => cell.offsetTop === cells[0].offsetTop).length;
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: row, ArrowUp: -row }[event.key];
    const next = step && cells[at + step];
    if (!next) return;
    event.preventDefault();
    next.tabIndex = 0;
    next.focus();
  }

  async select(name) {
    this.#selected = name;
    this.#shown = "";
    // Said once to screen readers, and not each time that a number changes.
    this.detail.setAttribute("aria-live", "polite");
    this.render(this.#model);
    await this.#read(name);
    this.detail.setAttribute("aria-live", "off");
  }

  async #read(name) {
    clearTimeout(this.#timer);
    try {
      const { worker, ranks } = await ask(`dashboard/worker?name=${encodeURIComponent(name)}`);
      if (this.#selected !== name) return;
      const key = JSON.stringify([worker, ranks]);
      // What somebody is in is left as it is.
      if (key !== this.#shown && !this.detail.contains(document.activeElement)) {
        this.#shown = key;
        this.#show(worker, ranks);
      }
    } catch (error) {
      if (this.#selected !== name) return;
      this.#shown = "";
      this.detail.replaceChildren(h("h4", {}, name), h("p", { class: "problem" }, error.message));
    }
    this.#timer = setTimeout(() => this.#readAgain(name), DETAIL_MS);
  }

  /** Only while it can be seen: each costs the router an answer. */
  #readAgain(name) {
    if (this.#selected !== name) return;
    const { top, bottom } = this.detail.getBoundingClientRect();
    if (!document.hidden && bottom > 0 && top < window.innerHeight) this.#read(name);
    else this.#timer = setTimeout(() => this.#readAgain(name), DETAIL_MS);
  }

  #show(worker, ranks) {
    const line = (title, value, ...names) => (value === null || value === undefined || value === "" ? [] : [h("dt", {}, title), names.length > 0 ? metric(h("dd", {}, value), ...names) : h("dd", {}, value)]);
    const reported = worker.reported;
    const models = worker.models.length > 6 ? `${worker.models.slice(0, 6).join(", ")} and ${worker.models.length - 6} more` : worker.models.join(", ");
    const peers = (worker.peers ?? []).map((peer) => `${peer.replica}: ${amount(peer.requests, "request", whole)}`).join(", ");
    const transfers = worker.kv_transfers;
    const speed = worker.prefill_rate;
    const step = worker.speed ? `${worker.speed.step_ms.toFixed(1)}\u00a0ms a step, ${worker.speed.answer_us.toFixed(0)}\u00a0µs more for each answer, ${worker.speed.thousand_context_tokens_us.toFixed(0)}\u00a0µs for 1,000 tokens of contexts (${amount(worker.speed.samples, "observation", whole)})` : null;
    const slots = worker.speed ? `${amount(worker.speed.slots, "answer", whole)} at the same time${worker.speed.learnt_slots ? ", seen" : ""}` : null;
    const adapters = (worker.loaded_adapters ?? []).slice(0, 6).join(", ");
    this.detail.replaceChildren(
      h("h4", {}, worker.name),
      h(
        "dl",
        { class: "facts" },
        line("Address", worker.address),
        line("State", `${worker.health}, circuit breaker ${words(worker.circuit_breaker)}${worker.is_draining ? ", draining" : ""}`, "warmroute_worker_up", "warmroute_circuit_breaker_state"),
        line("Last probe failed", worker.last_error),
        line("Role", worker.role),
        line("Version", worker.version),
        line("Models", models || "none"),
        line("This router", `${amount(worker.requests, "request", whole)} in flight, ${amount(worker.queued_tokens, "queued token")}, ${amount(worker.context_tokens, "token")} of contexts, ${amount(worker.requests_total, "request", whole)} since the start`, "warmroute_worker_requests", "warmroute_worker_queued_tokens"),
        line("Other replicas", peers),
        line("Engine reports", reported ? `${amount(reported.running, "request", whole)} running, ${whole(reported.waiting)} waiting, KV cache ${percent(reported.kv_usage)}` : "nothing", "warmroute_worker_reported_running", "warmroute_worker_reported_waiting"),
        line("Computes", speed ? `${count(speed.tokens_per_second)} prompt tokens/s (${speed.source})` : null, "warmroute_worker_prefill_tokens_per_second"),
        line("Steps", step, "speed of /fleet"),
        line("Slots", slots, "speed.slots of /fleet"),
        line("Adapters in GPU", adapters, "loaded_adapters of /fleet"),
        line("KV cache size", worker.cache_tokens ? `${count(worker.cache_tokens)} tokens` : null, "cache_tokens of /fleet"),
        line("Predicted cache", `${count(worker.predicted_tokens)} tokens`, "warmroute_worker_predicted_tokens"),
        line("KV transfers", transfers ? `${whole(transfers.pending)} pending (${count(transfers.pending_tokens)} tokens), circuit breaker ${transfers.circuit_breaker}` : null, "warmroute_worker_kv_transfers_pending"),
      ),
      ...(ranks.length === 0 ? [noEvents(worker.events)] : notLive(ranks)),
      ranks.length === 0 ? "" : this.#ranks(ranks, new Map((worker.ranks ?? []).map((rank) => [rank.rank, rank]))),
    );
  }

  /** The KV events of each rank, and, of a worker with several, the requests that are pinned to it. */
  #ranks(ranks, loads) {
    const isPinned = loads.size > 0;
    const load = (rank) => loads.get(rank.rank) ?? { requests: 0, queued_tokens: 0, context_tokens: 0 };
    const cell = (text, name) => metric(h("td", { class: "number" }, text), name);
    const rows = ranks.map((rank) =>
      h(
        "tr",
        {},
        h("th", { scope: "row" }, `rank ${rank.rank}`),
        metric(h("td", {}, h("span", { class: `pill tree ${rank.state}` }, rank.state)), "warmroute_kv_state"),
        isPinned ? cell(amount(load(rank).requests, "request", whole), "requests of its rank in /fleet") : null,
        isPinned ? cell(amount(load(rank).queued_tokens, "token"), "queued_tokens of its rank in /fleet") : null,
        isPinned ? cell(amount(load(rank).context_tokens, "token"), "context_tokens of its rank in /fleet") : null,
        cell(count(Object.values(rank.blocks).reduce((sum, value) => sum + value, 0)), "warmroute_kv_blocks"),
        cell(seconds(rank.lag_ms === null ? null : rank.lag_ms / 1000), "warmroute_kv_last_lag_seconds"),
        cell(perSecond(rank.events_per_second), "warmroute_kv_events_total"),
        cell(whole(Object.values(rank.resyncs).reduce((sum, value) => sum + value, 0)), "warmroute_kv_resyncs_total"),
        cell(bytes(rank.memory_bytes), "warmroute_kv_memory_bytes"),
      ),
    );
    const titles = ["Rank", "Tree", ...(isPinned ? ["In flight", "Queued", "Context"] : []), "Blocks", "Lag", "Events", "Resyncs", "Memory"];
    return scroller("Ranks", h("table", {}, h("caption", { class: "unseen" }, "Ranks"), h("thead", {}, h("tr", {}, titles.map((title, index) => h("th", { scope: "col", class: index > 1 ? "number" : "" }, title)))), h("tbody", {}, rows)));
  }
}
