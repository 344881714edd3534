//! Disaggregated prefill/decode: one worker computes a request's prompt (prefill leg), another fetches the KV blocks
//! and generates the answer (decode leg).

mod attempt;
mod context;
mod decode_leg;
mod disaggregation;
mod leg_answers;
mod metrics;
mod pages;
mod pinned_blocks;
mod prefill_leg;
mod settings;
mod together;

pub(super) use self::disaggregation::Disaggregation;
pub(super) use self::metrics::{Families, ModelMetrics};
pub use self::settings::{OnPrefillFailure, Settings};
