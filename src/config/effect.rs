//! When a changed key takes effect: with a reload, or only with a restart. Pure.

use serde::Serialize;

use crate::observe::metrics::words;

words! {
    /// When a change of a key takes effect.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
    #[serde(rename_all = "snake_case")]
    pub enum Effect {
        /// With a reload, for requests that start after it.
        Reload = "reload",
        /// A reload refuses it.
        Restart = "restart",
    }
}

/// Every key of the configuration, as the reference names it, or a part with all keys below it (`part.*`). A part
/// stands here only if its keys are used as a whole, so that a new key of it belongs to the same class; a test refuses
/// keys that are not listed.
pub(super) const EFFECTS: &[(&str, Effect)] = &[
    // Sockets, and what the connections on them were opened with.
    ("api.listen", Effect::Restart),
    ("api.advanced.*", Effect::Restart),
    ("admin.listen", Effect::Restart),
    ("endpoint_picker.listen", Effect::Restart),
    ("endpoint_picker.fallbacks", Effect::Restart),
    ("endpoint_picker.tls.*", Effect::Reload),
    ("endpoint_picker.tls", Effect::Restart),
    ("endpoint_picker.advanced.*", Effect::Restart),
    // A listener has TLS or has not; with which files may change.
    ("api.tls.*", Effect::Reload),
    ("api.tls", Effect::Restart),
    ("admin.tls.*", Effect::Reload),
    ("admin.tls", Effect::Restart),
    ("api.drain_delay", Effect::Reload),
    ("api.drain_timeout", Effect::Reload),
    ("api.max_body", Effect::Reload),
    ("api.max_total_body", Effect::Reload),
    ("api.max_body_wait", Effect::Reload),
    ("api.body_timeout", Effect::Reload),
    ("api.trusted_proxies", Effect::Reload),
    ("api.cors.*", Effect::Reload),
    ("api.extra_endpoints", Effect::Reload),
    ("admin.token", Effect::Reload),
    ("admin.tokens.*", Effect::Reload),
    ("admin.client_names.*", Effect::Reload),
    ("admin.dashboard.*", Effect::Reload),
    ("workers.*", Effect::Reload),
    ("discovery.*", Effect::Reload),
    ("fleet.health.*", Effect::Reload),
    ("fleet.circuit_breaker.*", Effect::Reload),
    ("fleet.model_lookup.*", Effect::Reload),
    // Every worker's pool of connections has it.
    ("fleet.advanced.connect_timeout", Effect::Restart),
    ("routing.*", Effect::Reload),
    ("models.*", Effect::Reload),
    // The index of trees.
    ("kv_events.*", Effect::Restart),
    ("predicted.bytes_per_token", Effect::Reload),
    // Of an index that is full of blocks.
    ("predicted.tokens_per_worker", Effect::Restart),
    // Threads and caches.
    ("tokenization.*", Effect::Restart),
    ("requests.*", Effect::Reload),
    // Turns disaggregation on; roles of workers and their probes follow from it.
    // Held by what requests share; also for those that wait.
    ("queue.*", Effect::Reload),
    ("prefill_decode.connector", Effect::Restart),
    ("prefill_decode.on_prefill_failure", Effect::Reload),
    ("prefill_decode.topology", Effect::Reload),
    ("prefill_decode.advanced.min_remote_tokens", Effect::Reload),
    ("prefill_decode.advanced.kv_lease", Effect::Reload),
    ("prefill_decode.advanced.transfer_timeout", Effect::Reload),
    ("prefill_decode.advanced.bootstrap_port", Effect::Restart),
    ("tenants.*", Effect::Reload),
    ("tenant_salt_key", Effect::Reload),
    ("jwt.*", Effect::Reload),
    ("limits.everybody.*", Effect::Reload),
    ("limits.cached_weight", Effect::Reload),
    ("limits.output_reserve", Effect::Reload),
    ("limits.on_store_failure", Effect::Reload),
    // Connections to Redis, and what requests that run were admitted with.
    ("limits.store.*", Effect::Restart),
    ("limits.replicas", Effect::Restart),
    ("peers.*", Effect::Restart),
    // The store, and what runs in the background on it.
    ("responses.mode", Effect::Restart),
    ("responses.store.*", Effect::Restart),
    ("responses.state_token.*", Effect::Restart),
    // Bounds of memory and turns are those of when a connection was opened.
    ("responses.websocket.*", Effect::Reload),
    ("responses.background.*", Effect::Restart),
    ("responses.on_store_down", Effect::Reload),
    ("responses.keep_alive", Effect::Reload),
    ("responses.compact.*", Effect::Reload),
    ("responses.chat.*", Effect::Reload),
    ("responses.advanced.ready_without_store", Effect::Restart),
    ("responses.advanced.reasoning_events", Effect::Reload),
    ("responses.advanced.conversation_lease", Effect::Reload),
    // The storage, and what runs on it.
    ("batches.*", Effect::Restart),
    // Attempts that run end with the settings they began with.
    ("webhooks.*", Effect::Reload),
    // A thread of its own.
    ("usage.*", Effect::Restart),
    ("log.format", Effect::Restart),
    ("log.level", Effect::Reload),
    ("log.access", Effect::Reload),
    ("log.access_file", Effect::Restart),
    ("log.access_file_max_size", Effect::Restart),
    ("log.access_sample", Effect::Reload),
    ("traces.sample_ratio", Effect::Reload),
    // The exporter, its connection and its queue.
    ("traces.endpoint", Effect::Restart),
    ("traces.protocol", Effect::Restart),
    ("traces.service_name", Effect::Restart),
    ("traces.resource_attributes", Effect::Restart),
    ("traces.headers", Effect::Restart),
    ("traces.compression", Effect::Restart),
    ("traces.tls.*", Effect::Restart),
    ("reload.*", Effect::Reload),
    ("runtime.*", Effect::Restart),
];

