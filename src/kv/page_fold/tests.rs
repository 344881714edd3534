use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;

/// The plainest cache: the set of cached prefixes, in whole pages.
#[derive(Default)]
struct Cache {
    page: usize,
    names: BTreeMap<Vec<u32>, EngineHash>,
    cached: BTreeSet<Vec<u32>>,
}

impl Cache {
    fn name(&mut self, prefix: &[u32]) -> EngineHash {
        let next = EngineHash(1_000 + self.names.len() as u64);
        *self.names.entry(prefix.to_vec()).or_insert(next)
    }

    /// Caches a prompt's whole pages. Nothing is stored twice.
    fn store(&mut self, prompt: &[u32]) -> Option<Stored> {
        let mut event = Stored {
            block_size: self.page as u32,
            ..Stored::default()
        };
        for end in (self.page..=prompt.len()).step_by(self.page) {
            if !self.cached.insert(prompt[..end].to_vec()) {
                continue;
            }
            if event.hashes.is_empty() && end > self.page {
                event.parent = Some(self.name(&prompt[..end - self.page]));
            }
            event.hashes.push(self.name(&prompt[..end]));
            event.token_ids.extend(&prompt[end - self.page..end]);
        }
        (!event.hashes.is_empty()).then_some(event)
    }

    /// Evicts pages without any after them, in one event.
    fn evict(&mut self, seed: usize, count: usize) -> Removed {
        let mut event = Removed::default();
        for step in 0..count {
            let leaves: Vec<Vec<u32>> = self
                .cached
                .iter()
                .filter(|prefix| {
                    !self
                        .cached
                        .iter()
                        .any(|other| other.len() > prefix.len() && other.starts_with(prefix))
                })
                .cloned()
                .collect();
            let Some(leaf) = leaves.get((seed + step) % leaves.len().max(1)) else {
                break;
            };
            self.cached.remove(leaf);
            let name = self.name(leaf);
            event.hashes.push(name);
        }
        // A node of several pages is removed from its first page on.
        event.hashes.reverse();
        event
    }

    /// The cached prefixes that end with a block.
    fn blocks(&self) -> BTreeSet<Vec<u32>> {
        let is_block = |prefix: &&Vec<u32>| prefix.len().is_multiple_of(BLOCK_TOKENS as usize);
        self.cached.iter().filter(is_block).cloned().collect()
    }
}

/// What a tree of blocks has after the folded events.
#[derive(Default)]
struct Blocks(BTreeMap<EngineHash, Vec<u32>>);

impl Blocks {
    fn apply(&mut self, events: Vec<Event>) {
        for event in events {
            match event {
                Event::Stored(stored) => {
                    assert_eq!(stored.block_size, BLOCK_TOKENS);
                    let mut prefix = match stored.parent {
                        Some(parent) => self.0[&parent].clone(),
                        None => Vec::new(),
                    };
                    let tokens = stored.token_ids.chunks_exact(BLOCK_TOKENS as usize);
                    for (name, tokens) in stored.hashes.iter().zip(tokens) {
                        prefix.extend(tokens);
                        let before = self.0.insert(*name, prefix.clone());
                        assert_eq!(before, None, "stored twice");
                    }
                }
                Event::Removed(removed) => {
                    for name in removed.hashes {
                        assert!(
                            self.0.remove(&name).is_some(),
                            "removed what was not stored"
                        );
                    }
                }
                Event::Cleared { .. } | Event::Unknown { .. } => unreachable!(),
            }
        }
    }
}

/// Gives memory back, if most of it is unused, and returns in how many slices.
fn shrink(fold: &mut PageFold) -> usize {
    let Some(mut page_move) = fold.begin_shrink() else {
        return 0;
    };
    let mut slices = 1;
    while fold.shrink_next(&mut page_move, 16) {
        slices += 1;
    }
    slices
}

#[derive(Clone, Debug)]
enum Op {
    Store(Vec<u32>),
    Evict(usize, usize),
}

