//! What a source says -> lines that a person can follow: one for each event. Pure, but for the clock
//! that the caller reads.

use std::fmt::Write;

use serde_json::json;

use super::event::{Batch, Event, ExtraKey, Medium, Name, Place, Removed, Stored};
use super::source::{Frame, Said};

/// Names of more blocks than this are shown by the first and the last.
const NAMES_SHOWN: usize = 2;

/// How lines look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    Text,
    /// One JSON object a line, with all names and without token ids.
    Json,
}

/// Remembers what is needed to tell gaps.
#[derive(Debug)]
pub struct Tap {
    style: Style,
    is_connected: bool,
    /// The number that should come next on this connection.
    next: Option<u64>,
    /// The same within an answer.
    next_replayed: Option<u64>,
    replayed: u64,
}

impl Tap {
    pub fn new(style: Style) -> Self {
        Self {
            style,
            is_connected: false,
            next: None,
            next_replayed: None,
            replayed: 0,
        }
    }

    /// The lines for what was said, each ended. `clock` is shown where an engine's own time is not
    /// known: seconds since 1970.
    pub fn lines(&mut self, said: &Said, clock: f64) -> String {
        let mut out = String::new();
        match said {
            Said::Connected { epoch } => {
                self.is_connected = true;
                self.next = None;
                let epoch = epoch.as_ref().map(|epoch| format!(", process {epoch}"));
                self.note(
                    &mut out,
                    clock,
                    "connected",
                    &format!("subscribed{}", epoch.unwrap_or_default()),
                );
            }
            Said::Live(frame) => {
                self.gap(&mut out, clock, frame.sequence);
                self.next = frame.sequence.checked_add(1);
                self.frame(&mut out, clock, frame, "live");
            }
            Said::Replayed(frame) => {
                if let Some(next) = self.next_replayed.filter(|&next| next != frame.sequence) {
                    let what = format!("the answer goes on at {}, not at {next}", frame.sequence);
                    self.note(&mut out, clock, "gap", &what);
                }
                self.next_replayed = frame.sequence.checked_add(1);
                self.replayed += 1;
                self.frame(&mut out, clock, frame, "kept");
            }
            Said::ReplayEnd => {
                let what = match self.replayed {
                    0 => "nothing is kept".to_owned(),
                    1 => "that was the one batch that is kept".to_owned(),
                    batches => format!("those were the {batches} batches that are kept"),
                };
                self.end_of_replay();
                self.note(&mut out, clock, "replay", &what);
            }
            Said::ReplayFailed { why } => {
                self.end_of_replay();
                let what = format!("what was published before cannot be had: {why}");
                self.note(&mut out, clock, "replay", &what);
            }
            Said::Lost { why } => {
                self.next = None;
                self.end_of_replay();
                if std::mem::take(&mut self.is_connected) {
                    let what = format!("{why}; all it told may be void. Connecting again");
                    self.note(&mut out, clock, "lost", &what);
                } else {
                    self.note(&mut out, clock, "waiting", &why.to_string());
                }
            }
        }
        out
    }

    /// A line that nothing was said for.
    fn note(&self, out: &mut String, clock: f64, kind: &str, what: &str) {
        // Writing to a String cannot fail.
        let _ = match self.style {
            Style::Text => writeln!(out, "{}  -- {kind}: {what}", time(clock)),
            Style::Json => writeln!(out, "{}", json!({"at": clock, "kind": kind, "note": what})),
        };
    }

    fn end_of_replay(&mut self) {
        self.next_replayed = None;
        self.replayed = 0;
    }

    fn gap(&self, out: &mut String, clock: f64, sequence: u64) {
        let what = match self.next {
            Some(next) if sequence > next => match sequence - next {
                1 => format!("batch {next} is missing"),
                missed => format!("{missed} batches are missing, {next} to {}", sequence - 1),
            },
            Some(next) if sequence < next => {
                format!("number {sequence} comes after {}", next - 1)
            }
            _ => return,
        };
        self.note(out, clock, "gap", &what);
    }

    fn frame(&self, out: &mut String, clock: f64, frame: &Frame, from: &str) {
        match &frame.batch {
            Err(why) => {
                let what = format!("batch {} ({} bytes): {why}", frame.sequence, frame.bytes);
                self.note(out, clock, "unreadable", &what);
            }
            Ok(batch) if batch.events.is_empty() => {
                let what = format!("batch {} has no events", frame.sequence);
                self.note(out, clock, "empty", &what);
            }
            Ok(batch) => {
                for event in &batch.events {
                    match self.style {
                        Style::Text => self.text(out, frame.sequence, batch, event, from),
                        Style::Json => json_line(out, frame.sequence, batch, event, from),
                    }
                }
            }
        }
    }

