use std::collections::BTreeMap;

use proptest::prelude::*;

use super::block::BLOCK_BYTES;
use super::*;
use crate::kv::event::Removed;

/// The plainest subscriber: what it holds, by name and medium, with the tokens on the way there.
#[derive(Clone, Debug, Default, PartialEq)]
struct Subscriber {
    paths: BTreeMap<EngineHash, Vec<u32>>,
    copies: BTreeMap<(EngineHash, bool), u32>,
}

impl Subscriber {
    fn apply(&mut self, event: &Event) {
        match event {
            Event::Cleared { .. } => *self = Self::default(),
            Event::Removed(event) => {
                for name in &event.hashes {
                    let is_cpu = event.location.medium == Medium::Cpu;
                    if let Some(count) = self.copies.get_mut(&(*name, is_cpu)) {
                        *count -= 1;
                    }
                    self.copies.retain(|_, count| *count > 0);
                }
            }
            Event::Stored(event) => {
                let mut path = match event.parent {
                    None => Vec::new(),
                    Some(parent) => self.paths[&parent].clone(),
                };
                let tokens = event.token_ids.chunks(event.block_size as usize);
                for (name, tokens) in event.hashes.iter().zip(tokens) {
                    path.extend_from_slice(tokens);
                    self.paths.insert(*name, path.clone());
                    let is_cpu = event.location.medium == Medium::Cpu;
                    *self.copies.entry((*name, is_cpu)).or_default() += 1;
                }
            }
            Event::Unknown { .. } => unreachable!(),
        }
    }

    /// What is held, with where it is in prompts.
    fn holds(&self) -> Vec<(EngineHash, bool, u32, &[u32])> {
        let holds = self.copies.iter();
        holds
            .map(|((name, is_cpu), count)| (*name, *is_cpu, *count, &self.paths[name][..]))
            .collect()
    }
}

/// Blocks of two tokens in a tree of prompts: block `n`'s children are `2n + 1` and `2n + 2`.
fn parent(block: u64) -> Option<u64> {
    block.checked_sub(1).map(|above| above / 2)
}

fn location(is_cpu: bool) -> Location {
    Location {
        medium: if is_cpu { Medium::Cpu } else { Medium::Gpu },
        ..Location::default()
    }
}

fn store(blocks: &[u64], is_cpu: bool) -> Event {
    Event::Stored(Stored {
        hashes: blocks.iter().map(|block| EngineHash(*block)).collect(),
        parent: parent(blocks[0]).map(EngineHash),
        token_ids: blocks.iter().flat_map(|block| [*block as u32, 7]).collect(),
        block_size: 2,
        location: location(is_cpu),
        ..Stored::default()
    })
}

/// A random engine: stores chains below blocks that it holds, drops copies anywhere, clears at times.
fn engine(choices: Vec<(u8, u64, u64, bool)>) -> Vec<Event> {
    let mut copies: BTreeMap<(u64, bool), u32> = BTreeMap::new();
    let mut events = Vec::new();
    for (kind, block, length, is_cpu) in choices {
        match kind {
            0 => {
                copies.clear();
                events.push(Event::Cleared { ownership: None });
            }
            1..=4 if !copies.is_empty() => {
                let at = block as usize % copies.len();
                let (key, count) = copies.iter_mut().nth(at).unwrap();
                let (block, is_cpu) = *key;
                *count -= 1;
                copies.retain(|_, count| *count > 0);
                events.push(Event::Removed(Removed {
                    hashes: vec![EngineHash(block)],
                    location: location(is_cpu),
                }));
            }
            _ => {
                let is_held = |block| copies.keys().any(|(blocks, _)| *blocks == block);
                if parent(block).is_none_or(is_held) {
                    let chain: Vec<u64> = std::iter::successors(Some(block), |b| Some(2 * b + 1))
                        .take(length as usize)
                        .collect();
                    for block in &chain {
                        *copies.entry((*block, is_cpu)).or_default() += 1;
                    }
                    events.push(store(&chain, is_cpu));
                }
            }
        }
    }
    events
}

