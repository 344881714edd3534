//! Metrics of tokens.

use prometheus::{IntCounterVec, IntGaugeVec};

use crate::observe::metrics::Registry;

#[derive(Clone, Debug)]
pub(super) struct Metrics {
    pub(super) verifications: IntCounterVec,
    pub(super) reads: IntCounterVec,
    pub(super) keys: IntGaugeVec,
}

impl Metrics {
    pub(super) fn new(registry: &Registry) -> Self {
        Self {
            verifications: registry.counters(
                "warmroute_jwt_verifications_total",
                "JSON Web Tokens that were verified, by result: accepted, or why not. Tokens that are known from an \
                 earlier request are not verified again.",
                &["result"],
            ),
            reads: registry.counters(
                "warmroute_jwks_reads_total",
                "Looks at the public keys of an issuer of tokens, by result: changed, unchanged or failed (the last keys \
                 stay in use).",
                &["issuer", "result"],
            ),
            keys: registry.gauges(
                "warmroute_jwks_keys",
                "Public keys of an issuer of tokens that are in use; with 0 its tokens are refused with 503.",
                &["issuer"],
            ),
        }
    }
}
