use std::time::Duration;

use bytes::Bytes;

use super::*;
use crate::responses::background::log;
use crate::responses::background::run_phase::LOST;
use crate::store::{CancelOutcome, CommitRefusal, LoggedEvents};

fn event(number: u64) -> Vec<u8> {
    format!("event: e\ndata: {number}\n\n").into_bytes()
}

fn down() -> store::Error {
    store::Error::Unavailable {
        retry_after: Duration::from_secs(1),
        reason: "down".into(),
    }
}

fn too_large() -> store::Error {
    store::Error::TooLarge { bytes: 2, max: 1 }
}

fn changed() -> FailReason {
    FailReason::of_conversation(CommitRefusal::Unlocked)
}

fn not_added(refusal: CommitRefusal) -> Result<WriteOutcome, store::Error> {
    Ok(WriteOutcome::NotAdded(refusal))
}

/// A run whose engine answers, with `count` events stored.
fn streaming(count: u64) -> RunState {
    let mut state = RunState::new(true, 0);
    state.on_engine_started();
    assert_eq!(state.next(), Step::MarkStarted);
    assert_eq!(state.on_started(&Ok(WriteOutcome::Done)), Then::Continue);
    for number in 0..count {
        state.on_events(&event(number));
        assert_eq!(
            state.on_appended(number, &Ok(WriteOutcome::Done)),
            Then::Continue
        );
    }
    assert_eq!(state.next(), Step::ReadEngine);
    state
}

#[test]
fn events_are_stored_before_more_is_read() {
    let mut state = streaming(3);
    state.on_events(&event(3));
    let Step::Append(batch) = state.next() else {
        panic!("{:?}", state.next());
    };
    assert_eq!((batch.first, batch.last), (3, 3));
    assert_eq!(state.on_appended(3, &Err(down())), Then::RetryLater);
    assert_eq!(state.next(), Step::Append(batch));
    assert_eq!(
        state.on_appended(3, &Ok(WriteOutcome::Duplicate { last: 3 })),
        Then::Continue
    );
    assert_eq!(state.next(), Step::ReadEngine);
}

#[test]
fn a_drained_run_is_released_before_output_and_fails_after() {
    let failed = Step::Fail {
        reason: STOPPED,
        has_stored_output: false,
    };
    for (stored, expected) in [(3, Step::Release), (4, failed)] {
        let mut state = streaming(stored);
        state.on_stop(StopReason::Draining);
        assert_eq!(state.next(), expected);
    }
    let mut state = RunState::failing(true, 4, LOST);
    state.on_stop(StopReason::Draining);
    assert_eq!(state.next(), Step::Release);
}

#[test]
fn the_store_decides_between_a_cancel_and_an_end() {
    let mut state = streaming(3);
    state.on_last_event(&event(3));
    let cancelled = Ok(WriteOutcome::Terminal(Status::Cancelled));
    assert_eq!(state.on_finalized(&cancelled), Then::Continue);
    assert_eq!(state.next(), Step::ReadCancelled);
    assert_eq!(
        state.on_record(&Ok(Some((Status::Cancelled, Some(3))))),
        Then::Continue
    );
    assert_eq!((state.next(), state.log.stored()), (Step::StorePartial, 3));
    assert_eq!(state.on_partial_stored(&Err(down())), Then::RetryLater);
    assert_eq!(
        state.on_partial_stored(&Ok(WriteOutcome::Done)),
        Then::Continue
    );
    assert_eq!(
        (state.next(), state.tail(None, 99)),
        (Step::Done, Tail::NotRunning)
    );
}

#[test]
fn a_cancel_after_a_take_over_keeps_the_stored_events() {
    let mut state = RunState::failing(true, 2, LOST);
    state.on_stop(StopReason::Cancelled);
    assert_eq!(state.next(), Step::ReadCancelled);
    assert_eq!(
        state.on_record(&Ok(Some((Status::Cancelled, Some(2))))),
        Then::Continue
    );
    assert_eq!(state.next(), Step::ReadStored { after: None });
    let batch = |first, last, bytes: Vec<u8>| EventBatch {
        first,
        last,
        bytes: bytes.into(),
        tokens: Bytes::new(),
    };
    let received: Vec<u8> = (0..2).flat_map(event).collect();
    let read = LoggedEvents {
        status: Status::Cancelled,
        fencing_number: 1,
        batches: vec![
            batch(0, 1, received.clone()),
            batch(2, 2, log::CANCELLED.to_vec()),
        ],
        last: Some(2),
        log: store::log::LogState::Whole,
    };
    assert_eq!(state.on_stored_events(&Ok(Some(read))), Then::Continue);
    assert_eq!(
        (state.next(), state.log.stored_text()),
        (Step::StorePartial, Some(&*received))
    );
}