    fn text(&self, out: &mut String, sequence: u64, batch: &Batch, event: &Event, from: &str) {
        let rank = batch.rank.unwrap_or(0);
        let time = time(batch.timestamp);
        let _ = write!(out, "{time}  {from}  rank {rank}  #{sequence:<7}");
        match event {
            Event::Stored(stored) => stored_text(out, stored),
            Event::Removed(removed) => {
                let blocks = removed.names.len();
                let _ = write!(out, "removed  {blocks:>4} {:<20}", noun(blocks));
                place(out, &removed.place);
                let _ = write!(out, "  {}", names(&removed.names));
            }
            Event::Cleared { ownership } => {
                out.push_str("cleared  all blocks");
                option(out, "ownership", ownership.as_deref());
            }
            Event::Unknown { kind } => {
                let _ = write!(out, "unknown  {}", kind.escape_debug());
            }
        }
        let trimmed = out.trim_end_matches(' ').len();
        out.truncate(trimmed);
        out.push('\n');
    }
}

fn noun(blocks: usize) -> &'static str {
    if blocks == 1 { "block" } else { "blocks" }
}

fn stored_text(out: &mut String, stored: &Stored) {
    let blocks = stored.names.len();
    let tokens = format!("{} {} tokens", noun(blocks), stored.token_ids.len());
    let _ = write!(out, "stored   {blocks:>4} {tokens:<20}");
    place(out, &stored.place);
    let _ = write!(out, "  {}", names(&stored.names));
    match stored.parent {
        Some(parent) => {
            let _ = write!(out, " after {}", short(parent));
        }
        None => out.push_str(" from the start"),
    }
    if stored.token_ids.len() as u64 != blocks as u64 * u64::from(stored.block_size) {
        let _ = write!(out, "  NOT {} tokens a block", stored.block_size);
    }
    option(out, "lora", stored.lora_name.as_deref());
    option(out, "session", stored.session_id.as_deref());
    option(out, "salt", stored.cache_salt.as_deref());
    option(
        out,
        "kind",
        stored
            .spec_kind
            .as_deref()
            .filter(|kind| *kind != "full_attention"),
    );
    if let Some(keys) = stored.extra_keys.iter().find(|keys| !keys.is_empty()) {
        let keys: Vec<_> = keys.iter().map(key).collect();
        let _ = write!(out, "  keys {}", keys.join(","));
    }
}

/// Foreign texts may hold what moves a terminal's cursor.
fn option(out: &mut String, name: &str, value: Option<&str>) {
    if let Some(value) = value {
        let _ = write!(out, "  {name} {}", value.escape_debug());
    }
}

fn key(key: &ExtraKey) -> String {
    match key {
        ExtraKey::Text(text) => text.escape_debug().to_string(),
        ExtraKey::Blob(bytes) => format!("{} bytes", bytes.len()),
        ExtraKey::Number(number) => number.to_string(),
        ExtraKey::Multimodal { identifier, offset } => {
            format!("{}@{offset}", identifier.escape_debug())
        }
    }
}

fn place(out: &mut String, place: &Place) {
    let medium = match &place.medium {
        Medium::Unsaid => "-".to_owned(),
        Medium::Gpu => "gpu".to_owned(),
        Medium::Cpu => "cpu".to_owned(),
        Medium::Disk => "disk".to_owned(),
        Medium::Other(name) => name.escape_debug().to_string(),
    };
    let _ = write!(out, "{medium:<4}");
    // The first group is what engines with one kind of layer have.
    if let Some(group) = place.group.filter(|&group| group != 0) {
        let _ = write!(out, " group {group}");
    }
    option(out, "locality", place.locality.as_deref());
    option(out, "ownership", place.ownership.as_deref());
}

/// A name's first digits are enough to find it again by eye.
fn short(name: Name) -> String {
    format!("{:08x}", name.0 >> 32)
}

fn names(names: &[Name]) -> String {
    match names {
        [first, .., last] if names.len() > NAMES_SHOWN => {
            format!("{}..{}", short(*first), short(*last))
        }
        names => names
            .iter()
            .map(|&name| short(name))
            .collect::<Vec<_>>()
            .join(" "),
    }
}

/// The time of day, UTC, to the millisecond.
fn time(seconds: f64) -> String {
    let millis = (seconds.max(0.0) * 1e3) as u64;
    let (seconds, millis) = (millis / 1_000 % 86_400, millis % 1_000);
    let (hours, minutes) = (seconds / 3_600, seconds / 60 % 60);
    format!("{hours:02}:{minutes:02}:{:02}.{millis:03}", seconds % 60)
}

