//! Envoy's messages, generated from `proto/ext_proc.proto` (`tests/it/wire_code.rs`).

#![allow(
    unreachable_pub,
    clippy::all,
    clippy::pedantic,
    reason = "generated code"
)]

include!("../../../proto/generated/envoy.service.ext_proc.v3.rs");
