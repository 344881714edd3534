//! Local block hashes -> path hashes: the identity of a block together with all that comes before it.

use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::ids::Block;
use crate::ids::BlockHash;

/// Separates the chains of different models and salts, which share nothing in an engine's cache.
pub fn start(model: &str, cache_salt: Option<&str>) -> BlockHash {
    let salt = cache_salt.map_or(0, |salt| xxh3_64_with_seed(salt.as_bytes(), 1));
    BlockHash(xxh3_64_with_seed(model.as_bytes(), salt))
}

/// Chains blocks, given as (local hash, tokens), from a start.
pub fn chain(start: BlockHash, blocks: impl ExactSizeIterator<Item = (u64, u32)>) -> Vec<Block> {
    let mut path = start.0;
    let mut end_tokens = 0u32;
    let mut chained = Vec::with_capacity(blocks.len());
    for (local, tokens) in blocks {
        path = link(path, local);
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
fn link(parent: u64, local: u64) -> u64 {
    const ODD: u64 = 0x9e37_79b9_7f4a_7c15;
    let product = u128::from(parent.rotate_left(23) ^ ODD) * u128::from(local | 1);
    let folded = (product as u64) ^ ((product >> 64) as u64);
    folded ^ local.wrapping_mul(ODD).rotate_left(31) ^ parent
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;

    fn paths(model: &str, salt: Option<&str>, locals: &[u64]) -> Vec<u64> {
        chain(start(model, salt), locals.iter().map(|local| (*local, 16)))
            .iter()
            .map(|block| block.path.0)
            .collect()
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

    #[test]
    fn tokens_add_up_along_the_path() {
        let blocks = chain(start("m", None), [(1, 10), (2, 6)].into_iter());
        assert_eq!(
            blocks
                .iter()
                .map(|block| block.end_tokens)
                .collect::<Vec<_>>(),
            [10, 16]
        );
    }

    #[test]
    fn a_million_paths_do_not_collide() {
        let mut seen = HashSet::new();
        for first in 0..1_000u64 {
            let locals: Vec<u64> = std::iter::once(first).chain(0..1_000).collect();
            seen.extend(paths("m", None, &locals));
        }
        assert_eq!(seen.len(), 1_001_000);
    }

    proptest! {
        #[test]
        fn a_path_names_everything_before_it(a in proptest::collection::vec(0u64..4, 1..12), b in proptest::collection::vec(0u64..4, 1..12)) {
            let (of_a, of_b) = (paths("m", None, &a), paths("m", None, &b));
            for (place, (x, y)) in of_a.iter().zip(&of_b).enumerate() {
                prop_assert_eq!(x == y, a[..=place] == b[..=place]);
            }
        }
    }
}
