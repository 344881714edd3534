//! The messages between replicas, generated from `proto/peers.proto` (`tests/it/wire_code.rs`).

#![allow(
    unreachable_pub,
    clippy::all,
    clippy::pedantic,
    reason = "generated code"
)]

include!("../../proto/generated/warmroute.peers.v1.rs");
