//! Which prompt blocks each worker has cached: exactly, from its KV events, or predicted from what
//! the router sent there.
//!
//! - Knowledge: [`index`] (reported blocks of all workers, by [`block`] hashes), [`indexes`] (one
//!   index for each model and block size), [`unconfirmed`] (sent, not reported yet), [`predicted`]
//!   (workers without KV events, by [`text_block`] hashes).
//! - Events: connections to engines ([`zmq`], [`grpc`]), decoding ([`msgpack`], [`protobuf`]) into [`event`],
//!   gaps and replays ([`stream`]), [`event_filter`], and [`subscriber`], which applies events to the index.
//! - Warm start: a replica that joins late takes another's trees over ([`tree_copies`]).

pub mod block;
pub mod event;
pub mod event_filter;
pub mod grpc;
pub mod index;
pub mod indexes;
pub mod msgpack;
mod owner_table;
pub mod page_fold;
pub mod page_hash;
pub mod predicted;
mod prefetch;
pub mod prefix_owners;
pub mod protobuf;
mod reconnects;
pub mod source;
pub mod stream;
pub mod subscriber;
pub mod text_block;
pub mod tokenizer_check;
pub mod tree_copies;
pub mod unconfirmed;
pub mod zmq;
