//! The store in Redis, shared by all replicas: one server, a master found through sentinels, or a cluster.
//!
//! A response is one hash, plus a stream for its events. All keys of a chain, and of a conversation with its
//! responses, have the hash tag `{tenant:root}`, so a cluster keeps them in one slot. Each transition is one
//! script (`redis/*.lua`; `redis/common.lua` documents the record, `redis/document.lua` a document). Data that spans
//! slots (which owner runs which responses, notices) is written by separate commands, ordered so that a crash in
//! between leaves only entries that a later scan removes.
//!
//! `redis/executor.rs` sends the commands. An operation on an I/O thread uses that thread's own connection, so no
//! other thread is woken. Other threads, and all operations on a cluster, use a connection on the store's own
//! thread.

mod background;
mod breaker;
mod breakers;
mod charges;
mod client;
mod conversation_items;
mod conversations;
mod documents;
mod executor;
mod failure;
mod keys;
mod lacking;
mod link;
mod notices;
mod outbox;
mod owners;
mod packed;
mod password_files;
mod replica_wait;
mod reply;
mod request;
mod responses;
mod scripts;
mod settings;
mod takeover;
mod target;
mod timer_anchor;
mod values;

pub use self::charges::ChargeKeys;
pub use self::client::Redis;
pub use self::settings::{
    Advanced, CircuitBreaker, Mode, Settings, Tls, UrlOrMap, Wait, url_or_map,
};
