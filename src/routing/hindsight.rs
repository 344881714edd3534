//! Hindsight: what the same requests would have taken under other policies. The requests of a minute are played again in
//! virtual time, once where they were sent and once by each policy that knows no costs. A choice that is worse than these for
//! long is wrong: what was learnt of workers is wrong, or the cost leaves out what matters on this fleet. Pure.
//!
//! The played workers compute in batches and have slots, with the speeds that were learnt; a request's answer has the length
//! that was expected of it. What a worker had cached when the minute began, it has in each run, so that the comparison favours
//! the choice that was made. Left out: the load of other replicas, the size of the KV cache, clients that leave, and waiting in
//! the router.

mod engine;
mod types;
mod verdict;

use std::time::{Duration, Instant};

use rustc_hash::{FxHashMap, FxHashSet};

use self::engine::Engine;
pub use self::types::{Prefixes, Sent, Took, Worker};
pub use self::verdict::{Change, Verdict, WORSE};
use crate::ids::{Block, WorkerId};

/// The requests of one minute that are played again: enough to fill the slots of some workers, and played in milliseconds.
const REQUESTS_MAX: usize = 500;
/// Longer than most answers take, so that workers fill up.
const TIME_MAX: Duration = Duration::from_secs(60);
/// Where prompts are compared, in tokens from their start. A shared prefix counts up to the last of these within it.
const POSITIONS: [u32; 16] = [
    128, 256, 512, 1_024, 1_536, 2_048, 3_072, 4_096, 6_144, 8_192, 12_288, 16_384, 24_576, 32_768,
    65_536, 131_072,
];

/// What identifies a prompt's prefixes at the positions that are compared.
pub fn prefixes(blocks: &[Block]) -> Prefixes {
    let mut prefixes = Prefixes::new();
    let mut rest = blocks;
    for position in POSITIONS {
        let before = rest.partition_point(|block| block.end_tokens <= position);
        let Some(last) = before.checked_sub(1) else {
            continue;
        };
        prefixes.push((rest[last].path.0, rest[last].end_tokens));
        rest = &rest[before..];
        if rest.is_empty() {
            break;
        }
    }
    prefixes
}

/// The requests of the present minute.
#[derive(Debug, Default)]
pub struct Journal {
    sent: Vec<Sent>,
}

impl Journal {
    /// False once it has what is played of this minute.
    pub fn is_open(&self, now: Instant) -> bool {
        let is_new = |first: &Sent| now.saturating_duration_since(first.at) < TIME_MAX;
        self.sent.len() < REQUESTS_MAX && self.sent.first().is_none_or(is_new)
    }

    pub fn add(&mut self, sent: Sent) {
        self.sent.push(sent);
    }

    /// Begins anew.
    pub fn take(&mut self) -> Vec<Sent> {
        std::mem::take(&mut self.sent)
    }
}

/// Plays the requests again, in the order in which they were sent. Those whose worker is not among these are left out.
pub fn play(sent: &[Sent], workers: &[Worker]) -> Took {
    let index_of: FxHashMap<WorkerId, usize> = workers
        .iter()
        .enumerate()
        .map(|(index, worker)| (worker.id, index))
        .collect();
    let mut sent: Vec<(usize, &Sent)> = sent
        .iter()
        .filter_map(|sent| Some((*index_of.get(&sent.worker)?, sent)))
        .collect();
    sent.sort_by_key(|(_, sent)| sent.at);
    let cached = cached_before(&sent, workers.len());
    let run = |choose: &dyn Fn(usize, &[Engine]) -> usize| run(&sent, workers, &cached, choose);
    Took {
        requests: sent.len(),
        chosen: run(&|request, _| sent[request].0),
        least_load: run(&|request, engines| {
            let count = engines.len();
            // Of several with as many, another one each time.
            let in_turn = (0..count).map(|index| (request + index) % count);
            in_turn
                .min_by_key(|index| engines[*index].requests())
                .unwrap_or(0)
        }),
        round_robin: run(&|request, engines| request % engines.len()),
    }
}

/// What each worker had before: of what it was expected to have, that which none of these requests had brought.
fn cached_before(sent: &[(usize, &Sent)], workers: usize) -> Vec<FxHashSet<u64>> {
    let mut before = vec![FxHashSet::default(); workers];
    let mut brought = before.clone();
    for (worker, sent) in sent {
        for (prefix, tokens) in &sent.prefixes {
            if *tokens <= sent.cached_tokens && !brought[*worker].contains(prefix) {
                before[*worker].insert(*prefix);
            }
            brought[*worker].insert(*prefix);
        }
    }
    before
}

fn run(
    sent: &[(usize, &Sent)],
    workers: &[Worker],
    cached: &[FxHashSet<u64>],
    choose: &dyn Fn(usize, &[Engine]) -> usize,
) -> f64 {
    let Some((_, first)) = sent.first() else {
        return 0.0;
    };
    let workers = workers.iter().zip(cached);
    let mut engines: Vec<Engine> = workers
        .map(|(worker, cached)| Engine::new(worker, cached.clone()))
        .collect();
    let mut took = 0.0;
    for (number, (_, sent)) in sent.iter().enumerate() {
        let at = sent.at.saturating_duration_since(first.at).as_secs_f64();
        for engine in &mut engines {
            took += engine.run_until(at);
        }
        let worker = choose(number, &engines);
        engines[worker].submit(at, sent);
    }
    let to_end = engines
        .iter_mut()
        .map(|engine| engine.run_until(f64::INFINITY));
    took + to_end.sum::<f64>()
}

#[cfg(test)]
mod tests;
