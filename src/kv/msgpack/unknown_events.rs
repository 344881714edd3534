//! The blocks that an event of an unknown type names.

use super::read::Read;
use super::{Fields, Reader};

impl Reader<'_> {
    /// Reads what an event of an unknown type may name its blocks by: one hash, or a list.
    pub(super) fn hashes_of_unknown(&mut self, fields: &mut Fields) -> Read<()> {
        let start = self.cursor.clone();
        let read = if self.cursor.is_array() {
            self.hashes()
        } else {
            self.or_nil(Self::hash).map(Vec::from_iter)
        };
        match read {
            Ok(hashes) => fields.hashes.get_or_insert_default().extend(hashes),
            Err(_) => {
                fields.has_unreadable_hashes = true;
                self.cursor = start;
                self.cursor.skip()?;
            }
        }
        Ok(())
    }

    /// Whether a field of an event of an unknown type may name the blocks that it is about. A field of an array has no
    /// name.
    pub(super) fn may_name_blocks(key: &[u8]) -> bool {
        let has_hash = key.windows(4).any(|part| part == b"hash");
        key.is_empty() || has_hash && key != b"parent_block_hash"
    }
}
