//! A model of an engine with continuous batching, in virtual time. Each step generates a token of every running answer
//! and computes prompts in the order of arrival, as far as its token budget goes. Requests wait while all slots are taken
//! or the KV memory has no room; an answer that outgrows it is preempted and computed again. Pure.
//!
//! Steps that only generate are computed together, up to the next event, so that a run of thousands of answers takes
//! milliseconds.

mod memory;
#[cfg(test)]
mod tests;

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::time::Duration;

use self::memory::Memory;
use super::workload::{Job, tokens_of};
use crate::ids::BlockHash;
use crate::sim::step_time::{Batch, Picoseconds, StepTimes, duration, picoseconds};

#[derive(Clone, Copy, Debug)]
pub(super) struct EngineSettings {
    pub(super) times: StepTimes,
    /// Tokens computed in one step.
    pub(super) batch_tokens_max: u32,
    /// Requests computed at the same time: the slots.
    pub(super) running_max: u32,
    pub(super) cache_blocks: usize,
    pub(super) block_tokens: u32,
}

#[derive(Debug)]
pub(super) struct EngineModel {
    settings: EngineSettings,
    memory: Memory,
    /// Prompts that are not computed, in the order of arrival; those of preempted answers are before them.
    waiting: VecDeque<Waiting>,
    /// The running answers, the next to end first.
    answers: BinaryHeap<Reverse<Answer>>,
    /// Prompt and answer tokens of the running answers.
    context_tokens: u64,
    phase: Phase,
    /// Steps since the start.
    step: u64,
    started: u64,
    preemptions: u64,
    /// What all steps took together.
    busy: Picoseconds,
    /// Requests of the last step, and those that it had no room for.
    running: u32,
    left_waiting: u32,
}

#[derive(Debug)]
enum Phase {
    Idle,
    Running(Plan),
    /// A step has ended and the next is not planned.
    BetweenSteps {
        now: Picoseconds,
    },
}

/// The next step, or several that only generate.
#[derive(Debug)]
struct Plan {
    begin: Picoseconds,
    steps: u64,
    batch: Batch,
    /// Requests whose prompts are computed at the end.
    computed: Vec<Waiting>,
}

#[derive(Debug)]
struct Waiting {
    /// Index into the replay's jobs.
    request: usize,
    /// What is left to compute; `None` while it has no blocks.
    left_tokens: Option<u64>,
    /// Tokens of the answer from before a preemption.
    generated: u32,
    /// When it first got blocks.
    cached_tokens: u32,
}

/// Ordered by its end.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Answer {
    /// The step that gives its last token.
    last_step: u64,
    request: usize,
    /// Counts answers in the order in which they were started.
    started: u64,
}

/// What steps have given.
#[derive(Debug, Default)]
pub(super) struct Finished {
    /// Requests that got their first tokens, with the length of their cached prefixes.
    pub(super) first: Vec<(usize, u32)>,
    pub(super) ended: Vec<usize>,
    pub(super) stored: Vec<StoredBlocks>,
}

/// The prompt's blocks `cached..end` are cached since now.
#[derive(Clone, Debug)]
pub(super) struct StoredBlocks {
    pub(super) request: usize,
    pub(super) cached: usize,
    pub(super) end: usize,
}

/// What an engine's own metrics say: of the last step, for which they were counted.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct EngineGauges {
    pub(super) running: u32,
    pub(super) waiting: u32,
    pub(super) kv_usage: f64,
}

impl EngineModel {
    pub(super) fn new(settings: EngineSettings) -> Self {
        Self {
            memory: Memory::new(settings.cache_blocks, settings.block_tokens),
            settings,
            waiting: VecDeque::new(),
            answers: BinaryHeap::new(),
            context_tokens: 0,
            phase: Phase::Idle,
            step: 0,
            started: 0,
            preemptions: 0,
            busy: 0,
            running: 0,
            left_waiting: 0,
        }
    }

    /// Queues a request. Returns when the engine's steps end, if that changes: the time replaces the one that was returned
    /// before.
    pub(super) fn submit(
        &mut self,
        now: Duration,
        jobs: &[Job],
        request: usize,
    ) -> Option<Duration> {
        let was_empty = self.waiting.is_empty();
        self.waiting.push_back(Waiting {
            request,
            left_tokens: None,
            generated: 0,
            cached_tokens: 0,
        });
        let now = picoseconds(now);
        match &mut self.phase {
            Phase::Idle => {
                self.phase = Phase::BetweenSteps { now };
                self.start(jobs)
            }
            // Behind others that wait, nothing changes for it before an answer ends.
            Phase::Running(plan) if was_empty => plan.interrupt(&self.settings.times, now),
            Phase::Running(_) | Phase::BetweenSteps { .. } => None,
        }
    }