fn json_line(out: &mut String, sequence: u64, batch: &Batch, event: &Event, from: &str) {
    let hex = |name: &Name| format!("{:016x}", name.0);
    let medium = |place: &Place| match &place.medium {
        Medium::Unsaid => None,
        Medium::Gpu => Some("gpu".to_owned()),
        Medium::Cpu => Some("cpu".to_owned()),
        Medium::Disk => Some("disk".to_owned()),
        Medium::Other(name) => Some(name.to_string()),
    };
    let mut line = match event {
        Event::Stored(Stored {
            names,
            parent,
            token_ids,
            block_size,
            lora_name,
            place,
            session_id,
            extra_keys,
            ..
        }) => json!({
            "kind": "stored",
            "names": names.iter().map(hex).collect::<Vec<_>>(),
            "parent": parent.as_ref().map(hex),
            "tokens": token_ids.len(),
            "block_size": block_size,
            "medium": medium(place),
            "group": place.group,
            "lora": lora_name,
            "session": session_id,
            "keys": extra_keys
                .iter()
                .map(|keys| keys.iter().map(key).collect::<Vec<_>>())
                .collect::<Vec<_>>(),
        }),
        Event::Removed(Removed { names, place }) => json!({
            "kind": "removed",
            "names": names.iter().map(hex).collect::<Vec<_>>(),
            "medium": medium(place),
            "group": place.group,
        }),
        Event::Cleared { ownership } => json!({"kind": "cleared", "ownership": ownership}),
        Event::Unknown { kind } => json!({"kind": "unknown", "type": kind}),
    };
    line["at"] = json!(batch.timestamp);
    line["from"] = json!(from);
    line["rank"] = json!(batch.rank);
    line["number"] = json!(sequence);
    let _ = writeln!(out, "{line}");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv::source::Undecodable;

    fn frame(sequence: u64, events: Vec<Event>) -> Frame {
        Frame {
            sequence,
            digest: 0,
            bytes: 99,
            batch: Ok(Batch {
                timestamp: 1_795_199_659.308_7,
                rank: Some(1),
                events,
            }),
            snapshot: None,
        }
    }

    fn stored(blocks: u64) -> Event {
        Event::Stored(Stored {
            names: (1..=blocks).map(|n| Name(n << 56)).collect(),
            token_ids: vec![0; 32 * blocks as usize],
            block_size: 32,
            place: Place {
                medium: Medium::Gpu,
                ..Place::default()
            },
            lora_name: Some("sql\u{1b}[2J".into()),
            ..Stored::default()
        })
    }

    fn live(sequence: u64) -> Said {
        Said::Live(frame(sequence, vec![Event::Cleared { ownership: None }]))
    }

    fn lines(tap: &mut Tap, said: &Said) -> String {
        tap.lines(said, 0.0)
    }

    #[test]
    fn each_event_is_one_line_that_cannot_move_the_cursor() {
        let removed = Event::Removed(Removed {
            names: vec![Name(0xab << 56)],
            place: Place {
                medium: Medium::Cpu,
                group: Some(2),
                ..Place::default()
            },
        });
        let said = Said::Live(frame(7, vec![removed, stored(3)]));
        assert_eq!(
            lines(&mut Tap::new(Style::Text), &said),
            "18:34:19.308  live  rank 1  #7      removed     1 block               cpu  group 2  ab000000\n\
             18:34:19.308  live  rank 1  #7      stored      3 blocks 96 tokens    gpu   01000000..03000000 \
             from the start  lora sql\\u{1b}[2J\n"
        );
    }

    #[test]
    fn gaps_and_steps_back_are_told() {
        let mut tap = Tap::new(Style::Text);
        assert_eq!(lines(&mut tap, &live(4)).lines().count(), 1);
        let told = |tap: &mut Tap, sequence| {
            let lines = lines(tap, &live(sequence));
            lines.lines().next().unwrap().to_owned()
        };
        assert_eq!(
            told(&mut tap, 6),
            "00:00:00.000  -- gap: batch 5 is missing"
        );
        assert!(told(&mut tap, 9).ends_with("2 batches are missing, 7 to 8"));
        assert!(told(&mut tap, 3).ends_with("number 3 comes after 9"));
        let lost = Said::Lost {
            why: "closed".to_owned(),
        };
        assert!(lines(&mut tap, &lost).contains("-- waiting: closed"));
        lines(&mut tap, &Said::Connected { epoch: None });
        assert!(lines(&mut tap, &lost).contains("-- lost: closed; all it told may be void"));
        assert_eq!(lines(&mut tap, &live(50)).lines().count(), 1);
    }

    #[test]
    fn a_replay_says_how_much_it_was() {
        let mut tap = Tap::new(Style::Text);
        assert!(lines(&mut tap, &Said::ReplayEnd).contains("nothing is kept"));
        for sequence in [3, 4] {
            lines(&mut tap, &Said::Replayed(frame(sequence, vec![])));
        }
        assert!(lines(&mut tap, &Said::ReplayEnd).contains("those were the 2 batches"));
    }

    #[test]
    fn what_cannot_be_read_is_told_with_its_reason() {
        let mut unreadable = frame(5, vec![]);
        unreadable.batch = Err(Undecodable("byte 3: odd".to_owned()));
        let line = lines(&mut Tap::new(Style::Text), &Said::Live(unreadable));
        assert!(line.ends_with("-- unreadable: batch 5 (99 bytes): byte 3: odd\n"));
    }

    #[test]
    fn json_has_one_object_a_line() {
        let said = Said::Live(frame(
            7,
            vec![stored(1), Event::Cleared { ownership: None }],
        ));
        let lines = lines(&mut Tap::new(Style::Json), &said);
        let read = |line| serde_json::from_str::<serde_json::Value>(line).unwrap();
        let objects: Vec<_> = lines.lines().map(read).collect();
        assert_eq!(objects[0]["names"][0], "0100000000000000");
        assert_eq!(objects[1]["kind"], "cleared");
        assert_eq!(objects[1]["number"], 7);
    }
}
