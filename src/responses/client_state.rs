//! State that clients keep as state tokens, in the `encrypted_content` of reasoning items.
//!
//! [`StateReader`] reads the tokens in one request, [`StateSigner`] issues those of one response.

use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;

use super::item::{self, Ids};
use super::known_json;
use super::members::{Members, put, put_string, put_text};
use crate::ids::Tenant;
use crate::openai::error::ApiError;
use crate::state_token::{self, Content, KeyRing, Kind, Payload, TooLarge, Verified};

/// Tokens of this size take most of a millisecond to sign or verify, so that happens on the offload thread.
pub(super) const LARGE_BYTES: usize = 64 << 10;

/// Reads the state tokens of one request. Limits their unpacked size together.
#[derive(Debug)]
pub(super) struct StateReader<'a> {
    pub(super) key_ring: &'a KeyRing,
    pub(super) tenant: Tenant,
    /// Unix seconds.
    pub(super) now_s: u64,
    pub(super) model: &'a str,
    /// Unpacked bytes of all tokens so far.
    pub(super) plain_bytes: AtomicU64,
}

impl<'a> StateReader<'a> {
    pub(super) fn new(key_ring: &'a KeyRing, tenant: Tenant, now_s: u64, model: &'a str) -> Self {
        Self {
            key_ring,
            tenant,
            now_s,
            model,
            plain_bytes: AtomicU64::new(0),
        }
    }

    fn verify<'t>(&self, text: &'t str) -> Result<Verified<'t>, ApiError> {
        self.key_ring
            .verify(self.now_s, self.tenant, text)
            .map_err(|rejected| ApiError::rejected_state_token(&rejected))
    }

    /// Checks the limit first: many small tokens may unpack to a lot of text.
    fn unpack(&self, verified: Verified<'_>) -> Result<Payload, ApiError> {
        let bytes = verified.plain_bytes;
        let before = self.plain_bytes.fetch_add(bytes, Ordering::Relaxed);
        let max = self.key_ring.plain_bytes_max();
        if before.saturating_add(bytes) > max {
            return Err(ApiError::state_token_too_large(&TooLarge::Items { max }));
        }
        self.key_ring
            .unpack(verified)
            .map_err(|rejected| ApiError::rejected_state_token(&rejected))
    }

    /// The item, as JSON, in the token of an input item. `None` if there is nothing to add: the items are in the input
    /// already, or it is another model's reasoning.
    pub(super) fn item(&self, text: &str) -> Result<Option<String>, ApiError> {
        let verified = self.verify(text)?;
        match verified.kind {
            // Reasoning is of use only to the model that produced it.
            Kind::Reasoning if verified.model != self.model => Ok(None),
            Kind::Reasoning | Kind::Compaction => {
                let opened = self.unpack(verified)?;
                let first = opened.each().first().map(|raw| raw.get().to_owned());
                Ok(first)
            }
            Kind::Turn => Ok(None),
        }
    }

    /// The conversation in the token of a `previous_response` object: a JSON array of items.
    pub(super) fn conversation(&self, response: &str) -> Result<String, ApiError> {
        const PARAM: &str = "previous_response";
        let wrong = || ApiError::wrong_type(PARAM, "a response object");
        let members = Members::parse(response).map_err(|_| wrong())?;
        if members.get("object") != Some("\"response\"") {
            return Err(wrong());
        }
        let output = members.get("output").and_then(known_json::values);
        let tokens = output.ok_or_else(wrong)?.filter_map(|raw| {
            let item = known_json::object(raw)?;
            let is_reasoning = item.get("type") == Some("\"reasoning\"");
            let text = is_reasoning.then(|| item.text("encrypted_content"))?;
            text.filter(|text| !text.is_empty())
        });
        let tokens: Vec<Cow<'_, str>> = tokens.collect();
        for text in tokens.into_iter().rev() {
            let verified = self.verify(&text)?;
            if verified.kind != Kind::Turn {
                continue;
            }
            let opened = self.unpack(verified)?;
            if members.text("id").as_deref() != Some(&opened.response_id) {
                return Err(ApiError::unreadable_content(&text));
            }
            return Ok(opened.items);
        }
        let why = "it contains no state token: create it with `store` set to false and \
                   'reasoning.encrypted_content' in `include`";
        Err(ApiError::wrong_value(PARAM, why))
    }
}

