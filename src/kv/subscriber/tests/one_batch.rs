//! Everything in one batch: blocks that are removed and stored again before the batch ends.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

const A_PROMPT: u32 = 6;

struct Rank {
    tree: RankTree,
}

impl Rank {
    fn new() -> Self {
        let indexes = PrefixIndexes::new(indexes::Settings::default(), &Registry::default());
        Self {
            tree: RankTree::new(indexes, &subject_of_pages()),
        }
    }

    fn apply(&mut self, events: Vec<Event>) -> BatchEffect {
        let mut effect = BatchEffect::default();
        let batch = Batch {
            events,
            ..Batch::default()
        };
        self.tree.apply(&batch, &mut effect);
        effect
    }

    /// In which tiers the tree has each block.
    fn held(&self) -> BTreeMap<u64, [bool; Tier::COUNT]> {
        let blocks = self.tree.tree().map(|(_, tree)| tree.list());
        let blocks = blocks.into_iter().flatten();
        blocks
            .map(|block| (block.name.0, block.copies.map(|copies| copies > 0)))
            .collect()
    }
}

/// Blocks of a prompt of six, of sixteen tokens: small pages would be folded.
fn store(medium: Medium, from: u32, to: u32) -> Event {
    let name = |block: u32| EngineHash(u64::from(block) + 100);
    Event::Stored(Stored {
        hashes: (from..to).map(name).collect(),
        parent: from.checked_sub(1).map(name),
        token_ids: (from * 16..to * 16).collect(),
        block_size: 16,
        location: Location {
            medium,
            ..Location::default()
        },
        ..Stored::default()
    })
}

fn remove(medium: Medium, names: impl IntoIterator<Item = u64>) -> Event {
    Event::Removed(Removed {
        hashes: names.into_iter().map(EngineHash).collect(),
        location: Location {
            medium,
            ..Location::default()
        },
    })
}

#[test]
fn a_page_removed_and_stored_again_in_one_batch_stays() {
    let mut rank = Rank::new();
    let gpu = || Medium::Gpu;
    rank.apply(vec![store(gpu(), 0, 4)]);
    let last_again = vec![remove(gpu(), [103]), store(gpu(), 3, 4)];
    let effect = rank.apply(last_again);
    assert_eq!(effect.unknown_removals, 0);
    assert_eq!(rank.held().len(), 4);
    let all_again = vec![remove(gpu(), (100..104).rev()), store(gpu(), 0, 4)];
    rank.apply(all_again);
    assert_eq!(rank.held().len(), 4);
    let effect = rank.apply(vec![store(gpu(), 4, 5)]);
    assert_eq!(effect.impact, TreeImpact::None);
    assert_eq!(rank.held().len(), 5);
    // It has one copy, as before.
    rank.apply(vec![remove(gpu(), (100..105).rev())]);
    assert_eq!(rank.held().len(), 0);
}

#[test]
fn pages_that_a_batch_evicts_and_loads_back_stay_in_the_gpu_beside_their_host_copies() {
    let mut rank = Rank::new();
    rank.apply(vec![store(Medium::Gpu, 0, 4)]);
    rank.apply(vec![store(Medium::Cpu, 0, 4)]);
    let back = vec![remove(Medium::Gpu, 100..104), store(Medium::Gpu, 0, 4)];
    rank.apply(back);
    assert!(
        rank.held()
            .values()
            .all(|tiers| *tiers == [true, true, false])
    );
    rank.apply(vec![remove(Medium::Cpu, 100..104)]);
    assert_eq!(rank.held().len(), 4);
    assert!(
        rank.held()
            .values()
            .all(|tiers| *tiers == [true, false, false])
    );
    // Removed, stored and removed again.
    let gone = vec![
        remove(Medium::Gpu, 100..104),
        store(Medium::Gpu, 0, 4),
        remove(Medium::Gpu, 100..104),
    ];
    rank.apply(gone);
    assert_eq!(rank.held().len(), 0);
}

#[derive(Clone, Debug)]
enum Op {
    /// Stores all blocks that the tier lacks, up to this one.
    Store(u32),
    /// Removes all blocks from this one on.
    Remove(u32),
}

fn op() -> impl Strategy<Value = (Op, bool)> {
    let op = prop_oneof![
        (1..=A_PROMPT).prop_map(Op::Store),
        (0..A_PROMPT).prop_map(Op::Remove),
    ];
    (op, any::<bool>())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// A radix tree of one prompt, whose whole history comes in batches of any size.
    #[test]
    fn what_a_batch_does_is_what_its_events_do_one_after_the_other(
        batches in proptest::collection::vec(proptest::collection::vec(op(), 1..9), 1..12),
    ) {
        let mut rank = Rank::new();
        let mut cached = [0u32; 2];
        for ops in batches {
            let mut events = Vec::new();
            for (op, is_gpu) in ops {
                let (at, medium) = if is_gpu { (0, Medium::Gpu) } else { (1, Medium::Cpu) };
                match op {
                    Op::Store(to) if to > cached[at] => {
                        events.push(store(medium, cached[at], to));
                        cached[at] = to;
                    }
                    Op::Remove(from) if from < cached[at] => {
                        let names = u64::from(100 + from)..u64::from(100 + cached[at]);
                        events.push(remove(medium, names.rev()));
                        cached[at] = from;
                    }
                    Op::Store(_) | Op::Remove(_) => {}
                }
            }
            let effect = rank.apply(events);
            prop_assert_eq!(effect.unknown_removals, 0);
            let held = rank.held();
            for block in 0..A_PROMPT {
                let tiers = held.get(&u64::from(100 + block)).copied().unwrap_or_default();
                prop_assert_eq!(tiers, [block < cached[0], block < cached[1], false], "block {}", block);
            }
        }
    }
}