fn op() -> impl Strategy<Value = Op> {
    // Few different prompts that share starts of any length.
    let prompt = (0usize..80, 0usize..80, 0u32..3).prop_map(|(length, fork, tail)| {
        let token = |at: usize| if at < fork { at as u32 % 5 } else { tail + 10 };
        (0..length).map(token).collect()
    });
    prop_oneof![
        3 => prompt.prop_map(Op::Store),
        2 => (any::<usize>(), 0usize..40).prop_map(|(seed, count)| Op::Evict(seed % 1_000, count)),
    ]
}

proptest! {
    #[test]
    fn the_blocks_are_those_whose_pages_are_all_cached(
        page in prop_oneof![Just(1usize), Just(2), Just(4), Just(8)],
        ops in proptest::collection::vec(op(), 1..24),
    ) {
        let mut cache = Cache { page, ..Cache::default() };
        let mut fold = PageFold::for_pages(page as u32).unwrap();
        let mut blocks = Blocks::default();
        for op in ops {
            let events = match op {
                Op::Store(prompt) => match cache.store(&prompt) {
                    Some(event) => fold.store(&event, Tier::Gpu),
                    None => continue,
                },
                Op::Evict(seed, count) => fold.remove(&cache.evict(seed, count), Tier::Gpu),
            };
            blocks.apply(events.unwrap());
            shrink(&mut fold);
            let found: BTreeSet<Vec<u32>> = blocks.0.values().cloned().collect();
            prop_assert_eq!(found, cache.blocks());
            prop_assert_eq!(fold.pages.len(), cache.cached.len());
        }
    }
}

fn stored(parent: Option<u64>, names: std::ops::Range<u64>) -> Stored {
    Stored {
        parent: parent.map(EngineHash),
        hashes: names.clone().map(EngineHash).collect(),
        token_ids: names.map(|name| name as u32).collect(),
        block_size: 1,
        ..Stored::default()
    }
}

#[test]
fn only_pages_that_fill_a_block_are_folded() {
    for size in [0, 3, 16, 32, 64, u32::MAX] {
        assert!(PageFold::for_pages(size).is_none(), "{size}");
    }
    assert_eq!(PageFold::for_pages(8).unwrap().page_size, 8);
}

#[test]
fn a_page_that_is_gone_before_the_one_after_it_is_not_understood() {
    let mut fold = PageFold::for_pages(1).unwrap();
    fold.store(&stored(None, 0..20), Tier::Gpu).unwrap();
    let removed = Removed {
        hashes: vec![EngineHash(3)],
        ..Removed::default()
    };
    assert_eq!(fold.remove(&removed, Tier::Gpu), Err(Unfoldable::Torn));
}

#[test]
fn a_block_is_whole_in_each_tier_by_itself() {
    let mut fold = PageFold::for_pages(1).unwrap();
    let is_whole = |events: Vec<Event>| !events.is_empty();
    assert!(is_whole(
        fold.store(&stored(None, 0..16), Tier::Gpu).unwrap()
    ));
    assert!(!is_whole(
        fold.store(&stored(None, 0..10), Tier::Cpu).unwrap()
    ));
    assert!(is_whole(
        fold.store(&stored(Some(9), 10..16), Tier::Cpu).unwrap()
    ));
    let removed = Removed {
        hashes: (0..16).map(EngineHash).collect(),
        ..Removed::default()
    };
    assert!(is_whole(fold.remove(&removed, Tier::Gpu).unwrap()));
    assert!(is_whole(fold.remove(&removed, Tier::Cpu).unwrap()));
    assert!(fold.pages.is_empty());
}

#[test]
fn the_pages_after_another_replicas_block_follow_it() {
    let mut fold = PageFold::for_pages(1).unwrap();
    let events = fold.store(&stored(Some(99), 100..116), Tier::Gpu).unwrap();
    let [Event::Stored(block)] = &events[..] else {
        panic!("{events:?}");
    };
    assert_eq!(block.parent, Some(EngineHash(99)));
    assert_eq!(block.hashes, [EngineHash(115)]);
}

