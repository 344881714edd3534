//! Which models wait in one queue: those that share workers, as a model and its adapters do. Then classes and turns hold over
//! all of them. Pure.

use std::sync::Arc;

use rustc_hash::FxHashMap;

use crate::fleet::{Members, Snapshot};
use crate::ids::{Model, WorkerId};

/// For each model of a fleet the first one, by name, of those that it shares workers with, directly or through others.
#[derive(Debug, Default)]
pub(super) struct Sharing {
    of: Option<Arc<Snapshot>>,
    first: FxHashMap<Model, Model>,
}

impl Sharing {
    pub(super) fn new(fleet: &Arc<Snapshot>) -> Self {
        let models: Vec<&Model> = fleet.models.keys().collect();
        let mut sets = Sets((0..models.len()).collect());
        let mut by_worker: FxHashMap<WorkerId, usize> = FxHashMap::default();
        let mut by_members: FxHashMap<*const Members, usize> = FxHashMap::default();
        for (index, group) in fleet.models.values().enumerate() {
            // Most models have exactly the workers of another one.
            let members = Arc::as_ptr(&group.members);
            if let Some(other) = by_members.insert(members, index) {
                sets.join(other, index);
                continue;
            }
            for worker in &group.workers {
                if let Some(other) = by_worker.insert(worker.id, index) {
                    sets.join(other, index);
                }
            }
        }
        let first = (0..models.len()).map(|index| {
            let first = models[sets.first(index)];
            (models[index].clone(), first.clone())
        });
        Self {
            first: first.collect(),
            of: Some(fleet.clone()),
        }
    }

    pub(super) fn is_of(&self, fleet: &Arc<Snapshot>) -> bool {
        self.of.as_ref().is_some_and(|of| Arc::ptr_eq(of, fleet))
    }

    /// The name of the model's queue. A model without workers has its own.
    pub(super) fn queue_of<'a>(&'a self, model: &'a Model) -> &'a Model {
        self.first.get(model).unwrap_or(model)
    }
}

/// Disjoint sets of the numbers below a length, each with its least number.
struct Sets(Vec<usize>);

impl Sets {
    fn first(&mut self, mut of: usize) -> usize {
        while self.0[of] != of {
            self.0[of] = self.0[self.0[of]];
            of = self.0[of];
        }
        of
    }

    fn join(&mut self, a: usize, b: usize) {
        let (a, b) = (self.first(a), self.first(b));
        self.0[a.max(b)] = a.min(b);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets_are_joined_through_others() {
        let mut sets = Sets((0..6).collect());
        sets.join(4, 5);
        sets.join(1, 2);
        sets.join(5, 2);
        let first: Vec<usize> = (0..6).map(|of| sets.first(of)).collect();
        assert_eq!(first, [0, 1, 1, 3, 1, 1]);
    }
}
