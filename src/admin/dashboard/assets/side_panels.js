// What happens beside requests to workers: streams that went on elsewhere, gateways, webhooks, batches, WebSockets, traces.

import { h, metric } from "./dom.js";
import { amount, bytes, count, seconds, whole, words } from "./format.js";
import { byLabel, facts, line } from "./lists.js";

const CONTINUATIONS = "warmroute_stream_continuations_total";
const EVENTS = "warmroute_webhook_events_total";
const MAX_AGE_S = 60;

/** Streams whose worker was lost. */
export function continuations({ outcomes, refused }) {
  const names = { continued: "went on on another worker", failed: "no worker could go on", refused: "could not be continued" };
  const known = Object.fromEntries(Object.entries(outcomes).map(([outcome, value]) => [names[outcome] ?? outcome, value]));
  const reasons = Object.keys(refused).length > 0 ? [h("h4", {}, "Not continued because of"), ...byLabel(refused, CONTINUATIONS, "stream")] : [];
  return [...byLabel(known, CONTINUATIONS, "stream"), ...reasons];
}

/** Requests that a gateway carries and asks the endpoint picker for a worker for. */
export function gateways({ open, outcomes, decisions }) {
  const [number, sum] = decisions ?? [0, 0];
  return [
    facts(
      line("Open", amount(open, "request", whole), "warmroute_endpoint_picker_exchanges"),
      line("Time to a decision", number > 0 ? `${seconds(sum / number)} (mean)` : "–", "warmroute_endpoint_picker_decision_seconds"),
    ),
    h("h4", {}, "Requests"),
    ...byLabel(outcomes, "warmroute_endpoint_picker_exchanges_total", "request"),
  ];
}

/** Each endpoint with what waits for it. */
export function webhooks({ endpoints, all }) {
  const rows = endpoints.map(({ endpoint: it, events }) => {
    const dropped = Object.entries(events ?? {}).filter(([outcome, value]) => outcome.startsWith("dropped") && value > 0);
    const lost = dropped.map(([outcome, value]) => metric(h("span", { class: "problem" }, `${amount(value, "event")} ${words(outcome)}`), EVENTS));
    const isFailing = it.state !== "ok" || (it.failed_at ?? 0) > (it.delivered_at ?? 0);
    const isLate = it.oldest_event_age_s > MAX_AGE_S;
    const waiting = `${whole(it.waiting_events)} ${it.waiting_events === 1 ? "event waits" : "events wait"}${it.waiting_events > 0 ? `, the oldest for ${whole(it.oldest_event_age_s)} s` : ""}`;
    return h(
      "div",
      { class: "notice" },
      h("p", {}, h("b", {}, it.name), " ", metric(h("span", { class: `pill ${it.state === "ok" ? "up" : "down"}` }, it.state === "ok" ? "up" : words(it.state)), "warmroute_webhook_endpoint_state"), " ", metric(h("span", { class: "quiet" }, it.host), "host of /webhooks")),
      h(
        "ul",
        { class: "tally" },
        h("li", {}, metric(h("span", { class: isLate ? "problem" : "" }, waiting), "warmroute_webhook_waiting_events", "warmroute_webhook_oldest_event_age_seconds")),
        h("li", {}, h("span", {}, "delivered"), metric(h("b", { class: "value" }, amount(events?.delivered ?? 0, "event")), EVENTS)),
        lost.map((it) => h("li", {}, it)),
        isFailing && it.last_failure ? h("li", {}, metric(h("span", { class: "problem" }, `last attempt: ${it.last_failure}`), "last_failure of /webhooks")) : null,
      ),
    );
  });
  if (all > endpoints.length) rows.push(h("p", { class: "note" }, `${whole(endpoints.length)} of ${whole(all)} endpoints, those that fail first.`));
  return rows;
}

/** Batches that run on this replica, and their lines. */
export function batches({ running, lines, in_flight, waiting }) {
  const numberOf = (value) => `${whole(value)}\u00a0${value === 1 ? "batch" : "batches"}`;
  const rows = running.tenants.map((it) =>
    h(
      "li",
      { title: "request_counts of /v1/batches" },
      h("span", {}, it.tenant, " ", h("span", { class: "quiet" }, numberOf(it.batches))),
      h("b", { class: "value" }, `${whole(it.completed)} done, ${it.failed > 0 ? `${whole(it.failed)} failed, ` : ""}${whole(it.left)} left`),
    ),
  );
  return [
    facts(
      line("Run here", numberOf(running.batches), "warmroute_batch_shards_running"),
      line("Lines in flight", amount(in_flight, "line", whole), "warmroute_batch_lines_in_flight"),
      line("Lines that wait for room", amount(waiting, "line", whole), "warmroute_batch_lines_waiting"),
    ),
    rows.length > 0 ? [h("h4", {}, "Lines of these batches, on all replicas"), h("ul", { class: "tally" }, rows)] : [],
    h("h4", {}, "Lines that ended here"),
    ...byLabel(lines, "warmroute_batch_lines_total", "line"),
  ].flat();
}

export function websockets({ open, closed, refused, memory }) {
  return [
    facts(
      line("Open", amount(open, "connection", whole), "warmroute_websocket_connections"),
      line("Memory", bytes(memory), "warmroute_websocket_memory_bytes"),
      refused > 0 ? line("Refused", amount(refused, "connection", whole), "warmroute_websocket_connections_refused_total") : [],
    ),
    h("h4", {}, "Closed because of"),
    ...byLabel(closed, "warmroute_websocket_connections_closed_total", "connection"),
  ];
}

export function traces({ spans }) {
  return [h("h4", {}, "Spans"), ...byLabel(spans, "warmroute_trace_spans_total", "span")];
}
