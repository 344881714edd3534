//! Random operations on a store against the plainest model of one: a map.

use std::collections::{HashMap, HashSet};

use bytes::Bytes;
use proptest::prelude::*;
use warmroute::store::log::LogState;
use warmroute::store::{
    CancelOutcome, CancelledOutput, DeleteOutcome, Error, History, LoggedEvents, Orphan,
    OwnershipLoss, Takeover, WriteOutcome,
};

use super::*;

const KEYS: usize = 6;
const LOG_BYTES_MAX: usize = 40;

#[derive(Clone, Debug)]
enum Op {
    Create {
        key: usize,
        parent: Option<usize>,
        how: How,
        token: u64,
    },
    Get(usize),
    Input(usize),
    History(usize),
    Delete(usize),
    Start(usize, By),
    Append {
        key: usize,
        by: By,
        skip: i64,
        count: u64,
    },
    Finalize {
        key: usize,
        by: By,
        status: Status,
        token: u64,
        skip: Option<i64>,
    },
    Cancel {
        key: usize,
        token: u64,
    },
    FinalizeCancelled(usize, By),
    Events {
        key: usize,
        after: Option<u64>,
    },
    Heartbeat(usize),
    EndLease(usize),
    Check(By),
    Orphans,
    TakeOver {
        key: usize,
        by: usize,
        stale: bool,
    },
    Release(usize, By),
}

#[derive(Clone, Copy, Debug)]
enum How {
    Finished(Status),
    Background(Retention, usize),
}

/// A writer's right: an owner's number, and by how much its epoch is off.
#[derive(Clone, Copy, Debug)]
struct By {
    owner: usize,
    off: u64,
}

fn ended() -> impl Strategy<Value = Status> {
    prop_oneof![
        4 => Just(Status::Completed),
        1 => Just(Status::Incomplete),
        1 => Just(Status::Failed),
    ]
}

fn skip() -> impl Strategy<Value = i64> {
    prop_oneof![6 => Just(0), 1 => Just(-1), 1 => Just(1)]
}

fn by() -> impl Strategy<Value = By> {
    let off = prop_oneof![5 => Just(0), 1 => Just(1)];
    (0..2_usize, off).prop_map(|(owner, off)| By { owner, off })
}

fn how() -> impl Strategy<Value = How> {
    let retention = prop_oneof![3 => Just(Retention::Stored), 1 => Just(Retention::Ephemeral)];
    let background = (retention, 0..2_usize);
    prop_oneof![
        1 => ended().prop_map(How::Finished),
        3 => background.prop_map(|(retention, owner)| How::Background(retention, owner)),
    ]
}

fn op() -> impl Strategy<Value = Op> {
    let key = || 0..KEYS;
    let create = (key(), proptest::option::of(key()), how(), 0..3_u64);
    let append = (key(), by(), skip(), 1..4_u64);
    let finalize = (key(), by(), ended(), 0..3_u64, proptest::option::of(skip()));
    let events = (key(), proptest::option::of(0..9_u64));
    let adopt = (key(), 0..2_usize, any::<bool>());
    prop_oneof![
        6 => create.prop_map(|(key, parent, how, token)| Op::Create { key, parent, how, token }),
        1 => key().prop_map(Op::Get),
        1 => key().prop_map(Op::Input),
        3 => key().prop_map(Op::History),
        1 => key().prop_map(Op::Delete),
        2 => (key(), by()).prop_map(|(key, by)| Op::Start(key, by)),
        6 => append.prop_map(|(key, by, skip, count)| Op::Append { key, by, skip, count }),
        3 => finalize.prop_map(|(key, by, status, token, skip)| {
            Op::Finalize { key, by, status, token, skip }
        }),
        2 => (key(), 3..5_u64).prop_map(|(key, token)| Op::Cancel { key, token }),
        2 => (key(), by()).prop_map(|(key, by)| Op::FinalizeCancelled(key, by)),
        3 => events.prop_map(|(key, after)| Op::Events { key, after }),
        1 => (0..2_usize).prop_map(Op::Heartbeat),
        1 => (0..2_usize).prop_map(Op::EndLease),
        1 => by().prop_map(Op::Check),
        2 => Just(Op::Orphans),
        3 => adopt.prop_map(|(key, by, stale)| Op::TakeOver { key, by, stale }),
        1 => (key(), by()).prop_map(|(key, by)| Op::Release(key, by)),
    ]
}

