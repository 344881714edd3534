//! Writes the gauges of all models when they are scraped, also as 0: of the fleet's, the configuration's, and those that
//! requests wait for.

use prometheus::IntGaugeVec;
use rustc_hash::FxHashSet;

use super::Queues;
use super::model_queue::ModelQueue;
use crate::ids::Model;
use crate::observe;
use crate::queue::Settings;

impl Queues {
    pub(super) fn export(&self) {
        let settings = self.settings.load();
        let default = Settings::default();
        let settings = settings.as_deref().unwrap_or(&default);
        let mut exported = FxHashSet::default();
        for model in self.known_models() {
            let queue = self.get(&model);
            for class in &settings.classes {
                exported.insert((model.clone(), class.name.clone()));
            }
            self.export_model(&model, queue.as_deref(), settings);
        }
        self.metrics.retain(exported);
    }

    fn export_model(&self, model: &Model, queue: Option<&ModelQueue>, settings: &Settings) {
        let metrics = &self.metrics;
        let waiting = queue
            .map(|queue| queue.status(observe::now()).0)
            .unwrap_or_default();
        let mut tokens = 0;
        for class in &settings.classes {
            let status = waiting.iter().find(|(name, _)| *name == class.name);
            let status = status.map(|(_, status)| status);
            let labels = [model.as_ref(), class.name.as_str()];
            let set = |gauges: &IntGaugeVec, value: u64| {
                gauges.with_label_values(&labels).set(value as i64);
            };
            set(&metrics.requests, status.map_or(0, |it| it.requests.into()));
            set(&metrics.tokens, status.map_or(0, |it| it.tokens));
            set(&metrics.bytes, status.map_or(0, |it| it.bytes));
            tokens += status.map_or(0, |it| it.tokens);
        }
        let saturation = metrics.saturation.with_label_values(&[model.as_ref()]);
        saturation.set(self.saturation(model, tokens, settings));
    }

    /// Waiting tokens here and at the workers, by what the workers may have.
    pub(super) fn saturation(&self, model: &Model, waiting: u64, settings: &Settings) -> f64 {
        let snapshot = self.fleet.snapshot();
        let group = snapshot.models.get(model);
        let (queued, workers) = group.map_or((0, 0), |group| self.workers_of(group).queued());
        let bound = settings.max_worker_queued_tokens.max(1) as f64 * workers.max(1) as f64;
        (waiting + queued) as f64 / bound
    }

    pub(super) fn known_models(&self) -> Vec<Model> {
        let mut models: Vec<Model> = self.fleet.snapshot().models.keys().cloned().collect();
        models.extend(self.configured.load().iter().cloned());
        models.extend(self.by_model.load().keys().cloned());
        models.sort_unstable();
        models.dedup();
        models
    }
}
