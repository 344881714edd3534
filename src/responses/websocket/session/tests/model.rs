//! Random frames and ends against the plainest model: each lane is a list of the frames that came for it.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

#[derive(Clone, Debug)]
enum Operation {
    /// In a lane, continuing one of the responses so far; maybe with content that is not valid.
    Create {
        lane: u8,
        previous: Option<u8>,
        is_valid: bool,
    },
    /// One of the running turns ends.
    End {
        which: u8,
        end: End,
    },
    Drain,
    Expire,
}

#[derive(Clone, Copy, Debug)]
enum End {
    Remembered,
    InStore,
    Failed,
}

fn operation() -> impl Strategy<Value = Operation> {
    let create = (0..40_u8, proptest::option::of(0..8_u8), 0..8_u8);
    let create = create.prop_map(|(lane, previous, valid)| Operation::Create {
        // A few lanes get most of the frames.
        lane: if lane < 20 { lane % 4 } else { lane },
        previous,
        is_valid: valid > 0,
    });
    let end = prop_oneof![
        4 => Just(End::Remembered),
        1 => Just(End::InStore),
        2 => Just(End::Failed),
    ];
    let end = (any::<u8>(), end).prop_map(|(which, end)| Operation::End { which, end });
    prop_oneof![
        60 => create,
        40 => end,
        1 => Just(Operation::Drain),
        1 => Just(Operation::Expire),
    ]
}

/// Lane 0 has no name.
fn name(lane: u8) -> String {
    match lane {
        0 => "-".to_owned(),
        lane => format!("lane-{lane}"),
    }
}

#[derive(Debug)]
struct Frame {
    arrival: u64,
    previous: Option<u64>,
    is_valid: bool,
}

#[derive(Debug, Default)]
struct Model {
    /// By lane: frames that wait.
    waiting: BTreeMap<u8, Vec<Frame>>,
    /// By lane: the response that the running turn continues.
    running: BTreeMap<u8, Option<u64>>,
    latest: BTreeMap<u8, u64>,
    arrivals: u64,
    is_expired: bool,
    is_draining: bool,
    is_closed: bool,
}

impl Model {
    fn fails(&mut self, lane: u8, previous: Option<u64>) {
        if previous.is_some() && self.latest.get(&lane).copied() == previous {
            self.latest.remove(&lane);
        }
    }

    fn create(&mut self, lane: u8, previous: Option<u64>, is_valid: bool) -> Vec<String> {
        let of_lane = |code: &str| match lane {
            0 => code.to_owned(),
            lane => format!("{code} {}", name(lane)),
        };
        if self.is_closed {
            return Vec::new();
        }
        if self.is_draining {
            return vec![of_lane("stopping")];
        }
        if self.is_expired {
            return vec!["websocket_connection_limit_reached".to_owned()];
        }
        let named = self.waiting.keys().filter(|lane| **lane != 0).count();
        if lane != 0 && !self.waiting.contains_key(&lane) && named == 32 {
            return vec![of_lane("websocket_stream_limit_reached")];
        }
        self.arrivals += 1;
        let arrival = self.arrivals;
        let frames = self.waiting.entry(lane).or_default();
        frames.push(Frame {
            arrival,
            previous,
            is_valid,
        });
        self.start()
    }

    fn start(&mut self) -> Vec<String> {
        let mut steps = Vec::new();
        loop {
            let first = self.waiting.iter().filter_map(|(lane, frames)| {
                let is_free = !self.running.contains_key(lane);
                frames
                    .first()
                    .filter(|_| is_free)
                    .map(|frame| (frame.arrival, *lane))
            });
            let Some((_, lane)) = first.min().filter(|_| self.running.len() < 16) else {
                return steps;
            };
            let frame = self.waiting.get_mut(&lane).unwrap().remove(0);
            let shown = name(lane);
            if !frame.is_valid {
                steps.push(match lane {
                    0 => "unsupported_parameter".to_owned(),
                    _ => format!("unsupported_parameter {shown}"),
                });
                self.fails(lane, frame.previous);
                continue;
            }
            let found = frame
                .previous
                .filter(|id| self.latest.values().any(|latest| latest == id));
            steps.push(match found {
                Some(id) => format!("start {shown} after {id}"),
                None => format!("start {shown}"),
            });
            self.running.insert(lane, frame.previous);
        }
    }