#[test]
fn a_cancel_that_the_store_lost_is_repeated() {
    let mut state = streaming(3);
    state.on_stop(StopReason::Cancelled);
    assert_eq!(state.next(), Step::ReadCancelled);
    assert_eq!(
        state.on_record(&Ok(Some((Status::InProgress, Some(2))))),
        Then::Continue
    );
    assert_eq!(state.next(), Step::CancelAgain);
    let slow = Err(store::Error::Unavailable {
        retry_after: Duration::from_secs(1),
        reason: "down".into(),
    });
    assert_eq!(state.on_cancelled_again(&slow), Then::RetryLater);
    let done = Ok(CancelOutcome::Done {
        was: Status::InProgress,
        owner: None,
    });
    assert_eq!(state.on_cancelled_again(&done), Then::Continue);
    assert_eq!(state.next(), Step::ReadCancelled);
}

#[test]
fn an_engine_that_is_lost_before_output_was_seen_is_followed_by_another() {
    let mut state = RunState::new(true, 0);
    state.on_events(&event(0));
    state.on_engine_started();
    assert!(state.restart());
    assert_eq!((state.next(), state.log.made()), (Step::ReadEngine, 0));
    let mut seen = streaming(4);
    assert!(!seen.restart());
    let mut polled = RunState::new(false, 0);
    polled.on_events(&event(0));
    assert!(polled.restart());
}

#[test]
fn after_the_lease_is_lost_nothing_is_written() {
    let mut ending = streaming(3);
    ending.on_last_event(&event(3));
    let mut cutting = streaming(3);
    cutting.on_stop(StopReason::Cancelled);
    for mut state in [streaming(3), ending, cutting] {
        state.on_stop(StopReason::LeaseLost);
        assert_eq!(state.next(), Step::Done);
    }
}

#[test]
fn an_end_that_is_too_large_to_store_becomes_a_failure_without_output() {
    let instead = |number| Step::FailInstead {
        number,
        reason: TOO_LARGE,
        keeps_output: false,
    };
    let mut state = streaming(3);
    state.on_events(&event(3));
    state.on_last_event(&event(4));
    assert_eq!(state.on_finalized(&Err(too_large())), Then::Continue);
    assert_eq!(state.next(), instead(3));
    state.on_last_event(&event(3));
    let Step::Finalize(Some(batch)) = state.next() else {
        panic!("{:?}", state.next());
    };
    assert_eq!((batch.first, batch.last, &*batch.bytes), (3, 3, &*event(3)));
    // An earlier append whose answer never came was stored after all.
    assert_eq!(
        state.on_finalized(&Ok(WriteOutcome::Duplicate { last: 3 })),
        Then::Continue
    );
    assert_eq!(state.next(), instead(4));
    state.on_last_event(&event(4));
    assert_eq!(state.on_finalized(&Err(too_large())), Then::Continue);
    assert_eq!(state.next(), Step::Done);
}

#[test]
fn a_turn_that_another_one_came_before_is_generated_again_while_nobody_has_read_any_of_it() {
    let mut state = RunState::new(false, 0);
    for _ in 0..HISTORIES_MAX {
        state.on_engine_started();
        let _ = state.on_started(&Ok(WriteOutcome::Done));
        state.on_last_event(&event(0));
        assert_eq!(state.next(), Step::Finalize(None));
        let _ = state.on_finalized(&not_added(CommitRefusal::Unlocked));
        assert!(state.has_old_history());
        assert_eq!(state.next(), Step::ReadEngine);
        state.on_new_history();
        assert!(!state.has_old_history());
    }
    state.on_last_event(&event(0));
    let _ = state.on_finalized(&not_added(CommitRefusal::Unlocked));
    let failed = Step::FailInstead {
        number: 0,
        reason: changed(),
        keeps_output: true,
    };
    assert_eq!(state.next(), failed);
}

