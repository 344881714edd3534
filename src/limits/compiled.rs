//! The limits of one tenant as requests are counted in them: which of them a model's requests count in. Pure.

use std::sync::Arc;

use smallvec::SmallVec;

use super::cost::{Amount, Weights};
use super::gcra::{self, Rate};
use super::settings::{OnStoreFailure, RatesSpec, Settings, TenantLimitsSpec};
use crate::observe::metrics::words;

words! {
    /// What a limit counts.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
    pub enum Kind {
        Requests = "requests_per_minute",
        Tokens = "tokens_per_minute",
        InputTokens = "input_tokens_per_minute",
        OutputTokens = "output_tokens_per_minute",
        /// Tokens of lines of batches.
        BatchTokens = "batch_tokens_per_day",
    }
}

impl Kind {
    /// What it counts of a request.
    pub fn of(self, amount: &Amount) -> u64 {
        match self {
            Self::Requests => amount.requests,
            Self::Tokens | Self::BatchTokens => amount.tokens(),
            Self::InputTokens => amount.input_tokens,
            Self::OutputTokens => amount.output_tokens,
        }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct Limit {
    pub kind: Kind,
    pub rate: Rate,
    /// What the store calls it: unique among the limits of the tenant.
    pub name: Arc<str>,
    /// The models that it holds for, as configured; `None`: all together.
    pub model: Option<Arc<str>>,
}

/// What one tenant may use, as one configuration says.
#[derive(Clone, Debug, PartialEq)]
pub struct Limits {
    /// For all models together, then for each model.
    all: Vec<Limit>,
    max_tokens: Option<u64>,
    models: Vec<Model>,
    /// What lines of batches count in, in place of all the others.
    pub batch_day: Option<Limit>,
    /// Tokens of all lines of batches that have not ended.
    pub batch_queued: Option<u64>,
    pub max_concurrent: u32,
    pub weights: Weights,
    pub on_store_failure: OnStoreFailure,
}

#[derive(Clone, Debug, PartialEq)]
struct Model {
    pattern: Arc<str>,
    limits: Vec<Limit>,
    max_tokens: Option<u64>,
}

/// The limits that one request counts in.
#[derive(Debug)]
pub struct Applied<'a> {
    pub limits: SmallVec<[&'a Limit; 4]>,
    pub max_tokens: Option<u64>,
}

impl Limits {
    pub fn new(spec: &TenantLimitsSpec, settings: &Settings) -> Self {
        let models = spec.models.iter().map(|model| {
            let pattern: Arc<str> = model.name.as_str().into();
            Model {
                limits: limits(spec, &model.rates, Some(&pattern)),
                max_tokens: model.rates.max_tokens,
                pattern,
            }
        });
        Self {
            all: limits(spec, &spec.rates, None),
            max_tokens: spec.rates.max_tokens,
            models: models.collect(),
            batch_day: spec.batch_tokens_per_day.map(|tokens| Limit {
                kind: Kind::BatchTokens,
                rate: Rate::of_day(tokens),
                name: gcra::DAY_LIMIT.into(),
                model: None,
            }),
            batch_queued: spec.batch_tokens_queued,
            max_concurrent: spec.concurrent_requests.unwrap_or(0),
            weights: Weights {
                cached_weight: settings.cached_weight,
                output_reserve: settings.output_reserve.into(),
            },
            on_store_failure: settings.on_store_failure,
        }
    }

    /// What requests for a model count in. `None`: the tenant may not use it. `names`: how the client calls the model
    /// and what it stands for; either may be the one that the tenant may use.
    pub fn of(&self, names: &[&str]) -> Option<Applied<'_>> {
        let model = self.applied(names)?;
        let own = model.map_or(&[][..], |model| &model.limits);
        Some(Applied {
            limits: self.all.iter().chain(own).collect(),
            max_tokens: self.max_tokens_with(model),
        })
    }

    /// The most output tokens that a request may ask for. `names` as for [`Limits::of`].
    pub fn max_tokens(&self, names: &[&str]) -> Option<u64> {
        self.max_tokens_with(self.applied(names)?)
    }

    fn max_tokens_with(&self, model: Option<&Model>) -> Option<u64> {
        match (self.max_tokens, model.and_then(|model| model.max_tokens)) {
            (Some(all), Some(own)) => Some(all.min(own)),
            (all, own) => all.or(own),
        }
    }

    /// What holds for a model besides what holds for all. `None`: the tenant may not use it.
    fn applied(&self, names: &[&str]) -> Option<Option<&Model>> {
        if self.models.is_empty() {
            return Some(None);
        }
        self.model(names).map(Some)
    }

    pub fn allows(&self, model: &str) -> bool {
        self.models.is_empty() || self.model(&[model]).is_some()
    }

    fn model(&self, names: &[&str]) -> Option<&Model> {
        let is_exact = |model: &&Model| names.contains(&&*model.pattern);
        let begins = |model: &&Model| {
            let stem = model.pattern.strip_suffix('*');
            stem.is_some_and(|stem| names.iter().any(|name| name.starts_with(stem)))
        };
        let mut models = self.models.iter();
        models
            .clone()
            .find(is_exact)
            .or_else(|| models.find(begins))
    }

    /// Every limit, those for all models first.
    pub fn every(&self) -> impl Iterator<Item = &Limit> {
        self.interactive().chain(&self.batch_day)
    }

    /// All but that of batches.
    pub fn interactive(&self) -> impl Iterator<Item = &Limit> {
        let own = self.models.iter().flat_map(|model| &model.limits);
        self.all.iter().chain(own)
    }

    /// Whether anything is counted of other requests than lines of batches.
    pub fn counts(&self) -> bool {
        self.max_concurrent > 0 || self.interactive().next().is_some()
    }

    /// Whether tokens are counted, so that it matters how many are cached.
    pub fn weighs_cached(&self) -> bool {
        let has_tokens = self
            .every()
            .any(|limit| !matches!(limit.kind, Kind::Requests | Kind::OutputTokens));
        has_tokens && self.weights.cached_weight < 1.0
    }
}

fn limits(spec: &TenantLimitsSpec, rates: &RatesSpec, model: Option<&Arc<str>>) -> Vec<Limit> {
    let listed = [
        (Kind::Requests, "r", rates.requests_per_minute),
        (Kind::Tokens, "t", rates.tokens_per_minute),
        (Kind::InputTokens, "i", rates.input_tokens_per_minute),
        (Kind::OutputTokens, "o", rates.output_tokens_per_minute),
    ];
    let limit = |(kind, letter, per_minute): (Kind, &str, Option<u64>)| {
        let name = match model {
            None => letter.to_owned(),
            Some(model) => format!("{letter}/{model}"),
        };
        let mut rate = Rate::new(per_minute?, spec.burst);
        if kind == Kind::Requests {
            // Otherwise every request would be more than the limit ever has room for.
            rate = rate.with_room_for_one();
        }
        Some(Limit {
            kind,
            rate,
            name: name.into(),
            model: model.cloned(),
        })
    };
    listed.into_iter().filter_map(limit).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn compiled(json: &str) -> Limits {
        let spec: TenantLimitsSpec = serde_json::from_str(json).unwrap();
        assert_eq!(spec.check(), []);
        Limits::new(&spec, &Settings::default())
    }

    fn check(limits: &Limits, model: &str, expected: Option<&[&str]>) {
        let applied = limits.of(&[model]);
        let names = applied.map(|applied| {
            applied
                .limits
                .iter()
                .map(|limit| &*limit.name)
                .collect::<Vec<_>>()
        });
        assert_eq!(names.as_deref(), expected, "{model}");
    }

    #[test]
    fn a_request_counts_in_the_limits_of_all_models_and_of_its_own() {
        let limits = compiled(
            r#"{"requests_per_minute": 60, "max_tokens": 100, "models": [
                "org/*", {"name": "org/big", "tokens_per_minute": 5, "max_tokens": 10}, {"name": "b*", "input_tokens_per_minute": 5}]}"#,
        );
        check(&limits, "org/small", Some(&["r"]));
        check(&limits, "org/big", Some(&["r", "t/org/big"]));
        check(&limits, "bbb", Some(&["r", "i/b*"]));
        check(&limits, "other", None);
        assert_eq!(limits.of(&["org/big"]).unwrap().max_tokens, Some(10));
        assert_eq!(
            limits.of(&["alias", "org/x"]).unwrap().max_tokens,
            Some(100)
        );
        assert!(limits.of(&["alias", "other"]).is_none());
        assert!(!limits.allows("other") && limits.allows("org/x"));
    }

    #[test]
    fn without_a_list_every_model_may_be_used() {
        let limits = compiled(r#"{"concurrent_requests": 2}"#);
        check(&limits, "any", Some(&[]));
        assert!(limits.counts());
        assert!(!compiled(r#"{"models": ["a"]}"#).counts());
        let batches = compiled(r#"{"batch_tokens_per_day": 5, "batch_tokens_queued": 9}"#);
        assert!(!batches.counts() && batches.every().count() == 1);
        check(&batches, "any", Some(&[]));
    }
}
