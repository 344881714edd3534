//! A model of one LLM engine: a queue, steps that compute prompts and decode answers, a prefix cache.
//!
//! It does what vLLM's scheduler does, as far as a router can tell from outside: prompts are computed
//! in chunks, all running requests decode together, a step that also computes prompts takes longer,
//! and when the cache is too small for all of them the last one is sent back to the queue. It has no
//! clock and no I/O: time is an argument, and it says when it next wants to be called.

pub mod cache;
mod kept;

use std::collections::VecDeque;
use std::iter::Sum;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::{Duration, Instant};

use self::cache::{Cache, Change, Held, Label, Path};
use self::kept::Kept;

#[derive(Clone, Debug)]
pub struct Settings {
    pub block_tokens: NonZeroU32,
    pub capacity_blocks: NonZeroU32,
    /// Requests computed at the same time.
    pub running_max: NonZeroU32,
    /// Requests that wait; one more is refused.
    pub queue_max: usize,
    /// Tokens computed in one step.
    pub batch_tokens_max: NonZeroU32,
    pub prefill_tokens_per_second: NonZeroU32,
    /// How long a step takes that only decodes.
    pub decode_time: Duration,
    /// Where the names of the blocks start. Engines with the same root give the same names.
    pub root: u64,
}

#[derive(Clone, Debug, Default)]
pub struct Request {
    pub prompt: Vec<u32>,
    /// The tokens that the engine will pretend to think of. With none, it only reads the prompt.
    pub answer: Vec<u32>,
    /// Requests with different salts share no blocks. 0 is the common one.
    pub salt: u64,
    pub label: Option<Arc<Label>>,
    /// Whether cached blocks are told of again, as if they were stored.
    pub report_cached: bool,
    /// The prompt's first tokens whose blocks came from another engine: they are not computed here.
    pub received_tokens: usize,
    /// How long its blocks stay in use after its end, for another engine to fetch them.
    pub keep_for: Option<Duration>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestKey(u64);

/// Why a request was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// The queue is full; later may be better.
    Busy,
    /// Nothing to read.
    Empty,
    /// Prompt and answer together would never fit into the cache.
    TooLong,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Output {
    pub key: RequestKey,
    pub event: Event,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// The prompt is computed, but for its cached beginning, and this is the answer's first token.
    First {
        token: u32,
        cached_tokens: usize,
    },
    Token {
        token: u32,
    },
    /// The request is over. A request without an answer has only this.
    Done {
        cached_tokens: usize,
    },
}

/// What the engine is doing now.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Gauges {
    pub running: usize,
    pub waiting: usize,
    /// The part of the cache that requests are using, 0 to 1.
    pub kv_usage: f64,
    /// Requests that are over and whose blocks are kept for another engine, and how many those are.
    pub kept: usize,
    pub kept_blocks: usize,
}

/// What the engine has done since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Prompt tokens looked up in the cache, and those found there.
    pub prefix_queries: u64,
    pub prefix_hits: u64,
    pub prompt_tokens: u64,
    /// Of these, the ones that came from another engine and were not here.
    pub received_tokens: u64,
    pub generation_tokens: u64,
    pub preemptions: u64,
    pub finished: u64,
    pub cancelled: u64,
    pub refused: u64,
    /// Requests whose blocks were kept until the time was up.
    pub kept_expired: u64,
    /// The most blocks that were kept at a time.
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
            cancelled: sum.cancelled + one.cancelled,
            refused: sum.refused + one.refused,
            kept_expired: sum.kept_expired + one.kept_expired,
            kept_blocks_peak: sum.kept_blocks_peak + one.kept_blocks_peak,
        })
    }
}

#[derive(Debug)]
pub struct Engine {
    settings: Settings,
    cache: Cache,
    waiting: VecDeque<Sequence>,
    /// In the order of admission; the last is the first to be sent back when blocks run out.
    running: Vec<Running>,
    /// Blocks of requests that are over.
    kept: Kept,
    /// Nothing runs, and what is kept leaves no room for the first that waits.
    is_blocked: bool,
    /// When the step that is being computed ends.
    step_ends: Option<Instant>,
    next_key: u64,
    counters: Counters,
    /// What each step did to the cache, for those that did anything.
    steps: Vec<Vec<Change>>,
}

/// A request with what has been made of it so far.
#[derive(Debug)]
struct Sequence {
    key: RequestKey,
    /// The prompt, then the part of the answer that is out.
    tokens: Vec<u32>,
    prompt_tokens: usize,
    answer: Vec<u32>,
    root: u64,
    label: Option<Arc<Label>>,
    report_cached: bool,
    received_tokens: usize,
    keep_for: Option<Duration>,
    arrived: Instant,
    /// Known from the first admission on. A request that is sent back does not look again, for the
    /// client is told once.
    cached_tokens: Option<usize>,
}

