//! The name that a client asks for -> the model that engines are asked for: aliases, weighted targets, fallbacks.
//! Pure.

use std::sync::Arc;

use rustc_hash::FxHashMap;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::session_key::KeySource;
use crate::fleet::Snapshot;
use crate::ids::Model;
use crate::observe::metrics::words;

/// Fallbacks of one name. Each costs a failed request its time.
pub const MAX_FALLBACKS: usize = 8;
/// Targets of one name. Each is hashed for each request.
pub const MAX_TARGETS: usize = 32;

/// A share of a name's requests, for one model.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Target {
    /// The model, by the name that its workers serve.
    pub model: String,
    /// Its share, relative to the weights of the other targets. 0: it gets no requests.
    #[schemars(range(min = 0))]
    pub weight: f64,
}

/// Which requests go to the same target.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Sticky {
    /// None: each request is drawn by the weights.
    #[default]
    None,
    /// Those of a session: the first key of `hash_on` that a request has, else its conversation or the chain of its
    /// `previous_response_id`. All replicas agree. A change of weights moves as few sessions as possible.
    Session,
}

/// One entry of `models`, as far as it is about names.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NameSettings {
    pub name: String,
    pub aliases: Vec<String>,
    pub targets: Vec<Target>,
    pub sticky: Sticky,
    pub fallback: Vec<String>,
    /// Where a session's key comes from.
    pub hash_on: Vec<String>,
}

impl NameSettings {
    /// False for an entry whose requests go to the model of the same name, and nowhere else.
    pub fn redirects(&self) -> bool {
        !self.aliases.is_empty() || !self.targets.is_empty() || !self.fallback.is_empty()
    }
}

words! {
    /// Why a model was chosen for a name.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
    #[serde(rename_all = "snake_case")]
    pub enum TargetReason {
        /// The model has this name.
        Name = "name",
        /// The name is an alias of the model.
        Alias = "alias",
        /// By the weights of the name's targets.
        Weight = "weight",
        /// As `Weight`, the same for all requests of a session.
        Session = "session",
        /// The models before it have no worker that can take requests.
        Fallback = "fallback",
    }
}

/// A model that may get a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    pub model: Model,
    pub reason: TargetReason,
}

/// The models that may get a request: the first is to be tried first.
pub type Candidates = SmallVec<[Candidate; 2]>;

#[derive(Clone, Debug)]
pub struct Name {
    /// As clients write it.
    pub requested: Model,
    is_alias: bool,
    entry: Arc<Entry>,
}

#[derive(Debug)]
struct Entry {
    name: Model,
    /// At least one.
    targets: Vec<(Model, f64)>,
    has_weights: bool,
    sticky: Sticky,
    fallback: Vec<Model>,
    key_sources: Vec<KeySource>,
}

#[derive(Debug, Default)]
pub struct Names(FxHashMap<Box<str>, Name>);

impl Names {
    /// The names of entries that were checked. Entries that redirect nothing are left out.
    pub fn new(entries: &[NameSettings]) -> Self {
        let mut names = FxHashMap::default();
        for settings in entries.iter().filter(|entry| entry.redirects()) {
            let entry = Arc::new(Entry::new(settings));
            let own = std::iter::once((&settings.name, false));
            let aliases = settings.aliases.iter().map(|alias| (alias, true));
            for (name, is_alias) in own.chain(aliases) {
                let known = Name {
                    requested: name.as_str().into(),
                    is_alias,
                    entry: entry.clone(),
                };
                names.insert(name.as_str().into(), known);
            }
        }
        Self(names)
    }

    /// `None` for a name that is the model's own, so that nothing has to be decided.
    pub fn get(&self, requested: &str) -> Option<&Name> {
        self.0.get(requested)
    }

    /// The name without aliases: what an alias stands for, or the name itself.
    pub fn canonical<'a>(&'a self, requested: &'a str) -> &'a str {
        self.get(requested)
            .map_or(requested, |name| &name.entry.name)
    }

    /// All names that clients may ask for now: those of served models, and those that stand for one. Sorted.
    pub fn known(&self, fleet: &Snapshot) -> Vec<Model> {
        let mut known: Vec<Model> = fleet.models.keys().cloned().collect();
        let is_served = |name: &&Name| {
            let mut models = self.models_of(name);
            models.any(|model| fleet.models.contains_key(model))
        };
        let names = self.iter().filter(is_served).map(|name| &name.requested);
        let names = names.filter(|name| !fleet.models.contains_key(*name));
        known.extend(names.cloned());
        known.sort();
        known
    }

    /// In no particular order.
    pub fn iter(&self) -> impl Iterator<Item = &Name> {
        self.0.values()
    }

