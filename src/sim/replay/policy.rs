//! A policy in the comparison: one of this router's, or a model of another router's formula. Pure.

use std::str::FromStr;

use super::formula::Formula;
use crate::routing::{self, Policy};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ComparedPolicy {
    Router(Policy),
    /// `cache_aware`, with requests that wait in the router for the worker where they cost the least, as by default.
    Queued,
    Model(Formula),
}

impl ComparedPolicy {
    pub(super) const ALL: [ComparedPolicy; 13] = [
        ComparedPolicy::Queued,
        ComparedPolicy::Router(Policy::CacheAware),
        ComparedPolicy::Router(Policy::LeastLoad),
        ComparedPolicy::Router(Policy::PowerOfTwo),
        ComparedPolicy::Router(Policy::ConsistentHash),
        ComparedPolicy::Router(Policy::RoundRobin),
        ComparedPolicy::Router(Policy::Random),
        ComparedPolicy::Model(Formula::LongestPrefix),
        ComparedPolicy::Model(Formula::PrefixThreshold),
        ComparedPolicy::Model(Formula::DynamoDefault),
        ComparedPolicy::Model(Formula::VllmRouter),
        ComparedPolicy::Model(Formula::Lmetric),
        ComparedPolicy::Model(Formula::LlmD),
    ];

    pub(super) fn name(self) -> &'static str {
        match self {
            ComparedPolicy::Queued => "cache_aware_queue",
            ComparedPolicy::Router(policy) => policy.as_str(),
            ComparedPolicy::Model(formula) => formula.as_str(),
        }
    }

    /// A model of another router's formula.
    pub(super) fn is_model(self) -> bool {
        matches!(self, ComparedPolicy::Model(_))
    }

    /// The routing settings, with this policy.
    pub(super) fn routing(self, settings: &routing::Settings) -> routing::Settings {
        let policy = match self {
            ComparedPolicy::Router(policy) => policy,
            ComparedPolicy::Queued => Policy::CacheAware,
            ComparedPolicy::Model(_) => settings.policy,
        };
        routing::Settings {
            policy,
            ..settings.clone()
        }
    }
}

impl FromStr for ComparedPolicy {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let found = ComparedPolicy::ALL
            .into_iter()
            .find(|policy| policy.name() == name);
        found.ok_or_else(|| {
            let names = ComparedPolicy::ALL.map(ComparedPolicy::name).join(", ");
            format!("unknown policy; expected one of {names}")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policies_have_the_names_of_the_configuration() {
        for compared in ComparedPolicy::ALL {
            assert_eq!(compared.name().parse(), Ok(compared));
            if let ComparedPolicy::Router(policy) = compared {
                assert_eq!(serde_json::to_value(policy).unwrap(), compared.name());
            }
        }
        assert!("fastest".parse::<ComparedPolicy>().is_err());
    }
}
