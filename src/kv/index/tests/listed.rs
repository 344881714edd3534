//! A listing of a large tree, and what goes on meanwhile.

use super::*;

const BLOCKS: u64 = 20_000;

fn chain(number: u64, blocks: u64) -> Vec<NewBlock> {
    let block = |at| NewBlock {
        name: EngineHash(number << 32 | at),
        local: LocalHash(number << 32 | at),
    };
    (0..blocks).map(block).collect()
}

fn store(tree: &mut Tree, blocks: &[NewBlock]) {
    tree.store(
        Parent::Root(ChainRoot(1)),
        blocks,
        Tier::Gpu,
        CopyReport::OneMore,
    )
    .unwrap();
}

#[test]
fn events_and_lookups_go_on_while_a_large_rank_is_listed() {
    let (_indexes, index) = index_of(64 << 20);
    let mut listed = index.add_tree(WorkerId(1), 3);
    let mut other = index.add_tree(WorkerId(2), 0);
    other.set_visible(true);
    store(&mut listed, &chain(1, BLOCKS));
    let mut stored = 0;
    let blocks = index.list_in_slices(WorkerId(1), 3, || {
        // Would wait for ever if the listing held the lock.
        store(&mut other, &chain(2 + stored, 20));
        let locals: Vec<_> = chain(2 + stored, 20)
            .iter()
            .map(|block| block.local)
            .collect();
        let mut found = Vec::new();
        index.overlap(ChainRoot(1), &locals, &mut found);
        assert_eq!(found[0].blocks, 20);
        stored += 1;
    });
    assert!(
        stored >= 4,
        "{stored} turns in a listing of {BLOCKS} blocks"
    );
    assert_eq!(blocks, listed.list());
    assert_eq!(blocks.len() as u64, BLOCKS);
    assert!(
        blocks
            .windows(2)
            .all(|pair| pair[1].parent == Some(pair[0].name))
    );
}

#[test]
fn a_rank_that_leaves_while_it_is_listed_ends_the_listing() {
    let (_indexes, index) = index_of(64 << 20);
    let mut tree = index.add_tree(WorkerId(1), 0);
    store(&mut tree, &chain(1, BLOCKS));
    let mut tree = Some(tree);
    let mut next = None;
    let blocks = index.list_in_slices(WorkerId(1), 0, || {
        if tree.take().is_some() {
            // Another rank gets the slot.
            let mut other = index.add_tree(WorkerId(2), 0);
            store(&mut other, &chain(2, BLOCKS));
            next = Some(other);
        }
    });
    assert!((1..BLOCKS as usize).contains(&blocks.len()));
    assert!(blocks.iter().all(|block| block.name.0 >> 32 == 1));
}
