use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use proptest::prelude::*;

use super::store::SHARDS;
use super::*;
use crate::ids::{ResponseId, Root, Tenant};
use crate::observe;
use crate::observe::metrics::Registry;
use crate::store::log::LogState;
use crate::store::record::{Content, Retention};
use crate::store::{RetentionSettings, RoutingHint, Status};

/// A store whose clock stands still until it is moved.
struct Paused {
    memory: Memory,
    now: Arc<Mutex<Instant>>,
}

fn paused(settings: &Settings) -> Paused {
    let now = Arc::new(Mutex::new(observe::now()));
    let clock = now.clone();
    let memory = Memory::with_clock(
        settings,
        &RetentionSettings::default(),
        &Registry::default(),
        Arc::new(move || *clock.lock()),
    );
    Paused { memory, now }
}

impl Paused {
    fn pass(&self, seconds: u64) {
        *self.now.lock() += Duration::from_secs(seconds);
    }

    fn cost(&self) -> u64 {
        self.memory
            .shards
            .iter()
            .map(|shard| shard.lock().cost())
            .sum()
    }

    fn ids(&self) -> usize {
        self.memory
            .shards
            .iter()
            .map(|shard| shard.lock().ids().len())
            .sum()
    }
}

/// Nothing here waits.
fn now<T>(asked: StoreFuture<'_, T>) -> Result<T, Error> {
    let runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = { runtime }.build().unwrap();
    runtime.block_on(asked)
}

fn key(number: u64) -> ResponseKey {
    ResponseKey {
        tenant: Tenant::tagged(1),
        id: ResponseId::new(Root(number), number.into()),
    }
}

fn record(begin: InitialState, bytes: usize) -> NewRecord {
    NewRecord {
        token: IdempotencyToken(1),
        parent: None,
        hint: RoutingHint {
            model: "m".into(),
            worker: None,
        },
        input: vec![b' '; bytes].into(),
        content: Content::default(),
        initial: begin,
    }
}

fn finished(bytes: usize) -> NewRecord {
    let status = Status::Completed;
    record(InitialState::Finished { status }, bytes)
}

const ANY: HistoryLimits = HistoryLimits {
    turns: usize::MAX,
    bytes: u64::MAX,
};

const FENCE: FencingToken = FencingToken {
    owner: Owner(1),
    number: 1,
};

fn running(bytes: usize) -> NewRecord {
    let begin = InitialState::Background {
        fence: FENCE,
        retention: Retention::Stored,
        streams: true,
        request: Bytes::new(),
    };
    record(begin, bytes)
}

fn ending() -> Finalization {
    Finalization {
        commit: None,
        retention: Retention::Stored,
        token: IdempotencyToken(2),
        status: Status::Completed,
        content: Content::default(),
        hint: RoutingHint {
            model: "m".into(),
            worker: None,
        },
        batch: None,
        delta_table: Bytes::from_static(b"cut"),
    }
}

fn room(max_records: u64, max_size: u64) -> Settings {
    Settings {
        max_records,
        max_size,
    }
}

#[test]
fn the_longest_unused_makes_way_wherever_it_lies() {
    let store = paused(&room(3, 1 << 20));
    for number in 0..3 {
        now(store.memory.create(key(number), finished(1))).unwrap();
    }
    assert!(now(store.memory.get(key(0))).unwrap().is_some());
    now(store.memory.create(key(3), finished(1))).unwrap();
    let there = |number| now(store.memory.get(key(number))).unwrap().is_some();
    assert_eq!(
        [there(0), there(1), there(2), there(3)],
        [true, false, true, true]
    );
}

