#!/usr/bin/env python3
"""Writes the Grafana dashboards in dashboards/ from the short descriptions below: `deploy/observability/dashboards.py`."""

import json
import pathlib

HERE = pathlib.Path(__file__).parent
MODEL = 'model=~"$model"'
WORKER = 'worker=~"$worker"'


def rate(metric, by, labels=""):
    return f"sum by ({by}) (rate({metric}{{{labels}}}[$__rate_interval]))"


def total(metric, labels=""):
    return f"sum(rate({metric}{{{labels}}}[$__rate_interval]))"


def quantile(q, metric, by="", labels=""):
    by = f"le, {by}" if by else "le"
    return f"histogram_quantile({q}, sum by ({by}) (rate({metric}_bucket{{{labels}}}[$__rate_interval])))"


# Dashboard: uid, title, what it is for, rows of (title, panels of (title, unit, [(expression, legend)])).
DASHBOARDS = [
    ("warmroute-fleet", "warmroute: fleet", "Requests, latency and workers.", [
        ("Requests", [
            ("Requests by outcome", "reqps", [(rate("warmroute_requests_total", "outcome", MODEL), "{{outcome}}")]),
            ("Errors by the router itself", "reqps", [(rate("warmroute_request_errors_total", "status, code"), "{{status}} {{code}}")]),
            ("Requests in flight", "short", [(f"sum by (model) (warmroute_requests_in_flight{{{MODEL}}})", "{{model}}")]),
            ("Streams whose worker was lost", "reqps", [(rate("warmroute_stream_continuations_total", "outcome, reason", MODEL), "{{outcome}} ({{reason}})")]),
            ("Requests by configured name", "reqps", [(rate("warmroute_model_targets_total", "requested, target, reason"), "{{requested}} -> {{target}} ({{reason}})")]),
        ]),
        ("Latency", [
            ("Time to first token", "s", [(quantile(q, "warmroute_time_to_first_token_seconds", "", f"{MODEL}, {WORKER}"), f"p{round(q * 100)}") for q in (0.5, 0.9, 0.99)]),
            ("Time to first token, p99 by worker", "s", [(quantile(0.99, "warmroute_time_to_first_token_seconds", "worker", f"{MODEL}, {WORKER}"), "{{worker}}")]),
            ("Inter-token latency", "s", [(quantile(q, "warmroute_inter_token_latency_seconds", "", f"{MODEL}, {WORKER}"), f"p{round(q * 100)}") for q in (0.5, 0.99)]),
            ("Duration of requests", "s", [(quantile(q, "warmroute_request_duration_seconds", "", MODEL), f"p{round(q * 100)}") for q in (0.5, 0.99)]),
        ]),
        ("Workers", [
            ("Up", "short", [(f"min by (worker) (warmroute_worker_up{{{WORKER}}})", "{{worker}}")]),
            ("Circuit breakers (0 closed, 1 half-open, 2 open)", "short", [(f"max by (worker) (warmroute_circuit_breaker_state{{{WORKER}}})", "{{worker}}")]),
            ("Queued prompt tokens", "short", [(f"sum by (worker) (warmroute_worker_queued_tokens{{{WORKER}}})", "{{worker}}")]),
            ("Running requests, as engines report them", "short", [(f"max by (worker) (warmroute_worker_reported_running{{{WORKER}}})", "{{worker}}")]),
            ("Waiting requests, as engines report them", "short", [(f"max by (worker) (warmroute_worker_reported_waiting{{{WORKER}}})", "{{worker}}")]),
            ("Prompt tokens that a worker computes a second", "short", [(f"max by (worker) (warmroute_worker_prefill_tokens_per_second{{{WORKER}}})", "{{worker}}")]),
            ("Failures by who is to blame", "reqps", [(rate("warmroute_worker_failures_total", "owner", WORKER), "{{owner}}")]),
            ("Retries", "reqps", [(rate("warmroute_retries_total", "reason", WORKER), "{{reason}}"), (total("warmroute_retry_budget_exhausted_total"), "refused by the budget")]),
        ]),
        ("Queue", [
            ("Waiting requests", "short", [(f"sum by (model, class) (warmroute_queue_requests{{{MODEL}}})", "{{model}} {{class}}")]),
            ("Wait, p99", "s", [(quantile(0.99, "warmroute_queue_wait_seconds", "class", MODEL), "{{class}}")]),
            ("Refusals", "reqps", [(rate("warmroute_queue_refusals_total", "model, reason", MODEL), "{{model}} {{reason}}")]),
            ("Saturation (above 1 the workers are busy)", "short", [(f"max by (model) (warmroute_saturation_ratio{{{MODEL}}})", "{{model}}")]),
        ]),
        ("Tenants", [
            ("Requests", "reqps", [(rate("warmroute_usage_requests_total", "tenant", MODEL), "{{tenant}}")]),
            ("Prompt tokens", "short", [(rate("warmroute_usage_prompt_tokens_total", "tenant", MODEL), "{{tenant}}")]),
            ("Share of prompt tokens from caches", "percentunit", [(rate("warmroute_usage_cached_prompt_tokens_total", "tenant", MODEL) + " / " + rate("warmroute_usage_prompt_tokens_total", "tenant", MODEL), "{{tenant}}")]),
            ("Generated tokens", "short", [(rate("warmroute_usage_generation_tokens_total", "tenant", MODEL), "{{tenant}}")]),
        ]),
        ("Limits", [
            ("Requests with room in their tenant's limits", "reqps", [(rate("warmroute_limit_admitted_total", "tenant, decided"), "{{tenant}} ({{decided}})")]),
            ("Refused by limits", "reqps", [(rate("warmroute_limit_refusals_total", "tenant, reason"), "{{tenant}} {{reason}}")]),
            ("Share of a tenant's requests that is refused", "percentunit", [(rate("warmroute_limit_refusals_total", "tenant") + " / (" + rate("warmroute_limit_refusals_total", "tenant") + " + " + rate("warmroute_limit_admitted_total", "tenant") + ")", "{{tenant}}")]),
            ("Charging in Redis, p99", "s", [(quantile(0.99, "warmroute_limit_store_duration_seconds"), "p99")]),
            ("Replicas that count alone", "short", [("sum by (instance) (warmroute_limits_without_store)", "{{instance}}")]),
            ("Charges that Redis does not confirm", "ops", [(rate("warmroute_limit_store_failures_total", "operation"), "{{operation}}"), (total("warmroute_limit_settlements_dropped_total"), "settlements dropped")]),
        ]),
        ("Gateways (endpoint picker)", [
            ("Requests of gateways", "reqps", [(rate("warmroute_endpoint_picker_exchanges_total", "outcome"), "{{outcome}}")]),
            ("Open requests", "short", [("sum by (instance) (warmroute_endpoint_picker_exchanges)", "{{instance}}")]),
            ("Time to a decision", "s", [(quantile(q, "warmroute_endpoint_picker_decision_seconds"), f"p{round(q * 100)}") for q in (0.5, 0.99)]),
        ]),
        ("Router", [
            ("CPU", "short", [("rate(process_cpu_seconds_total[$__rate_interval]) and on (instance) warmroute_build_info", "{{instance}}")]),
            ("Memory", "bytes", [("process_resident_memory_bytes and on (instance) warmroute_build_info", "{{instance}}")]),
            ("Connections", "short", [("sum by (instance) (warmroute_connections)", "{{instance}}")]),
            ("Other replicas", "short", [("sum by (state) (warmroute_peers)", "{{state}}")]),
            ("Spans of traces", "short", [(rate("warmroute_trace_spans_total", "outcome"), "{{outcome}}")]),
        ]),
    ]),
    ("warmroute-routing", "warmroute: routing quality", "How much of the prompts is found in caches, and what is known of them.", [
        ("Cached prefixes", [
            ("Share of prompt tokens from caches", "percentunit", [
                (rate("warmroute_cached_prompt_tokens_total", "model", MODEL) + " / " + rate("warmroute_prompt_tokens_total", "model", MODEL), "{{model}}: reported"),
                (rate("warmroute_expected_cached_prompt_tokens_total", "model", MODEL) + " / " + rate("warmroute_routed_prompt_tokens_total", "model", MODEL), "{{model}}: expected"),
            ]),
            ("Decisions by reason", "reqps", [(rate("warmroute_routing_decisions_total", "reason", MODEL), "{{reason}}")]),
            ("Prompt tokens", "short", [(rate("warmroute_prompt_tokens_total", "model", MODEL), "{{model}}")]),
        ]),
        ("KV events", [
            ("State of ranks", "short", [("sum by (state) (warmroute_kv_state)", "{{state}}")]),
            ("Lag, p99", "s", [(quantile(0.99, "warmroute_kv_lag_seconds"), "p99")]),
            ("Gaps and resyncs", "short", [(rate("warmroute_kv_gaps_total", "worker", WORKER), "gaps {{worker}}"), (rate("warmroute_kv_resyncs_total", "worker, reason", WORKER), "resync {{worker}} {{reason}}")]),
            ("Cached blocks", "short", [(f"sum by (worker, tier) (warmroute_kv_blocks{{{WORKER}}})", "{{worker}} {{tier}}")]),
            ("Index", "bytes", [("sum by (instance) (warmroute_kv_index_bytes)", "{{instance}}")]),
            ("Silent ranks", "short", [("sum by (instance) (warmroute_kv_silent_ranks)", "{{instance}}")]),
        ]),
        ("Tokenizer", [
            ("Mismatch", "short", [(f"max by (model, prompts) (warmroute_tokenizer_mismatch{{{MODEL}}})", "{{model}} {{prompts}}")]),
            ("Confirmed prompts", "percentunit", [(f"min by (model, prompts) (warmroute_tokenizer_check_confirmed_ratio{{{MODEL}}})", "{{model}} {{prompts}}")]),
            ("Prompts without token ids", "reqps", [(rate("warmroute_tokenization_fallbacks_total", "reason"), "{{reason}}"), (rate("warmroute_tokenizer_prompts_total", "outcome", 'outcome!="complete"'), "{{outcome}}")]),
            ("Tokenization, p99", "s", [(quantile(0.99, "warmroute_tokenization_duration_seconds", "source"), "{{source}}")]),
        ]),
        ("Replicas", [
            ("Lag of other replicas", "s", [("max by (peer) (warmroute_peer_lag_seconds)", "{{peer}}")]),
            ("Workers that only one replica has", "short", [("max by (instance) (warmroute_peer_unknown_workers)", "{{instance}}")]),
            ("Trees taken over", "short", [(rate("warmroute_peer_trees_total", "outcome"), "{{outcome}}")]),
        ]),
    ]),
    ("warmroute-responses", "warmroute: Responses", "Stored and background responses, and their store.", [
        ("Responses", [
            ("Finished", "reqps", [(rate("warmroute_responses_finished_total", "status"), "{{status}}")]),
            ("In flight", "short", [("sum by (mode) (warmroute_responses_in_flight)", "{{mode}}")]),
            ("Not stored", "reqps", [(rate("warmroute_responses_not_stored_total", "outcome"), "{{outcome}}")]),
            ("Reading a history, p99", "s", [(quantile(0.99, "warmroute_responses_history_read_seconds"), "p99")]),
            ("State tokens refused", "reqps", [(rate("warmroute_state_tokens_rejected_total", "reason"), "{{reason}}")]),
        ]),
        ("Background", [
            ("Running", "short", [("sum by (instance) (warmroute_background_running)", "{{instance}}")]),
            ("Refused", "reqps", [(rate("warmroute_background_refused_total", "reason"), "{{reason}}")]),
            ("Orphans", "short", [(rate("warmroute_background_orphans_total", "action"), "{{action}}")]),
            ("Stopped", "short", [(rate("warmroute_background_stopped_total", "reason"), "{{reason}}")]),
            ("Leases that expired", "short", [("sum by (instance) (increase(warmroute_background_leases_expired_total[$__rate_interval]))", "{{instance}}")]),
        ]),
        ("Webhooks", [
            ("Events by what became of them", "ops", [(rate("warmroute_webhook_events_total", "endpoint, outcome"), "{{endpoint}} {{outcome}}")]),
            ("Attempts", "ops", [(rate("warmroute_webhook_attempts_total", "endpoint, outcome"), "{{endpoint}} {{outcome}}")]),
            ("Events that wait", "short", [("max by (endpoint) (warmroute_webhook_waiting_events)", "{{endpoint}}")]),
            ("Age of the oldest event", "s", [("max by (endpoint) (warmroute_webhook_oldest_event_age_seconds)", "{{endpoint}}")]),
            ("From the end of a response to the delivery, p99", "s", [(quantile(0.99, "warmroute_webhook_delivery_delay_seconds", "endpoint"), "{{endpoint}}")]),
            ("Endpoints (0 ok, 1 failing, 2 disabled)", "short", [("max by (endpoint) (warmroute_webhook_endpoint_state)", "{{endpoint}}")]),
        ]),
        ("WebSockets", [
            ("Open", "short", [("sum by (instance) (warmroute_websocket_connections)", "{{instance}}")]),
            ("Closed and refused", "ops", [(rate("warmroute_websocket_connections_closed_total", "reason"), "closed: {{reason}}"), (rate("warmroute_websocket_connections_refused_total", "reason"), "refused: {{reason}}")]),
            ("Memory", "bytes", [("sum by (instance) (warmroute_websocket_memory_bytes)", "{{instance}}")]),
        ]),
        ("Store", [
            ("Operations by outcome", "ops", [(rate("warmroute_store_operations_total", "outcome"), "{{outcome}}")]),
            ("Duration, p99", "s", [(quantile(0.99, "warmroute_store_operation_duration_seconds", "operation"), "{{operation}}")]),
            ("Circuit breaker (0 closed, 1 half-open, 2 open)", "short", [("max by (instance) (warmroute_store_circuit_breaker_state)", "{{instance}}")]),
            ("Fenced writes", "ops", [(total("warmroute_store_fenced_writes_total"), "fenced")]),
        ]),
    ]),
    ("warmroute-prefill-decode", "warmroute: prefill/decode", "Disaggregated requests: which were split, and what their phases took.", [
        ("Requests", [
            ("Split, or why not", "reqps", [(rate("warmroute_disaggregated_requests_total", "disaggregated", MODEL), "{{disaggregated}}")]),
            ("KV transfers", "reqps", [(rate("warmroute_kv_transfers_total", "outcome", MODEL), "{{outcome}}")]),
            ("Phases, p50", "s", [(quantile(0.5, "warmroute_disaggregated_phase_seconds", "phase", MODEL), "{{phase}}")]),
            ("Phases, p99", "s", [(quantile(0.99, "warmroute_disaggregated_phase_seconds", "phase", MODEL), "{{phase}}")]),
        ]),
        ("Prefill workers", [
            ("Prompts that wait to be fetched", "short", [(f"sum by (worker) (warmroute_worker_kv_transfers_pending{{{WORKER}}})", "{{worker}}")]),
            ("Their tokens", "short", [(f"sum by (worker) (warmroute_worker_kv_transfer_tokens_pending{{{WORKER}}})", "{{worker}}")]),
            ("Queued prompt tokens", "short", [(f"sum by (worker) (warmroute_worker_queued_tokens{{{WORKER}}})", "{{worker}}")]),
            ("Decoding prompt tokens", "short", [(f"sum by (worker) (warmroute_worker_context_tokens{{{WORKER}}})", "{{worker}}")]),
        ]),
    ]),
]


