//! Pages of up to 16 consecutive blocks of one chain: what a lookup reads of them, without a lock.
//!
//! A page never crosses a segment ([`SEGMENT_BLOCKS`] blocks of a chain). So a prompt that no other
//! prompt shares in part has one page for each segment, and a page whose blocks all have the same
//! owners costs a lookup one comparison. Each block has its own owners, so a block missing in the
//! middle of a chain is seen exactly.
//!
//! One writer at a time (the index's lock) changes pages; readers take no lock. The version in
//! [`Head::state`] keeps them from taking one page's owners for another page's blocks: it is odd while
//! the page's blocks change, and a reader discards what it read between two different versions. The
//! owners of a block that stays are one atomic number and may change at any time.

use std::sync::OnceLock;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use super::owner_sets::{EMPTY_SET, SetId};
use super::sync::{AtomicU32, AtomicU64, PAGES_AT_ONCE, fence};
use crate::kv::block::SEGMENT_BLOCKS;

/// A page's number. Pages that one event takes are numbered consecutively where possible.
pub(super) type PageId = u32;

/// The page's number times 16, plus the block's offset in the page.
pub(super) type BlockId = u32;

/// No page, or no block.
pub(super) const NO_ID: u32 = u32::MAX;

pub(super) fn block_id(page: PageId, offset: usize) -> BlockId {
    page * SEGMENT_BLOCKS as u32 + offset as u32
}

pub(super) fn locate(block: BlockId) -> (PageId, usize) {
    (
        block / SEGMENT_BLOCKS as u32,
        block as usize % SEGMENT_BLOCKS,
    )
}

/// What a lookup reads of a page that it passes as a whole. Two fit a cache line.
#[derive(Debug, Default)]
#[repr(align(32))]
pub(super) struct Head {
    /// The number of blocks in the lowest byte, the version above it.
    state: AtomicU64,
    /// The path hash of the first block.
    pub(super) first: AtomicU64,
    /// The path hash of the last block.
    pub(super) last: AtomicU64,
    /// The owner set of every block if all have the same, else [`EMPTY_SET`].
    pub(super) common: AtomicU32,
    /// A guess: the page of the next segment, where a chain continued from this page last.
    pub(super) next: AtomicU32,
}

/// What a lookup reads of a page block by block.
#[derive(Debug, Default)]
#[repr(align(64))]
pub(super) struct Body {
    pub(super) paths: [AtomicU64; SEGMENT_BLOCKS],
    pub(super) owners: [AtomicU32; SEGMENT_BLOCKS],
}

/// A page's version and how many blocks it had then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Version(u64);

impl Version {
    pub(super) fn len(self) -> usize {
        (self.0 & 0xff) as usize
    }
}

const ODD: u64 = 1 << 8;

impl Head {
    /// The head of no page, with no next page: where a lookup starts.
    pub(super) fn before_first() -> Self {
        Self {
            next: AtomicU32::new(NO_ID),
            ..Self::default()
        }
    }

    /// The version that everything read from here on must be checked against ([`Head::is_still`]); none
    /// while the page changes.
    #[inline]
    pub(super) fn version(&self) -> Option<Version> {
        let state = self.state.load(Acquire);
        (state & ODD == 0).then_some(Version(state))
    }

    /// Whether the page has not changed since it had `version`.
    #[inline]
    pub(super) fn is_still(&self, version: Version) -> bool {
        fence(Acquire);
        self.state.load(Relaxed) == version.0
    }

    /// For the writer, who needs no version.
    #[inline]
    pub(super) fn len(&self) -> usize {
        (self.state.load(Relaxed) & 0xff) as usize
    }

    /// The writer is about to write after the page's last block. Only a reader that still sees the page
    /// as longer looks there; it must then see that the page changed.
    #[inline]
    pub(super) fn prepare_append(&self) {
        fence(Release);
    }

    /// The writer is about to change which blocks the page has.
    #[inline]
    pub(super) fn open(&self) {
        self.state.fetch_or_relaxed(ODD);
        // No later store may be seen before the odd version.
        fence(Release);
    }

