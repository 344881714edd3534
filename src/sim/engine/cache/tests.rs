//! The cache against a literal model: a list of slots with the tokens written out, searched by hand.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;

const BLOCK: usize = 2;
const CAPACITY: usize = 6;
const ROOT: u64 = 7;

/// A slot that is not empty, as the model sees it: the whole prefix in clear instead of a hash.
#[derive(Clone, Debug)]
struct ModelSlot {
    id: u64,
    /// What it holds, and when that was stored.
    prefix: Option<(Vec<u32>, u64)>,
    users: usize,
    /// When its last user left; the smallest goes first.
    left: u64,
}

#[derive(Default)]
struct Model {
    slots: Vec<ModelSlot>,
    clock: u64,
}

impl Model {
    fn hits(&self, tokens: &[u32]) -> Vec<u64> {
        (1..)
            .take_while(|blocks| blocks * BLOCK < tokens.len())
            .map_while(|blocks| self.find(&tokens[..blocks * BLOCK]))
            .collect()
    }

    /// The oldest copy.
    fn find(&self, prefix: &[u32]) -> Option<u64> {
        let holds = |slot: &&ModelSlot| matches!(&slot.prefix, Some((held, _)) if held == prefix);
        let copies = self.slots.iter().filter(holds);
        let oldest = copies.min_by_key(|slot| slot.prefix.as_ref().map(|(_, stored)| *stored));
        oldest.map(|slot| slot.id)
    }

    fn contents(&self) -> BTreeSet<Vec<u32>> {
        let prefixes = self.slots.iter().filter_map(|slot| slot.prefix.clone());
        prefixes.map(|(prefix, _)| prefix).collect()
    }

    fn pinned(&self) -> usize {
        self.slots.iter().filter(|slot| slot.users > 0).count()
    }

    fn slot(&mut self, id: u64) -> &mut ModelSlot {
        let slot = self.slots.iter_mut().find(|slot| slot.id == id);
        slot.expect("a slot in use is never evicted")
    }

    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    fn allocate(&mut self) -> u64 {
        if self.slots.len() == CAPACITY {
            let free = self.slots.iter().enumerate();
            let oldest = free
                .filter(|(_, slot)| slot.users == 0)
                .min_by_key(|(_, slot)| slot.left)
                .map(|(index, _)| index);
            self.slots
                .remove(oldest.expect("the test asks only for what fits"));
        }
        let id = self.tick();
        self.slots.push(ModelSlot {
            id,
            prefix: None,
            users: 1,
            left: 0,
        });
        id
    }

    fn release(&mut self, ids: &[u64]) {
        for id in ids.iter().rev() {
            let now = self.tick();
            let slot = self.slot(*id);
            slot.users -= 1;
            slot.left = now;
        }
        self.slots
            .retain(|slot| slot.users > 0 || slot.prefix.is_some());
    }
}

/// What one open request holds, in both worlds.
struct Open {
    path: Path,
    tokens: Vec<u32>,
    slots: Vec<u64>,
    filled: usize,
}

#[derive(Clone, Debug)]
enum Operation {
    Open(Vec<u32>),
    Fill(usize, usize),
    Release(usize),
    Reset,
}

fn operation() -> impl Strategy<Value = Operation> {
    prop_oneof![
        4 => prop::collection::vec(0..2u32, 1..9).prop_map(Operation::Open),
        4 => (0..4usize, 0..9usize).prop_map(|(which, tokens)| Operation::Fill(which, tokens)),
        4 => (0..4usize).prop_map(Operation::Release),
        1 => Just(Operation::Reset),
    ]
}

fn small_cache() -> Cache {
    let block = NonZeroU32::new(BLOCK as u32).unwrap();
    Cache::new(block, NonZeroU32::new(CAPACITY as u32).unwrap())
}

/// Replays the changes as a consumer that counts copies would.
fn follow(copies: &mut BTreeMap<BlockHash, usize>, changes: Vec<Change>) {
    for change in changes {
        match change {
            Change::Stored {
                parent,
                hashes,
                token_ids,
                ..
            } => {
                assert_eq!(token_ids.len(), hashes.len() * BLOCK);
                let known = parent.is_none_or(|parent| copies.contains_key(&parent));
                assert!(known, "a block was stored under a parent that is not held");
                for hash in hashes {
                    *copies.entry(hash).or_default() += 1;
                }
            }
            Change::Removed { hashes } => {
                for hash in hashes {
                    let count = copies.get_mut(&hash).expect("removed but never stored");
                    *count -= 1;
                    if *count == 0 {
                        copies.remove(&hash);
                    }
                }
            }
            Change::Cleared => copies.clear(),
        }
    }
}

