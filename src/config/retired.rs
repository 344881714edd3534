//! Keys that earlier versions had. A file that still has one is read, with a warning; the next version refuses it as an
//! unknown key.

/// The keys that are gone, with all below them, by their path without the places in lists; and why.
const RETIRED: &[(&str, &str)] = &[
    ("api.advanced.max_http2_streams", CONSTANT),
    ("api.cors.max_age", CONSTANT),
    ("api.tls.advanced", CONSTANT),
    ("admin.dashboard.max_decisions_per_second", CONSTANT),
    ("admin.tls.advanced", CONSTANT),
    ("discovery.dns.interval", CONSTANT),
    ("discovery.kubernetes.advanced", CONSTANT),
    ("batches.max_batches_per_tenant", CONSTANT),
    ("batches.max_files_per_tenant", CONSTANT),
    ("endpoint_picker.advanced.max_connections", CONSTANT),
    ("endpoint_picker.advanced.max_streams", CONSTANT),
    ("endpoint_picker.tls.advanced", CONSTANT),
    (
        "fleet.learn_prefill_rates",
        "speeds are always learnt; a worker's `prefill_rate` counts before what is learnt",
    ),
    ("fleet.advanced.idle_connection_timeout", CONSTANT),
    ("fleet.advanced.max_idle_connections", CONSTANT),
    ("fleet.advanced.max_workers", CONSTANT),
    ("fleet.model_lookup.interval", CONSTANT),
    ("fleet.model_lookup.max_waiting", CONSTANT),
    ("fleet.model_lookup.workers_per_round", CONSTANT),
    ("jwt.advanced", CONSTANT),
    ("kv_events.advanced", CONSTANT),
    ("limits.advanced", CONSTANT),
    ("limits.store.advanced.circuit_breaker", CONSTANT),
    ("limits.store.advanced.compress_from", CONSTANT),
    ("limits.store.advanced.connect_timeout", CONSTANT),
    ("limits.store.advanced.max_in_flight", CONSTANT),
    ("limits.store.advanced.max_thread_connections", CONSTANT),
    ("limits.store.wait.timeout", CONSTANT),
    ("models.decode_weight", COST),
    ("models.prefill_weight", COST),
    (
        "models.advanced",
        "what `routing.advanced` says is for all models",
    ),
    ("peers.advanced", CONSTANT),
    ("peers.discovery.dns.interval", CONSTANT),
    ("peers.tls.advanced", CONSTANT),
    ("predicted.block_size", CONSTANT),
    ("predicted.max_age", CONSTANT),
    ("predicted.max_blocks", CONSTANT),
    ("queue.advanced", CONSTANT),
    ("requests.advanced.backoff", CONSTANT),
    ("requests.advanced.max_backoff", CONSTANT),
    ("requests.advanced.max_quarantined_requests", CONSTANT),
    ("requests.advanced.quarantine_duration", CONSTANT),
    ("responses.advanced.max_history_size", CONSTANT),
    ("responses.advanced.max_history_turns", CONSTANT),
    ("responses.advanced.max_response_size", CONSTANT),
    ("responses.advanced.unsupported_items", CONSTANT),
    ("responses.background.flush_interval", CONSTANT),
    ("responses.background.poll_interval", CONSTANT),
    ("responses.background.unread_flush_interval", CONSTANT),
    (
        "responses.store.lease.heartbeat_interval",
        "it follows from `duration`",
    ),
    (
        "responses.store.lease.scan_interval",
        "it follows from `duration`",
    ),
    ("responses.store.redis.advanced.circuit_breaker", CONSTANT),
    ("responses.store.redis.advanced.compress_from", CONSTANT),
    ("responses.store.redis.advanced.connect_timeout", CONSTANT),
    ("responses.store.redis.advanced.max_in_flight", CONSTANT),
    (
        "responses.store.redis.advanced.max_thread_connections",
        CONSTANT,
    ),
    ("responses.store.redis.wait.timeout", CONSTANT),
    ("responses.websocket.idle_timeout", CONSTANT),
    ("responses.websocket.max_age", CONSTANT),
    ("responses.websocket.max_prewarms", CONSTANT),
    ("responses.websocket.max_queued_size", CONSTANT),
    ("responses.websocket.max_queued_turns", CONSTANT),
    ("routing.adapter_load_tokens", COST),
    ("routing.decode_weight", COST),
    ("routing.prefill_weight", COST),
    ("routing.slow_decode_tokens", COST),
    ("routing.advanced.affinity_load_factor", CONSTANT),
    ("routing.advanced.alone_slack", CONSTANT),
    ("routing.advanced.prefix_candidates", CONSTANT),
    ("routing.advanced.random_candidates", CONSTANT),
    (
        "routing.advanced.request_cache_reports",
        "other routers of the engine counted the blocks that it reported again as further copies",
    ),
    ("tokenization.advanced.limits", CONSTANT),
    ("tokenization.advanced.engine.cache_ttl", CONSTANT),
    ("tokenization.advanced.engine.max_cache_memory", CONSTANT),
    ("tokenization.advanced.engine.max_requests", CONSTANT),
    ("tokenization.advanced.pool.max_queued", CONSTANT),
    ("tokenization.advanced.pool.timeout", CONSTANT),
    (
        "traces.advanced",
        "the environment variables `OTEL_BSP_...` set it (docs/traces.md)",
    ),
    (
        "traces.timeout",
        "the environment variable `OTEL_EXPORTER_OTLP_TIMEOUT` sets it (docs/traces.md)",
    ),
    ("webhooks.advanced", CONSTANT),
    ("webhooks.attempt_timeout", CONSTANT),
    ("webhooks.max_concurrent_per_endpoint", CONSTANT),
];

