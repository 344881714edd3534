//! When requests wait, how long, how many, and in which order.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize};

use super::types::Request;
use crate::ids::{NAME_RULE, is_name};
use crate::units::{DurationText, SizeText, parse_duration};

/// Whether requests wait in the router.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[schemars(with = "OffOrSettings")]
pub enum Waiting {
    /// They are sent to a worker at once, however much it has to do.
    Off,
    #[serde(untagged)]
    On(Box<Settings>),
}

/// The forms in which it is written.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(untagged)]
enum OffOrSettings {
    Off(Off),
    On(Box<Settings>),
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
enum Off {
    Off,
}

impl Waiting {
    /// `None` if they do not.
    pub fn settings(&self) -> Option<&Settings> {
        match self {
            Self::Off => None,
            Self::On(settings) => Some(settings),
        }
    }
}

impl Default for Waiting {
    fn default() -> Self {
        Self::On(Box::default())
    }
}

impl From<Settings> for Waiting {
    fn from(settings: Settings) -> Self {
        Self::On(Box::new(settings))
    }
}

impl<'de> Deserialize<'de> for Waiting {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Ok(match OffOrSettings::deserialize(deserializer)? {
            OffOrSettings::Off(Off::Off) => Self::Off,
            OffOrSettings::On(settings) => Self::On(settings),
        })
    }
}

/// Waiting in the router for the worker where a request costs the least.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Settings {
    /// A worker with this many prompt tokens for each of its dp ranks, accepted and not computed yet (of all replicas
    /// together), has no room for more, as one whose slots are taken. Requests wait here until the worker where they cost the
    /// least has room. About the tokens that a worker computes in a second: less leaves workers idle, more makes the order
    /// here matter less.
    #[schemars(range(min = 1))]
    pub max_worker_queued_tokens: u64,
    /// A request that has waited this long is refused with status 429. By default only its own time
    /// (`requests.request_timeout`) ends its wait, as in an engine.
    #[serde(with = "DurationText")]
    #[schemars(extend("max" = "7d"))]
    pub max_wait: Duration,
    /// The time from a request to its first token that clients should get. A request that can no longer meet it is
    /// refused at once with status 429, so that workers compute only what is of use. A request may have its own in the
    /// header `x-warmroute-ttft-target` (`2s`). `0s`: none.
    #[serde(with = "DurationText")]
    #[schemars(extend("min" = "0s", "max" = "1d"))]
    pub ttft_target: Duration,
    /// How long requests for a model that is known but has no usable worker wait for one, for fleets that scale from
    /// zero. Then they are refused with status 503. `0s`: at once, so that a fallback or the client's next try is not late.
    /// Known are the models in `models` and those that a listed worker serves.
    #[serde(with = "DurationText")]
    #[schemars(extend("min" = "0s", "max" = "1d"))]
    pub no_worker_timeout: Duration,
    /// Requests of one class that may wait, of the models that share workers. In a full class the tenant (without tenants: the
    /// client address) that has the most makes place for others with its newest.
    #[schemars(range(min = 1, max = 1000000))]
    pub max_requests: u32,
    /// Bytes that the bodies of those may have. `api.max_total_body` bounds the bodies of all requests.
    #[serde(with = "SizeText")]
    pub max_size: u64,
    /// Priority classes. A request belongs to the class with the highest `priority` that its own reaches, or else to
    /// the lowest class. Those of a higher class go first, except for what `min_share` leaves to the others.
    pub classes: Vec<ClassSettings>,
    /// What the names in the header `x-llm-d-inference-objective` mean: name and priority.
    pub objectives: BTreeMap<String, i32>,
    /// Requests with the header `x-llm-d-inference-fairness-id` (or `x-gateway-inference-fairness-id`) take turns by its
    /// value instead of by tenant or address. Only where a gateway sets the header or removes a client's own: who makes
    /// up values gets more turns.
    pub trust_fairness_id: bool,
    /// A busy worker of whose work nothing was seen for this long, no computed prompt, no token and no change in its
    /// reports, no longer makes requests wait: what is known of its load may be wrong.
    #[serde(skip)]
    pub stale_after: Duration,
}

/// A priority class.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ClassSettings {
    /// Its name in metrics.
    pub name: String,
    /// Its place: a class with a higher number goes first. Requests of this priority and above belong to it, up to the
    /// next higher class; what lies below all classes belongs to the lowest.
    pub priority: i32,
    /// The part of the computed tokens that the class gets at least while its requests wait, so that higher classes
    /// cannot starve it. All classes together have at most 1.
    #[serde(default)]
    #[schemars(range(min = 0, max = 1))]
    pub min_share: f64,
    /// As in `queue`, for this class.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1000000))]
    pub max_requests: Option<u32>,
    /// As in `queue`, for this class.
    #[serde(
        default,
        with = "OptionalDuration",
        skip_serializing_if = "Option::is_none"
    )]
    #[schemars(with = "Option<DurationText>", extend("max" = "7d"))]
    pub max_wait: Option<Duration>,
    /// As in `queue`, for this class.
    #[serde(
        default,
        with = "OptionalDuration",
        skip_serializing_if = "Option::is_none"
    )]
    #[schemars(with = "Option<DurationText>", extend("min" = "0s", "max" = "1d"))]
    pub ttft_target: Option<Duration>,
}

