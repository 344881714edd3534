//! Sends a request to an engine and the engine's answer to the client: plan, choose, attempt, retry, stream.
//!
//! The only part that talks to engines for a request. It knows bodies as bytes, with the few fields that
//! [`crate::prompt`] found in them.

pub mod abort;
mod as_chat;
mod body_edit;
mod budget;
pub mod cached_prefix;
mod carry;
mod charge;
mod choice;
mod chosen;
mod continuation;
mod core;
mod course;
mod cuts;
pub mod decision_log;
mod decision_sample;
pub mod engine_answer;
mod evidence;
mod exchange;
mod explain;
mod failure_owner;
mod first_token;
mod first_token_gate;
pub mod fleet_view;
mod gateway;
pub mod headers;
pub mod hindsight;
mod job;
mod kv_report_request;
pub mod kv_transfer;
mod meter;
mod metrics;
mod model;
mod next_answer;
mod outcome;
mod output_cap;
mod pinned_rank;
mod plain_events;
mod plan;
pub mod prefill_decode;
mod promised;
pub mod prompt_blocks;
mod prompt_token_ids;
mod quarantine;
mod queued;
mod redirect;
mod request_count;
mod request_outcome;
mod respond;
mod resumed;
pub mod retries;
mod rights;
mod run;
mod running;
mod send;
mod session_key;
mod settings;
mod sglang_prompt;
mod single_worker;
mod standing;
mod stream;
mod summary;
mod taken_out;
pub mod target;
mod tenants;
mod token_count;
pub mod tokens;
mod traced;
pub mod usage;
mod usage_line;
mod usage_option;
pub mod usage_reader;
pub mod usage_rewriter;
mod wait;
mod worker_series;

pub use self::cached_prefix::{Caches, PrefixSource};
pub use self::continuation::{
    Progress, Resume, Settings as StreamContinuation, refusal_named as continuation_refusal,
};
pub use self::core::Relay;
pub use self::explain::{Explanation, Score};
pub use self::gateway::{CarriedAnswer, CarriedBy, Gateway, Handover};
pub use self::job::{
    AnsweredAsChat, ChatForm, DECISION, Error, Job, NotConvertible, ServedBy, ToolLoss,
};
pub use self::metrics::{INTER_TOKEN_LATENCY_SECONDS, TIME_TO_FIRST_TOKEN_SECONDS};
pub use self::model::{ModelSettings, PerModel};
pub use self::session_key::KeySource;
pub use self::settings::{PinRanks, Settings};
pub use self::standing::StandingCell;
pub use self::stream::is_engine_lost;
pub use self::summary::{RequestSummary, SummaryCell};
pub use self::tenants::{TenantProfile, TenantTable};
pub use self::usage_option::UnaskedUsage;
pub use self::wait::{QueueStatus, QueueSummary, Queues};
