//! State that clients keep: what they bring back is opened, what they are given is sealed.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::item::{self, Ids};
use super::members::{self, Members, put, put_text};
use crate::ids::Tenant;
use crate::openai::error::ApiError;
use crate::state_token::{self, Content, KeyRing, Kind, Payload, TooLarge, Verified};

/// To seal or to open so much takes the better part of a millisecond, which a carrier does not wait for.
pub(super) const LARGE_BYTES: usize = 64 << 10;

/// Opens for one request of one tenant, at one time.
#[derive(Debug)]
pub(super) struct StateReader<'a> {
    pub(super) key_ring: &'a KeyRing,
    pub(super) tenant: Tenant,
    /// Seconds since 1970.
    pub(super) now_s: u64,
    pub(super) model: &'a str,
    /// Of all that it has opened.
    pub(super) plain_bytes: AtomicU64,
}

/// What became of an item with sealed content that a client brought back.
#[derive(Debug)]
pub(super) enum DecodedItem {
    /// The item that was in it, as it is written.
    Item(String),
    /// Its items are in the input already, or are of no use to this model.
    Nothing,
}

impl StateReader<'_> {
    fn verify<'t>(&self, text: &'t str) -> Result<Verified<'t>, ApiError> {
        self.key_ring
            .verify(self.now_s, self.tenant, text)
            .map_err(|rejected| ApiError::rejected_state_token(&rejected))
    }

    /// A small text may unpack to a large one, and a request may have many.
    fn unpack(&self, verified: Verified<'_>) -> Result<Payload, ApiError> {
        let bytes = verified.plain_bytes;
        let before = self.plain_bytes.fetch_add(bytes, Ordering::Relaxed);
        let max = self.key_ring.plain_bytes_max();
        if before.saturating_add(bytes) > max {
            return Err(ApiError::too_large_to_carry(&TooLarge::Items { max }));
        }
        self.key_ring
            .unpack(verified)
            .map_err(|rejected| ApiError::rejected_state_token(&rejected))
    }

    /// Opens what an input item has sealed; `text` is what it has.
    pub(super) fn item(&self, text: &str) -> Result<DecodedItem, ApiError> {
        let verified = self.verify(text)?;
        match verified.kind {
            // One model's thoughts mean nothing to another.
            Kind::Reasoning if verified.model != self.model => Ok(DecodedItem::Nothing),
            Kind::Reasoning => {
                let opened = self.unpack(verified)?;
                let first = opened.each().first().map(|raw| raw.get().to_owned());
                Ok(first.map_or(DecodedItem::Nothing, DecodedItem::Item))
            }
            Kind::Turn => Ok(DecodedItem::Nothing),
            Kind::Compaction => Err(ApiError::unreadable_content(text)),
        }
    }

    /// The conversation that a whole response object brings back: a JSON array of items.
    pub(super) fn conversation(&self, response: &str) -> Result<String, ApiError> {
        const PARAM: &str = "previous_response";
        let wrong = || ApiError::wrong_type(PARAM, "a response object");
        let members = Members::parse(response).map_err(|_| wrong())?;
        if members.get("object") != Some("\"response\"") {
            return Err(wrong());
        }
        let output = members.get("output").and_then(members::list);
        for raw in output.ok_or_else(wrong)?.into_iter().rev() {
            let Ok(item) = Members::parse(raw) else {
                continue;
            };
            if item.get("type") != Some("\"reasoning\"") {
                continue;
            }
            let Some(text) = item.text("encrypted_content").filter(|it| !it.is_empty()) else {
                continue;
            };
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
        let why = "it has no state: create it with `store` false and \
                   `include` with 'reasoning.encrypted_content'";
        Err(ApiError::wrong_value(PARAM, why))
    }
}

/// Seals what one response gives away.
#[derive(Clone, Debug)]
pub(super) struct StateSigner {
    pub(super) key_ring: Arc<KeyRing>,
    pub(super) tenant: Tenant,
    /// Seconds since 1970.
    pub(super) now_s: u64,
    pub(super) response: String,
    pub(super) model: String,
}

impl StateSigner {
    fn seal(&self, kind: Kind, items: &str) -> Option<String> {
        let content = Content {
            kind,
            response_id: &self.response,
            model: &self.model,
            items,
        };
        // What is too large is counted, and stays away.
        self.key_ring.issue(self.now_s, self.tenant, &content).ok()
    }

    /// A reasoning item with itself sealed in it; `None` where it cannot be.
    pub(super) fn reasoning(&self, item: &[u8]) -> Option<Vec<u8>> {
        let text = std::str::from_utf8(item).ok()?;
        let sealed = self.seal(Kind::Reasoning, &format!("[{text}]"))?;
        let mut out = item.strip_suffix(b"}")?.to_vec();
        put(&mut out, "encrypted_content", "");
        put_text(&mut out, &sealed);
        out.push(b'}');
        Some(out)
    }

    /// The item that carries a whole conversation, as it is added and as it is done.
    pub(super) fn state(&self, ids: &Ids, place: usize, items: &str) -> Option<(Vec<u8>, Vec<u8>)> {
        let sealed = self.seal(Kind::Turn, items)?;
        let mut added = br#"{"id":"#.to_vec();
        put_text(&mut added, &ids.output(item::prefix("reasoning"), place));
        put(&mut added, "type", "\"reasoning\"");
        put(&mut added, "summary", "[]");
        let mut done = added.clone();
        put(&mut added, "encrypted_content", "null");
        added.push(b'}');
        put(&mut done, "encrypted_content", "");
        put_text(&mut done, &sealed);
        done.push(b'}');
        Some((added, done))
    }
}

/// Whether a text is, or pretends to be, one of ours.
pub(super) fn is_ours(text: &str) -> bool {
    text.starts_with(state_token::PREFIX)
}

/// Lists of items as one list.
pub(super) fn joined(lists: &[&[u8]]) -> String {
    let mut out = String::from("[");
    for list in lists {
        let inner = std::str::from_utf8(list).unwrap_or_default().trim();
        let inner = inner.strip_prefix('[').and_then(|it| it.strip_suffix(']'));
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
    fn lists_are_joined_whether_they_are_empty_or_not() {
        assert_eq!(joined(&[]), "[]");
        assert_eq!(joined(&[b"[]", b"[1]", b"[ ]", b" [2, 3]"]), "[1,2, 3]");
    }
}
