//! Requests drawn from a seed. Pure.

use std::time::Duration;

use fastrand::Rng;

use crate::sim::replay::workload::{self, Arrival, Job, WorkloadSettings};
use crate::sim::trace::Entry;

/// Tokens that a request has beside the hot prefix.
const HOT_OWN_TOKENS: u32 = 60;
const HOT_ANSWER_TOKENS: f64 = 256.0;
const AGENT_ANSWER_TOKENS: f64 = 150.0;
const APPLICATIONS: usize = 60;
/// The n-th application gets a part of the requests that falls as `n` to the power of this.
const ZIPF_EXPONENT: f64 = 1.1;
/// The spread of the logarithms of the applications' mean answer lengths.
const ANSWER_SPREAD: f64 = 0.8;
/// Requests of a trace that a load plays.
const TRACE_REQUESTS: usize = 3_000;

/// Requests and what makes them arrive.
#[derive(Clone, Debug, Default)]
pub(super) struct Generated {
    entries: Vec<Entry>,
    arrivals: Vec<Arrival>,
    next: Vec<Option<(usize, Duration)>>,
}

/// Sessions, each turn of which adds tokens to the prompt.
#[derive(Clone, Copy, Debug)]
pub(super) struct Agents {
    pub(super) sessions: usize,
    /// The length of the prompt that all sessions start with.
    pub(super) system_blocks: u32,
    pub(super) pace: Pace,
}

/// How sessions go on.
#[derive(Clone, Copy, Debug)]
pub(super) enum Pace {
    /// People read between turns: 10 to 40 turns, 1 to 20 s between an answer and the next turn, which adds 500 to 3,000 tokens.
    Slow,
    /// Tools answer at once: 6 turns, 0.3 to 0.7 s between them, each of which adds 1,100 tokens.
    Quick,
}

impl Pace {
    /// Seconds in which the sessions start.
    fn starts_within(self) -> f64 {
        match self {
            Self::Slow => 60.0,
            Self::Quick => 2.0,
        }
    }

    fn turns(self, rng: &mut Rng) -> usize {
        match self {
            Self::Slow => rng.usize(10..=40),
            Self::Quick => 6,
        }
    }

    fn added_tokens(self, rng: &mut Rng) -> u32 {
        match self {
            Self::Slow => rng.u32(500..3_000),
            Self::Quick => 1_100,
        }
    }

    fn answer_tokens(self, rng: &mut Rng) -> u32 {
        match self {
            Self::Slow => answer(rng, AGENT_ANSWER_TOKENS),
            Self::Quick => 40,
        }
    }

    fn pause(self, rng: &mut Rng) -> Duration {
        Duration::from_secs_f64(match self {
            Self::Slow => 1.0 + 19.0 * rng.f64(),
            Self::Quick => 0.3 + 0.4 * rng.f64(),
        })
    }
}

/// A fixed number of requests in flight, whose prompts have all the same long prefix.
pub(super) fn hot_prefix(
    in_flight: usize,
    prefix_tokens: u32,
    block_tokens: u32,
    seed: u64,
) -> Generated {
    let mut rng = Rng::with_seed(seed);
    let prefix = prefix_tokens.max(block_tokens);
    let mut generated = Generated::default();
    for request in 0..(5 * in_flight).max(600) {
        let entry = Entry {
            at: Duration::ZERO,
            input_tokens: prefix + HOT_OWN_TOKENS,
            output_tokens: answer(&mut rng, HOT_ANSWER_TOKENS),
            blocks: blocks(0, 0..prefix / block_tokens),
        };
        let arrival = if request < in_flight {
            Arrival::Timed
        } else {
            Arrival::WhenOneEnds
        };
        generated.add(entry, arrival);
    }
    generated
}

