//! Hashes of a prompt's token blocks. A block's *local hash* is of its own tokens and is the one that
//! other routers use too; its *path hash* stands for the block and everything before it, and is only
//! ours. See [`super::text_block`] for blocks of text.

use std::num::NonZeroU32;

use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Where the chains of one adapter and cache salt start. Chains of different roots share no block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ChainRoot(pub u64);

/// The hash of one block's own content, whatever comes before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(transparent)]
pub struct LocalHash(pub u64);

/// What the local hashes of an engine's blocks cover.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockShape {
    /// Tokens of a block.
    pub size: NonZeroU32,
    /// Tokens after a block on which its content depends too: with some kinds of speculative decoding, vLLM 0.33 reuses a
    /// block only if the prompt goes on as it did. Nearly always 0.
    pub lookahead: u32,
}

impl BlockShape {
    /// The most blocks of a prompt of this many tokens that an engine reuses. It computes at least the last token.
    pub fn reusable_blocks(self, tokens: usize) -> usize {
        tokens.saturating_sub(self.lookahead.max(1) as usize) / self.size.get() as usize
    }
}

impl From<NonZeroU32> for BlockShape {
    /// Blocks of this size without lookahead.
    fn from(size: NonZeroU32) -> Self {
        Self { size, lookahead: 0 }
    }
}

/// Of all hashes here and in [`super::text_block`]. Replicas give each other's hashes a meaning only where this
/// is equal; it changes when one of them gives another value.
pub const HASH_VERSION: u32 = 1;

/// The seed that vLLM-style routers share for block hashes.
const SEED: u64 = 1337;

/// The root of an adapter (none: the base model) and a salt. An empty name differs from none.
pub fn chain_root(lora_name: Option<&str>, cache_salt: Option<&str>) -> ChainRoot {
    let mut bytes = Vec::with_capacity(64);
    for part in [lora_name, cache_salt] {
        // Length-prefixed, so that no two pairs give the same bytes.
        bytes.push(u8::from(part.is_some()));
        let part = part.unwrap_or_default();
        bytes.extend_from_slice(&(part.len() as u64).to_le_bytes());
        bytes.extend_from_slice(part.as_bytes());
    }
    ChainRoot(xxh3_64_with_seed(&bytes, SEED))
}

/// XXH3-64 over the tokens as little-endian words.
pub fn hash_block(tokens: &[u32]) -> LocalHash {
    if cfg!(target_endian = "little") {
        LocalHash(xxh3_64_with_seed(bytemuck::cast_slice(tokens), SEED))
    } else {
        let bytes: Vec<u8> = tokens.iter().flat_map(|t| t.to_le_bytes()).collect();
        LocalHash(xxh3_64_with_seed(&bytes, SEED))
    }
}

/// The local hash of a block whose content is more than its tokens (an image, for example); `extra`
/// is a hash of the rest.
pub fn hash_block_with(tokens: &[u32], extra: u64) -> LocalHash {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&hash_block(tokens).0.to_le_bytes());
    bytes[8..].copy_from_slice(&extra.to_le_bytes());
    LocalHash(xxh3_64_with_seed(&bytes, SEED))
}

/// The local hashes of all full blocks, appended to `out`. A block whose lookahead is not full is left out.
pub fn hash_blocks(tokens: &[u32], shape: impl Into<BlockShape>, out: &mut Vec<LocalHash>) {
    let shape = shape.into();
    let size = shape.size.get() as usize;
    if shape.lookahead == 0 {
        out.extend(tokens.chunks_exact(size).map(hash_block));
        return;
    }
    let blocks = tokens.windows(size.saturating_add(shape.lookahead as usize));
    out.extend(blocks.step_by(size).map(hash_block));
}

/// Blocks in a segment of a chain. Segments start at multiples of it; see [`PathHash`].
pub const SEGMENT_BLOCKS: usize = 16;

/// A hash of a block and everything before it, from the chain's root on.
///
/// Within a segment of 16 blocks the path hash grows by each local hash times a constant of the
/// block's position, so that the products do not wait for each other. A segment starts with a mixed
/// value of the path hash before it. Measured against a multiply-and-fold for each block: 0.9 ns a
/// block instead of 2.4, and 0.4 where only a segment's first and last path are needed. Local hashes
/// are spread over 64 bits already.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PathHash(pub u64);

