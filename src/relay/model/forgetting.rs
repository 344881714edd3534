//! Models that have gone are forgotten, with their metric series.

use std::sync::{Arc, Weak};
use std::time::Instant;

use rustc_hash::{FxHashMap, FxHashSet};
use tracing::info;

use super::{Shared, States};
use crate::fleet::Snapshot;
use crate::ids::Model;
use crate::observe::metrics::FoundSeries;
use crate::relay::account::usage::Usage;

impl Shared {
    /// Removes the metric series of workers that left the fleet, or dropped a model where places are short, and forgets
    /// models that are gone. `is_configured`: the newest configuration names the model.
    pub(in crate::relay) fn forget_departed(
        &self,
        now: Instant,
        fleet: &Snapshot,
        is_configured: impl Fn(&str) -> bool,
        usage: &Usage,
    ) {
        let workers = fleet.workers.iter();
        let listed: FxHashMap<&str, _> = workers
            .map(|status| (&*status.worker.name, &status.facts))
            .collect();
        let is_listed = |worker: &str| listed.contains_key(worker);
        self.families.remove_workers(is_listed);
        let mut unneeded = FxHashSet::default();
        let mut models = Vec::new();
        for (name, model) in &mut *self.by_model.lock() {
            let is_known = fleet.models.contains_key(name) || is_configured(name);
            if !model.is_needed(now, is_known) {
                unneeded.insert(name.clone());
            }
            models.push((name.clone(), model.counts.clone()));
        }
        for (name, counts) in models {
            // A worker that has not said yet what it serves may serve the model as before.
            let serves = |worker: &str| {
                let facts = listed.get(worker);
                facts.is_some_and(|facts| {
                    facts.models.is_empty() || facts.models.contains_key(&name)
                })
            };
            counts.series.remove_workers(is_listed, serves);
            counts.usage.release_removed(usage, &name);
            counts.usage.release_shared(usage);
        }
        if !unneeded.is_empty() {
            self.forget(now, &unneeded, usage);
        }
    }

    /// Forgets models and removes their series, but for those that a request has or waits with: they go later.
    fn forget(&self, now: Instant, unneeded: &FxHashSet<Model>, usage: &Usage) {
        let unused = self.drop_states(now, unneeded);
        if unused.is_empty() {
            return;
        }
        let found = self.find_series(&unused);
        self.remove_unused(now, &unused, found, usage);
    }

    /// Drops the states of models. Returns those models that no request has or waits with.
    fn drop_states(&self, now: Instant, unneeded: &FxHashSet<Model>) -> FxHashSet<Model> {
        let generations: Vec<Arc<States>> = {
            let generations = self.generations.lock();
            generations.iter().filter_map(Weak::upgrade).collect()
        };
        for states in generations {
            states.rcu(|states| {
                let mut states = FxHashMap::clone(states);
                states.retain(|name, _| !unneeded.contains(name));
                states
            });
        }
        let mut unused = FxHashSet::default();
        let mut by_model = self.by_model.lock();
        for name in unneeded {
            let Some(model) = by_model.get_mut(name) else {
                continue;
            };
            // The state of a request has the counts, too: it may be one that takes more than an hour.
            if Arc::strong_count(&model.counts) == 1 {
                unused.insert(name.clone());
            } else {
                model.needed_at = now;
            }
        }
        unused
    }

    /// Looks through the metric families. First requests of models do not wait for that, so one may come meanwhile.
    fn find_series(&self, models: &FxHashSet<Model>) -> FoundSeries {
        let mut found = FoundSeries::by("model");
        self.families.find_models(models, &mut found);
        if let Some(families) = &self.disaggregation {
            families.find_models(models, &mut found);
        }
        found
    }

