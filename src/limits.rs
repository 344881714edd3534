//! Limits of tenants: requests and tokens a minute, requests at the same time, models, output tokens.
//!
//! A request reserves what it may use before it is sent, and is corrected by what it used when it ends. Replicas count
//! together in Redis, in one round trip; without it, or while it is away, each grants its share. This part knows
//! neither bodies nor engines, and writes no error bodies.

mod admit;
mod ask;
mod batches;
mod charge;
pub mod compiled;
pub mod cost;
pub mod gcra;
mod limiter;
mod metrics;
mod refusal;
mod report;
mod settings;
mod settle;
mod standing;
pub mod state;
mod tenant_limits;
mod turns;

pub use self::charge::Charge;
pub use self::compiled::Kind;
pub use self::cost::Known;
pub use self::limiter::Limiter;
pub use self::refusal::Refusal;
pub use self::report::{LimitRow, Report};
pub use self::settings::{OnStoreFailure, Settings, Store, TenantLimitsSpec};
pub use self::standing::Standing;
pub use self::tenant_limits::{Request, TenantLimits};
pub use crate::store::charges::ChargeId;
