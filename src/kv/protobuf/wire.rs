//! Generated from the schemas in `proto` (`tests/it/wire_code.rs`). Only the paths of the calls are visible outside [`super`].

#![allow(
    unreachable_pub,
    clippy::all,
    clippy::pedantic,
    reason = "generated code"
)]

include!("../../../proto/generated/kv_events.rs");
