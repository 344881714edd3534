//! Whether the choice of workers is worse than one that knows no costs: each minute, the requests that were sent are played
//! again (`routing/hindsight`), and what is worse for ten minutes is said.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use prometheus::GaugeVec;
use rustc_hash::FxHashMap;
use tracing::{info, warn};

use crate::fleet::registry::Registry;
use crate::fleet::{Group, Role};
use crate::ids::Model;
use crate::observe::metrics;
use crate::routing::hindsight::{self, Change, Journal, Sent, Took, Verdict};

const MINUTE: Duration = Duration::from_secs(60);

/// The choices of all models, whatever the configuration.
#[derive(Debug)]
pub struct Hindsight {
    fleet: Arc<Registry>,
    models: Mutex<FxHashMap<Model, Arc<Choices>>>,
    seconds: GaugeVec,
}

#[derive(Debug, Default)]
pub(in crate::relay) struct Choices {
    journal: Mutex<Journal>,
    verdict: Mutex<Verdict>,
}

impl Choices {
    pub(in crate::relay) fn on_sent(&self, now: Instant, sent: impl FnOnce() -> Sent) {
        // One that another thread is at is left out: nobody waits for this.
        let Some(mut journal) = self.journal.try_lock() else {
            return;
        };
        if journal.is_open(now) {
            journal.add(sent());
        }
    }
}

impl Hindsight {
    pub(in crate::relay) fn new(fleet: Arc<Registry>, registry: &metrics::Registry) -> Self {
        Self {
            fleet,
            models: Mutex::default(),
            seconds: registry.real_gauges(
                "warmroute_hindsight_seconds",
                "Mean time of an answer when a sample of the last ten minutes' requests is played again in virtual time: at the \
                 workers that were chosen, and at those that another policy would have chosen.",
                &["model", "policy"],
            ),
        }
    }

    pub(in crate::relay) fn of(&self, model: &Model) -> Arc<Choices> {
        self.models.lock().entry(model.clone()).or_default().clone()
    }

    /// Forgets a model that had no requests in the last ten minutes: if it is looked back at now, it shows nothing.
    pub(in crate::relay) fn remove(&self, model: &str) {
        self.models.lock().remove(model);
        self.show(model, &Took::default());
    }

    /// Looks back each minute, until it is dropped.
    pub async fn run(self: Arc<Self>) {
        loop {
            tokio::time::sleep(MINUTE).await;
            let models = self.models.lock().clone();
            for (model, choices) in models {
                let workers = match self.fleet.snapshot().models.get(&model) {
                    Some(group) => played(group),
                    None => Vec::new(),
                };
                self.look_back(&model, &choices, workers).await;
            }
        }
    }

    async fn look_back(&self, model: &Model, choices: &Choices, workers: Vec<hindsight::Worker>) {
        let sent = choices.journal.lock().take();
        // A panic in it is one of the process.
        let play = move || hindsight::play(&sent, &workers);
        let Ok(took) = tokio::task::spawn_blocking(play).await else {
            return;
        };
        let mut verdict = choices.verdict.lock();
        let change = verdict.add(took);
        let sum = verdict.sum();
        drop(verdict);
        self.show(model, &sum);
        let means = means(&sum).map(|(policy, seconds)| format!("{policy} {seconds:.2} s"));
        let means = means.join(", ");
        match change {
            Some(Change::Worse) => warn!(
                %model,
                means,
                "the last ten minutes' requests would have been answered sooner at other workers: `prefill_rate` or `slots` of workers may \
                 be set wrongly (GET /fleet shows what is learnt), or the cost leaves out what matters here; POST /explain shows a choice"
            ),
            Some(Change::AsGood) => {
                info!(%model, means, "requests are answered as soon as at other workers again");
            }
            None => {}
        }
    }

    fn show(&self, model: &str, sum: &Took) {
        for (policy, seconds) in means(sum) {
            let labels = [model, policy];
            if sum.requests == 0 {
                // One that was not there is as good as gone.
                let _ = self.seconds.remove_label_values(&labels);
            } else {
                self.seconds.with_label_values(&labels).set(seconds);
            }
        }
    }
}

fn means(sum: &Took) -> [(&'static str, f64); 3] {
    let mean = |seconds: f64| seconds / sum.requests.max(1) as f64;
    [
        ("chosen", mean(sum.chosen)),
        ("least_load", mean(sum.least_load)),
        ("round_robin", mean(sum.round_robin)),
    ]
}

/// The workers that answer, as they are now. What is learnt of them counts before what is configured, which may be wrong.
fn played(group: &Group) -> Vec<hindsight::Worker> {
    let workers = group.workers.iter();
    let is_learnt = workers.clone().any(|worker| worker.speed_samples() > 0);
    let answering = workers.filter(|worker| worker.role != Role::Prefill);
    let as_played = answering.map(|worker| hindsight::Worker {
        id: worker.id,
        speed: if is_learnt {
            worker.learnt_speed.get()
        } else {
            worker.load.speed.get()
        },
        slots: worker.load.learnt_slots().unwrap_or(worker.slots()),
    });
    as_played.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::speed::Speed;
    use crate::ids::WorkerId;
    use crate::observe;

    #[tokio::test]
    async fn what_the_last_ten_minutes_took_is_a_metric_as_long_as_there_were_requests() {
        let registry = metrics::Registry::default();
        let fleet = Registry::new(Default::default(), Default::default());
        let hindsight = Hindsight::new(fleet, &registry);
        let model = Model::from("m");
        let choices = hindsight.of(&model);
        let workers = [0, 1].map(|number| hindsight::Worker {
            id: WorkerId(number),
            speed: Speed::default(),
            slots: 4,
        });
        let (now, look_back) = (observe::now(), async || {
            let workers = workers.to_vec();
            hindsight.look_back(&model, &choices, workers).await;
        });
        for _ in 0..10 {
            for _ in 0..40 {
                choices.on_sent(now, || Sent {
                    at: now,
                    worker: WorkerId(0),
                    prompt_tokens: 100,
                    cached_tokens: 0,
                    answer_tokens: 100.0,
                    prefixes: hindsight::prefixes(&[]),
                });
            }
            look_back().await;
        }
        let value = |policy| {
            let labels = ["m", policy];
            hindsight.seconds.with_label_values(&labels).get()
        };
        assert!(value("chosen") > 1.5 * value("least_load"));
        assert!(value("least_load") > 1.0);
        for _ in 0..10 {
            look_back().await;
        }
        assert!(!registry.text().contains("hindsight_seconds{"));
    }
}
