//! KV transfers between simulated engines, as vLLM 0.32's NIXL and Mooncake connectors do them where it shows outside.
//!
//! A decode engine fetches a prompt's blocks over HTTP, by `POST /sim/blocks` at the prefill engine's API address, so a
//! dead prefill engine is noticed. What a real decode engine does not notice is made visible: blocks of another
//! prompt, or fetched twice or too late, give an answer of [`tokenizer::wrong`](super::tokenizer::wrong) words, and
//! both engines count it.

pub(crate) mod blocks;
pub(crate) mod fetch;
pub(crate) mod offer;
pub(crate) mod params;
pub(crate) mod settings;
pub(crate) mod state;
