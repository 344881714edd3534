//! What the replicas of one fleet share: the load that each has at the workers, the prompts that it routed, and, for a
//! replica that starts, what it knows of the workers' caches.
//!
//! Replicas share state, never events: a report that is lost, late or doubled is healed by the next one. Nothing here is
//! asked on a request's path; a replica without peers routes by what it knows itself.

mod addresses;
mod client;
mod discovery;
mod frame;
pub mod gauges;
pub mod give_trees;
mod handle;
pub mod handshake;
pub mod link;
pub mod load_table;
mod metrics;
pub mod numbers;
pub mod pace;
pub mod roster;
pub mod routed;
mod said;
mod server;
mod session;
pub mod settings;
mod state;
pub mod status;
mod streams;
pub mod take_trees;
pub mod tree_wire;
pub mod warm_start;
pub mod wire;
mod workers;

pub use self::frame::framed;
pub use self::handle::Peers;
pub use self::link::{Serving, TreeHandler};
pub use self::metrics::TreeMetrics;
pub use self::settings::Settings;
