//! Splits canonical bytes into blocks and hashes each block.

use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::{LocalBlock, Prompt, Section};

/// The seed that the field's routers use for block hashes.
const SEED: u64 = 1337;
/// After so many blocks of one length the next ones are twice as long: an overlap is then known to
/// within 1/32 of itself, and a 4 MB prompt has about 700 blocks, not 60,000.
const BLOCKS_A_LENGTH: usize = 32;
const BLOCK_BYTES_MAX: usize = 8192;

/// Takes a prompt's sections in any order, each as a run of byte strings.
#[derive(Debug)]
pub(super) struct BlockHasher {
    block_bytes: usize,
    /// Every finished block, section after section, as they came.
    blocks: Vec<LocalBlock>,
    sections: Vec<(Section, std::ops::Range<usize>, u64)>,
    current: Option<Section>,
    begin: usize,
    bytes: u64,
    /// The block that is not full yet.
    open: Vec<u8>,
    /// Bytes that the open block stands for beyond those it has: an image's.
    open_extra: u32,
    length: usize,
    token_ids: Vec<u32>,
}

impl BlockHasher {
    pub(super) fn new(block_bytes: u32) -> Self {
        Self {
            block_bytes: (block_bytes as usize).clamp(16, BLOCK_BYTES_MAX),
            blocks: Vec::with_capacity(64),
            sections: Vec::with_capacity(2),
            current: None,
            begin: 0,
            bytes: 0,
            open: Vec::with_capacity(256),
            open_extra: 0,
            length: 0,
            token_ids: Vec::new(),
        }
    }

    pub(super) fn begin(&mut self, section: Section) {
        self.token_ids.clear();
        self.current = Some(section);
        self.begin = self.blocks.len();
        self.bytes = 0;
        self.length = self.block_bytes;
    }

    pub(super) fn end(&mut self) {
        let Some(section) = self.current.take() else {
            return;
        };
        // The conversation's last block is still growing; what stands before it is not.
        if section != Section::Conversation && !self.open.is_empty() {
            self.close();
        }
        self.open.clear();
        self.open_extra = 0;
        let range = self.begin..self.blocks.len();
        // Of a key given twice, parsers take the last.
        self.sections
            .retain(|(other, _, _)| *other != section || section == Section::Tools);
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
            self.close();
        }
        while bytes.len() >= self.length {
            let (block, rest) = bytes.split_at(self.length);
            self.push(xxh3_64_with_seed(block, SEED), block.len() as u32);
            bytes = rest;
        }
        self.open.extend_from_slice(bytes);
    }

    /// Something that is not text and costs the engine more, or less, than its bytes.
    pub(super) fn feed_media(&mut self, bytes: &[u8], stands_for_bytes: u32) {
        self.feed(&xxh3_64_with_seed(bytes, SEED).to_le_bytes());
        self.bytes += u64::from(stands_for_bytes);
        if self.open.is_empty() {
            // The hash ended a block exactly: that block stands for the image.
            if let Some(block) = self.blocks.last_mut() {
                block.bytes = block.bytes.saturating_add(stands_for_bytes);
            }
        } else {
            self.open_extra = self.open_extra.saturating_add(stands_for_bytes);
        }
    }

    pub(super) fn push_token_id(&mut self, id: u32) {
        self.token_ids.push(id);
    }

    /// The end of a list of so many members, which is a prompt if all of them were token ids.
    pub(super) fn end_token_ids(&mut self, members: usize) {
        if self.token_ids.len() != members {
            self.token_ids.clear();
        }
    }

    pub(super) fn take_token_ids(&mut self) -> Option<Vec<u32>> {
        Some(std::mem::take(&mut self.token_ids)).filter(|ids| !ids.is_empty())
    }

    pub(super) fn finish(mut self) -> Prompt {
        let bytes = self.sections.iter().map(|(_, _, bytes)| bytes).sum();
        if let [(_, range, _)] = self.sections.as_slice()
            && range.start == 0
        {
            self.blocks.truncate(range.end);
            return Prompt {
                blocks: self.blocks,
                bytes,
            };
        }
        self.sections
            .sort_by_key(|(section, range, _)| (*section, range.start));
        let mut blocks = Vec::with_capacity(self.blocks.len());
        for (_, range, _) in &self.sections {
            blocks.extend_from_slice(&self.blocks[range.clone()]);
        }
        Prompt { blocks, bytes }
    }

    fn close(&mut self) {
        let hash = xxh3_64_with_seed(&self.open, SEED);
        let bytes = self.open.len() as u32 + self.open_extra;
        self.open.clear();
        self.open_extra = 0;
        self.push(hash, bytes);
    }

    fn push(&mut self, hash: u64, bytes: u32) {
        self.blocks.push(LocalBlock { hash, bytes });
        let doublings = (self.blocks.len() - self.begin) / BLOCKS_A_LENGTH;
        self.length = (self.block_bytes << doublings.min(16)).min(BLOCK_BYTES_MAX);
    }
}
