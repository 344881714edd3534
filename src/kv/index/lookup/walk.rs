//! A lookup block by block, where a page cannot be passed as a whole.

use std::sync::atomic::Ordering::{Acquire, Relaxed};

use super::Lookup;
use crate::kv::block::{LocalHash, PathHash, SEGMENT_BLOCKS};
use crate::kv::index::pages::{Body, Head, PageId, Version};
use crate::kv::index::race_point::race_point;
use crate::kv::index::sync::{AtomicU32, MAX_TRIES, spin_loop};

/// No tree owns the prompt's next block.
struct NoTreeLeft;

/// The page changed while it was read.
struct Changed;

impl<'a> Lookup<'a> {
    /// Walks a segment block by block, through the pages that fork off within it. Returns the last page;
    /// none when the lookup is over.
    #[inline(never)]
    pub(super) fn walk_segment(
        &mut self,
        first: (PageId, &'a Head, &Body),
        before: PathHash,
        segment: &[LocalHash],
        depth: u32,
    ) -> Option<PageId> {
        let mut paths = [0; SEGMENT_BLOCKS];
        let mut path = before;
        for (position, local) in segment.iter().enumerate() {
            path = path.step(*local, depth + position as u32);
            paths[position] = path.0;
        }
        let paths = &paths[..segment.len()];
        let mut done = 0;
        let (mut page, mut head, mut body) = first;
        loop {
            let matched = self
                .walk_page(head, body, &paths[done..], depth + done as u32)
                .ok()?;
            done += matched;
            if done == paths.len() {
                return Some(page);
            }
            let forks = self.shared.forks.load();
            let fork = match matched {
                0 => None,
                _ => self.shared.page_at(&forks, PathHash(paths[done])),
            };
            let Some((next, (next_head, next_body))) =
                fork.and_then(|(next, _)| Some((next, self.shared.pages.page(next)?)))
            else {
                self.trees.report_all(depth + done as u32);
                return None;
            };
            (page, head, body) = (next, next_head, next_body);
        }
    }

    /// Walks one page's blocks as far as they have these path hashes. Returns how many.
    fn walk_page(
        &mut self,
        head: &Head,
        body: &Body,
        paths: &[u64],
        depth: u32,
    ) -> Result<usize, NoTreeLeft> {
        let mut tries = MAX_TRIES;
        let mut done = 0;
        while done < paths.len() {
            tries -= 1;
            if tries == 0 {
                break;
            }
            let Some(version) = head.version() else {
                spin_loop();
                continue;
            };
            // Blocks passed before the page changed were there then; the walk continues after them.
            let left = body.paths.get(done..version.len()).unwrap_or_default();
            let pairs = left.iter().zip(&paths[done..]);
            let end = done + pairs.take_while(|(a, b)| a.load(Relaxed) == **b).count();
            while done < end {
                done += self.same_owners(head, version, &body.owners[done..end]);
                if done == end {
                    break;
                }
                match self.retain_owners(head, version, &body.owners[done], depth + done as u32) {
                    Ok(()) if self.trees.is_empty() => return Err(NoTreeLeft),
                    Ok(()) => done += 1,
                    Err(Changed) => {
                        spin_loop();
                        break;
                    }
                }
            }
            // The page had no more matching blocks from `version` on: an offset gets another block only
            // after the one before had no owner.
            if done == end {
                break;
            }
        }
        Ok(done)
    }

    /// How many blocks, from the first on, have the same owners as the last block.
    #[inline]
    fn same_owners(&self, head: &Head, version: Version, owners: &[AtomicU32]) -> usize {
        race_point();
        let same = owners
            .iter()
            .take_while(|owners| owners.load(Acquire) == self.last.set)
            .count();
        // Only after loading all of them, check that the set still is what it was.
        if self.are_last_owners(self.last.set) && head.is_still(version) {
            same
        } else {
            0
        }
    }

    /// Reports and removes the trees that do not own a block.
    fn retain_owners(
        &mut self,
        head: &Head,
        version: Version,
        owners: &AtomicU32,
        depth: u32,
    ) -> Result<(), Changed> {
        race_point();
        let set = owners.load(Acquire);
        let generation = self.read_owners(owners, set).ok_or(Changed)?;
        if !head.is_still(version) {
            return Err(Changed);
        }
        self.trees.retain(&self.members, depth);
        self.set_last_owners(set, generation);
        Ok(())
    }
}