impl PathHash {
    /// The path hash before a chain's first block.
    pub fn start(root: ChainRoot) -> Self {
        Self(root.0)
    }

    /// The path hash one block on; `depth` counts the blocks before that block.
    #[inline]
    pub fn step(self, local: LocalHash, depth: u32) -> Self {
        let position = depth as usize % SEGMENT_BLOCKS;
        let from = if position == 0 { self.mixed() } else { self.0 };
        Self(from.wrapping_add(local.0.wrapping_mul(MULTIPLIERS[position])))
    }

    /// The local hash of the block at `depth` whose path hash follows this one: undoes [`PathHash::step`].
    pub fn local_before(self, next: Self, depth: u32) -> LocalHash {
        let position = depth as usize % SEGMENT_BLOCKS;
        let from = if position == 0 { self.mixed() } else { self.0 };
        LocalHash(next.0.wrapping_sub(from).wrapping_mul(INVERSES[position]))
    }

    /// The path hashes of the first and of the last of up to 16 blocks that start a segment.
    #[inline]
    pub fn segment(self, locals: &[LocalHash]) -> (Self, Self) {
        let base = self.mixed();
        let sum = |locals: &[LocalHash]| {
            let products = locals.iter().zip(&MULTIPLIERS);
            products.fold(0u64, |sum, (local, multiplier)| {
                sum.wrapping_add(local.0.wrapping_mul(*multiplier))
            })
        };
        let all = match <&[LocalHash; SEGMENT_BLOCKS]>::try_from(locals) {
            // With a known length the compiler unrolls the loop.
            Ok(whole) => (0..SEGMENT_BLOCKS).fold(0u64, |sum, position| {
                sum.wrapping_add(whole[position].0.wrapping_mul(MULTIPLIERS[position]))
            }),
            Err(_) => sum(locals),
        };
        let first = sum(&locals[..locals.len().min(1)]);
        (Self(base.wrapping_add(first)), Self(base.wrapping_add(all)))
    }

    /// The path hash spread over all bits, as hash tables of paths need it.
    #[inline]
    pub fn mixed(self) -> u64 {
        fold(self.0 ^ 0x9e37_79b9_7f4a_7c15, 0xd6e8_feb8_6659_fd93)
    }
}

