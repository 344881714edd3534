//! Writes the gauges of all models when they are scraped, also as 0: of the fleet's, the configuration's, and those that
//! requests wait for.

use std::sync::Arc;

use prometheus::IntGaugeVec;
use rustc_hash::{FxHashMap, FxHashSet};

use super::Queues;
use super::room::GroupLoad;
use crate::fleet::Members;
use crate::ids::Model;
use crate::observe;
use crate::queue::{ClassStatus, Settings};

/// Loads that were read already: models with the same workers share them, and each worker is read once. Each entry keeps
/// its members, so that their address stays theirs.
pub(super) type Loads = FxHashMap<*const Members, (Arc<Members>, GroupLoad)>;

impl Queues {
    pub(super) fn export(&self) {
        let settings = self.settings.load();
        let default = Settings::default();
        let settings = settings.as_deref().unwrap_or(&default);
        let mut exported = FxHashSet::default();
        let mut loads = Loads::default();
        let waiting = self.waiting_classes();
        for model in self.known_models(waiting.keys()) {
            for class in &settings.classes {
                exported.insert((model.clone(), class.name.clone()));
            }
            let classes = waiting.get(&model).map_or(&[][..], |classes| &classes[..]);
            self.export_model(&model, classes, settings, &mut loads);
        }
        self.metrics.retain(exported);
    }

    /// The classes of the models of which requests wait.
    pub(super) fn waiting_classes(&self) -> FxHashMap<Model, Vec<(String, ClassStatus)>> {
        let now = observe::now();
        let queues = self.by_name.load();
        let waiting = queues.values().filter(|queue| queue.waiting() > 0);
        waiting.flat_map(|queue| queue.status(now)).collect()
    }

    fn export_model(
        &self,
        model: &Model,
        waiting: &[(String, ClassStatus)],
        settings: &Settings,
        loads: &mut Loads,
    ) {
        let metrics = &self.metrics;
        let (mut requests, mut tokens) = (0, 0);
        for class in &settings.classes {
            let status = waiting.iter().find(|(name, _)| *name == class.name);
            let status = status.map(|(_, status)| status);
            let labels = [model.as_ref(), class.name.as_str()];
            let set = |gauges: &IntGaugeVec, value: u64| {
                gauges.with_label_values(&labels).set(value as i64);
            };
            set(
                &metrics.requests,
                status.map_or(0, |status| status.requests.into()),
            );
            set(&metrics.tokens, status.map_or(0, |status| status.tokens));
            set(&metrics.bytes, status.map_or(0, |status| status.bytes));
            requests += status.map_or(0, |status| status.requests);
            tokens += status.map_or(0, |status| status.tokens);
        }
        let load = self.load_of(model, loads);
        let saturation = metrics.saturation.with_label_values(&[model.as_ref()]);
        saturation.set(load.saturation((requests, tokens), settings));
    }

    /// What a model's workers have.
    pub(super) fn load_of(&self, model: &Model, loads: &mut Loads) -> GroupLoad {
        let snapshot = self.fleet.snapshot();
        let Some(group) = snapshot.models.get(model) else {
            return GroupLoad::default();
        };
        let now = observe::now();
        let (_, load) = loads
            .entry(Arc::as_ptr(&group.members))
            .or_insert_with(|| (group.members.clone(), self.workers_of(group, now).load()));
        *load
    }

    /// With those that requests wait for.
    pub(super) fn known_models<'a>(&self, waiting: impl Iterator<Item = &'a Model>) -> Vec<Model> {
        let mut models: Vec<Model> = self.fleet.snapshot().models.keys().cloned().collect();
        models.extend(self.configured.load().iter().cloned());
        models.extend(waiting.cloned());
        models.sort_unstable();
        models.dedup();
        models
    }
}