#[test]
fn pages_that_depend_on_the_token_after_them_make_blocks_and_other_extra_keys_do_not() {
    let with = |key: ExtraKey| Stored {
        extra_keys: vec![vec![key]; 16],
        ..stored(None, 0..16)
    };
    let mut fold = PageFold::for_pages(1).unwrap();
    let lookahead = with(ExtraKey::Lookahead([7].into()));
    assert_eq!(
        fold.store(&lookahead, Tier::Gpu).map(|blocks| blocks.len()),
        Ok(1)
    );
    let mut fold = PageFold::for_pages(1).unwrap();
    let salted = with(ExtraKey::Text("salt".into()));
    assert_eq!(
        fold.store(&salted, Tier::Gpu),
        Err(Unfoldable::Inconsistent)
    );
}

#[test]
fn fields_that_contradict_each_other_are_refused() {
    let mut fold = PageFold::for_pages(1).unwrap();
    let mut event = stored(None, 0..4);
    event.token_ids.pop();
    assert_eq!(fold.store(&event, Tier::Gpu), Err(Unfoldable::Inconsistent));
    let other = Stored {
        block_size: 2,
        ..stored(None, 0..4)
    };
    assert_eq!(fold.store(&other, Tier::Gpu), Err(Unfoldable::Inconsistent));
}

use std::sync::Arc;

use crate::kv::indexes::{PrefixIndexes, Settings};
use crate::observe::metrics::Registry;

fn indexes(max_index_memory: u64) -> Arc<PrefixIndexes> {
    PrefixIndexes::new(Settings { max_index_memory }, &Registry::default())
}

/// A chain of a thousand pages of one token, with names of its own.
fn chain(number: u64, pages: std::ops::Range<u64>) -> Stored {
    let name = |page: u64| number * 1_000_000 + page;
    Stored {
        hashes: pages.clone().map(|page| EngineHash(name(page))).collect(),
        parent: pages
            .start
            .checked_sub(1)
            .map(|before| EngineHash(name(before))),
        token_ids: pages.map(|page| page as u32).collect(),
        block_size: 1,
        ..Stored::default()
    }
}

fn blocks(events: &[Event]) -> usize {
    let count = |event: &Event| match event {
        Event::Stored(stored) => stored.hashes.len(),
        _ => 0,
    };
    events.iter().map(count).sum()
}

#[test]
fn pages_stay_within_half_of_the_indexes_memory_and_the_least_used_go() {
    let indexes = indexes(1 << 20);
    let fold = PageFold::for_pages(1).unwrap();
    let mut fold = fold.with_memory(indexes.page_memory());
    for number in 0..200 {
        let events = fold.store(&chain(number, 0..1_000), Tier::Gpu).unwrap();
        assert_eq!(blocks(&events), 1_000 / 16, "a whole store goes in");
        assert!(fold.memory_bytes() <= 1 << 19, "{}", fold.memory_bytes());
        // The first chain is used again and again.
        let used = 1_000 + number..1_001 + number;
        fold.store(&chain(0, used), Tier::Gpu).unwrap();
    }
    assert!(fold.take_forgotten() > 100_000);
    assert_eq!(fold.take_forgotten(), 0);
    // What was used last goes on within its block; what was used long ago does not.
    let events = fold.store(&chain(199, 1_000..1_008), Tier::Gpu).unwrap();
    assert_eq!(blocks(&events), 1);
    let events = fold.store(&chain(0, 1_200..1_216), Tier::Gpu).unwrap();
    assert_eq!(blocks(&events), 1);
    assert!(fold.pages.find(EngineHash(1_000_000 + 999)).is_none());
    // A block whose pages are forgotten is removed by its name.
    let removed = Removed {
        hashes: vec![EngineHash(1_000_000 + 15)],
        ..Removed::default()
    };
    let events = fold.remove(&removed, Tier::Gpu).unwrap();
    assert_eq!(events, [Event::Removed(removed)]);
}

#[test]
fn of_a_store_that_is_larger_than_the_memory_the_first_pages_are_taken() {
    let indexes = indexes(1 << 20);
    let fold = PageFold::for_pages(1).unwrap();
    let mut fold = fold.with_memory(indexes.page_memory());
    let events = fold.store(&chain(0, 0..100_000), Tier::Gpu).unwrap();
    let taken = 100_000 - fold.take_forgotten() as usize;
    assert!((4_000..20_000).contains(&taken), "{taken}");
    assert_eq!(blocks(&events), taken / 16);
    assert!(fold.memory_bytes() <= 1 << 19);
}