    /// The page has `len` blocks now; everything stored since [`Head::open`] is part of this version.
    #[inline]
    pub(super) fn close(&self, len: usize) {
        let state = self.state.load(Relaxed);
        let next = (state | 0xff).wrapping_add(1) & !0xff;
        self.state.store(next | len as u64, Release);
    }
}

trait FetchOrRelaxed {
    fn fetch_or_relaxed(&self, bits: u64);
}

impl FetchOrRelaxed for AtomicU64 {
    /// There is one writer, so this needs no locked instruction.
    #[inline]
    fn fetch_or_relaxed(&self, bits: u64) {
        self.store(self.load(Relaxed) | bits, Relaxed);
    }
}

/// Pages are allocated this many at once.
pub(super) const CHUNK: usize = PAGES_AT_ONCE;

#[derive(Debug)]
struct Chunk {
    heads: Box<[Head; CHUNK]>,
    bodies: Box<[Body; CHUNK]>,
    /// Guesses: the page [`LOOKAHEAD`] segments after each page.
    far: Box<[AtomicU32; CHUNK]>,
}

/// How many pages ahead a lookup asks for heads: loading one takes about as long as passing this many.
pub(super) const LOOKAHEAD: usize = 8;

fn boxed<T: Default, const N: usize>() -> Box<[T; N]> {
    let made: Box<[T]> = (0..N).map(|_| T::default()).collect();
    let Ok(made) = made.try_into() else {
        unreachable!("the boxed slice has N items")
    };
    made
}

/// All pages of an index. They are allocated when needed, reused, and freed with the index.
#[derive(Debug)]
pub(super) struct Pages {
    chunks: Box<[OnceLock<Chunk>]>,
}

impl Pages {
    /// Memory of a page.
    pub(super) const BYTES: usize = size_of::<Head>() + size_of::<Body>() + 4;

    pub(super) fn new(max_pages: usize) -> Self {
        let chunks = max_pages.div_ceil(CHUNK).max(1);
        Self {
            chunks: (0..chunks).map(|_| OnceLock::new()).collect(),
        }
    }

    pub(super) fn max_pages(&self) -> usize {
        self.chunks.len() * CHUNK
    }

    pub(super) fn own_bytes(&self) -> usize {
        size_of_val(&*self.chunks)
    }

    /// Allocates the chunk of pages from `first` on.
    pub(super) fn make(&self, first: PageId) {
        self.chunks[first as usize / CHUNK].get_or_init(|| Chunk {
            heads: boxed(),
            bodies: boxed(),
            far: boxed(),
        });
    }

    /// None if the page was not allocated yet.
    #[inline]
    pub(super) fn head(&self, page: PageId) -> Option<&Head> {
        let chunk = self.chunks.get(page as usize / CHUNK)?.get()?;
        Some(&chunk.heads[page as usize % CHUNK])
    }

    #[inline]
    pub(super) fn page(&self, page: PageId) -> Option<(&Head, &Body)> {
        let chunk = self.chunks.get(page as usize / CHUNK)?.get()?;
        let offset = page as usize % CHUNK;
        Some((&chunk.heads[offset], &chunk.bodies[offset]))
    }

    /// A page's head, and the guess at the page [`LOOKAHEAD`] segments on.
    #[inline]
    pub(super) fn ahead(&self, page: PageId) -> Option<(&Head, &AtomicU32)> {
        let chunk = self.chunks.get(page as usize / CHUNK)?.get()?;
        let offset = page as usize % CHUNK;
        Some((&chunk.heads[offset], &chunk.far[offset]))
    }

    /// For the writer, which only has numbers of pages that it allocated.
    #[inline]
    pub(super) fn get(&self, page: PageId) -> (&Head, &Body) {
        self.page(page).expect("the writer allocated the page")
    }
}

impl Body {
    /// The owner set of the first `len` blocks if all have the same, else [`EMPTY_SET`].
    #[inline]
    pub(super) fn common(&self, len: usize) -> SetId {
        let first = self.owners[0].load(Relaxed);
        let differ = self.owners[..len]
            .iter()
            .fold(0, |differ, owners| differ | (owners.load(Relaxed) ^ first));
        if differ == 0 { first } else { EMPTY_SET }
    }
}
