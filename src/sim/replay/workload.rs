//! The workload of a replay: the requests of a trace with scaled arrival times, hashed blocks and a router each; and
//! the upper bounds of what routing can achieve. Pure.

use std::num::NonZeroU32;
use std::time::Duration;

use fastrand::Rng;

use super::lru::Lru;
use crate::ids::Block;
use crate::kv::block::{self, ChainRoot, LocalHash};
use crate::kv::text_block;
use crate::kv::unconfirmed::{self, PrefixKeys};
use crate::sim::trace::Entry;

/// One request of the replay.
#[derive(Clone, Debug)]
pub(super) struct Job {
    /// When it arrives, if that is known before the run.
    pub(super) at: Duration,
    pub(super) arrival: Arrival,
    /// The next turn of its session: its index, and the time between the end of this answer and its arrival.
    pub(super) next: Option<(usize, Duration)>,
    pub(super) input_tokens: u32,
    pub(super) output_tokens: u32,
    /// The prompt's full blocks, for the predicted index.
    pub(super) blocks: Vec<Block>,
    /// The prompt's full blocks, for the exact index.
    pub(super) locals: Vec<LocalHash>,
    pub(super) prefix_keys: PrefixKeys,
    /// Index of the router replica that gets the request.
    pub(super) router: usize,
    /// Seed of the routing decision, the same for all policies.
    pub(super) seed: u64,
}

/// What makes a request arrive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Arrival {
    /// Its time.
    Timed,
    /// The end of any answer: a fixed number of requests is in flight.
    WhenOneEnds,
    /// The end of the answer before it in its session.
    AfterPrevious,
}

/// How a trace becomes a workload; see the command-line arguments.
#[derive(Clone, Copy, Debug)]
pub(super) struct WorkloadSettings {
    pub(super) block_tokens: NonZeroU32,
    pub(super) speed: f64,
    pub(super) jitter: Duration,
    pub(super) routers: usize,
    pub(super) seed: u64,
}

/// The requests in the order of their arrival.
pub(super) fn jobs(entries: &[Entry], settings: &WorkloadSettings) -> Vec<Job> {
    let mut jobs = jobs_in_order(entries, settings);
    jobs.sort_by_key(|job| job.at);
    jobs
}

/// The requests in the order of the entries.
pub(super) fn jobs_in_order(entries: &[Entry], settings: &WorkloadSettings) -> Vec<Job> {
    let mut rng = Rng::with_seed(settings.seed);
    let start = text_block::chain_root("replay", None);
    let job = |entry: &Entry| {
        let locals: Vec<LocalHash> = entry.blocks.iter().map(|name| local(*name)).collect();
        let sized = locals
            .iter()
            .map(|local| (local.0, settings.block_tokens.get()));
        let blocks = text_block::chain(start, sized);
        Job {
            at: (entry.at + settings.jitter.mul_f64(rng.f64())).div_f64(settings.speed),
            arrival: Arrival::Timed,
            next: None,
            input_tokens: entry.input_tokens,
            output_tokens: entry.output_tokens,
            prefix_keys: unconfirmed::prefix_keys(root(), &locals),
            blocks,
            locals,
            router: rng.usize(..settings.routers),
            seed: rng.u64(..),
        }
    };
    entries.iter().map(job).collect()
}

/// The root of all prompts: one model, no salt.
pub(super) fn root() -> ChainRoot {
    block::chain_root(None, None)
}

/// The local hash of a block of the trace; block ids are small numbers.
fn local(name: u64) -> LocalHash {
    LocalHash(xxhash_rust::xxh3::xxh3_64(&name.to_le_bytes()))
}

/// The cached ratio of a single LRU cache of `max_blocks` blocks that gets all requests and caches a prompt at once. A
/// divided cache of the same total size can exceed it only by chance, because LRU does not evict optimally.
pub(super) fn cached_ratio_bound(jobs: &[Job], max_blocks: usize) -> f64 {
    let mut cache = Lru::new(max_blocks);
    let mut evicted = Vec::new();
    let (mut tokens, mut cached) = (0u64, 0u64);
    for job in jobs {
        tokens += u64::from(job.input_tokens);
        let (cached_blocks, _) = cache.insert(&job.blocks, &mut evicted);
        cached += u64::from(tokens_of(&job.blocks, cached_blocks));
        evicted.clear();
    }
    if tokens == 0 {
        0.0
    } else {
        cached as f64 / tokens as f64
    }
}

/// The number of tokens in the first `blocks` blocks of a prompt.
pub(super) fn tokens_of(prompt: &[Block], blocks: usize) -> u32 {
    blocks
        .checked_sub(1)
        .map_or(0, |last| prompt[last].end_tokens)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in crate::sim::replay) fn entry(at_ms: u64, tokens: u32, blocks: &[u64]) -> Entry {
        Entry {
            at: Duration::from_millis(at_ms),
            input_tokens: tokens,
            output_tokens: 2,
            blocks: blocks.to_vec(),
        }
    }

    pub(in crate::sim::replay) fn settings() -> WorkloadSettings {
        WorkloadSettings {
            block_tokens: NonZeroU32::new(10).unwrap(),
            speed: 1.0,
            jitter: Duration::ZERO,
            routers: 1,
            seed: 1,
        }
    }

    #[test]
    fn twice_the_speed_halves_the_times() {
        let settings = WorkloadSettings {
            speed: 2.0,
            ..settings()
        };
        let jobs = jobs(&[entry(0, 10, &[1]), entry(500, 10, &[1])], &settings);
        assert_eq!(jobs[1].at, Duration::from_millis(250));
    }

    #[test]
    fn jitter_spreads_arrivals_and_keeps_them_sorted() {
        let settings = WorkloadSettings {
            jitter: Duration::from_secs(3),
            ..settings()
        };
        let entries = vec![entry(0, 10, &[1]); 50];
        let jobs = jobs(&entries, &settings);
        assert!(jobs.is_sorted_by_key(|job| job.at));
        assert!(jobs[10].at < jobs[40].at && jobs[49].at < Duration::from_secs(3));
    }

    #[test]
    fn bounds_count_tokens() {
        let all = [
            entry(0, 25, &[1, 2]),
            entry(0, 15, &[7]),
            entry(0, 30, &[1, 2, 3]),
        ];
        let jobs = jobs(&all, &settings());
        assert_eq!(cached_ratio_bound(&jobs, 1_000), 20.0 / 70.0);
        // The next prompt's block has evicted its second block.
        assert_eq!(cached_ratio_bound(&jobs, 2), 10.0 / 70.0);
        assert_eq!(cached_ratio_bound(&[], 2), 0.0);
    }
}
