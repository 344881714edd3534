//! The modules of the program that the index needs.

#[path = "../../src/kv/block.rs"]
pub mod block;
#[path = "../../src/kv/event.rs"]
pub mod event;
pub mod index;
