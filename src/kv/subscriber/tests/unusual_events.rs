//! Events as engines really send them: copies without tokens or keys, blocks that move between tiers, late clears.

use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use super::*;
use crate::kv::event::ExtraKey;
use crate::kv::index::{PrefixIndex, RankPrefix};

impl Rank {
    fn index(&self) -> Arc<PrefixIndex> {
        self.indexes.index(&"m".into(), SIZE)
    }

    /// What the rank caches of the prompt with this salt.
    fn found(&self, salt: Option<&str>) -> Option<RankPrefix> {
        found(&self.index(), salt)
    }
}

fn found(index: &PrefixIndex, salt: Option<&str>) -> Option<RankPrefix> {
    let mut locals = Vec::new();
    block::hash_blocks(&prompt(3), SIZE, &mut locals);
    let mut found = Vec::new();
    index.overlap(block::chain_root(None, salt), &locals, &mut found);
    found.pop()
}

/// The first three blocks of the prompt.
fn three(change: impl FnOnce(&mut Stored)) -> Event {
    let Event::Stored(mut event) = stored(0, 3) else {
        unreachable!()
    };
    change(&mut event);
    Event::Stored(event)
}

fn salted() -> Event {
    let salt = vec![ExtraKey::Text("tenant".into())];
    three(|event| event.extra_keys = vec![salt, vec![], vec![]])
}

fn removed_from(medium: Medium) -> Event {
    Event::Removed(Removed {
        hashes: (100..103).map(EngineHash).collect(),
        location: Location {
            medium,
            ..Location::default()
        },
    })
}

#[test]
fn the_cpu_copy_of_a_salted_block_stays_under_its_salt() {
    let mut rank = Rank::new();
    rank.apply(vec![salted()]);
    // As offloading reports it: without extra keys, so it looks like an unsalted prompt's.
    let effect = rank.apply(vec![three(|event| event.location.medium = Medium::Cpu)]);
    assert_eq!(effect.impact, TreeImpact::None);
    assert_eq!(rank.found(None), None);
    assert_eq!(rank.found(Some("tenant")).unwrap().gpu_blocks, 3);
    rank.apply(vec![removed_from(Medium::Gpu)]);
    let found = rank.found(Some("tenant")).unwrap();
    assert_eq!((found.blocks, found.gpu_blocks), (3, 0));
    // Its name is unknown now, and its salt too.
    rank.apply(vec![removed_from(Medium::Cpu)]);
    let effect = rank.apply(vec![three(|event| event.location.medium = Medium::Cpu)]);
    assert_eq!(effect.ignored, [IgnoredReason::UnknownCopy]);
    assert_eq!(rank.found(None), None);
}

#[test]
fn a_placeholder_of_cpu_offloading_is_one_more_copy_of_a_known_block() {
    let placeholder = || {
        three(|event| {
            event.location.medium = Medium::Cpu;
            event.parent = None;
            event.block_size = 0;
            event.token_ids.clear();
        })
    };
    let mut rank = Rank::new();
    let effect = rank.apply(vec![placeholder()]);
    assert_eq!(effect.ignored, [IgnoredReason::UnknownCopy]);
    assert_eq!(effect.impact, TreeImpact::None);
    rank.apply(vec![stored(0, 3), placeholder()]);
    rank.apply(vec![removed_from(Medium::Gpu)]);
    let found = rank.found(None).unwrap();
    assert_eq!((found.blocks, found.gpu_blocks), (3, 0));
}

#[test]
fn the_partial_block_of_a_short_prompt_does_not_blind_the_tree() {
    let mut rank = Rank::new();
    rank.apply(vec![three(|event| {
        event.hashes.truncate(1);
        event.token_ids.truncate(2);
        event.block_size = 2;
    })]);
    let effect = rank.apply(vec![stored(0, 3)]);
    assert_eq!((effect.ignored.len(), effect.impact), (0, TreeImpact::None));
    assert_eq!(rank.found(None).unwrap().blocks, 3);
}

