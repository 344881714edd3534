//! The pages of a running router, as far as the rules read them. Pure.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Deserialize;
use serde_json::Value;

use crate::observe::metrics_text::{Series, series};
use crate::units;

/// What a router shows of its fleet.
#[derive(Clone, Debug, Default)]
pub struct Observed {
    pub(super) fleet: Fleet,
    /// How the store of responses is; `None` where the router keeps no responses.
    pub(super) store: Option<StoreHealth>,
    pub(super) kv: Kv,
    /// The configuration that runs.
    pub(super) config: Value,
    /// The series of `/metrics` with their names.
    pub(super) metrics: Vec<(String, Series)>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Fleet {
    pub(super) workers: Vec<Worker>,
    pub(super) pairs: Option<Pairs>,
    /// Other replicas.
    pub(super) peers: Vec<Peer>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Peer {
    pub(super) name: Option<String>,
    pub(super) address: Option<String>,
    pub(super) state: String,
    pub(super) error: Option<String>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct StoreHealth {
    pub(super) is_up: bool,
    pub(super) reason: String,
    pub(super) warning: String,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Worker {
    pub(super) name: String,
    pub(super) role: String,
    pub(super) health: String,
    pub(super) last_error: Option<String>,
    pub(super) version: Option<String>,
    pub(super) engine: String,
    /// How it is sent requests of the Responses API.
    pub(super) responses: String,
    pub(super) models: Vec<String>,
    pub(super) requests_total: u64,
    /// Requests of this router that run on the worker now.
    pub(super) requests: u64,
    /// The load of other replicas on the worker.
    pub(super) peers: Vec<PeerLoad>,
    pub(super) circuit_breaker: String,
    pub(super) is_draining: bool,
    pub(super) block_size: Option<u32>,
    pub(super) prefix_caching: Option<bool>,
    pub(super) events: Events,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct PeerLoad {
    pub(super) requests: u64,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Events {
    pub(super) ranks: u64,
    pub(super) without_replay: u64,
    pub(super) unusable: Vec<Unusable>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Unusable {
    pub(super) rank: String,
    pub(super) endpoint: String,
    pub(super) reason: String,
    pub(super) fix: String,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Pairs {
    pub(super) connector: String,
    pub(super) count: u64,
    pub(super) incompatible: Vec<Incompatible>,
    pub(super) unpaired: Vec<String>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Incompatible {
    pub(super) message: String,
    pub(super) count: u64,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Kv {
    pub(super) ranks: Vec<Rank>,
    pub(super) tokenizer_check: Vec<TokenizerCheck>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Rank {
    pub(super) worker: String,
    pub(super) rank: u32,
    pub(super) connected: bool,
    pub(super) disconnect_reason: Option<String>,
    pub(super) replay_error: Option<String>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct TokenizerCheck {
    pub(super) model: String,
    pub(super) prompts: String,
    pub(super) mismatch: bool,
}

impl Observed {
    /// Reads the bodies of `/fleet`, `/kv`, `/config`, `/responses` and `/metrics`.
    pub fn of_pages(
        fleet: &[u8],
        kv: &[u8],
        config: &[u8],
        responses: &[u8],
        metrics: &[u8],
    ) -> Result<Self, String> {
        #[derive(Deserialize)]
        struct Responses {
            health: Option<StoreHealth>,
        }
        fn read<T: for<'de> Deserialize<'de>>(path: &str, page: &[u8]) -> Result<T, String> {
            serde_json::from_slice(page).map_err(|error| format!("{path}: {error}"))
        }
        let mut config: Value = read("/config", config)?;
        Ok(Self {
            fleet: read("/fleet", fleet)?,
            store: read::<Responses>("/responses", responses)?.health,
            kv: read("/kv", kv)?,
            config: config["config"].take(),
            metrics: samples(&String::from_utf8_lossy(metrics)),
        })
    }

    /// The sum of a metric's samples whose labels have these values.
    pub(super) fn sum(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        self.labelled(name, labels).sum()
    }

    /// The sums of a metric's samples by a label's value.
    pub(super) fn by_label(&self, name: &str, label: &str) -> BTreeMap<String, f64> {
        let mut sums = BTreeMap::new();
        for series in self.all(name) {
            if let Some(value) = series.label(label) {
                *sums.entry(value.to_owned()).or_default() += series.value;
            }
        }
        sums
    }

    /// The sample of a metric whose labels have these values.
    pub(super) fn value(&self, name: &str, labels: &[(&str, &str)]) -> Option<f64> {
        self.labelled(name, labels).next()
    }

    fn labelled(&self, name: &str, labels: &[(&str, &str)]) -> impl Iterator<Item = f64> {
        let has = |series: &&Series| {
            let mut labels = labels.iter();
            labels.all(|(label, value)| series.label(label) == Some(value))
        };
        self.all(name).filter(has).map(|series| series.value)
    }

    fn all(&self, name: &str) -> impl Iterator<Item = &Series> {
        let named = self.metrics.iter().filter(move |(known, _)| known == name);
        named.map(|(_, series)| series)
    }

    /// The upper bound of the bucket that has a histogram's quantile, and how many values there are. `None` without
    /// values; infinite beyond the last bucket.
    pub(super) fn quantile(&self, name: &str, quantile: f64) -> Option<(f64, f64)> {
        let buckets = format!("{name}_bucket");
        let mut counts: BTreeMap<u64, (f64, f64)> = BTreeMap::new();
        for sample in self.all(&buckets) {
            let bound = sample.label("le")?;
            let bound = bound.parse::<f64>().unwrap_or(f64::INFINITY);
            let entry = counts.entry(bound.to_bits()).or_insert((bound, 0.0));
            entry.1 += sample.value;
        }
        // Bits of positive numbers are in the order of the numbers.
        let total = counts.values().last()?.1;
        let mut reached = counts
            .values()
            .filter(|(_, count)| *count >= quantile * total);
        let (bound, _) = reached.next()?;
        (total > 0.0).then_some((*bound, total))
    }

    /// A duration of the configuration, such as `/requests/first_byte_timeout`.
    pub(super) fn duration(&self, pointer: &str) -> Option<Duration> {
        units::parse_duration(self.config.pointer(pointer)?.as_str()?).ok()
    }

    /// The entries of `models` in the configuration.
    pub(super) fn models(&self) -> &[Value] {
        let models = self.config.get("models").and_then(Value::as_array);
        models.map_or(&[], Vec::as_slice)
    }

    /// The workers' part of all requests; even parts before the first request.
    pub(super) fn share<'w>(&self, workers: impl Iterator<Item = &'w Worker>) -> f64 {
        let all = &self.fleet.workers;
        let total: u64 = all.iter().map(|worker| worker.requests_total).sum();
        let (mut count, mut requests) = (0, 0);
        for worker in workers {
            count += 1;
            requests += worker.requests_total;
        }
        match total {
            0 => f64::from(count) / all.len().max(1) as f64,
            total => requests as f64 / total as f64,
        }
    }
}

impl Worker {
    pub(super) fn is_up(&self) -> bool {
        self.health == "up"
    }

    pub(super) fn is_sglang(&self) -> bool {
        self.engine == "sglang"
    }
}

fn samples(text: &str) -> Vec<(String, Series)> {
    let all = series(text, |_| true);
    all.map(|(name, series)| (name.to_owned(), series))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_are_read_with_their_labels() {
        let text = "# HELP a b\na{x=\"1\",y=\"say \\\"hi\\\", {ok}\"} 2\na{x=\"2\",y=\"\"} 3\nplain 4.5\nbroken{x=\"1} 1\n";
        let observed = Observed {
            metrics: samples(text),
            ..Observed::default()
        };
        assert_eq!(observed.metrics.len(), 3);
        assert_eq!(observed.metrics[0].1.label("y"), Some("say \"hi\", {ok}"));
        assert_eq!(observed.sum("a", &[]), 5.0);
        assert_eq!(observed.sum("a", &[("x", "2")]), 3.0);
        assert_eq!(observed.sum("plain", &[]), 4.5);
    }

    #[test]
    fn a_quantile_is_the_bound_of_its_bucket_over_all_series() {
        let text = "t_bucket{w=\"0\",le=\"0.5\"} 90\nt_bucket{w=\"0\",le=\"2\"} 100\nt_bucket{w=\"0\",le=\"+Inf\"} 100\n\
                    t_bucket{w=\"1\",le=\"0.5\"} 90\nt_bucket{w=\"1\",le=\"2\"} 99\nt_bucket{w=\"1\",le=\"+Inf\"} 100\n";
        let observed = Observed {
            metrics: samples(text),
            ..Observed::default()
        };
        assert_eq!(observed.quantile("t", 0.5), Some((0.5, 200.0)));
        assert_eq!(observed.quantile("t", 0.99), Some((2.0, 200.0)));
        assert_eq!(observed.quantile("t", 1.0), Some((f64::INFINITY, 200.0)));
        assert_eq!(observed.quantile("other", 0.5), None);
    }
}
