//! Splits canonical bytes into blocks and hashes each block.

use smallvec::SmallVec;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::types::{HashedPrompt, LocalBlock, Section};

/// The xxh3 seed that other routers use for block hashes too.
const SEED: u64 = 1337;
/// After this many blocks of one length, the next blocks are twice as long. A cached prefix is then measured to
/// within 1/32 of its length, and a 4 MB prompt has about 700 blocks instead of 60,000.
const BLOCKS_PER_LENGTH: usize = 32;
const MAX_BLOCK_BYTES: usize = 8192;

/// Hashes the sections of a prompt. Sections arrive in any order, each as a sequence of byte strings.
#[derive(Debug)]
pub(super) struct BlockHasher {
    block_bytes: usize,
    /// Finished blocks of all sections, in order of arrival.
    blocks: Vec<LocalBlock>,
    /// Finished sections: their blocks (a range of `blocks`) and canonical bytes.
    sections: SmallVec<[(Section, std::ops::Range<usize>, u64); 2]>,
    current: Option<Section>,
    /// Index of the current section's first block.
    first_block: usize,
    /// Canonical bytes of the current section.
    bytes: u64,
    /// Bytes of the block that is not full yet.
    open: Vec<u8>,
    /// Bytes that count toward the open block without being in `open`, for images and other media.
    open_extra: u32,
    /// Length of the next blocks.
    length: usize,
    token_ids: Vec<u32>,
    /// Names under which an engine keeps images or sounds.
    pub(super) media_names: u32,
}

impl BlockHasher {
    pub(super) fn new(block_bytes: u32) -> Self {
        Self {
            block_bytes: (block_bytes as usize).clamp(16, MAX_BLOCK_BYTES),
            blocks: Vec::with_capacity(64),
            sections: SmallVec::new(),
            current: None,
            first_block: 0,
            bytes: 0,
            open: Vec::with_capacity(256),
            open_extra: 0,
            length: 0,
            token_ids: Vec::new(),
            media_names: 0,
        }
    }

    pub(super) fn begin(&mut self, section: Section) {
        self.token_ids.clear();
        self.current = Some(section);
        self.first_block = self.blocks.len();
        self.bytes = 0;
        self.length = self.block_bytes;
    }

    pub(super) fn end(&mut self) {
        let Some(section) = self.current.take() else {
            return;
        };
        // The next turn appends to the conversation, so its last block stays open. Other sections are complete.
        if section != Section::Conversation && !self.open.is_empty() {
            self.close_block();
        }
        self.open.clear();
        self.open_extra = 0;
        let range = self.first_block..self.blocks.len();
        // If a key is repeated, engines use the last value. So each section has one entry, however long the body is.
        self.sections.retain(|(other, _, _)| *other != section);
        self.sections.push((section, range, self.bytes));
    }

    pub(super) fn feed(&mut self, mut bytes: &[u8]) {
        self.bytes += bytes.len() as u64;
        if !self.open.is_empty() {
            let missing = self.length.saturating_sub(self.open.len()).min(bytes.len());
            self.open.extend_from_slice(&bytes[..missing]);
            bytes = &bytes[missing..];
            if self.open.len() < self.length {
                return;
            }
            self.close_block();
        }
        while bytes.len() >= self.length {
            let (block, rest) = bytes.split_at(self.length);
            self.push_block(xxh3_64_with_seed(block, SEED), block.len() as u32);
            bytes = rest;
        }
        self.open.extend_from_slice(bytes);
    }

    /// Adds an image, a sound or a file. Engines compute a number of tokens for it that does not depend on its bytes,
    /// so only a hash of `bytes` is fed, and `counted_bytes` is added to the length.
    pub(super) fn feed_media(&mut self, bytes: &[u8], counted_bytes: u32) {
        self.feed(&xxh3_64_with_seed(bytes, SEED).to_le_bytes());
        self.bytes += u64::from(counted_bytes);
        if self.open.is_empty() {
            // The hash completed a block, so that block counts the media.
            if let Some(block) = self.blocks.last_mut() {
                block.bytes = block.bytes.saturating_add(counted_bytes);
            }
        } else {
            self.open_extra = self.open_extra.saturating_add(counted_bytes);
        }
    }

    pub(super) fn push_token_id(&mut self, id: u32) {
        self.token_ids.push(id);
    }

    /// Ends a list of `members` values. The list is a prompt of token ids only if every member was one.
    pub(super) fn end_token_ids(&mut self, members: usize) {
        if self.token_ids.len() != members {
            self.token_ids.clear();
        }
    }

    pub(super) fn take_token_ids(&mut self) -> Option<Vec<u32>> {
        Some(std::mem::take(&mut self.token_ids)).filter(|ids| !ids.is_empty())
    }

    #[cfg(test)]
    pub(super) fn section_count(&self) -> usize {
        self.sections.len()
    }

    pub(super) fn finish(mut self) -> HashedPrompt {
        let bytes = self.sections.iter().map(|(_, _, bytes)| bytes).sum();
        self.sections
            .sort_by_key(|(section, range, _)| (section.place(), range.start));
        // A plain chat has one section: there is nothing to put in order.
        if let [(_, range, _)] = &*self.sections
            && range.start == 0
        {
            self.blocks.truncate(range.end);
            return HashedPrompt {
                blocks: self.blocks,
                bytes,
            };
        }
        let mut blocks = Vec::with_capacity(self.blocks.len());
        for (_, range, _) in &self.sections {
            blocks.extend_from_slice(&self.blocks[range.clone()]);
        }
        HashedPrompt { blocks, bytes }
    }

    fn close_block(&mut self) {
        let hash = xxh3_64_with_seed(&self.open, SEED);
        let bytes = self.open.len() as u32 + self.open_extra;
        self.open.clear();
        self.open_extra = 0;
        self.push_block(hash, bytes);
    }

    fn push_block(&mut self, hash: u64, bytes: u32) {
        self.blocks.push(LocalBlock { hash, bytes });
        let doublings = (self.blocks.len() - self.first_block) / BLOCKS_PER_LENGTH;
        self.length = (self.block_bytes << doublings.min(16)).min(MAX_BLOCK_BYTES);
    }
}
