//! Hashes of a prompt's text blocks, for workers without KV events: the predicted index needs no
//! tokens. Each block's path hash stands for the block and everything before it.

use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::block::fold;
use crate::ids::{Block, BlockHash};

/// Where the chain of a model and cache salt starts. Chains of different models or salts share
/// nothing, as in an engine's cache.
pub fn chain_root(model: &str, cache_salt: Option<&str>) -> BlockHash {
    let salt = cache_salt.map_or(0, |salt| xxh3_64_with_seed(salt.as_bytes(), 1));
    BlockHash(xxh3_64_with_seed(model.as_bytes(), salt))
}

/// Chains blocks, given as (hash of the block's own text, tokens), from a root.
pub fn chain(root: BlockHash, blocks: impl ExactSizeIterator<Item = (u64, u32)>) -> Vec<Block> {
    let mut path = root.0;
    let mut end_tokens = 0u32;
    let mut chained = Vec::with_capacity(blocks.len());
    for (hash, tokens) in blocks {
        path = link(path, hash);
        end_tokens = end_tokens.saturating_add(tokens);
        chained.push(Block {
            path: BlockHash(path),
            end_tokens,
        });
    }
    chained
}

/// One step of the chain: a multiply-and-fold of both, which is enough to spread 64 bits that are
/// hashes already, and costs a nanosecond.
fn link(parent: u64, hash: u64) -> u64 {
    const ODD: u64 = 0x9e37_79b9_7f4a_7c15;
    fold(parent.rotate_left(23) ^ ODD, hash | 1) ^ hash.wrapping_mul(ODD).rotate_left(31) ^ parent
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;

    fn paths(model: &str, salt: Option<&str>, hashes: &[u64]) -> Vec<u64> {
        let blocks = hashes.iter().map(|hash| (*hash, 16));
        let chained = chain(chain_root(model, salt), blocks);
        chained.iter().map(|block| block.path.0).collect()
    }

    #[test]
    fn models_and_salts_share_no_block() {
        let all = [
            paths("m", None, &[1]),
            paths("n", None, &[1]),
            paths("m", Some("s"), &[1]),
            paths("m", Some(""), &[1]),
        ];
        assert_eq!(all.iter().flatten().collect::<HashSet<_>>().len(), 4);
    }

    /// Replicas of other releases read paths as their own. Expected values made with another implementation.
    #[test]
    fn paths_do_not_change_between_versions() {
        assert_eq!(
            paths("m", None, &[1, u64::MAX]),
            [0xd2a2_c99f_0fa5_df11, 0x6d07_f795_40be_63cd]
        );
        assert_eq!(
            paths("m", Some("s"), &[1, 2]),
            [0x472a_8318_0ebf_66a3, 0x0ef0_8d13_9c35_a4e6]
        );
    }

    #[test]
    fn tokens_add_up_along_the_chain() {
        let blocks = chain(chain_root("m", None), [(1, 10), (2, 6)].into_iter());
        let ends: Vec<u32> = blocks.iter().map(|block| block.end_tokens).collect();
        assert_eq!(ends, [10, 16]);
    }

    #[test]
    fn a_million_paths_do_not_collide() {
        let mut seen = HashSet::new();
        for first in 0..1_000u64 {
            let hashes: Vec<u64> = std::iter::once(first).chain(0..1_000).collect();
            seen.extend(paths("m", None, &hashes));
        }
        assert_eq!(seen.len(), 1_001_000);
    }

    proptest! {
        #[test]
        fn paths_are_equal_exactly_where_all_blocks_up_to_them_are(a in proptest::collection::vec(0u64..4, 1..12), b in proptest::collection::vec(0u64..4, 1..12)) {
            let (of_a, of_b) = (paths("m", None, &a), paths("m", None, &b));
            for (at, (x, y)) in of_a.iter().zip(&of_b).enumerate() {
                prop_assert_eq!(x == y, a[..=at] == b[..=at]);
            }
        }
    }
}
