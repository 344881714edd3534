//! Whether the prefill legs at a worker return the parameters of a KV transfer. An engine that has returned none since
//! it started has no KV connector, or another one: its configuration is at fault, and no request.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::Instant;

use parking_lot::Mutex;

use crate::observe::log_once::LogOnce;

#[derive(Debug, Default)]
pub struct ReturnedParams {
    /// True once a prefill leg at the engine that runs now has returned parameters.
    has_returned: AtomicBool,
    /// Prefill legs in a row that returned none.
    missing: AtomicU64,
    log: Mutex<LogOnce>,
}

impl ReturnedParams {
    /// A prefill leg returned parameters.
    pub fn on_returned(&self) {
        // Most prefill legs change nothing, and only read.
        if !self.has_returned.load(Relaxed) {
            self.has_returned.store(true, Relaxed);
        }
        if self.missing() > 0 {
            self.missing.store(0, Relaxed);
            self.log.lock().reset();
        }
    }

    /// A prefill leg returned none. Returns true if that is worth a line in the log.
    pub fn on_missing(&self, now: Instant) -> bool {
        self.missing.fetch_add(1, Relaxed);
        self.log.lock().should_log(now, "no parameters")
    }

    /// Prefill legs in a row that returned none, up to the last one.
    pub fn missing(&self) -> u64 {
        self.missing.load(Relaxed)
    }

    /// True if the engine that runs now was asked for parameters and has never returned any.
    pub fn are_never_returned(&self) -> bool {
        self.missing() > 0 && !self.has_returned.load(Relaxed)
    }

    /// The engine may be another process now.
    pub(in crate::fleet) fn forget(&self) {
        self.has_returned.store(false, Relaxed);
        self.missing.store(0, Relaxed);
        self.log.lock().reset();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::observe;

    #[test]
    fn an_engine_that_has_returned_parameters_once_is_not_one_that_never_does() {
        let (returned, now) = (ReturnedParams::default(), observe::now());
        assert!(!returned.are_never_returned());
        returned.on_missing(now);
        returned.on_missing(now);
        assert!(returned.are_never_returned());
        assert_eq!(returned.missing(), 2);
        returned.on_returned();
        returned.on_missing(now);
        assert!(!returned.are_never_returned());
        assert_eq!(returned.missing(), 1);
        // Another process may have another configuration.
        returned.forget();
        assert_eq!(returned.missing(), 0);
        returned.on_missing(now);
        assert!(returned.are_never_returned());
    }

    #[test]
    fn however_many_legs_return_none_the_log_has_one_line() {
        let (returned, start) = (ReturnedParams::default(), observe::now());
        let lines = (0..1_000).filter(|second| {
            let now = start + Duration::from_secs(*second);
            returned.on_missing(now)
        });
        assert_eq!(lines.count(), 1);
    }
}
