//! A worker that is played: it computes prompts in chunks, in the order of arrival, and generates a token of each answer in
//! each step. Pure.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use rustc_hash::FxHashSet;

use super::types::{Prefixes, Sent, Worker};
use crate::fleet::speed::Speed;

/// Prompt tokens of one step: what vLLM takes by default on current GPUs.
const STEP_TOKENS: f64 = 8_192.0;

#[derive(Debug)]
pub(super) struct Engine {
    speed: Speed,
    slots: usize,
    now: f64,
    /// The steps so far.
    step: f64,
    cached: FxHashSet<u64>,
    waiting: VecDeque<Request>,
    /// Prompt tokens of the first one that are not computed; `None` before it is begun.
    left: Option<f64>,
    /// The next to end first.
    answers: BinaryHeap<Reverse<Answer>>,
    context_tokens: f64,
}

#[derive(Debug)]
struct Request {
    at: f64,
    prompt_tokens: f64,
    answer_tokens: f64,
    prefixes: Prefixes,
}

#[derive(Debug)]
struct Answer {
    last_step: f64,
    at: f64,
    tokens: f64,
}

impl Engine {
    pub(super) fn new(worker: &Worker, cached: FxHashSet<u64>) -> Self {
        Self {
            speed: worker.speed,
            slots: worker.slots.max(1) as usize,
            now: 0.0,
            step: 0.0,
            cached,
            waiting: VecDeque::new(),
            left: None,
            answers: BinaryHeap::new(),
            context_tokens: 0.0,
        }
    }

    /// Requests that have not ended.
    pub(super) fn requests(&self) -> usize {
        self.waiting.len() + self.answers.len()
    }

    pub(super) fn submit(&mut self, at: f64, sent: &Sent) {
        self.waiting.push_back(Request {
            at,
            prompt_tokens: f64::from(sent.prompt_tokens).max(1.0),
            answer_tokens: sent.answer_tokens.round().max(1.0),
            prefixes: sent.prefixes.clone(),
        });
    }

    /// Computes steps until one ends at `until` or later. Returns how long the requests that ended took together.
    pub(super) fn run_until(&mut self, until: f64) -> f64 {
        let mut took = 0.0;
        while self.requests() > 0 && self.now < until {
            took += self.run_steps(until);
        }
        // Without requests it does nothing.
        if self.requests() == 0 && until.is_finite() {
            self.now = self.now.max(until);
        }
        took
    }

    /// A step that computes prompts, or as many as change nothing else.
    fn run_steps(&mut self, until: f64) -> f64 {
        let (computed, prompt_tokens) = self.take_prompts();
        let count = self.answers.len() as f64;
        let step = self.speed.step_time(count, self.context_tokens);
        let steps = match self.answers.peek() {
            Some(Reverse(next)) if prompt_tokens == 0.0 => {
                let to_event = ((until - self.now) / step).ceil();
                (next.last_step - self.step).min(to_event).max(1.0)
            }
            _ => 1.0,
        };
        // Contexts grow by a token a step.
        let growth = self.speed.context() * count * steps * (steps - 1.0) / 2.0;
        self.now += steps * step + growth + prompt_tokens * self.speed.prompt_token;
        self.step += steps;
        self.context_tokens += count * steps;
        self.end_answers() + self.begin_answers(computed)
    }

    /// The prompts that the next step ends, and how many tokens it computes.
    fn take_prompts(&mut self) -> (Vec<Request>, f64) {
        let (mut computed, mut tokens) = (Vec::new(), 0.0);
        while tokens < STEP_TOKENS && self.answers.len() + computed.len() < self.slots {
            let Some(first) = self.waiting.front() else {
                break;
            };
            let left = match self.left.take() {
                Some(left) => left,
                None => {
                    let cached = first.prefixes.iter().rev();
                    let cached = cached
                        .filter(|(prefix, _)| self.cached.contains(prefix))
                        .map(|(_, tokens)| f64::from(*tokens))
                        .next();
                    let prefixes = first.prefixes.iter().map(|(prefix, _)| *prefix);
                    self.cached.extend(prefixes);
                    // The last token gives the answer's first.
                    (first.prompt_tokens - cached.unwrap_or(0.0)).max(1.0)
                }
            };
            let taken = left.min(STEP_TOKENS - tokens);
            tokens += taken;
            if taken < left {
                self.left = Some(left - taken)
            } else {
                computed.extend(self.waiting.pop_front())
            }
        }
        (computed, tokens)
    }

    fn end_answers(&mut self) -> f64 {
        let mut took = 0.0;
        while let Some(Reverse(next)) = self.answers.peek()
            && next.last_step <= self.step
        {
            took += self.now - next.at;
            self.context_tokens -= next.tokens;
            self.answers.pop();
        }
        took
    }

    /// A computed prompt gives its answer's first token.
    fn begin_answers(&mut self, computed: Vec<Request>) -> f64 {
        let mut took = 0.0;
        for request in computed {
            if request.answer_tokens <= 1.0 {
                took += self.now - request.at;
                continue;
            }
            self.context_tokens += request.prompt_tokens + 1.0;
            self.answers.push(Reverse(Answer {
                last_step: self.step + request.answer_tokens - 1.0,
                at: request.at,
                tokens: request.prompt_tokens + request.answer_tokens,
            }));
        }
        took
    }
}

impl Ord for Answer {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.last_step.total_cmp(&other.last_step)
    }
}

impl PartialOrd for Answer {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Answer {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Answer {}
