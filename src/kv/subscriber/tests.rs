mod copied_trees;
mod engines;
mod groups;
mod joins;
mod lookahead;
mod one_batch;
mod pages;
mod recorded_offload;
mod unlike_tiers;
mod unusual_events;

use std::num::NonZeroU32;

use parking_lot::Mutex;
use tokio::sync::mpsc;

use super::*;
use crate::ids::WorkerId;
use crate::kv::event::{EngineHash, Event, Location, Medium, Removed, Stored, Tier};
use crate::kv::event_filter::IgnoredReason;
use crate::kv::index::{CopyReport, NewBlock, Parent};
use crate::kv::indexes::PrefixIndexes;
use crate::kv::source::{DecodeError, SnapshotChunk, SourceBatch};
use crate::kv::{block, indexes, stream};
use crate::observe::metrics::Registry;

/// One rank whose tree is seen, and where it is found.
struct Rank {
    tree: RankTree,
    indexes: Arc<PrefixIndexes>,
}

impl Rank {
    fn new() -> Self {
        let indexes = PrefixIndexes::new(indexes::Settings::default(), &Registry::default());
        let mut tree = RankTree::new(indexes.clone(), &subject());
        tree.set_visible(true);
        Self { tree, indexes }
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
}

/// Sends what the test sends, and passes on what the subscriber asks.
struct Script {
    said: mpsc::UnboundedReceiver<SourceEvent>,
    repeat_reports: mpsc::UnboundedSender<u64>,
    can_replay: bool,
}

impl Source for Script {
    async fn next(&mut self) -> SourceEvent {
        match self.said.recv().await {
            Some(said) => said,
            None => std::future::pending().await,
        }
    }

    fn replay(&mut self, first: u64) {
        let _ = self.repeat_reports.send(first);
    }

    fn can_replay(&self) -> bool {
        self.can_replay
    }
}

struct Stage {
    say: mpsc::UnboundedSender<SourceEvent>,
    repeat_reports: mpsc::UnboundedReceiver<u64>,
    restarts: watch::Sender<u64>,
    indexes: Arc<PrefixIndexes>,
    board: Arc<StatusBoard>,
    registry: Registry,
    /// Who was said to have lost its cache.
    losses: Arc<Mutex<Vec<WorkerId>>>,
}

const SIZE: NonZeroU32 = NonZeroU32::new(4).unwrap();
const WORKER: WorkerId = WorkerId(7);

/// Runs `play` beside a subscriber until it ends.
fn on_stage<F: Future<Output = ()>>(can_replay: bool, play: impl FnOnce(Stage) -> F) {
    let registry = Registry::default();
    let losses: Arc<Mutex<Vec<WorkerId>>> = Arc::default();
    let shared = Shared {
        on_cache_lost: {
            let losses = losses.clone();
            Arc::new(move |worker| losses.lock().push(worker))
        },
        ..shared(
            PrefixIndexes::new(indexes::Settings::default(), &registry),
            &registry,
        )
    };
    let (say, said) = mpsc::unbounded_channel();
    let (ask, repeat_reports) = mpsc::unbounded_channel();
    let (restarts, lives) = watch::channel(0);
    let stage = Stage {
        say,
        repeat_reports,
        restarts,
        indexes: shared.indexes.clone(),
        board: shared.board.clone(),
        registry,
        losses,
    };
    let source = Script {
        said,
        repeat_reports: ask,
        can_replay,
    };
    let subject = subject();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build()
        .unwrap();
    runtime.block_on(async {
        tokio::select! {
            () = run(source, subject, shared, lives) => unreachable!("it never ends"),
            () = play(stage) => {}
        }
    });
}

impl Stage {
    async fn say(&self, said: impl IntoIterator<Item = SourceEvent>) {
        for said in said {
            self.say.send(said).unwrap();
        }
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
    }

    /// The engine replays its sixth batch alone, so the tree is partial.
    async fn join_late(&self) {
        self.say([
            connected(),
            SourceEvent::Replayed(frame(5, vec![stored(0, 1)])),
            SourceEvent::ReplayEnd,
        ])
        .await;
    }

