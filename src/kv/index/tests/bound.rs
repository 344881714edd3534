//! The memory bound, and that memory is used again.

use super::*;

/// A chain that nobody else has.
fn chain(number: u64, blocks: u64) -> Vec<NewBlock> {
    let new = |at| NewBlock {
        name: Name(number << 32 | at),
        local: Local((number << 32 | at) + 1),
    };
    (0..blocks).map(new).collect()
}

fn depth_of(index: &Index, number: u64) -> Vec<Depth> {
    let locals: Vec<Local> = chain(number, 2_000)
        .iter()
        .map(|block| block.local)
        .collect();
    let mut found = Vec::new();
    index.overlap(Root(1), &locals, &mut found);
    found
}

#[test]
fn at_its_bound_the_coldest_tree_loses_its_deepest_blocks() {
    let bytes_max = 4 << 20;
    let (_forest, index) = index_of(bytes_max);
    let mut both = Both::new(index.clone(), 3);
    for round in 0..100 {
        for (at, (tree, _, _)) in both.trees.iter_mut().enumerate() {
            // The first stores no more after a while: it gets cold.
            if at > 0 || round < 10 {
                let number = (round * 10 + at) as u64;
                tree.store(
                    After::Root(Root(1)),
                    &chain(number, 1_000),
                    Tier::Gpu,
                    Copies::Counted,
                )
                .unwrap();
            }
            assert!(index.memory_bytes() as u64 <= bytes_max + (1 << 20));
        }
    }
    assert!(both.trees[0].0.was_cut() && !both.trees[0].0.was_cut());
    assert_eq!(both.trees[0].0.len(), 0);
    // What was stored last is there, whole.
    assert_eq!(depth_of(&index, 992)[0].blocks, 1_000);
    let held: u64 = both.trees.iter().map(|(tree, _, _)| tree.len()).sum();
    assert_eq!(held, index.len());
    assert!(held > 40_000, "{held} blocks in 4 MiB");
    // A partly cut chain is cut at its end.
    for number in 0..1_000 {
        for depth in depth_of(&index, number) {
            let tree = &both.trees[number as usize % 10].0;
            let of_chain = tree.list().filter(|block| block.name.0 >> 32 == number);
            assert_eq!(of_chain.count() as u32, depth.blocks);
        }
    }
}

#[test]
fn what_is_removed_makes_room_for_what_comes() {
    let (_forest, index) = index_of(64 << 20);
    let mut both = Both::new(index.clone(), 4);
    let mut bytes = Vec::new();
    for round in 0..6 {
        for (at, (tree, _, _)) in both.trees.iter_mut().enumerate() {
            for number in 0..20 {
                let blocks = chain(round * 1_000 + at as u64 * 100 + number, 500);
                tree.store(After::Root(Root(1)), &blocks, Tier::Gpu, Copies::Counted)
                    .unwrap();
            }
        }
        assert_eq!(index.len(), 40_000);
        bytes.push(index.memory_bytes());
        for (at, (tree, _, _)) in both.trees.iter_mut().enumerate() {
            for number in 0..20 {
                let blocks = chain(round * 1_000 + at as u64 * 100 + number, 500);
                let names: Vec<Name> = blocks.iter().rev().map(|block| block.name).collect();
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
    let forest = Forest::new(
        Settings {
            memory_bytes_max: 8 << 20,
        },
        &registry,
    );
    let tree_of = |model: &str| {
        let index = forest.index(&model.into(), BLOCK_SIZE);
        index.plant(WorkerId(1), 0)
    };
    let (mut a, mut b) = (tree_of("a"), tree_of("b"));
    for number in 0..200 {
        for tree in [&mut a, &mut b] {
            tree.store(
                After::Root(Root(1)),
                &chain(number, 1_000),
                Tier::Gpu,
                Copies::Counted,
            )
            .unwrap();
        }
    }
    assert!(a.was_cut() && b.was_cut());
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
    assert!(forest.of("a").is_empty());
    assert!(registry.text().contains("warmroute_kv_index_blocks 0\n"));
    assert!(registry.text().contains("warmroute_kv_index_bytes 0\n"));
}

#[test]
fn an_index_that_comes_later_gets_memory_too() {
    let forest = Forest::new(
        Settings {
            memory_bytes_max: 16 << 20,
        },
        &Registry::default(),
    );
    let tree_of = |model: &str| {
        let index = forest.index(&model.into(), BLOCK_SIZE);
        index.plant(WorkerId(1), 0)
    };
    let (mut first, mut later) = (tree_of("a"), tree_of("b"));
    for tree in [&mut first, &mut later] {
        for number in 0..400 {
            let blocks = chain(number, 1_000);
            tree.store(After::Root(Root(1)), &blocks, Tier::Gpu, Copies::Counted)
                .unwrap();
        }
        assert!(tree.was_cut());
        assert!(tree.len() > 10_000, "{}", tree.len());
    }
}

#[test]
fn an_index_is_there_while_it_has_trees() {
    let (forest, index) = index_of(1 << 20);
    assert!(forest.of("m").is_empty());
    let tree = index.plant(WorkerId(1), 0);
    let other = forest.index(&"m".into(), NonZeroU32::new(32).unwrap());
    let second = other.plant(WorkerId(1), 0);
    let sizes = |forest: &Forest| {
        let of = forest.of("m");
        of.iter().map(|(size, _)| size.get()).collect::<Vec<_>>()
    };
    assert_eq!(sizes(&forest), [16, 32]);
    drop(tree);
    assert_eq!(sizes(&forest), [32]);
    // Still the same for whoever has it.
    let again = forest.index(&"m".into(), BLOCK_SIZE);
    assert!(Arc::ptr_eq(&again, &index));
    let _tree = again.plant(WorkerId(2), 0);
    drop(second);
    assert_eq!(sizes(&forest), [16]);
}

#[test]
fn trees_that_come_and_go_leave_nothing() {
    let (_forest, index) = index_of(64 << 20);
    let mut after_some = 0;
    for round in 0..2_000 {
        let mut tree = index.plant(WorkerId(round), 0);
        let number = u64::from(round % 7);
        tree.store(
            After::Root(Root(1)),
            &chain(number, 40),
            Tier::Gpu,
            Copies::Counted,
        )
        .unwrap();
        drop(tree);
        if round == 100 {
            after_some = index.memory_bytes();
        }
    }
    assert_eq!(index.memory_bytes(), after_some);
}
