//! How much of its limits a tenant has left, as the `x-ratelimit-*` headers say it. Pure.

use std::time::Duration;

use bytes::Bytes;
use hyper::HeaderMap;
use hyper::header::{HeaderName, HeaderValue};
use smallvec::SmallVec;

use super::compiled::{Kind, Limit};
use super::refusal::{push_go_duration, push_number};

/// Bytes of six usual values.
const TEXT: usize = 96;

/// One limit, and what is left of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Left {
    /// Units that may be used at once.
    pub limit: u64,
    pub remaining: u64,
    /// Until all of it may be used again.
    pub reset: Duration,
}

/// What a tenant has left: of its limits of requests, and of tokens, the one with the least.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Standing {
    pub requests: Option<Left>,
    pub tokens: Option<Left>,
}

const REQUESTS: [HeaderName; 3] = [
    HeaderName::from_static("x-ratelimit-limit-requests"),
    HeaderName::from_static("x-ratelimit-remaining-requests"),
    HeaderName::from_static("x-ratelimit-reset-requests"),
];
const TOKENS: [HeaderName; 3] = [
    HeaderName::from_static("x-ratelimit-limit-tokens"),
    HeaderName::from_static("x-ratelimit-remaining-tokens"),
    HeaderName::from_static("x-ratelimit-reset-tokens"),
];

impl Standing {
    /// The standing under these limits, each with what is used of it, in microseconds.
    pub fn of<'a>(limits: impl IntoIterator<Item = (&'a Limit, u64)>) -> Self {
        let mut standing = Self::default();
        for (limit, used) in limits {
            let left = Left {
                limit: limit.rate.capacity(),
                remaining: limit.rate.remaining(used),
                reset: Duration::from_micros(used),
            };
            let place = match limit.kind {
                Kind::Requests => &mut standing.requests,
                Kind::Tokens | Kind::InputTokens | Kind::OutputTokens | Kind::BatchTokens => {
                    &mut standing.tokens
                }
            };
            if place.is_none_or(|other| left.remaining < other.remaining) {
                *place = Some(left);
            }
        }
        standing
    }

    pub fn write(&self, headers: &mut HeaderMap) {
        // One text for all, since each of its own would be allocated.
        let mut text = Vec::with_capacity(TEXT);
        let mut ends = SmallVec::<[(HeaderName, usize); 6]>::new();
        for (names, left) in [(REQUESTS, self.requests), (TOKENS, self.tokens)] {
            let Some(left) = left else { continue };
            let [limit, remaining, reset] = names;
            push_number(&mut text, left.limit);
            ends.push((limit, text.len()));
            push_number(&mut text, left.remaining);
            ends.push((remaining, text.len()));
            push_go_duration(&mut text, left.reset);
            ends.push((reset, text.len()));
        }
        headers.reserve(ends.len());
        let text = Bytes::from(text);
        let mut start = 0;
        for (name, end) in ends {
            if let Ok(value) = HeaderValue::from_maybe_shared(text.slice(start..end)) {
                headers.insert(name, value);
            }
            start = end;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::gcra::Rate;

    #[test]
    fn the_limit_with_the_least_left_is_shown() {
        let limit = |kind, per_minute, name: &str| Limit {
            kind,
            rate: Rate::new(per_minute, Duration::from_secs(60)),
            name: name.into(),
            model: None,
        };
        let limits = [
            (limit(Kind::Requests, 60, "r"), 1_000_000),
            (limit(Kind::Tokens, 6_000, "t"), 0),
            (limit(Kind::OutputTokens, 600, "o"), 30_000_000),
        ];
        let standing = Standing::of(limits.iter().map(|(limit, used)| (limit, *used)));
        let mut headers = HeaderMap::new();
        standing.write(&mut headers);
        let expected = [
            ("limit-requests", "60"),
            ("remaining-requests", "59"),
            ("reset-requests", "1s"),
            ("limit-tokens", "600"),
            ("remaining-tokens", "300"),
            ("reset-tokens", "30s"),
        ];
        assert_eq!(headers.len(), expected.len());
        for (name, value) in expected {
            assert_eq!(headers[format!("x-ratelimit-{name}")], value, "{name}");
        }
    }
}