    /// Ends the planned steps if `now` is their end. After it, `start` begins the next.
    pub(super) fn finish(&mut self, now: Duration, jobs: &[Job]) -> Option<Finished> {
        let Phase::Running(plan) = &self.phase else {
            return None;
        };
        let end = plan.end(&self.settings.times);
        if duration(end) != now {
            return None;
        }
        let next = Phase::BetweenSteps { now: end };
        let Phase::Running(plan) = std::mem::replace(&mut self.phase, next) else {
            return None;
        };
        let mut finished = Finished::default();
        self.busy += end - plan.begin;
        self.step += plan.steps;
        self.context_tokens += plan.batch.answers * plan.steps;
        if plan.steps > 1 {
            // Before the last step, the answers that end with it still had their memory.
            self.memory.grow(plan.batch.answers * (plan.steps - 1));
            self.memory.evict();
        }
        self.memory.grow(plan.batch.answers);
        self.end_answers(jobs, &mut finished);
        for computed in plan.computed {
            self.begin_answer(jobs, computed, &mut finished);
        }
        self.fit(jobs);
        Some(finished)
    }

    /// Plans the next step, after `finish`. Returns its end, or `None` if there is nothing to do.
    pub(super) fn start(&mut self, jobs: &[Job]) -> Option<Duration> {
        let Phase::BetweenSteps { now } = self.phase else {
            return None;
        };
        if self.waiting.is_empty() && self.answers.is_empty() {
            self.phase = Phase::Idle;
            (self.running, self.left_waiting) = (0, 0);
            return None;
        }
        let mut plan = Plan {
            begin: now,
            steps: 1,
            batch: Batch {
                answers: self.answers.len() as u64,
                context_tokens: self.context_tokens,
                prompt_tokens: 0,
            },
            computed: Vec::new(),
        };
        self.take_prompts(jobs, &mut plan);
        // Only the first of those who wait may be computed in part.
        let is_partial = |first: &Waiting| first.left_tokens.is_some();
        let partial = usize::from(self.waiting.front().is_some_and(is_partial));
        self.running = (self.answers.len() + plan.computed.len() + partial) as u32;
        self.left_waiting = (self.waiting.len() - partial) as u32;
        if plan.batch.prompt_tokens == 0 {
            plan.steps = self.steps_to_next_event();
        }
        let at = duration(plan.end(&self.settings.times));
        self.phase = Phase::Running(plan);
        Some(at)
    }

    pub(super) fn gauges(&self) -> EngineGauges {
        EngineGauges {
            running: self.running,
            waiting: self.left_waiting,
            kv_usage: self.memory.usage(),
        }
    }

    pub(super) fn preemptions(&self) -> u64 {
        self.preemptions
    }

    pub(super) fn busy_time(&self) -> Duration {
        duration(self.busy)
    }

    /// The blocks that were evicted since the last call. Those stored meanwhile were stored before.
    pub(super) fn drain_evicted(&mut self) -> Vec<BlockHash> {
        self.memory.drain_evicted()
    }

    /// Takes prompts into the next step, as far as tokens, slots and memory go.
    fn take_prompts(&mut self, jobs: &[Job], plan: &mut Plan) {
        let budget = u64::from(self.settings.batch_tokens_max);
        let mut budget = budget.saturating_sub(plan.batch.answers);
        let slots = self.settings.running_max as usize;
        while budget > 0 && self.answers.len() + plan.computed.len() < slots {
            let is_alone = self.answers.is_empty() && plan.computed.is_empty();
            let Some(first) = self.waiting.front_mut() else {
                return;
            };
            let job = &jobs[first.request];
            let left = match first.left_tokens {
                Some(left) => left,
                None => {
                    let private = private_tokens(job, first.generated, &self.settings);
                    if !is_alone && !self.memory.has_room(&job.blocks, private) {
                        return;
                    }
                    let cached = self.memory.cached_blocks(&job.blocks);
                    // An engine computes at least the prompt's last token: it gives the answer's first.
                    let cached =
                        tokens_of(&job.blocks, cached).min(job.input_tokens.saturating_sub(1));
                    if first.generated == 0 {
                        first.cached_tokens = cached;
                    }
                    self.memory.pin(&job.blocks, private);
                    self.memory.evict();
                    u64::from(job.input_tokens.max(1) - cached) + u64::from(first.generated)
                }
            };
            let taken = left.min(budget);
            first.left_tokens = Some(left - taken);
            budget -= taken;
            plan.batch.prompt_tokens += taken;
            if taken == left {
                plan.computed.extend(self.waiting.pop_front());
            }
        }
    }

