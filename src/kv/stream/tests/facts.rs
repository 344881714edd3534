//! The rules one by one, and what the random engine once found.

use std::time::{Duration, Instant};

use crate::kv::source::SnapshotChunk;
use crate::kv::stream::*;

/// What a batch carries: whose it is, and its number.
type Payload = (u64, u64);

struct Play {
    stream: EventStream<Payload>,
    now: Instant,
    /// What was applied since all was forgotten.
    applied: Vec<Payload>,
    asked: Vec<u64>,
    resets: Vec<ResyncReason>,
    tree_requests: u32,
    trees_taken: u32,
}

const PEER_TREE_TIMEOUT: Duration = Duration::from_secs(10);

/// A whole tree of a process, up to a batch.
fn tree(process: u64, sequence: u64) -> PeerTree {
    PeerTree {
        sequence,
        digest: frame(process, sequence).digest,
        is_complete: true,
        incarnation: None,
    }
}

fn frame(process: u64, sequence: u64) -> Sequenced<Payload> {
    Sequenced {
        sequence,
        digest: u128::from(process) << 64 | u128::from(sequence),
        bytes: 10,
        snapshot: None,
        payload: Some((process, sequence)),
    }
}

fn chunk(sequence: u64, index: u32, count: u32, unknown_before: u64) -> Sequenced<Payload> {
    Sequenced {
        snapshot: Some(SnapshotChunk {
            index,
            count,
            unknown_before,
        }),
        digest: 99,
        ..frame(0, sequence)
    }
}

impl Play {
    fn new() -> Self {
        let now = crate::observe::now();
        Self {
            stream: EventStream::new(Settings::default(), now),
            now,
            applied: Vec::new(),
            asked: Vec::new(),
            resets: Vec::new(),
            tree_requests: 0,
            trees_taken: 0,
        }
    }

    /// One that has other replicas to ask.
    fn with_peers() -> Self {
        let mut play = Self::new();
        play.stream =
            EventStream::new(Settings::default(), play.now).with_peer_trees(PEER_TREE_TIMEOUT);
        play
    }

    fn tree(&mut self, tree: &PeerTree) -> Result<(), PeerTreeRefusal> {
        let steps = self.stream.on_peer_tree(self.now, tree)?;
        self.took(steps);
        Ok(())
    }

    fn no_tree(&mut self) {
        let steps = self.stream.on_no_peer_tree(self.now);
        self.took(steps);
    }

    /// One that has joined process 0 at its first batch and followed it up to `last`.
    fn live(last: u64) -> Self {
        let mut play = Self::new();
        play.connect(None);
        play.response(0, 0..=last);
        assert_eq!(play.state(), "live");
        play.asked.clear();
        play
    }

    fn took(&mut self, steps: Steps<Payload>) {
        for step in steps {
            match step {
                Step::Apply { payload, .. } => self.applied.push(payload),
                Step::Clear(reason) => {
                    self.applied.clear();
                    self.resets.push(reason);
                }
                Step::RequestReplay { first } => self.asked.push(first),
                Step::RequestPeerTree => self.tree_requests += 1,
                Step::TakePeerTree => {
                    self.applied.clear();
                    self.trees_taken += 1;
                }
            }
        }
    }

    fn connect(&mut self, incarnation: Option<&str>) {
        let steps = self.stream.on_connected(self.now, incarnation, true);
        self.took(steps);
    }

    fn connect_deaf(&mut self) {
        let steps = self.stream.on_connected(self.now, None, false);
        self.took(steps);
    }

    fn lose(&mut self) {
        let steps = self.stream.on_disconnected(self.now);
        self.took(steps);
    }

    fn live_frame(&mut self, frame: Sequenced<Payload>) {
        let steps = self.stream.on_live(self.now, frame);
        self.took(steps);
    }

    fn say(&mut self, process: u64, sequences: impl IntoIterator<Item = u64>) {
        for sequence in sequences {
            self.live_frame(frame(process, sequence));
        }
    }

    fn replay(&mut self, frame: Sequenced<Payload>) {
        let steps = self.stream.on_replayed(self.now, frame);
        self.took(steps);
    }

