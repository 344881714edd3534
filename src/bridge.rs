//! ZeroMQ in, gRPC out.

pub mod held;
