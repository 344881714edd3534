//! The event log of a background response: the text of its events, in batches. Pure.
//!
//! A batch is the text that clients get. After the response has ended, the store may keep all events as one
//! compressed text instead of the batches.

use std::io::Read as _;

use bytes::Bytes;

use super::run_step::FIRST_EVENTS;
use crate::responses::engine_events::empty_line;
use crate::store::EventBatch;

/// Stored instead of the final event of a cancelled response: the canceller knows neither its number nor the
/// output, so readers build the event from the record.
pub const CANCELLED: &[u8] = b"cancelled";

const END: &[u8] = b"\n\n";

/// The share of the text that is dropped at a time.
const DROPPED_SHARE: usize = 32;
/// What is kept compressed of dropped events, as a multiple of what is kept in memory.
const COMPRESSED_SHARE: usize = 3;
/// Readers accept this multiple of the store's bound of a log: what is kept of it, and of what was dropped.
pub const WHOLE_SHARE: usize = COMPRESSED_SHARE + 2;

/// The events that the owner of a response has written.
#[derive(Debug, Default)]
pub struct Log {
    /// Number of the first event in `text`.
    first: usize,
    text: Vec<u8>,
    /// The end of each event in `text`.
    ends: Vec<usize>,
    /// Number of stored events.
    stored: usize,
    /// Number of events that another replica stored. They may differ from those written again here.
    others: usize,
    /// The size of `text` above which its oldest events are dropped; `None` while the store keeps all events.
    bytes_max: Option<usize>,
    dropped: Dropped,
    tokens: Tokens,
}

/// The token ids of the text, for a replica that goes on with the response.
#[derive(Debug, Default)]
struct Tokens {
    /// Each with the number of events up to the end of its text.
    parts: Vec<(usize, Bytes)>,
    bytes: usize,
    /// Some text has none.
    is_lost: bool,
}

impl Tokens {
    fn push(&mut self, made: usize, part: Bytes) {
        self.bytes += part.len();
        self.parts.push((made, part));
    }
}

/// The events before the first in memory.
#[derive(Debug, Default)]
struct Dropped {
    /// Compressed, one frame after the other.
    frames: Vec<u8>,
    /// Size of the events, not compressed.
    bytes: usize,
    /// Whether some of them are not here.
    is_lost: bool,
}

impl Dropped {
    fn push(&mut self, text: &[u8], bytes_max: usize) {
        self.bytes += text.len();
        let frame = if self.is_lost || self.bytes > bytes_max {
            Bytes::new()
        } else {
            compressed(text)
        };
        if frame.is_empty() {
            self.lose();
        } else {
            self.frames.extend_from_slice(&frame);
        }
    }

    fn lose(&mut self) {
        self.is_lost = true;
        self.frames = Vec::new();
    }
}

impl Log {
    /// Continues a log with `stored` events, which will be written again here.
    pub fn after(stored: u64) -> Self {
        let stored = usize::try_from(stored).unwrap_or(usize::MAX);
        Self {
            stored,
            others: stored,
            ..Self::default()
        }
    }

    /// Appends whole events.
    pub fn push(&mut self, text: &[u8]) {
        let begin = self.text.len();
        self.text.extend_from_slice(text);
        let mut from = 0;
        while let Some(at) = empty_line(&text[from..]) {
            from += at + END.len();
            self.ends.push(begin + from);
        }
        self.drop_oldest();
    }

    /// The token ids of the events that were pushed since the last ones.
    pub fn push_tokens(&mut self, part: Bytes) {
        if !part.is_empty() && !self.is_cut() {
            // What comes without an event belongs to the next one.
            let made = (self.first + self.ends.len()).max(self.stored + 1);
            self.tokens.push(made, part);
        }
    }

    /// Events of another replica, as it stored them.
    pub fn push_stored(&mut self, batch: &EventBatch) {
        let after = self.made().checked_sub(1);
        self.push(beyond(&batch.bytes, batch.first, after).0);
        self.tokens.is_lost |= batch.tokens.is_empty() && batch.last >= FIRST_EVENTS;
        if !batch.tokens.is_empty() && !self.is_cut() {
            let made = self.first + self.ends.len();
            self.tokens.push(made, batch.tokens.clone());
        }
    }

