//! Removals in a row that differ in the block's hash only, as engines with full caches send them by the dozen: each is
//! compared with the first instead of being read field by field.

use std::ops::Range;

use super::read::Cursor;
use super::{Batch, EngineHash, Event, Reader};

/// Room for as many is made at once: a multiple of what two events take.
const USUAL_ROW: usize = 64;

impl<'a> Reader<'a> {
    /// Takes the removals that follow the one between `start` and here and differ from it in the block only; returns how
    /// many. Engines that evict send dozens in a row.
    pub(super) fn removals_like(
        &mut self,
        start: Cursor<'a>,
        hash: Range<usize>,
        max: usize,
        batch: &mut Batch,
    ) -> usize {
        let Some(like) = OneRemoval::new(&start, &self.cursor, hash) else {
            return 0;
        };
        let Some(Event::Removed(removed)) = batch.events.last_mut() else {
            return 0;
        };
        let mut taken = 0;
        while taken < max.min(self.blocks_left)
            && let Some(hash) = like.next(&mut self.cursor)
        {
            if taken == 0 {
                removed.hashes.reserve(max.min(USUAL_ROW));
            }
            removed.hashes.push(hash);
            taken += 1;
        }
        self.blocks_left -= taken;
        batch.joined += taken as u64;
        taken
    }
}

/// What two removals of one block each have in common.
struct OneRemoval<'a> {
    /// With the marker that says how long the hash is.
    before: &'a [u8],
    hash_bytes: usize,
    after: &'a [u8],
}

impl<'a> OneRemoval<'a> {
    /// Of the removal between two positions and where its hash is; `None` if the hash has less than eight bytes.
    fn new(start: &Cursor<'a>, end: &Cursor<'a>, hash: Range<usize>) -> Option<Self> {
        let event = start.until(end);
        let (before, rest) = event.split_at_checked(hash.start.checked_sub(start.at())?)?;
        let (hash, after) = rest.split_at_checked(hash.len())?;
        let marker_bytes = match hash {
            // An integer of eight bytes.
            [0xcf, ..] => 1,
            // A digest, with its length.
            [0xc4, 8..=u8::MAX, ..] => 2,
            _ => return None,
        };
        Some(Self {
            before: event.get(..before.len() + marker_bytes)?,
            hash_bytes: hash.len().checked_sub(marker_bytes)?,
            after,
        })
    }

    /// The block of the next removal, if it is another one like this.
    #[inline]
    fn next(&self, cursor: &mut Cursor<'a>) -> Option<EngineHash> {
        let hash_end = self.before.len() + self.hash_bytes;
        let event = cursor.take_if(hash_end + self.after.len(), |event| {
            event.starts_with(self.before) && event.ends_with(self.after)
        })?;
        let digits = event.get(..hash_end)?.last_chunk::<8>()?;
        Some(EngineHash(u64::from_be_bytes(*digits)))
    }
}