proptest! {
    #[test]
    fn it_does_what_the_literal_model_does(
        operations in prop::collection::vec(operation(), 1..60)
    ) {
        let mut cache = small_cache();
        let mut model = Model::default();
        let mut open: Vec<Open> = Vec::new();
        let mut followed = BTreeMap::new();
        for operation in operations {
            match operation {
                Operation::Open(tokens) => {
                    let mut slots = model.hits(&tokens);
                    prop_assert_eq!(cache.hit_tokens(ROOT, &tokens), slots.len() * BLOCK);
                    let filled = slots.len();
                    let fresh = tokens.len().div_ceil(BLOCK) - filled;
                    let idle_hits = slots.iter().filter(|id| model.slot(**id).users == 0).count();
                    let fits = model.pinned() + idle_hits + fresh <= CAPACITY;
                    let opened = cache.open(ROOT, &tokens);
                    prop_assert_eq!(opened.is_some(), fits);
                    let Some((path, cached)) = opened else { continue };
                    prop_assert_eq!(cached, filled * BLOCK);
                    prop_assert!(cached < tokens.len());
                    for id in &slots {
                        model.slot(*id).users += 1;
                    }
                    slots.extend((0..fresh).map(|_| model.allocate()));
                    open.push(Open { path, tokens, slots, filled });
                }
                Operation::Fill(which, computed) => {
                    let Some(request) = open.get_mut(which) else { continue };
                    let computed = computed.min(request.tokens.len());
                    cache.fill(&mut request.path, &request.tokens, computed);
                    while (request.filled + 1) * BLOCK <= computed {
                        let id = request.slots[request.filled];
                        request.filled += 1;
                        let prefix = request.tokens[..request.filled * BLOCK].to_vec();
                        let stored = model.tick();
                        model.slot(id).prefix = Some((prefix, stored));
                    }
                }
                Operation::Release(which) => {
                    if which >= open.len() {
                        continue;
                    }
                    let request = open.remove(which);
                    model.release(&request.slots);
                    cache.release(request.path);
                }
                Operation::Reset => {
                    let done = cache.reset();
                    prop_assert_eq!(done, open.is_empty());
                    if done {
                        model.slots.clear();
                    }
                }
            }
            follow(&mut followed, cache.drain_changes());
            let names = names_of(&model);
            prop_assert_eq!(followed.keys().copied().collect::<BTreeSet<_>>(), names);
            let copies_of: Vec<_> = followed.iter().map(|(name, copies)| (*name, *copies)).collect();
            let listed = cache.list();
            let counts: Vec<_> = listed.iter().map(|held| (held.hash, held.copies)).collect();
            prop_assert_eq!(copies_of, counts);
            for held in listed {
                let parent = held.parent.map_or(ROOT, |parent| parent.0);
                prop_assert_eq!(chain(parent, &held.token_ids), held.hash);
            }
            prop_assert_eq!(cache.used_blocks(), model.pinned());
            prop_assert!(followed.values().sum::<usize>() <= CAPACITY);
            for prefix in model.contents() {
                let parent = &prefix[..prefix.len() - BLOCK];
                let closed = parent.is_empty() || model.find(parent).is_some();
                prop_assert!(closed, "a block is held without the one before it");
            }
        }
    }
}

fn names_of(model: &Model) -> BTreeSet<BlockHash> {
    let name = |prefix: &Vec<u32>| {
        let tip = prefix
            .chunks(BLOCK)
            .fold(ROOT, |tip, block| chain(tip, block).0);
        BlockHash(tip)
    };
    model.contents().iter().map(name).collect()
}

fn run(cache: &mut Cache, tokens: &[u32]) -> usize {
    let (mut path, cached) = cache.open(ROOT, tokens).unwrap();
    cache.fill(&mut path, tokens, tokens.len());
    cache.release(path);
    cached
}

#[test]
fn a_repeated_prompt_computes_its_last_block_again() {
    let mut cache = small_cache();
    assert_eq!(run(&mut cache, &[1, 2, 3, 4]), 0);
    assert_eq!(run(&mut cache, &[1, 2, 3, 4]), 2);
    assert_eq!(run(&mut cache, &[1, 2, 3, 4, 5]), 4);
}

#[test]
fn a_path_is_evicted_from_its_end() {
    let mut cache = small_cache();
    run(&mut cache, &[1, 2, 3, 4, 5, 6]);
    run(&mut cache, &[9, 9, 9, 9, 9, 9, 9, 9]);
    assert_eq!(cache.hit_tokens(ROOT, &[1, 2, 3, 4, 5, 6, 7]), 4);
}

#[test]
fn a_copy_is_removed_once_for_each_time_it_was_stored() {
    let mut cache = small_cache();
    for _ in 0..3 {
        run(&mut cache, &[1, 2]);
    }
    run(&mut cache, &[8; 11]);
    let changes = cache.drain_changes();
    let removed = changes.iter().filter_map(|change| match change {
        Change::Removed { hashes } => Some(hashes.len()),
        Change::Stored { .. } | Change::Cleared => None,
    });
    assert_eq!(removed.sum::<usize>(), 3);
}

#[test]
fn another_root_shares_nothing() {
    let mut cache = small_cache();
    run(&mut cache, &[1, 2, 3]);
    assert_eq!(cache.hit_tokens(ROOT + 1, &[1, 2, 3]), 0);
}
