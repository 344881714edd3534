//! Counts an index's memory by walking through all of it: tests compare this with the running totals.

use std::sync::atomic::Ordering::Relaxed;

use super::Writer;
use crate::kv::index::owner_sets::{CLASSES, stride};
use crate::kv::index::page_table::PageTable;
use crate::kv::index::pages::{CHUNK, Pages};
use crate::kv::index::shared::Shared;

impl Writer {
    pub(in crate::kv::index) fn recount(&self, shared: &Shared) -> usize {
        let chunks = (0..).step_by(CHUNK);
        let chunks = chunks.take_while(|first| shared.pages.head(*first).is_some());
        let pages = chunks.count() * CHUNK * Pages::BYTES;
        let rows = self.chunks.iter().map(|chunk| size_of_val(&*chunk.rows));
        let tables: [&PageTable; 2] = [&shared.starts.load(), &shared.forks.load()];
        let trees = self.trees.iter().flatten().map(|tree| tree.bytes());
        let sets = (0..CLASSES).map(|class| {
            let pieces = shared.sets.classes[class]
                .iter()
                .filter_map(|piece| piece.get());
            let sets = pieces.flat_map(|piece| piece.chunks(stride(class)));
            // A set that was never used has no generation.
            let used = sets.filter(|words| words[0].load(Relaxed) != 0);
            used.map(size_of_val).sum::<usize>()
        });
        pages
            + rows.sum::<usize>()
            + tables.iter().map(|table| table.bytes()).sum::<usize>()
            + trees.sum::<usize>()
            + sets.sum::<usize>()
            + self.sets.recount_numbers()
            + self.names.recount()
    }
}
