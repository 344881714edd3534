//! Rules of responses to replay requests, of snapshots, and of what waits.

use super::play::*;
use crate::kv::source::DecodeError;
use crate::kv::stream::*;

#[test]
fn half_an_answer_counts_for_nothing() {
    let mut play = Play::new();
    play.connect(None);
    play.replay(frame(0, 0));
    play.wait();
    assert_eq!(play.asked, [0, 0]);
    assert_eq!(play.state(), "cold");
    play.end();
    assert_eq!(
        play.resets,
        [ResyncReason::Unverified],
        "whoever answers does not know its own start"
    );
}

/// vLLM's replay socket queues 1,000 messages and drops the rest, the end too.
#[test]
fn a_long_history_is_asked_for_in_as_many_responses_as_it_takes() {
    let mut play = Play::new();
    play.connect(None);
    let batches =
        |first: u64| (first..(first + 1_000).min(5_001)).map(|sequence| frame(0, sequence));
    for first in [0, 999, 1_998, 2_997, 3_996] {
        assert_eq!(play.asked.last(), Some(&first));
        batches(first).for_each(|batch| play.replay(batch));
        assert_eq!(play.state(), "cold");
        play.wait();
    }
    // What is left fits, so the end comes, too.
    assert_eq!(play.asked, [0, 999, 1_998, 2_997, 3_996, 4_995]);
    play.response(0, 4_995..=5_000);
    assert_eq!(play.state(), "live");
    assert_eq!(play.stream.reason(), StateReason::FullReplay);
    assert_eq!(play.numbers(), (0..=5_000).collect::<Vec<_>>());
    assert!(play.resets.is_empty());
    assert_eq!(play.stream.counts().replays_continued, 5);
}

#[test]
fn a_hole_in_a_response_is_asked_for_at_once() {
    let mut play = Play::new();
    play.connect(None);
    for sequence in [0, 1, 2, 6] {
        play.replay(frame(0, sequence));
    }
    assert_eq!(play.asked, [0, 2]);
    play.response(0, 2..=9);
    assert_eq!((play.state(), play.resets.len()), ("live", 0));
    assert_eq!(play.numbers(), (0..=9).collect::<Vec<_>>());
    // The same while it is verified.
    play.lose();
    play.connect(None);
    for sequence in [9, 10, 13] {
        play.replay(frame(0, sequence));
    }
    assert_eq!(
        (play.asked[2..].to_vec(), play.state()),
        (vec![9, 10], "stale")
    );
    play.response(0, 10..=13);
    assert_eq!((play.state(), play.resets.len()), ("live", 0));
}

/// However fast the engine publishes: no response would ever have its end.
#[test]
fn a_response_that_meets_the_live_batches_needs_no_end() {
    let mut play = Play::new();
    play.connect(None);
    play.say(0, 6..=9);
    for sequence in 0..=3 {
        play.replay(frame(0, sequence));
    }
    play.wait();
    assert_eq!(play.asked, [0, 3]);
    for sequence in 3..=6 {
        play.replay(frame(0, sequence));
    }
    assert_eq!((play.state(), play.numbers()), ("live", (0..=9).collect()));
    // What else it has is no news, and its holes are no gaps.
    for sequence in [7, 8, 12] {
        play.replay(frame(0, sequence));
    }
    play.end();
    play.say(0, [10, 11]);
    assert_eq!((play.state(), play.numbers()), ("live", (0..=11).collect()));
    assert!(play.resets.is_empty() && play.asked.len() == 2);
    // Live batches of another process are not what the response goes on with.
    let mut play = Play::new();
    play.connect(None);
    play.say(1, [2]);
    for sequence in 0..=2 {
        play.replay(frame(0, sequence));
    }
    assert_eq!(play.resets, [ResyncReason::EngineRestarted]);
}

#[test]
fn a_hole_that_stays_is_asked_for_twice_and_then_what_comes_after_it_is_all_there_is() {
    let mut play = Play::new();
    play.connect(None);
    for sequence in [0, 1, 5] {
        play.replay(frame(0, sequence));
    }
    for _ in 0..2 {
        play.replay(frame(0, 1));
        play.replay(frame(0, 5));
    }
    assert_eq!(play.asked, [0, 1, 1]);
    play.response(0, [6]);
    assert_eq!((play.state(), play.numbers()), ("partial", vec![5, 6]));
    assert_eq!(play.resets, [ResyncReason::Gap]);
}

#[test]
fn tries_without_progress_are_counted_and_those_with_it_are_not() {
    let mut play = Play::new();
    play.connect(None);
    play.replay(frame(0, 0));
    for last in 1..9 {
        play.wait();
        play.replay(frame(0, last - 1));
        play.replay(frame(0, last));
    }
    assert!(play.resets.is_empty());
    // A response that breaks off after something new is continued as well.
    play.fail();
    assert_eq!(play.asked.last(), Some(&8));
    play.wait();
    assert_eq!((play.asked.len(), play.resets.len()), (11, 0));
    play.wait();
    assert_eq!(play.resets, [ResyncReason::Unverified]);
}

