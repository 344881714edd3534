//! Responses: made, read, continued, run, ended, deleted.

use bytes::Bytes;
use warmroute::ids::Tenant;
use warmroute::store::log::LogState;
use warmroute::store::{
    CancelOutcome, Chain, DeleteOutcome, Error, History, HistoryLimits, Status, WriteOutcome,
};

use super::*;
use crate::cluster::eventually;

async fn past(store: &Store, key: ResponseKey) -> Chain {
    match store.history(key, ANY).await.unwrap() {
        History::Found(turns) => turns.chain,
        other => panic!("{other:?}"),
    }
}

async fn status(store: &Store, key: ResponseKey) -> Option<Status> {
    store.get(key).await.unwrap().map(|record| record.status)
}

#[tokio::test]
async fn what_one_replica_makes_another_reads() {
    on_each(async |Pair { a, b, .. }| {
        let key = new_key();
        assert!(b.get(key).await.unwrap().is_none());
        assert_eq!(b.input(key).await.unwrap(), None);
        let new = finished();
        a.create(key, new.clone()).await.unwrap();
        let read = b.get(key).await.unwrap().unwrap();
        assert_eq!(
            (read.status, read.hint, read.previous, read.content),
            (Status::Completed, new.hint, None, new.content)
        );
        assert_eq!(read.background, None);
        assert_eq!(b.input(key).await.unwrap(), Some(new.input));
    })
    .await;
}

#[tokio::test]
async fn creating_never_writes_over_another_and_knows_itself_again() {
    on_each(async |Pair { a, b, .. }| {
        for first in [finished(), queued()] {
            let key = new_key();
            a.create(key, first.clone()).await.unwrap();
            // Its answer was lost.
            a.create(key, first.clone()).await.unwrap();
            let mut second = finished();
            second.content.output = Bytes::from_static(b"[\"other\"]");
            assert_eq!(b.create(key, second).await, Err(Error::Exists));
            let read = b.get(key).await.unwrap().unwrap();
            assert_eq!(read.content, first.content);
        }
    })
    .await;
}

#[tokio::test]
async fn another_tenants_response_is_not_there() {
    on_each(async |Pair { a, .. }| {
        let key = new_key();
        a.create(key, queued()).await.unwrap();
        let foreign = ResponseKey {
            tenant: Tenant::tagged(1),
            ..key
        };
        assert!(a.get(foreign).await.unwrap().is_none());
        assert_eq!(a.input(foreign).await.unwrap(), None);
        assert_eq!(
            a.history(foreign, ANY).await.unwrap(),
            History::Missing(key.id)
        );
        assert_eq!(
            a.cancel(foreign, cancelling()).await.unwrap(),
            CancelOutcome::Gone
        );
        assert_eq!(a.events(foreign, None, 99).await.unwrap(), None);
        assert_eq!(a.delete(foreign).await.unwrap(), DeleteOutcome::Gone);
        assert_eq!(status(a, key).await, Some(Status::Queued));
    })
    .await;
}

#[tokio::test]
async fn a_history_is_the_whole_chain_in_order_and_a_chain_may_branch() {
    on_each(async |Pair { a, b, .. }| {
        let first = new_key();
        let mut new = finished();
        let mut expected = vec![(new.input.clone(), new.content.output.clone())];
        a.create(first, new).await.unwrap();
        let mut last = first;
        for turn in 0..20 {
            new = continuing(past(b, last).await);
            new.input = format!("[{turn}]").into();
            expected.push((new.input.clone(), new.content.output.clone()));
            let next = child(last);
            a.create(next, new).await.unwrap();
            assert_eq!(b.get(next).await.unwrap().unwrap().previous, Some(last.id));
            last = next;
        }
        let History::Found(found) = b.history(last, ANY).await.unwrap() else {
            panic!("not found");
        };
        let turns: Vec<_> = found
            .turns
            .into_iter()
            .map(|turn| (turn.input, turn.output))
            .collect();
        assert_eq!(turns, expected);
        let bytes: usize = turns
            .iter()
            .map(|(input, output)| input.len() + output.len())
            .sum();
        assert_eq!(found.chain.bytes, bytes as u64);
        assert_eq!((found.chain.ids.len(), found.chain.ids[20]), (21, last.id));
        assert_eq!(found.hint, hint());

        let branch = child(first);
        a.create(branch, continuing(past(a, first).await))
            .await
            .unwrap();
        assert_eq!(*past(b, branch).await.ids, [first.id, branch.id]);
        assert_eq!(past(b, last).await.ids.len(), 21);
    })
    .await;
}

