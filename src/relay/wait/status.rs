//! What waits, for operators: on a page, and as gauges when they are scraped.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use prometheus::IntGaugeVec;
use rustc_hash::{FxHashMap, FxHashSet};
use serde::Serialize;

use super::Queues;
use super::room::GroupLoad;
use crate::fleet::Members;
use crate::ids::Model;
use crate::observe;
use crate::queue::{ClassStatus, Settings};

/// Loads that were read already: models with the same workers share them, and each worker is read once. Each entry keeps
/// its members, so that their address stays theirs.
type Loads = FxHashMap<*const Members, (Arc<Members>, GroupLoad)>;

#[derive(Debug, Serialize)]
pub struct QueueStatus {
    /// False: requests never wait, since `queue` is not configured.
    is_on: bool,
    is_draining: bool,
    models: Vec<ModelRow>,
}

#[derive(Debug, Serialize)]
struct ModelRow {
    model: String,
    /// Workers that compute its prompts now.
    workers: usize,
    /// Prompt tokens that they have accepted and not computed yet, of all replicas.
    queued_tokens: u64,
    /// What the workers have, of all replicas, and what waits here, by what they may have: of prompt tokens to compute or of
    /// requests, of which there is more.
    saturation: f64,
    waiting: u32,
    /// Measured the last time that all workers were busy.
    #[serde(skip_serializing_if = "Option::is_none")]
    tokens_per_second_and_worker: Option<u64>,
    classes: Vec<ClassRow>,
}

#[derive(Clone, Debug, Default, Serialize)]
struct ClassRow {
    class: String,
    requests: u32,
    tokens: u64,
    bytes: u64,
    /// Tenants, or without tenants client addresses, that take turns.
    clients: usize,
    oldest_ms: u64,
}

#[derive(Debug, Default, Serialize)]
pub struct QueueSummary {
    is_on: bool,
    is_draining: bool,
    waiting: u64,
    models: Vec<SummaryRow>,
}

#[derive(Debug, Serialize)]
struct SummaryRow {
    model: String,
    waiting: u32,
    /// 1: all workers are busy.
    saturation: f64,
}

impl QueueStatus {
    /// What waits, in short, and the models whose workers have the most to do, at most `max` of them.
    pub fn summary(self, max: usize) -> QueueSummary {
        let waiting = self.models.iter().map(|row| u64::from(row.waiting)).sum();
        let (is_on, is_draining) = (self.is_on, self.is_draining);
        let models = self.into_busiest(max).into_iter().map(|row| SummaryRow {
            model: row.model,
            waiting: row.waiting,
            saturation: row.saturation,
        });
        QueueSummary {
            is_on,
            is_draining,
            waiting,
            models: models.collect(),
        }
    }

    pub fn is_on(&self) -> bool {
        self.is_on
    }

    /// The models whose workers have the most to do, at most `max` of them.
    pub fn busiest(self, max: usize) -> Vec<impl Serialize> {
        self.into_busiest(max)
    }

    fn into_busiest(self, max: usize) -> Vec<ModelRow> {
        let mut models = self.models;
        models.sort_by(|a, b| b.saturation.total_cmp(&a.saturation));
        models.truncate(max);
        models
    }
}

/// The classes of a model of which no request waits.
fn none(settings: &Settings) -> Vec<ClassRow> {
    let classes = settings.classes.iter().map(|class| ClassRow {
        class: class.name.clone(),
        ..ClassRow::default()
    });
    classes.collect()
}

impl Queues {
    pub fn status(&self) -> QueueStatus {
        let settings = self.settings.load();
        let idle = settings.as_deref().map(none).unwrap_or_default();
        let shown = settings.as_deref().cloned().unwrap_or_default();
        QueueStatus {
            is_on: settings.is_some(),
            is_draining: self.is_draining.load(Relaxed),
            models: self.rows(&shown, &idle, |model| self.get(model)?.measured_rate()),
        }
    }

    /// Writes the gauges of all known models, also as 0.
    pub(super) fn export(&self) {
        let settings = self.settings.load();
        let shown = settings.as_deref().cloned().unwrap_or_default();
        let metrics = &self.metrics;
        let mut exported = FxHashSet::default();
        for row in self.rows(&shown, &none(&shown), |_| None) {
            let saturation = metrics.saturation.with_label_values(&[&*row.model]);
            saturation.set(row.saturation);
            for class in row.classes {
                let labels = [&*row.model, &*class.class];
                let set = |gauges: &IntGaugeVec, value: u64| {
                    gauges.with_label_values(&labels).set(value as i64);
                };
                set(&metrics.requests, class.requests.into());
                set(&metrics.tokens, class.tokens);
                set(&metrics.bytes, class.bytes);
                exported.insert((row.model.clone(), class.class));
            }
        }
        metrics.retain(exported);
    }

    /// All known models: of the fleet, of the configuration, and those that requests wait for. `idle`: the classes of a model
    /// of which no request waits. `rate`: the tokens a second and worker that its queue has measured.
    fn rows(
        &self,
        settings: &Settings,
        idle: &[ClassRow],
        rate: impl Fn(&Model) -> Option<f64>,
    ) -> Vec<ModelRow> {
        let now = observe::now();
        let mut loads = Loads::default();
        let mut waiting = self.waiting_classes(now);
        let mut models: Vec<Model> = self.fleet.snapshot().models.keys().cloned().collect();
        models.extend(self.configured.load().iter().cloned());
        models.extend(waiting.keys().cloned());
        models.sort_unstable();
        models.dedup();
        let rows = models.into_iter().map(|model| {
            let classes = waiting.remove(&model).unwrap_or_else(|| idle.to_vec());
            let tokens = classes.iter().map(|class| class.tokens).sum();
            let waiting = classes.iter().map(|class| class.requests).sum();
            let load = self.load_of(&model, now, &mut loads);
            ModelRow {
                workers: load.workers,
                queued_tokens: load.queued_tokens,
                saturation: load.saturation((waiting, tokens), settings),
                waiting,
                tokens_per_second_and_worker: rate(&model).map(|rate| rate as u64),
                classes,
                model: model.to_string(),
            }
        });
        rows.collect()
    }

    /// The classes of the models of which requests wait.
    fn waiting_classes(&self, now: Instant) -> FxHashMap<Model, Vec<ClassRow>> {
        let row = |(class, status): (String, ClassStatus)| ClassRow {
            class,
            requests: status.requests,
            tokens: status.tokens,
            bytes: status.bytes,
            clients: status.clients,
            oldest_ms: status.oldest.as_millis() as u64,
        };
        let queues = self.by_name.load();
        let waiting = queues.values().filter(|queue| queue.waiting() > 0);
        let models = waiting.flat_map(|queue| queue.status(now));
        models
            .map(|(model, classes)| (model, classes.into_iter().map(row).collect()))
            .collect()
    }

    fn load_of(&self, model: &Model, now: Instant, loads: &mut Loads) -> GroupLoad {
        let snapshot = self.fleet.snapshot();
        let Some(group) = snapshot.models.get(model) else {
            return GroupLoad::default();
        };
        let (_, load) = loads
            .entry(Arc::as_ptr(&group.members))
            .or_insert_with(|| (group.members.clone(), self.workers_of(group, now).load()));
        *load
    }
}
