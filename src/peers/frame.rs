//! A message between replicas as the bytes that a stream carries. Pure.

use bytes::Bytes;
use prost::Message;

use super::wire::PeerMessage;
use super::wire::peer_message::Kind;
use crate::http::grpc;

/// A message in its frame, to be sent on any number of streams.
pub fn framed(kind: Kind) -> Bytes {
    let message = PeerMessage { kind: Some(kind) };
    grpc::frame(&message.encode_to_vec())
}
