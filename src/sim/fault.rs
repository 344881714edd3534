//! The ways in which a pretend engine can misbehave. Plain data: set by arguments at the start, or as
//! JSON while it runs. What they do to an answer is decided here, and done by the worker.

pub mod handoff;
pub mod kv;

use serde::{Deserialize, Serialize};

use self::handoff::HandoffFaults;
use self::kv::KvFaults;

/// In JSON, a switch that is not named is off.
#[derive(clap::Args, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Faults {
    /// Answer every request for model work with this HTTP status (400 to 599).
    #[arg(long = "fault-refuse", value_name = "STATUS", value_parser = clap::value_parser!(u16).range(400..600))]
    pub refuse: Option<u16>,

    /// The Retry-After header that goes with a refusal, in seconds.
    #[arg(long = "fault-retry-after", value_name = "SECONDS")]
    pub retry_after: Option<u32>,

    /// Accept requests for model work and never answer them.
    #[arg(long = "fault-hang")]
    pub hang: bool,

    /// Drop the connection after this many tokens of an answer.
    #[arg(long = "fault-cut-after-tokens", value_name = "TOKENS")]
    pub cut_after_tokens: Option<usize>,

    /// Send nothing more after this many tokens, and keep the connection open.
    #[arg(long = "fault-stall-after-tokens", value_name = "TOKENS")]
    pub stall_after_tokens: Option<usize>,

    /// Report an engine error after this many tokens, as vLLM does when its core dies.
    #[arg(long = "fault-error-after-tokens", value_name = "TOKENS")]
    pub error_after_tokens: Option<usize>,

    /// End the process after this many tokens of an answer.
    #[arg(long = "fault-die-after-tokens", value_name = "TOKENS")]
    pub die_after_tokens: Option<usize>,

    /// End every answer after its first token, as a model may, unless the request says ignore_eos.
    #[arg(long = "fault-stop-at-once")]
    pub stop_at_once: bool,

    /// Let requests for model work wait this long, in milliseconds, before the engine sees them.
    #[arg(
        long = "fault-slow-first-ms",
        value_name = "MILLISECONDS",
        default_value_t = 0
    )]
    pub slow_first_ms: u64,

    /// Let questions for a prompt's tokens wait this long, in milliseconds.
    #[arg(
        long = "fault-slow-tokens-ms",
        value_name = "MILLISECONDS",
        default_value_t = 0
    )]
    pub slow_tokens_ms: u64,

    /// Answer /health with 503.
    #[arg(long = "fault-unhealthy")]
    pub unhealthy: bool,

    /// Close every connection after its answer without announcing it in a header.
    #[arg(long = "fault-close-idle")]
    pub close_idle: bool,

    /// Read other tokens out of every prompt than are asked for, from this one on, as with another
    /// tokenizer.
    #[arg(long = "fault-other-tokens-from", value_name = "TOKEN")]
    pub other_tokens_from: Option<usize>,

    /// Refuse requests with vllm_xargs.
    #[arg(long = "fault-refuse-xargs")]
    pub refuse_xargs: bool,

    /// Of the cache events.
    #[command(flatten)]
    pub kv: KvFaults,

    /// Of prompts that are handed over between engines.
    #[command(flatten)]
    pub handoff: HandoffFaults,
}

/// How an answer ends before its time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    Cut,
    Stall,
    Error,
    /// Of the whole process.
    Death,
}

impl Faults {
    /// Reads a set from JSON. The error is a sentence for whoever wrote it.
    pub fn from_json(text: &[u8]) -> Result<Self, String> {
        let faults: Self = serde_json::from_slice(text).map_err(|error| error.to_string())?;
        match faults.refuse {
            Some(status) if !(400..600).contains(&status) => {
                Err(format!("refuse: {status} is not between 400 and 599"))
            }
            Some(_) | None => Ok(faults),
        }
    }

    /// What becomes of an answer of which this many tokens are out. The first named wins a tie.
    pub fn ending_after(&self, tokens: usize) -> Option<Ending> {
        let endings = [
            (self.cut_after_tokens, Ending::Cut),
            (self.stall_after_tokens, Ending::Stall),
            (self.error_after_tokens, Ending::Error),
            (self.die_after_tokens, Ending::Death),
        ];
        let due = endings
            .into_iter()
            .find(|(limit, _)| limit.is_some_and(|limit| tokens >= limit));
        due.map(|(_, ending)| ending)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_switch_that_is_not_named_is_off() {
        let faults = Faults::from_json(br#"{"refuse":503}"#).unwrap();
        let expected = Faults {
            refuse: Some(503),
            ..Faults::default()
        };
        assert_eq!(faults, expected);
        assert_eq!(Faults::from_json(b"{}").unwrap(), Faults::default());
        let faults = Faults::from_json(br#"{"kv":{"lose_next":2}}"#).unwrap();
        assert_eq!((faults.kv.lose_next, faults.kv.cut), (2, false));
    }

    #[test]
    fn a_misspelt_switch_and_a_status_that_is_no_error_are_refused() {
        Faults::from_json(br#"{"refuze":503}"#).unwrap_err();
        Faults::from_json(br#"{"kv":{"loose_next":2}}"#).unwrap_err();
        Faults::from_json(br#"{"refuse":200}"#).unwrap_err();
    }

    #[test]
    fn an_answer_ends_once_its_tokens_are_out() {
        let faults = Faults {
            stall_after_tokens: Some(2),
            ..Faults::default()
        };
        assert_eq!(faults.ending_after(1), None);
        assert_eq!(faults.ending_after(2), Some(Ending::Stall));
    }
}
