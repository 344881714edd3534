//! What is compared: a policy of the router, or a model of somebody else's formula.

use std::str::FromStr;

use super::formula::Formula;
use crate::routing::{self, Policy};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Line {
    Ours(Policy),
    Theirs(Formula),
}

impl Line {
    pub(super) const ALL: [Line; 9] = [
        Line::Ours(Policy::CacheAware),
        Line::Ours(Policy::LeastLoad),
        Line::Ours(Policy::PowerOfTwo),
        Line::Ours(Policy::ConsistentHash),
        Line::Ours(Policy::RoundRobin),
        Line::Ours(Policy::Random),
        Line::Theirs(Formula::LongestPrefix),
        Line::Theirs(Formula::PrefixThreshold),
        Line::Theirs(Formula::DynamoDefault),
    ];

    pub(super) fn name(self) -> &'static str {
        match self {
            Line::Ours(Policy::CacheAware) => "cache_aware",
            Line::Ours(Policy::LeastLoad) => "least_load",
            Line::Ours(Policy::PowerOfTwo) => "power_of_two",
            Line::Ours(Policy::ConsistentHash) => "consistent_hash",
            Line::Ours(Policy::RoundRobin) => "round_robin",
            Line::Ours(Policy::Random) => "random",
            Line::Theirs(Formula::LongestPrefix) => "longest_prefix",
            Line::Theirs(Formula::PrefixThreshold) => "prefix_threshold",
            Line::Theirs(Formula::DynamoDefault) => "dynamo_default",
        }
    }

    pub(super) fn is_ours(self) -> bool {
        matches!(self, Line::Ours(_))
    }

    /// The settings with this line's policy.
    pub(super) fn routing(self, settings: &routing::Settings) -> routing::Settings {
        match self {
            Line::Ours(policy) => routing::Settings {
                policy,
                ..settings.clone()
            },
            Line::Theirs(_) => settings.clone(),
        }
    }
}

impl FromStr for Line {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let found = Line::ALL.into_iter().find(|line| line.name() == name);
        found.ok_or_else(|| {
            let names = Line::ALL.map(Line::name).join(", ");
            format!("it is none of {names}")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_called_as_the_configuration_calls_policies() {
        for line in Line::ALL {
            assert_eq!(line.name().parse(), Ok(line));
            if let Line::Ours(policy) = line {
                assert_eq!(serde_json::to_value(policy).unwrap(), line.name());
            }
        }
        assert!("fastest".parse::<Line>().is_err());
    }
}