/// Requests of applications with prompts of 4 to 23 blocks and answers of a mean length each. `rates` is requests a second,
/// and the mean of these lengths.
pub(super) fn applications(
    rates: [f64; 2],
    requests: usize,
    block_tokens: u32,
    seed: u64,
) -> Generated {
    let [per_second, answer_tokens] = rates;
    let mut rng = Rng::with_seed(seed);
    let prompts: Vec<u32> = (0..APPLICATIONS).map(|_| rng.u32(4..24)).collect();
    let shares: Vec<f64> = (1..=APPLICATIONS)
        .map(|rank| (rank as f64).powf(-ZIPF_EXPONENT))
        .collect();
    let answers: Vec<f64> = (0..APPLICATIONS)
        .map(|_| {
            let spread = ANSWER_SPREAD * normal(&mut rng);
            answer_tokens * (spread - ANSWER_SPREAD * ANSWER_SPREAD / 2.0).exp()
        })
        .collect();
    let mut generated = Generated::default();
    let mut at = 0.0;
    for request in 0..requests {
        at += exponential(&mut rng, 1.0 / per_second);
        let application = pick(&mut rng, &shares);
        let own_tokens = rng.u32(64..900);
        let mut prompt = blocks(application as u64, 0..prompts[application]);
        let own = APPLICATIONS + request;
        prompt.extend(blocks(own as u64, 0..own_tokens / block_tokens));
        let entry = Entry {
            at: Duration::from_secs_f64(at),
            input_tokens: prompts[application] * block_tokens + own_tokens,
            output_tokens: answer(&mut rng, answers[application]),
            blocks: prompt,
        };
        generated.add(entry, Arrival::Timed);
    }
    generated
}

impl Agents {
    pub(super) fn generate(self, block_tokens: u32, seed: u64) -> Generated {
        let mut rng = Rng::with_seed(seed);
        let mut generated = Generated::default();
        for session in 0..self.sessions {
            let starts = Duration::from_secs_f64(self.pace.starts_within() * rng.f64());
            let mut tokens = self.system_blocks * block_tokens;
            let turns = self.pace.turns(&mut rng);
            for turn in 0..turns {
                tokens += self.pace.added_tokens(&mut rng);
                let mut prompt = blocks(0, 0..self.system_blocks);
                let own = tokens / block_tokens - self.system_blocks;
                prompt.extend(blocks(session as u64 + 1, 0..own));
                let entry = Entry {
                    at: starts,
                    input_tokens: tokens,
                    output_tokens: self.pace.answer_tokens(&mut rng),
                    blocks: prompt,
                };
                let pause = self.pace.pause(&mut rng);
                let arrival = match turn {
                    0 => Arrival::Timed,
                    _ => Arrival::AfterPrevious,
                };
                let index = generated.add(entry, arrival);
                if turn + 1 < turns {
                    generated.next[index] = Some((index + 1, pause));
                }
            }
        }
        generated
    }
}

/// Another part of the trace for each seed, as far as it goes.
pub(super) fn part_of_trace(trace: &[Entry], seed: u64) -> Generated {
    let starts = trace.len().saturating_sub(TRACE_REQUESTS);
    let step = TRACE_REQUESTS.min(starts / 2);
    let skipped = (seed.saturating_sub(1) as usize).saturating_mul(step) % (starts + 1);
    let part: Vec<&Entry> = trace.iter().skip(skipped).take(TRACE_REQUESTS).collect();
    let first = part.first().map_or(Duration::ZERO, |entry| entry.at);
    let mut generated = Generated::default();
    for entry in part {
        let entry = Entry {
            at: entry.at.saturating_sub(first),
            ..entry.clone()
        };
        generated.add(entry, Arrival::Timed);
    }
    generated
}

impl Generated {
    /// Returns the request's index.
    fn add(&mut self, entry: Entry, arrival: Arrival) -> usize {
        self.entries.push(entry);
        self.arrivals.push(arrival);
        self.next.push(None);
        self.entries.len() - 1
    }