/// What a client needs to keep the conversation itself.
#[derive(Debug)]
pub(super) struct ClientState {
    pub(super) signer: StateSigner,
    /// History and new input, oldest first.
    pub(super) lists: Vec<Bytes>,
}

/// The router's own output item with the state token, as the `added` and the `done` event have it.
#[derive(Debug)]
pub(super) struct StateItem {
    pub(super) added: Vec<u8>,
    pub(super) done: Vec<u8>,
}

/// Issues the state tokens of one response.
#[derive(Clone, Debug)]
pub(super) struct StateSigner {
    pub(super) key_ring: Arc<KeyRing>,
    pub(super) tenant: Tenant,
    /// Unix seconds.
    pub(super) now_s: u64,
    pub(super) response: String,
    pub(super) model: String,
}

impl StateSigner {
    fn sign(&self, kind: Kind, items: &str) -> Option<String> {
        let content = Content {
            kind,
            response_id: &self.response,
            model: &self.model,
            items,
        };
        // Content that is too large is counted and left out.
        self.key_ring.issue(self.now_s, self.tenant, &content).ok()
    }

    /// A reasoning item with a token of itself; `None` if that is too large.
    pub(super) fn reasoning(&self, item: &[u8]) -> Option<Vec<u8>> {
        let text = std::str::from_utf8(item).ok()?;
        let token = self.sign(Kind::Reasoning, &format!("[{text}]"))?;
        let mut out = item.strip_suffix(b"}")?.to_vec();
        put_string(&mut out, "encrypted_content", &token);
        out.push(b'}');
        Some(out)
    }

    /// The item that stands for a compacted conversation: `summary` is the message that a model gets for it. `None` if
    /// it is too large.
    pub(super) fn compaction(&self, id: &str, summary: &[u8]) -> Option<Vec<u8>> {
        let summary = std::str::from_utf8(summary).ok()?;
        let token = self.sign(Kind::Compaction, &format!("[{summary}]"))?;
        let mut item = br#"{"id":"#.to_vec();
        put_text(&mut item, id);
        put(&mut item, "type", "\"compaction\"");
        put_string(&mut item, "encrypted_content", &token);
        item.push(b'}');
        Some(item)
    }

    /// The reasoning item with a token of the whole conversation `items`, at `index` of the output.
    pub(super) fn state_item(&self, ids: &Ids, index: usize, items: &str) -> Option<StateItem> {
        let token = self.sign(Kind::Turn, items)?;
        let mut added = br#"{"id":"#.to_vec();
        put_text(&mut added, &ids.output(item::prefix("reasoning"), index));
        put(&mut added, "type", "\"reasoning\"");
        put(&mut added, "summary", "[]");
        let mut done = added.clone();
        put(&mut added, "encrypted_content", "null");
        added.push(b'}');
        put_string(&mut done, "encrypted_content", &token);
        done.push(b'}');
        Some(StateItem { added, done })
    }
}

pub(super) fn is_state_token(text: &str) -> bool {
    text.starts_with(state_token::PREFIX)
}

/// Concatenates JSON arrays of items.
pub(super) fn joined(lists: &[&[u8]]) -> String {
    let mut out = String::from("[");
    for list in lists {
        let inner = std::str::from_utf8(list).unwrap_or_default().trim();
        let inner = inner
            .strip_prefix('[')
            .and_then(|rest| rest.strip_suffix(']'));
        let inner = inner.unwrap_or_default().trim();
        if inner.is_empty() {
            continue;
        }
        if out.len() > 1 {
            out.push(',');
        }
        out.push_str(inner);
    }
    out.push(']');
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn empty_and_filled_lists_are_joined() {
        assert_eq!(joined(&[]), "[]");
        assert_eq!(joined(&[b"[]", b"[1]", b"[ ]", b" [2, 3]"]), "[1,2, 3]");
    }
}
