//! A model of one LLM engine: a queue, steps that compute prompts and decode answers, and a prefix cache. Pure: time is
//! an argument, and `next_timeout` says when the engine has to be called next.
//!
//! It does what vLLM's scheduler does as far as a router can see: prompts are computed in chunks, all running requests
//! decode together, a step takes longer the more prompt tokens it computes, the more requests decode and the longer
//! their contexts are, and when the cache is full the youngest request is preempted.

pub mod cache;
mod sequence;
mod types;

use std::collections::{BTreeMap, VecDeque};
use std::time::Instant;

use self::cache::{Cache, CachedBlock, Change, Path};
use self::sequence::{Running, Sequence};
pub use self::types::{Counters, Event, Gauges, Output, Refused, Request, RequestKey, Settings};
use crate::sim::step_time::Batch;

#[derive(Debug)]
pub struct Engine {
    settings: Settings,
    cache: Cache,
    waiting: VecDeque<Sequence>,
    /// Waiting requests for which the step that runs had no room.
    left_waiting: usize,
    /// Running requests in the order of admission; the last one is preempted first.
    running: Vec<Running>,
    /// Blocks of finished prefill legs, pinned until a decode engine has fetched them or this time.
    kept: BTreeMap<RequestKey, (Path, Instant)>,
    /// Nothing runs, and the kept blocks leave no room for the first waiting request.
    is_blocked: bool,
    /// The end of the current step.
    step_ends: Option<Instant>,
    next_key: u64,
    counters: Counters,
    /// The cache changes of each step that made any.
    steps: Vec<Vec<Change>>,
}

impl Engine {
    pub fn new(settings: Settings) -> Self {
        Self {
            cache: Cache::new(settings.block_tokens, settings.capacity_blocks),
            settings,
            waiting: VecDeque::new(),
            left_waiting: 0,
            running: Vec::new(),
            kept: BTreeMap::new(),
            is_blocked: false,
            step_ends: None,
            next_key: 0,
            counters: Counters::default(),
            steps: Vec::new(),
        }
    }

    /// Queues a request. Nothing is computed before the next `on_timeout`.
    pub fn submit(&mut self, now: Instant, request: Request) -> Result<RequestKey, Refused> {
        self.check(&request)?;
        let key = RequestKey(self.next_key);
        self.next_key += 1;
        self.waiting.push_back(Sequence {
            key,
            prompt_tokens: request.prompt.len(),
            tokens: request.prompt,
            answer: request.answer,
            root: request.salt,
            label: request.label,
            received_tokens: request.received_tokens,
            keep_for: request.keep_for,
            arrived: now,
            cached_tokens: None,
        });
        Ok(key)
    }

    /// Removes a request and frees its blocks. False if it has finished. The current step does not get shorter.
    pub fn cancel(&mut self, key: RequestKey) -> bool {
        if let Some(at) = self.waiting.iter().position(|sequence| sequence.key == key) {
            self.waiting.remove(at);
        } else if let Some(at) = self
            .running
            .iter()
            .position(|running| running.sequence.key == key)
        {
            let running = self.running.remove(at);
            self.cache.release(running.path);
        } else {
            return false;
        }
        self.is_blocked = false;
        true
    }

    /// The block ids that are kept for a finished request.
    pub fn kept_blocks(&self, key: RequestKey) -> Option<Vec<u32>> {
        self.kept.get(&key).map(|(path, _)| path.numbers())
    }

    /// Frees the blocks kept for a request. False if there are none.
    pub fn release_kept(&mut self, key: RequestKey) -> bool {
        let Some((path, _)) = self.kept.remove(&key) else {
            return false;
        };
        self.cache.release(path);
        self.is_blocked = false;
        true
    }

    /// The adapters of running requests, and of waiting ones.
    pub fn adapters(&self) -> (Vec<String>, Vec<String>) {
        let name = |sequence: &Sequence| {
            let (_, name) = sequence.label.as_ref()?.lora.as_ref()?;
            Some(name.to_string())
        };
        let running = self.running.iter().map(|running| &running.sequence);
        (
            running.filter_map(name).collect(),
            self.waiting.iter().filter_map(name).collect(),
        )
    }