fn choices() -> impl Strategy<Value = Vec<(u8, u64, u64, bool)>> {
    proptest::collection::vec((0u8..20, 0u64..30, 1u64..4, any::<bool>()), 0..80)
}

proptest! {
    #[test]
    fn a_late_joiner_holds_what_an_early_one_holds(
        choices in choices(),
        subscribe in any::<proptest::sample::Index>(),
        bytes_max in prop_oneof![Just(1usize), Just(200), Just(1 << 20)],
    ) {
        let events = engine(choices);
        let subscribe = subscribe.index(events.len() + 1);
        let (mut early, mut late) = (Subscriber::default(), Subscriber::default());
        let mut blocks = CachedBlocks::new(1 << 20);
        for event in &events[..subscribe] {
            early.apply(event);
            blocks.apply(event);
        }
        prop_assert_eq!(blocks.missing(), 0);
        for part in blocks.snapshot_events(bytes_max) {
            part.iter().for_each(|event| late.apply(event));
        }
        prop_assert_eq!(late.holds(), early.holds());
        let distinct: HashSet<_> = early.copies.keys().map(|(name, _)| name).collect();
        prop_assert_eq!(blocks.blocks(), distinct.len());
        for event in &events[subscribe..] {
            early.apply(event);
            late.apply(event);
            prop_assert_eq!(late.holds(), early.holds());
        }
    }

    #[test]
    fn what_has_no_room_is_a_smaller_part_and_never_another(choices in choices(), blocks in 0usize..8) {
        let events = engine(choices);
        let bytes_max = blocks * (BLOCK_BYTES + 8);
        let mut blocks = CachedBlocks::new(bytes_max);
        let mut early = Subscriber::default();
        for event in &events {
            early.apply(event);
            blocks.apply(event);
            prop_assert!(blocks.bytes() <= bytes_max);
            prop_assert_eq!(blocks.kinds.len(), kinds_of(&blocks));
            let mut late = Subscriber::default();
            blocks.snapshot_events(100).iter().flatten().for_each(|event| late.apply(event));
            let all = early.holds();
            for (name, is_cpu, count, path) in late.holds() {
                let found = all.iter().find(|held| (held.0, held.1) == (name, is_cpu));
                prop_assert!(found.is_some_and(|held| held.2 >= count && held.3 == path));
            }
            if blocks.missing() == 0 {
                prop_assert_eq!(late.holds(), all);
            }
        }
    }

    #[test]
    fn what_is_gone_takes_no_memory(choices in choices()) {
        let mut blocks = CachedBlocks::new(1 << 20);
        let mut model = Subscriber::default();
        for event in engine(choices) {
            blocks.apply(&event);
            model.apply(&event);
        }
        let hashes: Vec<_> = model.copies.clone().into_iter().collect();
        for ((name, is_cpu), count) in hashes {
            for _ in 0..count {
                blocks.apply(&Event::Removed(Removed { hashes: vec![name], location: location(is_cpu) }));
            }
        }
        prop_assert_eq!((blocks.blocks(), blocks.bytes(), blocks.blocks.len(), blocks.placeholders), (0, 0, 0, 0));
        prop_assert_eq!(blocks.kinds.len(), 0);
    }
}

/// How many kinds blocks have.
fn kinds_of(blocks: &CachedBlocks) -> usize {
    let mut kinds: HashSet<KindId> = HashSet::new();
    for block in blocks.blocks.values() {
        kinds.insert(block.kind);
        kinds.extend(block.copies.iter().map(|(kind, _)| *kind));
    }
    kinds.len()
}

/// A block of a tenant that has a cache salt of its own.
fn salted(block: u64) -> Event {
    Event::Stored(Stored {
        hashes: vec![EngineHash(block)],
        token_ids: vec![block as u32, 7],
        block_size: 2,
        cache_salt: Some(format!("salt-{block}").into()),
        location: location(false),
        ..Stored::default()
    })
}

