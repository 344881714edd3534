//! Pages in use: taking, finding and freeing them.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use arc_swap::ArcSwap;

use super::{Directory, Writer};
use crate::kv::block::{PathHash, SEGMENT_BLOCKS};
use crate::kv::index::owner_sets::EMPTY_SET;
use crate::kv::index::page_table::PageTable;
use crate::kv::index::pages::{BlockId, CHUNK, NO_ID, PageId, locate};
use crate::kv::index::shared::Shared;

impl Writer {
    /// The page whose first block has this path hash.
    #[inline]
    pub(super) fn page_of(&self, shared: &Shared, path: u64, depth: u32) -> Option<PageId> {
        let directory = if is_segment_start(depth) {
            &self.starts
        } else if self.fork_filter.may_contain(path) {
            &self.forks
        } else {
            return None;
        };
        directory.table.find(PathHash(path).mixed(), |page| {
            shared.pages.get(page).0.first.load(Relaxed) == path
        })
    }

    /// The page where the chain of a block, the last of its segment, was continued last; only if that
    /// page begins with this path hash.
    #[inline]
    pub(super) fn page_after(&self, shared: &Shared, block: BlockId, path: u64) -> Option<PageId> {
        if block == NO_ID {
            return None;
        }
        let (page, _) = locate(block);
        let next = shared.pages.get(page).0.next.load(Relaxed);
        let head = shared.pages.head(next)?;
        (head.first.load(Relaxed) == path && head.len() > 0).then_some(next)
    }

    /// An empty page that begins with a block; `parent` is the block before it. None at the memory
    /// limit.
    pub(super) fn new_page(
        &mut self,
        shared: &Shared,
        path: u64,
        depth: u32,
        parent: BlockId,
        parent_path: u64,
    ) -> Option<PageId> {
        let page = match self.free.pop() {
            Some(page) => page,
            None if (self.first_unused as usize) < self.chunks.len() * CHUNK => {
                self.first_unused += 1;
                self.first_unused - 1
            }
            None => return None,
        };
        let (head, _) = shared.pages.get(page);
        head.open();
        head.first.store(path, Relaxed);
        head.common.store(EMPTY_SET, Relaxed);
        head.next.store(NO_ID, Relaxed);
        head.close(0);
        let meta = self.meta_mut(page);
        meta.parent_path = parent_path;
        meta.parent = parent;
        meta.depth = depth;
        meta.named = 0;
        meta.owned = 0;
        let (directory, published) = if is_segment_start(depth) {
            (&mut self.starts, &shared.starts)
        } else {
            self.fork_filter.insert(path);
            (&mut self.forks, &shared.forks)
        };
        directory.len += 1;
        if directory.table.is_full(directory.len) {
            let room = directory.len + directory.len / 4 + 8;
            directory.table = Arc::new(directory.table.resized(room));
            directory.table.insert(PathHash(path).mixed(), page);
            published.store(directory.table.clone());
        } else {
            directory.table.insert(PathHash(path).mixed(), page);
        }
        Some(page)
    }

    /// Frees a page of which no block has an owner.
    pub(super) fn free_page(&mut self, shared: &Shared, page: PageId) {
        let (head, _) = shared.pages.get(page);
        let first = head.first.load(Relaxed);
        let is_fork = !is_segment_start(self.meta(page).depth);
        let directory = if is_fork {
            &mut self.forks
        } else {
            &mut self.starts
        };
        directory.remove(first, page);
        if is_fork {
            let forks = directory.table.pages();
            let path_of = |fork| shared.pages.get(fork).0.first.load(Relaxed);
            self.fork_filter.on_removed(forks.map(path_of));
        }
        head.open();
        head.common.store(EMPTY_SET, Relaxed);
        head.close(0);
        self.free.push(page);
    }
}

impl Directory {
    /// Replaces a table that is nearly empty by a smaller one.
    pub(super) fn shrink(&mut self, published: &ArcSwap<PageTable>) {
        let room = (self.len * 2).max(CHUNK);
        if self.table.is_sparse(room) {
            self.table = Arc::new(self.table.resized(room));
            published.store(self.table.clone());
        }
    }

    fn remove(&mut self, first: u64, page: PageId) {
        self.table.remove(PathHash(first).mixed(), page);
        self.len -= 1;
    }
}

#[inline]
pub(super) fn is_segment_start(depth: u32) -> bool {
    (depth as usize).is_multiple_of(SEGMENT_BLOCKS)
}