    /// The parts of the token ids, in order; `None` unless all events are here, and the ids of all their text.
    pub fn tokens(&self) -> Option<impl Iterator<Item = &[u8]>> {
        let is_whole = self.stored_text().is_some() && !self.tokens.is_lost;
        let parts = self.tokens.parts.iter();
        is_whole.then(|| parts.map(|(_, part)| &**part))
    }

    /// Bytes of all parts.
    pub fn token_bytes(&self) -> usize {
        self.tokens.bytes
    }

    /// The token ids of the events from number `first` on, in one piece.
    fn tokens_from(&self, first: usize) -> Bytes {
        let parts = &self.tokens.parts;
        let from = parts.partition_point(|(made, _)| *made <= first);
        match &parts[from..] {
            [] => Bytes::new(),
            [(_, one)] => one.clone(),
            many => {
                let many: Vec<&[u8]> = many.iter().map(|(_, part)| &**part).collect();
                many.concat().into()
            }
        }
    }

    /// Drops stored events beyond the bound, many at a time.
    fn drop_oldest(&mut self) {
        let Some(bytes_max) = self.bytes_max else {
            return;
        };
        let over = self.text.len().saturating_sub(bytes_max);
        if over <= bytes_max / DROPPED_SHARE {
            return;
        }
        let count = self.ends.partition_point(|end| *end < over) + 1;
        let count = count.min(self.stored.saturating_sub(self.first));
        let bytes = self.end_of(self.first + count);
        self.dropped.push(
            &self.text[..bytes],
            bytes_max.saturating_mul(COMPRESSED_SHARE),
        );
        self.text.drain(..bytes);
        self.ends.drain(..count);
        self.ends.iter_mut().for_each(|end| *end -= bytes);
        self.first += count;
    }

    /// The next batch to store.
    pub fn batch(&self) -> Option<EventBatch> {
        let last = self.made().checked_sub(1)?;
        if last < self.stored() {
            return None;
        }
        if self.stored < self.first {
            // The store has lost events that are not here any more.
            let last = self.first as u64 - 1;
            return Some(EventBatch::new(self.stored(), last, END));
        }
        Some(EventBatch {
            first: self.stored(),
            last,
            bytes: Bytes::copy_from_slice(&self.text[self.end_of(self.stored)..]),
            tokens: self.tokens_from(self.stored),
        })
    }

    /// The store has every event up to `last`.
    pub fn on_stored(&mut self, last: u64) {
        self.stored = usize::try_from(last + 1).unwrap_or(usize::MAX);
        self.drop_oldest();
    }

    /// The store has lost the events after `last`. False if they are not here to be stored again.
    pub fn rewind(&mut self, last: Option<u64>) -> bool {
        let stored = last.map_or(0, |last| last + 1);
        self.stored = usize::try_from(stored).unwrap_or(usize::MAX);
        self.stored() <= self.made()
    }

    /// The store drops its oldest events from now on: as many are kept here as it had.
    pub fn on_overflow(&mut self) {
        self.bytes_max.get_or_insert(self.text.len());
        // Nobody can go on with what is not whole.
        self.tokens = Tokens::default();
    }

    /// The first `count` events are not here.
    pub fn on_overflow_at(&mut self, count: u64) {
        self.first = usize::try_from(count).unwrap_or(usize::MAX);
        (self.text, self.ends) = (Vec::new(), Vec::new());
        self.tokens = Tokens::default();
        self.dropped.lose();
    }

    /// Number of events, whether their text is here or not.
    pub fn made(&self) -> u64 {
        (self.first + self.ends.len()) as u64
    }

    /// Stored events after `after`, up to about `bytes_max` bytes, and the number of the last one; `None` if they
    /// must be read from the store.
    pub fn tail(&self, after: Option<u64>, bytes_max: usize) -> Option<(&[u8], Option<u64>)> {
        let from = after.map_or(0, |after| {
            usize::try_from(after.saturating_add(1)).unwrap_or(usize::MAX)
        });
        if from < self.others.max(self.first) || self.made() < self.stored() {
            return None;
        }
        if from >= self.stored {
            return Some((&[], after));
        }
        let begin = self.end_of(from);
        let ends = &self.ends[from - self.first..self.stored - self.first];
        let fit = ends.partition_point(|end| end - begin <= bytes_max);
        let count = from + fit.max(1);
        Some((
            &self.text[begin..self.end_of(count)],
            Some(count as u64 - 1),
        ))
    }

    /// Number of stored events.
    pub fn stored(&self) -> u64 {
        self.stored as u64
    }

