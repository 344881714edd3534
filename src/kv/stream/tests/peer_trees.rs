//! Rules of the trees of other replicas.

use super::play::*;
use crate::kv::stream::*;

#[test]
fn a_history_that_does_not_reach_back_is_asked_of_another_replica_and_a_whole_one_is_not() {
    let mut play = Play::with_peers();
    play.connect(None);
    play.response(0, 0..=4);
    assert_eq!((play.state(), play.tree_requests), ("live", 0));
    let mut play = Play::with_peers();
    play.connect(None);
    play.end();
    assert_eq!(play.tree_requests, 0, "nothing was ever published");
    let mut play = Play::with_peers();
    play.connect(None);
    play.response(0, 5..=9);
    assert_eq!((play.state(), play.tree_requests), ("partial", 1));
    assert!(!play.stream.is_settled());
    let mut play = Play::new();
    play.connect(None);
    play.response(0, 5..=9);
    assert_eq!((play.state(), play.tree_requests), ("partial", 0));
    assert!(play.stream.is_settled());
}

#[test]
fn a_tree_counts_once_the_engine_has_repeated_its_last_batch() {
    let mut play = Play::with_peers();
    play.connect(None);
    play.response(0, 5..=9);
    play.say(0, [10]);
    assert_eq!(play.tree(&tree(0, 8)), Ok(()));
    assert_eq!((play.state(), play.trees_taken), ("stale", 1));
    assert_eq!(play.asked, [0, 8]);
    play.say(0, [11]);
    play.response(0, 8..=11);
    assert_eq!((play.state(), play.numbers()), ("live", vec![9, 10, 11]));
    assert_eq!(play.stream.reason(), StateReason::PeerTree);
    assert!(play.resets.is_empty() && play.stream.is_settled());
    // What it gives on is as good.
    assert_eq!(play.stream.peer_tree(), Some(tree(0, 11)));
}

/// The other replica may have seen more of the engine than this one.
#[test]
fn a_tree_may_be_ahead_of_what_was_heard() {
    let mut play = Play::with_peers();
    play.connect(None);
    play.response(0, 5..=9);
    assert_eq!(play.tree(&tree(0, 12)), Ok(()));
    play.say(0, [10, 11, 12, 13]);
    play.response(0, 12..=12);
    assert_eq!((play.state(), play.numbers()), ("live", vec![13]));
}

#[test]
fn a_tree_with_another_digest_changes_nothing() {
    let mut play = Play::with_peers();
    play.connect(None);
    play.response(0, 5..=9);
    assert_eq!(play.tree(&tree(1, 8)), Err(PeerTreeRefusal::OtherDigest));
    assert_eq!(
        (play.state(), play.numbers()),
        ("partial", (5..=9).collect())
    );
    // The next replica's is taken.
    assert_eq!(play.tree(&tree(0, 7)), Ok(()));
    play.response(0, 7..=9);
    assert_eq!((play.state(), play.numbers()), ("live", vec![8, 9]));
}

#[test]
fn a_tree_that_the_engine_does_not_confirm_is_forgotten_and_the_replay_is_asked_for_again() {
    let mut play = Play::with_peers();
    for asked in 1..=3 {
        if asked == 1 {
            play.connect(None);
            play.response(0, 5_005..=5_009);
        }
        assert_eq!(play.tree_requests, asked);
        // It ends before what is known here.
        assert_eq!(play.tree(&tree(1, 20)), Ok(()));
        play.replay(frame(0, 20));
        assert_eq!(play.resets.len(), asked as usize);
        assert_eq!(play.resets.last(), Some(&ResyncReason::PeerTree));
        assert_eq!((play.state(), play.asked.last()), ("cold", Some(&0)));
        play.response(0, 5_005..=5_009);
        assert_eq!(play.state(), "partial");
    }
    assert_eq!(play.tree_requests, 3, "then no other is asked for");
    play.lose();
    play.connect(None);
    play.response(0, 6_005..=6_009);
    assert_eq!(play.tree_requests, 4, "until the next connection");
}

#[test]
fn an_engine_that_restarts_while_a_tree_comes_is_found_out() {
    let mut play = Play::with_peers();
    play.connect(None);
    play.response(0, 5..=9);
    play.lose();
    assert_eq!(play.tree(&tree(0, 9)), Err(PeerTreeRefusal::Disconnected));
    play.connect(None);
    // The tree is of the process before, like what is known here.
    assert_eq!(play.tree(&tree(0, 9)), Ok(()));
    play.end();
    assert_eq!(play.resets, [ResyncReason::PeerTree]);
    play.response(1, 0..=3);
    assert_eq!((play.state(), play.applied.len()), ("live", 4));
    assert_eq!(
        play.tree(&tree(1, 2)),
        Err(PeerTreeRefusal::NotNeeded),
        "all is known now"
    );
}