    fn end(&mut self) {
        let steps = self.stream.on_replay_end(self.now);
        self.took(steps);
    }

    fn fail(&mut self) {
        let steps = self.stream.on_replay_failed(self.now);
        self.took(steps);
    }

    fn response(&mut self, process: u64, sequences: impl IntoIterator<Item = u64>) {
        for sequence in sequences {
            self.replay(frame(process, sequence));
        }
        self.end();
    }

    fn wait(&mut self) {
        self.now = self.stream.next_timeout().expect("it waits for something");
        let steps = self.stream.on_timeout(self.now);
        self.took(steps);
    }

    fn state(&self) -> &'static str {
        self.stream.state().as_str()
    }

    fn numbers(&self) -> Vec<u64> {
        self.applied.iter().map(|(_, sequence)| *sequence).collect()
    }
}

#[test]
fn a_join_asks_from_the_first_and_counts_once_the_answer_has_ended() {
    let mut play = Play::new();
    play.connect(None);
    assert_eq!(play.asked, [0]);
    play.say(0, [3, 4]);
    for sequence in 0..=2 {
        play.replay(frame(0, sequence));
        assert_eq!(play.state(), "cold");
    }
    play.replay(frame(0, 3));
    play.end();
    assert_eq!(play.state(), "live");
    assert_eq!(play.numbers(), [0, 1, 2, 3, 4]);
}

#[test]
fn a_join_that_begins_late_is_partial() {
    let mut play = Play::new();
    play.connect(None);
    play.response(0, 5..=7);
    assert_eq!(play.state(), "partial");
    assert_eq!(play.stream.reason(), StateReason::HistoryTruncated);
}

#[test]
fn a_source_without_replays_is_whole_from_batch_nought_and_forgets_at_any_break() {
    let mut play = Play::new();
    play.connect_deaf();
    play.say(0, [0, 1, 1]);
    assert_eq!((play.state(), play.numbers()), ("live", vec![0, 1]));
    play.say(0, [3]);
    assert_eq!((play.state(), play.numbers()), ("partial", vec![3]));
    play.say(0, [2]);
    assert!(
        play.applied.is_empty(),
        "what removed its blocks may have come before"
    );
    play.say(0, [4]);
    play.lose();
    assert_eq!(play.state(), "cold");
    use ResyncReason::*;
    assert_eq!(play.resets, [Gap, SequenceRegressed, Gap, Disconnected]);
    assert!(play.asked.is_empty());
}

#[test]
fn a_gap_asks_for_a_replay_from_the_last_one_known_and_goes_on_scoring() {
    let mut play = Play::live(4);
    play.say(0, [7]);
    assert_eq!(play.asked, [4]);
    assert_eq!(play.state(), "live");
    play.say(0, [8]);
    play.response(0, 4..=7);
    assert_eq!(play.state(), "live");
    assert_eq!(play.numbers(), [0, 1, 2, 3, 4, 5, 6, 7, 8]);
    assert_eq!(play.stream.counts().gaps, 1);
}

#[test]
fn a_gap_found_while_it_is_asked_about_silence_is_counted_once() {
    let mut play = Play::live(4);
    play.wait();
    play.say(0, [7, 8]);
    assert_eq!((play.state(), play.asked.as_slice()), ("live", &[4][..]));
    assert_eq!(play.stream.counts().gaps, 1);
    play.response(0, 4..=8);
    assert_eq!(play.numbers(), (0..=8).collect::<Vec<_>>());
    assert_eq!(play.stream.counts().gaps, 1);
}

#[test]
fn a_gap_that_another_process_fills_is_a_restart() {
    let mut play = Play::live(4);
    play.say(0, [7]);
    play.replay(frame(1, 4));
    assert_eq!(play.resets, [ResyncReason::EngineRestarted]);
    assert_eq!(play.asked, [4, 0]);
    assert!(play.applied.is_empty());
}

