//! The memory limit, and that memory is reused.

use super::*;

/// A chain that shares nothing with others.
fn chain(number: u64, blocks: u64) -> Vec<NewBlock> {
    let new = |at| NewBlock {
        name: EngineHash(number << 32 | at),
        local: LocalHash((number << 32 | at) + 1),
    };
    (0..blocks).map(new).collect()
}

fn depth_of(index: &PrefixIndex, number: u64) -> Vec<RankPrefix> {
    let locals: Vec<LocalHash> = chain(number, 2_000)
        .iter()
        .map(|block| block.local)
        .collect();
    let mut found = Vec::new();
    index.overlap(ChainRoot(1), &locals, &mut found);
    found
}

#[test]
fn at_the_limit_the_coldest_tree_loses_its_deepest_blocks() {
    let bytes_max = 4 << 20;
    let (_indexes, index) = index_of(bytes_max);
    let mut both = Modelled::new(index.clone(), 3);
    for round in 0..100 {
        for (at, (tree, _, _)) in both.trees.iter_mut().enumerate() {
            // The first tree stores nothing after a while, so it gets cold.
            if at > 0 || round < 10 {
                let number = (round * 10 + at) as u64;
                tree.store(
                    Parent::Root(ChainRoot(1)),
                    &chain(number, 1_000),
                    Tier::Gpu,
                    CopyReport::OneMore,
                )
                .unwrap();
            }
            assert!(index.memory_bytes() as u64 <= bytes_max + (1 << 20));
        }
    }
    assert!(both.trees[0].0.take_evicted() && !both.trees[0].0.take_evicted());
    assert_eq!(both.trees[0].0.len(), 0);
    // The chain that was stored last is complete.
    assert_eq!(depth_of(&index, 992)[0].blocks, 1_000);
    let owned: u64 = both.trees.iter().map(|(tree, _, _)| tree.len()).sum();
    assert_eq!(owned, index.len());
    assert!(owned > 40_000, "{owned} blocks in 4 MiB");
    // A chain loses its end first.
    for number in 0..1_000 {
        for depth in depth_of(&index, number) {
            let tree = &both.trees[number as usize % 10].0;
            let of_chain = tree
                .list()
                .into_iter()
                .filter(|block| block.name.0 >> 32 == number);
            assert_eq!(of_chain.count() as u32, depth.blocks);
        }
    }
}

#[test]
fn one_long_event_stays_within_the_limit() {
    let bytes_max = 4 << 20;
    let (_indexes, index) = index_of(bytes_max);
    let mut tree = index.add_tree(WorkerId(1), 0);
    tree.store(
        Parent::Root(ChainRoot(1)),
        &chain(1, 500_000),
        Tier::Gpu,
        CopyReport::OneMore,
    )
    .unwrap();
    assert!(tree.take_evicted());
    assert!(tree.len() > 40_000, "{} blocks in 4 MiB", tree.len());
    assert!(index.memory_bytes() as u64 <= bytes_max + (1 << 20));
}

#[test]
fn a_chain_that_is_continued_after_a_long_pause_keeps_its_end() {
    let long = chain(0, 164);
    // Stores part of the chain, then chains of one block until one needs an eviction. Returns how many.
    let fill = |max_others: u64| {
        let (indexes, index) = index_of(1 << 20);
        let mut tree = index.add_tree(WorkerId(1), 0);
        tree.set_visible(true);
        let mut store = |blocks: &[NewBlock]| {
            let parent = Parent::Root(ChainRoot(1));
            tree.store(parent, blocks, Tier::Gpu, CopyReport::OneMore)
                .unwrap();
            tree.take_evicted()
        };
        assert!(!store(&long[..100]));
        let mut others = 0;
        while others < max_others {
            others += 1;
            if store(&chain(others, 1)) {
                break;
            }
        }
        (indexes, index, tree, others)
    };
    let (_, _, _, others) = fill(u64::MAX);
    let (_indexes, index, mut tree, _) = fill(others - 1);
    assert_eq!(depth_of(&index, 0)[0].blocks, 100);
    let parent = Parent::Block(long[99].name);
    tree.store(parent, &long[100..], Tier::Gpu, CopyReport::OneMore)
        .unwrap();
    assert!(tree.take_evicted());
    assert_eq!(depth_of(&index, 0)[0].blocks, 164);
}

#[test]
fn what_is_removed_makes_room_for_what_comes() {
    let (_indexes, index) = index_of(64 << 20);
    let mut both = Modelled::new(index.clone(), 4);
    let mut bytes = Vec::new();
    for round in 0..6 {
        for (at, (tree, _, _)) in both.trees.iter_mut().enumerate() {
            for number in 0..20 {
                let blocks = chain(round * 1_000 + at as u64 * 100 + number, 500);
                tree.store(
                    Parent::Root(ChainRoot(1)),
                    &blocks,
                    Tier::Gpu,
                    CopyReport::OneMore,
                )
                .unwrap();
            }
        }
        assert_eq!(index.len(), 40_000);
        bytes.push(index.memory_bytes());
        for (at, (tree, _, _)) in both.trees.iter_mut().enumerate() {
            for number in 0..20 {
                let blocks = chain(round * 1_000 + at as u64 * 100 + number, 500);
                let names: Vec<EngineHash> = blocks.iter().rev().map(|block| block.name).collect();
                assert_eq!(tree.remove(&names, Tier::Gpu), 0);
            }
        }
        assert_eq!(index.len(), 0);
    }
    assert!(bytes[5] <= bytes[1] * 11 / 10, "{bytes:?}");
}

