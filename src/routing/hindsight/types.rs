//! What is played again, and what came out.

use std::time::Instant;

use smallvec::SmallVec;

use crate::fleet::speed::Speed;
use crate::ids::WorkerId;

/// The first tokens of a prompt, up to some positions: what identifies them, and how many they are.
pub type Prefixes = SmallVec<[(u64, u32); 8]>;

/// A request, and the worker that it was sent to.
#[derive(Clone, Debug)]
pub struct Sent {
    pub at: Instant,
    pub worker: WorkerId,
    pub prompt_tokens: u32,
    /// Prompt tokens that the worker was expected to have cached.
    pub cached_tokens: u32,
    pub answer_tokens: f64,
    pub prefixes: Prefixes,
}

/// A worker as it is played.
#[derive(Clone, Copy, Debug)]
pub struct Worker {
    pub id: WorkerId,
    pub speed: Speed,
    pub slots: u32,
}

/// How long requests took together, from the choice to the end of the answer, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Took {
    pub requests: usize,
    /// At the workers that they were sent to.
    pub chosen: f64,
    pub least_load: f64,
    pub round_robin: f64,
}
