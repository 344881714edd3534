use std::time::Duration;

use super::*;

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

/// One of which these many events are stored, and an engine speaks.
fn told(count: u64) -> RunState {
    let mut state = RunState::new(true, 0);
    state.on_begun();
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
fn events_are_stored_before_more_is_heard() {
    let mut state = told(3);
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
fn what_nobody_has_seen_is_handed_back_and_the_rest_fails() {
    let failed = Step::Fail {
        why: STOPPED,
        is_recalled: false,
    };
    for (stored, expected) in [(3, Step::Release), (4, failed)] {
        let mut state = told(stored);
        state.on_stop(StopReason::Draining);
        assert_eq!(state.next(), expected);
    }
    let mut state = RunState::failing(true, 4, "lost");
    state.on_stop(StopReason::Draining);
    assert_eq!(state.next(), Step::Release);
}

#[test]
fn of_a_cancel_and_an_end_the_store_says_which_came_first() {
    let mut state = told(3);
    state.on_last_event(&event(3));
    let cancelled = Ok(WriteOutcome::Terminal(Status::Cancelled));
    assert_eq!(state.on_finalized(&cancelled), Then::Continue);
    assert_eq!(state.next(), Step::ReadCancelled);
    assert_eq!(
        state.on_record(&Ok(Some((Status::Cancelled, Some(3))))),
        Then::Continue
    );
    assert_eq!(
        (state.next(), state.log().stored()),
        (Step::StorePartial, 3)
    );
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
fn a_cancel_while_another_replicas_events_are_read_leaves_those() {
    let mut state = RunState::failing(true, 2, "lost");
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
    };
    let told: Vec<u8> = (0..2).flat_map(event).collect();
    let read = LoggedEvents {
        status: Status::Cancelled,
        batches: vec![
            batch(0, 1, told.clone()),
            batch(2, 2, log::CANCELLED.to_vec()),
        ],
        last: Some(2),
        log: store::log::LogState::Whole,
    };
    assert_eq!(state.on_stored_events(&Ok(Some(read))), Then::Continue);
    assert_eq!(
        (state.next(), state.log().stored_text()),
        (Step::StorePartial, Some(&*told))
    );
}

#[test]
fn a_cancel_that_the_store_has_lost_hands_the_response_back() {
    let mut state = told(3);
    state.on_stop(StopReason::Cancelled);
    assert_eq!(state.next(), Step::ReadCancelled);
    assert_eq!(
        state.on_record(&Ok(Some((Status::InProgress, Some(2))))),
        Then::Continue
    );
    assert_eq!(state.next(), Step::Release);
}

#[test]
fn who_lost_the_lease_writes_nothing_more_whatever_it_was_about() {
    let mut ending = told(3);
    ending.on_last_event(&event(3));
    let mut cutting = told(3);
    cutting.on_stop(StopReason::Cancelled);
    for mut state in [told(3), ending, cutting] {
        state.on_stop(StopReason::LeaseLost);
        assert_eq!(state.next(), Step::Done);
    }
}

#[test]
fn an_end_too_large_to_keep_is_made_once_more_without_its_output() {
    let mut state = told(3);
    state.on_events(&event(3));
    state.on_last_event(&event(4));
    assert_eq!(state.on_finalized(&Err(too_large())), Then::Continue);
    assert_eq!(state.next(), Step::FailWithoutOutput { number: 3 });
    state.on_last_event(&event(3));
    let Step::Finalize(Some(batch)) = state.next() else {
        panic!("{:?}", state.next());
    };
    assert_eq!((batch.first, batch.last, &*batch.bytes), (3, 3, &*event(3)));
    // An append that nobody waited for was done after all.
    assert_eq!(
        state.on_finalized(&Ok(WriteOutcome::Duplicate { last: 3 })),
        Then::Continue
    );
    assert_eq!(state.next(), Step::FailWithoutOutput { number: 4 });
    state.on_last_event(&event(4));
    assert_eq!(state.on_finalized(&Err(too_large())), Then::Continue);
    assert_eq!(state.next(), Step::Done);
}

#[test]
fn an_end_whose_events_the_store_lost_is_told_with_them() {
    let mut state = told(4);
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
fn what_another_replica_told_is_read_before_it_fails() {
    let mut state = RunState::failing(true, 4, "lost");
    assert_eq!(state.next(), Step::ReadStored { after: None });
    let read = |first: u64, last: u64| {
        Ok(Some(LoggedEvents {
            status: Status::InProgress,
            batches: vec![EventBatch {
                first,
                last,
                bytes: (first..=last).flat_map(event).collect(),
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
        why: "lost",
        is_recalled: true,
    };
    assert_eq!(state.next(), failed);
    let whole: Vec<u8> = (0..4).flat_map(event).collect();
    assert_eq!(state.log().stored_text(), Some(&*whole));
    state.on_last_event(&event(4));
    let Step::Finalize(Some(batch)) = state.next() else {
        panic!("{:?}", state.next());
    };
    assert_eq!((batch.first, batch.last), (4, 4));
}

#[test]
fn what_the_store_will_never_take_is_not_asked_for_again() {
    let mut state = RunState::new(true, 0);
    state.on_begun();
    assert_eq!(state.on_started(&Err(down())), Then::RetryLater);
    assert_eq!(state.next(), Step::MarkStarted);
    assert_eq!(state.on_started(&Err(too_large())), Then::Continue);
    let failed = Step::Fail {
        why: REFUSED,
        is_recalled: false,
    };
    assert_eq!(state.next(), failed);
    state.on_last_event(&event(0));
    assert!(matches!(state.next(), Step::Finalize(Some(_))));

    let mut state = RunState::failing(true, 4, "lost");
    assert_eq!(state.on_stored_events(&Err(too_large())), Then::Continue);
    let failed = Step::Fail {
        why: "lost",
        is_recalled: true,
    };
    assert_eq!((state.next(), state.log().stored_text()), (failed, None));
    state.on_last_event(&event(4));
    let Step::Finalize(Some(batch)) = state.next() else {
        panic!("{:?}", state.next());
    };
    assert_eq!((batch.first, batch.last), (4, 4));
}