/// A sequence that holds blocks.
#[derive(Debug)]
struct Running {
    sequence: Sequence,
    path: Path,
    /// How many of its tokens are computed, and how many more will be when the step ends.
    computed: usize,
    scheduled: usize,
    /// All but the end of the prompt came from another engine.
    is_received: bool,
}

impl Engine {
    pub fn new(settings: Settings) -> Self {
        Self {
            cache: Cache::new(settings.block_tokens, settings.capacity_blocks),
            settings,
            waiting: VecDeque::new(),
            running: Vec::new(),
            kept: Kept::default(),
            is_blocked: false,
            step_ends: None,
            next_key: 0,
            counters: Counters::default(),
            steps: Vec::new(),
        }
    }

    /// Puts a request at the end of the queue. Nothing is computed before the next `on_timeout`.
    pub fn submit(&mut self, now: Instant, request: Request) -> Result<RequestKey, Refused> {
        if let Err(refused) = self.check(&request) {
            self.counters.refused += 1;
            return Err(refused);
        }
        let key = RequestKey(self.next_key);
        self.next_key += 1;
        self.waiting.push_back(Sequence {
            key,
            prompt_tokens: request.prompt.len(),
            tokens: request.prompt,
            answer: request.answer,
            root: self.settings.root ^ request.salt,
            label: request.label,
            report_cached: request.report_cached,
            received_tokens: request.received_tokens,
            keep_for: request.keep_for,
            arrived: now,
            cached_tokens: None,
        });
        Ok(key)
    }

    /// Forgets a request and frees its blocks; false if it is over already. The step that is being
    /// computed does not get shorter by it.
    pub fn cancel(&mut self, key: RequestKey) -> bool {
        if let Some(at) = self.waiting.iter().position(|it| it.key == key) {
            self.waiting.remove(at);
        } else if let Some(at) = self.running.iter().position(|it| it.sequence.key == key) {
            let running = self.running.remove(at);
            self.cache.release(running.path);
        } else {
            return false;
        }
        self.is_blocked = false;
        self.counters.cancelled += 1;
        true
    }

    /// The numbers of the blocks that are kept of a request that is over.
    pub fn kept_blocks(&self, key: RequestKey) -> Option<Vec<u32>> {
        self.kept.blocks(key)
    }

    /// Frees what is kept of a request; false if nothing is.
    pub fn release_kept(&mut self, key: RequestKey) -> bool {
        let path = self.kept.remove(key);
        let was_kept = path.is_some();
        if let Some(path) = path {
            self.cache.release(path);
            self.is_blocked = false;
        }
        was_kept
    }

    /// Tokens of a prompt that are not held here.
    pub fn missing_tokens(&self, prompt: &[u32], salt: u64) -> usize {
        prompt.len() - self.cache.hit_tokens(self.settings.root ^ salt, prompt)
    }

    /// Whether the next request would be refused.
    pub fn is_full(&self) -> bool {
        self.waiting.len() >= self.settings.queue_max
    }

    /// When `on_timeout` has something to do; `None` if only a new request can change anything.
    pub fn next_timeout(&self) -> Option<Instant> {
        let front = self.waiting.front().filter(|_| !self.is_blocked);
        let front_arrived = front.map(|sequence| sequence.arrived);
        let work = self.step_ends.or(front_arrived);
        [work, self.kept.next_end()].into_iter().flatten().min()
    }

    /// Does all that happened up to `now`. A late call loses no time: steps follow each other as if
    /// each call had come at its moment.
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

    /// Clears the cache; false, and unchanged, while any request holds blocks. The next step tells.
    pub fn reset(&mut self) -> bool {
        self.cache.reset()
    }

    pub fn gauges(&self) -> Gauges {
        Gauges {
            running: self.running.len(),
            waiting: self.waiting.len(),
            kv_usage: self.cache.used_blocks() as f64 / self.cache.capacity_blocks() as f64,
            kept: self.kept.len(),
            kept_blocks: self.kept.all_blocks(),
        }
    }

    pub fn counters(&self) -> Counters {
        self.counters
    }

    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Takes what the steps have done to the blocks since the last call, a list for each step that
    /// did anything. Whoever drives the engine must call this now and then, for it only grows
    /// otherwise.
    pub fn drain_steps(&mut self) -> Vec<Vec<Change>> {
        std::mem::take(&mut self.steps)
    }

