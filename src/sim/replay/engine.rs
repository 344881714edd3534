//! An engine as routing needs it modelled: a prefix cache, and prompts computed one after the other at
//! a given rate. A prompt's blocks appear when it is computed. Decoding costs prompts nothing.

use std::collections::VecDeque;
use std::time::Duration;

use super::lru::Lru;
use super::workload::{Job, tokens_of};
use crate::ids::BlockHash;

#[derive(Debug)]
pub(super) struct Engine {
    cache: Lru,
    waiting: VecDeque<usize>,
    computing: Option<usize>,
    prefill_tokens_per_second: f64,
}

/// A prompt that is computed, and what changed in the cache.
#[derive(Debug)]
pub(super) struct Computed {
    pub(super) request: usize,
    pub(super) cached_tokens: u32,
    pub(super) change: Change,
}

/// What an engine's cache events tell: the request's blocks from `held` to `end` are new.
#[derive(Clone, Debug, Default)]
pub(super) struct Change {
    pub(super) held: usize,
    pub(super) end: usize,
    pub(super) evicted: Vec<BlockHash>,
}

impl Engine {
    pub(super) fn new(cache_blocks: usize, prefill_tokens_per_second: f64) -> Self {
        Self {
            cache: Lru::new(cache_blocks),
            waiting: VecDeque::new(),
            computing: None,
            prefill_tokens_per_second,
        }
    }

    /// Takes a request. If it need not wait, its prompt is computed after the returned time.
    pub(super) fn take(&mut self, jobs: &[Job], request: usize) -> Option<Duration> {
        self.waiting.push_back(request);
        self.start(jobs)
    }

    /// The prompt in work is computed. The next one is after the returned time, if there is one.
    pub(super) fn finish(&mut self, jobs: &[Job]) -> Option<(Computed, Option<Duration>)> {
        let request = self.computing.take()?;
        let mut change = Change::default();
        let blocks = &jobs[request].blocks;
        (change.held, change.end) = self.cache.put(blocks, &mut change.evicted);
        let computed = Computed {
            request,
            // Nothing else was computed meanwhile, so it is what was held at its start.
            cached_tokens: tokens_of(blocks, change.held),
            change,
        };
        Some((computed, self.start(jobs)))
    }

    fn start(&mut self, jobs: &[Job]) -> Option<Duration> {
        if self.computing.is_some() {
            return None;
        }
        let request = self.waiting.pop_front()?;
        self.computing = Some(request);
        let job = &jobs[request];
        let cached_tokens = tokens_of(&job.blocks, self.cache.depth(&job.blocks));
        // The first token of an answer comes from the last token of its prompt.
        let tokens = job.input_tokens.saturating_sub(cached_tokens).max(1);
        Some(Duration::from_secs_f64(
            f64::from(tokens) / self.prefill_tokens_per_second,
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::replay::workload;
    use crate::sim::replay::workload::tests::{entry, shape};

    #[test]
    fn prompts_are_computed_in_turn_and_only_what_is_not_cached() {
        let entries = [entry(0, 30, &[1, 2, 3]), entry(0, 34, &[1, 2, 4])];
        let jobs = workload::jobs(&entries, &shape());
        let mut engine = Engine::new(100, 10.0);
        assert_eq!(engine.take(&jobs, 0), Some(Duration::from_secs(3)));
        assert_eq!(engine.take(&jobs, 1), None);
        let (first, next) = engine.finish(&jobs).unwrap();
        assert_eq!((first.request, first.cached_tokens), (0, 0));
        assert_eq!(next, Some(Duration::from_millis(1_400)));
        let (second, next) = engine.finish(&jobs).unwrap();
        assert_eq!((second.request, second.cached_tokens), (1, 20));
        assert_eq!((second.change.held, second.change.end), (2, 3));
        assert_eq!(next, None);
        assert!(engine.finish(&jobs).is_none());
    }

    #[test]
    fn a_prompt_that_is_cached_whole_costs_one_token() {
        let jobs = workload::jobs(&[entry(0, 10, &[1]), entry(0, 10, &[1])], &shape());
        let mut engine = Engine::new(100, 10.0);
        let _ = engine.take(&jobs, 0);
        let _ = engine.take(&jobs, 1);
        let (_, next) = engine.finish(&jobs).unwrap();
        assert_eq!(next, Some(Duration::from_millis(100)));
    }
}
