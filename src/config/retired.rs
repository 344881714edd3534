//! Keys that earlier versions had. A file that still has one is read, with a warning; the next version refuses it as an
//! unknown key.

/// A part of the configuration, without the places in lists; its keys that are gone, with all below them; and why.
const RETIRED: &[(&str, &[&str], &str)] = &[
    ("api.advanced", &["max_http2_streams"], CONSTANT),
    ("api.cors", &["max_age"], CONSTANT),
    ("api.tls", &["advanced"], CONSTANT),
    ("admin.dashboard", &["max_decisions_per_second"], CONSTANT),
    ("admin.tls", &["advanced"], CONSTANT),
    ("discovery.dns", &["interval"], CONSTANT),
    ("discovery.kubernetes", &["advanced"], CONSTANT),
    (
        "batches",
        &["max_batches_per_tenant", "max_files_per_tenant"],
        CONSTANT,
    ),
    (
        "endpoint_picker.advanced",
        &["max_connections", "max_streams"],
        CONSTANT,
    ),
    ("endpoint_picker.tls", &["advanced"], CONSTANT),
    (
        "fleet",
        &["learn_prefill_rates"],
        "speeds are always learnt; a worker's `prefill_rate` counts before what is learnt",
    ),
    (
        "fleet.advanced",
        &[
            "idle_connection_timeout",
            "max_idle_connections",
            "max_workers",
        ],
        CONSTANT,
    ),
    (
        "fleet.model_lookup",
        &["interval", "max_waiting", "workers_per_round"],
        CONSTANT,
    ),
    ("jwt", &["advanced"], CONSTANT),
    ("kv_events", &["advanced"], CONSTANT),
    ("limits", &["advanced"], CONSTANT),
    ("limits.store.advanced", REDIS, CONSTANT),
    ("limits.store.wait", &["timeout"], CONSTANT),
    ("models", &["decode_weight", "prefill_weight"], COST),
    (
        "models",
        &["advanced"],
        "what `routing.advanced` says is for all models",
    ),
    ("peers", &["advanced"], CONSTANT),
    ("peers.discovery.dns", &["interval"], CONSTANT),
    ("peers.tls", &["advanced"], CONSTANT),
    (
        "predicted",
        &["block_size", "max_age", "max_blocks"],
        CONSTANT,
    ),
    ("queue", &["advanced"], CONSTANT),
    (
        "requests.advanced",
        &[
            "backoff",
            "max_backoff",
            "max_quarantined_requests",
            "quarantine_duration",
        ],
        CONSTANT,
    ),
    (
        "responses.advanced",
        &[
            "max_history_size",
            "max_history_turns",
            "max_response_size",
            "unsupported_items",
        ],
        CONSTANT,
    ),
    (
        "responses.background",
        &["flush_interval", "poll_interval", "unread_flush_interval"],
        CONSTANT,
    ),
    (
        "responses.store.lease",
        &["heartbeat_interval", "scan_interval"],
        "it follows from `duration`",
    ),
    ("responses.store.redis.advanced", REDIS, CONSTANT),
    ("responses.store.redis.wait", &["timeout"], CONSTANT),
    (
        "responses.websocket",
        &[
            "idle_timeout",
            "max_age",
            "max_prewarms",
            "max_queued_size",
            "max_queued_turns",
        ],
        CONSTANT,
    ),
    (
        "routing",
        &[
            "adapter_load_tokens",
            "decode_weight",
            "prefill_weight",
            "slow_decode_tokens",
        ],
        COST,
    ),
    (
        "routing.advanced",
        &[
            "affinity_load_factor",
            "alone_slack",
            "prefix_candidates",
            "random_candidates",
        ],
        CONSTANT,
    ),
    ("tokenization.advanced", &["limits"], CONSTANT),
    (
        "tokenization.advanced.engine",
        &["cache_ttl", "max_cache_memory", "max_requests"],
        CONSTANT,
    ),
    (
        "tokenization.advanced.pool",
        &["max_queued", "timeout"],
        CONSTANT,
    ),
    (
        "traces",
        &["advanced"],
        "the environment variables `OTEL_BSP_...` set it (docs/traces.md)",
    ),
    (
        "traces",
        &["timeout"],
        "the environment variable `OTEL_EXPORTER_OTLP_TIMEOUT` sets it (docs/traces.md)",
    ),
    ("webhooks", &["advanced"], CONSTANT),
    (
        "webhooks",
        &["attempt_timeout", "max_concurrent_per_endpoint"],
        CONSTANT,
    ),
];

const REDIS: &[&str] = &[
    "circuit_breaker",
    "compress_from",
    "connect_timeout",
    "max_in_flight",
    "max_thread_connections",
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

/// The text of a key in a table of parts of the configuration, their keys and texts.
pub(super) fn entry(table: &[(&str, &[&str], &'static str)], path: &str) -> Option<&'static str> {
    let (part, key) = path.rsplit_once('.')?;
    let mut rows = table.iter();
    let (_, _, text) = rows.find(|(of, keys, _)| *of == part && keys.contains(&key))?;
    Some(text)
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
        for (part, gone, _) in RETIRED {
            assert!(is_used(part), "{part}: is gone as a whole; name it once");
            for key in *gone {
                assert!(!is_used(&format!("{part}.{key}")), "{part}.{key}");
            }
        }
    }
}
