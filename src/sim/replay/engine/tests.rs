use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;
use crate::sim::replay::workload;
use crate::sim::replay::workload::tests::{entry, settings as workload_settings};
use crate::sim::step_time::AnswerTimes;

/// 100 prompt tokens a second; 50 ms a step, 10 ms more for each answer and 1 ms for each token of context.
fn settings() -> EngineSettings {
    let answers = AnswerTimes {
        decode_time_per_answer: Duration::from_millis(10),
        decode_time_per_context_token: Duration::from_millis(1),
    };
    EngineSettings {
        times: StepTimes::new(Duration::from_millis(50), answers, 100.0),
        batch_tokens_max: 1_000,
        running_max: 8,
        cache_blocks: 100,
        block_tokens: workload_settings().block_tokens.get(),
    }
}

fn jobs(requests: &[(u64, u32, &[u64], u32)]) -> Vec<Job> {
    let entries: Vec<_> = requests
        .iter()
        .map(|(at, tokens, blocks, answer)| crate::sim::trace::Entry {
            output_tokens: *answer,
            ..entry(*at, *tokens, blocks)
        })
        .collect();
    workload::jobs(&entries, &workload_settings())
}

#[derive(Debug, Default, PartialEq)]
struct Times {
    first: Vec<Duration>,
    ended: Vec<Duration>,
    cached: Vec<u32>,
    preemptions: u64,
}

impl Times {
    fn new(requests: usize) -> Self {
        Self {
            first: vec![Duration::ZERO; requests],
            ended: vec![Duration::ZERO; requests],
            cached: vec![0; requests],
            preemptions: 0,
        }
    }
}

fn run(jobs: &[Job], settings: EngineSettings) -> (Times, EngineModel) {
    let mut engine = EngineModel::new(settings);
    let mut times = Times::new(jobs.len());
    let mut due: Option<Duration> = None;
    let mut arrivals = 0..jobs.len();
    loop {
        let arrival = arrivals.clone().next();
        let arrives = arrival.map(|request| jobs[request].at);
        match (arrives, due) {
            (Some(at), _) if due.is_none_or(|due| at <= due) => {
                arrivals.next();
                due = engine.submit(at, jobs, arrivals.start - 1).or(due);
            }
            (_, Some(at)) => {
                let finished = engine.finish(at, jobs).expect("it is due");
                for (request, cached) in finished.first {
                    times.first[request] = at;
                    times.cached[request] = cached;
                }
                for request in finished.ended {
                    times.ended[request] = at;
                }
                due = engine.start(jobs);
            }
            (_, None) => break,
        }
    }
    times.preemptions = engine.preemptions();
    (times, engine)
}

fn milliseconds(times: &[Duration]) -> Vec<u128> {
    times.iter().map(Duration::as_millis).collect()
}

#[test]
fn an_answer_takes_longer_the_longer_its_context_is() {
    let jobs = jobs(&[(0, 20, &[1, 2], 3)]);
    let (times, _) = run(&jobs, settings());
    // 20 tokens and a step; then contexts of 21 and 22 tokens.
    assert_eq!(milliseconds(&times.first), [250]);
    assert_eq!(milliseconds(&times.ended), [250 + (60 + 21) + (60 + 22)]);
}

#[test]
fn an_answer_stands_still_while_another_prompt_is_computed() {
    let jobs = jobs(&[(0, 20, &[1, 2], 2), (100, 30, &[3, 4, 5], 1)]);
    let (times, _) = run(&jobs, settings());
    let together = 50 + 10 + 21 + 300;
    assert_eq!(milliseconds(&times.first), [250, 250 + together]);
    assert_eq!(milliseconds(&times.ended), [250 + together, 250 + together]);
}

#[test]
fn a_prompt_that_comes_while_answers_are_generated_waits_for_one_step_only() {
    let jobs = jobs(&[(0, 20, &[1, 2], 50), (300, 10, &[3], 1)]);
    let (times, _) = run(&jobs, settings());
    let step_that_runs = 250 + 60 + 21;
    assert_eq!(
        times.first[1].as_millis(),
        step_that_runs + 50 + 10 + 22 + 100
    );
}

#[test]
fn a_cached_prefix_is_not_computed_again_but_for_the_last_token() {
    let jobs = jobs(&[
        (0, 20, &[1, 2], 1),
        (1_000, 20, &[1, 2], 1),
        (2_000, 25, &[1, 2], 1),
    ]);
    let (times, _) = run(&jobs, settings());
    assert_eq!(milliseconds(&times.first), [250, 1_060, 2_100]);
    assert_eq!(times.cached, [0, 19, 20]);
}

#[test]
fn a_long_prompt_is_computed_in_chunks_beside_answers() {
    let jobs = jobs(&[(0, 10, &[1], 3), (0, 25, &[2, 3], 1)]);
    let settings = EngineSettings {
        batch_tokens_max: 20,
        ..settings()
    };
    let (times, _) = run(&jobs, settings);
    // An idle engine starts with what comes first. Then a token of its answer leaves room for 19 others.
    let ended = 150 + (50 + 10 + 11 + 190) + (50 + 10 + 12 + 60);
    assert_eq!(milliseconds(&times.first), [150, ended]);
    assert_eq!(times.ended[0].as_millis(), ended);
}

