//! Lower tiers and stores beside the engine that report chunks of their own: another size, other names, other letters.

use super::*;
use crate::kv::block::BlockShape;
use crate::kv::index::RankPrefix;

impl Rank {
    fn size(&self) -> Option<u32> {
        self.tree.tree().map(|(shape, _)| shape.size.get())
    }

    fn cached(&self, tokens: &[u32]) -> RankPrefix {
        let size = NonZeroU32::new(16).unwrap();
        let (mut locals, mut found) = (Vec::new(), Vec::new());
        block::hash_blocks(tokens, size, &mut locals);
        let index = self.indexes.index(&"m".into(), BlockShape::from(size));
        index.overlap(block::chain_root(None, None), &locals, &mut found);
        found.pop().unwrap_or(RankPrefix {
            worker: WORKER,
            rank: 0,
            blocks: 0,
            gpu_blocks: 0,
            disk_blocks: 0,
        })
    }
}

fn tokens(blocks: std::ops::Range<u32>) -> Vec<u32> {
    (blocks.start * 16..blocks.end * 16).collect()
}

/// Blocks of a prompt in chunks of `size` tokens, named from `first` on.
fn store(medium: Medium, size: u32, first: u64, blocks: std::ops::Range<u32>) -> Event {
    let token_ids = tokens(blocks.clone());
    let names = first..first + token_ids.len() as u64 / u64::from(size);
    Event::Stored(Stored {
        hashes: names.map(EngineHash).collect(),
        parent: (blocks.start > 0).then(|| EngineHash(first - 1)),
        token_ids,
        block_size: size,
        location: Location {
            medium,
            ..Location::default()
        },
        ..Stored::default()
    })
}

fn remove(medium: Medium, names: std::ops::Range<u64>) -> Event {
    Event::Removed(Removed {
        hashes: names.map(EngineHash).collect(),
        location: Location {
            medium,
            ..Location::default()
        },
    })
}

#[test]
fn chunks_of_a_lower_tier_do_not_set_the_block_size() {
    for first_chunks in [1, 2] {
        let mut rank = Rank::new();
        let blocks = 16 * first_chunks;
        rank.apply(vec![store(Medium::Cpu, 256, 9_000, 0..blocks)]);
        let effect = rank.apply(vec![store(Medium::Gpu, 16, 1, 0..4)]);
        assert_eq!((effect.ignored.len(), effect.impact), (0, TreeImpact::None));
        assert_eq!(rank.size(), Some(16));
        assert_eq!(rank.cached(&tokens(0..5)).gpu_blocks, 4);
        // A single block, too.
        let effect = rank.apply(vec![store(Medium::Gpu, 16, 5, 4..5)]);
        assert_eq!(effect.ignored, []);
        let effect = rank.apply(vec![store(Medium::Cpu, 256, 9_002, 32..48)]);
        assert_eq!(effect.ignored, [IgnoredReason::TierBlockSize]);
        assert_eq!(effect.impact, TreeImpact::None);
        assert_eq!(rank.cached(&tokens(0..5)).gpu_blocks, 5);
    }
}

#[test]
fn a_single_block_in_the_gpu_sets_the_size_after_larger_chunks_of_a_lower_tier() {
    let mut rank = Rank::new();
    rank.apply(vec![store(Medium::Disk, 256, 9_000, 0..16)]);
    let effect = rank.apply(vec![store(Medium::Gpu, 16, 1, 0..1)]);
    assert_eq!((effect.ignored.len(), effect.impact), (0, TreeImpact::None));
    assert_eq!(rank.cached(&tokens(0..2)).gpu_blocks, 1);
}

#[test]
fn a_lower_tier_whose_blocks_have_the_gpus_size_counts_before_the_gpu_stores_any() {
    let mut rank = Rank::new();
    rank.apply(vec![store(Medium::Cpu, 16, 1, 0..3)]);
    assert_eq!(rank.cached(&tokens(0..4)).blocks, 3);
    rank.apply(vec![store(Medium::Gpu, 16, 1, 0..2)]);
    let found = rank.cached(&tokens(0..4));
    assert_eq!((found.blocks, found.gpu_blocks), (3, 2));
}

#[test]
fn a_clear_of_the_engine_forgets_the_block_size() {
    let mut rank = Rank::new();
    rank.apply(vec![store(Medium::Gpu, 16, 1, 0..4)]);
    let clear = Event::Cleared { ownership: None };
    let effect = rank.apply(vec![clear, store(Medium::Gpu, 32, 100, 0..4)]);
    assert_eq!((effect.ignored.len(), effect.impact), (0, TreeImpact::None));
    assert_eq!(rank.size(), Some(32));
}

#[test]
fn a_store_beside_the_engine_with_names_of_its_own_changes_nothing_in_the_gpu() {
    let mut rank = Rank::new();
    rank.apply(vec![store(Medium::Gpu, 16, 1, 0..4)]);
    let effect = rank.apply(vec![store(Medium::Cpu, 16, 9_000, 0..6)]);
    assert_eq!(effect.ignored, [IgnoredReason::UnknownCopy]);
    let found = rank.cached(&tokens(0..7));
    // The two blocks that the GPU does not have are known by the names of that store.
    assert_eq!((found.blocks, found.gpu_blocks), (6, 4));
    rank.apply(vec![remove(Medium::Gpu, 1..5)]);
    assert_eq!(rank.cached(&tokens(0..7)).blocks, 0);
    rank.apply(vec![remove(Medium::Cpu, 9_000..9_006)]);
    assert_eq!(rank.tree.tree().unwrap().1.len(), 0);
}

#[test]
fn a_block_that_the_gpu_names_otherwise_loses_the_lower_copy_that_could_not_be_removed() {
    let mut rank = Rank::new();
    rank.apply(vec![store(Medium::Cpu, 16, 9_000, 0..4)]);
    rank.apply(vec![store(Medium::Gpu, 16, 1, 0..4)]);
    rank.apply(vec![remove(Medium::Cpu, 9_000..9_004)]);
    rank.apply(vec![remove(Medium::Gpu, 1..5)]);
    assert_eq!(rank.tree.tree().unwrap().1.len(), 0);
}

#[test]
fn media_are_known_in_small_letters() {
    let name = |name| Medium::named(name);
    assert_eq!(name("cpu"), Medium::Cpu);
    assert_eq!(name("Gpu"), Medium::Gpu);
    assert_eq!(name("cpu_pinned"), Medium::Cpu);
    assert_eq!(
        [name("disk"), name("Storage")],
        [Medium::Disk, Medium::Disk]
    );
    assert_eq!(name("hbm"), Medium::Other("hbm".into()));
}