    /// Prompt tokens that are not cached.
    pub fn missing_tokens(&self, prompt: &[u32], salt: u64) -> usize {
        prompt.len() - self.cache.hit_tokens(salt, prompt)
    }

    /// The queue is full, so the next request would be refused.
    pub fn is_full(&self) -> bool {
        self.waiting.len() >= self.settings.queue_max
    }

    /// When to call `on_timeout` next; `None` if the engine is idle.
    pub fn next_timeout(&self) -> Option<Instant> {
        let front = self.waiting.front().filter(|_| !self.is_blocked);
        let front_arrived = front.map(|sequence| sequence.arrived);
        let work = self.step_ends.or(front_arrived);
        let next_expiry = self.kept.values().map(|(_, expires)| *expires).min();
        [work, next_expiry].into_iter().flatten().min()
    }

    /// Processes everything due up to `now`. A late call gives the same result as calls on time.
    pub fn on_timeout(&mut self, now: Instant) -> Vec<Output> {
        let mut outputs = Vec::new();
        while let Some(due) = self.next_timeout().filter(|due| *due <= now) {
            self.release_expired(due);
            match self.step_ends {
                Some(ends) if ends > due => continue,
                Some(_) => {
                    self.step_ends = None;
                    self.finish_step(due, &mut outputs);
                }
                None => {}
            }
            self.begin_step(due);
        }
        outputs
    }

    /// Clears the cache. False, and nothing is cleared, while blocks are in use. The next step reports it.
    pub fn reset(&mut self) -> bool {
        self.cache.reset()
    }

    pub fn gauges(&self) -> Gauges {
        Gauges {
            running: self.running.len(),
            // As engines say it: what came during a step has not been waiting for one yet.
            waiting: self.left_waiting.min(self.waiting.len()),
            kv_usage: self.cache.used_blocks() as f64 / self.cache.capacity_blocks() as f64,
            kept: self.kept.len(),
            kept_blocks: self.kept_blocks_in_all(),
        }
    }

    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Takes the cache changes since the last call, one list for each step that made any. They pile up until this is
    /// called.
    pub fn drain_steps(&mut self) -> Vec<Vec<Change>> {
        std::mem::take(&mut self.steps)
    }

    /// All cached blocks, sorted by hash. Includes changes of the current step, which are not yet reported.
    pub fn cached_blocks(&self) -> Vec<CachedBlock> {
        self.cache.list()
    }

    fn check(&self, request: &Request) -> Result<(), Refused> {
        let tokens = request.prompt.len() + request.answer.len();
        let block_tokens = self.settings.block_tokens.get() as usize;
        if request.prompt.is_empty() {
            Err(Refused::Empty)
        } else if tokens > block_tokens * self.cache.capacity_blocks() {
            Err(Refused::TooLong)
        } else if self.is_full() {
            Err(Refused::Busy)
        } else {
            Ok(())
        }
    }

    /// Schedules the next step, running requests first.
    fn begin_step(&mut self, at: Instant) {
        let mut budget = self.settings.batch_tokens_max.get() as usize;
        let preemptions = self.counters.preemptions;
        self.continue_running(&mut budget);
        // A request that was just preempted must not take the freed room again.
        if self.counters.preemptions == preemptions {
            self.admit_waiting(at, &mut budget);
        }

        self.left_waiting = self
            .waiting
            .partition_point(|sequence| sequence.arrived <= at);
        let mut batch = Batch::default();
        for running in &self.running {
            if !running.is_decoding() {
                batch.prompt_tokens += running.scheduled as u64;
            } else if running.scheduled > 0 {
                batch.answers += 1;
                batch.context_tokens += running.sequence.tokens.len() as u64;
            }
        }
        if batch != Batch::default() {
            self.step_ends = Some(at + self.settings.step_times.of(batch));
        } else {
            let front = self.waiting.front();
            self.is_blocked = front.is_some_and(|sequence| sequence.arrived <= at);
        }
    }

