//! The few greatest of many items, in one pass.

use smallvec::SmallVec;

use crate::ids::ViewIndex;

/// Keeps the `max` candidates with the greatest keys: credit first, then the request's own order.
pub(super) struct Top {
    max: usize,
    items: SmallVec<[((u32, u64), ViewIndex); 8]>,
    /// Position of the least item, once there are `max`.
    least: usize,
}

impl Top {
    pub(super) fn new(max: usize) -> Self {
        Self {
            max,
            items: SmallVec::new(),
            least: 0,
        }
    }

    /// Whether an item with this key would be kept.
    #[inline]
    pub(super) fn accepts(&self, key: (u32, u64)) -> bool {
        self.items.len() < self.max
            || self
                .items
                .get(self.least)
                .is_some_and(|least| key > least.0)
    }

    pub(super) fn add(&mut self, key: (u32, u64), index: ViewIndex) {
        if self.items.len() < self.max {
            self.items.push((key, index));
        } else {
            self.items[self.least] = (key, index);
        }
        if self.items.len() == self.max {
            let positions = 0..self.items.len();
            self.least = positions
                .min_by_key(|position| self.items[*position].0)
                .unwrap_or(0);
        }
    }

    /// No item that was not kept has more credit.
    pub(super) fn others_max(&self) -> u32 {
        if self.items.len() < self.max {
            0
        } else {
            self.items
                .get(self.least)
                .map_or(u32::MAX, |least| least.0.0)
        }
    }

    /// The credit of each item that was kept, and whose it is.
    pub(super) fn credits(&self) -> impl Iterator<Item = (u32, ViewIndex)> + Clone {
        let items = self.items.iter();
        items.map(|((credit, _), index)| (*credit, *index))
    }

    pub(super) fn indices(&self) -> impl Iterator<Item = ViewIndex> {
        self.items.iter().map(|(_, index)| *index)
    }
}