#[test]
fn what_runs_never_makes_way_and_fills_no_more_than_half() {
    let store = paused(&room(8, 1 << 20));
    for number in 0..4 {
        now(store.memory.create(key(number), running(1))).unwrap();
    }
    assert!(matches!(now(store.memory.admit()), Err(Error::Full { .. })));
    let refused = now(store.memory.create(key(9), running(1)));
    assert!(matches!(refused, Err(Error::Full { .. })));
    for number in 10..30 {
        now(store.memory.create(key(number), finished(1))).unwrap();
    }
    for number in 0..4 {
        assert!(now(store.memory.get(key(number))).unwrap().is_some());
    }
    assert_eq!(store.ids(), 8);
    // One that ends makes room for another.
    assert_eq!(
        now(store.memory.finalize(key(0), FENCE, ending())),
        Ok(WriteOutcome::Done)
    );
    now(store.memory.create(key(9), running(1))).unwrap();
}

#[test]
fn running_work_that_fills_its_half_goes_on_without_its_events() {
    let store = paused(&room(100, 1 << 20));
    now(store.memory.create(key(0), running(400 << 10))).unwrap();
    let batch = |first| EventBatch {
        first,
        last: first,
        bytes: vec![b'x'; 100 << 10].into(),
        tokens: Bytes::new(),
    };
    assert_eq!(
        now(store.memory.append(key(0), FENCE, batch(0))),
        Ok(WriteOutcome::Done)
    );
    assert_eq!(
        now(store.memory.append(key(0), FENCE, batch(1))),
        Ok(WriteOutcome::Overflow)
    );
    let events = now(store.memory.events(key(0), None, 1)).unwrap().unwrap();
    assert_eq!((events.log, events.last), (LogState::Overflowed, Some(1)));
    assert!(events.batches.is_empty());
}

#[test]
fn what_a_long_run_continues_is_kept_as_long_as_its_response() {
    let store = paused(&Settings::default());
    let days = |count: u64| count * 24 * 3_600;
    let at = |own: u128| ResponseKey {
        id: ResponseId::new(Root(0), own),
        ..key(0)
    };
    let chain = |own: u128| match now(store.memory.history(at(own), ANY)).unwrap() {
        History::Found(turns) => Some(turns.chain),
        other => panic!("{other:?}"),
    };
    now(store.memory.create(at(0), finished(1))).unwrap();
    let mut new = finished(1);
    new.parent = chain(0);
    now(store.memory.create(at(1), new)).unwrap();
    store.pass(days(29));
    let mut new = running(1);
    new.parent = chain(1);
    now(store.memory.create(at(2), new)).unwrap();
    // The run lasts for longer than a response is kept.
    for _ in 0..3 {
        store.pass(days(20));
        assert_eq!(now(store.memory.keep_chain(at(2))), Ok(None));
    }
    let ended = now(store.memory.finalize(at(2), FENCE, ending()));
    assert_eq!(ended, Ok(WriteOutcome::Done));
    store.pass(days(29));
    assert_eq!(chain(2).unwrap().ids.len(), 3);
    store.pass(days(2));
    assert_eq!(now(store.memory.keep_chain(at(2))), Ok(Some(at(2).id)));
}

#[test]
fn a_record_expires_after_its_time_and_a_log_before_it() {
    let store = paused(&Settings::default());
    now(store.memory.create(key(0), finished(1))).unwrap();
    now(store.memory.create(key(1), running(1))).unwrap();
    let batch = EventBatch {
        first: 0,
        last: 0,
        bytes: Bytes::from_static(b"x"),
        tokens: Bytes::new(),
    };
    assert_eq!(
        now(store.memory.append(key(1), FENCE, batch)),
        Ok(WriteOutcome::Done)
    );
    assert_eq!(
        now(store.memory.finalize(key(1), FENCE, ending())),
        Ok(WriteOutcome::Done)
    );
    let kept = || {
        now(store.memory.events(key(1), None, 9))
            .unwrap()
            .unwrap()
            .log
    };
    store.pass(599);
    assert_eq!(kept(), LogState::Whole);
    store.pass(1);
    assert_eq!(kept(), LogState::Expired(Bytes::from_static(b"cut")));
    store.pass(30 * 24 * 3_600);
    assert!(now(store.memory.get(key(0))).unwrap().is_none());
    assert!(now(store.memory.get(key(1))).unwrap().is_none());
    assert_eq!((store.cost(), store.memory.capacity.bytes()), (0, 0));
}

