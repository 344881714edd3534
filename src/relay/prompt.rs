//! What a request asks: its tokens and blocks, and who has them cached.

pub mod cached_prefix;
pub mod prompt_blocks;
pub(super) mod prompt_token_ids;
pub(super) mod sglang_prompt;
pub mod tokens;