fn removed(block: u64) -> Event {
    Event::Removed(Removed {
        hashes: vec![EngineHash(block)],
        location: location(false),
    })
}

#[test]
fn salts_of_which_no_block_is_cached_take_no_room() {
    let mut blocks = CachedBlocks::new(1 << 20);
    for block in 0..5_000 {
        blocks.apply(&salted(block));
        blocks.apply(&removed(block));
    }
    blocks.apply(&salted(5_000));
    assert_eq!((blocks.missing(), blocks.kinds.len()), (0, 1));
    let list = blocks.snapshot_events(1 << 20);
    let expected = vec![Event::Cleared { ownership: None }, salted(5_000)];
    assert_eq!(list, [expected]);
}

#[test]
fn only_after_a_clear_of_another_owner_some_blocks_are_not_known() {
    for (ownership, missing) in [(None, 0), (Some(""), 0), (Some("pool"), 1)] {
        let mut blocks = CachedBlocks::new(1 << 20);
        blocks.apply(&salted(1));
        blocks.apply(&Event::Cleared {
            ownership: ownership.map(Into::into),
        });
        assert_eq!((blocks.missing(), blocks.blocks()), (missing, 0));
    }
}

#[test]
fn with_too_many_salts_at_a_time_new_ones_wait_for_room() {
    let mut blocks = CachedBlocks::new(1 << 20);
    (0..4_100).for_each(|block| blocks.apply(&salted(block)));
    assert_eq!((blocks.missing(), blocks.blocks()), (4, 4_096));
    blocks.apply(&removed(9));
    blocks.apply(&salted(5_000));
    assert_eq!((blocks.missing(), blocks.blocks()), (4, 4_096));
    let mut expected: Vec<Event> = vec![Event::Cleared { ownership: None }];
    let kept = (0..4_096).filter(|block| *block != 9);
    expected.extend(kept.chain([5_000]).map(salted));
    assert_eq!(blocks.snapshot_events(1 << 20).concat(), expected);
}

#[test]
fn a_chain_is_told_in_one_store() {
    let mut blocks = CachedBlocks::new(1 << 20);
    blocks.apply(&store(&[0, 1, 3], false));
    blocks.apply(&store(&[7], false));
    let list = blocks.snapshot_events(1 << 20);
    let [part] = &list[..] else {
        panic!("{list:?}")
    };
    assert_eq!(
        part[..],
        [
            Event::Cleared { ownership: None },
            store(&[0, 1, 3, 7], false)
        ]
    );
}

#[test]
fn nothing_held_is_a_clear_alone() {
    let list = CachedBlocks::new(0).snapshot_events(100);
    assert_eq!(list, [vec![Event::Cleared { ownership: None }]]);
}

#[test]
fn older_engines_say_no_medium_and_mean_the_same() {
    let mut blocks = CachedBlocks::new(1 << 20);
    blocks.apply(&store(&[0], false));
    blocks.apply(&Event::Removed(Removed {
        hashes: vec![EngineHash(0)],
        location: Location::default(),
    }));
    assert_eq!(blocks.blocks(), 0);
}

/// Groups of sliding windows report sparse blocks, which are left out, and then that these are gone.
#[test]
fn what_a_cache_group_loses_that_has_no_copy_leaves_the_copies_of_other_groups() {
    let of_group = |group| Location {
        group,
        ..location(false)
    };
    let lost = |group| {
        Event::Removed(Removed {
            hashes: vec![EngineHash(0)],
            location: of_group(group),
        })
    };
    for last in [Some(0), None] {
        let mut blocks = CachedBlocks::new(1 << 20);
        let Event::Stored(mut stored) = store(&[0], false) else {
            unreachable!()
        };
        stored.location = of_group(Some(0));
        blocks.apply(&Event::Stored(stored));
        blocks.apply(&lost(Some(1)));
        assert_eq!(blocks.blocks(), 1);
        blocks.apply(&lost(last));
        assert_eq!(blocks.blocks(), 0);
    }
}
