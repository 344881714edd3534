//! The metric series of one worker for one model: resolved once, removed when the worker leaves the fleet, or has
//! dropped the model while places are short. A request that ends adds to them without a lookup by label values.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, OnceLock};

use arc_swap::ArcSwap;
use hyper::StatusCode;
use parking_lot::Mutex;
use prometheus::{Histogram, IntCounter};
use rustc_hash::{FxHashMap, FxHashSet};

use super::metrics::Families;
use crate::fleet::Worker;
use crate::ids::{Model, WorkerId};
use crate::prompt::Api;
use crate::relay::failure::types::Outcome;

/// Pairs of a model and a worker with series of their own. Further pairs share a model's series with the label
/// `worker="other"`, so that `/metrics` stays bounded in a large fleet with many adapters.
const SERIES_MAX: usize = 2_000;
const OTHER: &str = "other";

#[derive(Debug)]
pub(in crate::relay) struct SeriesByWorker {
    families: Arc<Families>,
    model: Model,
    by_worker: ArcSwap<FxHashMap<WorkerId, Arc<WorkerSeries>>>,
    other: OnceLock<Arc<WorkerSeries>>,
    /// Taken by those who change `by_worker`.
    writing: Mutex<()>,
}

/// The series with one value of `worker`.
#[derive(Debug)]
pub(in crate::relay) struct WorkerSeries {
    families: Arc<Families>,
    model: Model,
    worker: Arc<str>,
    pub(in crate::relay) time_to_first_token: Histogram,
    pub(in crate::relay) inter_token_latency: Histogram,
    /// The duration of the model's requests, whatever the worker.
    pub(in crate::relay) duration: Histogram,
    /// Complete answers with status 200, which nearly all are, by API.
    ok: [OnceLock<IntCounter>; Api::ALL.len()],
    requests: Mutex<RequestSeries>,
}

/// The label values of `requests_total` that have occurred; needed to remove their series.
#[derive(Debug, Default)]
struct RequestSeries {
    labels: FxHashSet<(Api, StatusCode, Outcome)>,
    /// Requests that end after their worker left must not bring its series back.
    is_removed: bool,
}

impl SeriesByWorker {
    pub(in crate::relay) fn new(families: Arc<Families>, model: Model) -> Self {
        Self {
            families,
            model,
            by_worker: ArcSwap::default(),
            other: OnceLock::new(),
            writing: Mutex::new(()),
        }
    }

    pub(in crate::relay) fn of(&self, worker: &Worker) -> Arc<WorkerSeries> {
        match self.by_worker.load().get(&worker.id) {
            Some(series) => series.clone(),
            None => self.add(worker),
        }
    }

    fn add(&self, worker: &Worker) -> Arc<WorkerSeries> {
        let _writing = self.writing.lock();
        let known = self.by_worker.load();
        if let Some(series) = known.get(&worker.id) {
            return series.clone();
        }
        let mut by_worker = FxHashMap::clone(&known);
        // A worker that left and came back has another id and the same series.
        let former = known
            .iter()
            .find(|(_, series)| series.worker == worker.name);
        let series = match former {
            Some((id, series)) => {
                by_worker.remove(id);
                series.clone()
            }
            None if self.families.worker_series.load(Relaxed) < SERIES_MAX => {
                self.families.worker_series.fetch_add(1, Relaxed);
                self.build(worker.name.clone())
            }
            None => self.other.get_or_init(|| self.build(OTHER.into())).clone(),
        };
        by_worker.insert(worker.id, series.clone());
        self.by_worker.store(Arc::new(by_worker));
        series
    }

    fn build(&self, worker: Arc<str>) -> Arc<WorkerSeries> {
        let labels = [&*self.model, &*worker];
        let families = &self.families;
        Arc::new(WorkerSeries {
            time_to_first_token: families.time_to_first_token.with_label_values(&labels),
            inter_token_latency: families.inter_token_latency.with_label_values(&labels),
            duration: families.duration.with_label_values(&[&*self.model]),
            ok: Default::default(),
            requests: Mutex::default(),
            families: families.clone(),
            model: self.model.clone(),
            worker,
        })
    }

    /// Removes the series of workers that left the fleet. Where all places are taken, also those of workers that do not
    /// serve the model any more. Until then they stay: what an adapter counted shortly before it was unloaded may not
    /// have been scraped yet, and an engine that has restarted lists only its base model first.
    pub(in crate::relay) fn remove_workers(
        &self,
        is_listed: impl Fn(&str) -> bool,
        serves: impl Fn(&str) -> bool,
    ) {
        let _writing = self.writing.lock();
        let known = self.by_worker.load();
        let are_places_short = self.families.worker_series.load(Relaxed) >= SERIES_MAX;
        let is_gone = |series: &Arc<WorkerSeries>| {
            let worker = &series.worker;
            if !is_listed(worker) {
                return true;
            }
            // A request whose answer has begun keeps them. One that waits for its answer enters again with it.
            are_places_short && !serves(worker) && Arc::strong_count(series) == 1
        };
        let gone = known.iter().filter(|(_, series)| is_gone(series));
        let gone: FxHashSet<WorkerId> = gone.map(|(worker, _)| *worker).collect();
        if gone.is_empty() {
            return;
        }
        let mut by_worker = FxHashMap::clone(&known);
        // Those who share a series do not keep their name, and enter again with their next request.
        let gone: Vec<Arc<WorkerSeries>> = gone
            .iter()
            .filter_map(|worker| by_worker.remove(worker))
            .collect();
        // First no new request gets them.
        self.by_worker.store(Arc::new(by_worker));
        for series in &gone {
            self.give_back(series);
        }
    }