    /// All blocks that are held now, in the order of names. What the step that is being computed does
    /// is seen here first.
    pub fn held(&self) -> Vec<Held> {
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

    /// Chooses what the next step computes, running requests first, and says when it ends.
    fn begin_step(&mut self, at: Instant) {
        let mut budget = self.settings.batch_tokens_max.get() as usize;
        let preemptions = self.counters.preemptions;
        self.continue_running(&mut budget);
        // Who was just sent back would take the room again that it was sent back for.
        if self.counters.preemptions == preemptions {
            self.admit_waiting(at, &mut budget);
        }

        let mut prefill_tokens = 0;
        let mut decodes = false;
        for running in &self.running {
            if running.is_decoding() {
                decodes |= running.scheduled > 0;
            } else {
                prefill_tokens += running.scheduled;
            }
        }
        if prefill_tokens > 0 || decodes {
            self.step_ends = Some(at + self.step_time(prefill_tokens, decodes));
        } else {
            let front = self.waiting.front();
            self.is_blocked = front.is_some_and(|sequence| sequence.arrived <= at);
        }
    }

    fn release_expired(&mut self, at: Instant) {
        for path in self.kept.remove_ended(at) {
            self.cache.release(path);
            self.is_blocked = false;
            self.counters.kept_expired += 1;
        }
    }

    fn continue_running(&mut self, budget: &mut usize) {
        let mut next = 0;
        while next < self.running.len() {
            let running = &mut self.running[next];
            let tokens = running.sequence.tokens.len();
            if self.cache.grow(&mut running.path, tokens) {
                running.scheduled = (tokens - running.computed).min(*budget);
                *budget -= running.scheduled;
                next += 1;
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
                // The order is kept: a small request does not overtake one that waits for room.
                self.waiting.push_front(sequence);
                return;
            };
            if sequence.cached_tokens.is_none() {
                sequence.cached_tokens = Some(cached);
                self.counters.prefix_queries += sequence.prompt_tokens as u64;
                self.counters.prefix_hits += cached as u64;
            }
            // Once: what it received is gone with its blocks if it is sent back.
            let received = std::mem::take(&mut sequence.received_tokens);
            self.counters.received_tokens += received.saturating_sub(cached) as u64;
            // The first token of the answer comes from the prompt's last one, wherever the rest is from.
            let computed = cached.max(received.min(sequence.tokens.len() - 1));
            let scheduled = (sequence.tokens.len() - computed).min(*budget);
            *budget -= scheduled;
            let path = path.labelled(sequence.label.clone());
            // Once, also if it is sent back and comes again.
            if std::mem::take(&mut sequence.report_cached) {
                self.cache.report(&path, &sequence.tokens);
            }
            self.running.push(Running {
                sequence,
                path,
                computed,
                scheduled,
                is_received: received > 0,
            });
        }
    }

    /// Takes the blocks of the youngest running request. What it had computed is lost, unless its
    /// blocks are still there when it gets its next turn.
    fn preempt_last(&mut self) {
        let last = self.running.pop().expect("a running request asked for it");
        self.cache.release(last.path);
        self.waiting.push_front(last.sequence);
        self.counters.preemptions += 1;
    }

    fn step_time(&self, prefill_tokens: usize, decodes: bool) -> Duration {
        let rate = self.settings.prefill_tokens_per_second.get();
        let prefill_time =
            Duration::from_nanos(prefill_tokens as u64 * 1_000_000_000 / u64::from(rate));
        if decodes {
            prefill_time + self.settings.decode_time
        } else {
            prefill_time
        }
    }

    fn keep(&mut self, running: Running, until: Instant) {
        self.kept.insert(running.sequence.key, running.path, until);
        let blocks = self.kept.all_blocks() as u64;
        self.counters.kept_blocks_peak = self.counters.kept_blocks_peak.max(blocks);
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
            if caught_up && running.sequence.speak(&mut self.counters, outputs) {
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

impl Running {
    /// The prompt is behind it, and only its last token is to be computed.
    fn is_decoding(&self) -> bool {
        let sequence = &self.sequence;
        let prompt_is_behind = sequence.tokens.len() > sequence.prompt_tokens || self.is_received;
        prompt_is_behind && self.computed + 1 == sequence.tokens.len()
    }
}

impl Sequence {
    /// Says its next token; true if that was all.
    fn speak(&mut self, counters: &mut Counters, outputs: &mut Vec<Output>) -> bool {
        let key = self.key;
        let said = self.tokens.len() - self.prompt_tokens;
        let cached_tokens = self
            .cached_tokens
            .expect("set when the request was admitted");
        if said == 0 {
            counters.prompt_tokens += self.prompt_tokens as u64;
        }
        if let Some(&token) = self.answer.get(said) {
            self.tokens.push(token);
            counters.generation_tokens += 1;
            let event = match said {
                0 => Event::First {
                    token,
                    cached_tokens,
                },
                _ => Event::Token { token },
            };
            outputs.push(Output { key, event });
        }
        let done = said + 1 >= self.answer.len();
        if done {
            counters.finished += 1;
            let event = Event::Done { cached_tokens };
            outputs.push(Output { key, event });
        }
        done
    }
}

#[cfg(test)]
mod tests;