    /// Forgets those models that no request has asked for meanwhile, and removes the series that were found.
    fn remove_unused(
        &self,
        now: Instant,
        unused: &FxHashSet<Model>,
        mut found: FoundSeries,
        usage: &Usage,
    ) {
        let mut gone = 0_usize;
        for name in unused {
            // Nobody gets the model's counts from here until its series are removed.
            let mut by_model = self.by_model.lock();
            let Some(model) = by_model.get_mut(name) else {
                continue;
            };
            // What a request has counted since then was not found.
            if model.is_needed(now, false) {
                continue;
            }
            let Some(counts) = Arc::get_mut(&mut model.counts) else {
                model.needed_at = now;
                continue;
            };
            counts.series.remove();
            counts.usage.remove(usage, name);
            found.remove(name);
            self.families.remove_unanswered(name);
            self.hindsight.remove(name);
            by_model.remove(name);
            gone += 1;
        }
        if gone == 0 {
            return;
        }
        info!(
            models = gone,
            "models are forgotten, and their metric series removed: no worker has served them and no request has asked \
             for them for an hour"
        );
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use hyper::StatusCode;

    use super::*;
    use crate::fleet::Worker;
    use crate::fleet::registry::tests::{bring_up, registry, worker};
    use crate::ids::Tenant;
    use crate::observe;
    use crate::observe::metrics;
    use crate::prompt::Api;
    use crate::relay::failure::types::Outcome;
    use crate::relay::model::tests::models;
    use crate::relay::model::{ModelState, Models, REMEMBERED_FOR};

    /// A request for a model, until it is dropped. It shows in most of the model's series.
    fn serve(models: &Models, usage: &Usage, name: &str, worker: &Worker) -> Arc<ModelState> {
        let name = Model::from(name);
        let state = models.of(&name);
        state.take_ticket();
        let series = state.counts.series.of(worker);
        series.count(Api::Chat, StatusCode::OK, Outcome::Complete);
        let families = &state.families;
        families.count_unanswered(&name, Api::Chat.as_str(), Outcome::ClientDisconnected);
        let continuations = &families.continuations;
        continuations
            .with_label_values(&[&*name, "refused", "api"])
            .inc();
        state.counts.usage.of(usage, Tenant::of("a"), "a", &name);
        state
    }

    fn remembered(models: &Models) -> Vec<String> {
        let by_model = models.shared.by_model.lock();
        let mut names: Vec<String> = by_model.keys().map(|name| name.to_string()).collect();
        names.sort_unstable();
        names
    }

    #[test]
    fn models_that_no_worker_serves_are_forgotten_after_an_hour_without_requests() {
        let counts = metrics::Registry::default();
        let usage = Usage::new(None, &counts);
        let models = models(&counts);
        let fleet = registry(&["w"]);
        let worker = fleet.snapshot().workers[0].worker.clone();
        for number in 0..100 {
            let name = format!("m{number}");
            bring_up(&fleet, &name);
            serve(&models, &usage, &name, &worker);
        }
        let now = observe::now();
        let forget = |after: Duration| {
            let snapshot = fleet.snapshot().clone();
            let is_configured = |name: &str| name == "m1";
            let shared = &models.shared;
            shared.forget_departed(now + after, &snapshot, is_configured, &usage);
        };
        forget(Duration::ZERO);
        forget(REMEMBERED_FOR - Duration::from_secs(1));
        assert_eq!(remembered(&models).len(), 100);
        // The worker serves another model by now, and what it answered for this one is still shown.
        let shown = "model=\"m0\",outcome=\"complete\",status=\"200\",worker=\"w\"} 1";
        assert!(counts.text().contains(shown));
        forget(REMEMBERED_FOR);
        // One is configured, the other is served.
        assert_eq!(remembered(&models), ["m1", "m99"]);
        assert_eq!(models.states.load().len(), 2);
        let text = counts.text();
        for number in [0, 50, 98] {
            let label = format!("\"m{number}\"");
            let left: Vec<&str> = text.lines().filter(|line| line.contains(&label)).collect();
            assert!(left.is_empty(), "{left:#?}");
        }
        assert!(text.contains("\"m1\"") && text.contains("\"m99\""));
    }

    #[test]
    fn the_new_pod_of_the_only_worker_finds_what_was_learnt_of_its_model() {
        let counts = metrics::Registry::default();
        let usage = Usage::new(None, &counts);
        let models = models(&counts);
        let fleet = registry(&[]).snapshot().clone();
        let next = serve(&models, &usage, "m", &worker("a")).next_ticket();
        let now = observe::now();
        for minutes in [0, 5, 30] {
            let later = now + Duration::from_secs(60 * minutes);
            let shared = &models.shared;
            shared.forget_departed(later, &fleet, |_| false, &usage);
        }
        let after = models.successor(models.settings.clone(), true);
        assert_eq!(after.of(&Model::from("m")).next_ticket(), next);
    }

    #[test]
    fn a_model_is_remembered_for_an_hour_after_a_request_of_several_hours_was_seen() {
        let counts = metrics::Registry::default();
        let usage = Usage::new(None, &counts);
        let models = models(&counts);
        let fleet = registry(&[]).snapshot().clone();
        let start = observe::now();
        let forget = |after: Duration| {
            let shared = &models.shared;
            shared.forget_departed(start + after, &fleet, |_| false, &usage);
        };
        let request = serve(&models, &usage, "m", &worker("a"));
        forget(Duration::ZERO);
        forget(3 * REMEMBERED_FOR);
        drop(request);
        forget(4 * REMEMBERED_FOR - Duration::from_secs(1));
        assert_eq!(remembered(&models), ["m"]);
        forget(4 * REMEMBERED_FOR);
        assert!(remembered(&models).is_empty());
    }

    #[test]
    fn a_model_that_is_asked_for_while_its_series_are_looked_for_keeps_them() {
        let counts = metrics::Registry::default();
        let usage = Usage::new(None, &counts);
        let models = models(&counts);
        let shared = &models.shared;
        let (now, worker) = (observe::now() + 2 * REMEMBERED_FOR, worker("a"));
        let mut unneeded = FxHashSet::default();
        for name in ["again", "gone", "held"] {
            let state = serve(&models, &usage, name, &worker);
            unneeded.insert(state.name.clone());
        }
        for model in shared.by_model.lock().values_mut() {
            // An earlier look has seen it.
            model.tickets = 1;
        }
        let unused = shared.drop_states(now, &unneeded);
        assert_eq!(unused, unneeded);
        let found = shared.find_series(&unused);
        serve(&models, &usage, "again", &worker);
        let held = models.of(&Model::from("held"));
        shared.remove_unused(now, &unused, found, &usage);
        assert_eq!(remembered(&models), ["again", "held"]);
        held.in_flight.inc();
        let text = counts.text();
        assert!(text.contains("warmroute_requests_in_flight{model=\"held\"} 1"));
        assert!(text.contains("\"again\"") && !text.contains("\"gone\""));
    }

    #[test]
    fn a_model_is_not_forgotten_while_a_request_has_it_of_whatever_configuration() {
        let counts = metrics::Registry::default();
        let usage = Usage::new(None, &counts);
        let models = models(&counts);
        let newer = models.successor(models.settings.clone(), true);
        let fleet = registry(&[]).snapshot().clone();
        let mut now = observe::now();
        let mut forget = || {
            // The first look sees that tickets were taken, or that a request had the model until now.
            for _ in 0..2 {
                now += REMEMBERED_FOR;
                let shared = &models.shared;
                shared.forget_departed(now, &fleet, |_| false, &usage);
            }
        };
        let worker = worker("a");
        for running in [&models, &newer] {
            let request = serve(running, &usage, "m", &worker);
            request.in_flight.inc();
            forget();
            assert_eq!(remembered(&models), ["m"]);
            // The next one counts with it.
            let next = serve(&newer, &usage, "m", &worker);
            next.in_flight.inc();
            let shown = "warmroute_requests_in_flight{model=\"m\"} 2";
            assert!(counts.text().contains(shown));
            for ended in [request, next] {
                ended.in_flight.dec();
            }
            forget();
            assert!(remembered(&models).is_empty());
            assert!(!counts.text().contains("\"m\""));
        }
    }
}
