//! Adds up what the first tokens of a worker's streams show of its speed. Requests add, one reader takes the sums.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::time::Duration;

/// A prompt with fewer tokens to compute shows what an answer takes besides computing: network, scheduling, a step of
/// the engine.
const SHORT_TOKENS: u32 = 64;
/// A prompt with fewer tokens to compute shows no rate, because computing is too small a part of its time.
const LONG_TOKENS: u32 = 256;
/// Other replicas' prompts in a worker's queue count at most this many times the own ones.
const MAX_PEERS_FACTOR: u64 = 15;

/// What was seen since it was last taken.
#[derive(Debug, Default)]
pub struct Seen {
    /// When the last first token came. Engines compute prompts nearly in the order in which they come, so the prompts behind
    /// it were computed from then on.
    last_nanos: AtomicU64,
    long: Sums,
    short: Sums,
}

#[derive(Debug, Default)]
struct Sums {
    prompts: AtomicU32,
    tokens: AtomicU64,
    nanos: AtomicU64,
}

/// The first token of a streamed answer. Times are since any moment that is the same for all calls.
#[derive(Clone, Copy, Debug)]
pub struct FirstToken {
    pub sent: Duration,
    pub now: Duration,
    /// Of the prompt.
    pub uncached_tokens: u32,
    /// Of this router at the worker, with this prompt.
    pub queued_tokens: u64,
    pub peers_queued_tokens: u64,
}

/// Sums over first tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Sample {
    /// Prompts that are long enough to show a rate.
    pub prompts: u32,
    /// Their tokens that were computed, and those of other replicas in the same time, as far as known.
    pub tokens: u64,
    /// The time in which the worker computed them.
    pub time: Duration,
    /// Prompts that were nearly all cached.
    pub short_prompts: u32,
    pub short_time: Duration,
}

impl Seen {
    pub fn on_first_token(&self, first: &FirstToken) {
        let now = nanos(first.now);
        let before = self.last_nanos.fetch_max(now, Relaxed);
        let began = before.max(nanos(first.sent));
        let time = now.saturating_sub(began);
        let sums = match first.uncached_tokens {
            ..SHORT_TOKENS => &self.short,
            LONG_TOKENS.. => &self.long,
            _ => return,
        };
        // While other replicas' prompts are in the queue, the worker computes those in between.
        let own = first
            .queued_tokens
            .max(u64::from(first.uncached_tokens))
            .max(1);
        let peers = first
            .peers_queued_tokens
            .min(own.saturating_mul(MAX_PEERS_FACTOR));
        let tokens = u64::from(first.uncached_tokens);
        let with_peers = tokens + (u128::from(tokens) * u128::from(peers) / u128::from(own)) as u64;
        sums.prompts.fetch_add(1, Relaxed);
        sums.tokens.fetch_add(with_peers, Relaxed);
        sums.nanos.fetch_add(time, Relaxed);
    }

    /// The sums since the last call.
    pub fn take(&self) -> Sample {
        let (long, short) = (&self.long, &self.short);
        short.tokens.store(0, Relaxed);
        Sample {
            prompts: long.prompts.swap(0, Relaxed),
            tokens: long.tokens.swap(0, Relaxed),
            time: Duration::from_nanos(long.nanos.swap(0, Relaxed)),
            short_prompts: short.prompts.swap(0, Relaxed),
            short_time: Duration::from_nanos(short.nanos.swap(0, Relaxed)),
        }
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn first(sent_ms: u64, now_ms: u64, uncached_tokens: u32) -> FirstToken {
        FirstToken {
            sent: Duration::from_millis(sent_ms),
            now: Duration::from_millis(now_ms),
            uncached_tokens,
            queued_tokens: uncached_tokens.into(),
            peers_queued_tokens: 0,
        }
    }

    #[test]
    fn a_prompt_behind_another_was_computed_from_the_first_token_of_that_one_on() {
        let seen = Seen::default();
        seen.on_first_token(&first(0, 100, 1_000));
        seen.on_first_token(&first(10, 300, 2_000));
        // The worker was idle before this one.
        seen.on_first_token(&first(1_000, 1_100, 1_000));
        let expected = Sample {
            prompts: 3,
            tokens: 4_000,
            time: Duration::from_millis(400),
            ..Sample::default()
        };
        assert_eq!(seen.take(), expected);
        assert_eq!(seen.take(), Sample::default());
    }

    #[test]
    fn prompts_that_one_step_computed_together_add_up() {
        let seen = Seen::default();
        seen.on_first_token(&first(0, 200, 1_000));
        seen.on_first_token(&first(0, 200, 1_000));
        let sample = seen.take();
        assert_eq!(
            (sample.tokens, sample.time),
            (2_000, Duration::from_millis(200))
        );
    }

    #[test]
    fn a_prompt_that_is_nearly_all_cached_shows_no_rate() {
        let seen = Seen::default();
        seen.on_first_token(&first(0, 20, 63));
        seen.on_first_token(&first(100, 150, 64));
        let expected = Sample {
            short_prompts: 1,
            short_time: Duration::from_millis(20),
            ..Sample::default()
        };
        assert_eq!(seen.take(), expected);
    }

    #[test]
    fn what_other_replicas_have_in_the_queue_was_computed_in_the_same_time() {
        let check = |queued_tokens, peers_queued_tokens, expected| {
            let seen = Seen::default();
            seen.on_first_token(&FirstToken {
                queued_tokens,
                peers_queued_tokens,
                ..first(0, 100, 1_000)
            });
            assert_eq!(seen.take().tokens, expected);
        };
        check(1_000, 0, 1_000);
        check(1_000, 2_000, 3_000);
        check(4_000, 2_000, 1_500);
        check(1_000, u64::MAX, 16_000);
        check(0, 1_000, 2_000);
    }
}
