//! Which of several workers of nearly the same cost gets a prompt while replicas are not connected with each other: the one
//! that a hash of the prompt's first blocks prefers. It needs no messages, so replicas that know nothing of each
//! other's choices still send the same prefixes to the same workers. Pure.

use super::cost::Costs;
use super::rendezvous;
use super::types::{Cached, View};
use crate::ids::{Block, ViewIndex};

/// How much more than the lowest cost a worker may have, in parts of what computing the whole prompt takes. In simulations of
/// replicas that hear nothing of each other it takes most of what a choice by cost alone loses (benches/README.md).
const SLACK: f64 = 0.5;

/// The hash of a prompt's first `count` blocks. Of a shorter prompt, the hash of the largest power of two of blocks
/// that it has, so that a short conversation keeps its key for most turns. `None` for a prompt without blocks.
pub fn key(prompt: &[Block], count: usize) -> Option<u64> {
    let taken = match prompt.len() {
        0 => return None,
        len if len < count => 1 << len.ilog2(),
        _ => count.max(1),
    };
    Some(prompt[taken - 1].path.0)
}

/// The worker that the prompt's first blocks prefer among those whose cost is within the slack of `lowest_cost`, with what
/// it has cached. `None` if this replica is not alone, or none of the 16 most preferred workers is so cheap.
pub(super) fn preferred(
    costs: &Costs<'_>,
    view: &impl View,
    lowest_cost: f64,
) -> Option<(ViewIndex, Cached)> {
    let request = costs.request;
    let key = request.prefix_key.filter(|_| request.is_alone)?;
    let limit = lowest_cost + SLACK * f64::from(request.prompt_tokens) * costs.mean_prompt_token;
    let workers = view.indices().map(|index| (index, view.identity(index)));
    rendezvous::order(key, workers)
        .into_iter()
        .find_map(|index| {
            let state = view.state(index);
            if !state.is_usable || state.queued_tokens as f64 * state.speed.prompt_token > limit {
                return None;
            }
            let cached = view.cached(index);
            let new_tokens = costs.new_tokens(&cached);
            let cost = costs.cost(&state, new_tokens);
            (cost <= limit).then_some((index, cached))
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::BlockHash;

    #[test]
    fn the_key_is_the_hash_of_the_first_blocks_or_of_a_power_of_two_of_them() {
        let block = |path| Block {
            path: BlockHash(path),
            end_tokens: 0,
        };
        let prompt: Vec<Block> = (1..=100).map(block).collect();
        for (len, expected) in [
            (0, None),
            (1, Some(1)),
            (3, Some(2)),
            (47, Some(32)),
            (48, Some(48)),
            (100, Some(48)),
        ] {
            assert_eq!(key(&prompt[..len], 48), expected, "{len}");
        }
    }
}