struct Row {
    token: IdempotencyToken,
    status: Status,
    input: Bytes,
    content: Content,
    chain: Vec<ResponseKey>,
    run: Option<Running>,
}

struct Running {
    owner: Option<Owner>,
    fencing_number: u64,
    attempts: u32,
    started: Option<u64>,
    lost_owners: u32,
    has_output_pending: bool,
    retention: Retention,
    log: Vec<EventBatch>,
    last: Option<u64>,
    full: bool,
    ended_by: Option<IdempotencyToken>,
    was: Option<Status>,
    amended: bool,
}

#[derive(Default)]
struct Model {
    rows: HashMap<ResponseKey, Row>,
    alive: HashSet<Owner>,
}

impl Row {
    fn refuses(&self, fence: FencingToken) -> Option<WriteOutcome> {
        let Some(run) = &self.run else {
            return Some(WriteOutcome::Terminal(self.status));
        };
        if (run.owner, run.fencing_number) != (Some(fence.owner), fence.number) {
            return Some(WriteOutcome::Fenced);
        }
        self.status
            .is_terminal()
            .then_some(WriteOutcome::Terminal(self.status))
    }

    /// Whether this owner may release it though it was cancelled.
    fn is_pending(&self, fence: FencingToken) -> bool {
        self.run.as_ref().is_some_and(|run| {
            run.has_output_pending
                && (run.owner, run.fencing_number) == (Some(fence.owner), fence.number)
        })
    }

    fn log(&mut self, batch: &EventBatch) -> WriteOutcome {
        let run = self.run.as_mut().unwrap();
        let next = run.last.map_or(0, |last| last + 1);
        if batch.first != next {
            return match run.last {
                Some(last) if batch.last <= last => WriteOutcome::Duplicate { last },
                last => WriteOutcome::Gap { last },
            };
        }
        run.last = Some(batch.last);
        run.log.push(batch.clone());
        let bytes = |log: &[EventBatch]| log.iter().map(|batch| batch.bytes.len()).sum::<usize>();
        while bytes(&run.log) > LOG_BYTES_MAX {
            run.full = true;
            run.log.remove(0);
        }
        if run.full {
            WriteOutcome::Overflow
        } else {
            WriteOutcome::Done
        }
    }

    fn end(&mut self, status: Status, token: IdempotencyToken, content: Content) {
        self.status = status;
        self.content = content;
        self.run.as_mut().unwrap().ended_by = Some(token);
    }
}

/// A case's names, which no other case has.
struct Names {
    keys: Vec<ResponseKey>,
    owners: [Owner; 2],
}

impl Names {
    fn new() -> Self {
        let (first, second) = (new_key(), new_key());
        let keys = (0..KEYS).map(|place| child(if place < KEYS / 2 { first } else { second }));
        Self {
            keys: keys.collect(),
            owners: [(); 2].map(|()| Owner(fastrand::u64(..))),
        }
    }
}