#[test]
fn a_tree_that_was_asked_for_when_the_connection_was_lost_is_asked_for_once_more() {
    for is_answered_late in [false, true] {
        let mut play = Play::with_peers();
        play.connect(None);
        play.response(0, 5..=9);
        assert_eq!(play.tree_requests, 1);
        play.lose();
        if !is_answered_late {
            play.no_tree();
        }
        assert!(
            !play.stream.is_settled(),
            "more is known once it is connected"
        );
        play.connect(None);
        assert!(!play.stream.is_settled());
        play.response(0, 9..=9);
        if is_answered_late {
            assert_eq!(play.tree_requests, 1, "it may still come");
            play.no_tree();
        }
        assert_eq!((play.state(), play.tree_requests), ("partial", 2));
        assert!(!play.stream.is_settled());
        assert_eq!(play.tree(&tree(0, 8)), Ok(()));
        play.response(0, 8..=9);
        assert_eq!((play.state(), play.trees_taken), ("live", 1));
    }
}

#[test]
fn after_a_lost_connection_a_tree_that_no_replica_has_is_asked_for_no_third_time() {
    let mut play = Play::with_peers();
    play.connect(None);
    play.response(0, 5..=9);
    play.lose();
    play.connect(None);
    play.response(0, 9..=9);
    play.no_tree();
    for _ in 0..3 {
        play.no_tree();
        assert_eq!((play.state(), play.tree_requests), ("partial", 2));
        assert!(play.stream.is_settled());
        // The engine is silent, and shows again that it is the same process.
        play.wait();
        play.response(0, 9..=9);
    }
    // A connection that is lost while none is asked for interrupts nothing.
    play.lose();
    assert!(play.stream.is_settled());
    play.connect(None);
    play.response(0, 9..=9);
    assert_eq!((play.state(), play.tree_requests), ("partial", 2));
}

#[test]
fn a_live_batch_that_ends_the_verification_asks_for_a_tree_again_whatever_the_replay_does() {
    for does_fail in [false, true] {
        let mut play = Play::with_peers();
        play.connect(None);
        play.response(0, 5..=9);
        play.lose();
        play.connect(None);
        play.response(0, 9..=9);
        assert_eq!(play.tree_requests, 1, "it may still come");
        // The engine is silent, and asked for its last batch, when it is known that no replica has a tree.
        play.wait();
        play.no_tree();
        assert_eq!(play.tree_requests, 1);
        play.say(0, [10]);
        assert_eq!((play.state(), play.tree_requests), ("partial", 2));
        assert!(!play.stream.is_settled());
        if does_fail {
            play.fail();
        } else {
            play.response(0, 9..=10);
        }
        assert_eq!((play.state(), play.tree_requests), ("partial", 2));
        play.no_tree();
        assert!(play.stream.is_settled());
        play.wait();
        play.say(0, [11]);
        play.response(0, 10..=11);
        assert_eq!(play.tree_requests, 2, "not a third time");
    }
}

#[test]
fn a_tree_that_comes_after_a_live_batch_has_ended_the_verification_is_verified_by_itself() {
    let mut play = Play::with_peers();
    play.connect(None);
    play.response(0, 5..=9);
    play.lose();
    play.connect(None);
    play.response(0, 9..=9);
    play.wait();
    play.no_tree();
    play.say(0, [10]);
    assert_eq!(play.tree(&tree(0, 8)), Ok(()));
    assert_eq!((play.state(), play.asked.last()), ("stale", Some(&8)));
    play.response(0, 8..=10);
    assert_eq!((play.state(), play.numbers()), ("live", vec![9, 10]));
    assert!(play.resets.is_empty() && play.stream.is_settled());
}

#[test]
fn a_first_replay_that_broke_off_with_its_connection_is_followed_by_a_request_for_a_tree() {
    let mut play = Play::with_peers();
    play.connect(None);
    play.replay(frame(0, 5));
    play.replay(frame(0, 6));
    play.lose();
    play.connect(None);
    assert_eq!(play.asked, [0, 6]);
    play.response(0, 6..=9);
    assert_eq!((play.state(), play.tree_requests), ("partial", 1));
    // One that reaches back to the first batch needs none.
    let mut play = Play::with_peers();
    play.connect(None);
    play.replay(frame(0, 0));
    play.lose();
    play.connect(None);
    play.response(0, 0..=4);
    assert_eq!((play.state(), play.tree_requests), ("live", 0));
    assert!(play.stream.is_settled());
}

#[test]
fn without_a_replay_a_tree_that_was_asked_for_before_the_connection_was_lost_is_asked_for_again() {
    let mut play = Play::with_peers();
    play.connect_deaf();
    play.say(0, [20]);
    assert_eq!((play.state(), play.tree_requests), ("cold", 1));
    play.lose();
    play.connect_deaf();
    play.say(0, [25]);
    assert_eq!((play.state(), play.tree_requests), ("cold", 1));
    // The answer to what was asked for on the former connection.
    play.no_tree();
    assert_eq!((play.state(), play.tree_requests), ("cold", 2));
    play.no_tree();
    assert_eq!((play.state(), play.numbers()), ("partial", vec![25]));
    assert_eq!(play.tree_requests, 2);
}

