//! Continuation: a stream whose worker is lost goes on on another worker, token for token. Pure.
//!
//! The first worker is asked for the token ids of the prompt and of each chunk. They are kept and taken out of what the
//! client gets. When the stream breaks, the next worker is sent the same request with prompt and answer so far as its
//! prompt, and its chunks become the rest of the one stream that the client reads. Where that would not be exact, the
//! stream ends as it would without.
//!
//! Of a background response another router process may be the one that goes on: `progress` is what it needs.

mod chunk;
mod progress;
mod reader;
mod refusal;
mod request;
mod settings;
mod usage;

pub use self::progress::{Progress, Resume};
pub(super) use self::reader::{End, Reader};
pub(super) use self::refusal::Refusal;
pub use self::refusal::refusal_named;
pub(super) use self::request::Request;
pub use self::settings::Settings;

#[cfg(test)]
mod tests;