#[tokio::test]
async fn a_history_with_a_link_missing_is_missing() {
    on_each(async |Pair { a, b, .. }| {
        let mut chain = vec![new_key()];
        a.create(chain[0], finished()).await.unwrap();
        for _ in 0..4 {
            let last = *chain.last().unwrap();
            let next = child(last);
            a.create(next, continuing(past(a, last).await))
                .await
                .unwrap();
            chain.push(next);
        }
        let deleted = a.delete(chain[1]).await.unwrap();
        let was = Status::Completed;
        assert_eq!(deleted, DeleteOutcome::Done { was, owner: None });
        assert_eq!(
            b.history(chain[4], ANY).await.unwrap(),
            History::Missing(chain[1].id)
        );
        assert_eq!(
            b.history(chain[1], ANY).await.unwrap(),
            History::Missing(chain[1].id)
        );
        // The others are there as before.
        assert_eq!(*past(b, chain[0]).await.ids, [chain[0].id]);
        assert!(b.get(chain[4]).await.unwrap().is_some());
    })
    .await;
}

#[tokio::test]
async fn only_what_ended_well_and_is_kept_is_a_past() {
    on_each(async |Pair { a, b, .. }| {
        let (mut key, max) = (new_key(), ANY);
        a.create(key, queued()).await.unwrap();
        assert_eq!(
            b.history(key, max).await.unwrap(),
            History::Running(Status::Queued)
        );
        assert_eq!(a.start(key, FENCE).await.unwrap(), WriteOutcome::Done);
        assert_eq!(
            b.history(key, max).await.unwrap(),
            History::Running(Status::InProgress)
        );
        assert_eq!(
            a.finalize(key, FENCE, ending(Status::Failed))
                .await
                .unwrap(),
            WriteOutcome::Done
        );
        assert_eq!(
            b.history(key, max).await.unwrap(),
            History::Ended(Status::Failed)
        );

        key = new_key();
        a.create(key, queued()).await.unwrap();
        let _ = a.cancel(key, cancelling()).await.unwrap();
        assert_eq!(
            b.history(key, max).await.unwrap(),
            History::Ended(Status::Cancelled)
        );

        key = new_key();
        a.create(key, queued()).await.unwrap();
        assert_eq!(
            a.finalize(key, FENCE, ending(Status::Incomplete))
                .await
                .unwrap(),
            WriteOutcome::Done
        );
        let History::Found(found) = b.history(key, max).await.unwrap() else {
            panic!("not found");
        };
        assert_eq!(
            found.turns[0].output,
            ending(Status::Incomplete).content.output
        );

        // For polling only.
        key = new_key();
        a.create(key, kept_as(Retention::Ephemeral)).await.unwrap();
        assert_eq!(
            a.finalize(key, FENCE, ending(Status::Completed))
                .await
                .unwrap(),
            WriteOutcome::Done
        );
        assert_eq!(status(b, key).await, Some(Status::Completed));
        assert_eq!(b.history(key, max).await.unwrap(), History::Missing(key.id));
        assert_eq!(b.input(key).await.unwrap(), None);
    })
    .await;
}