    /// The text of the stored events; `None` if not all are here.
    pub fn stored_text(&self) -> Option<&[u8]> {
        let is_whole = self.first == 0 && self.stored() <= self.made();
        is_whole.then(|| &self.text[..self.end_of(self.stored)])
    }

    /// The text of all events, compressed; empty if not all are here.
    pub fn compressed(&self) -> Bytes {
        match (self.first, self.dropped.is_lost) {
            (0, _) => compressed(&self.text),
            (_, true) => Bytes::new(),
            (_, false) => [&*self.dropped.frames, &compressed(&self.text)]
                .concat()
                .into(),
        }
    }

    /// Memory that the stored events take.
    pub fn stored_bytes(&self) -> usize {
        self.end_of(self.stored) + self.dropped.frames.len() + self.tokens.bytes
    }

    /// Whether the store drops events.
    pub fn is_cut(&self) -> bool {
        self.bytes_max.is_some()
    }

    /// The end of the first `count` events.
    fn end_of(&self, count: usize) -> usize {
        match count.saturating_sub(self.first).checked_sub(1) {
            None => 0,
            Some(last) => self.ends.get(last).copied().unwrap_or(self.text.len()),
        }
    }
}

/// The events after `after` in a text that begins with event `first`, and the number of its last event.
pub fn beyond(text: &[u8], first: u64, after: Option<u64>) -> (&[u8], Option<u64>) {
    let mut begin = 0;
    let mut last = None;
    for (number, at) in (first..).zip(memchr::memmem::find_iter(text, END)) {
        if after.is_some_and(|after| number <= after) {
            begin = at + END.len();
        }
        last = Some(number);
    }
    (&text[begin..], last)
}

/// The compressed text of all events; empty on failure.
pub fn compressed(text: &[u8]) -> Bytes {
    // Events repeat each other: a higher level clears 400 kB of tables for a few percent.
    const LEVEL: i32 = 1;
    zstd::bulk::compress(text, LEVEL).map_or_else(|_| Bytes::new(), Bytes::from)
}

