//! ZeroMQ in, gRPC out.

pub mod feed;
pub mod held;
pub mod history;
pub mod life;
pub mod metrics;