/// Does one operation on both, and compares what they say.
async fn step(store: &Store, model: &mut Model, names: &Names, op: &Op) {
    let key = |place: &usize| names.keys[*place];
    let fence = |model: &Model, place: &usize, by: &By| FencingToken {
        owner: names.owners[by.owner],
        number: by.off
            + model.rows.get(&key(place)).map_or(1, |row| {
                row.run.as_ref().map_or(1, |run| run.fencing_number)
            }),
    };
    match op {
        Op::Create {
            key: place,
            parent,
            how,
            token,
        } => {
            create(
                store,
                model,
                names,
                (key(place), parent.map(|parent| key(&parent))),
                *how,
                IdempotencyToken(*token),
            )
            .await;
        }
        Op::Get(place) => {
            let found = store.get(key(place)).await.unwrap();
            let row = model.rows.get(&key(place));
            assert_eq!(found.is_some(), row.is_some());
            if let (Some(found), Some(row)) = (found, row) {
                assert_eq!((found.status, &found.content), (row.status, &row.content));
                assert_eq!(found.previous, row.chain.last().map(|key| key.id));
                let background = row.run.as_ref().map(|run| {
                    (
                        run.owner,
                        run.fencing_number,
                        run.attempts,
                        run.retention,
                        run.last,
                    )
                });
                let found = found.background.map(|run| {
                    (
                        run.owner,
                        run.fencing_number,
                        run.attempts,
                        run.retention,
                        run.last_event,
                    )
                });
                assert_eq!(found, background);
            }
        }
        Op::Input(place) => {
            let row = model.rows.get(&key(place)).filter(|row| !is_brief(row));
            let expected = row.map(|row| row.input.clone());
            assert_eq!(store.input(key(place)).await.unwrap(), expected);
        }
        Op::History(place) => {
            let found = store.history(key(place), ANY).await.unwrap();
            match (found, history(model, key(place))) {
                (History::Found(found), Ok(turns)) => {
                    let found: Vec<_> = found
                        .turns
                        .into_iter()
                        .map(|turn| (turn.input, turn.output))
                        .collect();
                    assert_eq!(found, turns);
                }
                (found, Err(expected)) => assert_eq!(found, expected),
                (found, Ok(_)) => panic!("{found:?}"),
            }
        }
        Op::Delete(place) => {
            let expected = match model.rows.remove(&key(place)) {
                None => DeleteOutcome::Gone,
                Some(row) => DeleteOutcome::Done {
                    was: row.status,
                    owner: row
                        .run
                        .and_then(|run| run.owner)
                        .filter(|_| !row.status.is_terminal()),
                },
            };
            assert_eq!(store.delete(key(place)).await.unwrap(), expected);
        }
        Op::Start(place, by) => {
            let fence = fence(model, place, by);
            let expected = match model.rows.get_mut(&key(place)) {
                None => WriteOutcome::Gone,
                Some(row) => row.refuses(fence).unwrap_or_else(|| {
                    row.status = Status::InProgress;
                    row.run.as_mut().unwrap().started = Some(fence.number);
                    WriteOutcome::Done
                }),
            };
            assert_eq!(store.start(key(place), fence).await.unwrap(), expected);
        }
        Op::Append {
            key: place,
            by,
            skip,
            count,
        } => {
            let fence = fence(model, place, by);
            let batch = next_batch(model, key(place), *skip, *count);
            let expected = match model.rows.get_mut(&key(place)) {
                None => WriteOutcome::Gone,
                Some(row) => row.refuses(fence).unwrap_or_else(|| row.log(&batch)),
            };
            assert_eq!(
                store.append(key(place), fence, batch).await.unwrap(),
                expected
            );
        }
        Op::Finalize {
            key: place,
            by,
            status,
            token,
            skip,
        } => {
            let fence = fence(model, place, by);
            let mut end = ending(*status);
            end.token = IdempotencyToken(*token);
            end.batch = skip.map(|skip| next_batch(model, key(place), skip, 1));
            let expected = match model.rows.get_mut(&key(place)) {
                None => WriteOutcome::Gone,
                Some(row) => finalize(row, fence, &end),
            };
            assert_eq!(
                store.finalize(key(place), fence, end).await.unwrap(),
                expected
            );
        }
        Op::Cancel { key: place, token } => {
            let mut cancel = cancelling();
            cancel.token = IdempotencyToken(*token);
            let expected = match model.rows.get_mut(&key(place)) {
                None => CancelOutcome::Gone,
                Some(row) => cancelled(row, &cancel),
            };
            assert_eq!(store.cancel(key(place), cancel).await.unwrap(), expected);
        }
        Op::FinalizeCancelled(place, by) => {
            let fence = fence(model, place, by);
            let content = Content {
                response: Bytes::from_static(b"{}"),
                output: Bytes::from_static(b"[\"amended\"]"),
            };
            let expected = match model.rows.get_mut(&key(place)) {
                None => WriteOutcome::Gone,
                Some(row) => match row.refuses(fence) {
                    None => WriteOutcome::Fenced,
                    Some(WriteOutcome::Terminal(Status::Cancelled))
                        if !row.run.as_ref().unwrap().amended =>
                    {
                        row.run.as_mut().unwrap().has_output_pending = false;
                        row.run.as_mut().unwrap().amended = true;
                        row.content = content.clone();
                        WriteOutcome::Done
                    }
                    Some(refused) => refused,
                },
            };
            let amend = CancelledOutput {
                content,
                delta_table: Bytes::from_static(b"cut"),
            };
            assert_eq!(
                store
                    .finalize_cancelled(key(place), fence, amend)
                    .await
                    .unwrap(),
                expected
            );
        }
        Op::Events { key: place, after } => {
            let found = store.events(key(place), *after, 1 << 20).await.unwrap();
            let expected = model.rows.get(&key(place)).and_then(|row| {
                let run = row.run.as_ref()?;
                let beyond = |batch: &&EventBatch| after.is_none_or(|after| batch.last > after);
                let wanted = after.map_or(0, |after| after + 1);
                let first = run.log.first().map(|batch| batch.first);
                let has_table =
                    row.status.is_terminal() && (row.status != Status::Cancelled || run.amended);
                let log = match run.last.is_none() || first.is_some_and(|first| first <= wanted) {
                    true => LogState::Whole,
                    false if has_table => LogState::Expired(Bytes::from_static(b"cut")),
                    false => LogState::Overflowed,
                };
                let batches = run.log.iter().filter(beyond);
                Some(LoggedEvents {
                    status: row.status,
                    fencing_number: run.fencing_number,
                    batches: match log {
                        LogState::Whole => batches.cloned().collect(),
                        LogState::Expired(_) | LogState::Overflowed => Vec::new(),
                    },
                    last: run.last,
                    log,
                })
            });
            assert_eq!(found, expected);
        }
        Op::Heartbeat(owner) => {
            let owner = names.owners[*owner];
            store.heartbeat(owner, "name", LEASE).await.unwrap();
            model.alive.insert(owner);
        }
        Op::EndLease(owner) => {
            let owner = names.owners[*owner];
            store.end_lease(owner).await.unwrap();
            model.alive.remove(&owner);
        }
        Op::Check(by) => {
            let running: Vec<_> = (0..KEYS)
                .map(|place| (key(&place), fence(model, &place, by)))
                .collect();
            let lost = |(key, fence): &(ResponseKey, FencingToken)| {
                let why = match model.rows.get(key) {
                    None => OwnershipLoss::Gone,
                    Some(row) => match row.refuses(*fence)? {
                        WriteOutcome::Terminal(status) => OwnershipLoss::Terminal(status),
                        _ => OwnershipLoss::Fenced,
                    },
                };
                Some((*key, why))
            };
            let expected: Vec<_> = running.iter().filter_map(lost).collect();
            assert_eq!(store.check_ownership(running).await.unwrap(), expected);
        }
        Op::Orphans => {
            let mut found = store.orphans(1 << 10).await.unwrap();
            // Other cases leave theirs.
            found.retain(|orphan| names.keys.contains(&orphan.key));
            found.sort_by_key(|orphan| orphan.key);
            let mut expected: Vec<_> = model
                .rows
                .iter()
                .filter_map(|(key, row)| orphan(model, *key, row))
                .collect();
            expected.sort_by_key(|orphan| orphan.key);
            assert_eq!(found, expected);
        }
        Op::TakeOver {
            key: place,
            by,
            stale,
        } => {
            let by = names.owners[*by];
            let run = model.rows.get(&key(place)).and_then(|row| row.run.as_ref());
            let orphan = Orphan {
                key: key(place),
                owner: run.and_then(|run| run.owner),
                fencing_number: run.map_or(1, |run| run.fencing_number) + u64::from(*stale),
            };
            let alive = model.alive.clone();
            let expected = match model.rows.get_mut(&orphan.key) {
                None => None,
                Some(row) => adopt(row, &orphan, by, &alive),
            };
            match (store.take_over(orphan, by).await.unwrap(), expected) {
                (Takeover::Done(adopted), Some(attempts)) => {
                    let run = model.rows[&orphan.key].run.as_ref().unwrap();
                    assert_eq!(adopted.lost_owners, run.lost_owners);
                    assert_eq!(
                        (adopted.fence.owner, adopted.fence.number),
                        (by, run.fencing_number)
                    );
                    assert_eq!((adopted.attempts, adopted.last_event), (attempts, run.last));
                    let request = store.request(orphan.key).await.unwrap();
                    assert_eq!(request, Some(Bytes::from_static(b"{\"request\":1}")));
                }
                (Takeover::Done(adopted), None) => panic!("{adopted:?}"),
                (other, Some(_)) => panic!("{other:?}"),
                // Whose lease is looked at before the record, the answer may be either of these.
                (Takeover::Gone, None) => assert!(!model.rows.contains_key(&orphan.key)),
                (Takeover::Terminal(status), None) => {
                    assert_eq!(model.rows[&orphan.key].status, status)
                }
                (Takeover::Raced, None) => {}
            }
        }
        Op::Release(place, by) => {
            let fence = fence(model, place, by);
            let expected = match model.rows.get_mut(&key(place)) {
                None => WriteOutcome::Gone,
                Some(row) => row
                    .refuses(fence)
                    .filter(|_| !row.is_pending(fence))
                    .unwrap_or_else(|| {
                        let run = row.run.as_mut().unwrap();
                        run.owner = None;
                        run.fencing_number += 1;
                        WriteOutcome::Done
                    }),
            };
            assert_eq!(store.release(key(place), fence).await.unwrap(), expected);
        }
    }
}

