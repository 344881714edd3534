//! What `proto/build.rs` makes of the schemas. Nothing outside [`super`] sees these types, but for the
//! paths of the calls.

#![allow(
    unreachable_pub,
    clippy::all,
    clippy::pedantic,
    reason = "generated code"
)]

include!(concat!(env!("OUT_DIR"), "/wire.rs"));
