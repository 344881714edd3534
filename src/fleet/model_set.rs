//! The models that a worker serves, as one value that workers with the same models share: in a fleet of many workers with
//! many adapters, each change of one worker would otherwise go through every pair of a worker and a model. Pure.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use super::status::Facts;
use crate::ids::Model;

/// Two sets with the same models are the same set only if they are of one base model, and have the same adapters.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct ModelSet {
    /// First, so that sets that differ are found to differ at once.
    hash: u64,
    pub(super) base: Option<Model>,
    /// In order of their names, and whether each is an adapter.
    pub(super) models: Vec<(Model, bool)>,
}

impl ModelSet {
    /// The set of a worker that reports `facts`: one of `known`, if it is equal.
    pub(super) fn of<'a>(facts: &Facts, known: impl Iterator<Item = &'a Arc<Self>>) -> Arc<Self> {
        let models = facts.models.keys();
        let models: Vec<(Model, bool)> = models
            .map(|model| (model.clone(), facts.adapters.contains(model)))
            .collect();
        let mut hasher = DefaultHasher::new();
        (&facts.base, &models).hash(&mut hasher);
        let set = Self {
            hash: hasher.finish(),
            base: facts.base.clone(),
            models,
        };
        let mut known = known;
        let same = known.find(|known| ***known == set).cloned();
        same.unwrap_or_else(|| Arc::new(set))
    }
}
