//! What tenants may use, and where it is counted.

use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize};

use super::gcra::Rate;
use crate::store::redis;
use crate::units::{DurationText, format_duration};

/// How the limits of tenants count, and where.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Settings {
    /// What all clients together may use where there are no `tenants`: the same map as a tenant's `limits`. Left out: anything.
    pub everybody: Option<TenantLimitsSpec>,
    /// What a prompt token counts in limits of tokens that the engine had cached, 0 to 1. OpenAI counts it in full.
    #[schemars(range(min = 0, max = 1))]
    pub cached_weight: f64,
    /// Output tokens that are reserved for each choice of a request when it is admitted, or its `max_tokens` if these
    /// are fewer. When the answer ends, the reserve is corrected to what was generated.
    #[schemars(range(max = 1_000_000))]
    pub output_reserve: u32,
    /// Where replicas count together: `responses` (the Redis of `responses.store`, if there is one), a Redis of its
    /// own (a URL or a map), or `local`: each replica counts for itself, and grants its share of the limits.
    pub store: Store,
    /// What happens while Redis cannot be asked. `open`: each replica counts for itself and grants its share of the
    /// limits. `closed`: requests of tenants with limits are refused with 503.
    pub on_store_failure: OnStoreFailure,
    /// Replicas that share the limits while they cannot count together; with `peers` those that are connected count
    /// instead.
    #[schemars(range(min = 1, max = 10_000))]
    pub replicas: u32,
    /// No keys: the same wherever Redis is near.
    #[serde(skip)]
    pub advanced: Advanced,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            everybody: None,
            cached_weight: 1.0,
            // Most answers of chats are shorter.
            output_reserve: 512,
            store: Store::Responses,
            on_store_failure: OnStoreFailure::Open,
            replicas: 1,
            advanced: Advanced::default(),
        }
    }
}

/// Times and bounds of counting together.
#[derive(Clone, Debug, PartialEq)]
pub struct Advanced {
    /// How long a request waits for Redis before `on_store_failure` applies to it.
    pub timeout: Duration,
    /// A running request counts in `concurrent_requests` for this long after its replica was last seen. Replicas renew
    /// it three times as often.
    pub lease: Duration,
    /// A background response is charged once within this time, however often another replica takes it over.
    pub charge_once: Duration,
    /// Ended requests of one tenant that wait to be settled in Redis; of more, the oldest keep what they had reserved.
    pub max_unsettled: u32,
}

impl Default for Advanced {
    fn default() -> Self {
        Self {
            // A hundred times what it takes within a zone.
            timeout: Duration::from_millis(100),
            // As the lease of background responses: a garbage collection or a failover does not end it.
            lease: Duration::from_secs(30),
            // Longer than a run may take by default.
            charge_once: Duration::from_secs(6 * 3_600),
            // Some seconds' worth of a flood.
            max_unsettled: 10_000,
        }
    }
}

/// What happens while Redis cannot be asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OnStoreFailure {
    /// Each replica counts for itself.
    Open,
    /// Requests are refused.
    Closed,
}

/// Where limits are counted.
#[derive(Clone, Debug, Default, PartialEq, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[schemars(with = "NameOrRedis")]
pub enum Store {
    /// In the Redis of `responses.store`, or without one as `Local`.
    #[default]
    Responses,
    /// In each replica.
    Local,
    /// In a Redis of its own.
    #[serde(untagged)]
    Redis(Box<redis::Settings>),
}

/// The forms in which the store of limits is written.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(untagged)]
enum NameOrRedis {
    Name(String),
    Map(Box<redis::Settings>),
}

impl<'de> Deserialize<'de> for Store {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Ok(match NameOrRedis::deserialize(deserializer)? {
            NameOrRedis::Name(name) if name == "responses" => Self::Responses,
            NameOrRedis::Name(name) if name == "local" => Self::Local,
            // What is no address of Redis is refused by the check.
            NameOrRedis::Name(url) => Self::Redis(Box::new(redis::Settings {
                urls: vec![url],
                ..redis::Settings::default()
            })),
            NameOrRedis::Map(settings) => Self::Redis(settings),
        })
    }
}

impl Settings {
    /// What is wrong beyond types and bounds: keys with a message each.
    pub fn check(&self) -> Vec<(String, String)> {
        let everybody = self.everybody.iter().flat_map(TenantLimitsSpec::check);
        let everybody = everybody.map(|(key, message)| (format!("everybody.{key}"), message));
        everybody.chain(self.check_store()).collect()
    }

    fn check_store(&self) -> Vec<(String, String)> {
        match &self.store {
            Store::Responses | Store::Local => Vec::new(),
            Store::Redis(redis) => {
                let below = |(key, message): (String, String)| match &*redis.urls {
                    [url] if key == "urls[0]" && !url.contains("://") => (
                        "store".to_owned(),
                        format!("`{url}` is none of `responses`, `local` and `redis://HOST:6379`"),
                    ),
                    _ => (format!("store.{key}"), message),
                };
                redis.check().into_iter().map(below).collect()
            }
        }
    }
}