#[test]
fn a_refused_turn_that_readers_have_a_part_of_fails_with_its_output() {
    for (stored, refusal) in [
        (4, CommitRefusal::Unlocked),
        (3, CommitRefusal::Gone),
        (4, CommitRefusal::TooLarge),
    ] {
        let mut state = streaming(stored);
        state.on_events(&event(stored));
        state.on_last_event(&event(stored + 1));
        let _ = state.on_finalized(&not_added(refusal));
        let failed = |keeps_output, reason| Step::FailInstead {
            number: stored,
            reason,
            keeps_output,
        };
        let reason = FailReason::of_conversation(refusal);
        assert_eq!(state.next(), failed(true, reason));
        state.on_last_event(&event(stored));
        let Step::Finalize(Some(batch)) = state.next() else {
            panic!("{:?}", state.next());
        };
        assert_eq!((batch.first, batch.last), (stored, stored));
        // With its output it is too large, too.
        let _ = state.on_finalized(&Err(too_large()));
        assert_eq!(state.next(), failed(false, TOO_LARGE));
        state.on_last_event(&event(stored));
        let _ = state.on_finalized(&Ok(WriteOutcome::Done));
        assert_eq!(state.next(), Step::Done);
    }
}

#[test]
fn an_orphan_whose_conversation_went_on_is_generated_again_or_fails() {
    let mut unseen = RunState::new(true, 3);
    unseen.on_conversation_lost(CommitRefusal::Unlocked);
    assert!(unseen.has_old_history());
    assert_eq!(unseen.next(), Step::ReadEngine);
    unseen.on_conversation_lost(CommitRefusal::Gone);
    let failed = Step::Fail {
        reason: FailReason::of_conversation(CommitRefusal::Gone),
        has_stored_output: false,
    };
    assert_eq!(unseen.next(), failed);
    assert!(!unseen.has_old_history());
}

#[test]
fn events_that_the_store_lost_are_stored_again_with_the_end() {
    let mut state = streaming(4);
    state.on_last_event(&event(4));
    assert_eq!(
        state.on_finalized(&Ok(WriteOutcome::Gap { last: Some(1) })),
        Then::Continue
    );
    let Step::Finalize(Some(batch)) = state.next() else {
        panic!("{:?}", state.next());
    };
    assert_eq!((batch.first, batch.last), (2, 4));
    assert_eq!(state.on_finalized(&Ok(WriteOutcome::Done)), Then::Continue);
    let Tail::InMemory { text, last, is_end } = state.tail(Some(3), 99) else {
        panic!("{:?}", state.tail(Some(3), 99));
    };
    assert_eq!((text, last, is_end), (&*event(4), Some(4), true));
}

#[test]
fn another_replicas_events_are_read_before_the_failure_is_stored() {
    let mut state = RunState::failing(true, 4, LOST);
    assert_eq!(state.next(), Step::ReadStored { after: None });
    let read = |first: u64, last: u64| {
        Ok(Some(LoggedEvents {
            status: Status::InProgress,
            fencing_number: 1,
            batches: vec![EventBatch {
                first,
                last,
                bytes: (first..=last).flat_map(event).collect(),
                tokens: Bytes::new(),
            }],
            last: Some(3),
            log: store::log::LogState::Whole,
        }))
    };
    assert_eq!(state.on_stored_events(&read(0, 1)), Then::Continue);
    assert_eq!(state.next(), Step::ReadStored { after: Some(1) });
    assert_eq!(state.on_stored_events(&Err(down())), Then::RetryLater);
    assert_eq!(state.on_stored_events(&read(1, 3)), Then::Continue);
    let failed = Step::Fail {
        reason: LOST,
        has_stored_output: true,
    };
    assert_eq!(state.next(), failed);
    let whole: Vec<u8> = (0..4).flat_map(event).collect();
    assert_eq!(state.log.stored_text(), Some(&*whole));
    state.on_last_event(&event(4));
    let Step::Finalize(Some(batch)) = state.next() else {
        panic!("{:?}", state.next());
    };
    assert_eq!((batch.first, batch.last), (4, 4));
}

#[test]
fn a_write_that_the_store_rejects_for_good_is_not_retried() {
    let mut state = RunState::new(true, 0);
    state.on_engine_started();
    assert_eq!(state.on_started(&Err(down())), Then::RetryLater);
    assert_eq!(state.next(), Step::MarkStarted);
    assert_eq!(state.on_started(&Err(too_large())), Then::Continue);
    let failed = Step::Fail {
        reason: REFUSED,
        has_stored_output: false,
    };
    assert_eq!(state.next(), failed);
    state.on_last_event(&event(0));
    assert!(matches!(state.next(), Step::Finalize(Some(_))));

    let mut state = RunState::failing(true, 4, LOST);
    assert_eq!(state.on_stored_events(&Err(too_large())), Then::Continue);
    let failed = Step::Fail {
        reason: LOST,
        has_stored_output: true,
    };
    assert_eq!((state.next(), state.log.stored_text()), (failed, None));
    state.on_last_event(&event(4));
    let Step::Finalize(Some(batch)) = state.next() else {
        panic!("{:?}", state.next());
    };
    assert_eq!((batch.first, batch.last), (4, 4));
}