#[test]
fn a_tree_of_another_incarnation_is_refused_before_anything_is_asked() {
    let mut play = Play::with_peers();
    play.connect(Some("b"));
    play.response(0, 5..=9);
    let of = |incarnation: &str| PeerTree {
        incarnation: Some(incarnation.to_owned()),
        ..tree(0, 9)
    };
    assert_eq!(play.tree(&of("a")), Err(PeerTreeRefusal::OtherIncarnation));
    assert_eq!(play.tree(&of("b")), Ok(()));
}

/// The lost connection's incarnation says nothing of a tree that a replica gives after the engine's restart.
#[test]
fn a_tree_of_a_newer_incarnation_that_comes_while_disconnected_is_not_refused_for_it() {
    let mut play = Play::with_peers();
    play.connect(Some("a"));
    play.response(0, 5..=9);
    play.lose();
    let newer = PeerTree {
        incarnation: Some("b".to_owned()),
        ..tree(1, 9)
    };
    assert_eq!(play.tree(&newer), Err(PeerTreeRefusal::Disconnected));
    play.no_tree();
    play.connect(Some("b"));
    play.response(1, 5..=9);
    assert_eq!(play.tree_requests, 2);
    assert_eq!(play.tree(&newer), Ok(()));
    play.response(1, 9..=9);
    assert_eq!((play.state(), play.trees_taken), ("live", 1));
}

#[test]
fn without_a_replay_batches_wait_for_a_tree_that_one_of_them_confirms() {
    let mut play = Play::with_peers();
    play.connect_deaf();
    play.say(0, [20, 21, 22]);
    assert_eq!((play.state(), play.applied.len()), ("cold", 0));
    assert_eq!(play.tree_requests, 1);
    // Before all that waits, or after it: the engine has not shown that batch.
    for last in [19, 23] {
        let refused = play.tree(&tree(0, last));
        assert_eq!(refused, Err(PeerTreeRefusal::NotYetConfirmed));
    }
    assert_eq!(play.tree(&tree(1, 21)), Err(PeerTreeRefusal::OtherDigest));
    assert_eq!(play.tree(&tree(0, 21)), Ok(()));
    assert_eq!((play.state(), play.numbers()), ("live", vec![22]));
    play.say(0, [23]);
    assert_eq!(play.state(), "live");
}

#[test]
fn without_a_replay_a_hole_after_the_tree_is_a_gap() {
    let mut play = Play::with_peers();
    play.connect_deaf();
    play.say(0, [20, 21, 23]);
    assert_eq!(play.tree(&tree(0, 21)), Ok(()));
    assert_eq!((play.state(), play.numbers()), ("partial", vec![23]));
    assert_eq!(play.resets, [ResyncReason::Gap]);
}

#[test]
fn batches_wait_no_longer_than_the_timeout_and_not_a_second_time() {
    for none_has_one in [false, true] {
        let mut play = Play::with_peers();
        play.connect_deaf();
        play.say(0, [20]);
        assert_eq!(
            play.stream.next_timeout(),
            Some(play.now + PEER_TREE_TIMEOUT)
        );
        assert!(!play.stream.is_settled());
        if none_has_one {
            play.no_tree();
        } else {
            play.wait();
        }
        assert_eq!((play.state(), play.numbers()), ("partial", vec![20]));
        play.say(0, [21, 23]);
        assert_eq!((play.state(), play.numbers()), ("partial", vec![23]));
        assert_eq!(play.tree_requests, 1);
    }
}

#[test]
fn a_batch_that_is_the_engines_first_waits_for_no_replica() {
    let mut play = Play::with_peers();
    play.connect_deaf();
    play.say(0, [0, 1]);
    assert_eq!((play.state(), play.tree_requests), ("live", 0));
}

#[test]
fn who_replays_nothing_though_it_should_is_followed_by_what_waits() {
    let mut play = Play::with_peers();
    play.connect(None);
    play.wait();
    play.say(0, [20, 21]);
    play.wait();
    assert_eq!((play.state(), play.tree_requests), ("cold", 1));
    assert_eq!(play.tree(&tree(0, 20)), Ok(()));
    assert_eq!((play.state(), play.numbers()), ("live", vec![21]));
}

#[test]
fn a_tree_that_is_not_whole_is_partial_here_too() {
    let mut play = Play::with_peers();
    play.connect(None);
    play.response(0, 5..=9);
    let partial = PeerTree {
        is_complete: false,
        ..tree(0, 9)
    };
    assert_eq!(play.tree(&partial), Ok(()));
    play.response(0, 9..=9);
    assert_eq!(play.state(), "partial");
    assert_eq!(play.stream.peer_tree(), Some(partial));
}

#[test]
fn what_does_not_count_here_is_given_to_no_replica() {
    let mut play = Play::new();
    assert_eq!(play.stream.peer_tree(), None);
    play.connect(None);
    play.replay(frame(0, 0));
    assert_eq!(play.stream.peer_tree(), None);
    play.end();
    assert_eq!(play.stream.peer_tree(), Some(tree(0, 0)));
    play.lose();
    assert_eq!(play.stream.peer_tree(), None);
    // The engine could not confirm a list by its number.
    let mut play = Play::new();
    play.connect(None);
    play.replay(chunk(40, 0, 1, 0));
    play.end();
    assert_eq!((play.state(), play.stream.peer_tree()), ("live", None));
}
