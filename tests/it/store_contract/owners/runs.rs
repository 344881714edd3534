//! What an owner writes of a run.

use super::*;

pub(super) async fn a_background_response_runs_under_its_owner_alone(Pair { a, b, .. }: &Pair) {
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
}

pub(super) async fn events_are_kept_in_order_without_holes(Pair { a, b, .. }: &Pair) {
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
}

pub(super) async fn the_tokens_of_events_are_for_the_next_owner_and_count_in_the_bound(
    Pair { a, b, .. }: &Pair,
) {
    let key = new_key();
    a.create(key, queued()).await.unwrap();
    let with = |first, last, tokens: &'static [u8]| EventBatch {
        tokens: Bytes::from_static(tokens),
        ..batch(first, last)
    };
    let batches = [with(0, 2, b""), with(3, 3, b"\0\xff:1"), with(4, 9, b"2")];
    for batch in &batches {
        let appended = a.append(key, FENCE, batch.clone()).await.unwrap();
        assert_eq!(appended, WriteOutcome::Done);
    }
    let outdated = FencingToken { number: 9, ..FENCE };
    assert_eq!(
        a.append(key, outdated, with(10, 10, b"x")).await.unwrap(),
        WriteOutcome::Fenced
    );
    let read = b.events(key, None, 999).await.unwrap().unwrap();
    assert_eq!(read.batches, [batch(0, 2), batch(3, 3), batch(4, 9)]);
    let read = b.events_with_tokens(key, None, 999).await.unwrap().unwrap();
    assert_eq!((read.last, &read.batches[..]), (Some(9), &batches[..]));
    let read = b
        .events_with_tokens(key, Some(2), 8)
        .await
        .unwrap()
        .unwrap();
    assert_eq!(read.batches, batches[1..2]);
}

pub(super) async fn a_response_ends_once_with_its_last_events_and_knows_its_end_again(
    Pair { a, b, .. }: &Pair,
) {
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
}

pub(super) async fn a_cancel_ends_it_with_the_next_number_and_notifies_the_owner(
    Pair { a, b, .. }: &Pair,
) {
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
        // Its answer was lost, and then another client cancels it too.
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
}

pub(super) async fn its_owner_alone_adds_the_output_to_a_cancelled_response_and_once(
    Pair { a, b, .. }: &Pair,
) {
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
}

pub(super) async fn what_is_deleted_stays_so_whatever_its_owner_writes(Pair { a, b, .. }: &Pair) {
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
}