fn stored(first: u64, last: u64, tokens: &'static [u8]) -> EventBatch {
    EventBatch {
        first,
        last,
        bytes: (first..=last).flat_map(event).collect(),
        tokens: Bytes::from_static(tokens),
    }
}

/// What a store answers that has these batches.
fn all(batches: Vec<EventBatch>) -> Result<Option<LoggedEvents>, store::Error> {
    Ok(Some(LoggedEvents {
        status: Status::InProgress,
        fencing_number: 1,
        last: batches.last().map(|batch| batch.last),
        batches,
        log: store::log::LogState::Whole,
    }))
}

/// A run that has read what another replica stored.
fn taken_over(tokens: &'static [u8]) -> RunState {
    let mut state = RunState::continuing(true, 5);
    assert_eq!(state.next(), Step::ReadStored { after: None });
    let batches = vec![stored(0, 2, b""), stored(3, 3, b"a"), stored(4, 4, tokens)];
    assert_eq!(state.on_stored_events(&all(batches)), Then::Continue);
    assert_eq!(state.next(), Step::GoOn);
    state
}

#[test]
fn a_run_goes_on_after_the_events_and_tokens_of_another_replica() {
    let mut state = taken_over(b"b");
    let parts: Vec<&[u8]> = state.log.tokens().unwrap().collect();
    assert_eq!(parts, [b"a", b"b"]);
    state.on_set_up(true);
    assert_eq!(state.next(), Step::ReadEngine);
    state.on_engine_started();
    assert_eq!(state.next(), Step::MarkStarted);
    assert_eq!(state.on_started(&Ok(WriteOutcome::Done)), Then::Continue);
    // Nobody may begin it again.
    assert!(!state.restart());
    state.on_events(&event(5));
    state.on_tokens(b"c".to_vec(), true);
    assert_eq!(state.next(), Step::Append(stored(5, 5, b"c")));
    // The store has lost what the other replica wrote: it is written again, with its tokens.
    let lost = Ok(WriteOutcome::Gap { last: Some(2) });
    assert_eq!(state.on_appended(5, &lost), Then::Continue);
    assert_eq!(state.next(), Step::Append(stored(3, 5, b"abc")));
    assert_eq!(
        state.on_appended(5, &Ok(WriteOutcome::Done)),
        Then::Continue
    );
    // The next one could go on as well; with a log that is not whole it could not.
    let mut cut = taken_over(b"b");
    cut.on_set_up(true);
    cut.on_events(&event(5));
    cut.on_tokens(b"c".to_vec(), true);
    assert_eq!(
        cut.on_appended(5, &Ok(WriteOutcome::Overflow)),
        Then::Continue
    );
    for (mut state, expected) in [
        (state, Step::Release),
        (
            cut,
            Step::Fail {
                reason: STOPPED,
                has_stored_output: false,
            },
        ),
    ] {
        state.on_stop(StopReason::Draining);
        assert_eq!(state.next(), expected);
    }
}

#[test]
fn a_run_that_cannot_go_on_fails_with_the_stored_output() {
    let mut without = taken_over(b"");
    assert!(without.log.tokens().is_none());
    without.on_set_up(false);
    let mut state = RunState::continuing(true, 5);
    assert_eq!(state.on_stored_events(&Err(down())), Then::RetryLater);
    state.on_conversation_lost(CommitRefusal::Unlocked);
    let batches = vec![stored(0, 4, b"a")];
    assert_eq!(state.on_stored_events(&all(batches)), Then::Continue);
    for (state, expected) in [(without, LOST), (state, changed())] {
        let failed = Step::Fail {
            reason: expected,
            has_stored_output: true,
        };
        assert_eq!(state.next(), failed);
        assert_eq!(
            state.log.stored_text().map(<[u8]>::len),
            Some(5 * event(0).len())
        );
    }
}

#[test]
fn a_run_is_stopped_while_it_reads_what_it_goes_on_after() {
    for (reason, expected) in [
        (StopReason::Draining, Step::Release),
        (StopReason::Cancelled, Step::ReadCancelled),
    ] {
        let mut state = RunState::continuing(true, 5);
        state.on_stop(reason);
        assert_eq!(state.next(), expected);
        let mut state = taken_over(b"b");
        state.on_stop(reason);
        state.on_set_up(true);
        assert_eq!(state.next(), expected);
    }
    let mut state = taken_over(b"b");
    state.on_stop(StopReason::TimeLimit);
    assert_eq!(state.next(), Step::ReadStored { after: Some(4) });
}
