//! What an engine sends, read without a DOM: its events, its tokens and its usage.

mod cut_json;
pub mod engine_answer;
pub(super) mod first_token_gate;
pub(super) mod plain_events;
pub(super) mod splice;
pub(super) mod token_count;
pub mod usage_reader;
pub mod usage_rewriter;
