use std::time::Duration;

use super::*;

fn event(number: u64) -> Vec<u8> {
    format!("event: e\ndata: {number}\n\n").into_bytes()
}

fn down() -> store::Error {
    store::Error::Unavailable {
        retry_after: Duration::from_secs(1),
        why: "down".into(),
    }
}

fn too_large() -> store::Error {
    store::Error::TooLarge { bytes: 2, max: 1 }
}

/// One of which these many events are stored, and an engine speaks.
fn told(count: u64) -> Course {
    let mut course = Course::new(true, 0);
    course.on_begun();
    assert_eq!(course.next(), Step::Start);
    assert_eq!(course.on_started(&Ok(Cas::Done)), Then::Now);
    for number in 0..count {
        course.on_events(&event(number));
        assert_eq!(course.on_appended(number, &Ok(Cas::Done)), Then::Now);
    }
    assert_eq!(course.next(), Step::Listen);
    course
}

#[test]
fn events_are_stored_before_more_is_heard() {
    let mut course = told(3);
    course.on_events(&event(3));
    let Step::Append(batch) = course.next() else {
        panic!("{:?}", course.next());
    };
    assert_eq!((batch.first, batch.last), (3, 3));
    assert_eq!(course.on_appended(3, &Err(down())), Then::Later);
    assert_eq!(course.next(), Step::Append(batch));
    assert_eq!(
        course.on_appended(3, &Ok(Cas::Duplicate { last: 3 })),
        Then::Now
    );
    assert_eq!(course.next(), Step::Listen);
}

#[test]
fn what_nobody_has_seen_is_handed_back_and_the_rest_fails() {
    let failed = Step::Fail {
        why: STOPPED,
        is_recalled: false,
    };
    for (stored, expected) in [(3, Step::Release), (4, failed)] {
        let mut course = told(stored);
        course.on_stop(Stop::Draining);
        assert_eq!(course.next(), expected);
    }
    let mut course = Course::failing(true, 4, "lost");
    course.on_stop(Stop::Draining);
    assert_eq!(course.next(), Step::Release);
}

#[test]
fn of_a_cancel_and_an_end_the_store_says_which_came_first() {
    let mut course = told(3);
    course.on_last_event(&event(3));
    let cancelled = Ok(Cas::Terminal(Status::Cancelled));
    assert_eq!(course.on_finalized(&cancelled), Then::Now);
    assert_eq!(course.next(), Step::Cut);
    assert_eq!(
        course.on_record(&Ok(Some((Status::Cancelled, Some(3))))),
        Then::Now
    );
    assert_eq!((course.next(), course.log().stored()), (Step::Amend, 3));
    assert_eq!(course.on_amended(&Err(down())), Then::Later);
    assert_eq!(course.on_amended(&Ok(Cas::Done)), Then::Now);
    assert_eq!(
        (course.next(), course.tail(None, 99)),
        (Step::Leave, Tail::Left)
    );
}

#[test]
fn a_cancel_while_another_replicas_events_are_read_leaves_those() {
    let mut course = Course::failing(true, 2, "lost");
    course.on_stop(Stop::Ended);
    assert_eq!(course.next(), Step::Cut);
    assert_eq!(
        course.on_record(&Ok(Some((Status::Cancelled, Some(2))))),
        Then::Now
    );
    assert_eq!(course.next(), Step::Recall { after: None });
    let batch = |first, last, bytes: Vec<u8>| Batch {
        first,
        last,
        bytes: bytes.into(),
    };
    let told: Vec<u8> = (0..2).flat_map(event).collect();
    let read = Events {
        status: Status::Cancelled,
        batches: vec![
            batch(0, 1, told.clone()),
            batch(2, 2, log::CANCELLED.to_vec()),
        ],
        last: Some(2),
        kept: store::log::Kept::Whole,
    };
    assert_eq!(course.on_recalled(&Ok(Some(read))), Then::Now);
    assert_eq!(
        (course.next(), course.log().stored_text()),
        (Step::Amend, Some(&*told))
    );
}

#[test]
fn a_cancel_that_the_store_has_lost_hands_the_response_back() {
    let mut course = told(3);
    course.on_stop(Stop::Ended);
    assert_eq!(course.next(), Step::Cut);
    assert_eq!(
        course.on_record(&Ok(Some((Status::InProgress, Some(2))))),
        Then::Now
    );
    assert_eq!(course.next(), Step::Release);
}