    /// Blocks of the prompt that routing sees.
    fn depth(&self, tokens: &[u32]) -> u32 {
        let mut locals = Vec::new();
        block::hash_blocks(tokens, SIZE, &mut locals);
        let mut found = Vec::new();
        for (_, index) in self.indexes.of("m") {
            index.overlap(block::chain_root(None, None), &locals, &mut found);
        }
        found.iter().map(|depth| depth.blocks).max().unwrap_or(0)
    }

    fn status(&self) -> Status {
        self.board.statuses(observe::now()).remove(0)
    }
}

fn subject() -> Subject {
    Subject {
        worker: WORKER,
        name: "http://a:1".into(),
        address: "a:1".into(),
        rank: 0,
        is_only_rank: false,
        model: "m".into(),
        caches_pages: false,
    }
}

fn subject_of_pages() -> Subject {
    Subject {
        caches_pages: true,
        ..subject()
    }
}

fn shared(indexes: Arc<PrefixIndexes>, registry: &Registry) -> Shared {
    Shared {
        indexes,
        board: Arc::default(),
        metrics: Metrics::new(registry),
        settings: stream::Settings::default(),
        on_cache_lost: Arc::new(|_| {}),
        joins: Joins::new(&super::joins::Settings::default(), registry),
        trees: None,
    }
}

fn frame(sequence: u64, events: Vec<Event>) -> SourceBatch {
    SourceBatch {
        sequence,
        digest: u128::from(sequence),
        bytes: 100,
        batch: Ok(Batch {
            joined: 0,
            timestamp: 0.0,
            rank: None,
            events,
        }),
        snapshot: None,
    }
}

fn of_process(process: u128, mut frame: SourceBatch) -> SourceBatch {
    frame.digest |= process << 64;
    frame
}

fn prompt(blocks: u32) -> Vec<u32> {
    (0..blocks * SIZE.get()).collect()
}

/// The blocks `from..to` of the prompt.
fn stored(from: u32, to: u32) -> Event {
    Event::Stored(Stored {
        hashes: (from..to)
            .map(|block| EngineHash(u64::from(block) + 100))
            .collect(),
        parent: from
            .checked_sub(1)
            .map(|block| EngineHash(u64::from(block) + 100)),
        token_ids: (from * SIZE.get()..to * SIZE.get()).collect(),
        block_size: SIZE.get(),
        ..Stored::default()
    })
}

fn removed(block: u32) -> Event {
    Event::Removed(Removed {
        hashes: vec![EngineHash(u64::from(block) + 100)],
        location: Location::default(),
    })
}

fn connected() -> SourceEvent {
    SourceEvent::Connected { incarnation: None }
}

fn lost() -> SourceEvent {
    SourceEvent::Disconnected {
        reason: "closed".to_owned(),
    }
}

#[test]
fn what_is_replayed_and_then_said_live_is_scored() {
    on_stage(true, async |mut stage| {
        stage.say([connected()]).await;
        assert_eq!(stage.repeat_reports.try_recv(), Ok(0));
        stage
            .say([
                SourceEvent::Live(frame(2, vec![removed(3)])),
                SourceEvent::Replayed(frame(0, vec![stored(0, 2)])),
                SourceEvent::Replayed(frame(1, vec![stored(2, 4)])),
            ])
            .await;
        assert_eq!(stage.depth(&prompt(4)), 0, "the answer has not ended");
        stage.say([SourceEvent::ReplayEnd]).await;
        assert_eq!(stage.depth(&prompt(4)), 3);
        assert_eq!(stage.status().state, "live");
        assert!(
            stage.board.has_events(WORKER) && stage.board.worker_cache(WORKER, 1).unwrap().is_live
        );
        assert!(!stage.board.has_events(WorkerId(8)));
    });
}

#[test]
fn a_worker_stands_as_its_ranks_do_and_what_it_tells_is_remembered_when_asked_for() {
    on_stage(true, async |stage| {
        let worker_cache = || stage.board.worker_cache(WORKER, 1).unwrap();
        stage.say([]).await;
        assert!(!worker_cache().is_live);
        assert_eq!(stage.board.worker_cache(WORKER, 2), None);
        stage
            .say([
                connected(),
                SourceEvent::Replayed(frame(0, vec![stored(0, 2)])),
                SourceEvent::ReplayEnd,
            ])
            .await;
        let before = worker_cache();
        assert!(before.is_live);
        assert_eq!(stage.board.recorded_stores(WORKER), []);
        stage.board.record_stores(WORKER, true);
        let events = vec![removed(1), stored(1, 2), stored(0, 1)];
        stage.say([SourceEvent::Live(frame(1, events))]).await;
        let stores = stage.board.recorded_stores(WORKER);
        assert_eq!(
            stores
                .iter()
                .map(|store| store.is_start)
                .collect::<Vec<_>>(),
            [false, true]
        );
        assert_eq!(&*stores[0].tokens, [4, 5, 6, 7]);
        stage.board.record_stores(WORKER, false);
        assert_eq!(stage.board.recorded_stores(WORKER), []);
        assert_eq!(worker_cache().removed_blocks, before.removed_blocks + 1);
        assert_eq!(worker_cache().cleared_at, before.cleared_at);
        let cleared = Event::Cleared { ownership: None };
        stage
            .say([SourceEvent::Live(frame(2, vec![cleared]))])
            .await;
        assert!(worker_cache().cleared_at > before.cleared_at);
        stage.say([lost()]).await;
        assert!(!worker_cache().is_live);
        let trees = stage.board.trees(observe::now(), WORKER);
        assert_eq!((trees.len(), trees[0].state), (1, "stale"));
    });
}

#[test]
fn a_cache_that_was_cleared_or_is_another_processs_is_called_lost() {
    on_stage(true, async |stage| {
        let cleared = Event::Cleared { ownership: None };
        stage
            .say([
                connected(),
                SourceEvent::Replayed(frame(0, vec![stored(0, 2)])),
                SourceEvent::ReplayEnd,
            ])
            .await;
        assert!(stage.losses.lock().is_empty());
        stage
            .say([SourceEvent::Live(frame(1, vec![cleared]))])
            .await;
        assert_eq!(*stage.losses.lock(), [WORKER]);
        let other = of_process(1, frame(1, vec![stored(0, 1)]));
        stage
            .say([
                lost(),
                connected(),
                SourceEvent::Replayed(other),
                SourceEvent::ReplayEnd,
            ])
            .await;
        assert_eq!(*stage.losses.lock(), [WORKER; 2]);
    });
}

#[test]
fn what_was_cleared_in_the_past_is_no_loss() {
    on_stage(true, async |stage| {
        let cleared = || Event::Cleared { ownership: None };
        let chunk = |sequence, index| SourceBatch {
            snapshot: Some(SnapshotChunk {
                index,
                count: 2,
                unknown_before: 0,
            }),
            ..frame(sequence, vec![cleared(), stored(0, 2)])
        };
        stage
            .say([
                connected(),
                SourceEvent::Replayed(frame(0, vec![stored(0, 2), cleared(), stored(0, 1)])),
                SourceEvent::ReplayEnd,
            ])
            .await;
        assert_eq!(stage.depth(&prompt(2)), 1);
        stage
            .say([
                SourceEvent::Live(chunk(8, 0)),
                SourceEvent::Live(chunk(9, 1)),
            ])
            .await;
        assert_eq!(stage.depth(&prompt(2)), 2);
        assert!(stage.losses.lock().is_empty());
        stage
            .say([SourceEvent::Live(frame(10, vec![cleared()]))])
            .await;
        assert_eq!(*stage.losses.lock(), [WORKER]);
    });
}

#[test]
fn why_a_replay_failed_or_a_batch_cannot_be_read_is_shown() {
    on_stage(true, async |stage| {
        let failed = || SourceEvent::ReplayFailed {
            reason: "refused".to_owned(),
        };
        stage.say([connected(), failed()]).await;
        assert_eq!(stage.status().replay_error.as_deref(), Some("refused"));
        let mut unreadable = frame(0, vec![]);
        unreadable.batch = Err(DecodeError("no map".to_owned()));
        stage.say([SourceEvent::Live(unreadable)]).await;
        assert_eq!(stage.status().decode_error.as_deref(), Some("no map"));
        stage.say([SourceEvent::ReplayEnd]).await;
        assert_eq!(stage.status().replay_error, None);
    });
}

#[test]
fn a_rank_has_its_figures_among_the_metrics() {
    on_stage(true, async |stage| {
        let value = |name: &str| {
            let text = stage.registry.text();
            let start = format!("warmroute_kv_{name}{{rank=\"0\",worker=\"http://a:1\"}} ");
            let value = text.lines().find_map(|line| line.strip_prefix(&start));
            value.unwrap().parse::<f64>().unwrap()
        };
        stage.say([]).await;
        assert_eq!((value("connected"), value("last_sequence")), (0.0, -1.0));
        stage
            .say([
                connected(),
                SourceEvent::Replayed(frame(0, vec![stored(0, 2)])),
                SourceEvent::ReplayEnd,
            ])
            .await;
        assert_eq!((value("connected"), value("last_sequence")), (1.0, 0.0));
        assert!(value("memory_bytes") > 0.0);
        stage.say([SourceEvent::Live(frame(1, vec![]))]).await;
        assert!(value("last_lag_seconds") > 1e9, "stamped 1970");
        stage.say([lost()]).await;
        assert_eq!(value("connected"), 0.0);
    });
}

#[test]
fn a_tree_that_others_stores_cut_does_not_count_as_whole_for_long() {
    let registry = Registry::default();
    let indexes = PrefixIndexes::new(
        indexes::Settings {
            max_index_memory: 4 << 20,
        },
        &registry,
    );
    let (_say, said) = mpsc::unbounded_channel();
    let (repeat_reports, _asked) = mpsc::unbounded_channel();
    let mut source = Script {
        said,
        repeat_reports,
        can_replay: false,
    };
    let mut now = observe::now();
    let mut task = Task::new(now, subject(), shared(indexes.clone(), &registry));
    let runtime = tokio::runtime::Builder::new_current_thread()
        .build()
        .unwrap();
    runtime.block_on(async {
        let first = SourceEvent::Live(frame(0, vec![stored(0, 5_000)]));
        for said in [connected(), first] {
            task.handle(now, Input::Source(said), &mut source).await;
        }
        assert_eq!(task.state, State::Live);
        let mut other = indexes.index(&"m".into(), SIZE).add_tree(WorkerId(8), 0);
        for chain in 1..200_u64 {
            let new = |at| NewBlock {
                name: EngineHash(chain << 32 | at),
                local: block::LocalHash(chain << 32 | at),
            };
            let blocks: Vec<NewBlock> = (0..1_000).map(new).collect();
            let after = Parent::Root(block::chain_root(None, None));
            other
                .store(after, &blocks, Tier::Gpu, CopyReport::OneMore)
                .unwrap();
        }
        assert!(task.tree.tree().unwrap().1.len() < 5_000);
        assert_eq!(task.state, State::Live, "no replay was asked for");
        // It is woken for that, though nothing is said.
        for _ in 0..4 {
            let Some(at) = task.next_wake() else {
                break;
            };
            now = at;
            task.handle(now, Input::Timer, &mut source).await;
        }
        assert_eq!(task.state, State::Partial);
        assert_eq!(task.stream.reason().as_str(), "incomplete");
    });
}

#[test]
fn a_rank_for_which_the_index_has_no_place_is_told_as_such() {
    let registry = Registry::default();
    let indexes = PrefixIndexes::new(indexes::Settings::default(), &registry);
    let index = indexes.index(&"m".into(), SIZE);
    // As many as an index can tell apart, and one more.
    let mut trees: Vec<_> = (0..24_001)
        .map(|other| index.add_tree(WorkerId(100 + other), 0))
        .collect();
    let mut ground = RankTree::new(indexes, &subject());
    let ignored = |ground: &mut RankTree, events| {
        let mut effect = BatchEffect::default();
        let batch = Batch {
            joined: 0,
            timestamp: 0.0,
            rank: None,
            events,
        };
        ground.apply(&batch, &mut effect);
        assert_eq!(effect.impact, TreeImpact::Incomplete);
        effect.ignored
    };
    let left = ignored(&mut ground, vec![stored(0, 1), stored(1, 2)]);
    assert_eq!(left, [IgnoredReason::IndexFull; 2]);
    trees.truncate(2);
    ground.clear();
    let left = ignored(&mut ground, vec![stored(0, 1), stored(2, 3)]);
    assert_eq!(left, [IgnoredReason::UnknownParent]);
}

#[test]
fn a_lost_connection_stops_scoring_until_the_process_is_proved() {
    on_stage(true, async |mut stage| {
        stage
            .say([
                connected(),
                SourceEvent::Replayed(frame(0, vec![stored(0, 2)])),
            ])
            .await;
        stage.say([SourceEvent::ReplayEnd, lost()]).await;
        assert_eq!(stage.depth(&prompt(2)), 0);
        assert_eq!(stage.status().state, "stale");
        assert!(!stage.board.worker_cache(WORKER, 1).unwrap().is_live);
        stage.say([connected()]).await;
        assert_eq!(stage.depth(&prompt(2)), 0);
        stage
            .say([
                SourceEvent::Replayed(frame(0, vec![stored(0, 2)])),
                SourceEvent::ReplayEnd,
            ])
            .await;
        assert_eq!(stage.depth(&prompt(2)), 2);
        assert_eq!(stage.repeat_reports.try_recv(), Ok(0));
    });
}

#[test]
fn a_restarted_engine_at_the_same_number_is_found_out() {
    on_stage(true, async |stage| {
        stage
            .say([
                connected(),
                SourceEvent::Replayed(frame(0, vec![stored(0, 2)])),
            ])
            .await;
        stage
            .say([SourceEvent::ReplayEnd, lost(), connected()])
            .await;
        let new = of_process(1, frame(0, vec![stored(0, 1)]));
        stage
            .say([SourceEvent::Replayed(new.clone()), SourceEvent::ReplayEnd])
            .await;
        assert_eq!(stage.depth(&prompt(2)), 0);
        stage
            .say([SourceEvent::Replayed(new), SourceEvent::ReplayEnd])
            .await;
        assert_eq!(stage.depth(&prompt(2)), 1);
        assert_eq!(stage.status().resyncs["engine_restarted"], 1);
    });
}

#[test]
fn a_new_life_makes_a_source_without_replays_forget() {
    on_stage(false, async |stage| {
        stage
            .say([connected(), SourceEvent::Live(frame(0, vec![stored(0, 2)]))])
            .await;
        assert_eq!(stage.depth(&prompt(2)), 2);
        stage.restarts.send(1).unwrap();
        stage.say([]).await;
        assert_eq!(stage.depth(&prompt(2)), 0);
        stage
            .say([SourceEvent::Live(frame(1, vec![stored(0, 1)]))])
            .await;
        assert_eq!(stage.depth(&prompt(2)), 1);
        assert_eq!(stage.status().state, "partial");
    });
}

#[test]
fn what_cannot_be_read_or_understood_forgets_all_before_it() {
    on_stage(false, async |stage| {
        stage
            .say([connected(), SourceEvent::Live(frame(0, vec![stored(0, 2)]))])
            .await;
        let mut unreadable = frame(1, vec![]);
        unreadable.batch = Err(DecodeError("bytes".to_owned()));
        stage.say([SourceEvent::Live(unreadable)]).await;
        assert_eq!(stage.depth(&prompt(2)), 0);
        let unknown = Event::Unknown {
            kind: "Moved".into(),
            hashes: None,
        };
        stage
            .say([SourceEvent::Live(frame(
                2,
                vec![stored(0, 2), unknown, stored(0, 1)],
            ))])
            .await;
        assert_eq!(stage.depth(&prompt(2)), 0);
        let status = stage.status();
        assert_eq!(status.resyncs["undecodable"], 1);
        assert_eq!(status.resyncs["unknown_removal"], 1);
        assert_eq!(status.ignored_events["unknown_event"], 1);
        let error = status.decode_error.unwrap();
        assert!(error.contains("type 'Moved'"), "{error}");
    });
}

#[test]
fn a_removal_from_a_medium_never_heard_of_forgets_the_block() {
    on_stage(false, async |stage| {
        stage
            .say([
                connected(),
                SourceEvent::Live(frame(0, vec![stored(0, 3), stored(0, 3)])),
            ])
            .await;
        let event = Event::Removed(Removed {
            hashes: vec![EngineHash(102)],
            location: Location {
                medium: Medium::Other("HBM".into()),
                ..Location::default()
            },
        });
        stage.say([SourceEvent::Live(frame(1, vec![event]))]).await;
        assert_eq!(stage.depth(&prompt(3)), 2);
    });
}

#[test]
fn a_block_after_an_unknown_one_is_left_out_and_the_rest_is_partial() {
    on_stage(false, async |stage| {
        stage
            .say([
                connected(),
                SourceEvent::Live(frame(0, vec![stored(0, 1), stored(2, 3)])),
            ])
            .await;
        assert_eq!(stage.depth(&prompt(3)), 1);
        stage.say([SourceEvent::Live(frame(1, vec![]))]).await;
        let status = stage.status();
        assert_eq!((status.state, status.reason), ("partial", "incomplete"));
        assert_eq!(status.ignored_events["unknown_parent"], 1);
    });
}

#[test]
fn a_rank_whose_first_replay_broke_off_is_not_settled_and_does_not_count_where_it_is_not_wanted() {
    on_stage(true, async |stage| {
        let settled = |is_wanted: bool| stage.board.settled(|worker| is_wanted && worker == WORKER);
        stage.say([connected()]).await;
        assert_eq!((settled(true), settled(false)), ((1, 0), (0, 0)));
        stage.say([lost()]).await;
        assert_eq!((settled(true), settled(false)), ((1, 0), (0, 0)));
        stage.join_late().await;
        assert_eq!((settled(true), settled(false)), ((1, 1), (0, 0)));
    });
}

#[test]
fn nothing_is_left_of_a_subscriber_that_ended() {
    let mut left = None;
    let passed = &mut left;
    on_stage(false, async move |stage| {
        stage
            .say([connected(), SourceEvent::Live(frame(0, vec![stored(0, 2)]))])
            .await;
        assert!(stage.registry.text().contains("http://a:1"));
        *passed = Some(stage);
    });
    let stage = left.unwrap();
    assert_eq!(stage.depth(&prompt(2)), 0);
    assert!(!stage.board.has_events(WORKER));
    assert!(stage.board.statuses(observe::now()).is_empty());
    assert!(!stage.registry.text().contains("http://a:1"));
}

#[test]
fn two_of_a_kind_share_labels_until_the_last_one_goes() {
    let registry = Registry::default();
    let metrics = Metrics::new(&registry);
    let name: Arc<str> = "a".into();
    let (old, new) = (metrics.of(&name, 0), metrics.of(&name, 0));
    drop(old);
    new.events.inc();
    assert!(
        registry
            .text()
            .contains("warmroute_kv_events_total{rank=\"0\",worker=\"a\"} 1")
    );
    drop(new);
    assert!(!registry.text().contains("worker=\"a\""));
}

#[test]
fn the_task_can_be_spawned() {
    fn check<T: Send>(_: T) {}
    let (_say, said) = mpsc::unbounded_channel();
    let (repeat_reports, _) = mpsc::unbounded_channel();
    let registry = Registry::default();
    let source = Script {
        said,
        repeat_reports,
        can_replay: false,
    };
    let indexes = PrefixIndexes::new(indexes::Settings::default(), &registry);
    let shared = shared(indexes, &registry);
    check(run(source, subject(), shared, watch::channel(0).1));
}