    pub(super) fn jobs(self, settings: &WorkloadSettings) -> Vec<Job> {
        let jobs = workload::jobs_in_order(&self.entries, settings).into_iter();
        let arrivals = self.arrivals.into_iter().zip(self.next);
        jobs.zip(arrivals)
            .map(|(job, (arrival, next))| Job {
                arrival,
                next,
                ..job
            })
            .collect()
    }
}

/// Ids of blocks of a prefix, whose number no other prefix has.
fn blocks(prefix: u64, range: std::ops::Range<u32>) -> Vec<u64> {
    range.map(|block| prefix << 32 | u64::from(block)).collect()
}

fn answer(rng: &mut Rng, mean: f64) -> u32 {
    (exponential(rng, mean) as u32).max(2)
}

fn exponential(rng: &mut Rng, mean: f64) -> f64 {
    -mean * (1.0 - rng.f64()).ln()
}

/// A random number from the normal distribution of mean 0 and deviation 1.
fn normal(rng: &mut Rng) -> f64 {
    let angle = std::f64::consts::TAU * rng.f64();
    (-2.0 * (1.0 - rng.f64()).ln()).sqrt() * angle.cos()
}

fn pick(rng: &mut Rng, shares: &[f64]) -> usize {
    let mut left = rng.f64() * shares.iter().sum::<f64>();
    let is_it = |share: &f64| {
        left -= share;
        left < 0.0
    };
    let found = shares.iter().position(is_it);
    found.unwrap_or(shares.len() - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_gives_the_same_requests_and_another_seed_others() {
        let generated = |seed| applications([20.0, 250.0], 100, 512, seed).entries;
        assert_eq!(generated(1), generated(1));
        assert_ne!(generated(1), generated(2));
    }

    #[test]
    fn drawn_numbers_have_their_means() {
        let mut rng = Rng::with_seed(1);
        let mut mean_of = |draw: fn(&mut Rng) -> f64| {
            let drawn = (0..20_000).map(|_| draw(&mut rng));
            drawn.sum::<f64>() / 20_000.0
        };
        assert!((mean_of(|rng| exponential(rng, 5.0)) - 5.0).abs() < 0.2);
        assert!(mean_of(normal).abs() < 0.05);
        assert!((mean_of(|rng| normal(rng).powi(2)) - 1.0).abs() < 0.05);
        assert!((mean_of(|rng| pick(rng, &[3.0, 1.0]) as f64) - 0.25).abs() < 0.02);
    }

    #[test]
    fn turns_of_agents_grow_and_follow_one_another() {
        let agents = Agents {
            sessions: 3,
            system_blocks: 2,
            pace: Pace::Slow,
        };
        let generated = agents.generate(512, 1);
        let timed = generated.arrivals.iter();
        assert_eq!(
            timed.filter(|arrival| **arrival == Arrival::Timed).count(),
            3
        );
        for (entry, next) in generated.entries.iter().zip(&generated.next) {
            assert!(entry.blocks.starts_with(&blocks(0, 0..2)));
            assert_eq!(entry.blocks.len() as u32, entry.input_tokens / 512);
            if let Some((next, _)) = next {
                assert!(generated.entries[*next].blocks.starts_with(&entry.blocks));
                assert_eq!(generated.arrivals[*next], Arrival::AfterPrevious);
            }
        }
    }

    #[test]
    fn other_seeds_play_other_parts_of_a_trace() {
        let entry = |number: u64| Entry {
            at: Duration::from_secs(number),
            input_tokens: 600,
            output_tokens: 5,
            blocks: vec![number],
        };
        let trace: Vec<Entry> = (0..4_000).map(entry).collect();
        let first = |seed| part_of_trace(&trace, seed).entries[0].blocks[0];
        assert_eq!([first(1), first(2), first(3)], [0, 500, 1_000]);
        assert_eq!(part_of_trace(&trace, 2).entries[0].at, Duration::ZERO);
        assert_eq!(part_of_trace(&trace[..10], 2).entries.len(), 10);
    }
}
