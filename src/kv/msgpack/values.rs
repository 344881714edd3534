//! The values of an event's fields: hashes, media, extra keys, tokens after blocks.

use super::read::{Cursor, Read};
use super::{BLOCKS_MAX, Reader};
use crate::kv::event::{EngineHash, ExtraKey, Medium};

impl Reader<'_> {
    pub(super) fn or_nil<T>(&mut self, read: impl FnOnce(&mut Self) -> Read<T>) -> Read<Option<T>> {
        if self.cursor.nil() {
            return Ok(None);
        }
        read(self).map(Some)
    }

    pub(super) fn text(&mut self) -> Read<Box<str>> {
        self.cursor.text().map(Box::from)
    }

    pub(super) fn i64(&mut self) -> Read<i64> {
        let value = self.cursor.integer()?;
        i64::try_from(value).map_err(|_| self.cursor.fault(format!("{value} is above 2^63")))
    }

    /// Counts hashes or extra keys towards [`BLOCKS_MAX`].
    pub(super) fn count_blocks(&mut self, count: usize) -> Read<()> {
        match self.blocks_left.checked_sub(count) {
            Some(left) => {
                self.blocks_left = left;
                Ok(())
            }
            None => Err(self.cursor.fault(format!(
                "more than {BLOCKS_MAX} hashes and extra keys in one batch"
            ))),
        }
    }

    pub(super) fn hashes(&mut self) -> Read<Vec<EngineHash>> {
        let mut hashes = Vec::new();
        self.hashes_into(&mut hashes)?;
        Ok(hashes)
    }

    pub(super) fn hashes_into(&mut self, hashes: &mut Vec<EngineHash>) -> Read<()> {
        let len = self.cursor.array()?;
        self.count_blocks(len)?;
        hashes.reserve(len);
        for index in 0..len {
            hashes.push(self.hash().map_err(|fault| fault.under_item(index))?);
        }
        Ok(())
    }

    /// Reads a hash: an integer, or a digest, of which the last 8 bytes are used (as [`EngineHash`] documents).
    pub(super) fn hash(&mut self) -> Read<EngineHash> {
        if let Some(hash) = self.cursor.u64() {
            return Ok(EngineHash(hash));
        }
        match self.cursor.blob()? {
            None => {
                // Older engines send a signed integer; its 64 bits are the hash.
                self.cursor.integer().map(|value| EngineHash(value as u64))
            }
            Some([]) => Err(self.cursor.fault("a hash without bytes")),
            Some(digest) => {
                let low = &digest[digest.len().saturating_sub(8)..];
                Ok(EngineHash(
                    low.iter()
                        .fold(0, |hash, &byte| hash << 8 | u64::from(byte)),
                ))
            }
        }
    }

    pub(super) fn medium(&mut self) -> Read<Medium> {
        if self.cursor.nil() {
            return Ok(Medium::Unspecified);
        }
        self.cursor.text().map(Medium::named)
    }

    /// Reads the extra keys: one list for each block, nil for a block without keys, or a single nil if no block has
    /// any. The result stays empty, without an allocation, until a block has keys.
    pub(super) fn extra_keys(&mut self) -> Read<Vec<Vec<ExtraKey>>> {
        if self.cursor.nil() {
            return Ok(Vec::new());
        }
        let len = self.cursor.array()?;
        self.count_blocks(len)?;
        let mut blocks: Vec<Vec<ExtraKey>> = Vec::new();
        for index in 0..len {
            if self.cursor.nil() {
                if !blocks.is_empty() {
                    blocks.push(Vec::new());
                }
                continue;
            }
            let keys = self.keys().map_err(|fault| fault.under_item(index))?;
            if blocks.is_empty() && !keys.is_empty() {
                blocks.reserve_exact(len);
                blocks.resize_with(index, Vec::new);
            }
            if !keys.is_empty() || !blocks.is_empty() {
                blocks.push(keys);
            }
        }
        Ok(blocks)
    }

    /// Reads the tokens after each block.
    pub(super) fn lookahead(&mut self) -> Read<Vec<Box<[u32]>>> {
        if self.cursor.nil() {
            return Ok(Vec::new());
        }
        let len = self.cursor.array()?;
        self.count_blocks(len)?;
        let mut blocks = Vec::with_capacity(len);
        for index in 0..len {
            let tokens = self.or_nil(|reader| reader.cursor.u32s());
            let tokens = tokens.map_err(|fault| fault.under_item(index))?;
            blocks.push(tokens.unwrap_or_default().into());
        }
        Ok(blocks)
    }

    fn keys(&mut self) -> Read<Vec<ExtraKey>> {
        let len = self.cursor.array()?;
        self.count_blocks(len)?;
        let mut keys = Vec::with_capacity(len);
        for index in 0..len {
            keys.push(self.extra_key().map_err(|fault| fault.under_item(index))?);
        }
        Ok(keys)
    }

    /// A key of an unknown type is kept as raw bytes: blocks whose keys differ have different content, whatever
    /// the keys mean.
    fn extra_key(&mut self) -> Read<ExtraKey> {
        for read in KEY_TYPES {
            // What turns out to be of another type may have been read in part.
            let mut typed = self.cursor.clone();
            if let Some(key) = read(&mut typed) {
                self.cursor = typed;
                return Ok(key);
            }
        }
        self.cursor.skip().map(|raw| ExtraKey::Blob(raw.into()))
    }
}

/// Reads a key of one type. `None` if something else is next; the cursor may then be anywhere.
type ReadKey = fn(&mut Cursor<'_>) -> Option<ExtraKey>;

const KEY_TYPES: [ReadKey; 4] = [text, blob, number, multimodal];

fn text(cursor: &mut Cursor<'_>) -> Option<ExtraKey> {
    cursor.text().ok().map(|text| ExtraKey::Text(text.into()))
}

fn blob(cursor: &mut Cursor<'_>) -> Option<ExtraKey> {
    let bytes = cursor.blob().ok().flatten()?;
    Some(ExtraKey::Blob(bytes.into()))
}

fn number(cursor: &mut Cursor<'_>) -> Option<ExtraKey> {
    let number = cursor.integer().ok()?;
    i64::try_from(number).ok().map(ExtraKey::Number)
}

/// Reads `[identifier, offset]`.
fn multimodal(cursor: &mut Cursor<'_>) -> Option<ExtraKey> {
    if cursor.array().ok()? != 2 {
        return None;
    }
    let identifier = cursor.text().ok()?.into();
    let offset = i64::try_from(cursor.integer().ok()?).ok()?;
    Some(ExtraKey::Multimodal { identifier, offset })
}
