//! Finds how long a prefix of a prompt each tree owns, while the writer goes on.
//!
//! What a lookup reports of a block was true at one moment between the lookup's start and its end:
//! after it read what a page's version, a block's owner set or a set's generation stand for, it loads
//! each of them again. If one has changed, the lookup reads again or does not use the block.

mod remaining;
mod walk;

use std::sync::atomic::Ordering::{Acquire, Relaxed};

use self::remaining::RemainingTrees;
use super::members::Members;
use super::owner_sets::{EMPTY_SET, SetId};
use super::page_table::PageTable;
use super::pages::{Body, Head, LOOKAHEAD, PageId, Version};
use super::race_point::race_point;
use super::shared::Shared;
use super::simd::prefetch;
use super::sync::{AtomicU32, AtomicU64, MAX_TRIES, spin_loop};
use super::types::RankPrefix;
use crate::kv::block::{ChainRoot, LocalHash, PathHash, SEGMENT_BLOCKS};

/// An id that no block has: there is no such class of sets.
const NO_SET: SetId = u32::MAX;

/// A lookup on its way along a prompt.
struct Lookup<'a> {
    shared: &'a Shared,
    trees: RemainingTrees<'a>,
    /// The owners of the last block.
    last: LastOwners<'a>,
    /// The trees of the set that was read last.
    members: Members,
}

/// A set that contains all remaining trees, with its generation when it was read.
struct LastOwners<'a> {
    set: SetId,
    generation: &'a AtomicU64,
    generation_read: u64,
}

/// A page on the way: its head, and the guess at the page [`LOOKAHEAD`] segments on.
type PageAhead<'a> = (&'a Head, &'a AtomicU32);

/// Path hashes of a segment's first and last block.
type SegmentEnds = (PathHash, PathHash);

impl Shared {
    pub(super) fn overlap(
        &self,
        root: ChainRoot,
        locals: &[LocalHash],
        found: &mut Vec<RankPrefix>,
    ) {
        let mut lookup = Lookup {
            shared: self,
            trees: RemainingTrees::new(&self.slots, found),
            last: LastOwners {
                set: NO_SET,
                generation: self.sets.generation(NO_SET),
                generation_read: 0,
            },
            members: Members::default(),
        };
        let before_first = Head::before_first();
        let mut page = (&before_first, &before_first.next);
        let mut path = PathHash::start(root);
        let mut depth = 0;
        let (segments, rest) = locals.as_chunks::<SEGMENT_BLOCKS>();
        for segment in segments {
            let ends = path.segment(segment);
            let next = lookup
                .step_as_before(page, ends)
                .or_else(|| lookup.step(page, path, ends, segment, depth));
            let Some(next) = next else {
                return;
            };
            page = next;
            (_, path) = ends;
            depth += SEGMENT_BLOCKS as u32;
        }
        if !rest.is_empty() {
            let ends = path.segment(rest);
            if lookup.step(page, path, ends, rest, depth).is_none() {
                return;
            }
            depth += rest.len() as u32;
        }
        lookup.trees.report_all(depth);
    }

    /// The page where the chain continued from a page last, if it begins with this path hash.
    #[inline]
    fn page_after(&self, head: &Head, first: PathHash) -> Option<(PageId, &Head)> {
        let next = head.next.load(Relaxed);
        let head = self.pages.head(next)?;
        begins_with(head, first).then_some((next, head))
    }

    /// The page that begins with this path hash.
    #[inline(never)]
    fn page_at(&self, table: &PageTable, first: PathHash) -> Option<(PageId, &Head)> {
        let found = table.find(first.mixed(), |page| {
            let head = self.pages.head(page);
            head.is_some_and(|head| begins_with(head, first))
        })?;
        // The next pages usually follow it, two heads to a cache line.
        for ahead in (1..LOOKAHEAD as u32).step_by(2) {
            if let Some((head, far)) = self.pages.ahead(found.wrapping_add(ahead)) {
                prefetch(head);
                prefetch(far);
            }
        }
        Some((found, self.pages.head(found)?))
    }
}

