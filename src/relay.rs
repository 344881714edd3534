//! Sends a request to an engine and the engine's answer to the client: plan, choose, attempt, retry, stream.
//!
//! The only part that talks to engines for a request. It knows bodies as bytes, with the few fields that
//! [`crate::prompt`] found in them.

pub mod abort;
pub mod account;
pub mod answer;
mod as_chat;
mod attempt;
mod carry;
mod charge;
pub mod choose;
mod continuation;
mod core;
mod course;
mod decision_sample;
mod disaggregation_pages;
mod entry;
mod explain;
pub mod failure;
pub mod headers;
mod job;
pub mod kv_transfer;
mod lasting_state;
mod meter;
mod model;
mod next_answer;
mod plan;
mod planner;
pub mod prefill_decode;
pub mod prompt;
mod queued;
mod redirect;
pub mod request;
mod request_count;
mod respond;
mod rights;
mod run;
mod settings;
mod spare_room;
mod stream;
mod taken_out;
mod traced;
mod wait;

pub use self::account::metrics::{INTER_TOKEN_LATENCY_SECONDS, TIME_TO_FIRST_TOKEN_SECONDS};
pub use self::continuation::{
    Progress, Resume, Settings as StreamContinuation, refusal_named as continuation_refusal,
};
pub use self::core::Relay;
pub use self::explain::{Explanation, Score};
pub use self::job::{
    AnsweredAsChat, ChatForm, DECISION, Error, Job, NotConvertible, ServedBy, ToolLoss,
};
pub use self::lasting_state::LastingState;
pub use self::model::{ModelSettings, PerModel};
pub use self::prompt::cached_prefix::{Caches, PrefixSource};
pub use self::request::batch_line::{
    AnswerRoom, BatchLine, EnteringLine, EnteringLines, GrowFuture, LinesByWorker, RunningLines,
};
pub use self::request::context::{RequestContext, RequestKind};
pub use self::request::gateway::{CarriedAnswer, CarriedBy, Gateway, Handover};
pub use self::request::session_key::KeySource;
pub use self::request::summary::{RequestSummary, StandingCell, SummaryCell};
pub use self::request::tenants::{TenantProfile, TenantTable};
pub use self::request::usage_option::UnaskedUsage;
pub use self::settings::{PinRanks, Settings};
pub use self::spare_room::SpareRoom;
pub use self::stream::{is_drained, is_engine_lost};
pub use self::wait::{QueueStatus, QueueSummary, Queues};
