//! The memory limit where workers share blocks.

use super::*;

const BYTES_MAX: usize = 2 << 20;
/// What trees and tables may take in the moment before blocks are dropped for it.
const SLACK: usize = 512 << 10;
/// All prompts begin with one of a few system prompts.
const SYSTEM_BLOCKS: u64 = 48;

/// A prompt's blocks; `worker` if its engine has names of its own.
fn prompt(number: u64, blocks: u64, worker: Option<u64>) -> Vec<NewBlock> {
    let block = |at| {
        let content = if at < SYSTEM_BLOCKS {
            (number % 3) << 32 | at
        } else {
            (number + 3) << 32 | at
        };
        NewBlock {
            name: EngineHash(worker.map_or(content, |worker| content | (worker + 1) << 56)),
            local: LocalHash(content + 1),
        }
    };
    (0..blocks).map(block).collect()
}

struct Fleet {
    _indexes: Arc<PrefixIndexes>,
    index: Arc<PrefixIndex>,
    trees: Vec<Tree>,
    has_private_names: bool,
}

impl Fleet {
    fn new(workers: u32, has_private_names: bool) -> Self {
        let (indexes, index) = index_of(BYTES_MAX as u64);
        let trees = (0..workers).map(|worker| {
            let mut tree = index.add_tree(WorkerId(worker), 0);
            tree.set_visible(true);
            tree
        });
        Self {
            trees: trees.collect(),
            _indexes: indexes,
            index,
            has_private_names,
        }
    }

    fn store(&mut self, worker: usize, number: u64, blocks: u64) {
        let blocks = prompt(
            number,
            blocks,
            self.has_private_names.then_some(worker as u64),
        );
        let parent = Parent::Root(ChainRoot(1));
        self.trees[worker]
            .store(parent, &blocks, Tier::Gpu, CopyReport::OneMore)
            .unwrap();
    }

    fn depths(&self, number: u64, blocks: u64) -> Vec<(u32, u32)> {
        let locals: Vec<LocalHash> = prompt(number, blocks, None)
            .iter()
            .map(|block| block.local)
            .collect();
        let mut found = Vec::new();
        self.index.overlap(ChainRoot(1), &locals, &mut found);
        let mut depths: Vec<_> = found
            .iter()
            .map(|prefix| (prefix.worker.0, prefix.blocks))
            .collect();
        depths.sort_unstable();
        depths
    }

    /// The bytes by the running totals, which a recount has to confirm.
    fn check_accounts(&self) -> usize {
        let (counted, recounted) = self
            .index
            .read(|writer, pages| (writer.bytes(pages), writer.recount(pages)));
        assert_eq!(counted, recounted);
        counted
    }
}

/// One prompt, the workers that store it (a bit each), and how many blocks.
fn prompts(workers: u32) -> impl Strategy<Value = Vec<(u8, u64)>> {
    let of_some = 1..1u8 << workers;
    let of_all = Just((1u8 << workers) - 1);
    let each = (prop_oneof![of_some, of_all], 1..600u64);
    proptest::collection::vec(each, 300..400)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(6))]

    #[test]
    fn at_the_limit_the_prompts_stored_last_are_known_wherever_they_are_shared(
        prompts in prompts(5),
        has_private_names in any::<bool>(),
    ) {
        let mut fleet = Fleet::new(5, has_private_names);
        for (number, (workers, blocks)) in prompts.iter().enumerate() {
            for worker in (0..5).filter(|worker| workers >> worker & 1 == 1) {
                fleet.store(worker, number as u64, *blocks);
                prop_assert!(fleet.index.memory_bytes() <= BYTES_MAX + SLACK);
            }
            if number % 100 == 0 {
                fleet.check_accounts();
            }
        }
        fleet.check_accounts();
        // Far over the limit, and not far below it.
        prop_assert!(fleet.trees.iter_mut().any(Tree::take_evicted));
        let memory = fleet.index.memory_bytes();
        prop_assert!(memory > BYTES_MAX / 2, "{memory}");
        for (number, (workers, blocks)) in prompts.iter().enumerate().rev().take(8) {
            let expected: Vec<_> = (0..5)
                .filter(|worker| workers >> worker & 1 == 1)
                .map(|worker| (worker, *blocks as u32))
                .collect();
            let mut found = fleet.depths(number as u64, *blocks);
            // Other workers have the system prompt.
            found.retain(|(worker, _)| workers >> worker & 1 == 1);
            prop_assert_eq!(found, expected);
        }
        for number in 0..3 {
            prop_assert!(!fleet.depths(number, SYSTEM_BLOCKS).is_empty());
        }
    }
}