#[test]
fn a_gap_that_cannot_be_filled_leaves_what_comes_after_it() {
    let mut play = Play::live(4);
    play.say(0, [7]);
    play.response(0, 6..=7);
    assert_eq!(play.state(), "partial");
    assert_eq!(play.resets, [ResyncReason::Gap]);
    assert_eq!(play.numbers(), [6, 7]);
    assert_eq!(play.stream.reason(), StateReason::Resync(ResyncReason::Gap));
}

#[test]
fn swapped_batches_need_no_answer() {
    let mut play = Play::live(4);
    play.say(0, [6, 5]);
    play.response(0, 4..=6);
    assert_eq!(play.numbers(), [0, 1, 2, 3, 4, 5, 6]);
    assert!(play.resets.is_empty());
}

#[test]
fn a_lost_connection_is_stale_until_the_last_batch_was_repeated() {
    let mut play = Play::live(4);
    let before = play.now;
    play.lose();
    play.now += Duration::from_secs(1);
    play.connect(None);
    assert_eq!(play.asked, [4]);
    assert_eq!(play.stream.state(), State::Stale { since: before });
    play.say(0, [6]);
    play.response(0, 4..=6);
    assert_eq!((play.state(), play.resets.len()), ("live", 0));
    assert_eq!(play.numbers(), [0, 1, 2, 3, 4, 5, 6]);
}

#[test]
fn a_restarted_engine_is_found_out_wherever_its_counter_stands() {
    for newest in [1, 4, 9] {
        let mut play = Play::live(4);
        play.lose();
        play.connect(None);
        play.say(1, [newest]);
        if newest < 4 {
            play.end();
        } else {
            play.replay(frame(1, 4));
        }
        assert_eq!(play.resets, [ResyncReason::EngineRestarted], "at {newest}");
        assert_eq!(play.asked, [4, 0]);
        assert_eq!(play.state(), "cold");
        play.response(1, 0..=newest);
        assert_eq!(play.state(), "live");
        assert!(play.applied.iter().all(|(process, _)| *process == 1));
    }
}

#[test]
fn a_question_without_an_answer_is_put_twice_and_then_all_is_forgotten() {
    let mut play = Play::live(4);
    play.lose();
    play.connect(None);
    play.wait();
    assert_eq!(play.asked, [4, 4]);
    play.wait();
    assert_eq!(
        (play.resets.as_slice(), play.asked.len()),
        (&[ResyncReason::Unverified][..], 3)
    );
    play.say(1, [9]);
    play.wait();
    assert_eq!((play.state(), play.numbers()), ("partial", vec![9]));
}

/// A gap about which nobody answers, until it is asked for all from the first batch on.
fn forgotten_after_a_gap() -> Play {
    let mut play = Play::live(4);
    play.say(0, [7]);
    play.wait();
    play.wait();
    assert_eq!(play.asked, [4, 4, 0]);
    assert_eq!((play.state(), play.applied.len()), ("cold", 0));
    play
}

#[test]
fn who_answers_again_after_a_gap_was_given_up_tells_all() {
    let mut play = forgotten_after_a_gap();
    play.say(0, [8]);
    play.response(0, 0..=8);
    play.say(0, [9]);
    assert_eq!(
        (play.state(), play.numbers()),
        ("live", (0..=9).collect::<Vec<_>>())
    );
    assert_eq!(play.stream.reason(), StateReason::FullReplay);
    assert_eq!(play.resets, [ResyncReason::Gap]);
}

#[test]
fn who_answers_again_after_all_was_given_up_tells_no_more_than_what_is_missing() {
    let mut play = forgotten_after_a_gap();
    play.say(0, [8]);
    play.wait();
    assert_eq!((play.state(), play.numbers()), ("partial", vec![8]));
    play.say(0, [11]);
    assert_eq!(play.asked, [4, 4, 0, 8]);
    play.response(0, 8..=11);
    assert_eq!(
        (play.state(), play.numbers()),
        ("partial", vec![8, 9, 10, 11])
    );
    assert_eq!(play.resets, [ResyncReason::Gap]);
}