#[test]
fn a_chain_that_is_longer_than_the_memory_goes_on_and_loses_its_start() {
    let indexes = indexes(1 << 20);
    let fold = PageFold::for_pages(1).unwrap();
    let mut fold = fold.with_memory(indexes.page_memory());
    let mut whole = 0;
    for part in 0..100 {
        let pages = part * 1_000..(part + 1) * 1_000;
        let events = fold.store(&chain(0, pages), Tier::Gpu).unwrap();
        whole += blocks(&events);
        assert!(fold.memory_bytes() <= 1 << 19);
    }
    assert_eq!(whole, 100_000 / 16);
    assert!(fold.take_forgotten() > 80_000);
    // The end is removed page by page, and all before it by the names of blocks.
    let removed = Removed {
        hashes: (0..100_000).rev().map(EngineHash).collect(),
        ..Removed::default()
    };
    let events = fold.remove(&removed, Tier::Gpu).unwrap();
    let [Event::Removed(names)] = &events[..] else {
        panic!("{}", events.len());
    };
    let is_block = |name: &&EngineHash| name.0 % 16 == 15;
    assert_eq!(names.hashes.iter().filter(is_block).count(), 100_000 / 16);
    assert!(fold.pages.is_empty());
}

#[test]
fn a_rank_with_less_than_its_part_has_room_where_another_took_all() {
    let indexes = indexes(1 << 20);
    let fold = || {
        PageFold::for_pages(1)
            .unwrap()
            .with_memory(indexes.page_memory())
    };
    let (mut one, mut other) = (fold(), fold());
    one.store(&chain(0, 0..100_000), Tier::Gpu).unwrap();
    one.take_forgotten();
    other.store(&chain(1, 0..500), Tier::Gpu).unwrap();
    assert_eq!(other.take_forgotten(), 0);
    drop(one);
    let events = other.store(&chain(2, 0..4_000), Tier::Gpu).unwrap();
    assert_eq!(blocks(&events), 4_000 / 16);
}

#[test]
fn pages_that_are_removed_give_their_memory_back_and_those_that_stay_go_on_as_before() {
    let indexes = indexes(64 << 20);
    let fold = PageFold::for_pages(1).unwrap();
    let mut fold = fold.with_memory(indexes.page_memory());
    fold.store(&chain(0, 0..20_000), Tier::Gpu).unwrap();
    // The page before its first one is not known.
    fold.store(&chain(1, 5..45), Tier::Gpu).unwrap();
    let full = fold.memory_bytes();
    let removed = |pages: Stored| Removed {
        hashes: pages.hashes,
        ..Removed::default()
    };
    let events = fold
        .remove(&removed(chain(0, 100..20_000)), Tier::Gpu)
        .unwrap();
    let [Event::Removed(blocks)] = &events[..] else {
        panic!("{}", events.len());
    };
    assert_eq!(blocks.hashes.len(), 20_000 / 16 - 100 / 16);
    // As many numbers are looked at as there were pages, and each page that is left gets its parent's number.
    assert_eq!(shrink(&mut fold), 20_040 / 16 + 1 + 140 / 16 + 1);
    assert_eq!(shrink(&mut fold), 0);
    assert_eq!(fold.pages.len(), 100 + 40);
    assert!(fold.memory_bytes() * 20 < full, "{full}");
    let name = |page: u64| EngineHash(1_000_000 + page);
    let first = fold.pages.find(name(5)).unwrap();
    assert_eq!(fold.pages.parent_name(first), Some(name(4)));
    // A block that began before goes on, after the one before it.
    let events = fold.store(&chain(1, 45..53), Tier::Gpu).unwrap();
    let [Event::Stored(block)] = &events[..] else {
        panic!("{events:?}");
    };
    assert_eq!(
        (block.parent, &block.hashes[..]),
        (Some(name(36)), &[name(52)][..])
    );
    assert_eq!(block.token_ids, (37..53).collect::<Vec<u32>>());
    // What is whole is known to be, and is removed by its names.
    let events = fold.remove(&removed(chain(1, 5..53)), Tier::Gpu).unwrap();
    let blocks = vec![name(20), name(36), name(52)];
    assert_eq!(
        events,
        [Event::Removed(Removed {
            hashes: blocks,
            ..Removed::default()
        })]
    );
    let events = fold.remove(&removed(chain(0, 0..100)), Tier::Gpu).unwrap();
    let [Event::Removed(blocks)] = &events[..] else {
        panic!("{}", events.len());
    };
    assert_eq!(blocks.hashes.len(), 100 / 16);
    assert!(fold.pages.is_empty());
    assert_eq!(fold.memory_bytes(), 0);
}

