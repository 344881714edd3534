//! Responses: made, read, continued, run, ended, deleted.

use bytes::Bytes;
use warmroute::ids::Tenant;
use warmroute::store::cancel::NoticeKind;
use warmroute::store::log::LogState;
use warmroute::store::{
    CancelOutcome, CancelledOutput, Chain, DeleteOutcome, Error, History, HistoryLimits,
    NoticeCursor, Orphan, OwnershipLoss, Status, Takeover, WriteOutcome,
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
async fn a_background_response_runs_under_its_owner_alone() {
    on_each(async |Pair { a, b, .. }| {
        let key = new_key();
        a.create(key, queued()).await.unwrap();
        let read = b.get(key).await.unwrap().unwrap();
        let background = read.background.unwrap();
        assert_eq!(
            (
                read.status,
                background.owner,
                background.fencing_number,
                background.attempts
            ),
            (Status::Queued, Some(OWNER), 1, 1)
        );
        assert!(background.streams && background.last_event.is_none());
        let other = FencingToken::first(OTHER);
        let late = FencingToken { number: 2, ..FENCE };
        for wrong in [other, late] {
            assert_eq!(b.start(key, wrong).await.unwrap(), WriteOutcome::Fenced);
            assert_eq!(
                b.append(key, wrong, batch(0, 0)).await.unwrap(),
                WriteOutcome::Fenced
            );
            let end = ending(Status::Completed);
            assert_eq!(
                b.finalize(key, wrong, end).await.unwrap(),
                WriteOutcome::Fenced
            );
            assert_eq!(b.release(key, wrong).await.unwrap(), WriteOutcome::Fenced);
        }
        assert_eq!(a.start(key, FENCE).await.unwrap(), WriteOutcome::Done);
        assert_eq!(a.start(key, FENCE).await.unwrap(), WriteOutcome::Done);
        assert_eq!(status(b, key).await, Some(Status::InProgress));
    })
    .await;
}

#[tokio::test]
async fn events_are_kept_in_order_without_holes() {
    on_each(async |Pair { a, b, .. }| {
        let key = new_key();
        a.create(key, queued()).await.unwrap();
        assert_eq!(
            a.append(key, FENCE, batch(1, 1)).await.unwrap(),
            WriteOutcome::Gap { last: None }
        );
        assert_eq!(
            a.append(key, FENCE, batch(0, 2)).await.unwrap(),
            WriteOutcome::Done
        );
        assert_eq!(
            a.append(key, FENCE, batch(0, 2)).await.unwrap(),
            WriteOutcome::Duplicate { last: 2 }
        );
        assert_eq!(
            a.append(key, FENCE, batch(4, 4)).await.unwrap(),
            WriteOutcome::Gap { last: Some(2) }
        );
        assert_eq!(
            a.append(key, FENCE, batch(3, 3)).await.unwrap(),
            WriteOutcome::Done
        );
        assert_eq!(
            a.append(key, FENCE, batch(4, 9)).await.unwrap(),
            WriteOutcome::Done
        );
        let read = async |after, bytes| {
            let events = b.events(key, after, bytes).await.unwrap().unwrap();
            assert_eq!((events.last, events.log), (Some(9), LogState::Whole));
            events.batches
        };
        assert_eq!(
            read(None, 99).await,
            [batch(0, 2), batch(3, 3), batch(4, 9)]
        );
        assert_eq!(
            read(Some(1), 99).await,
            [batch(0, 2), batch(3, 3), batch(4, 9)]
        );
        assert_eq!(read(Some(2), 99).await, [batch(3, 3), batch(4, 9)]);
        assert_eq!(read(Some(8), 99).await, [batch(4, 9)]);
        assert_eq!(read(Some(9), 99).await, []);
        assert_eq!(read(Some(99), 99).await, []);
        assert_eq!(read(None, 1).await, [batch(0, 2)]);
        assert_eq!(read(None, 10).await, [batch(0, 2), batch(3, 3)]);
        let background = b.get(key).await.unwrap().unwrap().background.unwrap();
        assert_eq!(background.last_event, Some(9));
    })
    .await;
}

#[tokio::test]
async fn a_response_ends_once_with_its_last_events_and_knows_its_end_again() {
    on_each(async |Pair { a, b, .. }| {
        let key = new_key();
        a.create(key, queued()).await.unwrap();
        assert_eq!(
            a.append(key, FENCE, batch(0, 4)).await.unwrap(),
            WriteOutcome::Done
        );
        let mut end = ending(Status::Completed);
        end.batch = Some(batch(6, 6));
        assert_eq!(
            a.finalize(key, FENCE, end.clone()).await.unwrap(),
            WriteOutcome::Gap { last: Some(4) }
        );
        assert_eq!(status(b, key).await, Some(Status::Queued));
        end.batch = Some(batch(5, 6));
        assert_eq!(
            a.finalize(key, FENCE, end.clone()).await.unwrap(),
            WriteOutcome::Done
        );
        // Its answer was lost.
        assert_eq!(
            a.finalize(key, FENCE, end.clone()).await.unwrap(),
            WriteOutcome::Done
        );
        let done = WriteOutcome::Terminal(Status::Completed);
        assert_eq!(
            a.finalize(key, FENCE, ending(Status::Failed))
                .await
                .unwrap(),
            done
        );
        assert_eq!(a.start(key, FENCE).await.unwrap(), done);
        assert_eq!(a.append(key, FENCE, batch(7, 7)).await.unwrap(), done);
        assert_eq!(a.release(key, FENCE).await.unwrap(), done);
        let cancelled = b.cancel(key, cancelling()).await.unwrap();
        assert_eq!(cancelled, CancelOutcome::Terminal(Status::Completed));
        let read = b.get(key).await.unwrap().unwrap();
        assert_eq!(
            (read.status, read.content),
            (Status::Completed, end.content)
        );
        let events = b.events(key, None, 99).await.unwrap().unwrap();
        assert_eq!(events.batches, [batch(0, 4), batch(5, 6)]);
        assert_eq!((events.status, events.last), (Status::Completed, Some(6)));
    })
    .await;
}

#[tokio::test]
async fn a_cancel_ends_it_with_the_next_number_and_tells_the_owner() {
    on_each(async |Pair { a, b, .. }| {
        a.heartbeat(OWNER, "a", LEASE).await.unwrap();
        for (runs, was) in [(false, Status::Queued), (true, Status::InProgress)] {
            let key = new_key();
            a.create(key, queued()).await.unwrap();
            let mut number = 0;
            if runs {
                assert_eq!(a.start(key, FENCE).await.unwrap(), WriteOutcome::Done);
                assert_eq!(
                    a.append(key, FENCE, batch(0, 6)).await.unwrap(),
                    WriteOutcome::Done
                );
                number = 7;
            }
            let (_, before) = a.notices(OWNER, NoticeCursor::default()).await.unwrap();
            let cancel = cancelling();
            let done = CancelOutcome::Done {
                was,
                owner: Some(OWNER),
            };
            assert_eq!(b.cancel(key, cancel.clone()).await.unwrap(), done);
            // Its answer was lost, and then somebody else cancels it too.
            assert_eq!(b.cancel(key, cancel.clone()).await.unwrap(), done);
            let cancelled = Status::Cancelled;
            assert_eq!(
                a.cancel(key, cancelling()).await.unwrap(),
                CancelOutcome::Terminal(cancelled)
            );
            let end = ending(Status::Completed);
            assert_eq!(
                a.finalize(key, FENCE, end).await.unwrap(),
                WriteOutcome::Terminal(cancelled)
            );
            let read = a.get(key).await.unwrap().unwrap();
            assert_eq!(
                (read.status, read.content.response),
                (cancelled, cancel.response)
            );
            let events = a.events(key, None, 999).await.unwrap().unwrap();
            let last = events.batches.last().unwrap();
            assert_eq!(
                (last.first, last.last, &last.bytes),
                (number, number, &cancel.event)
            );
            assert_eq!((events.status, events.last), (cancelled, Some(number)));
            let (notices, after) = a.notices(OWNER, before).await.unwrap();
            assert_eq!(
                (notices[0].key, notices[0].kind),
                (key, NoticeKind::Cancelled)
            );
            assert_eq!(a.notices(OWNER, after).await.unwrap(), (vec![], after));
        }
    })
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
async fn its_owner_alone_adds_the_output_to_a_cancelled_response_and_once() {
    on_each(async |Pair { a, b, .. }| {
        let key = new_key();
        let amend = |text: &'static str| CancelledOutput {
            content: Content {
                response: Bytes::from_static(b"{\"amended\":1}"),
                output: Bytes::from_static(text.as_bytes()),
            },
            delta_table: Bytes::from_static(b"cut"),
        };
        a.create(key, queued()).await.unwrap();
        assert_eq!(
            a.finalize_cancelled(key, FENCE, amend("[0]"))
                .await
                .unwrap(),
            WriteOutcome::Fenced
        );
        let _ = b.cancel(key, cancelling()).await.unwrap();
        let other = FencingToken::first(OTHER);
        assert_eq!(
            b.finalize_cancelled(key, other, amend("[1]"))
                .await
                .unwrap(),
            WriteOutcome::Fenced
        );
        assert_eq!(
            a.finalize_cancelled(key, FENCE, amend("[2]"))
                .await
                .unwrap(),
            WriteOutcome::Done
        );
        let again = a
            .finalize_cancelled(key, FENCE, amend("[3]"))
            .await
            .unwrap();
        assert_eq!(again, WriteOutcome::Terminal(Status::Cancelled));
        let read = b.get(key).await.unwrap().unwrap();
        assert_eq!(
            (read.status, read.content),
            (Status::Cancelled, amend("[2]").content)
        );
        assert_eq!(
            a.finalize_cancelled(new_key(), FENCE, amend("[4]"))
                .await
                .unwrap(),
            WriteOutcome::Gone
        );
    })
    .await;
}

#[tokio::test]
async fn what_is_deleted_stays_so_whatever_its_owner_writes() {
    on_each(async |Pair { a, b, .. }| {
        a.heartbeat(OWNER, "a", LEASE).await.unwrap();
        let key = new_key();
        a.create(key, queued()).await.unwrap();
        assert_eq!(
            a.append(key, FENCE, batch(0, 0)).await.unwrap(),
            WriteOutcome::Done
        );
        let deleted = DeleteOutcome::Done {
            was: Status::Queued,
            owner: Some(OWNER),
        };
        assert_eq!(b.delete(key).await.unwrap(), deleted);
        let (notices, _) = a.notices(OWNER, NoticeCursor::default()).await.unwrap();
        assert_eq!(
            (notices[0].key, notices[0].kind),
            (key, NoticeKind::Deleted)
        );
        assert_eq!(a.start(key, FENCE).await.unwrap(), WriteOutcome::Gone);
        assert_eq!(
            a.append(key, FENCE, batch(1, 1)).await.unwrap(),
            WriteOutcome::Gone
        );
        assert_eq!(
            a.finalize(key, FENCE, ending(Status::Completed))
                .await
                .unwrap(),
            WriteOutcome::Gone
        );
        assert_eq!(a.release(key, FENCE).await.unwrap(), WriteOutcome::Gone);
        assert_eq!(
            a.cancel(key, cancelling()).await.unwrap(),
            CancelOutcome::Gone
        );
        assert_eq!(a.delete(key).await.unwrap(), DeleteOutcome::Gone);
        assert!(a.get(key).await.unwrap().is_none());
        assert_eq!(a.events(key, None, 99).await.unwrap(), None);
    })
    .await;
}

#[tokio::test]
async fn a_log_that_is_full_keeps_nothing_and_stops_nothing() {
    on_each(async |Pair { a, b, .. }| {
        let key = new_key();
        a.create(key, queued()).await.unwrap();
        assert_eq!(
            a.append(key, FENCE, batch(0, 0)).await.unwrap(),
            WriteOutcome::Done
        );
        let mut large = batch(1, 1);
        large.bytes = vec![b'x'; 1_000].into();
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
        let mut end = ending(Status::Completed);
        end.batch = Some(batch(3, 3));
        assert_eq!(
            a.finalize(key, FENCE, end).await.unwrap(),
            WriteOutcome::Done
        );
        let events = b.events(key, None, 99).await.unwrap().unwrap();
        assert_eq!((events.status, events.last), (Status::Completed, Some(3)));
        assert_eq!((events.batches, events.log), (vec![], LogState::Overflowed));
    })
    .await;
}

#[tokio::test]
async fn after_its_time_the_log_is_told_by_its_cuts_and_the_record_goes_after_its_own() {
    let keep = RetentionSettings {
        responses: Duration::from_secs(3),
        ephemeral: Duration::from_secs(1),
        event_logs: Duration::from_secs(1),
        ..keep()
    };
    on_each_with(&keep, async |Pair { a, b, .. }| {
        let (stored, brief) = (new_key(), new_key());
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
        assert_eq!(
            b.events(stored, None, 99).await.unwrap().unwrap().log,
            LogState::Whole
        );
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

#[tokio::test]
async fn a_dead_owners_work_is_adopted_by_one_and_the_dead_one_writes_nothing_more() {
    on_each(async |Pair { a, b, .. }| {
        let lease = Duration::from_millis(300);
        a.heartbeat(OWNER, "a", lease).await.unwrap();
        b.heartbeat(OTHER, "b", LEASE).await.unwrap();
        let (key, ended) = (new_key(), new_key());
        a.create(key, queued()).await.unwrap();
        assert_eq!(
            a.append(key, FENCE, batch(0, 2)).await.unwrap(),
            WriteOutcome::Done
        );
        a.create(ended, queued()).await.unwrap();
        assert_eq!(
            a.finalize(ended, FENCE, ending(Status::Completed))
                .await
                .unwrap(),
            WriteOutcome::Done
        );
        let orphan = Orphan {
            key,
            owner: Some(OWNER),
            fencing_number: 1,
        };
        a.heartbeat(OWNER, "a", LEASE).await.unwrap();
        assert_eq!(b.orphans(9).await.unwrap(), []);
        assert_eq!(b.take_over(orphan, OTHER).await.unwrap(), Takeover::Raced);
        a.end_lease(OWNER).await.unwrap();
        assert_eq!(b.orphans(9).await.unwrap(), [orphan]);

        let Takeover::Done(adopted) = b.take_over(orphan, OTHER).await.unwrap() else {
            panic!("not adopted");
        };
        let fence = FencingToken {
            owner: OTHER,
            number: 2,
        };
        assert_eq!((adopted.fence, adopted.status), (fence, Status::Queued));
        assert_eq!(
            (adopted.attempts, adopted.last_event, adopted.streams),
            (1, Some(2), true)
        );
        assert_eq!(adopted.lost_owners, 1);
        let request = b.request(key).await.unwrap();
        assert_eq!(request, Some(Bytes::from_static(b"{\"request\":1}")));
        // Its answer was lost.
        assert_eq!(
            b.take_over(orphan, OTHER).await.unwrap(),
            Takeover::Done(adopted)
        );
        assert_eq!(
            a.take_over(orphan, Owner(0xc)).await.unwrap(),
            Takeover::Raced
        );
        assert_eq!(b.orphans(9).await.unwrap(), []);

        assert_eq!(a.start(key, FENCE).await.unwrap(), WriteOutcome::Fenced);
        assert_eq!(
            a.append(key, FENCE, batch(3, 3)).await.unwrap(),
            WriteOutcome::Fenced
        );
        assert_eq!(
            a.finalize(key, FENCE, ending(Status::Failed))
                .await
                .unwrap(),
            WriteOutcome::Fenced
        );
        assert_eq!(b.start(key, fence).await.unwrap(), WriteOutcome::Done);
        assert_eq!(
            b.append(key, fence, batch(3, 3)).await.unwrap(),
            WriteOutcome::Done
        );
        assert_eq!(
            b.finalize(key, fence, ending(Status::Completed))
                .await
                .unwrap(),
            WriteOutcome::Done
        );
        let late = Takeover::Terminal(Status::Completed);
        assert_eq!(a.take_over(orphan, Owner(0xc)).await.unwrap(), late);
        let unknown = Orphan {
            key: new_key(),
            ..orphan
        };
        assert_eq!(a.take_over(unknown, OTHER).await.unwrap(), Takeover::Gone);
    })
    .await;
}

#[tokio::test]
async fn a_lease_runs_out_by_itself() {
    on_each(async |Pair { a, b, .. }| {
        a.heartbeat(OWNER, "a", Duration::from_millis(200))
            .await
            .unwrap();
        let key = new_key();
        a.create(key, queued()).await.unwrap();
        eventually("it is an orphan", async || {
            b.orphans(9).await.unwrap().len() == 1
        })
        .await;
    })
    .await;
}

#[tokio::test]
async fn an_owner_finds_what_it_has_and_does_not_run() {
    on_each(async |Pair { a, b, .. }| {
        a.heartbeat(OWNER, "a", LEASE).await.unwrap();
        let keys = [(); 5].map(|()| new_key());
        let [runs, stray, ended, released, fresh] = keys;
        for key in [runs, stray, ended, released] {
            a.create(key, queued()).await.unwrap();
        }
        let end = ending(Status::Failed);
        assert_eq!(
            a.finalize(ended, FENCE, end).await.unwrap(),
            WriteOutcome::Done
        );
        assert_eq!(
            a.release(released, FENCE).await.unwrap(),
            WriteOutcome::Done
        );
        let found = a.untracked(OWNER, vec![runs, fresh], 9).await.unwrap();
        assert_eq!(found, [(stray, FENCE)]);
        assert_eq!(a.untracked(OWNER, vec![runs, stray], 9).await.unwrap(), []);
        assert_eq!(b.untracked(OTHER, Vec::new(), 9).await.unwrap(), []);
        assert_eq!(a.release(stray, FENCE).await.unwrap(), WriteOutcome::Done);
        assert_eq!(b.orphans(9).await.unwrap().len(), 2);
    })
    .await;
}

#[tokio::test]
async fn released_work_is_anyones_at_once() {
    on_each(async |Pair { a, b, .. }| {
        a.heartbeat(OWNER, "a", LEASE).await.unwrap();
        let key = new_key();
        a.create(key, queued()).await.unwrap();
        assert_eq!(a.release(key, FENCE).await.unwrap(), WriteOutcome::Done);
        assert_eq!(a.start(key, FENCE).await.unwrap(), WriteOutcome::Fenced);
        let orphan = Orphan {
            key,
            owner: None,
            fencing_number: 2,
        };
        assert_eq!(b.orphans(9).await.unwrap(), [orphan]);
        assert!(matches!(
            b.take_over(orphan, OTHER).await.unwrap(),
            Takeover::Done(_)
        ));
        // Released and cancelled while nobody has it.
        let key = new_key();
        a.create(key, queued()).await.unwrap();
        assert_eq!(a.release(key, FENCE).await.unwrap(), WriteOutcome::Done);
        let done = CancelOutcome::Done {
            was: Status::Queued,
            owner: None,
        };
        assert_eq!(b.cancel(key, cancelling()).await.unwrap(), done);
    })
    .await;
}

#[tokio::test]
async fn an_attempt_counts_when_an_engine_has_begun_it_and_its_owner_was_lost() {
    on_each(async |Pair { a, b, .. }| {
        let key = new_key();
        a.create(key, queued()).await.unwrap();
        let mut orphan = Orphan {
            key,
            owner: Some(OWNER),
            fencing_number: 1,
        };
        // (who takes it over, whether an engine begins, whether it is released), and what the next one finds.
        for (owner, is_begun, is_released, attempts, lost) in [
            (OTHER, false, true, 1, 1),
            (OWNER, false, false, 1, 1),
            (OTHER, true, true, 1, 2),
            (OWNER, true, false, 1, 2),
            (OTHER, true, false, 2, 3),
            (OWNER, false, false, 3, 4),
        ] {
            let Takeover::Done(adopted) = b.take_over(orphan, owner).await.unwrap() else {
                panic!("not adopted");
            };
            assert_eq!((adopted.attempts, adopted.lost_owners), (attempts, lost));
            let fence = adopted.fence;
            if is_begun {
                assert_eq!(a.start(key, fence).await, Ok(WriteOutcome::Done));
            }
            orphan = Orphan {
                key,
                owner: Some(owner),
                fencing_number: fence.number,
            };
            if is_released {
                assert_eq!(a.release(key, fence).await, Ok(WriteOutcome::Done));
                (orphan.owner, orphan.fencing_number) = (None, fence.number + 1);
            }
        }
    })
    .await;
}

#[tokio::test]
async fn the_output_of_a_cancelled_response_is_stored_by_another_if_its_owner_was_lost() {
    on_each(async |Pair { a, b, .. }| {
        a.heartbeat(OWNER, "a", LEASE).await.unwrap();
        let (key, unseen) = (new_key(), new_key());
        for key in [key, unseen] {
            a.create(key, queued()).await.unwrap();
        }
        assert_eq!(
            a.append(key, FENCE, batch(0, 4)).await,
            Ok(WriteOutcome::Done)
        );
        for key in [key, unseen] {
            let cancelled = b.cancel(key, cancelling()).await.unwrap();
            assert!(matches!(cancelled, CancelOutcome::Done { .. }));
        }
        assert_eq!(b.orphans(9).await.unwrap(), []);
        a.end_lease(OWNER).await.unwrap();
        let orphan = Orphan {
            key,
            owner: Some(OWNER),
            fencing_number: 1,
        };
        assert_eq!(b.orphans(9).await.unwrap(), [orphan]);
        let Takeover::Done(adopted) = b.take_over(orphan, OTHER).await.unwrap() else {
            panic!("not adopted");
        };
        assert_eq!(
            (adopted.status, adopted.last_event),
            (Status::Cancelled, Some(5))
        );
        assert!(b.request(key).await.unwrap().is_some());
        let output = CancelledOutput {
            content: ending(Status::Cancelled).content,
            delta_table: Bytes::from_static(b"cut"),
        };
        let late = a.finalize_cancelled(key, FENCE, output.clone()).await;
        assert_eq!(late, Ok(WriteOutcome::Fenced));
        let stored = b.finalize_cancelled(key, adopted.fence, output).await;
        assert_eq!(stored, Ok(WriteOutcome::Done));
        let record = a.get(key).await.unwrap().unwrap();
        assert_eq!(record.status, Status::Cancelled);
        assert_eq!(record.content.output, Bytes::from_static(b"[\"final\"]"));
        assert_eq!(b.request(key).await.unwrap(), None);
        assert_eq!(b.orphans(9).await.unwrap(), []);
        let late = b.take_over(orphan, OWNER).await.unwrap();
        assert_eq!(late, Takeover::Terminal(Status::Cancelled));
    })
    .await;
}

#[tokio::test]
async fn an_owner_that_asks_learns_what_it_has_lost() {
    on_each(async |Pair { a, b, .. }| {
        a.heartbeat(OWNER, "a", LEASE).await.unwrap();
        let keys = [(); 6].map(|()| new_key());
        let [mine, cancelled, deleted, released, foreground, ended] = keys;
        for key in keys {
            let new = if key == foreground {
                finished()
            } else {
                queued()
            };
            a.create(key, new).await.unwrap();
        }
        let _ = b.cancel(cancelled, cancelling()).await.unwrap();
        let _ = b.delete(deleted).await.unwrap();
        let _ = a.release(released, FENCE).await.unwrap();
        let _ = a
            .finalize(ended, FENCE, ending(Status::Failed))
            .await
            .unwrap();
        let running = keys.map(|key| (key, FENCE)).to_vec();
        let lost = a.check_ownership(running).await.unwrap();
        let expected = [
            (cancelled, OwnershipLoss::Terminal(Status::Cancelled)),
            (deleted, OwnershipLoss::Gone),
            (released, OwnershipLoss::Fenced),
            (foreground, OwnershipLoss::Terminal(Status::Completed)),
            (ended, OwnershipLoss::Terminal(Status::Failed)),
        ];
        assert_eq!(lost, expected);
        assert_eq!(a.check_ownership(vec![(mine, FENCE)]).await.unwrap(), []);
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
