//! Pages of up to 16 consecutive blocks of one chain: what a lookup reads of them, without a lock.
//!
//! A page never crosses a stretch ([`STRETCH`] blocks of a chain), so a prompt that nobody shares in
//! part is one page a stretch, and a page whose holders are the same for all of its blocks costs a
//! lookup one comparison. Holders stay with each block, so holes are exact.
//!
//! One writer at a time (the index's lock) changes pages. Readers hold no lock; what keeps them from
//! taking one page's holders for another page's blocks is the version in [`Head::state`]: it is odd
//! while blocks of the page come, go or change, and a reader believes nothing that it read between
//! two different versions. Holders of a block that stays are one atomic word and change any time.

use std::sync::OnceLock;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU32, AtomicU64, fence};

use super::holders::NOBODY;
use crate::kv::block::STRETCH;

/// A page's number. Numbers that one event takes follow each other where they can.
pub(super) type PageId = u32;

/// A block's place: the page's number times 16, and the block's place in it.
pub(super) type BlockId = u32;

pub(super) const NONE: u32 = u32::MAX;

pub(super) fn block_id(page: PageId, at: usize) -> BlockId {
    page * STRETCH as u32 + at as u32
}

pub(super) fn place_of(block: BlockId) -> (PageId, usize) {
    (block / STRETCH as u32, block as usize % STRETCH)
}

/// What a lookup reads of a page that it passes whole; two to a cache line.
#[derive(Debug, Default)]
#[repr(align(32))]
pub(super) struct Head {
    /// The version above the lowest byte, and the number of blocks in it.
    state: AtomicU64,
    /// The path of the first block.
    pub(super) first: AtomicU64,
    /// The path of the last block.
    pub(super) last: AtomicU64,
    /// The holders of every block, where they are the same; else nobody.
    pub(super) all: AtomicU32,
    /// The page of the stretch after this, of the chain that went on from here last: a guess.
    pub(super) next: AtomicU32,
}

/// What a lookup reads where it cannot pass a page whole.
#[derive(Debug, Default)]
#[repr(align(64))]
pub(super) struct Body {
    pub(super) paths: [AtomicU64; STRETCH],
    pub(super) held: [AtomicU32; STRETCH],
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
    /// Of no page: nothing goes on from it.
    pub(super) fn nowhere() -> Self {
        Self {
            next: AtomicU32::new(NONE),
            ..Self::default()
        }
    }

    /// The version to check what is read from here on against; none while the page changes.
    #[inline]
    pub(super) fn version(&self) -> Option<Version> {
        let state = self.state.load(Acquire);
        (state & ODD == 0).then_some(Version(state))
    }

    /// Whether all that was read since `version` belongs together.
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

    /// The writer is about to write past the page's last block, where nobody looks but a reader to whom
    /// the page is still longer: that one must see what it became since.
    #[inline]
    pub(super) fn prepare(&self) {
        fence(Release);
    }

    /// The writer is about to change which blocks the page has.
    #[inline]
    pub(super) fn open(&self) {
        self.state.fetch_or_relaxed(ODD);
        // No later store may be seen before the odd version.
        fence(Release);
    }

    /// The page has `len` blocks now, and all that was stored since [`Head::open`] is part of it.
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

/// Pages are made this many at once.
pub(super) const CHUNK: usize = 1024;

#[derive(Debug)]
struct Chunk {
    heads: Box<[Head; CHUNK]>,
    bodies: Box<[Body; CHUNK]>,
    /// The page [`FAR`] stretches after each, of the chain that went on from here last: guesses.
    far: Box<[AtomicU32; CHUNK]>,
}

/// So many pages ahead a lookup asks for heads: what it takes to bring one is about what it takes to
/// pass so many.
pub(super) const FAR: usize = 8;

fn boxed<T: Default, const N: usize>() -> Box<[T; N]> {
    let made: Box<[T]> = (0..N).map(|_| T::default()).collect();
    let Ok(made) = made.try_into() else {
        unreachable!("as many were made as it holds")
    };
    made
}

/// All pages of an index. They are made as they are needed, reused, and freed with the index.
#[derive(Debug)]
pub(super) struct Pages {
    chunks: Box<[OnceLock<Chunk>]>,
}

impl Pages {
    /// What a page takes.
    pub(super) const BYTES: usize = size_of::<Head>() + size_of::<Body>() + 4;

    pub(super) fn new(pages_max: usize) -> Self {
        let chunks = pages_max.div_ceil(CHUNK).max(1);
        Self {
            chunks: (0..chunks).map(|_| OnceLock::new()).collect(),
        }
    }

    pub(super) fn pages_max(&self) -> usize {
        self.chunks.len() * CHUNK
    }

    pub(super) fn own_bytes(&self) -> usize {
        size_of_val(&*self.chunks)
    }

    /// Makes the pages from `first` on, a whole chunk.
    pub(super) fn make(&self, first: PageId) {
        self.chunks[first as usize / CHUNK].get_or_init(|| Chunk {
            heads: boxed(),
            bodies: boxed(),
            far: boxed(),
        });
    }

    /// None where no page was made yet.
    #[inline]
    pub(super) fn head(&self, page: PageId) -> Option<&Head> {
        let chunk = self.chunks.get(page as usize / CHUNK)?.get()?;
        Some(&chunk.heads[page as usize % CHUNK])
    }

    #[inline]
    pub(super) fn page(&self, page: PageId) -> Option<(&Head, &Body)> {
        let chunk = self.chunks.get(page as usize / CHUNK)?.get()?;
        let at = page as usize % CHUNK;
        Some((&chunk.heads[at], &chunk.bodies[at]))
    }

    /// A page's head, and where its chain may be [`FAR`] stretches on.
    #[inline]
    pub(super) fn ahead(&self, page: PageId) -> Option<(&Head, &AtomicU32)> {
        let chunk = self.chunks.get(page as usize / CHUNK)?.get()?;
        let at = page as usize % CHUNK;
        Some((&chunk.heads[at], &chunk.far[at]))
    }

    /// For the writer, whose page numbers are of pages that it made.
    #[inline]
    pub(super) fn at(&self, page: PageId) -> (&Head, &Body) {
        self.page(page).expect("the writer made the page")
    }
}

impl Body {
    /// The word of the holders of the first `len` blocks, if it is the same for all.
    #[inline]
    pub(super) fn common(&self, len: usize) -> u32 {
        let first = self.held[0].load(Relaxed);
        let differ = self.held[..len]
            .iter()
            .fold(0, |differ, held| differ | (held.load(Relaxed) ^ first));
        if differ == 0 { first } else { NOBODY }
    }
}
