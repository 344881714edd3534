//! What two workers need to transfer KV blocks: a connector that both support, where a prefill worker's blocks
//! can be fetched, and why two workers are not a pair. Except for [`watch`], pure.

mod bootstrap;
mod compatibility;
mod connector;
mod mismatch;
pub mod pairs;
mod returned_params;
pub mod watch;

pub use self::bootstrap::BootstrapInfo;
pub use self::compatibility::CompatibilityKey;
pub use self::connector::Connector;
pub use self::mismatch::{Mismatch, mismatch};
pub use self::returned_params::ReturnedParams;