#[tokio::test]
async fn a_history_beyond_the_callers_limits_is_not_read() {
    on_each(async |Pair { a, .. }| {
        let first = new_key();
        a.create(first, finished()).await.unwrap();
        let second = child(first);
        let bytes = 2 * past(a, first).await.bytes;
        a.create(second, continuing(past(a, first).await))
            .await
            .unwrap();
        let too_large = History::TooLarge { turns: 2, bytes };
        for (max, refused) in [
            (HistoryLimits { turns: 1, bytes }, true),
            (
                HistoryLimits {
                    turns: 2,
                    bytes: bytes - 1,
                },
                true,
            ),
            (HistoryLimits { turns: 2, bytes }, false),
        ] {
            assert_eq!(a.history(second, max).await.unwrap() == too_large, refused);
        }
    })
    .await;
}

#[tokio::test]
async fn large_values_come_back_whole_and_too_large_ones_are_refused() {
    on_each_with(
        &RetentionSettings::default(),
        async |Pair { a, b, .. }| {
            let mut random = fastrand::Rng::with_seed(7);
            let mut noise = |bytes: usize| -> Bytes { (0..bytes).map(|_| random.u8(..)).collect() };
            let key = new_key();
            let mut new = finished();
            new.input = noise(3 << 20);
            new.content.output = noise(2 << 20);
            a.create(key, new.clone()).await.unwrap();
            a.create(key, new.clone()).await.unwrap();
            assert_eq!(b.get(key).await.unwrap().unwrap().content, new.content);
            assert_eq!(b.input(key).await.unwrap().unwrap(), new.input);
            let next = child(key);
            a.create(next, continuing(past(b, key).await))
                .await
                .unwrap();
            let History::Found(found) = b.history(next, ANY).await.unwrap() else {
                panic!("not found");
            };
            assert_eq!(found.turns[0].input, new.input);
            assert_eq!(found.turns[0].output, new.content.output);

            // Written over by whoever finishes it.
            let key = new_key();
            let mut new = queued();
            new.input = noise(2 << 20);
            new.content.output = noise(2 << 20);
            a.create(key, new.clone()).await.unwrap();
            let mut end = ending(Status::Completed);
            end.content.output = noise(2 << 20);
            end.delta_table = noise(2 << 20);
            let mut late = FENCE;
            late.number = 9;
            assert_eq!(
                b.finalize(key, late, end.clone()).await.unwrap(),
                WriteOutcome::Fenced
            );
            assert_eq!(
                a.finalize(key, FENCE, end.clone()).await.unwrap(),
                WriteOutcome::Done
            );
            assert_eq!(
                a.finalize(key, FENCE, end.clone()).await.unwrap(),
                WriteOutcome::Done
            );
            assert_eq!(b.get(key).await.unwrap().unwrap().content, end.content);
            assert_eq!(b.input(key).await.unwrap().unwrap(), new.input);
            assert!(matches!(
                b.delete(key).await.unwrap(),
                DeleteOutcome::Done { .. }
            ));
            assert_eq!(
                b.finalize(key, FENCE, end).await.unwrap(),
                WriteOutcome::Gone
            );
            assert!(a.get(key).await.unwrap().is_none());

            new = finished();
            new.input = vec![b'x'; (64 << 20) + 1].into();
            let refused = a.create(new_key(), new).await;
            assert!(
                matches!(refused, Err(Error::TooLarge { .. })),
                "{refused:?}"
            );
        },
    )
    .await;
}

#[tokio::test]
async fn a_foreground_response_is_not_cancelled_and_has_no_events() {
    on_each(async |Pair { a, .. }| {
        let key = new_key();
        a.create(key, finished()).await.unwrap();
        assert_eq!(
            a.cancel(key, cancelling()).await.unwrap(),
            CancelOutcome::NotBackground
        );
        assert_eq!(a.events(key, None, 99).await.unwrap(), None);
        let done = WriteOutcome::Terminal(Status::Completed);
        assert_eq!(a.start(key, FENCE).await.unwrap(), done);
        assert_eq!(
            a.finalize(key, FENCE, ending(Status::Failed))
                .await
                .unwrap(),
            done
        );
        assert_eq!(
            a.cancel(new_key(), cancelling()).await.unwrap(),
            CancelOutcome::Gone
        );
    })
    .await;
}