#[test]
fn one_for_polling_only_goes_soon_after_its_end() {
    let store = paused(&Settings::default());
    let mut new = running(1);
    if let InitialState::Background { retention, .. } = &mut new.initial {
        *retention = Retention::Ephemeral;
    }
    now(store.memory.create(key(0), new)).unwrap();
    store.pass(100_000);
    assert!(now(store.memory.get(key(0))).unwrap().is_some());
    assert_eq!(
        now(store.memory.finalize(key(0), FENCE, ending())),
        Ok(WriteOutcome::Done)
    );
    store.pass(599);
    assert!(now(store.memory.get(key(0))).unwrap().is_some());
    store.pass(1);
    // It is not read; whatever its shard is asked next drops it.
    let neighbour = key(SHARDS as u64);
    assert!(now(store.memory.get(neighbour)).unwrap().is_none());
    assert_eq!(store.ids(), 0);
}

#[test]
fn what_it_keeps_is_not_the_buffer_that_it_came_in() {
    let store = paused(&Settings::default());
    let large = Bytes::from(vec![b'x'; 1 << 20]);
    let mut new = finished(0);
    new.input = large.slice(..10);
    now(store.memory.create(key(0), new)).unwrap();
    assert!(large.is_unique());
}

#[derive(Clone, Debug)]
enum Step {
    Create {
        number: u64,
        bytes: usize,
        runs: bool,
    },
    Get(u64),
    Append(u64),
    Finalize(u64),
    Delete(u64),
    Pass(u64),
}

fn step() -> impl Strategy<Value = Step> {
    let number = || 0..200_u64;
    prop_oneof![
        4 => (number(), 0..20_000_usize, any::<bool>())
            .prop_map(|(number, bytes, runs)| Step::Create { number, bytes, runs }),
        2 => number().prop_map(Step::Get),
        2 => number().prop_map(Step::Append),
        2 => number().prop_map(Step::Finalize),
        1 => number().prop_map(Step::Delete),
        1 => (1..2_000_000_u64).prop_map(Step::Pass),
    ]
}

proptest! {
    #[test]
    fn the_books_are_right_and_the_bounds_hold(steps in proptest::collection::vec(step(), 1..200)) {
        let store = paused(&room(50, 1 << 20));
        let mut runs = std::collections::HashSet::new();
        for step in steps {
            match step {
                Step::Create { number, bytes, runs: true } => {
                    if now(store.memory.create(key(number), running(bytes))) == Ok(()) {
                        let got = now(store.memory.get(key(number))).unwrap().unwrap();
                        if !got.status.is_terminal() {
                            runs.insert(number);
                        }
                    }
                }
                Step::Create { number, bytes, runs: false } => {
                    now(store.memory.create(key(number), finished(bytes))).unwrap();
                }
                Step::Get(number) => drop(now(store.memory.get(key(number))).unwrap()),
                Step::Append(number) => {
                    let got = now(store.memory.get(key(number))).unwrap();
                    let last = got.and_then(|got| got.background?.last_event);
                    let first = last.map_or(0, |last| last + 1);
                    let batch = EventBatch { first, last: first, bytes: vec![0; 3_000].into(), tokens: Bytes::new() };
                    let _ = now(store.memory.append(key(number), FENCE, batch)).unwrap();
                }
                Step::Finalize(number) => {
                    let _ = now(store.memory.finalize(key(number), FENCE, ending())).unwrap();
                    runs.remove(&number);
                }
                Step::Delete(number) => {
                    let _ = now(store.memory.delete(key(number))).unwrap();
                    runs.remove(&number);
                }
                Step::Pass(seconds) => store.pass(seconds),
            }
            prop_assert_eq!(store.cost(), store.memory.capacity.bytes());
            prop_assert_eq!(store.ids() as u64, store.memory.capacity.records());
            prop_assert!(store.memory.capacity.bytes() <= 1 << 20);
            prop_assert!(store.memory.capacity.records() <= 50);
            for number in &runs {
                prop_assert!(now(store.memory.get(key(*number))).unwrap().is_some());
            }
        }
    }
}