impl Default for Settings {
    fn default() -> Self {
        let class = |name: &str, priority, min_share| ClassSettings {
            name: name.to_owned(),
            priority,
            min_share,
            ..ClassSettings::default()
        };
        Self {
            max_worker_queued_tokens: 8_192,
            max_wait: Duration::from_secs(7 * 86_400),
            ttft_target: Duration::ZERO,
            no_worker_timeout: Duration::ZERO,
            // More than a router has connections.
            max_requests: 100_000,
            max_size: 1 << 30,
            classes: vec![
                class("high", 1, 0.0),
                class("normal", 0, 0.2),
                class("low", i32::MIN, 0.05),
            ],
            objectives: BTreeMap::new(),
            trust_fairness_id: false,
            // Steps over the longest prompts take seconds.
            stale_after: Duration::from_secs(30),
        }
    }
}

const MAX_CLASSES: usize = 16;
const MAX_OBJECTIVES: usize = 1_000;

impl Settings {
    /// The index in `classes` of the class of a priority.
    pub fn class_of(&self, priority: i32) -> usize {
        let by_priority = |(_, class): &(usize, &ClassSettings)| class.priority;
        let classes = || self.classes.iter().enumerate();
        let reached = classes().filter(|(_, class)| class.priority <= priority);
        let found = reached.max_by_key(by_priority);
        let found = found.or_else(|| classes().min_by_key(by_priority));
        found.map_or(0, |(index, _)| index)
    }

    /// The target of a request of a class, given by its index in `classes`.
    pub fn target(&self, class: usize, request: &Request) -> Option<Duration> {
        let of_class = self.classes[class].ttft_target.unwrap_or(self.ttft_target);
        let target = request.ttft_target.unwrap_or(of_class);
        Some(target).filter(|target| !target.is_zero() && !request.is_background)
    }

    /// Whether a request that enters now has a target that may refuse it.
    pub fn has_target(&self, request: &Request) -> bool {
        let target = self.target(self.class_of(request.priority), request);
        target.is_some() && !request.has_lost_target
    }

    /// What is wrong: a key below `queue`, and a message.
    pub fn check(&self) -> Vec<(String, String)> {
        let mut problems = Vec::new();
        let mut names = BTreeSet::new();
        let mut priorities = BTreeSet::new();
        for (index, class) in self.classes.iter().enumerate() {
            let name = &class.name;
            let mut wrong = |key: &str, message: String| {
                problems.push((format!("classes[{index}].{key}"), message))
            };
            if !is_name(name) {
                wrong("name", NAME_RULE.to_owned());
            } else if !names.insert(name) {
                wrong("name", format!("`{name}` is listed twice"));
            }
            if !priorities.insert(class.priority) {
                let message = "is that of another class already; give each class its own";
                wrong("priority", message.to_owned());
            }
        }
        let problem = |message: &str| ("classes".to_owned(), message.to_owned());
        if self.classes.is_empty() || self.classes.len() > MAX_CLASSES {
            problems.push(problem(
                "must be 1 to 16; leave the key out for high, normal and low",
            ));
        }
        let sum: f64 = self.classes.iter().map(|class| class.min_share).sum();
        // Three times 1/3 must be allowed.
        if sum > 1.0 + 1e-9 {
            problems.push(problem(
                "have a `min_share` of more than 1 together; lower one",
            ));
        }
        if self.objectives.len() > MAX_OBJECTIVES {
            let message = "must be at most 1000";
            problems.push(("objectives".to_owned(), message.to_owned()));
        }
        problems
    }
}

/// A text such as `250ms` or `30s`, or nothing.
struct OptionalDuration;

impl OptionalDuration {
    fn serialize<S: serde::Serializer>(value: &Option<Duration>, to: S) -> Result<S::Ok, S::Error> {
        match value {
            Some(value) => DurationText::serialize(value, to),
            None => to.serialize_none(),
        }
    }

    fn deserialize<'de, D: serde::Deserializer<'de>>(
        from: D,
    ) -> Result<Option<Duration>, D::Error> {
        // A key without a value is left out.
        let text = Option::<String>::deserialize(from)?;
        let value = text.map(|text| parse_duration(&text)).transpose();
        value.map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe;

    #[test]
    fn a_request_has_its_own_target_or_that_of_its_class_unless_it_cannot_be_refused_for_it() {
        let mut settings = Settings {
            ttft_target: Duration::from_secs(1),
            ..Settings::default()
        };
        settings.classes[0].ttft_target = Some(Duration::ZERO);
        let has_target = |change: fn(&mut Request)| {
            let mut request = Request::for_tests(observe::now(), 10);
            change(&mut request);
            settings.has_target(&request)
        };
        assert!(has_target(|_| {}));
        assert!(!has_target(|request| request.priority = 1));
        assert!(!has_target(
            |request| request.ttft_target = Some(Duration::ZERO)
        ));
        assert!(!has_target(|request| request.is_background = true));
        assert!(!has_target(|request| request.has_lost_target = true));
    }

    #[test]
    fn the_defaults_are_right() {
        assert_eq!(Settings::default().check(), []);
    }

    #[test]
    fn classes_are_checked_together() {
        let mut settings = Settings::default();
        settings.classes[1].name = "high".to_owned();
        settings.classes[1].priority = 1;
        settings.classes[2].name = "a b".to_owned();
        settings.classes[2].min_share = 0.9;
        let keys: Vec<String> = settings.check().into_iter().map(|(key, _)| key).collect();
        let expected = [
            "classes[1].name",
            "classes[1].priority",
            "classes[2].name",
            "classes",
        ];
        assert_eq!(keys, expected);
    }
}