async fn create(
    store: &Store,
    model: &mut Model,
    names: &Names,
    (key, parent): (ResponseKey, Option<ResponseKey>),
    how: How,
    token: IdempotencyToken,
) {
    let mut new = match how {
        How::Finished(status) => record(InitialState::Finished { status }),
        How::Background(retention, owner) => record(InitialState::Background {
            fence: FencingToken::first(names.owners[owner]),
            retention,
            streams: true,
            request: Bytes::from_static(b"{\"request\":1}"),
        }),
    };
    new.token = token;
    new.input = format!("[{}]", fastrand::u64(..)).into();
    let mut chain = Vec::new();
    if let Some(parent) = parent
        && parent.id.root() == key.id.root()
        && let History::Found(found) = store.history(parent, ANY).await.unwrap()
        && !found.chain.ids.contains(&key.id)
    {
        chain = found
            .chain
            .ids
            .iter()
            .map(|id| ResponseKey { id: *id, ..key })
            .collect();
        new.parent = Some(found.chain);
    }
    let expected = match model.rows.get(&key) {
        None => Ok(()),
        Some(row) if row.token == token => Ok(()),
        Some(_) => Err(Error::Exists),
    };
    assert_eq!(store.create(key, new.clone()).await, expected);
    model.rows.entry(key).or_insert_with(|| Row {
        token,
        status: match how {
            How::Finished(status) => status,
            How::Background(..) => Status::Queued,
        },
        input: new.input,
        content: new.content,
        chain,
        run: match how {
            How::Finished(_) => None,
            How::Background(retention, owner) => Some(Running {
                owner: Some(names.owners[owner]),
                fencing_number: 1,
                attempts: 1,
                started: None,
                lost_owners: 0,
                has_output_pending: false,
                retention,
                log: Vec::new(),
                last: None,
                full: false,
                ended_by: None,
                was: None,
                amended: false,
            }),
        },
    });
}

