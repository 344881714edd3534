//! The live fleet as a decision sees it.

use std::time::Instant;

use smallvec::SmallVec;
use xxhash_rust::xxh3::xxh3_64;

use crate::fleet::Group;
use crate::ids::Block;
use crate::ids::WorkerId;
use crate::kv::predicted::Predicted;
use crate::routing::State;
use crate::routing::View;

/// Load is read as it is now; what is held is looked up once, for the deepest holders, and for others
/// when a decision asks.
pub(super) struct LiveView<'a> {
    group: &'a Group,
    predicted: &'a Predicted,
    prompt: &'a [Block],
    /// Places of the deepest holders, and the tokens that each holds.
    places: SmallVec<[usize; 8]>,
    cached: SmallVec<[u32; 8]>,
    /// Nobody else holds more than so many blocks: those of the last holder that was asked for, or
    /// none if there were fewer holders than that.
    others_max: usize,
    now: Instant,
    excluded: &'a [WorkerId],
}

impl<'a> LiveView<'a> {
    pub(super) fn new(
        group: &'a Group,
        predicted: &'a Predicted,
        prompt: &'a [Block],
        holders_max: usize,
        seed: u64,
        now: Instant,
        excluded: &'a [WorkerId],
    ) -> Self {
        let overlap = predicted.overlap(prompt, holders_max, seed);
        let others_max = match overlap.last() {
            Some(last) if overlap.len() == holders_max => last.blocks as usize,
            _ => 0,
        };
        let mut view = Self {
            group,
            predicted,
            prompt,
            places: SmallVec::new(),
            cached: SmallVec::new(),
            others_max,
            now,
            excluded,
        };
        for holder in overlap {
            // A holder that is down or serves another model now has no place.
            if let Some(place) = group.place.get(&holder.worker) {
                view.places.push(*place);
                view.cached.push(view.tokens(holder.blocks));
            }
        }
        view
    }

    fn tokens(&self, blocks: u32) -> u32 {
        (blocks as usize)
            .checked_sub(1)
            .map_or(0, |last| self.prompt[last].end_tokens)
    }
}

impl View for LiveView<'_> {
    fn len(&self) -> usize {
        self.group.workers.len()
    }

    fn state(&self, place: usize) -> State {
        let worker = &self.group.workers[place];
        State {
            is_usable: worker.breaker.may_pass(self.now) && !self.excluded.contains(&worker.id),
            requests: worker.load.requests(),
            pending_tokens: worker.load.pending_tokens(),
            decode_tokens: worker.load.decode_tokens(),
        }
    }

    fn identity(&self, place: usize) -> u64 {
        xxh3_64(self.group.workers[place].name.as_bytes())
    }

    fn holders(&self) -> &[usize] {
        &self.places
    }

    fn cached_tokens(&self, place: usize) -> u32 {
        match self.places.iter().position(|known| *known == place) {
            Some(known) => self.cached[known],
            None if self.others_max == 0 => 0,
            // Most often all of that, which takes one look: a system prompt that the whole fleet holds.
            None => {
                let id = self.group.workers[place].id;
                self.tokens(self.predicted.depth(id, &self.prompt[..self.others_max]))
            }
        }
    }
}
