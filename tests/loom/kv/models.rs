//! One writer changes the index while one lookup reads it. Whatever the order: the lookup reports of a tree at most
//! what the tree had at some moment, and never another tree's blocks. It finds all of what a tree had all the time.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use super::budget::MemoryBudget;
use super::owner_sets::Slot;
use super::shared::Shared;
use super::types::{CopyReport, NewBlock, Parent, RankPrefix};
use super::writer::Writer;
use crate::ids::WorkerId;
use crate::kv::block::{ChainRoot, LocalHash};
use crate::kv::event::{EngineHash, Tier};

/// As many preemptions in each interleaving.
const PREEMPTIONS: usize = 2;

const ROOT: ChainRoot = ChainRoot(1);
const A: Slot = 0;
const B: Slot = 1;
const C: Slot = 2;
const D: Slot = 3;

type Model = fn() -> u64;

pub const ALL: [(&str, Model); 6] = [
    ("a page that passes to another chain", page_reused),
    ("a set that passes to other blocks", set_reused),
    ("a slot that passes to another worker", slot_reused),
    ("a page that gets longer", page_extended),
    ("a page that gets shorter", page_shortened),
    ("a tree that stays while another comes and goes", owner_that_stays),
];

struct Index {
    shared: Arc<Shared>,
    writer: Writer,
}

/// Blocks of a prompt. Prompts have no block in common.
fn prompt(number: u64, blocks: u64) -> Vec<NewBlock> {
    let block = |at| NewBlock {
        name: EngineHash(number << 8 | at),
        local: LocalHash(number << 8 | at),
    };
    (0..blocks).map(block).collect()
}

impl Index {
    fn with_trees(trees: u32) -> Self {
        let shared = Arc::new(Shared::new(Arc::new(MemoryBudget)));
        let mut writer = Writer::new(&shared);
        for worker in 0..trees {
            let slot = writer.add_tree(&shared, WorkerId(worker), 0).unwrap();
            shared.slots.set_visible(slot, true);
        }
        Self { shared, writer }
    }

    fn store(&mut self, slot: Slot, blocks: &[NewBlock]) {
        let parent = Parent::Root(ROOT);
        let (tier, report) = (Tier::Gpu, CopyReport::AtLeastOne);
        let stored = self.writer.store(&self.shared, slot, parent, blocks, tier, report);
        stored.unwrap();
    }

    fn remove(&mut self, slot: Slot, blocks: &[NewBlock]) {
        let names: Vec<_> = blocks.iter().rev().map(|block| block.name).collect();
        assert_eq!(self.writer.remove(&self.shared, slot, &names, Tier::Gpu), 0);
    }
}

/// Runs `write` beside a lookup of `wanted`, and `check` with the length that the lookup found for each worker.
fn run(
    before: fn() -> Index,
    write: fn(&mut Index),
    wanted: (u64, u64),
    check: fn(&dyn Fn(u32) -> u32),
) -> u64 {
    let mut builder = loom::model::Builder::new();
    // LOOM_MAX_PREEMPTIONS sets another bound.
    builder.preemption_bound.get_or_insert(PREEMPTIONS);
    builder.max_branches = 100_000;
    let runs = Arc::new(AtomicU64::new(0));
    let count = runs.clone();
    let longest = Arc::new(AtomicU64::new(0));
    let found_most = longest.clone();
    builder.check(move || {
        count.fetch_add(1, Relaxed);
        let mut index = before();
        let shared = index.shared.clone();
        // Something shared from the first step on, so that the writer may also be done before the lookup begins.
        let gate = Arc::new(loom::sync::atomic::AtomicUsize::new(0));
        let begins = gate.clone();
        let writer = loom::thread::spawn(move || {
            begins.store(1, SeqCst);
            write(&mut index);
            index
        });
        let locals: Vec<_> = prompt(wanted.0, wanted.1)
            .iter()
            .map(|block| block.local)
            .collect();
        gate.load(SeqCst);
        let mut found: Vec<RankPrefix> = Vec::new();
        shared.overlap(ROOT, &locals, &mut found);
        let most = found.iter().map(|prefix| prefix.blocks).max();
        found_most.fetch_max(most.unwrap_or(0).into(), Relaxed);
        check(&|worker| {
            let of_worker = found.iter().filter(|prefix| prefix.worker.0 == worker);
            let blocks: Vec<u32> = of_worker.map(|prefix| prefix.blocks).collect();
            assert!(blocks.len() <= 1, "reported twice: {found:?}");
            blocks.first().copied().unwrap_or(0)
        });
        let index = writer.join().unwrap();
        drop(index);
    });
    assert!(longest.load(Relaxed) > 0, "no lookup of {wanted:?} found anything");
    runs.load(Relaxed)
}