fn is_brief(row: &Row) -> bool {
    row.run
        .as_ref()
        .is_some_and(|run| run.retention == Retention::Ephemeral)
}

fn history(model: &Model, key: ResponseKey) -> Result<Vec<(Bytes, Bytes)>, History> {
    let row = model.rows.get(&key).filter(|row| !is_brief(row));
    let row = row.ok_or(History::Missing(key.id))?;
    if !row.status.is_terminal() {
        return Err(History::Running(row.status));
    }
    if !row.status.is_continuable() {
        return Err(History::Ended(row.status));
    }
    let mut turns = vec![(row.input.clone(), row.content.output.clone())];
    for key in row.chain.iter().rev() {
        let row = model.rows.get(key).ok_or(History::Missing(key.id))?;
        turns.push((row.input.clone(), row.content.output.clone()));
    }
    turns.reverse();
    Ok(turns)
}

fn next_batch(model: &Model, key: ResponseKey, skip: i64, count: u64) -> EventBatch {
    let last = model.rows.get(&key).and_then(|row| row.run.as_ref()?.last);
    let next = last.map_or(0, |last| last as i64 + 1);
    let first = (next + skip).max(0) as u64;
    batch(first, first + count - 1)
}

fn finalize(row: &mut Row, fence: FencingToken, end: &Finalization) -> WriteOutcome {
    if row
        .run
        .as_ref()
        .is_some_and(|run| run.ended_by == Some(end.token))
    {
        return WriteOutcome::Done;
    }
    if let Some(refused) = row.refuses(fence) {
        return refused;
    }
    if let Some(batch) = &end.batch {
        match row.log(batch) {
            WriteOutcome::Done | WriteOutcome::Overflow => {}
            refused => return refused,
        }
    }
    row.end(end.status, end.token, end.content.clone());
    WriteOutcome::Done
}

