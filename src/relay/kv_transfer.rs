//! A request as a prefill leg and a decode leg, and the KV transfer between them. Pure.
//!
//! A connector's own fields are in a file of its own. Another connector is another such file, an arm of
//! [`crate::fleet::kv_transfer::Connector`] and the arms in `transfer`.

mod legs;
mod mooncake;
mod moriio;
mod nixl;
mod sglang;
mod transfer;
mod types;

#[cfg(test)]
mod tests;

pub(super) use self::legs::runs_tools;
pub use self::legs::{Legs, SingleWorkerReason};
pub use self::sglang::Rendezvous;
#[cfg(test)]
pub(super) use self::tests::recorded;
pub use self::types::{ANSWER_BYTES_MAX, PrefillResult, Transfer, TransferError, TransferParams};