#[test]
fn blocks_that_many_workers_share_stay_known_at_the_limit() {
    let mut fleet = Fleet::new(20, false);
    for number in 0..150 {
        for worker in 0..20 {
            fleet.store(worker, number, 400);
        }
    }
    assert!(fleet.trees[0].take_evicted());
    assert!(fleet.index.memory_bytes() <= BYTES_MAX + SLACK);
    assert!(fleet.index.len() > 10_000, "{} blocks", fleet.index.len());
    for number in 140..150 {
        let everywhere: Vec<_> = (0..20).map(|worker| (worker, 400)).collect();
        assert_eq!(fleet.depths(number, 400), everywhere);
    }
}

#[test]
fn a_page_that_many_workers_own_is_dropped_for_all_of_them() {
    let mut fleet = Fleet::new(500, false);
    let blocks = prompt(0, 32, None);
    let names: Vec<EngineHash> = blocks.iter().map(|block| block.name).collect();
    for worker in 0..500 {
        fleet.store(worker, 0, 32);
        if worker % 2 == 0 {
            fleet.trees[worker].add_copies(&names, Tier::Cpu, CopyReport::OneMore);
        }
    }
    assert_eq!(fleet.depths(0, 32).len(), 500);
    // Prompts that do not begin like the first one.
    for number in 0..200 {
        fleet.store(0, number * 3 + 1, 400);
    }
    assert!(fleet.depths(0, 32).is_empty());
    for tree in &mut fleet.trees[1..] {
        assert!(tree.take_evicted() && tree.is_empty());
        assert_eq!(tree.blocks(), [0; Tier::COUNT]);
    }
    fleet.check_accounts();
}

#[test]
fn a_chain_that_is_continued_keeps_its_beginning() {
    let mut fleet = Fleet::new(1, false);
    let long = prompt(7, 3_000, None);
    for step in 0..600usize {
        // A few blocks of the long chain, then prompts that never come again.
        let at = step * 5;
        let parent = match at.checked_sub(1) {
            None => Parent::Root(ChainRoot(1)),
            Some(last) => Parent::Block(long[last].name),
        };
        fleet.trees[0]
            .store(parent, &long[at..at + 5], Tier::Gpu, CopyReport::OneMore)
            .unwrap();
        fleet.store(0, 100 + step as u64, 400);
    }
    assert!(fleet.trees[0].take_evicted());
    assert_eq!(fleet.depths(7, 3_000), [(0, 3_000)]);
}

#[test]
fn names_sets_and_tables_shrink_when_workers_leave() {
    for has_private_names in [false, true] {
        let mut fleet = Fleet::new(4, has_private_names);
        for number in 0..80 {
            // The first prompt is everywhere.
            fleet.store(number as usize % 4, number, 300);
            fleet.store(number as usize % 4, 0, 300);
        }
        let (blocks, before) = (fleet.index.len(), fleet.check_accounts());
        fleet.trees.truncate(1);
        let (left, after) = (fleet.index.len(), fleet.check_accounts());
        assert!(left < blocks / 2);
        let given_back = before.saturating_sub(after) as u64;
        let gone = blocks - left;
        assert!(
            given_back > gone * 8,
            "{given_back} bytes for {gone} blocks"
        );
        assert_eq!(fleet.depths(4, 300), [(0, 300)]);
        fleet.trees[0].clear();
        let empty = fleet.check_accounts();
        assert!(empty < 64 << 10, "{empty}");
    }
}

#[test]
fn sets_that_never_come_again_do_not_cut_all_knowledge_away() {
    let mut fleet = Fleet::new(40, false);
    let mut seed = 1u64;
    // Every few blocks belong to another mix of workers.
    for number in 0..900 {
        for _ in 0..6 {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let blocks = SYSTEM_BLOCKS + 1 + (seed >> 40) % 200;
            fleet.store((seed >> 33) as usize % 40, number, blocks);
        }
        assert!(fleet.index.memory_bytes() <= BYTES_MAX + SLACK);
    }
    assert!(fleet.index.len() > 4_000, "{} blocks", fleet.index.len());
    for number in 890..900 {
        assert!(fleet.depths(number, 300).len() > 2);
    }
}