fn cancelled(row: &mut Row, cancel: &Cancellation) -> CancelOutcome {
    let Some(run) = &row.run else {
        return CancelOutcome::NotBackground;
    };
    let (was, owner, last) = (row.status, run.owner, run.last);
    if run.ended_by == Some(cancel.token)
        && let Some(was) = run.was
    {
        return CancelOutcome::Done { was, owner };
    }
    if was.is_terminal() {
        return CancelOutcome::Terminal(was);
    }
    let number = last.map_or(0, |last| last + 1);
    let _ = row.log(&EventBatch {
        first: number,
        last: number,
        bytes: cancel.event.clone(),
        tokens: Bytes::new(),
    });
    let content = Content {
        response: cancel.response.clone(),
        output: row.content.output.clone(),
    };
    row.end(Status::Cancelled, cancel.token, content);
    let run = row.run.as_mut().unwrap();
    run.was = Some(was);
    run.has_output_pending = number > 0 && !run.full;
    CancelOutcome::Done { was, owner }
}

fn orphan(model: &Model, key: ResponseKey, row: &Row) -> Option<Orphan> {
    let runs = !row.status.is_terminal();
    let run = row
        .run
        .as_ref()
        .filter(|run| runs || run.has_output_pending)?;
    let is_alive = run.owner.is_some_and(|owner| model.alive.contains(&owner));
    (!is_alive).then_some(Orphan {
        key,
        owner: run.owner,
        fencing_number: run.fencing_number,
    })
}

/// How often it was started, if it is adopted.
fn adopt(row: &mut Row, orphan: &Orphan, by: Owner, alive: &HashSet<Owner>) -> Option<u32> {
    let runs = !row.status.is_terminal();
    let run = row
        .run
        .as_mut()
        .filter(|run| runs || run.has_output_pending)?;
    let is_free = orphan.owner.is_none_or(|owner| !alive.contains(&owner));
    if !is_free || (run.owner, run.fencing_number) != (orphan.owner, orphan.fencing_number) {
        return None;
    }
    if runs {
        run.attempts += u32::from(run.started == Some(run.fencing_number));
        run.lost_owners += u32::from(run.owner.is_some());
    }
    run.owner = Some(by);
    run.fencing_number += 1;
    Some(run.attempts)
}

fn run_against_the_model(store: &Store, runtime: &tokio::runtime::Runtime, cases: u32) {
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig {
        cases,
        failure_persistence: None,
        max_shrink_iters: 400,
        ..ProptestConfig::default()
    });
    let run = |ops: Vec<Op>| {
        let (names, mut model) = (Names::new(), Model::default());
        runtime.block_on(async {
            for op in &ops {
                step(store, &mut model, &names, op).await;
            }
            for key in &names.keys {
                let _ = store.delete(*key).await.unwrap();
            }
            for owner in names.owners {
                store.end_lease(owner).await.unwrap();
            }
        });
        Ok(())
    };
    let ops = proptest::collection::vec(op(), 1..60);
    runner
        .run(&ops, run)
        .unwrap_or_else(|error| panic!("{error}"));
}

fn model_keep() -> RetentionSettings {
    RetentionSettings {
        max_event_log: LOG_BYTES_MAX as u64,
        ..RetentionSettings::default()
    }
}

#[test]
fn the_memory_store_does_as_the_model() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    run_against_the_model(&in_memory(&model_keep()).a, &runtime, 1_000);
}

#[test]
fn redis_does_as_the_model_and_keeps_nothing_of_what_was_deleted() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let server = runtime.block_on(Server::start());
    let store = open(&at(&server), &model_keep());
    run_against_the_model(&store, &runtime, 60);
    let left = server.cli(&["--scan"]);
    // That something was deleted is known for a day.
    let is_mark = |key: &&str| key.starts_with("wr:d:");
    let responses: Vec<_> = left
        .lines()
        .filter(|key| key.contains('{') && !is_mark(key))
        .collect();
    assert!(responses.is_empty(), "{responses:?}");
}
