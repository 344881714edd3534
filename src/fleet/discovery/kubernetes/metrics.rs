//! What is counted of the Kubernetes API. A build without the feature `kubernetes` has the same metrics, without values.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;

use crate::observe;
use crate::observe::metrics::{Registry, metric_table};

/// What a pod can be.
pub const STATES: [&str; 4] = ["ready", "draining", "starting", "left_out"];

metric_table! {
    #[derive(Clone, Debug)]
    struct KubernetesFamilies {
        failures: counters "warmroute_kubernetes_failures_total" ["discovery", "request", "reason"]
            "Requests to the Kubernetes API that failed, by kind (connect, list, watch) and reason. `gone` is usual: the watch \
             was behind, and everything is listed again. `ended_at_once` counts watches that wait because those before ended within 5 s.",
        lost_events: counters "warmroute_kubernetes_lost_events_total" ["discovery"]
            "Objects that a complete list showed otherwise than the watch had reported.",
        unreadable: counters "warmroute_kubernetes_unreadable_objects_total" ["discovery"]
            "Objects in lists and watches of the Kubernetes API that could not be read, each time that they came; the log names them \
             once. One that could be read before stays as it was; the others are left out.",
        pods: gauges "warmroute_kubernetes_pods" ["discovery", "state"]
            "Pods that the Kubernetes API lists, by state: ready, draining (was ready, finishes its requests), starting (was not \
             ready yet), left_out (without address, ended, or not usable; the log says why).",
        ages: real_gauges "warmroute_kubernetes_list_age_seconds" ["discovery"]
            "Time since the Kubernetes API last gave a complete list, by entry of `discovery`.",
    } and {
        /// Entry -> when it had a complete list for the last time.
        last_lists: Arc<Mutex<BTreeMap<String, Instant>>>,
    }
}

/// The metrics of all entries of `discovery` that ask the Kubernetes API.
#[derive(Clone, Debug)]
pub struct Metrics(KubernetesFamilies);

/// The metrics of one entry of `discovery`.
#[derive(Clone, Debug)]
pub struct EntryMetrics {
    entry: String,
    all: KubernetesFamilies,
}

impl Metrics {
    pub fn new(registry: &Registry) -> Self {
        let families = KubernetesFamilies::new(registry);
        let (ages, last_lists) = (families.ages.clone(), families.last_lists.clone());
        registry.on_scrape(move || {
            for (entry, at) in &*last_lists.lock() {
                let age = observe::now().saturating_duration_since(*at);
                ages.with_label_values(&[&**entry]).set(age.as_secs_f64());
            }
        });
        Self(families)
    }

    pub fn of_entry(&self, entry: &str) -> EntryMetrics {
        EntryMetrics {
            entry: entry.to_owned(),
            all: self.0.clone(),
        }
    }
}

impl EntryMetrics {
    pub fn failed(&self, request: &str, reason: &str) {
        let labels = [&*self.entry, request, reason];
        self.all.failures.with_label_values(&labels).inc();
    }

    pub fn listed(&self) {
        let mut last_lists = self.all.last_lists.lock();
        last_lists.insert(self.entry.clone(), observe::now());
    }

    pub fn lost(&self, events: usize) {
        let lost = self.all.lost_events.with_label_values(&[&*self.entry]);
        lost.inc_by(events as u64);
    }

    pub fn unreadable(&self) {
        let unreadable = &self.all.unreadable;
        unreadable.with_label_values(&[&*self.entry]).inc();
    }

    /// The number of pods in each of [`STATES`].
    pub fn pods(&self, counts: [usize; STATES.len()]) {
        for (state, count) in STATES.into_iter().zip(counts) {
            let pods = self.all.pods.with_label_values(&[&*self.entry, state]);
            pods.set(count as i64);
        }
    }

    /// The entry is not followed any more. Its counters stay.
    pub fn forget(&self) {
        self.all.last_lists.lock().remove(&self.entry);
        // They are missing if there never was a list.
        let _ = self.all.ages.remove_label_values(&[&*self.entry]);
        for state in STATES {
            let _ = self.all.pods.remove_label_values(&[&*self.entry, state]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_that_is_not_followed_any_more_has_no_age_and_no_pods() {
        let registry = Registry::default();
        let entry = Metrics::new(&registry).of_entry("kubernetes:a");
        entry.listed();
        entry.pods([3, 2, 1, 0]);
        let text = registry.text();
        let drains = r#"warmroute_kubernetes_pods{discovery="kubernetes:a",state="draining"} 2"#;
        assert!(text.contains(drains), "{text}");
        assert!(
            text.contains("warmroute_kubernetes_list_age_seconds{"),
            "{text}"
        );
        entry.forget();
        assert_eq!(registry.text(), "");
    }
}
