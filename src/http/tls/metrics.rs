//! The metrics of TLS.

use std::time::{SystemTime, UNIX_EPOCH};

use prometheus::IntGauge;

use crate::observe::metrics::metric_table;

metric_table! {
    /// The metrics of TLS, of all listeners and of connections to workers.
    #[derive(Clone, Debug)]
    pub struct Metrics {
        handshakes: counters "warmroute_tls_handshakes_total" ["listener", "outcome"]
            "TLS handshakes of a listener (api, admin, peers, bridge), by outcome: ok; timeout; limit (ended because it took \
             long while others waited, or waited too long itself); closed (by the client); client_certificate (none, or not \
             valid); client_name (not in client_names); protocol (no common version or cipher); alert (the client refused, \
             mostly this listener's certificate); not_tls; other.",
        running: gauges "warmroute_tls_handshakes_in_progress" ["listener"]
            "TLS handshakes of a listener that run now.",
        expiry: gauges "warmroute_tls_certificate_expiry_timestamp_seconds" ["use", "file"]
            "When the certificate that is in use expires, or the first of its chain, in seconds since 1970. By use (api, admin, \
             peers, or workers for the client certificates of connections to workers) and file.",
        reloads: counters "warmroute_tls_certificate_reloads_total" ["use", "outcome"]
            "Times that changed TLS files were read, by outcome: ok, failed (the ones before stay in use); files whose file system \
             hangs fail once.",
        is_current: gauges "warmroute_tls_certificate_last_reload_successful" ["use", "file"]
            "1 if the TLS files are in use as they are now, 0 if what they contain cannot be used or read, so that what they \
             contained before stays in use.",
    }
}

impl Metrics {
    pub(super) fn handshake_ended(&self, listener: &str, outcome: &str) {
        self.handshakes
            .with_label_values(&[listener, outcome])
            .inc();
    }

    /// Counts handshakes in progress.
    pub(super) fn running(&self, listener: &str) -> IntGauge {
        self.running.with_label_values(&[listener])
    }

    /// The certificate in `file` is in use.
    pub(super) fn in_use(&self, of: &str, file: &str, not_after: SystemTime) {
        let expiry = not_after.duration_since(UNIX_EPOCH);
        let expiry = expiry.map_or(0, |since| since.as_secs() as i64);
        self.expiry.with_label_values(&[of, file]).set(expiry);
    }

    pub(super) fn reloaded(&self, of: &str, file: &str, is_ok: bool) {
        let outcome = if is_ok { "ok" } else { "failed" };
        self.reloads.with_label_values(&[of, outcome]).inc();
        self.is_current(of, file, is_ok);
    }

    pub(super) fn is_current(&self, of: &str, file: &str, is_current: bool) {
        let gauge = self.is_current.with_label_values(&[of, file]);
        gauge.set(is_current.into());
    }

    /// The certificate in `file` is not in use any more.
    pub(super) fn forget(&self, of: &str, file: &str) {
        // A certificate that was never in use has no value to remove.
        let _ = self.expiry.remove_label_values(&[of, file]);
        let _ = self.is_current.remove_label_values(&[of, file]);
    }
}
