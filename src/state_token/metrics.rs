//! Counters of state tokens.

use prometheus::IntCounter;

use super::key::Key;
use super::rejection::RejectReason;
use crate::observe::metrics::Registry;

#[derive(Clone, Debug)]
pub(super) struct Metrics {
    pub(super) issued: IntCounter,
    pub(super) accepted: IntCounter,
    pub(super) accepted_with_older_key: IntCounter,
    pub(super) too_large: IntCounter,
    pub(super) issued_bytes: IntCounter,
    pub(super) accepted_bytes: IntCounter,
    pub(super) rejected: [IntCounter; RejectReason::ALL.len()],
}

impl Metrics {
    pub(super) fn new(registry: &Registry, keys: &[Key]) -> Self {
        let tokens = registry.counters(
            "warmroute_state_tokens_total",
            "State tokens by outcome: issued, accepted (signed with the active key), \
             accepted_with_older_key, or too_large (not issued).",
            &["outcome"],
        );
        let bytes = registry.counters(
            "warmroute_state_token_bytes_total",
            "Bytes of state tokens that were issued or accepted.",
            &["outcome"],
        );
        let rejected = registry.counters(
            "warmroute_state_tokens_rejected_total",
            "State tokens that clients sent and the router rejected, by reason.",
            &["reason"],
        );
        let info = registry.gauges(
            "warmroute_state_token_key_info",
            "Keys of state tokens by id. The active key signs; verify_only keys accept older tokens. Always 1.",
            &["key", "use"],
        );
        for (index, key) in keys.iter().enumerate() {
            let used = if index == 0 { "active" } else { "verify_only" };
            info.with_label_values(&[key.id(), used]).set(1);
        }
        Self {
            issued: tokens.with_label_values(&["issued"]),
            accepted: tokens.with_label_values(&["accepted"]),
            accepted_with_older_key: tokens.with_label_values(&["accepted_with_older_key"]),
            too_large: tokens.with_label_values(&["too_large"]),
            issued_bytes: bytes.with_label_values(&["issued"]),
            accepted_bytes: bytes.with_label_values(&["accepted"]),
            rejected: RejectReason::ALL
                .map(|reason| rejected.with_label_values(&[reason.as_str()])),
        }
    }
}