#[test]
fn a_response_that_pauses_is_asked_again_sooner_than_one_that_has_not_begun() {
    let timeout = Settings::default().replay_timeout;
    let mut play = Play::new();
    play.connect(None);
    assert_eq!(play.stream.next_timeout(), Some(play.now + timeout));
    play.replay(frame(0, 0));
    play.replay(frame(0, 1));
    assert_eq!(play.stream.next_timeout(), Some(play.now + timeout / 4));
    play.wait();
    assert_eq!(play.stream.next_timeout(), Some(play.now + timeout));
}

#[test]
fn a_list_is_live_when_its_last_part_has_come() {
    let mut play = Play::new();
    play.connect(None);
    play.replay(chunk(40, 0, 2, 0));
    play.end();
    assert_eq!(
        (play.state(), play.stream.reason()),
        ("partial", StateReason::PartialSnapshot)
    );
    play.live_frame(chunk(41, 1, 2, 0));
    assert_eq!(
        (play.state(), play.stream.reason()),
        ("live", StateReason::Snapshot)
    );
    play.say(0, [42]);
    assert_eq!(play.numbers(), [40, 41, 42]);
}

#[test]
fn a_list_that_lacks_something_is_partial() {
    let mut play = Play::new();
    play.connect(None);
    play.replay(chunk(40, 0, 1, 3));
    play.end();
    assert_eq!(play.state(), "partial");
}

#[test]
fn a_list_cannot_be_proved_by_its_number_so_a_new_one_is_asked_for() {
    let mut play = Play::new();
    play.connect(None);
    play.replay(chunk(40, 0, 1, 0));
    play.end();
    play.lose();
    play.connect(None);
    assert_eq!(play.asked, [0, 0]);
    assert_eq!(play.state(), "stale");
    play.replay(chunk(50, 0, 1, 0));
    play.end();
    assert_eq!((play.state(), play.numbers()), ("live", vec![50]));
}

#[test]
fn a_list_is_not_asked_for_again_while_the_engine_is_idle() {
    let mut play = Play::new();
    play.connect(None);
    play.replay(chunk(40, 0, 2, 0));
    play.end();
    assert!(
        play.stream.next_timeout().is_some(),
        "half of it is missing"
    );
    play.live_frame(chunk(41, 1, 2, 0));
    assert_eq!((play.state(), play.stream.next_timeout()), ("live", None));
    // A batch after it can be asked for.
    play.say(0, [42]);
    play.wait();
    assert_eq!(play.asked, [0, 42]);
}

#[test]
fn an_unreadable_batch_forgets_all_but_its_number() {
    let mut play = Play::live(4);
    play.live_frame(SourceBatch {
        batch: Err(DecodeError("no map".to_owned())),
        ..frame(0, 5)
    });
    assert_eq!(
        (play.state(), play.resets.as_slice()),
        ("partial", &[ResyncReason::Undecodable][..])
    );
    play.say(0, [6]);
    assert_eq!(play.numbers(), [6]);
    assert!(play.asked.is_empty());
}

#[test]
fn a_witness_is_reason_to_ask_again() {
    let mut play = Play::live(4);
    play.restart_signal();
    assert_eq!((play.state(), play.asked.as_slice()), ("stale", &[4][..]));
    play.response(0, [4]);
    assert_eq!(play.state(), "live");
}

/// Health checks may see a restart after the connection to the new process was made.
#[test]
fn after_a_restart_signal_a_process_has_its_name_again_once_it_has_repeated_its_last_batch() {
    let mut play = Play::new();
    play.connect(Some("b"));
    play.response(0, 0..=4);
    play.restart_signal();
    assert_eq!((play.state(), play.stream.incarnation()), ("stale", None));
    play.response(0, [4]);
    assert_eq!(
        (play.state(), play.stream.incarnation()),
        ("live", Some("b"))
    );
}

#[test]
fn a_restart_signal_takes_the_name_from_no_process_that_has_no_tree() {
    let mut play = Play::new();
    play.connect(Some("b"));
    play.end();
    play.restart_signal();
    play.say(0, [0]);
    assert_eq!(
        (play.state(), play.stream.incarnation()),
        ("live", Some("b"))
    );
}

#[test]
fn what_waits_is_bounded_and_what_was_dropped_is_asked_for() {
    let mut play = Play::new();
    play.stream = EventStream::new(
        Settings {
            max_queued_batches: 2,
            ..Settings::default()
        },
        play.now,
    );
    play.connect(None);
    play.say(0, 1..=5);
    assert_eq!(play.stream.buffered(), (2, 20));
    assert_eq!(play.stream.counts().dropped_batches, 3);
    play.response(0, 0..=0);
    assert_eq!(play.numbers(), [0, 1, 2]);
    play.say(0, [6]);
    assert_eq!(play.asked, [0, 2]);
}

#[test]
fn the_largest_number_is_a_number_too() {
    let mut play = Play::new();
    play.connect_deaf();
    play.say(0, [u64::MAX - 1, u64::MAX, 0, u64::MAX, 1]);
    assert_eq!(play.state(), "partial");
}
