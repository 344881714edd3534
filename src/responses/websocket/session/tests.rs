mod model;

use serde_json::Value;

use super::*;
use crate::ids::Root;

const ROOM: u64 = u64::MAX / 2;

/// The response with this number, of so many bytes.
fn response(number: u64, bytes: usize) -> Arc<Remembered> {
    Arc::new(Remembered {
        id: id(number),
        lists: vec![Bytes::from(vec![b' '; bytes])],
        chain: None,
    })
}

fn id(number: u64) -> ResponseId {
    ResponseId::new(Root(7), number.into())
}

/// A session, and what it asked for: `start LANE`, `start LANE after N`, an error's code or `close`.
struct Rig {
    session: Session,
    running: Vec<(String, TurnNumber)>,
    /// Turns find memory for their bodies as soon as they start.
    has_memory: bool,
}

fn bounds() -> Bounds {
    Bounds {
        queued_turns: 64,
        queued_bytes: 1 << 20,
        starting_bytes: 1 << 20,
        memory_bytes: 1 << 20,
        age_minutes: 60,
    }
}

impl Rig {
    fn new(bounds: Bounds) -> Self {
        Self {
            session: Session::new(bounds),
            running: Vec::new(),
            has_memory: true,
        }
    }

    fn take(&mut self, steps: Steps) -> Vec<String> {
        let mut found = Vec::new();
        let mut started = Vec::new();
        for step in steps {
            found.push(match step {
                Step::Send(frame) => {
                    let frame: Value = serde_json::from_slice(&frame).unwrap();
                    let code = frame["error"]["code"].as_str().unwrap().to_owned();
                    match frame["stream_id"].as_str() {
                        Some(lane) => format!("{code} {lane}"),
                        None => code,
                    }
                }
                Step::Start(turn) => {
                    let lane = turn.lane.name().unwrap_or("-").to_owned();
                    let after = turn
                        .continued
                        .map(|response| format!(" after {}", response.id.own()));
                    self.running.push((lane.clone(), turn.number));
                    started.push(turn.number);
                    format!("start {lane}{}", after.unwrap_or_default())
                }
                Step::Close(reason) => format!("close {reason:?}"),
            });
        }
        if self.has_memory {
            for number in started {
                let steps = self.session.on_counted(number);
                assert!(steps.is_empty(), "nothing waited for memory");
            }
        }
        found
    }

    /// The body of the lane's turn has found memory.
    fn counts(&mut self, lane: &str) -> Vec<String> {
        let mut running = self.running.iter();
        let (_, number) = running.find(|(of, _)| of == lane).unwrap();
        let steps = self.session.on_counted(*number);
        self.take(steps)
    }

    fn frame(&mut self, text: &str) -> Vec<String> {
        let steps = self.session.on_text(text.as_bytes(), ROOM);
        self.take(steps)
    }

    /// A create in a lane (`-`: the default one) that continues the response with a number, if it is not 0.
    fn create(&mut self, lane: &str, previous: u64) -> Vec<String> {
        self.create_with(lane, previous, "")
    }

