//! Engines with several caches of full attention, whose blocks have the same names, and ranks that batches name.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;
use crate::kv::index::{CopiedBlocks, GraftCursor};

struct Rank {
    tree: RankTree,
}

impl Rank {
    fn new() -> Self {
        Self::of(&subject())
    }

    fn of(subject: &Subject) -> Self {
        let indexes = PrefixIndexes::new(indexes::Settings::default(), &Registry::default());
        Self {
            tree: RankTree::new(indexes, subject),
        }
    }

    fn apply_from(&mut self, rank: Option<u32>, events: Vec<Event>) -> BatchEffect {
        let mut effect = BatchEffect::default();
        let batch = Batch {
            rank,
            events,
            ..Batch::default()
        };
        self.tree.apply(&batch, &mut effect);
        effect
    }

    fn apply(&mut self, events: Vec<Event>) -> BatchEffect {
        self.apply_from(None, events)
    }

    fn names(&self) -> BTreeSet<u64> {
        let blocks = self.tree.tree().map(|(_, tree)| tree.list());
        blocks
            .into_iter()
            .flatten()
            .map(|block| block.name.0)
            .collect()
    }

    /// What another replica has that takes this tree over.
    fn copied(&self) -> Option<Self> {
        let (shape, own) = self.tree.tree()?;
        let mut blocks = CopiedBlocks::default();
        let mut cursor = own.begin_copy();
        while own.copy_next(&mut cursor, 3, &mut blocks) {}
        let mut other = Self::new();
        let tree = &mut other.tree;
        tree.begin_graft(*shape, &self.tree.filter.learned(), false);
        let mut cursor = GraftCursor::default();
        while tree.tree_mut()?.graft_next(&mut cursor, 3, &blocks) {}
        Some(other)
    }
}

fn store(group: u32, from: u32, to: u32) -> Event {
    let Event::Stored(mut event) = stored(from, to) else {
        unreachable!()
    };
    event.location.group = Some(group);
    event.spec_kind =
        Some(["full_attention", "mla_attention", "full_attention"][group as usize].into());
    Event::Stored(event)
}

fn remove(group: u32, name: u64) -> Event {
    Event::Removed(Removed {
        hashes: vec![EngineHash(name)],
        location: Location {
            group: Some(group),
            ..Location::default()
        },
    })
}

#[test]
fn a_block_counts_only_while_both_groups_have_it() {
    let mut rank = Rank::new();
    rank.apply(vec![store(0, 0, 3), store(1, 0, 3)]);
    assert_eq!(rank.names(), BTreeSet::from([100, 101, 102]));
    rank.apply(vec![remove(0, 102)]);
    assert_eq!(rank.names(), BTreeSet::from([100, 101]));
    // The second one has it still, so it needs only the first one's.
    rank.apply(vec![store(0, 2, 3)]);
    assert_eq!(rank.names(), BTreeSet::from([100, 101, 102]));
    let effect = rank.apply(vec![remove(1, 102), remove(0, 102)]);
    assert_eq!(effect.unknown_removals, 0);
    rank.apply(vec![store(0, 2, 4)]);
    assert_eq!(rank.names(), BTreeSet::from([100, 101]));
    rank.apply(vec![store(1, 2, 4)]);
    assert_eq!(rank.names().len(), 4);
    rank.apply(vec![Event::Cleared { ownership: None }, store(1, 0, 2)]);
    assert_eq!(rank.names(), BTreeSet::new());
}

#[test]
fn a_group_that_is_first_seen_later_takes_what_it_does_not_have() {
    let mut rank = Rank::new();
    rank.apply(vec![store(0, 0, 4)]);
    assert_eq!(rank.names().len(), 4);
    rank.apply(vec![store(1, 0, 2)]);
    assert_eq!(rank.names(), BTreeSet::from([100, 101]));
}

#[test]
fn a_lower_tier_that_names_no_group_has_the_blocks_of_all() {
    let mut rank = Rank::new();
    rank.apply(vec![store(0, 0, 2), store(1, 0, 2)]);
    let Event::Stored(mut event) = stored(0, 2) else {
        unreachable!()
    };
    event.location.medium = Medium::Cpu;
    rank.apply(vec![Event::Stored(event)]);
    rank.apply(vec![
        remove(0, 101),
        remove(1, 101),
        remove(1, 100),
        remove(0, 100),
    ]);
    assert_eq!(rank.names().len(), 2);
    let removed = Removed {
        hashes: vec![EngineHash(101), EngineHash(100)],
        location: Location {
            medium: Medium::Cpu,
            ..Location::default()
        },
    };
    let effect = rank.apply(vec![Event::Removed(removed)]);
    assert_eq!((effect.unknown_removals, rank.names().len()), (0, 0));
}

