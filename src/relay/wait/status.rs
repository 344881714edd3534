//! What waits, for operators.

use serde::Serialize;

use super::Queues;
use super::export::Loads;
use crate::queue::{ClassStatus, Settings};

/// The queues of all known models.
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

#[derive(Debug, Serialize)]
struct ClassRow {
    class: String,
    requests: u32,
    tokens: u64,
    bytes: u64,
    /// Tenants, or without tenants client addresses, that take turns.
    clients: usize,
    oldest_ms: u64,
}

/// What waits, in short.
#[derive(Debug, Default, Serialize)]
pub struct QueueSummary {
    is_on: bool,
    is_draining: bool,
    /// Requests that wait here.
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
fn none(settings: &Settings) -> Vec<(String, ClassStatus)> {
    let classes = settings.classes.iter().enumerate();
    let classes = classes.map(|(class, of)| {
        let status = ClassStatus {
            class,
            ..ClassStatus::default()
        };
        (of.name.clone(), status)
    });
    classes.collect()
}

impl Queues {
    pub fn status(&self) -> QueueStatus {
        let settings = self.settings.load();
        let shown = settings.as_deref().cloned().unwrap_or_default();
        let mut loads = Loads::default();
        let mut waiting = self.waiting_classes();
        let models = self.known_models(waiting.keys()).into_iter();
        let models = models.map(|model| {
            let rate = self.get(&model).and_then(|queue| queue.measured_rate());
            let classes = waiting
                .remove(&model)
                .unwrap_or_else(|| match settings.as_ref() {
                    Some(settings) => none(settings),
                    None => Vec::new(),
                });
            let tokens = classes.iter().map(|(_, class)| class.tokens).sum();
            let waiting = classes.iter().map(|(_, class)| class.requests).sum();
            let load = self.load_of(&model, &mut loads);
            ModelRow {
                workers: load.workers,
                queued_tokens: load.queued_tokens,
                saturation: load.saturation((waiting, tokens), &shown),
                waiting,
                tokens_per_second_and_worker: rate.map(|rate| rate as u64),
                classes: classes
                    .into_iter()
                    .map(|(class, status)| ClassRow {
                        class,
                        requests: status.requests,
                        tokens: status.tokens,
                        bytes: status.bytes,
                        clients: status.clients,
                        oldest_ms: status.oldest.as_millis() as u64,
                    })
                    .collect(),
                model: model.to_string(),
            }
        });
        QueueStatus {
            is_on: settings.is_some(),
            is_draining: self.is_draining.load(std::sync::atomic::Ordering::Relaxed),
            models: models.collect(),
        }
    }
}
