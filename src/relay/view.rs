//! The live fleet as a decision sees it.

use std::time::Instant;

use xxhash_rust::xxh3::xxh3_64;

use super::held::Held;
use crate::fleet::Group;
use crate::ids::WorkerId;
use crate::routing::Cached;
use crate::routing::State;
use crate::routing::View;

/// Load is read as it is now.
#[derive(Debug)]
pub struct LiveView<'a> {
    group: &'a Group,
    held: Held<'a>,
    now: Instant,
    excluded: &'a [WorkerId],
}

impl<'a> LiveView<'a> {
    pub fn new(group: &'a Group, held: Held<'a>, now: Instant, excluded: &'a [WorkerId]) -> Self {
        Self {
            group,
            held,
            now,
            excluded,
        }
    }

    pub(super) fn held(&self) -> &Held<'a> {
        &self.held
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

    fn pending_tokens(&self, place: usize) -> u64 {
        self.group.workers[place].load.pending_tokens()
    }

    fn identity(&self, place: usize) -> u64 {
        xxh3_64(self.group.workers[place].name.as_bytes())
    }

    fn holders(&self) -> &[usize] {
        self.held.holders()
    }

    fn others_max(&self) -> u32 {
        self.held.others_max()
    }

    fn cached(&self, place: usize) -> Cached {
        self.held.cached(place)
    }
}
