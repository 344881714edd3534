//! Why a request is refused by the limits of its tenant. Pure.

use std::fmt;
use std::time::Duration;

use super::compiled::Kind;

/// Why a request is refused. It charges nothing.
#[derive(Clone, Debug, PartialEq)]
pub enum Refusal {
    /// A limit has no room for the request now.
    Rate {
        /// What the limit is of.
        of: String,
        kind: Kind,
        /// What may be used at once.
        limit: u64,
        /// The limit as it is configured, which may be another one than that of a burst.
        configured: u64,
        /// So much of `limit` that what is requested does not fit.
        used: u64,
        requested: u64,
        retry_after: Duration,
    },
    /// The request alone is more than a limit ever has room for.
    TooLarge {
        of: String,
        kind: Kind,
        limit: u64,
        requested: u64,
    },
    /// As many requests run as the tenant may have.
    Concurrent { of: String, limit: u32, used: u64 },
    /// The tenant may not use the model.
    Model { model: String },
    /// The client asks for more output tokens than the tenant may have.
    MaxTokens {
        /// What the client calls their number.
        param: &'static str,
        limit: u64,
        requested: u64,
    },
    /// A field has another type, so that it cannot be known how much the client asks for.
    Type { param: &'static str },
    /// The store cannot be asked, and `on_store_failure` is `closed`.
    Store { retry_after: Duration },
}

/// How long a client waits that has too many requests running: it is not known when one ends.
const CONCURRENT_RETRY: Duration = Duration::from_secs(1);

impl Refusal {
    /// For metrics.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Rate { kind, .. } => kind.as_str(),
            Self::TooLarge { .. } => "too_large",
            Self::Concurrent { .. } => "concurrent_requests",
            Self::Model { .. } => "model",
            Self::MaxTokens { .. } => "max_tokens",
            Self::Type { .. } => "type",
            Self::Store { .. } => "store",
        }
    }

    /// When to retry; `None` if that cannot help.
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Rate { retry_after, .. } | Self::Store { retry_after } => Some(*retry_after),
            Self::Concurrent { .. } => Some(CONCURRENT_RETRY),
            Self::TooLarge { .. }
            | Self::Model { .. }
            | Self::MaxTokens { .. }
            | Self::Type { .. } => None,
        }
    }

    /// OpenAI's `type` of the error: which kind of limit it was.
    pub fn counted(&self) -> &'static str {
        match self {
            Self::Rate { kind, .. } | Self::TooLarge { kind, .. } if *kind != Kind::Requests => {
                "tokens"
            }
            _ => "requests",
        }
    }
}

/// What may be used at once, where that is not the limit itself.
fn at_once(limit: u64, configured: u64) -> String {
    if limit == configured {
        String::new()
    } else {
        format!(" (at most {limit} at once)")
    }
}

fn unit(kind: Kind) -> &'static str {
    match kind {
        Kind::Requests => "requests per min (RPM)",
        Kind::Tokens => "tokens per min (TPM)",
        Kind::InputTokens => "input tokens per min (ITPM)",
        Kind::OutputTokens => "output tokens per min (OTPM)",
        Kind::BatchTokens => "batch tokens per day (batch TPD)",
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rate {
                of,
                kind,
                limit,
                configured,
                used,
                requested,
                retry_after,
            } => write!(
                f,
                "Rate limit reached for {of} on {}: Limit {configured}{}, Used {used}, Requested {requested}. \
                 Please try again in {}.",
                unit(*kind),
                at_once(*limit, *configured),
                go_duration(*retry_after),
            ),
            Self::TooLarge {
                of,
                kind,
                limit,
                requested,
            } => write!(
                f,
                "Request too large for {of} on {}: Limit {limit}, Requested {requested}. The input or output \
                 tokens must be reduced in order to run successfully.",
                unit(*kind),
            ),
            Self::Concurrent { of, limit, used } => write!(
                f,
                "Rate limit reached for {of} on concurrent requests: Limit {limit}, Used {used}, Requested 1. \
                 Please try again in {}.",
                go_duration(CONCURRENT_RETRY),
            ),
            Self::Model { model } => write!(
                f,
                "The model `{model}` does not exist or you do not have access to it."
            ),
            Self::MaxTokens {
                param,
                limit,
                requested,
            } => write!(
                f,
                "{param} is too large: {requested}. This API key may ask for at most {limit} output tokens, \
                 whereas you provided {requested}."
            ),
            Self::Type { param: "stream" } => f.write_str("`stream` must be true or false"),
            Self::Type {
                param: "sampling_params",
            } => f.write_str("`sampling_params` must be an object"),
            Self::Type { param } => {
                write!(f, "`{param}` must be a whole number, not less than 0")
            }
            Self::Store { .. } => {
                f.write_str("the limits of this API key cannot be checked now; try again later")
            }
        }
    }
}

