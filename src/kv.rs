//! What each worker's cache holds, as far as it is known.

pub mod admit;
pub mod block;
pub mod event;
pub mod expected;
pub mod forest;
pub mod grpc;
pub mod index;
pub mod msgpack;
pub mod parity;
pub mod predicted;
pub mod protobuf;
pub mod radix;
pub mod source;
pub mod stream;
pub mod subscriber;
pub mod tap;
pub mod zmq;

use smallvec::SmallVec;

use crate::ids::WorkerId;

/// A worker that holds the start of a prompt, and how much of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holder {
    pub worker: WorkerId,
    /// Blocks from the prompt's start.
    pub blocks: u32,
}

/// The deepest holders of one prompt, deepest first.
pub type Overlap = SmallVec<[Holder; 8]>;
