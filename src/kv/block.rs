//! Local block hashes -> path hashes: the identity of a block together with all that comes before it.
//!
//! Two chains live here. [`start`] and [`chain`] are over blocks of a prompt's text, for workers that
//! tell nothing. [`root`], [`Local`] and [`Path`] are over the token ids that engines report: a
//! block's local hash is the one that the field uses, and the chain is ours alone.

use std::num::NonZeroU32;

use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::ids::{Block, BlockHash};

/// Where chains of one adapter and salt begin. Blocks of different roots share nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Root(pub u64);

/// The hash of one block's own content, whatever comes before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(transparent)]
pub struct Local(pub u64);

/// The field's common seed of block hashes.
const SEED: u64 = 1337;

/// The root of an adapter (none: the base model) and a salt. An empty name is not the same as none.
pub fn root(lora_name: Option<&str>, cache_salt: Option<&str>) -> Root {
    let mut bytes = Vec::with_capacity(64);
    for part in [lora_name, cache_salt] {
        // With its length, so that no two pairs are the same bytes.
        bytes.push(u8::from(part.is_some()));
        let part = part.unwrap_or_default();
        bytes.extend_from_slice(&(part.len() as u64).to_le_bytes());
        bytes.extend_from_slice(part.as_bytes());
    }
    Root(xxh3_64_with_seed(&bytes, SEED))
}

/// XXH3-64 over the tokens as little-endian words.
pub fn local(tokens: &[u32]) -> Local {
    if cfg!(target_endian = "little") {
        Local(xxh3_64_with_seed(bytemuck::cast_slice(tokens), SEED))
    } else {
        let bytes: Vec<u8> = tokens.iter().flat_map(|t| t.to_le_bytes()).collect();
        Local(xxh3_64_with_seed(&bytes, SEED))
    }
}

/// The local hash of a block whose content is not its tokens alone; `extra` is a hash of the rest.
pub fn local_with(tokens: &[u32], extra: u64) -> Local {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&local(tokens).0.to_le_bytes());
    bytes[8..].copy_from_slice(&extra.to_le_bytes());
    Local(xxh3_64_with_seed(&bytes, SEED))
}

/// The local hashes of all full blocks, appended to `out`.
pub fn locals(tokens: &[u32], block_size: NonZeroU32, out: &mut Vec<Local>) {
    let blocks = tokens.chunks_exact(block_size.get() as usize);
    out.extend(blocks.map(local));
}

/// Blocks whose chain needs no multiplication to wait for: see [`Path`].
pub const STRETCH: usize = 16;

/// A block and all before it, from the root on.
///
/// Within a stretch of 16 blocks the path grows by each local hash times a constant of the block's
/// place, so that its sums do not wait for each other; a stretch begins with a mixed value of the one
/// before it. Measured against a multiply-and-fold a block: 0.9 ns instead of 2.4, and 0.4 where only
/// a stretch's ends are asked for. Local hashes are spread over 64 bits already.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Path(pub u64);

impl Path {
    /// The path before a chain's first block.
    pub fn start(root: Root) -> Self {
        Self(root.0)
    }

    /// The path one block on; `depth` is that block's place in the chain.
    #[inline]
    pub fn step(self, local: Local, depth: u32) -> Self {
        let place = depth as usize % STRETCH;
        let from = if place == 0 { self.mixed() } else { self.0 };
        Self(from.wrapping_add(local.0.wrapping_mul(PLACES[place])))
    }

    /// The paths of the first and of the last of up to 16 blocks that begin a stretch.
    #[inline]
    pub fn stretch(self, locals: &[Local]) -> (Self, Self) {
        let base = self.mixed();
        let sum = |locals: &[Local]| {
            let products = locals.iter().zip(&PLACES);
            products.fold(0u64, |sum, (local, odd)| {
                sum.wrapping_add(local.0.wrapping_mul(*odd))
            })
        };
        let all = match <&[Local; STRETCH]>::try_from(locals) {
            // Of a known length, it is unrolled.
            Ok(whole) => (0..STRETCH).fold(0u64, |sum, place| {
                sum.wrapping_add(whole[place].0.wrapping_mul(PLACES[place]))
            }),
            Err(_) => sum(locals),
        };
        let first = sum(&locals[..locals.len().min(1)]);
        (Self(base.wrapping_add(first)), Self(base.wrapping_add(all)))
    }

    /// Spread over all bits; also what tables of paths are looked up by.
    #[inline]
    pub fn mixed(self) -> u64 {
        fold(self.0 ^ 0x9e37_79b9_7f4a_7c15, 0xd6e8_feb8_6659_fd93)
    }
}

