//! Encodes a batch as the msgpack payload that vLLM publishes for it, in each layout that its releases use.

use rmp::encode::{self, ByteBuf};

use super::settings::{Hashes, Layout};
use crate::kv::event::{Batch, EngineHash, Event, ExtraKey, Medium, Removed, Stored};

/// The payload of one published message.
pub fn encode(batch: &Batch, layout: Layout, hashes: Hashes) -> Vec<u8> {
    let mut out = Encoder {
        buffer: ByteBuf::with_capacity(64 + 16 * batch.events.len()),
        layout,
        hashes,
    };
    out.array(if batch.rank.is_some() { 3 } else { 2 });
    out.float(batch.timestamp);
    out.array(batch.events.len());
    for event in &batch.events {
        match event {
            Event::Stored(stored) => out.stored(stored),
            Event::Removed(removed) => out.removed(removed),
            Event::Cleared { ownership } => out.cleared(ownership.as_deref()),
            Event::Unknown { kind, .. } => out.head(kind, 0),
        }
    }
    if let Some(rank) = batch.rank {
        out.uint(u64::from(rank));
    }
    out.buffer.into_vec()
}

struct Encoder {
    buffer: ByteBuf,
    layout: Layout,
    hashes: Hashes,
}

/// A field of an event that not all releases write, with its name.
type OptionalField<'a> = (&'static str, Option<Scalar<'a>>);

enum Scalar<'a> {
    Uint(u64),
    Text(&'a str),
}

impl Encoder {
    /// Begins an event with its type; `fields` other fields follow.
    fn head(&mut self, kind: &str, fields: usize) {
        match self.layout {
            Layout::Map => {
                self.map(1 + fields);
                self.text("type");
            }
            Layout::Array => self.array(1 + fields),
        }
        self.text(kind);
    }

    /// The name of the next field, where the layout has names.
    fn key(&mut self, key: &str) {
        if self.layout == Layout::Map {
            self.text(key);
        }
    }

