//! Disaggregated prefill/decode: one worker computes a request's prompt (prefill leg), another fetches the KV blocks
//! and generates the answer (decode leg). Here is what such requests share; their legs are attempts.

mod disaggregation;
mod metrics;
mod pinned_blocks;
mod settings;

pub(super) use self::disaggregation::Disaggregation;
pub(super) use self::metrics::{Families, ModelMetrics};
pub(super) use self::pinned_blocks::{PinnedBlocks, PinnedTransfer};
pub use self::settings::{OnPrefillFailure, Settings};
