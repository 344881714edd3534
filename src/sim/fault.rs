//! Faults that a simulated engine can be given, as JSON (`POST /sim/faults`), while it runs. Pure: decides when a fault strikes
//! an answer; the worker carries it out.

pub mod kv;

use serde::{Deserialize, Serialize};

use self::kv::KvFaults;

/// In JSON, an absent fault is off.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Faults {
    /// Answer every inference request with this HTTP status (400 to 599).
    pub refuse: Option<u16>,

    /// Value of the Retry-After header of such an answer, in seconds.
    pub retry_after: Option<u32>,

    /// Accept inference requests and never answer them.
    pub hang: bool,

    /// Close the connection after this many tokens of an answer.
    pub cut_after_tokens: Option<usize>,

    /// Stop sending after this many tokens of an answer, and keep the connection open; go on when this fault is off.
    pub stall_after_tokens: Option<usize>,

    /// Report an engine error after this many tokens of an answer, as vLLM does when its engine core dies.
    pub error_after_tokens: Option<usize>,

    /// End the process after this many tokens of an answer.
    pub die_after_tokens: Option<usize>,

    /// End every answer after its first token with finish reason "stop", unless the request sets ignore_eos.
    pub stop_at_once: bool,

    /// Delay every inference request by this long before the engine gets it.
    pub slow_first_ms: u64,

    /// Delay /tokenize and the render endpoints by this long.
    pub slow_tokens_ms: u64,

    /// Answer /health with 503.
    pub unhealthy: bool,

    /// Sleep: /is_sleeping reports it, /health answers 200 all the same, and inference requests are never answered.
    pub asleep: bool,

    /// Close every connection after one answer, without announcing it in a header.
    pub close_idle: bool,

    /// Change every prompt's tokens from this index on, as an engine with a different tokenizer would have them.
    pub other_tokens_from: Option<usize>,

    /// Faults of the KV events.
    pub kv: KvFaults,

    /// Faults of KV transfers.
    pub transfer: TransferFaults,
}

/// Faults of KV transfers between simulated engines. In JSON, an absent fault is off.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TransferFaults {
    /// Answer prefill legs without kv_transfer_params, and keep no blocks for a decode engine.
    pub no_params: bool,

    /// Fail the transfer of every decode leg after this long, with an engine error.
    pub transfer_fails_ms: Option<u64>,

    /// Never finish the transfer of any decode leg.
    pub transfer_hangs: bool,

    /// Exit when a prefill leg or a decode leg arrives, without answering it.
    pub die_at_leg: bool,

    /// Exit as soon as the answer to a prefill leg is sent.
    pub die_after_answer: bool,
}

/// How a fault ends an answer early.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EarlyEnd {
    Cut,
    Stall,
    Error,
    /// The process ends.
    Death,
}

impl Faults {
    /// Reads the faults from JSON. The error is a message for the client.
    pub fn from_json(text: &[u8]) -> Result<Self, String> {
        let faults: Self = serde_json::from_slice(text).map_err(|error| error.to_string())?;
        match faults.refuse {
            Some(status) if !(400..600).contains(&status) => {
                Err(format!("refuse: {status} is not between 400 and 599"))
            }
            Some(_) | None => Ok(faults),
        }
    }

    /// How an answer of which this many tokens are sent ends now, if at all. If several faults are due, the first one
    /// in the list wins.
    pub fn early_end_after(&self, tokens: usize) -> Option<EarlyEnd> {
        let ends = [
            (self.cut_after_tokens, EarlyEnd::Cut),
            (self.stall_after_tokens, EarlyEnd::Stall),
            (self.error_after_tokens, EarlyEnd::Error),
            (self.die_after_tokens, EarlyEnd::Death),
        ];
        let due = ends
            .into_iter()
            .find(|(limit, _)| limit.is_some_and(|limit| tokens >= limit));
        due.map(|(_, end)| end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_absent_fault_is_off() {
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
    fn an_unknown_fault_and_a_status_that_is_no_error_are_rejected() {
        Faults::from_json(br#"{"refuze":503}"#).unwrap_err();
        Faults::from_json(br#"{"kv":{"loose_next":2}}"#).unwrap_err();
        Faults::from_json(br#"{"refuse":200}"#).unwrap_err();
    }

    #[test]
    fn an_answer_ends_after_the_given_number_of_tokens() {
        let faults = Faults {
            stall_after_tokens: Some(2),
            ..Faults::default()
        };
        assert_eq!(faults.early_end_after(1), None);
        assert_eq!(faults.early_end_after(2), Some(EarlyEnd::Stall));
    }
}
