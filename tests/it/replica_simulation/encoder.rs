//! Encodes the events of a simulated run. Each event carries its number and the run that produced it.

use std::fmt::Write as _;

use warmroute::responses::background::run_step::FIRST_EVENTS;

/// The name of the event that ends a response.
pub(super) const END: &str = "end";

#[derive(Debug)]
pub(super) struct EventEncoder {
    /// Identifies the run; unique.
    name: u64,
    next: u64,
}

/// An event as a reader parses it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SimulatedEvent {
    pub(super) kind: String,
    pub(super) number: u64,
    /// The run that produced it; 0 for the first events, which are the same in every run.
    pub(super) name: u64,
}

impl EventEncoder {
    pub(super) fn new(name: u64) -> Self {
        Self { name, next: 0 }
    }

    fn say(&mut self, kind: &str, out: &mut String) {
        let number = self.next;
        let name = match number < FIRST_EVENTS && kind != END {
            true => 0,
            false => self.name,
        };
        self.next += 1;
        let _ = write!(out, "event: {kind}\ndata: {number} {name}\n\n");
    }

    pub(super) fn is_announced(&self) -> bool {
        self.next > 0
    }

    pub(super) fn announce(&mut self) -> String {
        let mut out = String::new();
        if !self.is_announced() {
            self.say("created", &mut out);
            self.say("queued", &mut out);
        }
        out
    }

    /// The events that precede the output, if they are due, and `count` deltas.
    pub(super) fn words(&mut self, count: u64) -> String {
        let mut out = self.announce();
        if self.next < FIRST_EVENTS {
            self.say("in_progress", &mut out);
        }
        for _ in 0..count {
            self.say("word", &mut out);
        }
        out
    }

    pub(super) fn go_on_at(&mut self, number: u64) {
        self.next = number;
    }

    pub(super) fn end(&mut self) -> String {
        let mut out = String::new();
        self.say(END, &mut out);
        out
    }
}

/// Parses complete events; `None` if `text` is not a sequence of them.
pub(super) fn parse_events(text: &[u8]) -> Option<Vec<SimulatedEvent>> {
    let text = std::str::from_utf8(text).ok()?;
    let mut events = Vec::new();
    for event in text.split_terminator("\n\n") {
        let (kind, data) = event.strip_prefix("event: ")?.split_once("\ndata: ")?;
        let (number, name) = data.split_once(' ')?;
        events.push(SimulatedEvent {
            kind: kind.to_owned(),
            number: number.parse().ok()?,
            name: name.parse().ok()?,
        });
    }
    Some(events)
}