#[tokio::test]
async fn a_log_that_is_full_drops_its_oldest_events_and_stops_nothing() {
    on_each(async |Pair { a, b, .. }| {
        let key = new_key();
        a.create(key, queued()).await.unwrap();
        let mut first = batch(0, 0);
        first.bytes = vec![b'x'; 10].into();
        assert_eq!(
            a.append(key, FENCE, first).await.unwrap(),
            WriteOutcome::Done
        );
        let mut large = batch(1, 1);
        large.bytes = vec![b'x'; 995].into();
        assert_eq!(
            a.append(key, FENCE, large.clone()).await.unwrap(),
            WriteOutcome::Overflow
        );
        assert_eq!(
            a.append(key, FENCE, batch(2, 2)).await.unwrap(),
            WriteOutcome::Overflow
        );
        assert_eq!(
            a.append(key, FENCE, batch(4, 4)).await.unwrap(),
            WriteOutcome::Gap { last: Some(2) }
        );
        let read = async |after| {
            let read = b.events(key, after, 9_999).await.unwrap().unwrap();
            (read.batches, read.log)
        };
        let overflowed = (vec![], LogState::Overflowed);
        assert_eq!(read(None).await, overflowed);
        let kept = (vec![large.clone(), batch(2, 2)], LogState::Whole);
        assert_eq!(read(Some(0)).await, kept);
        let mut end = ending(Status::Completed);
        end.batch = Some(batch(3, 3));
        assert_eq!(
            a.finalize(key, FENCE, end).await.unwrap(),
            WriteOutcome::Done
        );
        let events = b.events(key, None, 99).await.unwrap().unwrap();
        assert_eq!((events.status, events.last), (Status::Completed, Some(3)));
        // What was dropped is made from the end.
        let table = LogState::Expired(Bytes::from_static(b"cut"));
        assert_eq!((events.batches, events.log), (vec![], table.clone()));
        assert_eq!(read(Some(0)).await, (vec![], table));
        let kept = vec![batch(2, 2), batch(3, 3)];
        assert_eq!(read(Some(1)).await, (kept, LogState::Whole));
    })
    .await;
}

#[tokio::test]
async fn after_its_time_the_log_is_read_from_its_delta_table_and_the_record_goes_after_its_own() {
    let keep = RetentionSettings {
        // The log is seen without its events for longer than a busy machine takes to look.
        responses: Duration::from_secs(5),
        ephemeral: Duration::from_secs(1),
        event_logs: Duration::from_secs(1),
        ..keep()
    };
    on_each_with(&keep, async |Pair { a, b, .. }| {
        let (stored, brief) = (new_key(), new_key());
        let began = std::time::Instant::now();
        a.create(stored, queued()).await.unwrap();
        a.create(brief, kept_as(Retention::Ephemeral))
            .await
            .unwrap();
        for key in [stored, brief] {
            assert_eq!(
                a.append(key, FENCE, batch(0, 2)).await.unwrap(),
                WriteOutcome::Done
            );
            assert_eq!(
                a.finalize(key, FENCE, ending(Status::Completed))
                    .await
                    .unwrap(),
                WriteOutcome::Done
            );
        }
        let log = b.events(stored, None, 99).await.unwrap().unwrap().log;
        assert!(log == LogState::Whole || began.elapsed() >= keep.event_logs);
        eventually("the log is sealed", async || {
            let events = b.events(stored, None, 99).await.unwrap().unwrap();
            events.log == LogState::Expired(Bytes::from_static(b"cut")) && events.last == Some(2)
        })
        .await;
        eventually("the one for polling is gone", async || {
            status(b, brief).await.is_none()
        })
        .await;
        eventually("so is the stored one", async || {
            status(b, stored).await.is_none()
        })
        .await;
    })
    .await;
}

