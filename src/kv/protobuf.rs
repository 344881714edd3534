//! Converts between `KvEventBatch` messages and KV events. What has no equivalent is left out or an unknown event, never
//! a guess.
//!
//! Calls and connections are in [`super::grpc`] and in the bridge.

mod digest;
mod read;
mod wire;
mod write;

use bytes::Bytes;
use prost::Message as _;
use serde::{Deserialize, Serialize};

use self::wire::smg::grpc::common as message;
use super::source::DecodeError;

pub use self::digest::digest;
pub use self::read::Message;
pub use self::write::{Encoded, LeftOut, LeftOutReason, encode_batch};

/// The services that serve events, each for its own engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Service {
    Vllm,
    Sglang,
    TokenSpeed,
    TensorrtLlm,
}

impl Service {
    pub const ALL: [Self; 4] = [
        Self::Vllm,
        Self::Sglang,
        Self::TokenSpeed,
        Self::TensorrtLlm,
    ];

    /// The path of its `SubscribeKvEvents` call.
    pub const fn path(self) -> &'static str {
        match self {
            Self::Vllm => wire::vllm::grpc::engine::SUBSCRIBE_KV_EVENTS,
            Self::Sglang => wire::sglang::grpc::scheduler::SUBSCRIBE_KV_EVENTS,
            Self::TokenSpeed => wire::tokenspeed::grpc::scheduler::SUBSCRIBE_KV_EVENTS,
            Self::TensorrtLlm => wire::trtllm::SUBSCRIBE_KV_EVENTS,
        }
    }
}

pub fn decode_batch(bytes: &[u8]) -> Result<Message, DecodeError> {
    let message = message::KvEventBatch::decode(bytes)
        .map_err(|error| DecodeError(format!("not a KvEventBatch: {error}")))?;
    read::message(message)
}

/// Encodes a request for the batches strictly after `start`; 0: the current state.
pub fn encode_request(start: u64) -> Bytes {
    let request = message::SubscribeKvEventsRequest {
        start_sequence_number: start,
        load_records_before_first_batch: true,
    };
    request.encode_to_vec().into()
}

/// Decodes a request, and returns its start number.
pub fn decode_request(bytes: &[u8]) -> Result<u64, DecodeError> {
    message::SubscribeKvEventsRequest::decode(bytes)
        .map(|request| request.start_sequence_number)
        .map_err(|error| DecodeError(format!("not a SubscribeKvEventsRequest: {error}")))
}

#[cfg(test)]
mod tests;
