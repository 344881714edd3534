//! Events of SGLang 0.5.23, as recorded from a real server.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;
use crate::kv::event::ExtraKey;
use crate::kv::index::RankPrefix;
use crate::kv::{page_hash, zmq};

const EVENTS: &str = include_str!("../../../../tests/fixtures/sglang-0.5.23/events.txt");
const REPLAY: &str = include_str!("../../../../tests/fixtures/sglang-0.5.23/replay.txt");
const PAGE: u32 = 16;

fn messages(recording: &str) -> Vec<Vec<Vec<u8>>> {
    let lines = recording.lines().filter(|line| !line.starts_with('#'));
    let bytes = |frame: &str| {
        let digits = frame.trim_start_matches('-').as_bytes();
        let pairs = digits.chunks(2).map(|pair| str::from_utf8(pair).unwrap());
        pairs
            .map(|pair| u8::from_str_radix(pair, 16).unwrap())
            .collect()
    };
    lines
        .map(|line| line.split(' ').map(bytes).collect())
        .collect()
}

fn live() -> Vec<Batch> {
    let messages = messages(EVENTS);
    let batch = |parts: &Vec<Vec<u8>>| zmq::frame::live(parts).unwrap().batch.unwrap();
    messages.iter().map(batch).collect()
}

fn replayed() -> Vec<Batch> {
    let batch = |parts: &Vec<Vec<u8>>| match zmq::frame::replay_message(parts).unwrap() {
        zmq::frame::ReplayMessage::Batch(frame) => Some(frame.batch.unwrap()),
        zmq::frame::ReplayMessage::End => None,
    };
    messages(REPLAY).iter().map_while(batch).collect()
}

struct Pages {
    indexes: Arc<PrefixIndexes>,
    tree: RankTree,
}

impl Pages {
    fn new() -> Self {
        let indexes = PrefixIndexes::new(indexes::Settings::default(), &Registry::default());
        let mut tree = RankTree::new(indexes.clone(), &subject_of_pages());
        tree.set_visible(true);
        Self { indexes, tree }
    }

    fn apply(&mut self, batch: &Batch) -> BatchEffect {
        let mut effect = BatchEffect::default();
        self.tree.apply(batch, &mut effect);
        effect
    }

    fn names(&self) -> BTreeSet<u64> {
        let blocks = self.tree.tree().map(|(_, tree)| tree.list());
        blocks
            .into_iter()
            .flatten()
            .map(|block| block.name.0)
            .collect()
    }

    fn cached(&self, size: u32, prompt: &[u32], salt: Option<&str>) -> u32 {
        let size = NonZeroU32::new(size).unwrap();
        let (mut locals, mut found) = (Vec::new(), Vec::<RankPrefix>::new());
        block::hash_blocks(prompt, size, &mut locals);
        let index = self.indexes.index(&"m".into(), size);
        index.overlap(block::chain_root(None, salt), &locals, &mut found);
        found.first().map_or(0, |prefix| prefix.blocks)
    }
}

/// The plainest cache: the set of names.
fn plain(names: &mut BTreeSet<u64>, batch: &Batch) {
    for event in &batch.events {
        match event {
            Event::Stored(stored) => {
                for name in &stored.hashes {
                    assert!(names.insert(name.0), "stored twice");
                }
            }
            Event::Removed(removed) => {
                for name in &removed.hashes {
                    assert!(names.remove(&name.0), "removed what was not stored");
                }
            }
            Event::Cleared { .. } => names.clear(),
            Event::Unknown { .. } => panic!("{event:?}"),
        }
    }
}

#[test]
fn a_recorded_servers_tree_is_the_set_of_what_it_reported() {
    let (mut pages, mut names) = (Pages::new(), BTreeSet::new());
    let mut evicted = 0;
    for batch in live() {
        plain(&mut names, &batch);
        let effect = pages.apply(&batch);
        assert_eq!(effect.ignored, []);
        assert_eq!(effect.unknown_removals, 0);
        evicted += effect.removed;
        assert_eq!(pages.names(), names);
    }
    assert_eq!(names.len(), 6);
    assert!(evicted > 20, "{evicted}");
    // The replay begins with the clear of a new process, and ends in the same tree.
    let replay = replayed();
    assert_eq!(replay[0].events, [Event::Cleared { ownership: None }]);
    assert_eq!(replay[1..], live());
    for batch in &replay {
        pages.apply(batch);
    }
    assert_eq!(pages.names(), names);
}

#[test]
fn recorded_prompts_are_found_with_their_salt_and_as_far_as_they_were_cached() {
    let mut pages = Pages::new();
    let prompt: Vec<u32> = (100..150).collect();
    for batch in &live()[..4] {
        pages.apply(batch);
    }
    // 48 tokens of the prompt, and 16 more with its answer.
    assert_eq!(pages.cached(PAGE, &prompt, None), 3);
    assert_eq!(pages.cached(PAGE, &prompt, Some("tenant-7")), 3);
    assert_eq!(pages.cached(PAGE, &prompt, Some("tenant-8")), 0);
}