/// What one tenant may use. What is left out is not limited.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct TenantLimitsSpec {
    #[serde(flatten)]
    pub rates: RatesSpec,
    /// How much of each limit a minute may be used at once, as a time: `60s` is a whole minute's worth. A limit of
    /// requests has room for one at least.
    #[serde(with = "DurationText")]
    #[schemars(extend("min" = "1s", "max" = "1h"))]
    pub burst: Duration,
    /// Requests that run at the same time, over all replicas. Lines of batches do not count. While a background
    /// response waits for a place, every second one is kept for it.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub concurrent_requests: Option<u32>,
    /// Tokens of all lines of batches that have not ended: of prompts, by their bytes, and the output tokens that lines
    /// name. A batch beyond it fails its validation.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub batch_tokens_queued: Option<u64>,
    /// Tokens a day of lines of batches, which then count in no limit a minute. Lines beyond it wait.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub batch_tokens_per_day: Option<u64>,
    /// The models that the tenant may use, each a name or a map with limits of its own, which hold besides those
    /// above. A `*` at the end stands for all names that begin so. Empty: every model.
    #[serde(deserialize_with = "names_or_maps")]
    #[schemars(with = "Vec<NameOrModel>")]
    pub models: Vec<ModelLimitsSpec>,
}

impl Default for TenantLimitsSpec {
    fn default() -> Self {
        Self {
            rates: RatesSpec::default(),
            // A whole minute's worth, as at OpenAI.
            burst: Duration::from_secs(60),
            concurrent_requests: None,
            batch_tokens_queued: None,
            batch_tokens_per_day: None,
            models: Vec::new(),
        }
    }
}

/// The limits that a tenant has for all models together, and may have for one of them.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct RatesSpec {
    /// Requests a minute.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1_000_000_000))]
    pub requests_per_minute: Option<u64>,
    /// Tokens a minute, of prompts and of answers together.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1_000_000_000))]
    pub tokens_per_minute: Option<u64>,
    /// Tokens of prompts a minute.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1_000_000_000))]
    pub input_tokens_per_minute: Option<u64>,
    /// Tokens of answers a minute.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1_000_000_000))]
    pub output_tokens_per_minute: Option<u64>,
    /// The most output tokens that a request may ask for; a larger `max_tokens` is refused.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub max_tokens: Option<u64>,
}

impl RatesSpec {
    /// The limits of tokens by their keys, as far as there are any.
    fn of_tokens(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let listed = [
            ("tokens_per_minute", self.tokens_per_minute),
            (INPUT_TOKENS, self.input_tokens_per_minute),
            ("output_tokens_per_minute", self.output_tokens_per_minute),
        ];
        let listed = listed.into_iter();
        listed.filter_map(|(key, per_minute)| Some((key, per_minute?)))
    }
}

/// The only limit of tokens in which no output counts.
const INPUT_TOKENS: &str = "input_tokens_per_minute";

/// One model that a tenant may use, with its limits there.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ModelLimitsSpec {
    /// The name of the model, or the beginning of names and `*`.
    pub name: String,
    #[serde(flatten)]
    pub rates: RatesSpec,
}

/// The forms in which a tenant's model is written: its name, or a map.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(untagged)]
enum NameOrModel {
    Name(String),
    Map(Box<ModelLimitsSpec>),
}

fn names_or_maps<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Vec<ModelLimitsSpec>, D::Error> {
    let forms = Vec::<NameOrModel>::deserialize(deserializer)?;
    let models = forms.into_iter().map(|form| match form {
        NameOrModel::Name(name) => ModelLimitsSpec {
            name,
            rates: RatesSpec::default(),
        },
        NameOrModel::Map(model) => *model,
    });
    Ok(models.collect())
}

/// Models of one tenant; each may have counts of its own.
const MAX_MODELS: usize = 256;

impl TenantLimitsSpec {
    /// What is wrong beyond types and bounds: keys with a message each.
    pub fn check(&self) -> Vec<(String, String)> {
        let mut problems = Vec::new();
        if self.models.len() > MAX_MODELS {
            let message =
                format!("lists more than {MAX_MODELS} models; use `*` at the end of a name");
            problems.push(("models".to_owned(), message));
        }
        for (index, model) in self.models.iter().enumerate() {
            let name = &model.name;
            let stem = name.strip_suffix('*').unwrap_or(name);
            let message = if name.is_empty() {
                "is empty".to_owned()
            } else if stem.contains('*') {
                format!("`{name}` may have a `*` only at its end")
            } else if self.models[..index].iter().any(|other| other.name == *name) {
                format!("`{name}` is listed twice")
            } else {
                continue;
            };
            problems.push((format!("models[{index}].name"), message));
        }
        for (path, rates) in self.all_rates() {
            for (key, per_minute) in rates.of_tokens() {
                if Rate::new(per_minute, self.burst).capacity() == 0 {
                    let burst = format_duration(self.burst);
                    let message = format!(
                        "`burst: {burst}` has room for less than one token, so that every request is refused; \
                         allow more tokens a minute, or a longer burst"
                    );
                    problems.push((format!("{path}{key}"), message));
                }
            }
        }
        problems
    }

