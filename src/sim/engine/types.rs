//! The inputs and outputs of the engine model. Pure.

use std::iter::Sum;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use super::cache::Label;
use crate::sim::step_time::StepTimes;

#[derive(Clone, Debug)]
pub struct Settings {
    pub block_tokens: NonZeroU32,
    pub capacity_blocks: NonZeroU32,
    /// Requests computed at the same time.
    pub running_max: NonZeroU32,
    /// Waiting requests; further ones are refused.
    pub queue_max: usize,
    /// Tokens computed in one step.
    pub batch_tokens_max: NonZeroU32,
    pub step_times: StepTimes,
}

#[derive(Clone, Debug, Default)]
pub struct Request {
    pub prompt: Vec<u32>,
    /// The tokens to generate. Without any, the engine only computes the prompt.
    pub answer: Vec<u32>,
    /// Requests with different salts share no blocks; 0 means no salt.
    pub salt: u64,
    pub label: Option<Arc<Label>>,
    /// Prompt tokens whose blocks came from a prefill engine, so they are not computed here.
    pub received_tokens: usize,
    /// How long the blocks stay pinned after the end, for a decode engine to fetch them.
    pub keep_for: Option<Duration>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestKey(pub(super) u64);

/// Why a request was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// The queue is full.
    Busy,
    /// The prompt is empty.
    Empty,
    /// Prompt and answer together do not fit into the cache.
    TooLong,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Output {
    pub key: RequestKey,
    pub event: Event,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// The first token of the answer, after prefill.
    First {
        token: u32,
        cached_tokens: usize,
    },
    Token {
        token: u32,
    },
    /// The request is finished. A request without an answer has only this event.
    Done {
        cached_tokens: usize,
    },
}

/// The current load of the engine.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Gauges {
    pub running: usize,
    pub waiting: usize,
    /// The used part of the KV cache, 0 to 1.
    pub kv_usage: f64,
    /// Finished requests whose blocks are kept for a decode engine, and the number of these blocks.
    pub kept: usize,
    pub kept_blocks: usize,
}

/// Totals since the engine was created.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Prompt tokens looked up in the cache, and those found there.
    pub prefix_queries: u64,
    pub prefix_hits: u64,
    pub prompt_tokens: u64,
    /// Prompt tokens that came from a prefill engine and were not cached here.
    pub received_tokens: u64,
    pub generation_tokens: u64,
    pub preemptions: u64,
    pub finished: u64,
    /// Requests whose kept blocks expired.
    pub kept_expired: u64,
    /// The largest number of blocks kept at one time.
    pub kept_blocks_peak: u64,
}

impl Sum for Counters {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        all.fold(Self::default(), |sum, one| Self {
            prefix_queries: sum.prefix_queries + one.prefix_queries,
            prefix_hits: sum.prefix_hits + one.prefix_hits,
            prompt_tokens: sum.prompt_tokens + one.prompt_tokens,
            received_tokens: sum.received_tokens + one.received_tokens,
            generation_tokens: sum.generation_tokens + one.generation_tokens,
            preemptions: sum.preemptions + one.preemptions,
            finished: sum.finished + one.finished,
            kept_expired: sum.kept_expired + one.kept_expired,
            kept_blocks_peak: sum.kept_blocks_peak + one.kept_blocks_peak,
        })
    }
}
