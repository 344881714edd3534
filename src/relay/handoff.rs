//! One request as two: what a prefill worker and a decode worker are sent, and what passes between them.
//! A connector's own words are in a file of its own: a third one is such a file, an arm of
//! [`Connector`] and an arm of `dialect`. Pure.

mod legs;
mod mooncake;
mod nixl;

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use serde::Deserialize;
use serde_json::value::RawValue;

pub use self::legs::{Legs, NotSplit};
#[cfg(test)]
pub(super) use self::tests::recorded;
use super::engine_answer;
use crate::fleet::handoff::{Connector, Peer};
use crate::prompt::Api;

/// A prefill leg's answer is not longer: a million tokens in blocks of 16 are half a megabyte of numbers.
pub const ANSWER_BYTES_MAX: usize = 4 << 20;

/// What one connector says. Fields are as in `"a":1,"b":2`.
trait Dialect {
    /// Fields of a prefill leg's `kv_transfer_params`.
    fn ask(&self, transfer: &Transfer) -> String;

    /// Further fields of a prefill leg's body, each with a comma before it.
    fn also(&self) -> &'static str {
        ""
    }

    /// What a prefill leg's answer hands over.
    fn read(&self, transfer: &Transfer, answer: &Answer<'_>) -> Result<Told, Unhanded>;
}

fn dialect(connector: Connector) -> &'static dyn Dialect {
    match connector {
        Connector::Nixl => &nixl::Nixl,
        Connector::Mooncake => &mooncake::Mooncake,
    }
}

/// One handing over, from before its prefill leg is sent until that is answered. What is known of the
/// prefill worker is what was known when it began: another process of it knows nothing of the blocks.
#[derive(Debug)]
pub struct Transfer {
    connector: Connector,
    /// No other handing over has it.
    id: String,
    host: String,
    peer: Option<Arc<Peer>>,
    rank: u32,
}

impl Transfer {
    /// `host` is the prefill worker's, as it is listed. Of several ranks, `seed` chooses.
    pub fn begin(
        connector: Connector,
        api: Api,
        id: String,
        host: &str,
        peer: Option<Arc<Peer>>,
        seed: u64,
    ) -> Result<Self, Unhanded> {
        let mut rank = 0;
        if connector.needs_peer() {
            let peer = peer.as_ref().ok_or(Unhanded::NoPeer)?;
            let count = peer.ranks().len();
            // vLLM's Responses go to a rank that the engine chooses, and it tells nobody which.
            if api == Api::Responses && count > 1 {
                return Err(Unhanded::NoRank);
            }
            let drawn = (seed % count.max(1) as u64) as usize;
            rank = peer.ranks().nth(drawn).ok_or(Unhanded::NoPeer)?;
        }
        Ok(Self {
            connector,
            id,
            host: host.to_owned(),
            peer,
            rank,
        })
    }

    /// What the prefill leg must carry as `x-data-parallel-rank`.
    pub fn rank(&self) -> Option<u32> {
        let peer = self.peer.as_ref()?;
        let is_chosen = self.connector.needs_peer() && peer.ranks().len() > 1;
        is_chosen.then_some(self.rank)
    }

    /// Reads the prefill leg's whole answer, of status 200.
    pub fn end(self, answer: &[u8]) -> Result<Handed, Unhanded> {
        let read: Answer<'_> = serde_json::from_slice(answer).map_err(|_| Unhanded::Malformed)?;
        let told = dialect(self.connector).read(&self, &read)?;
        let usage = engine_answer::last_usage(answer).unwrap_or_default();
        Ok(Handed {
            params: Params(told.fields),
            prompt_tokens: usage.prompt_tokens,
            // Engines leave it out of their usage unless told to put it in.
            cached_tokens: usage.cached_tokens.max(told.cached_tokens),
        })
    }
}

/// What a prefill leg came to.
#[derive(Debug)]
pub struct Handed {
    pub params: Params,
    pub prompt_tokens: u64,
    /// Tokens of the prompt that the prefill worker had not to compute.
    pub cached_tokens: u64,
}

/// Where a prompt's blocks are, as a decode worker is told it. Good for one decode leg of the prompt that they
/// were made for: with another prompt, or a second time, engines answer 200 and wrong text. So making that leg's
/// body uses it up.
#[derive(Debug)]
pub struct Params(String);

/// What a dialect reads of an answer.
struct Told {
    /// The decode leg's `kv_transfer_params`.
    fields: String,
    cached_tokens: u64,
}

/// A prefill leg's answer, of any API.
#[derive(Deserialize)]
struct Answer<'a> {
    #[serde(default, borrow)]
    kv_transfer_params: Option<&'a RawValue>,
    #[serde(default, borrow)]
    choices: Vec<Choice<'a>>,
    #[serde(default, borrow)]
    incomplete_details: Option<Incomplete<'a>>,
}

#[derive(Deserialize)]
struct Choice<'a> {
    #[serde(default, borrow)]
    finish_reason: Option<Cow<'a, str>>,
}

#[derive(Deserialize)]
struct Incomplete<'a> {
    #[serde(default, borrow)]
    reason: Option<Cow<'a, str>>,
}

impl Answer<'_> {
    /// Whether it ended because it had its one token, and for no other reason.
    fn has_its_token(&self) -> bool {
        let is_cut =
            |incomplete: &Incomplete<'_>| incomplete.reason.as_deref() == Some("max_output_tokens");
        match &self.choices[..] {
            [choice] => choice.finish_reason.as_deref() == Some("length"),
            [] => self.incomplete_details.as_ref().is_some_and(is_cut),
            _ => false,
        }
    }
}

/// Why nothing is handed over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unhanded {
    /// The answer is not an engine's.
    Malformed,
    /// The engine has no connector, or another one.
    NoParams,
    /// It ended before its one token, so the engine has let go of the blocks.
    Stopped,
    /// Nothing is known of where the worker is met.
    NoPeer,
    /// The worker has several ranks, and nobody can say which of them computes the prompt.
    NoRank,
}

impl Unhanded {
    pub fn as_str(self) -> &'static str {
        match self {
            Unhanded::Malformed => "malformed",
            Unhanded::NoParams => "no_params",
            Unhanded::Stopped => "stopped",
            Unhanded::NoPeer => "no_peer",
            Unhanded::NoRank => "no_rank",
        }
    }
}

impl fmt::Display for Unhanded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Unhanded::Malformed => "the answer to the prefill leg is not an engine's",
            Unhanded::NoParams => "the prefill worker did not say where its blocks are",
            Unhanded::Stopped => "the prefill worker stopped before its first token",
            Unhanded::NoPeer => "the prefill worker's bootstrap server has told nothing",
            Unhanded::NoRank => {
                "nobody can say which of the prefill worker's ranks would compute it"
            }
        })
    }
}

/// A text as JSON.
fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

#[cfg(test)]
mod tests;