    fn release_expired(&mut self, at: Instant) {
        let expired = self.kept.extract_if(.., |_, (_, expires)| *expires <= at);
        for (_, (path, _)) in expired {
            self.cache.release(path);
            self.is_blocked = false;
            self.counters.kept_expired += 1;
        }
    }

    fn continue_running(&mut self, budget: &mut usize) {
        let mut index = 0;
        while index < self.running.len() {
            let running = &mut self.running[index];
            let tokens = running.sequence.tokens.len();
            if self.cache.grow(&mut running.path, tokens) {
                running.scheduled = (tokens - running.computed).min(*budget);
                *budget -= running.scheduled;
                index += 1;
            } else {
                self.preempt_last();
            }
        }
    }

    fn admit_waiting(&mut self, at: Instant, budget: &mut usize) {
        let running_max = self.settings.running_max.get() as usize;
        while *budget > 0 && self.running.len() < running_max {
            let arrived_by_then = |sequence: &mut Sequence| sequence.arrived <= at;
            let Some(mut sequence) = self.waiting.pop_front_if(arrived_by_then) else {
                return;
            };
            let Some((path, cached)) = self.cache.open(sequence.root, &sequence.tokens) else {
                // First come, first served: a small request does not overtake one that waits for room.
                self.waiting.push_front(sequence);
                return;
            };
            if sequence.cached_tokens.is_none() {
                sequence.cached_tokens = Some(cached);
                self.counters.prefix_queries += sequence.prompt_tokens as u64;
                self.counters.prefix_hits += cached as u64;
            }
            // Only once: after a preemption the received blocks are gone.
            let received = std::mem::take(&mut sequence.received_tokens);
            self.counters.received_tokens += received.saturating_sub(cached) as u64;
            // The last prompt token is always computed, because it gives the answer's first token.
            let computed = cached.max(received.min(sequence.tokens.len() - 1));
            let scheduled = (sequence.tokens.len() - computed).min(*budget);
            *budget -= scheduled;
            let path = path.labelled(sequence.label.clone());
            self.running.push(Running {
                sequence,
                path,
                computed,
                scheduled,
                is_received: received > 0,
            });
        }
    }

    /// Preempts the youngest running request. Its blocks are free, and cached until they are evicted.
    fn preempt_last(&mut self) {
        let last = self
            .running
            .pop()
            .expect("a running request needs the room");
        self.cache.release(last.path);
        self.waiting.push_front(last.sequence);
        self.counters.preemptions += 1;
    }

    fn keep(&mut self, running: Running, until: Instant) {
        self.kept
            .insert(running.sequence.key, (running.path, until));
        let blocks = self.kept_blocks_in_all() as u64;
        self.counters.kept_blocks_peak = self.counters.kept_blocks_peak.max(blocks);
    }

    /// A block that is kept for several requests counts for each.
    fn kept_blocks_in_all(&self) -> usize {
        self.kept.values().map(|(path, _)| path.len()).sum()
    }

    fn finish_step(&mut self, at: Instant, outputs: &mut Vec<Output>) {
        let mut index = 0;
        while index < self.running.len() {
            let running = &mut self.running[index];
            let scheduled = std::mem::take(&mut running.scheduled);
            running.computed += scheduled;
            let tokens = &running.sequence.tokens;
            self.cache.fill(&mut running.path, tokens, running.computed);
            let caught_up = scheduled > 0 && running.computed == tokens.len();
            if caught_up && running.sequence.generate(&mut self.counters, outputs) {
                let running = self.running.remove(index);
                match running.sequence.keep_for {
                    None => self.cache.release(running.path),
                    Some(time) => self.keep(running, at + time),
                }
            } else {
                index += 1;
            }
        }
        let changes = self.cache.drain_changes();
        if !changes.is_empty() {
            self.steps.push(changes);
        }
    }
}

#[cfg(test)]
mod tests;
