//! The engine model of a replay: a prefix cache, and prompts computed one after the other at a fixed rate. A prompt's
//! blocks are cached once the whole prompt is computed. Decoding does not slow down prefill. Pure.

use std::collections::VecDeque;
use std::time::Duration;

use super::lru::Lru;
use super::workload::{Job, tokens_of};
use crate::ids::BlockHash;

#[derive(Debug)]
pub(super) struct EngineModel {
    cache: Lru,
    /// Requests whose prompts wait, as indices into the replay's jobs.
    waiting: VecDeque<usize>,
    /// The request whose prompt is being computed.
    computing: Option<usize>,
    prefill_tokens_per_second: f64,
}

/// A computed prompt, and how it changed the cache.
#[derive(Debug)]
pub(super) struct Computed {
    /// Index into the replay's jobs.
    pub(super) request: usize,
    pub(super) cached_tokens: u32,
    pub(super) change: CacheChange,
}

/// The KV event of a computed prompt: the cache gained the prompt's blocks `cached..end` and lost `evicted`.
#[derive(Clone, Debug, Default)]
pub(super) struct CacheChange {
    pub(super) cached: usize,
    pub(super) end: usize,
    pub(super) evicted: Vec<BlockHash>,
}

impl EngineModel {
    pub(super) fn new(cache_blocks: usize, prefill_tokens_per_second: f64) -> Self {
        Self {
            cache: Lru::new(cache_blocks),
            waiting: VecDeque::new(),
            computing: None,
            prefill_tokens_per_second,
        }
    }

    /// Queues a request. If the engine was idle, it starts the prompt, and returns how long computing it takes.
    pub(super) fn submit(&mut self, jobs: &[Job], request: usize) -> Option<Duration> {
        self.waiting.push_back(request);
        self.start(jobs)
    }

    /// Completes the current prompt and starts the next one. Returns the completed prompt, and how long computing
    /// the next one takes if one was waiting. `None` if the engine is idle.
    pub(super) fn finish(&mut self, jobs: &[Job]) -> Option<(Computed, Option<Duration>)> {
        let request = self.computing.take()?;
        let mut change = CacheChange::default();
        let blocks = &jobs[request].blocks;
        (change.cached, change.end) = self.cache.insert(blocks, &mut change.evicted);
        let computed = Computed {
            request,
            // Prompts are computed one at a time, so the cache is still as it was when this prompt was started.
            cached_tokens: tokens_of(blocks, change.cached),
            change,
        };
        Some((computed, self.start(jobs)))
    }

    /// Starts the next prompt if the engine is idle and one is waiting. Returns how long computing it takes.
    fn start(&mut self, jobs: &[Job]) -> Option<Duration> {
        if self.computing.is_some() {
            return None;
        }
        let request = self.waiting.pop_front()?;
        self.computing = Some(request);
        let job = &jobs[request];
        let cached_tokens = tokens_of(&job.blocks, self.cache.cached_blocks(&job.blocks));
        // An engine computes at least the prompt's last token, even if it is cached: it yields the first output token.
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
    use crate::sim::replay::workload::tests::{entry, settings};

    #[test]
    fn prompts_are_computed_in_order_without_their_cached_prefix() {
        let entries = [entry(0, 30, &[1, 2, 3]), entry(0, 34, &[1, 2, 4])];
        let jobs = workload::jobs(&entries, &settings());
        let mut engine = EngineModel::new(100, 10.0);
        assert_eq!(engine.submit(&jobs, 0), Some(Duration::from_secs(3)));
        assert_eq!(engine.submit(&jobs, 1), None);
        let (first, next) = engine.finish(&jobs).unwrap();
        assert_eq!((first.request, first.cached_tokens), (0, 0));
        assert_eq!(next, Some(Duration::from_millis(1_400)));
        let (second, next) = engine.finish(&jobs).unwrap();
        assert_eq!((second.request, second.cached_tokens), (1, 20));
        assert_eq!((second.change.cached, second.change.end), (2, 3));
        assert_eq!(next, None);
        assert!(engine.finish(&jobs).is_none());
    }

    #[test]
    fn a_fully_cached_prompt_costs_one_token() {
        let jobs = workload::jobs(&[entry(0, 10, &[1]), entry(0, 10, &[1])], &settings());
        let mut engine = EngineModel::new(100, 10.0);
        let _ = engine.submit(&jobs, 0);
        let _ = engine.submit(&jobs, 1);
        let (_, next) = engine.finish(&jobs).unwrap();
        assert_eq!(next, Some(Duration::from_millis(100)));
    }
}