    fn end(&mut self, lane: u8, end: End, response: u64) -> Vec<String> {
        let previous = self.running.remove(&lane).unwrap();
        match end {
            End::Remembered => {
                self.latest.insert(lane, response);
            }
            End::InStore => {
                self.latest.remove(&lane);
            }
            End::Failed => self.fails(lane, previous),
        }
        let mut steps = self.start();
        steps.extend(self.close());
        steps
    }

    fn close(&mut self) -> Vec<String> {
        let is_busy =
            !self.running.is_empty() || self.waiting.values().any(|frames| !frames.is_empty());
        if is_busy || self.is_closed {
            return Vec::new();
        }
        self.is_closed = self.is_draining || self.is_expired;
        match (self.is_draining, self.is_expired) {
            (true, _) => vec!["close Draining".to_owned()],
            (false, true) => vec!["close Over".to_owned()],
            (false, false) => Vec::new(),
        }
    }
}

proptest! {
    #[test]
    fn a_session_does_what_the_model_does(
        operations in proptest::collection::vec(operation(), 1..200)
    ) {
        let mut rig = Rig::new(Bounds { queued_turns: 1_000, ..bounds() });
        let mut model = Model::default();
        let mut responses = 0_u64;
        for operation in operations {
            let (mut found, mut expected) = match operation {
                Operation::Create { lane, previous, is_valid } => {
                    // One of the latest responses.
                    let previous = previous.map(|back| responses.saturating_sub(back.into()));
                    let previous = previous.filter(|id| *id > 0);
                    let more = if is_valid { "" } else { r#","background":true"# };
                    let found = rig.create_with(&name(lane), previous.unwrap_or(0), more);
                    (found, model.create(lane, previous, is_valid))
                }
                Operation::End { which, end } => {
                    if rig.running.is_empty() {
                        continue;
                    }
                    let lane = rig.running[usize::from(which) % rig.running.len()].0.clone();
                    responses += 1;
                    let turn_end = match end {
                        End::Remembered => TurnEnd::Ended(Some(response(responses, 10))),
                        End::InStore => TurnEnd::Ended(None),
                        End::Failed => TurnEnd::Failed,
                    };
                    let number = lane.strip_prefix("lane-").map_or(0, |number| number.parse().unwrap());
                    (rig.end(&lane, turn_end), model.end(number, end, responses))
                }
                Operation::Drain => {
                    let steps = rig.session.on_drain();
                    let found = rig.take(steps);
                    if model.is_closed || model.is_draining {
                        (found, Vec::new())
                    } else {
                        model.is_draining = true;
                        let waited: usize = model.waiting.values().map(Vec::len).sum();
                        model.waiting.values_mut().for_each(Vec::clear);
                        let closed = model.close();
                        prop_assert_eq!(found.len(), waited + closed.len());
                        prop_assert_eq!(found.last().filter(|_| !closed.is_empty()), closed.last());
                        continue;
                    }
                }
                Operation::Expire => {
                    let steps = rig.session.on_expired();
                    let found = rig.take(steps);
                    let is_open = !model.is_draining && !model.is_closed && !model.is_expired;
                    model.is_expired |= is_open;
                    let closed = if is_open { model.close() } else { Vec::new() };
                    (found, closed)
                }
            };
            // The error that goes before the close of an old connection is reported once, at one time or the other.
            for steps in [&mut found, &mut expected] {
                if steps.last().is_some_and(|last| last == "close Over") {
                    steps.retain(|step| step != "websocket_connection_limit_reached");
                }
            }
            prop_assert_eq!(found, expected);
            prop_assert!(rig.running.len() <= TURNS_MAX);
            prop_assert_eq!(rig.running.len(), model.running.len());
            let remembered = rig.session.lanes.iter().filter(|lane| lane.latest.is_some()).count();
            prop_assert_eq!(remembered, model.latest.len());
            prop_assert_eq!(rig.session.memory_bytes, 10 * model.latest.len() as u64);
        }
    }
}