#[test]
fn who_lost_the_lease_writes_nothing_more_whatever_it_was_about() {
    let mut ending = told(3);
    ending.on_last_event(&event(3));
    let mut cutting = told(3);
    cutting.on_stop(Stop::Ended);
    for mut course in [told(3), ending, cutting] {
        course.on_stop(Stop::Lost);
        assert_eq!(course.next(), Step::Leave);
    }
}

#[test]
fn an_end_too_large_to_keep_is_made_once_more_without_its_output() {
    let mut course = told(3);
    course.on_events(&event(3));
    course.on_last_event(&event(4));
    assert_eq!(course.on_finalized(&Err(too_large())), Then::Now);
    assert_eq!(course.next(), Step::Shorten { number: 3 });
    course.on_last_event(&event(3));
    let Step::Finalize(Some(batch)) = course.next() else {
        panic!("{:?}", course.next());
    };
    assert_eq!((batch.first, batch.last, &*batch.bytes), (3, 3, &*event(3)));
    // An append that nobody waited for was done after all.
    assert_eq!(
        course.on_finalized(&Ok(Cas::Duplicate { last: 3 })),
        Then::Now
    );
    assert_eq!(course.next(), Step::Shorten { number: 4 });
    course.on_last_event(&event(4));
    assert_eq!(course.on_finalized(&Err(too_large())), Then::Now);
    assert_eq!(course.next(), Step::Leave);
}

#[test]
fn an_end_whose_events_the_store_lost_is_told_with_them() {
    let mut course = told(4);
    course.on_last_event(&event(4));
    assert_eq!(
        course.on_finalized(&Ok(Cas::Gap { last: Some(1) })),
        Then::Now
    );
    let Step::Finalize(Some(batch)) = course.next() else {
        panic!("{:?}", course.next());
    };
    assert_eq!((batch.first, batch.last), (2, 4));
    assert_eq!(course.on_finalized(&Ok(Cas::Done)), Then::Now);
    let Tail::Here { text, last, is_end } = course.tail(Some(3), 99) else {
        panic!("{:?}", course.tail(Some(3), 99));
    };
    assert_eq!((text, last, is_end), (&*event(4), Some(4), true));
}

#[test]
fn what_another_replica_told_is_read_before_it_fails() {
    let mut course = Course::failing(true, 4, "lost");
    assert_eq!(course.next(), Step::Recall { after: None });
    let read = |first: u64, last: u64| {
        Ok(Some(Events {
            status: Status::InProgress,
            batches: vec![Batch {
                first,
                last,
                bytes: (first..=last).flat_map(event).collect(),
            }],
            last: Some(3),
            kept: store::log::Kept::Whole,
        }))
    };
    assert_eq!(course.on_recalled(&read(0, 1)), Then::Now);
    assert_eq!(course.next(), Step::Recall { after: Some(1) });
    assert_eq!(course.on_recalled(&Err(down())), Then::Later);
    assert_eq!(course.on_recalled(&read(1, 3)), Then::Now);
    let failed = Step::Fail {
        why: "lost",
        is_recalled: true,
    };
    assert_eq!(course.next(), failed);
    let whole: Vec<u8> = (0..4).flat_map(event).collect();
    assert_eq!(course.log().stored_text(), Some(&*whole));
    course.on_last_event(&event(4));
    let Step::Finalize(Some(batch)) = course.next() else {
        panic!("{:?}", course.next());
    };
    assert_eq!((batch.first, batch.last), (4, 4));
}

#[test]
fn what_the_store_will_never_take_is_not_asked_for_again() {
    let mut course = Course::new(true, 0);
    course.on_begun();
    assert_eq!(course.on_started(&Err(down())), Then::Later);
    assert_eq!(course.next(), Step::Start);
    assert_eq!(course.on_started(&Err(too_large())), Then::Now);
    let failed = Step::Fail {
        why: REFUSED,
        is_recalled: false,
    };
    assert_eq!(course.next(), failed);
    course.on_last_event(&event(0));
    assert!(matches!(course.next(), Step::Finalize(Some(_))));

    let mut course = Course::failing(true, 4, "lost");
    assert_eq!(course.on_recalled(&Err(too_large())), Then::Now);
    let failed = Step::Fail {
        why: "lost",
        is_recalled: true,
    };
    assert_eq!((course.next(), course.log().stored_text()), (failed, None));
    course.on_last_event(&event(4));
    let Step::Finalize(Some(batch)) = course.next() else {
        panic!("{:?}", course.next());
    };
    assert_eq!((batch.first, batch.last), (4, 4));
}
