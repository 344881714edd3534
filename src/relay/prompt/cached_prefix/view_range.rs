//! The places of one view, and the only way from an index in a view to a place and back. Pure.

use std::ops::Range;

use crate::fleet::Places;
use crate::ids::{RankPlace, ViewIndex, WorkerIndex};

/// The candidates of one view: places that follow each other.
#[derive(Clone, Debug)]
pub struct ViewRange(Range<RankPlace>);

impl ViewRange {
    pub fn of_workers(places: Places<'_>, workers: Range<WorkerIndex>) -> Self {
        Self(places.of_workers(workers))
    }

    /// Workers of every role.
    pub(in crate::relay) fn everywhere(places: Places<'_>) -> Self {
        Self(places.all())
    }

    pub(in crate::relay) fn len(&self) -> usize {
        self.0.end.get() - self.0.start.get()
    }

    pub(in crate::relay) fn indices(&self) -> impl Iterator<Item = ViewIndex> + use<> {
        ViewIndex::range(0..self.len())
    }

    #[inline]
    pub(in crate::relay) fn place(&self, index: ViewIndex) -> RankPlace {
        RankPlace::new(self.0.start.get() + index.get())
    }

    /// `None` for a place that is not in the view.
    #[inline]
    pub(super) fn index(&self, place: RankPlace) -> Option<ViewIndex> {
        let is_in_view = self.0.contains(&place);
        is_in_view.then(|| ViewIndex::new(place.get() - self.0.start.get()))
    }
}