    /// The models for a request, in the order in which they are to be tried, of those that its tenant `may_use`. `session` is the
    /// hash of its session's key, `random` any number. Fallbacks of fallbacks are not followed, so the list ends.
    pub fn candidates(
        &self,
        name: &Name,
        session: Option<u64>,
        random: u64,
        may_use: impl Fn(&str) -> bool,
    ) -> Candidates {
        let entry = &name.entry;
        let sticky = session.filter(|_| entry.sticky == Sticky::Session);
        let reason = name.reason(sticky.is_some());
        let key = sticky.unwrap_or(random);
        let first = entry.choose(key, &may_use);
        let own = first.and_then(|first| self.get(first));
        let fallback = match (entry.fallback.is_empty(), own) {
            (true, Some(own)) => &own.entry.fallback,
            _ => &entry.fallback,
        };
        let mut candidates = Candidates::new();
        candidates.extend(first.map(|model| Candidate {
            model: model.clone(),
            reason,
        }));
        for model in fallback {
            let model = match self.fallback_name(entry, model) {
                Some(other) => other.entry.choose(key, &may_use),
                None => Some(model).filter(|model| may_use(model)),
            };
            if let Some(model) = model
                && candidates.iter().all(|known| known.model != *model)
            {
                candidates.push(Candidate {
                    model: model.clone(),
                    reason: TargetReason::Fallback,
                });
            }
        }
        if candidates.is_empty() {
            // The tenant may use only a target that gets no requests: it is refused as for any other one.
            candidates.push(Candidate {
                model: entry.targets[0].0.clone(),
                reason,
            });
        }
        candidates
    }

    /// The name that a fallback is, if it is one itself. One of the entry's own targets is a model.
    fn fallback_name(&self, entry: &Entry, fallback: &str) -> Option<&Name> {
        let is_target = entry.models().any(|target| &**target == fallback);
        self.get(fallback).filter(|_| !is_target)
    }

    /// Every model that may get a request for the name, the targets first: all that [`Self::candidates`] chooses from.
    pub fn models_of<'a>(&'a self, name: &'a Name) -> impl Iterator<Item = &'a Model> {
        let entry = &*name.entry;
        let targets = entry.models().filter_map(move |model| self.get(model));
        let of_targets = targets.filter(move |_| entry.fallback.is_empty());
        let fallback = entry.fallback.iter();
        let fallback = fallback.chain(of_targets.flat_map(Name::fallback));
        let behind = fallback.flat_map(move |model| {
            let other = self.fallback_name(entry, model);
            let itself = other.is_none().then_some(model);
            let models = other.into_iter().flat_map(|other| other.entry.models());
            models.chain(itself)
        });
        entry.models().chain(behind)
    }

    /// The model of the name for which `began` is true, for the rest of an answer that it began; `None` if the name leads to
    /// no such model any more.
    pub fn model_that(&self, name: &Name, began: impl Fn(&str) -> bool) -> Option<Candidate> {
        let model = self.models_of(name).find(|model| began(model))?;
        let is_target = name.entry.models().any(|target| target == model);
        Some(Candidate {
            model: model.clone(),
            reason: if is_target {
                name.reason(false)
            } else {
                TargetReason::Fallback
            },
        })
    }
}

impl Name {
    /// The models that the name's requests are split over, with their weights.
    pub fn targets(&self) -> impl Iterator<Item = (&Model, f64)> {
        let targets = self.entry.targets.iter();
        targets.map(|(model, weight)| (model, *weight))
    }

    pub fn fallback(&self) -> &[Model] {
        &self.entry.fallback
    }

    /// Why a request for the name goes to one of its targets.
    fn reason(&self, is_sticky: bool) -> TargetReason {
        if self.entry.has_weights && is_sticky {
            TargetReason::Session
        } else if self.entry.has_weights {
            TargetReason::Weight
        } else if self.is_alias {
            TargetReason::Alias
        } else {
            TargetReason::Name
        }
    }

    pub fn key_sources(&self) -> &[KeySource] {
        match self.entry.sticky {
            Sticky::None => &[],
            Sticky::Session => &self.entry.key_sources,
        }
    }
}

impl Entry {
    fn new(settings: &NameSettings) -> Self {
        let model = |name: &String| Model::from(name.as_str());
        let targets = settings.targets.iter();
        let mut targets: Vec<(Model, f64)> = targets
            .map(|target| (model(&target.model), target.weight))
            .collect();
        let has_weights = !targets.is_empty();
        if !has_weights {
            targets.push((model(&settings.name), 1.0));
        }
        let keys = settings.hash_on.iter();
        Self {
            name: model(&settings.name),
            targets,
            has_weights,
            sticky: settings.sticky,
            fallback: settings.fallback.iter().map(model).collect(),
            key_sources: keys.filter_map(|key| key.parse().ok()).collect(),
        }
    }

    /// The models of its targets, in their order.
    fn models(&self) -> impl Iterator<Item = &Model> {
        self.targets.iter().map(|(model, _)| model)
    }

    /// Weighted rendezvous hashing: each target draws an exponentially distributed time with its weight as the rate,
    /// and the earliest wins. A target's time depends on nothing but the key and itself, so that a target whose weight
    /// grows only takes keys, and one whose weight shrinks only gives some away. `None` if no target with a weight may be used.
    fn choose(&self, key: u64, may_use: &impl Fn(&str) -> bool) -> Option<&Model> {
        let time = |(model, weight): &(Model, f64)| {
            let hash = xxh3_64_with_seed(model.as_bytes(), key);
            // Between 0 and 1, both excluded.
            let uniform = ((hash >> 11) as f64 + 0.5) / (1u64 << 53) as f64;
            -uniform.ln() / weight
        };
        let targets = self.targets.iter();
        let usable = targets.filter(|(model, weight)| *weight > 0.0 && may_use(model));
        let earliest = usable.min_by(|a, b| {
            let by_time = time(a).total_cmp(&time(b));
            by_time.then_with(|| a.0.cmp(&b.0))
        });
        earliest.map(|(model, _)| model)
    }
}

#[cfg(test)]
mod tests;
