//! What the memory bounds of a configuration come to, for operators whose process has a memory limit. Pure.

use std::cmp::Reverse;

use crate::config::Config;
use crate::responses::Mode;

/// Bytes of a predicted block, and of an unconfirmed one.
const PREDICTED_BYTES: u64 = 120;
const UNCONFIRMED_BYTES: u64 = 60;

/// A warning if everything that has a bound of its own may take more than the `limit` of the process. The kernel may then
/// end the process although each part keeps to its bound.
pub(super) fn warning(config: &Config, limit: u64) -> Option<String> {
    let bounds = bounds(config);
    let add = |sum: u64, (_, bytes): &(&str, u64)| sum.saturating_add(*bytes);
    let sum = bounds.iter().fold(0, add);
    if sum <= limit {
        return None;
    }
    let shown = |(what, bytes): &(&str, u64)| format!("{what} {}", gib(*bytes));
    let listed: Vec<String> = bounds.iter().map(shown).collect();
    Some(format!(
        "what is bounded in memory may add up to {}, and this process may have {}: {}; lower the bounds or raise the \
         limit, or the process may be killed under load",
        gib(sum),
        gib(limit),
        listed.join(", ")
    ))
}

/// The bounds that are used, the largest first. Each is one for the whole process. Not among them are those of single
/// connections, requests and background responses, of which few come near to theirs at a time.
fn bounds(config: &Config) -> Vec<(&'static str, u64)> {
    let (index, cache) = (&config.kv_events.index, &config.tokenization.cache);
    let events = &config.kv_events.advanced;
    let predicted = config.predicted.max_blocks * PREDICTED_BYTES;
    let unconfirmed = events.unconfirmed.max_blocks * UNCONFIRMED_BYTES;
    let queued = events.joins.max_queued_size as u64;
    let mut bounds = vec![
        ("api.max_total_body", config.api.requests.max_total_body),
        ("kv_events.max_index_memory", index.max_index_memory),
        ("tokenization.max_cache_memory", cache.max_cache_memory),
        ("predicted and unconfirmed blocks", predicted + unconfirmed),
        ("KV events that wait for a replay", queued),
    ];
    let (websocket, store) = (&config.responses.websocket, &config.responses.store);
    let is_stateful = config.responses.mode == Mode::Stateful;
    if is_stateful && websocket.enabled {
        let bytes = websocket.max_total_memory;
        bounds.push(("responses.websocket.max_total_memory", bytes));
    }
    if is_stateful && store.redis.is_none() {
        let bytes = store.memory.max_size;
        bounds.push(("responses.store.memory.max_size", bytes));
    }
    bounds.sort_by_key(|(_, bytes)| Reverse(*bytes));
    bounds
}

fn gib(bytes: u64) -> String {
    format!("{:.2} GiB", bytes as f64 / f64::from(1 << 30))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn warned(rest: &str, limit: u64) -> Option<String> {
        let text = format!("workers: ['http://a:1']\n{rest}\n");
        warning(&Config::parse("c.yaml", &text).unwrap(), limit)
    }

    #[test]
    fn bounds_that_add_up_to_more_than_the_process_may_have_are_warned_of_the_largest_first() {
        let text = warned("", 4 * GIB).unwrap();
        let first = "this process may have 4.00 GiB: kv_events.max_index_memory 2.00 GiB, ";
        assert!(text.contains(first), "{text}");
        assert_eq!(warned("", 16 * GIB), None);
        let lower = "kv_events: {max_index_memory: 256MiB}";
        assert_eq!(warned(lower, 4 * GIB), None);
    }

    #[test]
    fn the_limit_of_the_manifests_is_enough_for_what_they_configure() {
        let manifests = "responses: {mode: pass_through}";
        assert_eq!(warned(manifests, 4 * GIB), None);
        assert!(warned(manifests, 3 * GIB).is_some());
    }

    #[test]
    fn the_bounds_of_parts_that_are_not_used_do_not_count() {
        let check = |settings: &str, has_websocket: bool, has_store: bool| {
            let text = warned(&format!("responses: {{{settings}}}"), GIB).unwrap();
            let parts = ["responses.websocket", "responses.store"];
            let found = parts.map(|part| text.contains(part));
            assert_eq!(found, [has_websocket, has_store], "{text}");
        };
        check("", true, true);
        check("websocket: {enabled: false}", false, true);
        check("mode: pass_through", false, false);
        let key = "e0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeff";
        let keys = format!("state_token: {{keys: ['{key}']}}");
        let redis = format!("store: {{redis: 'redis://r:6379'}}, {keys}");
        check(&redis, true, false);
    }
}