#[test]
fn both_copies_of_pages_that_move_are_charged_until_they_have_moved() {
    let registry = Registry::default();
    let max_index_memory = 64 << 20;
    let indexes = PrefixIndexes::new(Settings { max_index_memory }, &registry);
    let fold = PageFold::for_pages(1).unwrap();
    let mut fold = fold.with_memory(indexes.page_memory());
    let are_charged = |bytes: usize| {
        let line = format!("warmroute_kv_index_bytes {bytes}\n");
        registry.text().contains(&line)
    };
    fold.store(&chain(0, 0..20_000), Tier::Gpu).unwrap();
    let removed = Removed {
        hashes: chain(0, 100..20_000).hashes,
        ..Removed::default()
    };
    fold.remove(&removed, Tier::Gpu).unwrap();
    assert!(are_charged(fold.memory_bytes()));
    let mut page_move = fold.begin_shrink().unwrap();
    assert!(page_move.bytes() >= 20_000 * size_of::<PageNumber>());
    let both = fold.memory_bytes() + page_move.bytes();
    while fold.shrink_next(&mut page_move, 1_000) {
        assert!(are_charged(both));
    }
    assert!(fold.memory_bytes() < both);
    assert!(are_charged(fold.memory_bytes()));
}

/// Pages that are stored nowhere stay for those after them, in another tier.
#[test]
fn pages_that_were_only_kept_for_a_forgotten_one_go_with_it() {
    let kept = || {
        let mut fold = PageFold::for_pages(1).unwrap();
        fold.store(&stored(None, 0..4), Tier::Gpu).unwrap();
        fold.store(&stored(Some(2), 3..4), Tier::Cpu).unwrap();
        let removed = Removed {
            hashes: (0..4).map(EngineHash).collect(),
            ..Removed::default()
        };
        fold.remove(&removed, Tier::Gpu).unwrap();
        assert_eq!(fold.pages.len(), 4);
        let last = fold.pages.find(EngineHash(3)).unwrap();
        (fold, last)
    };
    let (mut fold, last) = kept();
    assert_eq!(fold.pages.forget_leaf(last), NO_PAGE);
    assert!(fold.pages.is_empty());
    let (mut fold, last) = kept();
    assert_eq!(fold.pages.forget(vec![last]), 1);
    assert!(fold.pages.is_empty());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn pages_are_found_by_their_names_whatever_comes_and_goes(
        steps in proptest::collection::vec((0u64..64, any::<bool>()), 1..200),
    ) {
        // Names that share their places in the table.
        let name = |number: u64| EngineHash(number % 8 + ((number / 8) << 40));
        let mut fold = PageFold::for_pages(8).unwrap();
        let mut known = BTreeSet::new();
        for (number, is_stored) in steps {
            if is_stored {
                let event = Stored {
                    hashes: vec![name(number)],
                    token_ids: vec![number as u32; 8],
                    block_size: 8,
                    ..Stored::default()
                };
                fold.store(&event, Tier::Gpu).unwrap();
                known.insert(number);
            } else {
                let event = Removed {
                    hashes: vec![name(number)],
                    ..Removed::default()
                };
                fold.remove(&event, Tier::Gpu).unwrap();
                known.remove(&number);
            }
            prop_assert_eq!(fold.pages.len(), known.len());
            for number in 0..64 {
                prop_assert_eq!(fold.pages.find(name(number)).is_some(), known.contains(&number));
            }
        }
    }
}
