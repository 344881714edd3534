//! Models whose last worker left: while the pod of a model is replaced, its new worker is not listed yet. For a while
//! requests for such a model are answered as unavailable, and not as for a model that does not exist. Pure.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustc_hash::{FxHashMap, FxHashSet};

use super::model_set::ModelSet;
use crate::ids::Model;

/// How long a model is remembered: a large model is loaded by a new pod in minutes.
const REMEMBERED_FOR: Duration = Duration::from_secs(15 * 60);
/// Models that are remembered; of more, those that left first are forgotten. Enough for the adapters of a large fleet,
/// of which only the names are kept.
const MAX_MODELS: usize = 10_000;

#[derive(Debug, Default)]
pub(super) struct DepartedModels(BTreeMap<Model, Instant>);

impl DepartedModels {
    /// Workers with the models of `left` left; those with the models of `rest` stay. Returns how many models were
    /// forgotten for lack of room.
    pub(super) fn on_left<'a>(
        &mut self,
        now: Instant,
        left: &[Arc<ModelSet>],
        rest: impl Iterator<Item = &'a Arc<ModelSet>>,
    ) -> usize {
        self.0.retain(|_, at| is_recent(*at, now));
        let served: FxHashSet<&Model> = models(rest).collect();
        let lost = models(left.iter()).filter(|model| !served.contains(model));
        self.0.extend(lost.map(|model| (model.clone(), now)));
        let too_many = self.0.len().saturating_sub(MAX_MODELS);
        if too_many > 0 {
            let known = self.0.iter();
            let mut by_age: Vec<(Instant, Model)> =
                known.map(|(model, at)| (*at, model.clone())).collect();
            by_age.sort_unstable();
            for (_, model) in &by_age[..too_many] {
                self.0.remove(model);
            }
        }
        too_many
    }

    /// A worker serves these models now. If it unloads one later, that does not exist any more.
    pub(super) fn on_served(&mut self, set: &ModelSet) {
        if self.0.is_empty() {
            return;
        }
        for (model, _) in &set.models {
            self.0.remove(model);
        }
    }

    pub(super) fn contains(&self, now: Instant, model: &str) -> bool {
        self.0.get(model).is_some_and(|at| is_recent(*at, now))
    }
}

fn is_recent(left: Instant, now: Instant) -> bool {
    now.saturating_duration_since(left) < REMEMBERED_FOR
}

/// The models of all sets. Workers with the same models share a set, which is looked at once.
fn models<'a>(sets: impl Iterator<Item = &'a Arc<ModelSet>>) -> impl Iterator<Item = &'a Model> {
    let different: FxHashMap<*const ModelSet, &'a ModelSet> =
        sets.map(|set| (Arc::as_ptr(set), &**set)).collect();
    let models = different.into_values().flat_map(|set| set.models.iter());
    models.map(|(model, _)| model)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::registry::tests::facts;
    use crate::observe;

    fn set(models: &[&str]) -> Arc<ModelSet> {
        ModelSet::of(&facts(models), std::iter::empty())
    }

    #[test]
    fn a_model_is_remembered_for_a_while_once_its_last_worker_has_left() {
        let now = observe::now();
        let mut departed = DepartedModels::default();
        let (both, first) = (set(&["a", "b"]), set(&["a"]));
        assert_eq!(
            departed.on_left(now, &[both.clone(), both], [&first].into_iter()),
            0
        );
        assert!(departed.contains(now, "b"));
        assert!(!departed.contains(now, "a"), "another worker serves it");
        assert!(!departed.contains(now, "c"), "no worker served it");
        let later = now + REMEMBERED_FOR;
        assert!(departed.contains(later - Duration::from_secs(1), "b"));
        assert!(!departed.contains(later, "b"));
        let _ = departed.on_left(later, &[first], std::iter::empty());
        assert_eq!(
            departed.0.len(),
            1,
            "what is not remembered takes no memory"
        );
    }

    #[test]
    fn a_model_that_is_served_again_is_forgotten() {
        let now = observe::now();
        let mut departed = DepartedModels::default();
        let _ = departed.on_left(now, &[set(&["a", "b"])], std::iter::empty());
        departed.on_served(&set(&["b", "c"]));
        assert!(departed.contains(now, "a"));
        assert!(!departed.contains(now, "b"));
    }

    #[test]
    fn of_too_many_models_those_that_left_first_are_forgotten() {
        let now = observe::now();
        let mut departed = DepartedModels::default();
        let _ = departed.on_left(now, &[set(&["z"])], std::iter::empty());
        let names: Vec<String> = (0..MAX_MODELS).map(|number| number.to_string()).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let later = now + Duration::from_secs(1);
        assert_eq!(
            departed.on_left(later, &[set(&names)], std::iter::empty()),
            1
        );
        assert!(!departed.contains(later, "z"));
        assert!(departed.contains(later, "0"));
    }
}
