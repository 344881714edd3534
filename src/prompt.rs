//! Reads prompts out of request bodies: as hashes of text blocks, and as the token ids that the engine will compute.
//!
//! [`peek`] reads a body once, without changing it, for every request. For models with a configured tokenizer,
//! [`tokenizer`] renders and tokenizes the prompt in the router and [`engine`] asks an engine to do it.

mod billing_header;
mod blocks;
mod body;
pub mod cache;
mod canonical;
pub mod engine;
pub mod folder;
mod multipart;
mod nesting;
pub mod pool;
pub mod probes;
pub mod render;
pub mod template;
pub mod tokenizer;
mod types;
pub mod vocabulary;

pub use self::billing_header::without_billing_header;
pub use self::body::{PeekedBody, check_xargs, peek, peek_router_made};
pub use self::multipart::{is_form, peek_form};
pub use self::nesting::check_nesting;
pub use self::types::{Api, Error, HashedPrompt, LocalBlock};

#[cfg(test)]
mod tests;