#[test]
fn where_nothing_came_while_all_was_given_up_the_next_batch_asks_for_all_again() {
    let mut play = forgotten_after_a_gap();
    play.wait();
    assert_eq!(
        (play.state(), play.asked.as_slice()),
        ("cold", &[4, 4, 0][..])
    );
    play.say(0, [8]);
    assert_eq!(play.asked, [4, 4, 0, 0]);
    assert_eq!((play.state(), play.applied.len()), ("cold", 0));
    play.response(0, 0..=8);
    assert_eq!(
        (play.state(), play.numbers()),
        ("live", (0..=8).collect::<Vec<_>>())
    );
}

#[test]
fn silence_is_asked_about_while_scoring_goes_on() {
    let mut play = Play::live(4);
    play.wait();
    assert_eq!((play.state(), play.asked.as_slice()), ("live", &[4][..]));
    play.response(0, 4..=5);
    assert_eq!(
        play.numbers(),
        [0, 1, 2, 3, 4, 5],
        "a lost tail is had as well"
    );
    play.wait();
    play.wait();
    assert_eq!(play.state(), "stale");
    play.wait();
    assert_eq!(play.resets, [ResyncReason::Unverified]);
}

#[test]
fn a_source_that_never_answers_is_asked_no_more_often_than_it_may_be_silent() {
    let silence = Settings::default().verify_interval;
    let mut play = Play::new();
    play.connect(None);
    for _ in 0..3 {
        // Asked twice, in vain.
        play.wait();
        play.wait();
        assert_eq!(play.stream.next_timeout(), Some(play.now + silence));
        play.wait();
    }
    let mut play = Play::new();
    play.connect(None);
    play.wait();
    play.wait();
    play.say(0, [0]);
    assert_eq!(play.state(), "live");
    for _ in 0..3 {
        assert_eq!(play.stream.next_timeout(), Some(play.now + silence));
        // A proof, also asked for twice.
        play.wait();
        play.wait();
        play.wait();
        assert_eq!(play.state(), "live");
    }
}

#[test]
fn a_number_that_runs_backwards_is_asked_about_from_there() {
    let mut play = Play::new();
    play.connect(None);
    play.response(0, 5..=9);
    play.say(0, [2]);
    assert_eq!(
        (play.state(), play.asked.as_slice()),
        ("stale", &[0, 2][..])
    );
    play.response(0, 5..=9);
    assert_eq!((play.state(), play.resets.len()), ("partial", 0));
    // The one who answers is who was known, but not who speaks.
    play.say(1, [3]);
    play.response(0, 3..=9);
    assert_eq!(play.resets, [ResyncReason::EngineRestarted]);
}

#[test]
fn a_known_number_with_other_bytes_is_another_process() {
    let mut play = Play::live(4);
    play.say(0, [3]);
    assert_eq!(play.stream.counts().duplicates, 1);
    play.say(1, [3]);
    assert_eq!(play.resets, [ResyncReason::EngineRestarted]);
}

#[test]
fn answers_that_keep_contradicting_the_connection_count_for_nothing() {
    let mut play = Play::new();
    play.connect(None);
    for _ in 0..MAX_IDENTITY_CONFLICTS {
        play.response(1, 0..=9);
        play.say(0, [9]);
    }
    play.asked.clear();
    play.say(0, [10, 12]);
    assert!(play.asked.is_empty());
    assert!(play.applied.iter().all(|(process, _)| *process == 0));
}

#[test]
fn the_same_epoch_proves_without_an_answer_and_another_disproves() {
    let mut play = Play::new();
    play.connect(Some("a"));
    play.response(0, 0..=4);
    play.lose();
    play.connect(Some("a"));
    play.say(0, [5]);
    assert_eq!((play.state(), play.resets.len()), ("live", 0));
    assert_eq!(play.numbers(), [0, 1, 2, 3, 4, 5]);
    play.lose();
    play.connect(Some("b"));
    assert_eq!(
        (play.state(), play.resets.as_slice()),
        ("cold", &[ResyncReason::EngineRestarted][..])
    );
}