    /// Removes the series of all workers. No request of the model runs.
    pub(in crate::relay) fn remove(&self) {
        let _writing = self.writing.lock();
        for series in self.by_worker.swap(Arc::default()).values() {
            self.give_back(series);
        }
        if let Some(shared) = self.other.get() {
            shared.remove();
        }
    }

    /// Removes a worker's series, and gives its place to another pair. Not those that pairs share.
    fn give_back(&self, series: &Arc<WorkerSeries>) {
        let shared = self.other.get();
        let is_shared = shared.is_some_and(|other| Arc::ptr_eq(other, series));
        if !is_shared && series.remove() {
            self.families.worker_series.fetch_sub(1, Relaxed);
        }
    }
}

impl WorkerSeries {
    /// Counts a request that has ended with this worker's answer.
    pub(in crate::relay) fn count(&self, api: Api, status: StatusCode, outcome: Outcome) {
        let is_ok = status == StatusCode::OK && outcome == Outcome::Complete;
        let ok = &self.ok[api as usize];
        if let Some(counter) = ok.get().filter(|_| is_ok) {
            counter.inc();
            return;
        }
        let mut requests = self.requests.lock();
        if requests.is_removed {
            return;
        }
        requests.labels.insert((api, status, outcome));
        let labels = self.labels(api, &status, outcome);
        let counter = self.families.requests.with_label_values(&labels);
        counter.inc();
        if is_ok {
            let _ = ok.set(counter);
        }
    }