/// One odd number for each position in a segment.
const MULTIPLIERS: [u64; SEGMENT_BLOCKS] = {
    let mut multipliers = [0; SEGMENT_BLOCKS];
    let mut at = 0;
    while at < SEGMENT_BLOCKS {
        // The finaliser of splitmix64.
        let mut z = (at as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        multipliers[at] = (z ^ (z >> 31)) | 1;
        at += 1;
    }
    multipliers
};

/// The inverses of [`MULTIPLIERS`] modulo 2^64, by Newton's iteration: each step doubles the bits that are right.
const INVERSES: [u64; SEGMENT_BLOCKS] = {
    let mut inverses = MULTIPLIERS;
    let mut at = 0;
    while at < SEGMENT_BLOCKS {
        let mut steps = 0;
        while steps < 6 {
            let product = MULTIPLIERS[at].wrapping_mul(inverses[at]);
            inverses[at] = inverses[at].wrapping_mul(2u64.wrapping_sub(product));
            steps += 1;
        }
        at += 1;
    }
    inverses
};

/// The 128-bit product, folded to 64 bits.
#[inline]
pub(super) fn fold(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    (product as u64) ^ ((product >> 64) as u64)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Expected values made with another implementation (Python's xxhash 3).
    #[test]
    fn local_hashes_are_those_of_other_routers() {
        let check =
            |tokens: &[u32], expected: u64| assert_eq!(hash_block(tokens), LocalHash(expected));
        check(&[], 0xd1f3_e774_4443_0ab9);
        check(&[0], 0xe44f_30ed_0f7b_c171);
        check(&[1, 2, 3, 4], 0xcb38_e4d7_fb2d_ca5c);
        check(&(0..16).collect::<Vec<_>>(), 0xd47a_8f41_c833_328a);
        check(&(100..132).collect::<Vec<_>>(), 0x8d9f_1901_4f84_7bf2);
        check(&[u32::MAX; 16], 0x7d8b_6f9b_721b_b4ad);
        check(&(0..300).collect::<Vec<_>>(), 0x1474_c801_f157_6d1c);
        assert_eq!(
            hash_block_with(&(0..16).collect::<Vec<_>>(), 7),
            LocalHash(0x0a6e_0e51_2cd1_6225)
        );
    }

    #[test]
    fn roots_and_paths_do_not_change_between_versions() {
        let check = |lora, salt, expected| assert_eq!(chain_root(lora, salt), ChainRoot(expected));
        check(None, None, 0x5a39_9b92_6e78_4251);
        check(Some("ad"), None, 0xd447_ecfa_30ca_3a9f);
        check(None, Some("ad"), 0x6851_7298_5158_a0b4);
        check(None, Some(""), 0xbac8_731d_1cea_d488);
        check(Some("a"), Some("b"), 0x9053_77d9_4e2e_8cc5);
        let mut path = PathHash::start(chain_root(None, None));
        let paths: Vec<u64> = (0..20)
            .map(|depth| {
                path = path.step(hash_block(&[depth]), depth);
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
            hash_blocks(&tokens, NonZeroU32::new(size).unwrap(), &mut found);
            let expected: Vec<LocalHash> = (0..103 / size as usize)
                .map(|at| hash_block(&tokens[at * size as usize..(at + 1) * size as usize]))
                .collect();
            assert_eq!(found, expected);
        }
    }

    #[test]
    fn a_block_with_lookahead_is_another_block_if_the_prompt_goes_on_otherwise() {
        let shape = BlockShape {
            size: NonZeroU32::new(4).unwrap(),
            lookahead: 2,
        };
        let hashes = |tokens: &[u32]| {
            let mut hashes = Vec::new();
            hash_blocks(tokens, shape, &mut hashes);
            hashes
        };
        let prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10];
        let whole = hashes(&prompt);
        assert_eq!(whole, [hash_block(&prompt[..6]), hash_block(&prompt[4..])]);
        // The second block's lookahead is not there yet.
        for length in 6..10 {
            assert_eq!(hashes(&prompt[..length]), whole[..1], "{length} tokens");
        }
        assert_eq!(hashes(&[1, 2, 3, 4, 5, 6, 7, 8, 9, 11])[..1], whole[..1]);
        assert_ne!(hashes(&[1, 2, 3, 4, 5, 7])[0], whole[0]);
        for (tokens, expected) in [(0, 0), (5, 0), (6, 1), (9, 1), (10, 2)] {
            assert_eq!(shape.reusable_blocks(tokens), expected, "{tokens} tokens");
        }
        let plain = BlockShape::from(shape.size);
        for (tokens, expected) in [(0, 0), (4, 0), (5, 1), (8, 1), (9, 2)] {
            assert_eq!(plain.reusable_blocks(tokens), expected, "{tokens} tokens");
        }
    }

    proptest! {
        #[test]
        fn a_step_can_be_undone(path in any::<u64>(), local in any::<u64>(), depth in 0u32..64) {
            let (path, local) = (PathHash(path), LocalHash(local));
            prop_assert_eq!(path.local_before(path.step(local, depth), depth), local);
        }

        #[test]
        fn a_segment_gives_the_same_paths_as_its_single_steps(root in any::<u64>(), locals in proptest::collection::vec(any::<u64>(), 1..=SEGMENT_BLOCKS)) {
            let locals: Vec<LocalHash> = locals.into_iter().map(LocalHash).collect();
            let start = PathHash(root);
            let (first, last) = start.segment(&locals);
            prop_assert_eq!(first, start.step(locals[0], 32));
            let stepped = locals.iter().zip(32..).fold(start, |path, (local, depth)| path.step(*local, depth));
            prop_assert_eq!(last, stepped);
        }

        #[test]
        fn paths_are_equal_exactly_where_all_tokens_up_to_them_are(a in proptest::collection::vec(0u32..3, 1..40), b in proptest::collection::vec(0u32..3, 1..40)) {
            let walk = |tokens: &[u32]| {
                let mut path = PathHash::start(chain_root(None, None));
                let step = |(token, depth): (&u32, u32)| {
                    path = path.step(hash_block(&[*token]), depth);
                    path
                };
                tokens.iter().zip(0..).map(step).collect::<Vec<_>>()
            };
            for (at, (x, y)) in walk(&a).iter().zip(&walk(&b)).enumerate() {
                prop_assert_eq!(x == y, a[..=at] == b[..=at]);
            }
        }
    }
}
