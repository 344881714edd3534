//! The gateway's messages, as tonic reads them.

use bytes::Buf;
use prost::Message;
use tonic::Status;
use tonic::codec::{DecodeBuf, Decoder};

use crate::api::endpoint_picker::wire::ProcessingRequest;

/// Decodes the gateway's messages.
#[derive(Debug, Default)]
pub(crate) struct Messages;

impl Decoder for Messages {
    type Item = ProcessingRequest;
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<Self::Item>, Status> {
        // Bytes are read faster than a buffer that could grow, and parts of them are kept without a copy.
        let message = buffer.copy_to_bytes(buffer.remaining());
        let message = ProcessingRequest::decode(message);
        let malformed = |error: prost::DecodeError| Status::invalid_argument(error.to_string());
        message.map(Some).map_err(malformed)
    }
}
