//! Carries a request to an engine and its answer back: choose, try, try again, relay, account.
//!
//! The only part that talks to engines for a request. It knows bodies only as bytes with a few
//! fields that [`crate::prompt`] found in them.

pub mod attempt;
mod budget;
pub mod cached_prefix;
mod carry;
mod choice;
mod core;
mod direct;
mod engine_answer;
mod explain;
pub mod handoff;
mod headers;
mod job;
mod meter;
mod metrics;
mod model;
mod opening;
mod pinned;
mod plan;
pub mod prefill_decode;
pub mod prompt_blocks;
mod report;
mod request_count;
mod running;
mod settings;
mod stream;
mod summary;
mod tell_tokens;
pub mod tokens;
pub mod trial;
pub mod usage;
pub mod view;
mod worker_series;

pub use self::cached_prefix::{Caches, PrefixSource};
pub use self::core::Relay;
pub use self::explain::{Explanation, Score};
pub use self::job::{DECISION, Error, Job, ServedBy};
pub use self::model::{KeySource, ModelSettings, PerModel};
pub use self::settings::Settings;
pub use self::summary::{RequestSummary, SummaryCell};