fn page_reused() -> u64 {
    let before = || {
        let mut index = Index::with_trees(2);
        index.store(A, &prompt(1, 2));
        index
    };
    let write = |index: &mut Index| {
        index.remove(A, &prompt(1, 2));
        index.store(B, &prompt(2, 2));
    };
    let of_old = run(before, write, (1, 2), |blocks| {
        assert!(blocks(0) <= 2);
        assert_eq!(blocks(1), 0);
    });
    of_old
        + run(before, write, (2, 2), |blocks| {
            assert_eq!(blocks(0), 0);
            assert!(blocks(1) <= 2);
        })
}

fn set_reused() -> u64 {
    let before = || {
        let mut index = Index::with_trees(4);
        index.store(A, &prompt(1, 1));
        index.store(B, &prompt(1, 1));
        index.store(C, &prompt(2, 1));
        index
    };
    let write = |index: &mut Index| {
        index.remove(B, &prompt(1, 1));
        index.store(D, &prompt(2, 1));
    };
    run(before, write, (1, 1), |blocks| {
        assert_eq!(blocks(0), 1);
        assert!(blocks(1) <= 1);
        assert_eq!((blocks(2), blocks(3)), (0, 0));
    })
}

fn slot_reused() -> u64 {
    let before = || {
        let mut index = Index::with_trees(2);
        index.store(A, &prompt(1, 1));
        index.store(B, &prompt(1, 1));
        index
    };
    let write = |index: &mut Index| {
        index.writer.remove_tree(&index.shared, A);
        let slot = index.writer.add_tree(&index.shared, WorkerId(9), 0);
        assert_eq!(slot, Some(A));
        index.shared.slots.set_visible(A, true);
    };
    run(before, write, (1, 1), |blocks| {
        assert_eq!(blocks(9), 0);
        assert!(blocks(0) <= 1);
        assert_eq!(blocks(1), 1);
    })
}

fn page_extended() -> u64 {
    let before = || {
        let mut index = Index::with_trees(2);
        index.store(A, &prompt(1, 1));
        index
    };
    let write = |index: &mut Index| index.store(A, &prompt(1, 3));
    run(before, write, (1, 3), |blocks| {
        assert!((1..=3).contains(&blocks(0)));
        assert_eq!(blocks(1), 0);
    })
}

fn page_shortened() -> u64 {
    let before = || {
        let mut index = Index::with_trees(2);
        index.store(A, &prompt(1, 3));
        index
    };
    let write = |index: &mut Index| {
        index.remove(A, &prompt(1, 3)[1..]);
        index.store(B, &prompt(1, 2));
    };
    run(before, write, (1, 3), |blocks| {
        assert!((1..=3).contains(&blocks(0)));
        assert!(blocks(1) <= 2);
    })
}

fn owner_that_stays() -> u64 {
    let before = || {
        let mut index = Index::with_trees(2);
        index.store(A, &prompt(1, 2));
        index
    };
    let write = |index: &mut Index| {
        index.store(B, &prompt(1, 2));
        index.remove(B, &prompt(1, 2));
    };
    run(before, write, (1, 2), |blocks| {
        assert_eq!(blocks(0), 2);
        assert!(blocks(1) <= 2);
    })
}