/// The class of a key, or of a value below one, such as a label. A key that is in no class needs a restart: refusing a
/// change is safe.
pub(super) fn effect_of(key: &str) -> Effect {
    let is_exact = |(listed, _): &&(&str, Effect)| *listed == key;
    let found = EFFECTS.iter().find(is_exact);
    let found = found.or_else(|| EFFECTS.iter().find(|(listed, _)| covers(listed, key)));
    found.map_or(Effect::Restart, |(_, effect)| *effect)
}

fn covers(listed: &str, key: &str) -> bool {
    let part = listed.strip_suffix(".*").unwrap_or(listed);
    let rest = key.strip_prefix(part);
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::config::reader::{json_schema, leaves};

    fn keys() -> Vec<String> {
        leaves(&json_schema::<Config>())
    }

    fn entries_for(key: &str) -> Vec<&'static str> {
        let listed = EFFECTS.iter().map(|(listed, _)| *listed);
        let is_exact = |listed: &&str| match listed.strip_suffix(".*") {
            Some(_) => covers(listed, key),
            None => *listed == key,
        };
        listed.filter(is_exact).collect()
    }

    #[test]
    fn every_key_is_in_one_class() {
        let keys = keys();
        assert!(keys.len() > 200, "{}", keys.len());
        for key in &keys {
            let entries = entries_for(key);
            assert_eq!(
                entries.len(),
                1,
                "`{key}` is in {entries:?}: list it once in EFFECTS, with what a reload does with it"
            );
        }
    }

    #[test]
    fn a_key_without_a_class_is_found() {
        assert!(entries_for("api.brand_new").is_empty());
        assert!(entries_for("workers_of_another_kind").is_empty());
        assert_eq!(effect_of("api.brand_new"), Effect::Restart);
    }

    #[test]
    fn every_entry_is_a_key_that_exists() {
        let keys = keys();
        for (listed, _) in EFFECTS {
            let is_part = |key: &&String| key.starts_with(&format!("{listed}."));
            let mut exists = keys.iter().filter(|key| entries_for(key).contains(listed));
            let exists = exists.next().or_else(|| keys.iter().find(is_part));
            assert!(exists.is_some(), "{listed}");
        }
    }

    #[test]
    fn what_lies_below_a_key_has_its_class() {
        assert_eq!(effect_of("workers[].labels.zone"), Effect::Reload);
        assert_eq!(effect_of("workers"), Effect::Reload);
        assert_eq!(effect_of("api.listen"), Effect::Restart);
        assert_eq!(effect_of("api.listener"), Effect::Restart);
        assert_eq!(effect_of("api.tls"), Effect::Restart);
        assert_eq!(effect_of("api.tls.certificate"), Effect::Reload);
    }
}