#[test]
fn a_forest_bounds_and_counts_all_of_its_indexes() {
    let registry = Registry::default();
    let indexes = PrefixIndexes::new(
        Settings {
            max_index_memory: 8 << 20,
        },
        &registry,
    );
    let tree_of = |model: &str| {
        let index = indexes.index(&model.into(), BLOCK_SIZE);
        index.add_tree(WorkerId(1), 0)
    };
    let (mut a, mut b) = (tree_of("a"), tree_of("b"));
    for number in 0..200 {
        for tree in [&mut a, &mut b] {
            tree.store(
                Parent::Root(ChainRoot(1)),
                &chain(number, 1_000),
                Tier::Gpu,
                CopyReport::OneMore,
            )
            .unwrap();
        }
    }
    assert!(a.take_evicted() && b.take_evicted());
    assert!(a.len() > 20_000 && b.len() > 20_000);
    let text = registry.text();
    let value = |name: &str| -> u64 {
        let line = text.lines().find(|line| line.starts_with(name)).unwrap();
        line.rsplit(' ').next().unwrap().parse().unwrap()
    };
    assert_eq!(value("warmroute_kv_index_blocks "), a.len() + b.len());
    assert!(value("warmroute_kv_index_bytes ") <= 8 << 20);
    assert_eq!(
        value("warmroute_kv_index_dropped_blocks_total "),
        400_000 - a.len() - b.len()
    );
    drop((a, b));
    assert!(indexes.of("a").is_empty());
    assert!(registry.text().contains("warmroute_kv_index_blocks 0\n"));
    assert!(registry.text().contains("warmroute_kv_index_bytes 0\n"));
}

#[test]
fn an_index_that_comes_later_gets_memory_too() {
    let indexes = PrefixIndexes::new(
        Settings {
            max_index_memory: 16 << 20,
        },
        &Registry::default(),
    );
    let tree_of = |model: &str| {
        let index = indexes.index(&model.into(), BLOCK_SIZE);
        index.add_tree(WorkerId(1), 0)
    };
    let (mut first, mut later) = (tree_of("a"), tree_of("b"));
    for tree in [&mut first, &mut later] {
        for number in 0..600 {
            let blocks = chain(number, 1_000);
            tree.store(
                Parent::Root(ChainRoot(1)),
                &blocks,
                Tier::Gpu,
                CopyReport::OneMore,
            )
            .unwrap();
        }
        assert!(tree.take_evicted());
        assert!(tree.len() > 10_000, "{}", tree.len());
    }
}

#[test]
fn an_index_is_there_while_it_has_trees() {
    let (indexes, index) = index_of(1 << 20);
    assert!(indexes.of("m").is_empty());
    let tree = index.add_tree(WorkerId(1), 0);
    let other = indexes.index(&"m".into(), NonZeroU32::new(32).unwrap());
    let second = other.add_tree(WorkerId(1), 0);
    let sizes = |indexes: &PrefixIndexes| {
        let of = indexes.of("m");
        of.iter()
            .map(|(shape, _)| shape.size.get())
            .collect::<Vec<_>>()
    };
    assert_eq!(sizes(&indexes), [16, 32]);
    drop(tree);
    assert_eq!(sizes(&indexes), [32]);
    // The same index for everyone who still has it.
    let again = indexes.index(&"m".into(), BLOCK_SIZE);
    assert!(Arc::ptr_eq(&again, &index));
    let _tree = again.add_tree(WorkerId(2), 0);
    drop(second);
    assert_eq!(sizes(&indexes), [16]);
}

#[test]
fn an_index_that_loses_its_last_block_gives_all_its_memory_back() {
    let (_indexes, index) = index_of(64 << 20);
    let mut tree = index.add_tree(WorkerId(1), 0);
    let empty = index.memory_bytes();
    for number in 0..2 {
        let blocks = chain(number, 20_000);
        let parent = Parent::Root(ChainRoot(1));
        tree.store(parent, &blocks, Tier::Gpu, CopyReport::OneMore)
            .unwrap();
        assert!(index.memory_bytes() > empty + 20_000 * 16);
        let names: Vec<EngineHash> = blocks.iter().map(|block| block.name).collect();
        assert_eq!(tree.remove(&names, Tier::Gpu), 0);
        assert_eq!(index.memory_bytes(), empty);
    }
}

#[test]
fn trees_that_come_and_go_leave_nothing() {
    let (_indexes, index) = index_of(64 << 20);
    let mut after_some = 0;
    for round in 0..2_000 {
        let mut tree = index.add_tree(WorkerId(round), 0);
        let number = u64::from(round % 7);
        tree.store(
            Parent::Root(ChainRoot(1)),
            &chain(number, 40),
            Tier::Gpu,
            CopyReport::OneMore,
        )
        .unwrap();
        drop(tree);
        if round == 100 {
            after_some = index.memory_bytes();
        }
    }
    assert_eq!(index.memory_bytes(), after_some);
}
