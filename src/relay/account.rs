//! What is known of requests afterwards: metrics, usage, decisions that are kept.

pub mod decision_log;
pub(super) mod explanation;
pub mod hindsight;
pub(super) mod metrics;
pub mod usage;
pub(super) mod usage_line;
pub(super) mod worker_series;
