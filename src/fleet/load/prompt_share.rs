//! The part of its time in which an engine computes prompts. Pure.

use std::time::{Duration, Instant};

/// Over less time the prompts of a moment would decide.
const WINDOW: Duration = Duration::from_secs(1);

#[derive(Debug, Default)]
pub(super) struct PromptShare {
    since: Option<Instant>,
    computed_tokens: u64,
    share: Option<f64>,
}

impl PromptShare {
    /// `computed_tokens`: those that the engine has computed of this router's prompts until `now`. `seconds_each`: what
    /// one takes, with those of others that are computed meanwhile. Returns the part of the last window that has ended,
    /// 0 to 1; `None`: none has.
    pub(super) fn see(
        &mut self,
        now: Instant,
        computed_tokens: u64,
        seconds_each: f64,
    ) -> Option<f64> {
        let since = *self.since.get_or_insert(now);
        let length = now.saturating_duration_since(since);
        if length >= WINDOW {
            let computed = computed_tokens.saturating_sub(self.computed_tokens);
            let share = computed as f64 * seconds_each / length.as_secs_f64();
            self.share = Some(share.min(1.0));
        }
        if length >= WINDOW || length.is_zero() {
            self.since = Some(now);
            self.computed_tokens = computed_tokens;
        }
        self.share
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe;

    #[test]
    fn it_is_that_of_the_last_second_or_more() {
        let start = observe::now();
        let mut share = PromptShare::default();
        let mut see = |millis, computed| {
            let now = start + Duration::from_millis(millis);
            let found = share.see(now, computed, 1e-3);
            found.map(|share| (share * 100.0).round() as u32)
        };
        assert_eq!(see(0, 50_000), None);
        assert_eq!(see(400, 50_400), None);
        assert_eq!(see(1_000, 50_600), Some(60));
        assert_eq!(see(1_500, 50_700), Some(60));
        assert_eq!(see(3_000, 50_700), Some(5));
        // What is computed at the same time may be more than was predicted.
        assert_eq!(see(4_000, 59_000), Some(100));
    }
}