/// Of a cancel and an end that race one wins, both learn which, and there is one last event.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_races_of_a_cancel_and_an_end_have_one_winner_each() {
    const RUNNERS: usize = 50;
    const RACES: usize = 200;
    on_each(async |Pair { a, b, .. }| {
        let runner = || {
            let (a, b) = (a.clone(), b.clone());
            async move {
                let mut cancels = 0;
                for race in 0..RACES {
                    let key = new_key();
                    a.create(key, queued()).await.unwrap();
                    let mut end = ending(Status::Completed);
                    end.batch = Some(batch(0, 0));
                    let end = tokio::spawn({
                        let a = a.clone();
                        async move { a.finalize(key, FENCE, end).await.unwrap() }
                    });
                    if race % 3 == 0 {
                        tokio::task::yield_now().await;
                    }
                    let cancelled = b.cancel(key, cancelling()).await.unwrap();
                    let ended = end.await.unwrap();
                    let winner = match (cancelled, ended) {
                        (CancelOutcome::Done { .. }, WriteOutcome::Terminal(Status::Cancelled)) => {
                            Status::Cancelled
                        }
                        (CancelOutcome::Terminal(Status::Completed), WriteOutcome::Done) => {
                            Status::Completed
                        }
                        other => panic!("{other:?}"),
                    };
                    cancels += usize::from(winner == Status::Cancelled);
                    let events = b.events(key, None, 999).await.unwrap().unwrap();
                    assert_eq!((events.status, events.last), (winner, Some(0)));
                    assert_eq!(events.batches.len(), 1);
                    let is_cancel = events.batches[0].bytes == cancelling().event;
                    assert_eq!(is_cancel, winner == Status::Cancelled);
                    assert_eq!(status(&a, key).await, Some(winner));
                }
                cancels
            }
        };
        let runners: Vec<_> = (0..RUNNERS).map(|_| tokio::spawn(runner())).collect();
        let mut cancels = 0;
        for runner in runners {
            cancels += runner.await.unwrap();
        }
        // Neither side always comes first; else nothing was raced.
        assert!((1..RUNNERS * RACES).contains(&cancels), "{cancels}");
    })
    .await;
}

#[tokio::test]
async fn in_memory_a_chain_that_goes_on_is_kept_from_its_first_turn() {
    let now = Arc::new(parking_lot::Mutex::new(std::time::Instant::now()));
    let clock = now.clone();
    let store: Store = Arc::new(Memory::with_clock(
        &Default::default(),
        &RetentionSettings::default(),
        &Registry::default(),
        Arc::new(move || *clock.lock()),
    ));
    let day = Duration::from_secs(24 * 3_600);
    let mut key = new_key();
    let first = key;
    store.create(key, finished()).await.unwrap();
    for _ in 0..4 {
        *now.lock() += day * 29;
        let past = past(&store, key).await;
        key = child(key);
        store.create(key, continuing(past)).await.unwrap();
    }
    assert_eq!(past(&store, key).await.ids.len(), 5);
    *now.lock() += day * 31;
    assert!(status(&store, first).await.is_none());
}

