//! gRPC's health service: the one question, and the three answers.

use bytes::Bytes;
use prost::Message;
use tonic::Status;

use super::frame;

pub const CHECK: &str = "/grpc.health.v1.Health/Check";
pub const WATCH: &str = "/grpc.health.v1.Health/Watch";

/// `grpc.health.v1.HealthCheckRequest`.
#[derive(Message)]
struct Question {
    #[prost(string, tag = "1")]
    service: String,
}

/// The service that a question is about; an empty name is the whole server.
pub fn service(question: &[u8]) -> Result<String, Status> {
    let question = Question::decode(question);
    let question = question.map_err(|error| Status::invalid_argument(error.to_string()))?;
    Ok(question.service)
}

/// `grpc.health.v1.HealthCheckResponse`, framed.
pub fn serving(is_serving: bool) -> Bytes {
    frame(&[0x08, if is_serving { 1 } else { 2 }])
}

/// The response for a service that is not served here: `SERVICE_UNKNOWN`, framed.
pub fn unknown() -> Bytes {
    frame(&[0x08, 3])
}
