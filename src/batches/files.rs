//! The Files API: uploads, lists, contents, deletions.
//!
//! ```text
//! POST ─▶ pieces (time-outs) ─▶ form (fields) ─▶ storage (parts) ─▶ record in the store ─▶ the object appears
//!                                                                   ─▶ the record is confirmed
//! ```
//!
//! The record is written before the object appears. So whatever stops in between, no object is left that no record
//! names. A record that is not confirmed has expired for clients, and goes within an hour or so.

mod content;
mod create;
mod form;
mod metrics;
mod pieces;
mod requests;
mod service;
mod slots;
#[cfg(test)]
mod tests;

pub use self::create::FileUpload;
pub use self::requests::ReceivedRequests;
pub use self::service::Files;