#[tokio::test]
async fn what_continues_a_response_that_was_deleted_is_not_created() {
    on_each(async |Pair { a, b, .. }| {
        for gone in 0..3 {
            let mut chain = vec![new_key()];
            a.create(chain[0], finished()).await.unwrap();
            for _ in 0..2 {
                let last = *chain.last().unwrap();
                let next = child(last);
                let new = continuing(past(a, last).await);
                a.create(next, new).await.unwrap();
                chain.push(next);
            }
            // Both have read what they continue.
            let ids = past(a, chain[2]).await;
            let background = NewRecord {
                parent: Some(ids.clone()),
                ..queued()
            };
            let running = child(chain[2]);
            a.create(running, background.clone()).await.unwrap();
            assert_eq!(b.keep_chain(running).await, Ok(None));
            let _ = b.delete(chain[gone]).await.unwrap();
            let missing = chain[gone].id;
            for new in [continuing(ids.clone()), background.clone()] {
                let late = child(chain[2]);
                let created = a.create(late, new).await;
                assert_eq!(created, Err(Error::BrokenChain(missing)));
                assert!(b.get(late).await.unwrap().is_none());
            }
            // A write that is repeated was applied before.
            a.create(running, background).await.unwrap();
            assert_eq!(b.keep_chain(running).await, Ok(Some(missing)));
            let end = Finalization {
                retention: Retention::Ephemeral,
                ..ending(Status::Completed)
            };
            let ended = a.finalize(running, FENCE, end).await;
            assert_eq!(ended, Ok(WriteOutcome::Done));
            let read = b.get(running).await.unwrap().unwrap();
            assert_eq!(read.status, Status::Completed);
            let retention = read.background.map(|background| background.retention);
            assert_eq!(retention, Some(Retention::Ephemeral));
            let history = b.history(running, ANY).await;
            assert_eq!(history, Ok(History::Missing(running.id)));
            let _ = b.delete(running).await.unwrap();
            assert_eq!(b.keep_chain(running).await, Ok(Some(running.id)));
        }
    })
    .await;
}

#[tokio::test]
async fn a_long_chain_is_read_whole_wherever_it_branches_and_whatever_is_missing() {
    on_each(async |Pair { a, b, .. }| {
        let mut keys = vec![new_key()];
        a.create(keys[0], finished()).await.unwrap();
        let ids = |keys: &[ResponseKey]| -> Vec<_> { keys.iter().map(|key| key.id).collect() };
        for turn in 1..=300 {
            let next = child(keys[0]);
            let mut new = continuing(Chain {
                ids: ids(&keys).into(),
                bytes: 0,
            });
            new.input = format!("[{turn}]").into();
            a.create(next, new).await.unwrap();
            keys.push(next);
            if ![1, 64, 127, 128, 129, 130, 255, 256, 257, 258, 300].contains(&turn) {
                continue;
            }
            let History::Found(found) = b.history(next, ANY).await.unwrap() else {
                panic!("not found");
            };
            assert_eq!(*found.chain.ids, *ids(&keys), "{turn}");
            let inputs = found.turns.iter().skip(1).map(|turn| turn.input.clone());
            let expected = (1..=turn).map(|turn| Bytes::from(format!("[{turn}]")));
            assert!(inputs.eq(expected), "{turn}");
            let read = b.get(next).await.unwrap().unwrap();
            assert_eq!(read.previous, Some(keys[turn - 1].id));
            assert_eq!(b.keep_chain(next).await, Ok(None));
            let short = HistoryLimits { turns: turn, ..ANY };
            let history = b.history(next, short).await;
            let is_too_large =
                matches!(history, Ok(History::TooLarge { turns, .. }) if turns == turn + 1);
            assert!(is_too_large, "{history:?}");
        }
        for from in [0, 127, 128, 129, 260, 299] {
            let branch = child(keys[0]);
            a.create(branch, continuing(past(b, keys[from]).await))
                .await
                .unwrap();
            let expected = [&ids(&keys[..=from])[..], &[branch.id]].concat();
            assert_eq!(*past(b, branch).await.ids, *expected, "{from}");
        }
        // The newest that is missing is named, also before anchors that are missing.
        let mut newest = 0;
        for gone in [3, 128, 127, 100, 256, 200, 290, 299] {
            let _ = a.delete(keys[gone]).await.unwrap();
            newest = newest.max(gone);
            let missing = keys[newest].id;
            let history = b.history(keys[300], ANY).await;
            assert_eq!(history, Ok(History::Missing(missing)), "{gone}");
            assert_eq!(b.keep_chain(keys[300]).await, Ok(Some(missing)), "{gone}");
        }
    })
    .await;
}
