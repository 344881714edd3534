//! What passes between the two legs, and what a connector has to say.

use std::borrow::Cow;
use std::sync::Arc;

use serde::Deserialize;
use serde_json::value::RawValue;

use crate::fleet::kv_transfer::{BootstrapInfo, Connector};
use crate::observe::metrics::words;
use crate::prompt::Api;

/// The longest answer of a prefill leg: the block numbers of a million tokens in blocks of 16 take half a megabyte.
pub const ANSWER_BYTES_MAX: usize = 4 << 20;

/// Fields of the prefill leg's `kv_transfer_params` that all of vLLM's connectors have.
pub(super) const ASKS_FOR_BLOCKS: &str = r#""do_remote_decode":true,"do_remote_prefill":false"#;

/// One KV transfer, from before its prefill leg is sent until that is answered. It keeps what was known of the
/// prefill worker when it began: a restarted engine does not have the blocks.
#[derive(Debug)]
pub struct Transfer {
    pub(super) connector: Connector,
    /// Unique.
    pub(super) id: String,
    /// The prefill worker's host, as discovery lists it.
    pub(super) host: String,
    pub(super) bootstrap_info: Option<Arc<BootstrapInfo>>,
    /// The dp rank that computes the prompt.
    pub(super) rank: u32,
    /// Its prefill leg must name it.
    pub(super) is_pinned: bool,
    /// Of whose answers the usage is read.
    pub(super) api: Api,
}

#[derive(Debug)]
pub struct PrefillResult {
    pub params: TransferParams,
    pub prompt_tokens: u64,
    /// Tokens of the prompt that the prefill worker had cached.
    pub cached_tokens: u64,
}

/// Where a prompt's KV blocks are, for a decode leg. Good for one decode leg of the same prompt: with another prompt,
/// or a second time, engines answer 200 and wrong text. So making the decode leg's body consumes it.
#[derive(Debug)]
pub struct TransferParams(pub(super) String);

/// A prefill leg's answer, of any API.
#[derive(Deserialize)]
pub(super) struct Answer<'a> {
    #[serde(default, borrow)]
    kv_transfer_params: Option<&'a RawValue>,
    #[serde(default, borrow)]
    choices: Vec<Choice<'a>>,
    #[serde(default, borrow)]
    incomplete_details: Option<Incomplete<'a>>,
    /// Of Messages.
    #[serde(default, borrow)]
    stop_reason: Option<Cow<'a, str>>,
}

#[derive(Deserialize)]
struct Choice<'a> {
    #[serde(default, borrow)]
    finish_reason: Option<Cow<'a, str>>,
}

#[derive(Deserialize)]
struct Incomplete<'a> {
    #[serde(default, borrow)]
    reason: Option<Cow<'a, str>>,
}

impl<'a> Answer<'a> {
    /// What a connector reads of `kv_transfer_params`, and the text of all of them without braces.
    pub(super) fn params<P: Deserialize<'a>>(&self) -> Result<(P, &'a str), TransferError> {
        let params = self.kv_transfer_params.ok_or(TransferError::NoParams)?;
        let read = serde_json::from_str(params.get()).map_err(|_| TransferError::NoParams)?;
        let inside = params.get().strip_prefix('{');
        let inside = inside.and_then(|inside| inside.strip_suffix('}'));
        Ok((read, inside.ok_or(TransferError::NoParams)?))
    }

    /// True if it ended because its length limit of one token was reached.
    pub(super) fn is_cut_at_one_token(&self) -> bool {
        let is_cut =
            |incomplete: &Incomplete<'_>| incomplete.reason.as_deref() == Some("max_output_tokens");
        match &self.choices[..] {
            [choice] => choice.finish_reason.as_deref() == Some("length"),
            [] => {
                self.incomplete_details.as_ref().is_some_and(is_cut)
                    || self.stop_reason.as_deref() == Some("max_tokens")
            }
            _ => false,
        }
    }
}

/// Whether `remote_block_ids` names any block. A decode engine that is to fetch blocks and gets no block ids crashes.
pub(super) fn has_blocks(remote_block_ids: &RawValue) -> bool {
    remote_block_ids
        .get()
        .contains(|c: char| c.is_ascii_digit())
}

words! {
    /// Why there is no KV transfer.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
    pub enum TransferError {
        #[error("the answer to the prefill leg is not a completion")]
        Malformed = "malformed",
        /// The answer has no usable `kv_transfer_params`: the engine has no connector, or another one.
        #[error(
            "the prefill worker did not say where its KV blocks are (is a KV connector configured?)"
        )]
        NoParams = "no_params",
        /// The answer ended before its one token, so the engine has freed the blocks.
        #[error("the prefill worker stopped before its first token")]
        Stopped = "stopped",
        #[error("the prefill worker's bootstrap server has not answered yet")]
        NoBootstrap = "no_bootstrap",
        /// The prefill worker has several dp ranks, and it is unknown which of them computes the prompt.
        #[error("it is unknown which dp rank of the prefill worker would compute the prompt")]
        NoRank = "no_rank",
    }
}

/// A text as JSON.
pub(super) fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}