    /// Steps until an answer ends or the memory is full.
    fn steps_to_next_event(&self) -> u64 {
        let Some(Reverse(next)) = self.answers.peek() else {
            return 1;
        };
        let to_end = next.last_step - self.step;
        let to_full = self.memory.room_tokens() / self.answers.len() as u64 + 1;
        to_end.min(to_full).max(1)
    }

    fn end_answers(&mut self, jobs: &[Job], finished: &mut Finished) {
        while let Some(Reverse(next)) = self.answers.peek()
            && next.last_step <= self.step
        {
            let request = next.request;
            self.answers.pop();
            let job = &jobs[request];
            self.context_tokens -= u64::from(job.input_tokens) + u64::from(job.output_tokens);
            self.free(jobs, request, job.output_tokens);
            finished.ended.push(request);
        }
    }

    /// A prompt is computed, which gives the next token of its answer.
    fn begin_answer(&mut self, jobs: &[Job], computed: Waiting, finished: &mut Finished) {
        let request = computed.request;
        let job = &jobs[request];
        let cached = self.memory.fill(&job.blocks);
        let end = job.blocks.len();
        if cached < end {
            finished.stored.push(StoredBlocks {
                request,
                cached,
                end,
            });
        }
        if computed.generated == 0 {
            finished.first.push((request, computed.cached_tokens));
        }
        let generated = computed.generated + 1;
        self.memory.grow(1);
        if generated >= job.output_tokens {
            self.free(jobs, request, generated);
            finished.ended.push(request);
            return;
        }
        self.context_tokens += u64::from(job.input_tokens) + u64::from(generated);
        self.answers.push(Reverse(Answer {
            last_step: self.step + u64::from(job.output_tokens - generated),
            request,
            started: self.started,
        }));
        self.started += 1;
    }

    /// Evicts cached prefixes, then preempts the answers that were started last, until what runs fits.
    fn fit(&mut self, jobs: &[Job]) {
        self.memory.evict();
        while self.memory.is_over() && self.answers.len() > 1 {
            let mut answers = std::mem::take(&mut self.answers).into_vec();
            let last = (0..answers.len()).max_by_key(|index| answers[*index].0.started);
            let Some(Reverse(last)) = last.map(|index| answers.swap_remove(index)) else {
                return;
            };
            self.answers = answers.into();
            let job = &jobs[last.request];
            let generated = job.output_tokens - (last.last_step - self.step) as u32;
            self.context_tokens -= u64::from(job.input_tokens) + u64::from(generated);
            self.free(jobs, last.request, generated);
            self.preemptions += 1;
            self.waiting.push_front(Waiting {
                request: last.request,
                left_tokens: None,
                generated,
                cached_tokens: 0,
            });
        }
    }

    fn free(&mut self, jobs: &[Job], request: usize, generated: u32) {
        let job = &jobs[request];
        let private = private_tokens(job, generated, &self.settings);
        self.memory.unpin(&job.blocks, private);
    }
}

impl Plan {
    fn end(&self, times: &StepTimes) -> Picoseconds {
        self.begin + times.of_steps(self.batch, self.steps)
    }

    /// Something came: of the steps that were planned together, the one that runs is the last. Returns its end if that
    /// is earlier than planned.
    fn interrupt(&mut self, times: &StepTimes, now: Picoseconds) -> Option<Duration> {
        let (mut low, mut high) = (1, self.steps);
        while low < high {
            let middle = low.midpoint(high);
            if self.begin + times.of_steps(self.batch, middle) >= now {
                high = middle;
            } else {
                low = middle + 1;
            }
        }
        if low == self.steps {
            return None;
        }
        self.steps = low;
        Some(duration(self.end(times)))
    }
}

/// Tokens of a request that are in no whole block of its prompt.
fn private_tokens(job: &Job, generated: u32, settings: &EngineSettings) -> u64 {
    let in_blocks = job.blocks.len() as u64 * u64::from(settings.block_tokens);
    u64::from(job.input_tokens).saturating_sub(in_blocks) + u64::from(generated)
}
