//! What SGLang writes in another way than vLLM.

use super::read::Read;
use super::{Fields, Reader};

impl Reader<'_> {
    /// Reads token ids. With some kinds of speculative decoding they are pairs of a token and the one after it: then the
    /// second of each is returned too.
    pub(super) fn token_ids(&mut self) -> Read<(Vec<u32>, Vec<u32>)> {
        let mut ahead = self.cursor.clone();
        let len = ahead.array()?;
        if len == 0 || !ahead.is_array() {
            return Ok((self.cursor.u32s()?, Vec::new()));
        }
        self.cursor = ahead;
        let (mut ids, mut next) = (Vec::with_capacity(len), Vec::with_capacity(len));
        for index in 0..len {
            let pair = self
                .cursor
                .u32s()
                .map_err(|fault| fault.under_item(index))?;
            let [first, second] = pair[..] else {
                return Err(self
                    .cursor
                    .fault("token ids that are neither numbers nor pairs"));
            };
            ids.push(first);
            next.push(second);
        }
        Ok((ids, next))
    }

    /// Reads a map of further fields at the end of an event that is an array.
    pub(super) fn named_fields(&mut self, fields: &mut Fields) -> Read<()> {
        for _ in 0..self.cursor.map()? {
            match self.cursor.name()? {
                key @ (b"cache_salt" | b"session_id" | b"lora_name") if !self.cursor.is_map() => {
                    self.field(key, fields)
                        .map_err(|fault| fault.under_name(key))?;
                }
                _ => {
                    self.cursor.skip()?;
                }
            }
        }
        Ok(())
    }

    /// The token after each block, if blocks have this many tokens.
    pub(super) fn tokens_after(next_ids: &[u32], block_size: u32) -> Vec<Box<[u32]>> {
        let blocks = next_ids.chunks_exact((block_size as usize).max(1));
        let last = |block: &[u32]| Box::from(&block[block.len() - 1..]);
        blocks.map(last).collect()
    }
}
