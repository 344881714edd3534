//! The event log of a background response: the text of its events, in batches. Pure.
//!
//! A batch is the text that clients get. After the response has ended, the store may keep all events as one
//! compressed text instead of the batches.

use std::io::Read as _;

use bytes::Bytes;

use crate::store::EventBatch;

/// Stored instead of the final event of a cancelled response: the canceller knows neither its number nor the
/// output, so readers build the event from the record.
pub const CANCELLED: &[u8] = b"cancelled";

const END: &[u8] = b"\n\n";

/// The events that the owner of a response has written.
#[derive(Debug, Default)]
pub struct Log {
    text: Vec<u8>,
    /// The end of each event in `text`.
    ends: Vec<usize>,
    /// Number of stored events.
    stored: usize,
    /// Number of events that another replica stored. They may differ from those written again here.
    others: usize,
    /// The number of events, once their text is no longer kept.
    overflowed: Option<u64>,
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
        if let Some(count) = &mut self.overflowed {
            *count += memchr::memmem::find_iter(text, END).count() as u64;
            return;
        }
        let begin = self.text.len();
        self.text.extend_from_slice(text);
        let ends = memchr::memmem::find_iter(text, END).map(|at| begin + at + END.len());
        self.ends.extend(ends);
    }

    /// The next batch to store. Without text once the store keeps no more events.
    pub fn batch(&self) -> Option<EventBatch> {
        let stored = self.stored as u64;
        if let Some(count) = self.overflowed {
            return (count > stored).then(|| EventBatch {
                first: stored,
                last: count - 1,
                bytes: Bytes::from_static(END),
            });
        }
        let last = self.ends.len().checked_sub(1)?;
        if last < self.stored {
            return None;
        }
        Some(EventBatch {
            first: stored,
            last: last as u64,
            bytes: Bytes::copy_from_slice(&self.text[self.stored_bytes()..]),
        })
    }

    /// The store has every event up to `last`.
    pub fn on_stored(&mut self, last: u64) {
        self.stored = usize::try_from(last + 1).unwrap_or(usize::MAX);
    }

    /// The store has lost the events after `last`. False if they are not here to be stored again.
    pub fn rewind(&mut self, last: Option<u64>) -> bool {
        let stored = last.map_or(0, |last| last + 1);
        self.stored = usize::try_from(stored).unwrap_or(usize::MAX);
        self.overflowed.is_some() || self.stored <= self.ends.len()
    }

    /// The store keeps no more events, only their number.
    pub fn on_overflow(&mut self) {
        if self.overflowed.is_none() {
            self.overflowed = Some(self.ends.len() as u64);
            (self.text, self.ends) = (Vec::new(), Vec::new());
        }
    }

    /// The first `count` events are not here.
    pub fn on_overflow_at(&mut self, count: u64) {
        self.overflowed = Some(count);
        (self.text, self.ends) = (Vec::new(), Vec::new());
    }

    /// Number of events, whether their text is here or not.
    pub fn made(&self) -> u64 {
        self.overflowed.unwrap_or(self.ends.len() as u64)
    }

    /// Stored events after `after`, up to about `bytes_max` bytes, and the number of the last one; `None` if they
    /// must be read from the store.
    pub fn tail(&self, after: Option<u64>, bytes_max: usize) -> Option<(&[u8], Option<u64>)> {
        let from = after.map_or(0, |after| {
            usize::try_from(after.saturating_add(1)).unwrap_or(usize::MAX)
        });
        if self.overflowed.is_some() || from < self.others || self.ends.len() < self.stored {
            return None;
        }
        if from >= self.stored {
            return Some((&[], after));
        }
        let begin = self.end_of(from);
        let fit = self.ends[from..self.stored].partition_point(|end| end - begin <= bytes_max);
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
        let is_whole = self.overflowed.is_none() && self.stored <= self.ends.len();
        is_whole.then(|| &self.text[..self.stored_bytes()])
    }

    /// The text of all events; `None` if not all are here.
    pub fn text(&self) -> Option<&[u8]> {
        self.overflowed.is_none().then_some(&self.text)
    }

    pub fn stored_bytes(&self) -> usize {
        self.end_of(self.stored)
    }

    /// The end of the first `count` events.
    fn end_of(&self, count: usize) -> usize {
        match count.checked_sub(1) {
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
    const LEVEL: i32 = 3;
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

    fn event(number: u64) -> String {
        format!("event: e\ndata: {number}\n\n")
    }

    fn text(count: u64) -> String {
        (0..count).map(event).collect()
    }

    #[test]
    fn an_overflowed_log_continues_with_numbers_only() {
        let mut log = Log::default();
        log.push(text(2).as_bytes());
        log.on_overflow();
        log.on_stored(1);
        assert_eq!((log.batch(), log.text()), (None, None));
        log.push(event(2).as_bytes());
        let batch = log.batch().unwrap();
        assert_eq!((batch.first, batch.last), (2, 2));
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
        log.on_stored(3);
        log.on_overflow();
        assert_eq!(log.tail(Some(1), 99), None);
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
                    prop_assert!(log.rewind(store.last().map(|it| it.last)));
                }
            }
            if let Some(batch) = log.batch() {
                log.on_stored(batch.last);
                store.push(batch);
            }
            let seen: Vec<u8> = store.iter().flat_map(|it| beyond(&it.bytes, it.first, after).0.to_vec()).collect();
            let expected: String = (after.map_or(0, |it| it + 1)..made).map(event).collect();
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
            let again = decompressed(&compressed(text(made).as_bytes()), 1 << 20).unwrap();
            prop_assert_eq!(beyond(&again, 0, after), (expected.as_bytes(), made.checked_sub(1)));
        }
    }
}