#[test]
fn a_block_that_a_batch_removes_and_stores_again_counts_as_before() {
    let mut rank = Rank::new();
    rank.apply(vec![stored(0, 3)]);
    let to_cpu = vec![
        removed_from(Medium::Gpu),
        three(|event| event.location.medium = Medium::Cpu),
    ];
    let effect = rank.apply(to_cpu);
    assert_eq!(effect.unknown_removals, 0);
    let found = rank.found(None).unwrap();
    assert_eq!((found.blocks, found.gpu_blocks), (3, 0));
    // What was not there cannot wait for its removal.
    let effect = rank.apply(vec![removed_from(Medium::Gpu), stored(0, 3)]);
    assert_eq!(effect.unknown_removals, 3);
    assert_eq!(rank.found(None).unwrap().gpu_blocks, 3);
    rank.apply(vec![
        removed_from(Medium::Gpu),
        removed_from(Medium::Cpu),
        Event::Cleared { ownership: None },
        stored(0, 3),
        removed_from(Medium::Gpu),
    ]);
    assert_eq!(rank.found(None), None);
}

#[test]
fn lookups_never_see_the_middle_of_a_batch_as_an_emptied_path() {
    let mut rank = Rank::new();
    rank.apply(vec![stored(0, 3)]);
    let index = rank.index();
    let is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut misses = 0;
            while !is_done.load(Relaxed) {
                let blocks = found(&index, None).map_or(0, |found| found.blocks);
                misses += u32::from(blocks != 3);
            }
            misses
        });
        for _ in 0..2_000 {
            rank.apply(vec![
                removed_from(Medium::Gpu),
                three(|event| event.location.medium = Medium::Cpu),
            ]);
            rank.apply(vec![removed_from(Medium::Cpu), stored(0, 3)]);
        }
        is_done.store(true, Relaxed);
        assert_eq!(reader.join().unwrap(), 0);
    });
}

#[test]
fn a_clear_of_the_engine_makes_a_partial_tree_whole() {
    on_stage(true, async |stage| {
        stage.join_late().await;
        assert_eq!(stage.status().state, "partial");
        let clear = || Event::Cleared { ownership: None };
        // Something is left out after the clear, so the tree is still partial.
        stage
            .say([SourceEvent::Live(frame(6, vec![clear(), stored(1, 2)]))])
            .await;
        assert_eq!(stage.status().state, "partial");
        stage
            .say([SourceEvent::Live(frame(
                7,
                vec![stored(1, 2), clear(), stored(0, 2)],
            ))])
            .await;
        let status = stage.status();
        assert_eq!((status.state, status.reason), ("live", "engine_cleared"));
        assert_eq!(stage.depth(&prompt(2)), 2);
    });
}

#[test]
fn an_event_of_a_later_type_takes_only_the_blocks_that_it_names() {
    on_stage(false, async |stage| {
        let moved = |hashes: &[u64]| Event::Unknown {
            kind: "BlockMoved".into(),
            hashes: Some(hashes.iter().copied().map(EngineHash).collect()),
        };
        stage
            .say([connected(), SourceEvent::Live(frame(0, vec![stored(0, 3)]))])
            .await;
        stage
            .say([SourceEvent::Live(frame(1, vec![moved(&[])]))])
            .await;
        assert_eq!(stage.depth(&prompt(3)), 3);
        assert_eq!(stage.status().state, "live");
        stage
            .say([SourceEvent::Live(frame(2, vec![moved(&[102])]))])
            .await;
        assert_eq!(stage.depth(&prompt(3)), 2);
        assert_eq!(stage.status().resyncs.get("unknown_removal"), None);
    });
}

#[test]
fn a_silent_worker_is_not_exact_until_its_next_event() {
    on_stage(false, async |stage| {
        stage
            .say([connected(), SourceEvent::Live(frame(0, vec![stored(0, 1)]))])
            .await;
        assert!(stage.board.snapshot().all_report);
        assert!(stage.board.set_silent(WORKER) && !stage.board.set_silent(WORKER));
        assert_eq!(stage.board.silent_ranks(), 1);
        assert!(!stage.board.snapshot().all_report);
        assert!(!stage.board.snapshot().reports(WORKER, 1));
        let trees = stage.board.trees(observe::now(), WORKER);
        assert_eq!(trees[0].reason, "silent");
        assert_eq!(stage.status().reason, "silent");
        stage
            .say([SourceEvent::Live(frame(1, vec![stored(1, 2)]))])
            .await;
        assert!(stage.board.snapshot().reports(WORKER, 1));
        assert_eq!(stage.board.silent_ranks(), 0);
        assert_eq!(stage.depth(&prompt(2)), 2);
    });
}
