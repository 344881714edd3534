//! The part of its time in which an engine computes prompts while requests wait inside it. Pure.

use std::time::{Duration, Instant};

/// Over less time the prompts of a moment would decide.
const WINDOW: Duration = Duration::from_secs(1);

/// From when on the engine is watched, and what it had computed then.
#[derive(Debug, Default)]
pub(super) struct PromptShare {
    since: Option<(Instant, u64)>,
}

impl PromptShare {
    /// A report of the engine at `now`, in which requests wait (`has_waiting`). `computed_tokens`: what it has computed of
    /// this router's prompts until then. `seconds_each`: what one takes, with those of others that are computed meanwhile.
    /// Returns the part of the time since requests began to wait, or since the last answer of this, 0 to 1. `None`: that
    /// is less than a second, or no prompt was computed in it. A prompt counts at its first token, so a long one may be
    /// what the engine computes.
    pub(super) fn see(
        &mut self,
        now: Instant,
        has_waiting: bool,
        computed_tokens: u64,
        seconds_each: f64,
    ) -> Option<f64> {
        if !has_waiting {
            self.since = None;
            return None;
        }
        let (since, before) = *self.since.get_or_insert((now, computed_tokens));
        let length = now.saturating_duration_since(since);
        let computed = computed_tokens.saturating_sub(before);
        if length < WINDOW || computed == 0 {
            return None;
        }
        self.since = Some((now, computed_tokens));
        Some((computed as f64 * seconds_each / length.as_secs_f64()).min(1.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe;

    #[test]
    fn it_is_that_of_a_second_or_more_in_which_requests_wait() {
        let start = observe::now();
        let mut share = PromptShare::default();
        let mut see = |millis, has_waiting, computed| {
            let now = start + Duration::from_millis(millis);
            let found = share.see(now, has_waiting, computed, 1e-3);
            found.map(|share| (share * 100.0).round() as u32)
        };
        assert_eq!(see(0, true, 50_000), None);
        assert_eq!(see(0, true, 50_100), None);
        assert_eq!(see(400, true, 50_400), None);
        assert_eq!(see(1_000, true, 50_600), Some(60));
        assert_eq!(see(1_500, true, 50_700), None);
        assert_eq!(see(3_000, true, 50_700), Some(5));
        // What is computed at the same time may be more than was predicted.
        assert_eq!(see(4_000, true, 59_000), Some(100));
        // A long prompt counts once it is computed.
        assert_eq!(see(7_000, true, 59_000), None);
        assert_eq!(see(8_000, true, 62_000), Some(75));
        // What it did while none waited says nothing.
        assert_eq!(see(10_000, false, 62_000), None);
        assert_eq!(see(11_000, true, 62_100), None);
    }
}
