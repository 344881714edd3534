//! Encodes the events of a simulated run. Each event carries its number and the run that produced it, or the token of
//! the answer if streams are continued.

use std::fmt::Write as _;

use warmroute::responses::background::run_step::FIRST_EVENTS;

/// The name of the event that ends a response.
pub(super) const END: &str = "end";

#[derive(Debug)]
pub(super) struct EventEncoder {
    /// Identifies the run; unique.
    name: u64,
    next: u64,
    /// The answer whose tokens are written, and how many were.
    answer: Option<Answer>,
}

/// What an engine always answers to one request, token for token.
#[derive(Clone, Copy, Debug)]
pub(super) struct Answer {
    seed: u64,
    pub(super) said: u64,
}

impl Answer {
    pub(super) fn new(seed: u64) -> Self {
        Self { seed, said: 0 }
    }

    pub(super) fn token(&self, position: u64) -> u64 {
        self.seed * 1_000 + position + 1
    }

    pub(super) fn length(&self) -> u64 {
        4 + 3 * self.seed
    }

    /// The tokens that `count` words after those that were said would be.
    pub(super) fn next(&self, count: u64) -> Vec<u64> {
        let end = (self.said + count).min(self.length());
        (self.said..end)
            .map(|position| self.token(position))
            .collect()
    }
}

/// An event as a reader parses it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SimulatedEvent {
    pub(super) kind: String,
    pub(super) number: u64,
    /// The run that produced it, or the token; 0 for the first events, which are the same in every run.
    pub(super) name: u64,
}

impl EventEncoder {
    pub(super) fn new(name: u64, answer: Option<Answer>) -> Self {
        Self {
            name,
            next: 0,
            answer,
        }
    }

    pub(super) fn answer(&self) -> Option<&Answer> {
        self.answer.as_ref()
    }

    fn say(&mut self, kind: &str, out: &mut String) {
        let name = if self.next < FIRST_EVENTS && kind != END {
            0
        } else {
            self.name
        };
        self.say_as(kind, name, out);
    }

    fn say_as(&mut self, kind: &str, name: u64, out: &mut String) {
        let number = self.next;
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
        match &mut self.answer {
            None => {
                for _ in 0..count {
                    self.say("word", &mut out);
                }
            }
            Some(answer) => {
                let tokens = answer.next(count);
                answer.said += tokens.len() as u64;
                for token in tokens {
                    self.say_as("word", token, &mut out);
                }
            }
        }
        out
    }

    /// Goes on after `said` tokens, which other runs wrote with their events.
    pub(super) fn go_on_after(&mut self, number: u64, said: u64) {
        self.next = number;
        if let Some(answer) = &mut self.answer {
            answer.said = said;
        }
    }

    /// Begins again, as another run.
    pub(super) fn restart(&mut self, name: u64) {
        (self.name, self.next) = (name, 0);
        if let Some(answer) = &mut self.answer {
            answer.said = 0;
        }
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

/// The tokens of the words among these events.
pub(super) fn tokens(events: &[SimulatedEvent]) -> Vec<u64> {
    let words = events.iter().filter(|event| event.kind == "word");
    words.map(|word| word.name).collect()
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