/// One odd number for each place in a stretch.
const PLACES: [u64; STRETCH] = {
    let mut places = [0; STRETCH];
    let mut at = 0;
    while at < STRETCH {
        // The finaliser of splitmix64.
        let mut z = (at as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        places[at] = (z ^ (z >> 31)) | 1;
        at += 1;
    }
    places
};

#[inline]
fn fold(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    (product as u64) ^ ((product >> 64) as u64)
}

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
    fold(parent.rotate_left(23) ^ ODD, local | 1) ^ local.wrapping_mul(ODD).rotate_left(31) ^ parent
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

    /// Made with another implementation (Python's xxhash 3).
    #[test]
    fn local_hashes_are_the_fields() {
        let check = |tokens: &[u32], expected: u64| assert_eq!(local(tokens), Local(expected));
        check(&[], 0xd1f3_e774_4443_0ab9);
        check(&[0], 0xe44f_30ed_0f7b_c171);
        check(&[1, 2, 3, 4], 0xcb38_e4d7_fb2d_ca5c);
        check(&(0..16).collect::<Vec<_>>(), 0xd47a_8f41_c833_328a);
        check(&(100..132).collect::<Vec<_>>(), 0x8d9f_1901_4f84_7bf2);
        check(&[u32::MAX; 16], 0x7d8b_6f9b_721b_b4ad);
        check(&(0..300).collect::<Vec<_>>(), 0x1474_c801_f157_6d1c);
        assert_eq!(
            local_with(&(0..16).collect::<Vec<_>>(), 7),
            Local(0x0a6e_0e51_2cd1_6225)
        );
    }

    #[test]
    fn roots_and_paths_stay_what_they_are() {
        let check = |lora, salt, expected| assert_eq!(root(lora, salt), Root(expected));
        check(None, None, 0x5a39_9b92_6e78_4251);
        check(Some("ad"), None, 0xd447_ecfa_30ca_3a9f);
        check(None, Some("ad"), 0x6851_7298_5158_a0b4);
        check(None, Some(""), 0xbac8_731d_1cea_d488);
        check(Some("a"), Some("b"), 0x9053_77d9_4e2e_8cc5);
        let mut path = Path::start(root(None, None));
        let paths: Vec<u64> = (0..20)
            .map(|depth| {
                path = path.step(local(&[depth]), depth);
                path.0
            })
            .collect();
        for (depth, expected) in [
            (0, 0xb32c_ffd3_9633_0559),
            (1, 0x15be_da59_4536_f0ca),
            (15, 0x8db6_5d57_3d6d_715d),
            (16, 0xfba7_8a4f_e7dd_dbfa),
            (19, 0x54ec_e4fd_ac8c_81bc),
        ] {
            assert_eq!(paths[depth], expected, "at {depth}");
        }
    }

    #[test]
    fn only_full_blocks_are_hashed_whatever_their_size() {
        let tokens: Vec<u32> = (0..103).collect();
        for size in [1, 2, 7, 16, 32, 103, 200] {
            let mut found = Vec::new();
            locals(&tokens, NonZeroU32::new(size).unwrap(), &mut found);
            let expected: Vec<Local> = (0..103 / size as usize)
                .map(|at| local(&tokens[at * size as usize..(at + 1) * size as usize]))
                .collect();
            assert_eq!(found, expected);
        }
    }

    proptest! {
        #[test]
        fn a_stretch_ends_where_its_steps_do(root in any::<u64>(), of in proptest::collection::vec(any::<u64>(), 1..=STRETCH)) {
            let of: Vec<Local> = of.into_iter().map(Local).collect();
            let start = Path(root);
            let (first, last) = start.stretch(&of);
            prop_assert_eq!(first, start.step(of[0], 32));
            let stepped = of.iter().zip(32..).fold(start, |path, (local, depth)| path.step(*local, depth));
            prop_assert_eq!(last, stepped);
        }

        #[test]
        fn a_path_of_tokens_names_everything_before_it(a in proptest::collection::vec(0u32..3, 1..40), b in proptest::collection::vec(0u32..3, 1..40)) {
            let walk = |tokens: &[u32]| {
                let mut path = Path::start(root(None, None));
                let step = |(token, depth): (&u32, u32)| {
                    path = path.step(local(&[*token]), depth);
                    path
                };
                tokens.iter().zip(0..).map(step).collect::<Vec<_>>()
            };
            for (place, (x, y)) in walk(&a).iter().zip(&walk(&b)).enumerate() {
                prop_assert_eq!(x == y, a[..=place] == b[..=place]);
            }
        }

        #[test]
        fn a_path_names_everything_before_it(a in proptest::collection::vec(0u64..4, 1..12), b in proptest::collection::vec(0u64..4, 1..12)) {
            let (of_a, of_b) = (paths("m", None, &a), paths("m", None, &b));
            for (place, (x, y)) in of_a.iter().zip(&of_b).enumerate() {
                prop_assert_eq!(x == y, a[..=place] == b[..=place]);
            }
        }
    }
}