#[test]
fn requests_wait_for_a_slot() {
    let jobs = jobs(&[(0, 10, &[1], 3), (0, 10, &[2], 1)]);
    let settings = EngineSettings {
        running_max: 1,
        ..settings()
    };
    let (times, engine) = run(&jobs, settings);
    let first_ends = 150 + (60 + 11) + (60 + 12);
    assert_eq!(milliseconds(&times.ended), [first_ends, first_ends + 150]);
    assert_eq!(engine.gauges().waiting, 0);
}

#[test]
fn requests_wait_for_memory_and_answers_that_outgrow_it_are_computed_again() {
    let settings = EngineSettings {
        cache_blocks: 5,
        ..settings()
    };
    let too_large = jobs(&[(0, 20, &[1, 2], 3), (0, 30, &[3, 4, 5], 1)]);
    let (times, _) = run(&too_large, settings);
    assert!(times.first[1] > times.ended[0]);
    assert_eq!(times.preemptions, 0);
    let growing = jobs(&[(0, 10, &[1], 26), (0, 10, &[2], 26)]);
    let (times, _) = run(&growing, settings);
    assert_eq!(times.preemptions, 1);
    assert!(times.ended[1] > times.ended[0]);
}

#[test]
fn an_engine_is_busy_as_long_as_its_steps_take() {
    let jobs = jobs(&[(0, 60, &[1], 3)]);
    let mut engine = EngineModel::new(settings());
    let mut due = engine.submit(Duration::ZERO, &jobs, 0);
    while let Some(at) = due {
        engine.finish(at, &jobs).expect("it is due");
        due = engine.start(&jobs);
    }
    let steps = 650 + (60 + 61) + (60 + 62);
    assert_eq!(engine.busy_time(), Duration::from_millis(steps));
}

/// The plainest engine: it computes one step after the other, and looks for everything in lists.
struct Plain<'a> {
    jobs: &'a [Job],
    settings: EngineSettings,
    /// Request, tokens left to compute, tokens generated before.
    waiting: Vec<(usize, Option<u64>, u32)>,
    /// Request, tokens generated; in the order of their starts.
    running: Vec<(usize, u32)>,
    computed: BTreeSet<BlockHash>,
    /// Computed blocks that nobody needs, the least recently used first.
    unused: Vec<BlockHash>,
    times: Times,
}

