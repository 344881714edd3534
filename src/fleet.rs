//! The fleet of workers: who belongs to it, which workers are healthy, how busy they are, and which models
//! they serve.
//!
//! Routing reads a [`Snapshot`], which is immutable; every change of membership, health or engine facts
//! publishes a new one. Load counters and circuit breakers change with each request, so they are shared
//! between snapshots, inside [`Worker`].

pub mod adapter_slots;
pub mod circuit_breaker;
pub mod context_lengths;
mod departed;
mod departed_models;
pub mod discovery;
pub mod engine;
mod entry;
pub mod events;
pub mod freed;
mod group;
pub mod health;
pub mod in_flight;
pub mod kv_transfer;
pub mod load;
mod membership;
pub mod model_lookup;
mod model_set;
mod places;
pub mod probe;
pub mod process_end;
mod rank_places;
pub mod registry;
mod responses_api;
mod router_key;
mod snapshot;
pub mod speed;
mod status;
pub mod waiting;
mod worker;

pub use self::group::{Group, Members, with_different_members};
pub use self::places::Places;
pub use self::rank_places::PinnedApi;
pub use self::responses_api::{ChatWorkers, ResponsesApi};
pub use self::router_key::RouterKey;
pub use self::snapshot::Snapshot;
pub use self::status::{Facts, Status};
pub use self::worker::{Member, RateSource, Role, Worker, WorkerState};