const CONSTANT: &str = "it is a constant, with the value that was the default";

const COST: &str =
    "the cost is in seconds and has no weights; what it needs is learnt (docs/concepts.md)";

/// Why the key at `path` is not used any more, if it was one.
pub(super) fn reason(path: &str) -> Option<&'static str> {
    let mut parts = path.split('[');
    let mut plain = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        plain.push_str(part.split_once(']').map_or("", |(_, rest)| rest));
    }
    entry(RETIRED, &plain)
}

/// The text of a key in a table of paths and texts.
pub(super) fn entry(table: &[(&str, &'static str)], path: &str) -> Option<&'static str> {
    let found = table.iter().find(|(of, _)| *of == path);
    found.map(|(_, text)| *text)
}

#[cfg(test)]
mod tests {
    use super::RETIRED;
    use crate::config::Config;
    use crate::config::reader::{json_schema, leaves};

    #[test]
    fn a_file_with_a_key_of_before_is_read_and_told_of_it() {
        let text = "workers: ['http://a:1']\nrouting: {prefill_weight: 4}\nmodels:\n- {name: m, decode_weight: much}\n";
        let config = Config::parse("c.yaml", text).unwrap();
        let [first, second] = &config.source.warnings[..] else {
            panic!("{:?}", config.source.warnings);
        };
        assert!(
            first.starts_with(
                "c.yaml:2:11: routing.prefill_weight: is not used any more: the cost is in seconds"
            ),
            "{first}"
        );
        assert!(
            second.starts_with("c.yaml:4:13: models[0].decode_weight: is not used"),
            "{second}"
        );
        let never = "workers: ['http://a:1']\nrouting: {decode_wait: 4}\n";
        assert!(Config::parse("c.yaml", never).is_err());
    }

    #[test]
    fn what_became_a_constant_is_read_with_all_below_it_and_what_stands_beside_it_counts() {
        let text = "workers: ['http://a:1']\nkv_events: {max_index_memory: 1GiB, advanced: {stream: {verify_interval: never}}}\n\
                    api: {tls: {self_signed: true, advanced: {handshake_timeout: 1s}}}\n";
        let config = Config::parse("c.yaml", text).unwrap();
        let [first, second] = &config.source.warnings[..] else {
            panic!("{:?}", config.source.warnings);
        };
        assert_eq!(
            first,
            "c.yaml:2:37: kv_events.advanced: is not used any more: it is a constant, with the value that was the default"
        );
        assert!(
            second.starts_with("c.yaml:3:32: api.tls.advanced: is not used"),
            "{second}"
        );
        assert_eq!(config.kv_events.index.max_index_memory, 1 << 30);
        assert_eq!(
            config.kv_events.advanced.stream,
            crate::kv::stream::Settings::default()
        );
    }

    #[test]
    fn no_retired_key_is_one_of_today() {
        let keys = leaves(&json_schema::<Config>());
        let is_used = |path: &str| {
            let below = |key: &String| {
                let rest = key.replace("[]", "").strip_prefix(path).map(str::to_owned);
                rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
            };
            keys.iter().any(below)
        };
        for (path, _) in RETIRED {
            let (part, _) = path.rsplit_once('.').unwrap();
            assert!(is_used(part), "{part}: is gone as a whole; name it once");
            assert!(!is_used(path), "{path}");
        }
    }
}
