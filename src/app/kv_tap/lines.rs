//! Formats what an engine's event source reports, as text or as JSON: one line for each KV event. No I/O.

use std::fmt::Write;

use serde_json::json;

use crate::kv::event::{Batch, EngineHash, Event, ExtraKey, Location, Medium, Removed, Stored};
use crate::kv::source::{SourceBatch, SourceEvent};

/// A text line with more block hashes than this shows only the first and the last.
const MAX_HASHES_SHOWN: usize = 2;

/// The format of the lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Style {
    Text,
    /// One JSON object a line, with all block hashes. Token ids are left out; their number is shown.
    Json,
}

/// Formats events, and remembers sequence numbers to detect gaps.
#[derive(Debug)]
pub(super) struct TapFormatter {
    style: Style,
    is_connected: bool,
    /// The sequence number expected next on this connection; `None` before its first batch.
    next: Option<u64>,
    /// The sequence number expected next in the replay that is being received.
    next_replayed: Option<u64>,
    /// Batches received in this replay so far.
    replayed_batches: u64,
}

impl TapFormatter {
    pub(super) fn new(style: Style) -> Self {
        Self {
            style,
            is_connected: false,
            next: None,
            next_replayed: None,
            replayed_batches: 0,
        }
    }

    /// The lines for an event, each with its line end. KV events show the engine's time; other lines show
    /// `clock` (seconds since 1970).
    pub(super) fn lines(&mut self, event: &SourceEvent, clock: f64) -> String {
        let mut out = String::new();
        match event {
            SourceEvent::Connected { incarnation } => {
                self.is_connected = true;
                self.next = None;
                let what = match incarnation {
                    Some(incarnation) => format!("subscribed, engine incarnation {incarnation}"),
                    None => "subscribed".to_owned(),
                };
                self.note(&mut out, clock, "connected", &what);
            }
            SourceEvent::Live(received) => {
                self.note_gap(&mut out, clock, received.sequence);
                self.next = received.sequence.checked_add(1);
                self.batch_lines(&mut out, clock, received, "live");
            }
            SourceEvent::Replayed(received) => {
                if let Some(next) = self.next_replayed.filter(|&next| next != received.sequence) {
                    let what = format!(
                        "the replay continues at {}; {next} was expected",
                        received.sequence
                    );
                    self.note(&mut out, clock, "gap", &what);
                }
                self.next_replayed = received.sequence.checked_add(1);
                self.replayed_batches += 1;
                self.batch_lines(&mut out, clock, received, "replay");
            }
            SourceEvent::ReplayEnd => {
                let what = match self.replayed_batches {
                    0 => "complete, the engine sent no batches".to_owned(),
                    1 => "complete, 1 batch".to_owned(),
                    batches => format!("complete, {batches} batches"),
                };
                self.end_of_replay();
                self.note(&mut out, clock, "replay", &what);
            }
            SourceEvent::ReplayFailed { reason } => {
                self.end_of_replay();
                let what = format!("failed: {reason}");
                self.note(&mut out, clock, "replay", &what);
            }
            SourceEvent::Disconnected { reason } => {
                self.next = None;
                self.end_of_replay();
                if std::mem::take(&mut self.is_connected) {
                    let what = format!("{reason}; the engine may have restarted. Reconnecting");
                    self.note(&mut out, clock, "disconnected", &what);
                } else {
                    self.note(&mut out, clock, "waiting", reason);
                }
            }
        }
        out
    }

    /// Writes a line about the connection or a batch, not about one KV event.
    fn note(&self, out: &mut String, clock: f64, kind: &str, what: &str) {
        // Writing to a String cannot fail.
        let _ = match self.style {
            Style::Text => writeln!(out, "{}  -- {kind}: {what}", time(clock)),
            Style::Json => writeln!(
                out,
                "{}",
                json!({"timestamp": clock, "kind": kind, "note": what})
            ),
        };
    }

    fn end_of_replay(&mut self) {
        self.next_replayed = None;
        self.replayed_batches = 0;
    }

    /// Writes a note if `sequence` is not the expected number.
    fn note_gap(&self, out: &mut String, clock: f64, sequence: u64) {
        let what = match self.next {
            Some(next) if sequence > next => match sequence - next {
                1 => format!("batch {next} is missing"),
                missed => format!("{missed} batches are missing, {next} to {}", sequence - 1),
            },
            Some(next) if sequence < next => {
                format!(
                    "sequence number {sequence} follows {}, out of order",
                    next - 1
                )
            }
            _ => return,
        };
        self.note(out, clock, "gap", &what);
    }

    /// `origin`: `live` or `replay`.
    fn batch_lines(&self, out: &mut String, clock: f64, received: &SourceBatch, origin: &str) {
        match &received.batch {
            Err(error) => {
                let what = format!(
                    "batch {} ({} bytes): {error}",
                    received.sequence, received.bytes
                );
                self.note(out, clock, "undecodable", &what);
            }
            Ok(batch) if batch.events.is_empty() => {
                let what = format!("batch {} has no events", received.sequence);
                self.note(out, clock, "empty", &what);
            }
            Ok(batch) => {
                for event in &batch.events {
                    match self.style {
                        Style::Text => self.text_line(out, received.sequence, batch, event, origin),
                        Style::Json => json_line(out, received.sequence, batch, event, origin),
                    }
                }
            }
        }
    }