#[test]
fn recorded_pages_are_named_by_their_tokens() {
    let mut named = 0;
    for batch in live() {
        for event in &batch.events {
            if let Event::Stored(stored) = event
                && let Some(is_named) = page_hash::names_its_tokens(stored)
            {
                assert!(is_named, "{stored:?}");
                named += 1;
            }
        }
    }
    assert!(named > 10);
}

fn stored(tokens: std::ops::Range<u32>, page: u32, names: &[EngineHash]) -> Event {
    Event::Stored(Stored {
        hashes: names.to_vec(),
        token_ids: tokens.collect(),
        block_size: page,
        ..Stored::default()
    })
}

fn batch(events: Vec<Event>) -> Batch {
    Batch {
        events,
        ..Batch::default()
    }
}

#[test]
fn pages_of_a_name_space_that_is_not_reported_are_ignored_once_names_were_seen_to_match() {
    let mut pages = Pages::new();
    let names = |tokens: std::ops::Range<u32>| {
        let tokens: Vec<u32> = tokens.collect();
        page_hash::page_hashes(&tokens, 16, None).collect::<Vec<_>>()
    };
    let foreign = batch(vec![stored(0..16, 16, &[EngineHash(7)])]);
    let own = batch(vec![stored(100..132, 16, &names(100..132))]);
    let prompt: Vec<u32> = (0..17).collect();
    // A release that hashes in another way is used nevertheless.
    assert_eq!(pages.apply(&foreign).ignored, []);
    assert_eq!(pages.cached(16, &prompt, None), 1);
    pages.apply(&batch(vec![Event::Cleared { ownership: None }]));
    assert_eq!(pages.apply(&own).ignored, []);
    let effect = pages.apply(&foreign);
    assert_eq!(effect.ignored, [IgnoredReason::HashMismatch]);
    assert_eq!(effect.impact, TreeImpact::None);
    assert_eq!(pages.cached(16, &prompt, None), 0);
    let prompt: Vec<u32> = (100..133).collect();
    assert_eq!(pages.cached(16, &prompt, None), 2);
}

#[test]
fn a_page_has_one_copy_however_often_it_is_reported() {
    let mut pages = Pages::new();
    let store = batch(vec![stored(0..32, 16, &[EngineHash(1), EngineHash(2)])]);
    pages.apply(&store);
    pages.apply(&store);
    let removed = Removed {
        hashes: vec![EngineHash(1), EngineHash(2)],
        ..Removed::default()
    };
    pages.apply(&batch(vec![Event::Removed(removed)]));
    assert_eq!(pages.names(), BTreeSet::new());
}

#[test]
fn torn_pages_clear_the_tree() {
    let mut pages = Pages::new();
    let names: Vec<EngineHash> = (0..40).map(EngineHash).collect();
    pages.apply(&batch(vec![stored(0..40, 1, &names)]));
    assert_eq!(pages.names(), BTreeSet::from([15, 31]));
    let removed = Removed {
        hashes: vec![EngineHash(3)],
        ..Removed::default()
    };
    let effect = pages.apply(&batch(vec![Event::Removed(removed)]));
    assert_eq!(effect.impact, TreeImpact::Unknown);
    assert_eq!(pages.names(), BTreeSet::new());
}

#[test]
fn a_clear_of_another_owner_leaves_the_pages_of_a_block_that_goes_on() {
    let mut pages = Pages::new();
    let names: Vec<EngineHash> = (0..48).map(EngineHash).collect();
    pages.apply(&batch(vec![stored(0..40, 1, &names[..40])]));
    let Event::Stored(mut rest) = stored(40..48, 1, &names[40..]) else {
        unreachable!()
    };
    rest.parent = Some(names[39]);
    let of_pool = Event::Cleared {
        ownership: Some("pool".into()),
    };
    let effect = pages.apply(&batch(vec![of_pool, Event::Stored(rest)]));
    assert_eq!(effect.ignored, [IgnoredReason::SeparateOwner]);
    assert_eq!(pages.names(), BTreeSet::from([15, 31, 47]));
    let of_engine = Event::Cleared {
        ownership: Some("".into()),
    };
    pages.apply(&batch(vec![of_engine]));
    assert_eq!(pages.names(), BTreeSet::new());
}

