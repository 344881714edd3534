//! A copy of a tree is the tree, but for blocks without the block before them.

use std::collections::HashSet;

use super::*;

fn copy_of(tree: &Tree, slice: usize) -> CopiedBlocks {
    let mut copied = CopiedBlocks::default();
    let mut cursor = tree.begin_copy();
    while tree.copy_next(&mut cursor, slice, &mut copied) {}
    copied
}

fn graft(tree: &mut Tree, copied: &CopiedBlocks, slice: usize) -> u64 {
    let mut cursor = GraftCursor::default();
    while tree.graft_next(&mut cursor, slice, copied) {}
    cursor.missing
}

/// The blocks that can be reached from their chain's start.
fn reachable(tree: &Tree) -> Vec<TreeBlock> {
    let mut names = HashSet::new();
    let mut listed = tree.list();
    listed.retain(|block| {
        let is_reachable = match block.parent {
            Some(parent) => names.contains(&parent),
            None => block.depth == 0,
        };
        is_reachable && names.insert(block.name)
    });
    listed
}

#[test]
fn a_copy_keeps_names_tiers_and_copies_and_says_what_it_leaves_out() {
    let (_indexes, index) = index_of(64 << 20);
    let mut tree = index.add_tree(WorkerId(1), 0);
    let blocks = |from: u64, len: u64| -> Vec<NewBlock> {
        let block = |at| NewBlock {
            name: EngineHash(1_000 + at),
            local: LocalHash(7 * at),
        };
        (from..from + len).map(block).collect()
    };
    let root = Parent::Root(ChainRoot(5));
    tree.store(root, &blocks(0, 40), Tier::Gpu, CopyReport::OneMore)
        .unwrap();
    tree.store(root, &blocks(0, 3), Tier::Gpu, CopyReport::OneMore)
        .unwrap();
    tree.store(root, &blocks(0, 20), Tier::Cpu, CopyReport::AtLeastOne)
        .unwrap();
    let fork = Parent::Block(EngineHash(1_020));
    tree.store(fork, &blocks(100, 30), Tier::Disk, CopyReport::OneMore)
        .unwrap();
    // What comes after it on its chain cannot be copied.
    assert_eq!(tree.remove(&[EngineHash(1_030)], Tier::Gpu), 0);
    let copied = copy_of(&tree, 5);
    assert_eq!((copied.len(), copied.orphans), (60, 9));
    let mut copy = index.add_tree(WorkerId(2), 0);
    assert_eq!(graft(&mut copy, &copied, 7), 0);
    assert_eq!(copy.list(), reachable(&tree));
    assert_eq!(copy.len(), 60);
    assert_eq!(copy.blocks(), [30, 20, 30]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn a_copy_is_what_can_be_reached_of_the_tree(steps in proptest::collection::vec(step(3), 1..60), slice in 1usize..40) {
        let (_indexes, index) = index_of(64 << 20);
        let mut both = Modelled::new(index.clone(), 3);
        for step in &steps {
            both.take(step);
        }
        // Beside the trees, and in an index of its own.
        let (_others, other) = index_of(64 << 20);
        for index in [&index, &other] {
            for (tree, _, _) in &both.trees {
                let copied = copy_of(tree, slice);
                let mut copy = index.add_tree(WorkerId(99), 0);
                prop_assert_eq!(graft(&mut copy, &copied, slice), 0);
                let expected = reachable(tree);
                prop_assert_eq!(copied.orphans, tree.len() - expected.len() as u64);
                prop_assert_eq!(copy.list(), expected);
            }
        }
    }
}