/// Decompresses it, up to `bytes_max`.
pub fn decompressed(compressed: &[u8], bytes_max: usize) -> Option<Vec<u8>> {
    let decoder = zstd::stream::read::Decoder::new(compressed).ok()?;
    let mut text = Vec::new();
    let read = decoder.take(bytes_max as u64).read_to_end(&mut text);
    read.ok().map(|_| text)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::store;

    fn event(number: u64) -> String {
        format!("event: e\ndata: {number}\n\n")
    }

    fn text(count: u64) -> String {
        (0..count).map(event).collect()
    }

    #[test]
    fn a_log_whose_first_events_are_elsewhere_continues_after_them() {
        let mut log = Log::after(2);
        log.on_overflow_at(2);
        assert_eq!(
            (log.batch(), log.made(), log.stored_text()),
            (None, 2, None)
        );
        log.push(event(2).as_bytes());
        let batch = log.batch().unwrap();
        assert_eq!((batch.first, batch.last), (2, 2));
        assert_eq!(batch.bytes, event(2).into_bytes());
        assert!(log.compressed().is_empty());
    }

    #[test]
    fn beyond_the_bound_only_the_newest_events_are_in_memory() {
        let mut log = Log::default();
        log.push(text(1_000).as_bytes());
        log.on_stored(999);
        log.on_overflow();
        let bytes = log.text.len();
        for number in 1_000..3_000 {
            log.push(event(number).as_bytes());
            log.on_stored(number);
            assert!(log.text.len() <= bytes + bytes / DROPPED_SHARE + 100);
        }
        assert_eq!(log.tail(Some(999), 99), None);
        assert_eq!(
            log.tail(Some(2_998), 99),
            Some((event(2_999).as_bytes(), Some(2_999)))
        );
        // All of them can be read at the end.
        let whole = text(3_000);
        let read = decompressed(&log.compressed(), whole.len() + 1);
        assert_eq!(read.unwrap(), whole.as_bytes());
        // Up to a bound of their own.
        for number in 3_000..9_000 {
            log.push(event(number).as_bytes());
            log.on_stored(number);
        }
        assert!(log.compressed().is_empty() && log.dropped.frames.is_empty());
        // The store lost events that are not here any more.
        assert!(log.rewind(Some(10)));
        let batch = log.batch().unwrap();
        assert_eq!((batch.first, batch.last + 1), (11, log.first as u64));
    }

    #[test]
    fn local_readers_get_events_that_are_stored_and_were_written_here() {
        let mut log = Log::after(2);
        log.push(text(4).as_bytes());
        assert_eq!(log.tail(None, 99), None);
        assert_eq!(log.tail(Some(1), 99), Some((&[][..], Some(1))));
        log.on_stored(2);
        assert_eq!(log.tail(Some(1), 99), Some((event(2).as_bytes(), Some(2))));
        assert_eq!(log.tail(Some(0), 99), None);
    }

    #[test]
    fn after_a_take_over_only_new_events_are_stored() {
        let mut log = Log::after(2);
        assert_eq!((log.batch(), log.stored_text()), (None, None));
        log.push(text(3).as_bytes());
        let batch = log.batch().unwrap();
        assert_eq!(
            (batch.first, batch.last, &*batch.bytes),
            (2, 2, event(2).as_bytes())
        );
        assert_eq!(log.stored_text(), Some(text(2).as_bytes()));
    }

    proptest! {
        #[test]
        fn a_reader_of_a_bounded_log_sees_consecutive_events_or_is_behind(
            pushes in proptest::collection::vec(0..6u64, 0..60),
            bytes_max in 0..200u64,
            after in proptest::option::of(0..100u64),
        ) {
            let (mut log, mut store, mut made) = (Log::default(), store::log::Log::default(), 0);
            for count in pushes {
                log.push((made..made + count).map(event).collect::<String>().as_bytes());
                made += count;
                let Some(batch) = log.batch() else { continue };
                if store.append(&batch, bytes_max) == store::WriteOutcome::Overflow {
                    log.on_overflow();
                }
                log.on_stored(batch.last);
                let expected: String = (after.map_or(0, |last| last + 1)..made).map(event).collect();
                // From the store, unless it says that it dropped some; from memory, unless it says that they are not here.
                if store.follows(after) {
                    let read = store.read(after, u64::MAX);
                    let seen = read.iter().flat_map(|batch| beyond(&batch.bytes, batch.first, after).0.to_vec());
                    let seen: Vec<u8> = seen.collect();
                    prop_assert_eq!(&seen, expected.as_bytes());
                }
                if let Some((tail, _)) = log.tail(after, usize::MAX) {
                    prop_assert_eq!(tail, expected.as_bytes());
                }
            }
            prop_assert!(store.bytes <= bytes_max);
            let compressed = log.compressed();
            if !compressed.is_empty() {
                let whole = decompressed(&compressed, 1 << 20).unwrap();
                prop_assert_eq!(String::from_utf8(whole).unwrap(), text(made));
            }
        }

        #[test]
        fn readers_from_anywhere_see_each_event_once(
            pushes in proptest::collection::vec((0..4u64, any::<bool>()), 0..20),
            lost in proptest::option::of(0..20u64),
            after in proptest::option::of(0..50u64),
        ) {
            let (mut log, mut store, mut made) = (Log::default(), Vec::<EventBatch>::new(), 0);
            for (at, (count, is_stored)) in pushes.into_iter().enumerate() {
                log.push((made..made + count).map(event).collect::<String>().as_bytes());
                made += count;
                if let Some(batch) = log.batch().filter(|_| is_stored) {
                    log.on_stored(batch.last);
                    store.push(batch);
                }
                if lost == Some(at as u64) {
                    store.pop();
                    prop_assert!(log.rewind(store.last().map(|batch| batch.last)));
                }
            }
            if let Some(batch) = log.batch() {
                log.on_stored(batch.last);
                store.push(batch);
            }
            let seen: Vec<u8> = store.iter().flat_map(|batch| beyond(&batch.bytes, batch.first, after).0.to_vec()).collect();
            let expected: String = (after.map_or(0, |last| last + 1)..made).map(event).collect();
            prop_assert_eq!(&seen, expected.as_bytes());
            let mut tail = Vec::new();
            let mut read = after;
            while let Some((more, last)) = log.tail(read, 40).filter(|(more, _)| !more.is_empty()) {
                tail.extend_from_slice(more);
                read = last;
            }
            prop_assert_eq!(&tail, expected.as_bytes());
            let whole = text(made);
            prop_assert_eq!(log.stored_text(), Some(whole.as_bytes()));
            let again = decompressed(&log.compressed(), 1 << 20).unwrap();
            prop_assert_eq!(beyond(&again, 0, after), (expected.as_bytes(), made.checked_sub(1)));
        }
    }
}