    fn labels<'a>(&'a self, api: Api, status: &'a StatusCode, outcome: Outcome) -> [&'a str; 5] {
        [
            &*self.model,
            api.as_str(),
            &*self.worker,
            status.as_str(),
            outcome.as_str(),
        ]
    }

    /// Removes the series from `/metrics`. False if they were removed before.
    fn remove(&self) -> bool {
        let mut requests = self.requests.lock();
        if std::mem::replace(&mut requests.is_removed, true) {
            return false;
        }
        for (api, status, outcome) in requests.labels.drain() {
            let labels = self.labels(api, &status, outcome);
            let _ = self.families.requests.remove_label_values(&labels);
        }
        let labels = [&*self.model, &*self.worker];
        let families = &self.families;
        for family in [&families.time_to_first_token, &families.inter_token_latency] {
            let _ = family.remove_label_values(&labels);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::registry::tests::registry;
    use crate::http::circuit_breaker::State;
    use crate::observe::metrics::Registry;
    use crate::relay::failure::types::Failure;

    fn series(model: &str) -> (Registry, SeriesByWorker) {
        let registry = Registry::default();
        let families = Arc::new(Families::new(&registry));
        (registry, SeriesByWorker::new(families, model.into()))
    }

    fn workers(names: &[&str]) -> Vec<Arc<Worker>> {
        let fleet = registry(names).snapshot().clone();
        let workers = fleet.workers.iter();
        workers.map(|status| status.worker.clone()).collect()
    }

    fn lines_of(registry: &Registry, worker: &str) -> usize {
        let label = format!("worker=\"{worker}\"");
        let text = registry.text();
        text.lines().filter(|line| line.contains(&label)).count()
    }

    #[test]
    fn the_series_of_a_worker_that_left_are_removed_and_do_not_come_back_with_late_requests() {
        let (registry, by_worker) = series("m");
        let families = by_worker.families.clone();
        let both = workers(&["gone", "stays"]);
        for worker in &both {
            let series = by_worker.of(worker);
            series.count(Api::Chat, StatusCode::OK, Outcome::Complete);
            series.count(Api::Chat, StatusCode::BAD_GATEWAY, Outcome::Complete);
            families.on_breaker_transition(worker, State::Open);
            families.on_retry(&worker.name, Failure::Connect);
        }
        let late = by_worker.of(&both[0]);
        assert!(lines_of(&registry, "gone") > 20);
        by_worker.remove_workers(|name| name == "stays", |_| true);
        families.remove_workers(|name| name == "stays");
        late.count(Api::Chat, StatusCode::OK, Outcome::ClientDisconnected);
        late.count(Api::Chat, StatusCode::OK, Outcome::Complete);
        late.duration.observe(1.0);
        assert_eq!(lines_of(&registry, "gone"), 0);
        assert!(lines_of(&registry, "stays") > 20);
        assert_eq!(families.worker_series.load(Relaxed), 1);
    }

    #[test]
    fn a_worker_that_comes_back_under_its_name_goes_on_with_its_series() {
        let (registry, by_worker) = series("m");
        let before = workers(&["a"]).remove(0);
        let after = workers(&["b", "a"]).remove(1);
        assert_ne!(before.id, after.id);
        for worker in [&before, &after] {
            let series = by_worker.of(worker);
            series.count(Api::Chat, StatusCode::OK, Outcome::Complete);
        }
        assert!(
            registry
                .text()
                .contains("outcome=\"complete\",status=\"200\",worker=\"a\"} 2")
        );
        assert_eq!(by_worker.by_worker.load().len(), 1);
    }

    #[test]
    fn pairs_beyond_the_bound_share_a_series() {
        let (registry, by_worker) = series("m");
        by_worker.families.worker_series.store(SERIES_MAX, Relaxed);
        for worker in workers(&["a", "b"]) {
            by_worker.of(&worker);
        }
        assert_eq!(lines_of(&registry, "a"), 0);
        assert!(lines_of(&registry, OTHER) > 0);
        by_worker.remove_workers(|_| false, |_| false);
        assert!(lines_of(&registry, OTHER) > 0);
    }

    #[test]
    fn a_model_that_is_gone_leaves_the_places_of_its_workers_to_others() {
        let (registry, before) = series("before");
        let families = before.families.clone();
        let after = SeriesByWorker::new(families.clone(), "after".into());
        families.worker_series.store(SERIES_MAX - 1, Relaxed);
        let worker = workers(&["a"]).remove(0);
        before.of(&worker);
        after.of(&worker);
        let is_shown = |model: &str, worker: &str| {
            let labels = format!("model=\"{model}\",worker=\"{worker}\"");
            registry.text().contains(&labels)
        };
        assert!(is_shown("before", "a") && is_shown("after", OTHER));
        before.remove();
        // Those who share a series enter again.
        after.remove_workers(|name| name == "a", |_| true);
        after.of(&worker);
        assert!(!is_shown("before", "a") && is_shown("after", "a"));
        assert_eq!(families.worker_series.load(Relaxed), SERIES_MAX);
    }

    #[test]
    fn where_places_are_short_series_of_a_dropped_model_go_once_its_requests_have_ended() {
        let (registry, by_worker) = series("m");
        let both = workers(&["dropped", "serves"]);
        for worker in &both {
            let series = by_worker.of(worker);
            series.count(Api::Chat, StatusCode::OK, Outcome::Complete);
        }
        let places = &by_worker.families.worker_series;
        places.store(SERIES_MAX, Relaxed);
        let look = || by_worker.remove_workers(|_| true, |name| name == "serves");
        let running = by_worker.of(&both[0]);
        look();
        running.count(Api::Chat, StatusCode::OK, Outcome::Complete);
        let text = registry.text();
        assert!(text.contains("outcome=\"complete\",status=\"200\",worker=\"dropped\"} 2"));
        drop(running);
        look();
        assert_eq!(lines_of(&registry, "dropped"), 0);
        assert!(lines_of(&registry, "serves") > 20);
        assert_eq!(places.load(Relaxed), SERIES_MAX - 1);
        // It has loaded the model again.
        by_worker.of(&both[0]);
        assert!(lines_of(&registry, "dropped") > 0);
    }

    #[test]
    fn while_places_are_free_a_worker_that_dropped_the_model_goes_on_with_its_series() {
        let (registry, by_worker) = series("m");
        let worker = workers(&["a"]).remove(0);
        let count = || {
            let series = by_worker.of(&worker);
            series.count(Api::Chat, StatusCode::OK, Outcome::Complete);
        };
        count();
        by_worker.remove_workers(|_| true, |_| false);
        count();
        let text = registry.text();
        assert!(text.contains("outcome=\"complete\",status=\"200\",worker=\"a\"} 2"));
    }

    /// `/metrics` is to stay below 8 MB with 1,000 workers; KV events take less than 2.5 MB of it, the gauges of
    /// workers about 1 MB.
    #[test]
    fn the_request_metrics_of_1000_workers_take_less_than_4_5_mb() {
        let (registry, by_worker) = series("meta-llama/Llama-3.3-70B-Instruct");
        let names: Vec<String> = (0..1_000)
            .map(|n| format!("vllm-llama-70b-{n:04}.inference.svc.cluster.local:8000"))
            .collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let fleet = crate::fleet::registry::tests::registry(&names);
        for status in &fleet.snapshot().workers {
            let series = by_worker.of(&status.worker);
            series.count(Api::Chat, StatusCode::OK, Outcome::Complete);
            series.count(Api::Completions, StatusCode::OK, Outcome::Complete);
            series.count(Api::Chat, StatusCode::OK, Outcome::ClientDisconnected);
            for n in 0..1_000 {
                series.inter_token_latency.observe(f64::from(n) / 1e3);
            }
            series.time_to_first_token.observe(0.3);
            series.duration.observe(3.0);
            let families = &by_worker.families;
            families.on_retry(&status.worker.name, Failure::Connect);
            families.on_breaker_transition(&status.worker, State::Open);
            families.on_breaker_transition(&status.worker, State::Closed);
        }
        let bytes = registry.text().len();
        assert!(bytes < 4_500_000, "{bytes}");
    }
}