    fn text_line(
        &self,
        out: &mut String,
        sequence: u64,
        batch: &Batch,
        event: &Event,
        origin: &str,
    ) {
        let rank = batch.rank.unwrap_or(0);
        let time = time(batch.timestamp);
        let _ = write!(out, "{time}  {origin:<6}  rank {rank}  #{sequence:<7}");
        match event {
            Event::Stored(stored) => stored_text(out, stored),
            Event::Removed(removed) => {
                let blocks = removed.hashes.len();
                let _ = write!(out, "removed  {blocks:>4} {:<20}", noun(blocks));
                location(out, &removed.location);
                let _ = write!(out, "  {}", hashes(&removed.hashes));
            }
            Event::Cleared { ownership } => {
                out.push_str("cleared  all blocks");
                field(out, "ownership", ownership.as_deref());
            }
            Event::Unknown { kind, .. } => {
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
    let blocks = stored.hashes.len();
    let tokens = format!("{} {} tokens", noun(blocks), stored.token_ids.len());
    let _ = write!(out, "stored   {blocks:>4} {tokens:<20}");
    location(out, &stored.location);
    let _ = write!(out, "  {}", hashes(&stored.hashes));
    match stored.parent {
        Some(parent) => {
            let _ = write!(out, " after {}", short(parent));
        }
        None => out.push_str(" from the start"),
    }
    if stored.token_ids.len() as u64 != blocks as u64 * u64::from(stored.block_size) {
        let _ = write!(
            out,
            "  MALFORMED: blocks should have {} tokens",
            stored.block_size
        );
    }
    field(out, "lora", stored.lora_name.as_deref());
    field(out, "session", stored.session_id.as_deref());
    field(out, "salt", stored.cache_salt.as_deref());
    field(
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

/// Writes a field if it has a value. Escaped, since an engine's text may contain terminal control sequences.
fn field(out: &mut String, name: &str, value: Option<&str>) {
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
        ExtraKey::Lookahead(tokens) => format!("before {} tokens", tokens.len()),
    }
}

fn location(out: &mut String, location: &Location) {
    let medium = match &location.medium {
        Medium::Unspecified => "-".to_owned(),
        Medium::Gpu => "gpu".to_owned(),
        Medium::Cpu => "cpu".to_owned(),
        Medium::Disk => "disk".to_owned(),
        Medium::Other(name) => name.escape_debug().to_string(),
    };
    let _ = write!(out, "{medium:<4}");
    // Most engines have a single cache group, group 0.
    if let Some(group) = location.group.filter(|&group| group != 0) {
        let _ = write!(out, " group {group}");
    }
    field(out, "locality", location.locality.as_deref());
    field(out, "ownership", location.ownership.as_deref());
}

/// The first digits of a hash are enough to recognise it.
fn short(hash: EngineHash) -> String {
    format!("{:08x}", hash.0 >> 32)
}

fn hashes(hashes: &[EngineHash]) -> String {
    match hashes {
        [first, .., last] if hashes.len() > MAX_HASHES_SHOWN => {
            format!("{}..{}", short(*first), short(*last))
        }
        hashes => hashes
            .iter()
            .map(|&hash| short(hash))
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

fn json_line(out: &mut String, sequence: u64, batch: &Batch, event: &Event, origin: &str) {
    let hex = |hash: &EngineHash| format!("{:016x}", hash.0);
    let medium = |location: &Location| match &location.medium {
        Medium::Unspecified => None,
        Medium::Gpu => Some("gpu".to_owned()),
        Medium::Cpu => Some("cpu".to_owned()),
        Medium::Disk => Some("disk".to_owned()),
        Medium::Other(name) => Some(name.to_string()),
    };
    let mut line = match event {
        Event::Stored(Stored {
            hashes,
            parent,
            token_ids,
            block_size,
            lora_name,
            location,
            session_id,
            extra_keys,
            ..
        }) => json!({
            "kind": "stored",
            "block_hashes": hashes.iter().map(hex).collect::<Vec<_>>(),
            "parent": parent.as_ref().map(hex),
            "tokens": token_ids.len(),
            "block_size": block_size,
            "medium": medium(location),
            "group": location.group,
            "lora": lora_name,
            "session": session_id,
            "keys": extra_keys
                .iter()
                .map(|keys| keys.iter().map(key).collect::<Vec<_>>())
                .collect::<Vec<_>>(),
        }),
        Event::Removed(Removed { hashes, location }) => json!({
            "kind": "removed",
            "block_hashes": hashes.iter().map(hex).collect::<Vec<_>>(),
            "medium": medium(location),
            "group": location.group,
        }),
        Event::Cleared { ownership } => json!({"kind": "cleared", "ownership": ownership}),
        Event::Unknown { kind, .. } => json!({"kind": "unknown", "type": kind}),
    };
    line["timestamp"] = json!(batch.timestamp);
    line["from"] = json!(origin);
    line["rank"] = json!(batch.rank);
    line["sequence"] = json!(sequence);
    let _ = writeln!(out, "{line}");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv::source::DecodeError;

    fn source_batch(sequence: u64, events: Vec<Event>) -> SourceBatch {
        SourceBatch {
            sequence,
            digest: 0,
            bytes: 99,
            batch: Ok(Batch {
                joined: 0,
                timestamp: 1_795_199_659.308_7,
                rank: Some(1),
                events,
            }),
            snapshot: None,
        }
    }

    fn stored(blocks: u64) -> Event {
        Event::Stored(Stored {
            hashes: (1..=blocks).map(|n| EngineHash(n << 56)).collect(),
            token_ids: vec![0; 32 * blocks as usize],
            block_size: 32,
            location: Location {
                medium: Medium::Gpu,
                ..Location::default()
            },
            lora_name: Some("sql\u{1b}[2J".into()),
            ..Stored::default()
        })
    }

    fn live(sequence: u64) -> SourceEvent {
        SourceEvent::Live(source_batch(
            sequence,
            vec![Event::Cleared { ownership: None }],
        ))
    }

    fn lines(tap: &mut TapFormatter, event: &SourceEvent) -> String {
        tap.lines(event, 0.0)
    }

    #[test]
    fn each_event_is_one_line_that_cannot_move_the_cursor() {
        let removed = Event::Removed(Removed {
            hashes: vec![EngineHash(0xab << 56)],
            location: Location {
                medium: Medium::Cpu,
                group: Some(2),
                ..Location::default()
            },
        });
        let event = SourceEvent::Live(source_batch(7, vec![removed, stored(3)]));
        assert_eq!(
            lines(&mut TapFormatter::new(Style::Text), &event),
            "18:34:19.308  live    rank 1  #7      removed     1 block               cpu  group 2  ab000000\n\
             18:34:19.308  live    rank 1  #7      stored      3 blocks 96 tokens    gpu   01000000..03000000 \
             from the start  lora sql\\u{1b}[2J\n"
        );
    }

    #[test]
    fn gaps_and_regressions_are_noted() {
        let mut tap = TapFormatter::new(Style::Text);
        assert_eq!(lines(&mut tap, &live(4)).lines().count(), 1);
        let first_line = |tap: &mut TapFormatter, sequence| {
            let lines = lines(tap, &live(sequence));
            lines.lines().next().unwrap().to_owned()
        };
        assert_eq!(
            first_line(&mut tap, 6),
            "00:00:00.000  -- gap: batch 5 is missing"
        );
        assert!(first_line(&mut tap, 9).ends_with("2 batches are missing, 7 to 8"));
        assert!(first_line(&mut tap, 3).ends_with("sequence number 3 follows 9, out of order"));
        let lost = SourceEvent::Disconnected {
            reason: "closed".to_owned(),
        };
        assert!(lines(&mut tap, &lost).contains("-- waiting: closed"));
        lines(&mut tap, &SourceEvent::Connected { incarnation: None });
        assert!(
            lines(&mut tap, &lost)
                .contains("-- disconnected: closed; the engine may have restarted")
        );
        assert_eq!(lines(&mut tap, &live(50)).lines().count(), 1);
    }

    #[test]
    fn a_replay_ends_with_its_number_of_batches() {
        let mut tap = TapFormatter::new(Style::Text);
        assert!(
            lines(&mut tap, &SourceEvent::ReplayEnd)
                .contains("complete, the engine sent no batches")
        );
        for sequence in [3, 4] {
            lines(
                &mut tap,
                &SourceEvent::Replayed(source_batch(sequence, vec![])),
            );
        }
        assert!(lines(&mut tap, &SourceEvent::ReplayEnd).contains("complete, 2 batches"));
    }

    #[test]
    fn an_undecodable_batch_is_noted_with_its_reason() {
        let mut undecodable = source_batch(5, vec![]);
        undecodable.batch = Err(DecodeError("byte 3: odd".to_owned()));
        let line = lines(
            &mut TapFormatter::new(Style::Text),
            &SourceEvent::Live(undecodable),
        );
        assert!(line.ends_with("-- undecodable: batch 5 (99 bytes): byte 3: odd\n"));
    }

    #[test]
    fn json_has_one_object_a_line() {
        let event = SourceEvent::Live(source_batch(
            7,
            vec![stored(1), Event::Cleared { ownership: None }],
        ));
        let lines = lines(&mut TapFormatter::new(Style::Json), &event);
        let read = |line| serde_json::from_str::<serde_json::Value>(line).unwrap();
        let objects: Vec<_> = lines.lines().map(read).collect();
        assert_eq!(objects[0]["block_hashes"][0], "0100000000000000");
        assert_eq!(objects[1]["kind"], "cleared");
        assert_eq!(objects[1]["sequence"], 7);
    }
}