impl Plain<'_> {
    fn run(mut self) -> Times {
        let mut now = None;
        let mut arrivals = (0..self.jobs.len()).peekable();
        loop {
            while let Some(request) =
                arrivals.next_if(|next| Some(picoseconds(self.jobs[*next].at)) <= now)
            {
                self.waiting.push((request, None, 0));
            }
            if self.waiting.is_empty() && self.running.is_empty() {
                // An idle engine starts at once with the first that comes.
                let Some(request) = arrivals.next() else {
                    return self.times;
                };
                now = Some(picoseconds(self.jobs[request].at));
                self.waiting.push((request, None, 0));
            }
            now = now.map(|now| self.step(now));
        }
    }

    fn blocks(&self, request: usize) -> Vec<BlockHash> {
        let blocks = self.jobs[request].blocks.iter();
        blocks.map(|block| block.path).collect()
    }

    /// The requests that have blocks, with their answers' tokens.
    fn holders(&self, also: &[(usize, u32)]) -> Vec<(usize, u32)> {
        let partly = self.waiting.iter().filter(|waiting| waiting.1.is_some());
        let partly = partly.map(|(request, _, generated)| (*request, *generated));
        let running = self.running.iter().copied();
        running.chain(partly).chain(also.iter().copied()).collect()
    }

    fn used_tokens(&self, holders: &[(usize, u32)]) -> u64 {
        let blocks: BTreeSet<_> = holders
            .iter()
            .flat_map(|(request, _)| self.blocks(*request))
            .collect();
        let block_tokens = u64::from(self.settings.block_tokens);
        let private = holders.iter().map(|(request, generated)| {
            let job = &self.jobs[*request];
            u64::from(job.input_tokens) - job.blocks.len() as u64 * block_tokens
                + u64::from(*generated)
        });
        blocks.len() as u64 * block_tokens + private.sum::<u64>()
    }

    fn capacity(&self) -> u64 {
        self.settings.cache_blocks as u64 * u64::from(self.settings.block_tokens)
    }

    fn evict(&mut self, holders: &[(usize, u32)]) {
        let block_tokens = u64::from(self.settings.block_tokens);
        while !self.unused.is_empty()
            && self.used_tokens(holders) + self.unused.len() as u64 * block_tokens > self.capacity()
        {
            let evicted = self.unused.remove(0);
            self.computed.remove(&evicted);
        }
    }

    fn release(&mut self, request: usize, holders: &[(usize, u32)]) {
        for block in self.blocks(request).into_iter().rev() {
            let is_needed = holders
                .iter()
                .any(|(other, _)| self.blocks(*other).contains(&block));
            if !is_needed && self.computed.contains(&block) {
                self.unused.push(block);
            }
        }
    }

    /// Returns the end of the step.
    fn step(&mut self, now: Picoseconds) -> Picoseconds {
        let mut batch = Batch {
            answers: self.running.len() as u64,
            ..Batch::default()
        };
        for (request, generated) in &self.running {
            batch.context_tokens += u64::from(self.jobs[*request].input_tokens + generated);
        }
        let mut budget =
            u64::from(self.settings.batch_tokens_max).saturating_sub(self.running.len() as u64);
        let mut done: Vec<(usize, u32)> = Vec::new();
        while budget > 0
            && !self.waiting.is_empty()
            && self.running.len() + done.len() < self.settings.running_max as usize
        {
            let (request, left, generated) = self.waiting[0];
            let job = &self.jobs[request];
            let left = match left {
                Some(left) => left,
                None => {
                    let holders = self.holders(&done);
                    let with_it = [&holders[..], &[(request, generated)]].concat();
                    let needed = self.used_tokens(&with_it) + u64::from(self.settings.block_tokens);
                    let is_alone = self.running.is_empty() && done.is_empty();
                    if needed > self.capacity() && !is_alone {
                        break;
                    }
                    let blocks = self.blocks(request);
                    let cached = blocks
                        .iter()
                        .take_while(|block| self.computed.contains(block))
                        .count();
                    let cached =
                        (cached as u32 * self.settings.block_tokens).min(job.input_tokens - 1);
                    if generated == 0 {
                        self.times.cached[request] = cached;
                    }
                    self.unused.retain(|block| !blocks.contains(block));
                    self.evict(&with_it);
                    u64::from(job.input_tokens - cached + generated)
                }
            };
            let taken = left.min(budget);
            budget -= taken;
            batch.prompt_tokens += taken;
            self.waiting[0].1 = Some(left - taken);
            if taken == left {
                self.waiting.remove(0);
                done.push((request, generated));
            }
        }
        let now = now + self.settings.times.of_steps(batch, 1);
        self.end_step(now, done);
        now
    }

    fn end_step(&mut self, now: Picoseconds, done: Vec<(usize, u32)>) {
        let answers = self.running.len();
        for (request, generated) in &done {
            let blocks = self.blocks(*request);
            self.computed.extend(blocks);
            if *generated == 0 {
                self.times.first[*request] = duration(now);
            }
        }
        self.running.extend(done);
        for running in &mut self.running {
            running.1 += 1;
        }
        // Blocks of answers are given back in the order of their requests, and then those of prompts that have no more.
        let is_ended =
            |(request, generated): &(usize, u32)| *generated >= self.jobs[*request].output_tokens;
        let mut ended: Vec<usize> = self.running[..answers]
            .iter()
            .filter(|running| is_ended(running))
            .map(|running| running.0)
            .collect();
        ended.sort_unstable();
        let whole = self.running[answers..].iter();
        ended.extend(
            whole
                .filter(|running| is_ended(running))
                .map(|running| running.0),
        );
        for request in ended {
            self.running.retain(|running| running.0 != request);
            let holders = self.holders(&[]);
            self.release(request, &holders);
            self.times.ended[request] = duration(now);
        }
        let holders = self.holders(&[]);
        self.evict(&holders);
        while self.used_tokens(&self.holders(&[])) > self.capacity() && self.running.len() > 1 {
            let Some((request, generated)) = self.running.pop() else {
                return;
            };
            let holders = self.holders(&[]);
            self.release(request, &holders);
            self.waiting.insert(0, (request, None, generated));
            self.times.preemptions += 1;
        }
    }
}

proptest! {
    /// Steps that are computed together give what steps one by one give.
    #[test]
    fn it_agrees_with_the_plainest_model(
        requests in proptest::collection::vec((0u64..3_000, 0u64..3, 1u64..5, 0u32..10, 1u32..30), 1..25),
        cache_blocks in 4usize..20,
        running_max in 1u32..5,
        batch_tokens_max in 3u32..60,
    ) {
        let mut entries: Vec<_> = requests
            .iter()
            .map(|(at, family, blocks, rest, answer)| crate::sim::trace::Entry {
                output_tokens: *answer,
                ..entry(*at, *blocks as u32 * 10 + rest, &(0..*blocks).map(|block| family * 10 + block).collect::<Vec<_>>())
            })
            .collect();
        entries.sort_by_key(|entry| entry.at);
        let jobs = workload::jobs(&entries, &workload_settings());
        let settings = EngineSettings {
            cache_blocks,
            running_max,
            batch_tokens_max,
            ..settings()
        };
        let plain = Plain {
            jobs: &jobs,
            settings,
            waiting: Vec::new(),
            running: Vec::new(),
            computed: BTreeSet::new(),
            unused: Vec::new(),
            times: Times::new(jobs.len()),
        };
        let (times, engine) = run(&jobs, settings);
        prop_assert_eq!(times, plain.run());
        prop_assert_eq!(engine.gauges().kv_usage, 0.0, "memory was left in use");
    }
}