    fn create_with(&mut self, lane: &str, previous: u64, more: &str) -> Vec<String> {
        let mut text = format!(r#"{{"type":"response.create"{more}"#);
        if lane != "-" {
            text.push_str(&format!(r#","stream_id":"{lane}""#));
        }
        if previous > 0 {
            text.push_str(&format!(r#","previous_response_id":"{}""#, id(previous)));
        }
        text.push('}');
        self.frame(&text)
    }

    fn end(&mut self, lane: &str, end: TurnEnd) -> Vec<String> {
        let index = self.running.iter().position(|(of, _)| of == lane).unwrap();
        let (_, number) = self.running.remove(index);
        let steps = self.session.on_end(number, end, ROOM);
        self.take(steps)
    }

    /// The lane's turn ends with the response of this number.
    fn ends_with(&mut self, lane: &str, number: u64) -> Vec<String> {
        self.end(lane, TurnEnd::Ended(Some(response(number, 10))))
    }
}

#[test]
fn turns_of_a_lane_run_one_after_the_other_and_lanes_side_by_side() {
    let mut rig = Rig::new(bounds());
    assert_eq!(rig.create("a", 0), ["start a"]);
    assert_eq!(rig.create("a", 0), [""; 0]);
    assert_eq!(rig.create("b", 0), ["start b"]);
    assert_eq!(rig.create("-", 0), ["start -"]);
    assert_eq!(rig.create("a", 0), [""; 0]);
    assert_eq!(rig.ends_with("b", 1), [""; 0]);
    assert_eq!(rig.ends_with("a", 2), ["start a"]);
    assert_eq!(rig.ends_with("a", 3), ["start a"]);
    assert_eq!(rig.ends_with("a", 4), [""; 0]);
}

#[test]
fn sixteen_turns_run_at_a_time_and_the_rest_start_in_order() {
    let mut rig = Rig::new(bounds());
    for lane in 0..16 {
        assert_eq!(rig.create(&lane.to_string(), 0).len(), 1);
    }
    assert_eq!(rig.create("16", 0), [""; 0]);
    assert_eq!(rig.create("3", 0), [""; 0]);
    assert_eq!(rig.create("-", 0), [""; 0]);
    assert_eq!(rig.ends_with("3", 1), ["start 16"]);
    assert_eq!(rig.ends_with("5", 2), ["start 3"]);
    assert_eq!(rig.ends_with("3", 3), ["start -"]);
}

#[test]
fn thirty_two_lanes_have_names() {
    let mut rig = Rig::new(bounds());
    for lane in 0..32 {
        let name = lane.to_string();
        assert_eq!(rig.create(&name, 0), [format!("start {name}")]);
        rig.ends_with(&name, 1 + lane);
    }
    assert_eq!(
        rig.create("one-more", 0),
        ["websocket_stream_limit_reached one-more"]
    );
    assert_eq!(rig.create("-", 0), ["start -"]);
    assert_eq!(rig.create("31", 0), ["start 31"]);
    assert_eq!(rig.session.take_bitten().lanes, 1);
}

#[test]
fn a_lane_remembers_its_latest_response_and_others_may_fork_it() {
    let mut rig = Rig::new(bounds());
    rig.create("a", 0);
    rig.ends_with("a", 1);
    assert_eq!(rig.create("a", 1), ["start a after 1"]);
    assert_eq!(rig.create("b", 1), ["start b after 1"]);
    rig.ends_with("a", 2);
    assert_eq!(
        rig.create("c", 1),
        ["start c"],
        "it was followed by another"
    );
    assert_eq!(rig.create("-", 2), ["start - after 2"]);
    // A turn without a previous response begins anew.
    assert_eq!(rig.create("a", 0), ["start a"]);
    assert_eq!(rig.create("d", 2), ["start d after 2"]);
    rig.ends_with("a", 3);
    assert_eq!(rig.create("e", 2), ["start e"]);
    // A response that only the store has, too.
    assert_eq!(rig.create("a", 3), ["start a after 3"]);
    rig.end("a", TurnEnd::Ended(None));
    assert_eq!(rig.create("a", 3), ["start a"]);
}

#[test]
fn a_waiting_turn_continues_what_its_lane_has_when_it_starts() {
    let mut rig = Rig::new(bounds());
    rig.create("a", 0);
    rig.create("a", 1);
    assert_eq!(rig.ends_with("a", 1), ["start a after 1"]);
}

#[test]
fn a_failed_continuation_makes_its_own_lane_forget() {
    let mut rig = Rig::new(bounds());
    rig.create("a", 0);
    rig.ends_with("a", 1);
    rig.create("b", 1);
    rig.end("b", TurnEnd::Failed);
    assert_eq!(
        rig.create("b", 1),
        ["start b after 1"],
        "a fork leaves its parent"
    );
    rig.end("b", TurnEnd::Failed);
    rig.create("a", 0);
    rig.end("a", TurnEnd::Failed);
    assert_eq!(
        rig.create("a", 1),
        ["start a after 1"],
        "a new chain failed"
    );
    rig.end("a", TurnEnd::Failed);
    assert_eq!(rig.create("a", 1), ["start a"]);
    assert_eq!(rig.session.bytes(), 0);
}

#[test]
fn invalid_content_is_a_failed_continuation_in_its_lanes_order() {
    let mut rig = Rig::new(bounds());
    rig.create("a", 0);
    let invalid = r#","background":true"#;
    assert_eq!(rig.create_with("a", 1, invalid), [""; 0]);
    rig.create("a", 1);
    let ended = rig.ends_with("a", 1);
    assert_eq!(ended, ["unsupported_parameter a", "start a"]);
}

#[test]
fn frames_that_belong_to_no_lane_change_nothing() {
    let mut rig = Rig::new(bounds());
    rig.create("-", 0);
    rig.ends_with("-", 1);
    assert_eq!(rig.frame("nonsense"), ["invalid_json"]);
    assert_eq!(rig.frame(r#"{"type":"x"}"#), ["unknown_event_type"]);
    assert_eq!(rig.frame(r#"{"type":"response.processed"}"#), [""; 0]);
    let text = format!(
        r#"{{"type":"response.create","stream_id":"","previous_response_id":"{}"}}"#,
        id(1)
    );
    assert_eq!(rig.frame(&text), ["invalid_stream_id"]);
    let steps = rig.session.on_binary();
    assert_eq!(rig.take(steps), ["binary_frame"]);
    assert_eq!(rig.create("-", 1), ["start - after 1"]);
}

#[test]
fn a_full_queue_refuses_and_forgets_nothing() {
    let mut rig = Rig::new(Bounds {
        queued_turns: 2,
        ..bounds()
    });
    rig.create("a", 0);
    rig.ends_with("a", 1);
    rig.create("a", 1);
    rig.create("a", 0);
    rig.create("a", 0);
    assert_eq!(rig.create("a", 1), ["websocket_queue_full a"]);
    assert_eq!(rig.create("b", 1), ["start b after 1"], "it need not wait");
    assert_eq!(rig.session.take_bitten().queue, 1);
    let mut rig = Rig::new(Bounds {
        queued_bytes: 60,
        ..bounds()
    });
    rig.create("a", 0);
    let large = format!(r#","input":"{}""#, "x".repeat(60));
    assert_eq!(rig.create_with("a", 0, &large), ["websocket_queue_full a"]);
    assert_eq!(rig.create_with("b", 0, &large), ["start b"]);
}

#[test]
fn turns_that_wait_for_memory_count_and_let_only_so_many_others_start() {
    let mut rig = Rig::new(Bounds {
        starting_bytes: 250,
        ..bounds()
    });
    rig.has_memory = false;
    let large = format!(r#","input":"{}""#, "x".repeat(150));
    assert_eq!(rig.create_with("a", 0, &large), ["start a"]);
    let bytes = rig.session.bytes();
    assert!((150..200).contains(&bytes), "{bytes}");
    assert_eq!(rig.create_with("b", 0, &large), [""; 0]);
    // One that would fit does not pass the one that does not.
    assert_eq!(rig.create("c", 0), [""; 0]);
    assert!(rig.session.bytes() > 2 * bytes);
    assert_eq!(rig.counts("a"), ["start b", "start c"]);
    assert_eq!(rig.counts("a"), [""; 0], "it counts once");
    // One that ends before waits no longer.
    assert_eq!(rig.create_with("d", 0, &large), [""; 0]);
    assert_eq!(rig.end("b", TurnEnd::Failed), ["start d"]);
    for lane in ["a", "c", "d"] {
        assert_eq!(rig.end(lane, TurnEnd::Failed), [""; 0]);
    }
    assert_eq!(rig.session.bytes(), 0);
    assert_eq!(rig.session.take_bitten(), Bitten::default());
}

#[test]
fn turns_behind_one_that_waits_for_memory_fill_the_queue_and_a_larger_one_starts_alone() {
    let mut rig = Rig::new(Bounds {
        queued_turns: 1,
        starting_bytes: 100,
        ..bounds()
    });
    rig.has_memory = false;
    let large = format!(r#","input":"{}""#, "x".repeat(150));
    assert_eq!(rig.create_with("a", 0, &large), ["start a"]);
    assert_eq!(rig.create("b", 0), [""; 0]);
    assert_eq!(rig.create("c", 0), ["websocket_queue_full c"]);
    assert_eq!(rig.session.take_bitten().queue, 1);
    assert_eq!(rig.counts("a"), ["start b"]);
    assert_eq!(rig.create("c", 0), ["start c"]);
}

#[test]
fn no_turn_waits_and_nothing_is_remembered_without_room_over_all_connections() {
    let mut rig = Rig::new(bounds());
    let create = br#"{"type":"response.create"}"#;
    let steps = rig.session.on_text(create, 0);
    assert_eq!(rig.take(steps), ["start -"]);
    let steps = rig.session.on_text(create, 0);
    assert_eq!(rig.take(steps), ["websocket_queue_full"]);
    let (_, number) = rig.running.remove(0);
    let end = TurnEnd::Ended(Some(response(1, 10)));
    rig.session.on_end(number, end, 9);
    assert_eq!(rig.session.bytes(), 0);
    assert_eq!(rig.session.take_bitten().memory, 1);
    assert_eq!(rig.create("-", 1), ["start -"]);
}

#[test]
fn the_lanes_used_least_recently_are_forgotten_first() {
    let mut rig = Rig::new(Bounds {
        memory_bytes: 100,
        ..bounds()
    });
    let run = |rig: &mut Rig, lane: &str, number, bytes| {
        rig.create(lane, 0);
        rig.end(lane, TurnEnd::Ended(Some(response(number, bytes))));
        rig.session.bytes()
    };
    assert_eq!(run(&mut rig, "a", 1, 40), 40);
    assert_eq!(run(&mut rig, "b", 2, 40), 80);
    assert_eq!(run(&mut rig, "a", 3, 40), 80);
    assert_eq!(run(&mut rig, "c", 4, 40), 80);
    assert_eq!(rig.create("x", 2), ["start x"], "the oldest went");
    assert_eq!(rig.create("y", 3), ["start y after 3"]);
    assert_eq!(run(&mut rig, "d", 5, 101), 0, "nothing so large is kept");
    assert_eq!(rig.session.take_bitten().memory, 4);
}

#[test]
fn an_old_connection_lets_its_turns_end_and_takes_no_more() {
    let mut rig = Rig::new(bounds());
    rig.create("a", 0);
    rig.create("a", 0);
    let steps = rig.session.on_expired();
    assert_eq!(rig.take(steps), [""; 0]);
    assert_eq!(rig.create("b", 0), ["websocket_connection_limit_reached"]);
    assert_eq!(rig.ends_with("a", 1), ["start a"]);
    assert_eq!(rig.ends_with("a", 2), ["close Over"]);
    assert_eq!(rig.create("a", 0), [""; 0]);
    let mut idle = Rig::new(bounds());
    let steps = idle.session.on_expired();
    let expected = ["websocket_connection_limit_reached", "close Over"];
    assert_eq!(idle.take(steps), expected);
}

#[test]
fn in_a_drain_what_runs_ends_and_what_waits_is_refused() {
    let mut rig = Rig::new(bounds());
    rig.create("a", 0);
    rig.create("a", 0);
    rig.create("b", 0);
    let steps = rig.session.on_drain();
    assert_eq!(rig.take(steps), ["stopping a"]);
    assert_eq!(rig.create("c", 0), ["stopping c"]);
    assert_eq!(rig.ends_with("b", 1), [""; 0]);
    assert_eq!(rig.ends_with("a", 2), ["close Draining"]);
    let mut idle = Rig::new(bounds());
    let steps = idle.session.on_drain();
    assert_eq!(idle.take(steps), ["close Draining"]);
    assert!(idle.session.on_drain().is_empty());
}

#[test]
fn only_a_connection_without_turns_closes_for_being_idle() {
    let mut rig = Rig::new(bounds());
    rig.create("a", 0);
    assert!(rig.session.on_idle().is_empty());
    rig.ends_with("a", 1);
    let steps = rig.session.on_idle();
    assert_eq!(rig.take(steps), ["close Over"]);
}
