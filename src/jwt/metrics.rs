//! Metrics of tokens.

use crate::observe::metrics::metric_table;

metric_table! {
    #[derive(Clone, Debug)]
    pub(super) struct Metrics {
        pub(super) verifications: counters "warmroute_jwt_verifications_total" ["result"]
            "JSON Web Tokens that were verified, by result: accepted, or why not. Tokens that are known from an earlier request \
             are not verified again.",
        pub(super) reads: counters "warmroute_jwks_reads_total" ["issuer", "result"]
            "Looks at the public keys of an issuer of tokens, by result: changed, unchanged or failed (the last keys stay in \
             use).",
        pub(super) keys: gauges "warmroute_jwks_keys" ["issuer"]
            "Public keys of an issuer of tokens that are in use; with 0 its tokens are refused with 503.",
    }
}