def variable(name, query):
    return {
        "name": name, "label": name, "type": "query", "datasource": SOURCE, "query": {"query": query, "refId": name},
        "refresh": 2, "includeAll": True, "multi": True, "allValue": ".*", "current": {"text": ["All"], "value": ["$__all"]},
    }


SOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH, HEIGHT, COLUMNS = 8, 8, 3


def panel(number, title, unit, queries, x, y):
    return {
        "id": number, "title": title, "type": "timeseries", "datasource": SOURCE,
        "gridPos": {"x": x, "y": y, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0, "custom": {"fillOpacity": 8, "showPoints": "never"}}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi", "sort": "desc"}},
        "targets": [
            {"refId": chr(ord("A") + place), "datasource": SOURCE, "expr": expression, "legendFormat": legend}
            for place, (expression, legend) in enumerate(queries)
        ],
    }


def dashboard(uid, title, description, rows):
    panels, y = [], 0
    for row, members in rows:
        panels.append({"id": len(panels) + 1, "title": row, "type": "row", "collapsed": False, "gridPos": {"x": 0, "y": y, "w": 24, "h": 1}, "panels": []})
        y += 1
        for place, (name, unit, queries) in enumerate(members):
            x, line = place % COLUMNS * WIDTH, place // COLUMNS
            panels.append(panel(len(panels) + 1, name, unit, queries, x, y + line * HEIGHT))
        y += (len(members) + COLUMNS - 1) // COLUMNS * HEIGHT
    return {
        "uid": uid, "title": title, "description": description, "tags": ["warmroute"], "schemaVersion": 39, "editable": True,
        "refresh": "30s", "time": {"from": "now-3h", "to": "now"}, "timezone": "browser", "graphTooltip": 1,
        "links": [{"type": "dashboards", "title": "warmroute", "tags": ["warmroute"], "asDropdown": True, "keepTime": True}],
        "templating": {"list": [
            {"name": "datasource", "label": "data source", "type": "datasource", "query": "prometheus", "current": {}},
            variable("model", "label_values(warmroute_requests_in_flight, model)"),
            variable("worker", "label_values(warmroute_worker_up, worker)"),
        ]},
        "panels": panels,
    }


def files():
    """File name -> contents."""
    return {f"{uid}.json": json.dumps(dashboard(uid, *rest), indent=1) + "\n" for uid, *rest in DASHBOARDS}


if __name__ == "__main__":
    for name, text in files().items():
        (HERE / "dashboards" / name).write_text(text)