#[test]
fn the_same_process_does_not_count_before_what_it_did_meanwhile_is_told() {
    let mut play = Play::new();
    play.connect(Some("a"));
    play.response(0, 0..=4);
    play.lose();
    play.connect(Some("a"));
    assert_eq!(
        play.stream.reason(),
        StateReason::Suspect(SuspectReason::SameIncarnation)
    );
    for sequence in 4..=6 {
        assert_eq!(play.state(), "stale");
        play.replay(frame(0, sequence));
    }
    play.end();
    assert_eq!((play.state(), play.resets.len()), ("live", 0));
}

/// Found by seed 234: a connection to the new process that was lost before its answer vouched for it.
#[test]
fn an_epoch_that_was_never_proved_vouches_for_nothing() {
    let mut play = Play::live(4);
    play.lose();
    play.connect(Some("b"));
    play.lose();
    play.connect(Some("b"));
    assert_eq!(play.state(), "stale");
}

/// Found by seed 49: the new process could not answer, and what waited was the old one's last word.
#[test]
fn what_came_before_a_question_does_not_outlive_it() {
    let mut play = Play::new();
    play.connect(None);
    play.response(0, 5..=9);
    play.say(0, [4]);
    play.fail();
    play.wait();
    play.wait();
    assert!(play.applied.is_empty());
}

/// Found by seed 7: forgotten, joined anew and forgotten again, for as long as nobody answered.
#[test]
fn a_source_that_never_answers_proves_nothing_by_it() {
    let mut play = Play::new();
    play.connect(None);
    play.wait();
    play.wait();
    play.say(0, [8, 9]);
    for _ in 0..9 {
        assert_eq!(play.state(), "partial");
        play.wait();
    }
    assert_eq!(play.numbers(), [8, 9]);
    play.asked.clear();
    play.say(0, [11]);
    assert_eq!(
        (play.resets.as_slice(), play.numbers()),
        (&[ResyncReason::Gap][..], vec![11])
    );
    assert!(play.asked.is_empty());
}

#[test]
fn a_servicer_without_history_is_believed_twice_that_it_forgot() {
    let mut play = Play::new();
    play.connect(None);
    for first in [3, 5] {
        play.replay(frame(0, first));
        play.end();
        play.wait();
        play.fail();
        assert_eq!(play.state(), "cold");
    }
    play.replay(frame(0, 7));
    play.end();
    assert_eq!(
        (play.state(), play.stream.next_timeout()),
        ("partial", None)
    );
}

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
    let batches = |first: u64| (first..(first + 1_000).min(5_001)).map(|it| frame(0, it));
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
    play.live_frame(Sequenced {
        payload: None,
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
    let steps = play.stream.on_restart_signal(play.now);
    play.took(steps);
    assert_eq!((play.state(), play.asked.as_slice()), ("stale", &[4][..]));
    play.response(0, [4]);
    assert_eq!(play.state(), "live");
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

#[test]
fn without_a_replay_batches_wait_for_a_tree_that_one_of_them_confirms() {
    let mut play = Play::with_peers();
    play.connect_deaf();
    play.say(0, [20, 21, 22]);
    assert_eq!((play.state(), play.applied.len()), ("cold", 0));
    assert_eq!(play.tree_requests, 1);
    // Before all that waits: the engine has not shown that batch.
    assert_eq!(play.tree(&tree(0, 19)), Err(PeerTreeRefusal::Unconfirmed));
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
    for nobody_has_one in [false, true] {
        let mut play = Play::with_peers();
        play.connect_deaf();
        play.say(0, [20]);
        assert_eq!(
            play.stream.next_timeout(),
            Some(play.now + PEER_TREE_TIMEOUT)
        );
        assert!(!play.stream.is_settled());
        match nobody_has_one {
            true => play.no_tree(),
            false => play.wait(),
        }
        assert_eq!((play.state(), play.numbers()), ("partial", vec![20]));
        play.say(0, [21, 23]);
        assert_eq!((play.state(), play.numbers()), ("partial", vec![23]));
        assert_eq!(play.tree_requests, 1);
    }
}

#[test]
fn a_batch_that_is_the_engines_first_waits_for_nobody() {
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
fn what_does_not_count_here_is_given_to_nobody() {
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