    /// The optional fields that an event has: a map leaves out those without a value, an array has every field up to the last
    /// one with a value.
    fn present<'a>(&self, mut fields: Vec<OptionalField<'a>>) -> Vec<OptionalField<'a>> {
        match self.layout {
            Layout::Map => fields.retain(|(_, value)| value.is_some()),
            Layout::Array => {
                let last = fields.iter().rposition(|(_, value)| value.is_some());
                fields.truncate(last.map_or(0, |last| last + 1));
            }
        }
        fields
    }

    fn optional_fields(&mut self, fields: &[OptionalField<'_>]) {
        for (name, value) in fields {
            self.key(name);
            match value {
                Some(Scalar::Uint(number)) => self.uint(*number),
                Some(Scalar::Text(text)) => self.text(text),
                None => self.nil(),
            }
        }
    }

    fn stored(&mut self, stored: &Stored) {
        let location = &stored.location;
        let number = |value: Option<u32>| value.map(|value| Scalar::Uint(value.into()));
        let optional = self.present(vec![
            ("group_idx", number(location.group)),
            (
                "kv_cache_spec_kind",
                stored.spec_kind.as_deref().map(Scalar::Text),
            ),
            (
                "kv_cache_spec_sliding_window",
                number(stored.sliding_window),
            ),
            ("locality", location.locality.as_deref().map(Scalar::Text)),
            ("ownership", location.ownership.as_deref().map(Scalar::Text)),
            ("session_id", stored.session_id.as_deref().map(Scalar::Text)),
        ]);
        // Releases whose events are arrays have no lookahead.
        let has_lookahead =
            self.layout == Layout::Map && stored.extra_keys.iter().flatten().any(is_lookahead);
        self.head(
            "BlockStored",
            8 + optional.len() + usize::from(has_lookahead),
        );
        self.key("block_hashes");
        self.hashes(&stored.hashes);
        self.key("parent_block_hash");
        self.or_nil(stored.parent, Self::hash);
        self.key("token_ids");
        self.array(stored.token_ids.len());
        for &token in &stored.token_ids {
            self.uint(u64::from(token));
        }
        self.key("block_size");
        self.uint(u64::from(stored.block_size));
        self.key("lora_id");
        self.or_nil(stored.lora_id, Self::int);
        self.key("medium");
        self.medium(&location.medium);
        self.key("lora_name");
        self.or_nil(stored.lora_name.as_deref(), Self::text);
        self.key("extra_keys");
        self.extra_keys(stored);
        self.optional_fields(&optional);
        if has_lookahead {
            self.key("lookahead_token_ids");
            self.lookahead(stored);
        }
    }

    /// One list for each block.
    fn lookahead(&mut self, stored: &Stored) {
        self.array(stored.hashes.len());
        for at in 0..stored.hashes.len() {
            let tokens = stored.lookahead(at);
            self.array(tokens.len());
            for &token in tokens {
                self.uint(u64::from(token));
            }
        }
    }

    fn removed(&mut self, removed: &Removed) {
        let location = &removed.location;
        let group = location.group.map(|group| Scalar::Uint(group.into()));
        let optional = self.present(vec![
            ("group_idx", group),
            ("locality", location.locality.as_deref().map(Scalar::Text)),
            ("ownership", location.ownership.as_deref().map(Scalar::Text)),
        ]);
        self.head("BlockRemoved", 2 + optional.len());
        self.key("block_hashes");
        self.hashes(&removed.hashes);
        self.key("medium");
        self.medium(&location.medium);
        self.optional_fields(&optional);
    }

    fn cleared(&mut self, ownership: Option<&str>) {
        self.head("AllBlocksCleared", usize::from(ownership.is_some()));
        if let Some(ownership) = ownership {
            self.key("ownership");
            self.text(ownership);
        }
    }

    /// One entry for each block. Engines send the cache salt only here, as the last key of the first block.
    fn extra_keys(&mut self, stored: &Stored) {
        self.array(stored.hashes.len());
        for at in 0..stored.hashes.len() {
            let salt = stored.cache_salt.as_deref().filter(|_| at == 0);
            let keys = stored.keys(at).iter().filter(|key| !is_lookahead(key));
            let keys: Vec<&ExtraKey> = keys.collect();
            if keys.is_empty() && salt.is_none() {
                self.nil();
                continue;
            }
            self.array(keys.len() + usize::from(salt.is_some()));
            for key in keys {
                match key {
                    ExtraKey::Text(text) => self.text(text),
                    ExtraKey::Blob(bytes) => self.bytes(bytes),
                    ExtraKey::Number(number) => self.int(*number),
                    ExtraKey::Multimodal { identifier, offset } => {
                        self.array(2);
                        self.text(identifier);
                        self.int(*offset);
                    }
                    ExtraKey::Lookahead(_) => {}
                }
            }
            if let Some(salt) = salt {
                self.text(salt);
            }
        }
    }

    fn medium(&mut self, medium: &Medium) {
        match medium {
            Medium::Unspecified => self.nil(),
            Medium::Gpu => self.text("GPU"),
            Medium::Cpu => self.text("CPU"),
            Medium::Disk => self.text("STORAGE"),
            Medium::Other(name) => self.text(name),
        }
    }

    fn hashes(&mut self, hashes: &[EngineHash]) {
        self.array(hashes.len());
        for &hash in hashes {
            self.hash(hash);
        }
    }

    /// A hash is written as an integer, or as a digest of 32 bytes that ends with the integer's 8 bytes.
    fn hash(&mut self, hash: EngineHash) {
        match self.hashes {
            Hashes::Int => self.uint(hash.0),
            Hashes::Bytes => {
                let mut digest = [0; 32];
                for (part, bits) in digest.chunks_exact_mut(8).zip([17, 34, 51, 0]) {
                    part.copy_from_slice(&hash.0.rotate_left(bits).to_be_bytes());
                }
                self.bytes(&digest);
            }
        }
    }

    fn or_nil<T>(&mut self, value: Option<T>, write: fn(&mut Self, T)) {
        match value {
            Some(value) => write(self, value),
            None => self.nil(),
        }
    }

    fn array(&mut self, len: usize) {
        let len = u32::try_from(len).expect("lists in memory are shorter than 2^32");
        written(encode::write_array_len(&mut self.buffer, len));
    }

    fn map(&mut self, len: usize) {
        let len = u32::try_from(len).expect("an event has a few fields");
        written(encode::write_map_len(&mut self.buffer, len));
    }

    fn text(&mut self, text: &str) {
        written(encode::write_str(&mut self.buffer, text));
    }

    fn bytes(&mut self, bytes: &[u8]) {
        written(encode::write_bin(&mut self.buffer, bytes));
    }

    fn uint(&mut self, value: u64) {
        written(encode::write_uint(&mut self.buffer, value));
    }

    fn int(&mut self, value: i64) {
        written(encode::write_sint(&mut self.buffer, value));
    }

    fn float(&mut self, value: f64) {
        written(encode::write_f64(&mut self.buffer, value));
    }

    fn nil(&mut self) {
        written(encode::write_nil(&mut self.buffer));
    }
}

/// Unwraps the result of a write to the buffer, which cannot fail.
fn written<T, E: std::fmt::Debug>(result: Result<T, E>) {
    result.expect("writing to memory cannot fail");
}

fn is_lookahead(key: &ExtraKey) -> bool {
    matches!(key, ExtraKey::Lookahead(_))
}

#[cfg(test)]
mod tests;