    /// The keys of limits of which less may be used at once than a generating request reserves that names no
    /// `max_tokens`: such requests are refused for ever.
    pub fn bursts_below_reserve(&self, output_reserve: u32) -> Vec<String> {
        let mut keys = Vec::new();
        for (path, rates) in self.all_rates() {
            let max_tokens = [self.rates.max_tokens, rates.max_tokens];
            let max_tokens = max_tokens.into_iter().flatten();
            let reserved = max_tokens.fold(u64::from(output_reserve), u64::min);
            for (key, per_minute) in rates.of_tokens() {
                let capacity = Rate::new(per_minute, self.burst).capacity();
                if key != INPUT_TOKENS && capacity < reserved {
                    keys.push(format!("{path}{key}"));
                }
            }
        }
        keys
    }

    /// The limits of all models together and of each one, with what their keys begin with.
    fn all_rates(&self) -> impl Iterator<Item = (String, &RatesSpec)> {
        let models = self.models.iter().enumerate();
        let own = models.map(|(index, model)| (format!("models[{index}]."), &model.rates));
        std::iter::once((String::new(), &self.rates)).chain(own)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_store_is_a_name_an_address_or_a_map() {
        let read = |json: &str| serde_json::from_str::<Settings>(json).unwrap();
        assert_eq!(read(r#"{"store": "local"}"#).store, Store::Local);
        assert_eq!(read("{}").store, Store::Responses);
        let url = read(r#"{"store": "redis://a:1"}"#);
        assert_eq!(url.check(), []);
        assert_eq!(read(r#"{"store": {"urls": ["redis://a:1"]}}"#), url);
        let wrong = read(r#"{"store": "memory"}"#).check();
        assert_eq!(wrong.len(), 1);
        assert!(wrong[0].1.contains("`memory` is none of"), "{wrong:?}");
        for settings in [read(r#"{"store": "local"}"#), read("{}"), url] {
            let text = serde_json::to_string(&settings).unwrap();
            assert_eq!(read(&text), settings);
        }
    }

    #[test]
    fn a_model_is_a_name_or_a_map() {
        let json = r#"{"models": ["a", {"name": "b*", "tokens_per_minute": 50}, "b*", "c*d", ""], "burst": "10s"}"#;
        let spec: TenantLimitsSpec = serde_json::from_str(json).unwrap();
        assert_eq!(spec.models[1].rates.tokens_per_minute, Some(50));
        let problems = spec.check();
        let keys: Vec<&str> = problems.iter().map(|(key, _)| &**key).collect();
        assert_eq!(keys, ["models[2].name", "models[3].name", "models[4].name"]);
    }

    #[test]
    fn a_limit_of_tokens_whose_burst_has_no_room_for_a_request_is_named() {
        let check = |json: &str, refused: &[&str], small: &[&str]| {
            let spec: TenantLimitsSpec = serde_json::from_str(json).unwrap();
            let problems = spec.check();
            let keys: Vec<&str> = problems.iter().map(|(key, _)| &**key).collect();
            assert_eq!(keys, refused, "{json}");
            assert_eq!(spec.bursts_below_reserve(512), small, "{json}");
        };
        check(r#"{"requests_per_minute": 1, "burst": "1s"}"#, &[], &[]);
        let (all, input) = (["tokens_per_minute"], ["input_tokens_per_minute"]);
        check(r#"{"tokens_per_minute": 59, "burst": "1s"}"#, &all, &all);
        check(r#"{"tokens_per_minute": 60, "burst": "1s"}"#, &[], &all);
        check(r#"{"tokens_per_minute": 20000, "burst": "1s"}"#, &[], &all);
        check(r#"{"tokens_per_minute": 20000}"#, &[], &[]);
        let small_answers = r#"{"tokens_per_minute": 20000, "burst": "1s", "max_tokens": 300}"#;
        check(small_answers, &[], &[]);
        let prompts = r#"{"input_tokens_per_minute": 9, "burst": "1s"}"#;
        check(prompts, &input, &[]);
        let of_model =
            r#"{"burst": "2s", "models": [{"name": "a", "output_tokens_per_minute": 3000}]}"#;
        check(of_model, &[], &["models[0].output_tokens_per_minute"]);
    }
}