/// A duration as Go and OpenAI write it: `12ms`, `1s`, `6m0s`, `1h0m0s`. Rounded up.
fn go_duration(duration: Duration) -> String {
    let mut text = Vec::with_capacity(16);
    push_go_duration(&mut text, duration);
    // It is ASCII.
    String::from_utf8(text).unwrap_or_default()
}

/// Appends what [`go_duration`] returns. On each answer, so without the formatter.
pub(super) fn push_go_duration(text: &mut Vec<u8>, duration: Duration) {
    let millis = u64::from(duration.subsec_nanos().div_ceil(1_000_000));
    // A thousand of them are a second.
    let (seconds, rest) = (duration.as_secs() + millis / 1_000, millis % 1_000);
    if seconds == 0 {
        push_number(text, rest);
        text.extend_from_slice(b"ms");
        return;
    }
    let (hours, minutes) = (seconds / 3_600, seconds / 60 % 60);
    if hours > 0 {
        push_number(text, hours);
        text.push(b'h');
    }
    if hours > 0 || minutes > 0 {
        push_number(text, minutes);
        text.push(b'm');
    }
    push_number(text, seconds % 60);
    if rest != 0 {
        text.push(b'.');
        let digits = [rest / 100, rest / 10 % 10, rest % 10];
        let count = 3 - digits.iter().rev().take_while(|digit| **digit == 0).count();
        for digit in &digits[..count] {
            push_number(text, *digit);
        }
    }
    text.push(b's');
}

pub(super) fn push_number(text: &mut Vec<u8>, number: u64) {
    text.extend_from_slice(itoa::Buffer::new().format(number).as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_written_as_openai_does() {
        for (millis, text) in [
            (0, "0ms"),
            (12, "12ms"),
            (1_000, "1s"),
            (1_250, "1.25s"),
            (360_000, "6m0s"),
            (3_600_000, "1h0m0s"),
            (61_005, "1m1.005s"),
            (1_500, "1.5s"),
            (1_020, "1.02s"),
            (36_000_000, "10h0m0s"),
        ] {
            assert_eq!(go_duration(Duration::from_millis(millis)), text);
        }
        assert_eq!(go_duration(Duration::from_micros(1)), "1ms");
        assert_eq!(go_duration(Duration::from_micros(999_001)), "1s");
    }

    #[test]
    fn a_refusal_reads_as_at_openai() {
        let refused_by = |limit| Refusal::Rate {
            of: "m".to_owned(),
            kind: Kind::Tokens,
            limit,
            configured: 30_000,
            used: 29_500,
            requested: 2_000,
            retry_after: Duration::from_secs(3),
        };
        let refusal = refused_by(30_000);
        assert_eq!(
            refusal.to_string(),
            "Rate limit reached for m on tokens per min (TPM): Limit 30000, Used 29500, Requested 2000. Please try again in 3s."
        );
        assert_eq!(refusal.counted(), "tokens");
        let burst = refused_by(15_000).to_string();
        assert!(
            burst.contains("(TPM): Limit 30000 (at most 15000 at once), Used 29500, "),
            "{burst}"
        );
    }
}