#[test]
fn pairs_of_tokens_are_blocks_that_depend_on_the_token_after_them() {
    let pair = |token: u8| [0x92, token, token + 1];
    let mut payload = b"\x92\x00\x91\x96\xabBlockStored\x92\x07\x08\xc0\x94".to_vec();
    payload.extend([1, 2, 3, 4].into_iter().flat_map(pair));
    payload.extend(b"\x02\xc0");
    let decoded = crate::kv::msgpack::decode(&payload).unwrap();
    let [Event::Stored(stored)] = &decoded.events[..] else {
        panic!("{decoded:?}");
    };
    assert_eq!(stored.token_ids, [1, 2, 3, 4]);
    let after = |token: u32| vec![ExtraKey::Lookahead([token].into())];
    assert_eq!(stored.extra_keys, [after(3), after(5)]);
}

#[test]
fn the_arrays_of_earlier_releases_are_read() {
    // [0, [["BlockStored", [-1], nil, [1, 2], 2, nil, "CPU_PINNED", {"cache_salt": "a", "session_id": nil, "x": 1}],
    // ["BlockRemoved", [-1, 7], "GPU"], ["AllBlocksCleared"]], 0]
    let mut payload = b"\x93\x00\x93\x98\xabBlockStored\x91\xff\xc0\x92\x01\x02\x02\xc0".to_vec();
    payload.extend(b"\xaaCPU_PINNED\x83\xaacache_salt\xa1a\xaasession_id\xc0\xa1x\x01");
    payload.extend(b"\x93\xacBlockRemoved\x92\xff\x07\xa3GPU\x91\xb0AllBlocksCleared\x00");
    let decoded = crate::kv::msgpack::decode(&payload).unwrap();
    let [
        Event::Stored(stored),
        Event::Removed(removed),
        Event::Cleared { .. },
    ] = &decoded.events[..]
    else {
        panic!("{decoded:?}");
    };
    assert_eq!(stored.hashes, [EngineHash(u64::MAX)]);
    assert_eq!(stored.cache_salt.as_deref(), Some("a"));
    assert_eq!(stored.location.medium, crate::kv::event::Medium::Cpu);
    assert_eq!(removed.hashes.len(), 2);
}

proptest! {
    /// Compares a tree of folded pages with the plainest cache of prompts, over its names as SGLang makes them.
    #[test]
    fn prompts_count_in_whole_blocks_of_folded_pages(
        lengths in proptest::collection::vec((0u32..3, 1usize..70), 1..10),
    ) {
        let mut pages = Pages::new();
        let mut cached: BTreeSet<Vec<u32>> = BTreeSet::new();
        for (kind, length) in lengths {
            let prompt: Vec<u32> = (0..length as u32).map(|at| if at < 20 { at } else { at + 100 * kind }).collect();
            let names: Vec<EngineHash> = page_hash::page_hashes(&prompt, 1, None).collect();
            let known = (1..=length).take_while(|end| cached.contains(&prompt[..*end])).count();
            cached.extend((1..=length).map(|end| prompt[..end].to_vec()));
            if known < length {
                let event = Stored {
                    hashes: names[known..].to_vec(),
                    parent: known.checked_sub(1).map(|last| names[last]),
                    token_ids: prompt[known..].to_vec(),
                    block_size: 1,
                    ..Stored::default()
                };
                let effect = pages.apply(&batch(vec![Event::Stored(event)]));
                prop_assert_eq!(effect.ignored, []);
            }
            prop_assert_eq!(pages.cached(16, &prompt, None) as usize, length / 16);
        }
    }
}

#[test]
fn memory_of_removed_pages_is_given_back_when_their_batch_is_applied() {
    let registry = Registry::default();
    let indexes = PrefixIndexes::new(indexes::Settings::default(), &registry);
    let (_say, said) = mpsc::unbounded_channel();
    let (repeat_reports, _asked) = mpsc::unbounded_channel();
    let mut source = Script {
        said,
        repeat_reports,
        can_replay: false,
    };
    let now = observe::now();
    let mut task = Task::new(now, subject_of_pages(), shared(indexes, &registry));
    let tokens: Vec<u32> = (0..20_000).collect();
    let names: Vec<EngineHash> = page_hash::page_hashes(&tokens, 1, None).collect();
    let removed = Event::Removed(Removed {
        hashes: names[100..].to_vec(),
        location: Location::default(),
    });
    let stored = Event::Stored(Stored {
        hashes: names,
        token_ids: tokens,
        block_size: 1,
        ..Stored::default()
    });
    let bytes = |task: &Task| {
        let pages = task.tree.pages.as_ref();
        let fold = pages.and_then(|pages| pages.fold.as_ref());
        fold.map_or(0, |fold| fold.memory_bytes())
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .build()
        .unwrap();
    runtime.block_on(async {
        let first = SourceEvent::Live(frame(0, vec![stored]));
        for event in [connected(), first] {
            task.handle(now, Input::Source(event), &mut source).await;
        }
        let full = bytes(&task);
        let next = Input::Source(SourceEvent::Live(frame(1, vec![removed])));
        task.handle(now, next, &mut source).await;
        let left = bytes(&task);
        assert!(0 < left && left * 20 < full, "{left} of {full}");
    });
}