impl<'a> Lookup<'a> {
    /// One segment on, in nearly every step of a long prompt: the guess at the next page is right, the page
    /// is exactly this segment, and all its blocks have the same owners as the last block.
    #[inline]
    fn step_as_before(
        &self,
        (head, far): PageAhead<'a>,
        (first, last): SegmentEnds,
    ) -> Option<PageAhead<'a>> {
        let pages = &self.shared.pages;
        if let Some((head, far)) = pages.ahead(far.load(Relaxed)) {
            prefetch(head);
            prefetch(far);
        }
        let (head, far) = pages.ahead(head.next.load(Relaxed))?;
        let (version, common) = whole_page(head, first, last, SEGMENT_BLOCKS)?;
        (self.are_last_owners(common) && head.is_still(version)).then_some((head, far))
    }

    /// One segment on, in any other case; `before` is the path hash before it. Returns the segment's last
    /// page; none when the lookup is over.
    #[inline(never)]
    fn step(
        &mut self,
        (head, _): PageAhead<'a>,
        before: PathHash,
        (first, last): SegmentEnds,
        segment: &[LocalHash],
        depth: u32,
    ) -> Option<PageAhead<'a>> {
        let next = self.shared.page_after(head, first);
        let next = next.or_else(|| self.shared.page_at(&self.shared.starts.load(), first));
        let Some((page, head)) = next else {
            self.trees.report_all(depth);
            return None;
        };
        let is_passed = match depth {
            0 => self.start_with_page(head, first, last, segment.len()),
            _ => self.pass_page(head, first, last, segment.len()),
        };
        if is_passed {
            return self.shared.pages.ahead(page);
        }
        let (_, body) = self.shared.pages.page(page)?;
        prefetch(&body.paths);
        prefetch(&body.paths[SEGMENT_BLOCKS / 2]);
        prefetch(&body.owners);
        if depth == 0 && !self.start_with_block(head, body, first) {
            return None;
        }
        let last = self.walk_segment((page, head, body), before, segment, depth)?;
        self.shared.pages.ahead(last)
    }

    /// Starts with the owners of the first page, if all its blocks have the same and it is exactly this
    /// segment: then its blocks need not be looked at.
    #[inline]
    fn start_with_page(
        &mut self,
        head: &Head,
        first: PathHash,
        last: PathHash,
        len: usize,
    ) -> bool {
        let Some((version, common)) = whole_page(head, first, last, len) else {
            return false;
        };
        match self.read_owners(&head.common, common) {
            Some(generation) if head.is_still(version) => {
                self.trees.start(&self.members);
                self.set_last_owners(common, generation);
                true
            }
            _ => false,
        }
    }

    /// Starts with the owners of the first block. False if there are none.
    fn start_with_block(&mut self, head: &Head, body: &Body, first: PathHash) -> bool {
        for _ in 0..MAX_TRIES {
            let Some(version) = head.version() else {
                spin_loop();
                continue;
            };
            if version.len() == 0 || body.paths[0].load(Relaxed) != first.0 {
                return false;
            }
            race_point();
            let owners = body.owners[0].load(Acquire);
            if owners == EMPTY_SET {
                return false;
            }
            if let Some(generation) = self.read_owners(&body.owners[0], owners)
                && head.is_still(version)
            {
                self.trees.start(&self.members);
                self.set_last_owners(owners, generation);
                return true;
            }
            spin_loop();
        }
        false
    }

    /// Whether a page is exactly this segment, and all remaining trees own all of it in the same tier as
    /// before.
    #[inline]
    fn pass_page(&mut self, head: &Head, first: PathHash, last: PathHash, len: usize) -> bool {
        let Some((version, common)) = whole_page(head, first, last, len) else {
            return false;
        };
        if self.are_last_owners(common) {
            return head.is_still(version);
        }
        let Some(generation) = self.read_owners(&head.common, common) else {
            return false;
        };
        if !head.is_still(version) || self.trees.would_change(&self.members) {
            return false;
        }
        self.set_last_owners(common, generation);
        true
    }

    fn set_last_owners(&mut self, set: SetId, generation_read: u64) {
        self.last = LastOwners {
            set,
            generation: self.shared.sets.generation(set),
            generation_read,
        };
    }

    /// Whether a set is the last block's and unchanged, so that all remaining trees are in it.
    #[inline]
    fn are_last_owners(&self, set: SetId) -> bool {
        // A set's generation only rises: if it is the same now, it was the same in between.
        set == self.last.set && self.last.generation.load(Acquire) == self.last.generation_read
    }

    /// Reads a set's trees into `members`. Returns its generation, or none if `place` has another set by
    /// now or the set has changed.
    #[inline]
    fn read_owners(&mut self, place: &AtomicU32, set: SetId) -> Option<u64> {
        self.members.reset(self.trees.groups());
        race_point();
        if set == EMPTY_SET {
            return Some(0);
        }
        let generation = self.shared.sets.read(set, &mut self.members)?;
        race_point();
        // In this order: at the moment of the first load the set was there, and it was what was read from
        // before that until after it.
        let is_there = place.load(Acquire) == set;
        let is_same = self.shared.sets.generation(set).load(Acquire) == generation;
        (is_there && is_same).then_some(generation)
    }
}

#[inline]
fn begins_with(head: &Head, first: PathHash) -> bool {
    head.first.load(Relaxed) == first.0 && head.len() > 0
}

/// A page's version and common owners, if it is exactly this segment and has common owners.
#[inline]
fn whole_page(
    head: &Head,
    first: PathHash,
    last: PathHash,
    len: usize,
) -> Option<(Version, SetId)> {
    let version = head.version()?;
    let is_segment = version.len() == len
        && head.last.load(Relaxed) == last.0
        && head.first.load(Relaxed) == first.0;
    race_point();
    let common = head.common.load(Acquire);
    (is_segment && common != EMPTY_SET).then_some((version, common))
}