#[test]
fn a_batch_that_names_another_rank_is_ignored_and_counted() {
    let mut rank = Rank::new();
    let effect = rank.apply_from(
        Some(1),
        vec![stored(0, 2), Event::Cleared { ownership: None }],
    );
    assert_eq!(effect.ignored, [IgnoredReason::OtherRank; 2]);
    assert_eq!((effect.impact, effect.cleared), (TreeImpact::None, false));
    assert_eq!(rank.names().len(), 0);
    rank.apply_from(Some(0), vec![stored(0, 2)]);
    rank.apply_from(Some(3), vec![remove(0, 100)]);
    assert_eq!(rank.names().len(), 2);
}

#[test]
fn an_only_rank_may_have_any_number_but_always_the_same() {
    let mut rank = Rank::of(&Subject {
        is_only_rank: true,
        ..subject()
    });
    rank.apply_from(Some(3), vec![stored(0, 2)]);
    assert_eq!(rank.names().len(), 2);
    let effect = rank.apply_from(Some(0), vec![stored(2, 3)]);
    assert_eq!(effect.ignored, [IgnoredReason::OtherRank]);
    // Another process is another member of the group.
    rank.tree.clear();
    rank.apply_from(Some(2), vec![stored(0, 1)]);
    assert_eq!(rank.names().len(), 1);
}

#[derive(Clone, Debug)]
enum Op {
    /// A request computes the blocks that not all groups have, up to this one, in all groups.
    Compute(u32),
    /// One group evicts its last block.
    Evict(u32),
    Clear,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => (1u32..6).prop_map(Op::Compute),
        6 => (0u32..3).prop_map(Op::Evict),
        1 => Just(Op::Clear),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn the_tree_has_what_all_groups_have(
        groups in 2u32..4,
        ops in proptest::collection::vec((op(), any::<bool>(), 0u8..8), 1..60),
    ) {
        let mut rank = Rank::new();
        // It does not know what a group has beyond the tree, so it may have less, and never more.
        let mut other: Option<Rank> = None;
        let mut copies: BTreeMap<(u32, u64), u32> = BTreeMap::new();
        let mut events = Vec::new();
        for (op, ends_batch, is_copied) in ops {
            let has_all = |copies: &BTreeMap<(u32, u64), u32>, name: u64| {
                (0..groups).all(|group| copies.contains_key(&(group, name)))
            };
            match op {
                Op::Compute(to) => {
                    let from = (0..to).take_while(|at| has_all(&copies, u64::from(100 + at))).count() as u32;
                    for group in 0..groups {
                        if from < to {
                            events.push(store(group, from, to));
                        }
                        for at in from..to {
                            *copies.entry((group, u64::from(100 + at))).or_default() += 1;
                        }
                    }
                }
                Op::Evict(group) => {
                    let group = group % groups;
                    let last = copies.keys().filter(|(of, _)| *of == group).map(|(_, name)| *name).max();
                    if let Some(name) = last {
                        events.push(remove(group, name));
                        let count = copies.get_mut(&(group, name)).unwrap();
                        *count -= 1;
                        if *count == 0 {
                            copies.remove(&(group, name));
                        }
                    }
                }
                Op::Clear => {
                    events.push(Event::Cleared { ownership: None });
                    copies.clear();
                }
            }
            if ends_batch {
                if let Some(other) = &mut other {
                    other.apply(events.clone());
                }
                let effect = rank.apply(std::mem::take(&mut events));
                prop_assert_eq!(effect.unknown_removals, 0);
                prop_assert_eq!(effect.impact, TreeImpact::None);
                let expected: BTreeSet<u64> = (100..106).filter(|name| has_all(&copies, *name)).collect();
                prop_assert_eq!(rank.names(), expected);
                if is_copied == 0 {
                    other = rank.copied().or(other);
                    prop_assert_eq!(other.as_ref().map_or(rank.names(), Rank::names), rank.names());
                }
                let others = other.as_ref().map(Rank::names).unwrap_or_default();
                prop_assert!(others.is_subset(&rank.names()), "{:?}", others);
            }
        }
    }
}
