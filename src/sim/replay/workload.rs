//! A trace as it is replayed: its times scaled, its block names chained, its requests given to
//! routers, and what no routing could exceed. Pure.

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
    pub(super) at: Duration,
    pub(super) input_tokens: u32,
    pub(super) output_tokens: u32,
    /// The prompt's full blocks, as the predicted index takes them,
    pub(super) blocks: Vec<Block>,
    /// and as the index of reported ones does.
    pub(super) locals: Vec<LocalHash>,
    pub(super) prefix_keys: PrefixKeys,
    /// Which router a load balancer gave it to.
    pub(super) router: usize,
    /// The same for all policies.
    pub(super) seed: u64,
}

/// How a trace becomes a workload.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    pub(super) block_tokens: NonZeroU32,
    pub(super) speed: f64,
    pub(super) dither: Duration,
    pub(super) routers: usize,
    pub(super) seed: u64,
}

/// The requests in the order of their arrival.
pub(super) fn jobs(entries: &[Entry], shape: &Shape) -> Vec<Job> {
    let mut rng = Rng::with_seed(shape.seed);
    let start = text_block::chain_root("replay", None);
    let mut jobs: Vec<Job> = entries
        .iter()
        .map(|entry| {
            let locals: Vec<LocalHash> = entry.blocks.iter().map(|name| local(*name)).collect();
            let sized = locals.iter().map(|it| (it.0, shape.block_tokens.get()));
            let blocks = text_block::chain(start, sized);
            Job {
                at: (entry.at + shape.dither.mul_f64(rng.f64())).div_f64(shape.speed),
                input_tokens: entry.input_tokens,
                output_tokens: entry.output_tokens,
                prefix_keys: unconfirmed::prefix_keys(root(), &locals),
                blocks,
                locals,
                router: rng.usize(..shape.routers),
                seed: rng.u64(..),
            }
        })
        .collect();
    jobs.sort_by_key(|job| job.at);
    jobs
}

/// Of the one model that there is.
pub(super) fn root() -> ChainRoot {
    block::chain_root(None, None)
}

/// Traces number their blocks from 0; chains are made of hashes.
fn local(name: u64) -> LocalHash {
    LocalHash(xxhash_rust::xxh3::xxh3_64(&name.to_le_bytes()))
}

/// The share of all prompt tokens that one cache of `blocks_max` blocks would serve, if everything
/// went through it and were held at once. Divided room does not serve more, but for luck: the least
/// recently used is not always what is not needed any more.
pub(super) fn pooled_bound(jobs: &[Job], blocks_max: usize) -> f64 {
    let mut cache = Lru::new(blocks_max);
    let mut evicted = Vec::new();
    let (mut tokens, mut cached) = (0u64, 0u64);
    for job in jobs {
        tokens += u64::from(job.input_tokens);
        let (held, _) = cache.put(&job.blocks, &mut evicted);
        cached += u64::from(tokens_of(&job.blocks, held));
        evicted.clear();
    }
    if tokens == 0 {
        0.0
    } else {
        cached as f64 / tokens as f64
    }
}

/// Tokens in a prompt's first blocks.
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

    pub(in crate::sim::replay) fn shape() -> Shape {
        Shape {
            block_tokens: NonZeroU32::new(10).unwrap(),
            speed: 1.0,
            dither: Duration::ZERO,
            routers: 1,
            seed: 1,
        }
    }

    #[test]
    fn twice_the_speed_is_half_the_time() {
        let shape = Shape {
            speed: 2.0,
            ..shape()
        };
        let jobs = jobs(&[entry(0, 10, &[1]), entry(500, 10, &[1])], &shape);
        assert_eq!(jobs[1].at, Duration::from_millis(250));
    }

    #[test]
    fn dithered_arrivals_are_spread_and_in_order() {
        let shape = Shape {
            dither: Duration::from_secs(3),
            ..shape()
        };
        let entries = vec![entry(0, 10, &[1]); 50];
        let jobs = jobs(&entries, &shape);
        assert!(jobs.is_sorted_by_key(|job| job.at));
        assert!(jobs[10].at < jobs[40].at && jobs[49].at < Duration::from_secs(3));
    }

    #[test]
    fn bounds_are_of_tokens() {
        let all = [
            entry(0, 25, &[1, 2]),
            entry(0, 15, &[7]),
            entry(0, 30, &[1, 2, 3]),
        ];
        let jobs = jobs(&all, &shape());
        assert_eq!(pooled_bound(&jobs, 1_000), 20.0 / 70.0);
        // Its second block went for the next prompt's.
        assert_eq!(pooled_bound(&jobs, 2), 10.0 / 70.0);
        assert_eq!(pooled_bound(&[], 2), 0.0);
    }
}
