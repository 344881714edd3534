//! Storing: blocks of a chain to their pages.

use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;

use super::tree::{UNKNOWN, mark_of, usual};
use super::{Known, Writer, has_fork_bit, is_start};
use crate::kv::block::{Path, STRETCH};
use crate::kv::event::Tier;
use crate::kv::index::Shared;
use crate::kv::index::holders::{Mark, Registry, Slot};
use crate::kv::index::names::Naming;
use crate::kv::index::pages::{BlockId, Body, CHUNK, FAR, NONE, PageId, block_id, place_of};
use crate::kv::radix::{After, Copies, NewBlock, UnknownParent};

/// Blocks that are placed at once. A longer event is several.
const PIECE: usize = 256;

/// How many names ahead the table of names is asked for.
const AHEAD: usize = 32;

/// For fewer blocks it is not worth to go back along a chain.
const TRAIL_MIN: usize = 64;

/// Where the next block of a chain goes on from.
#[derive(Clone, Copy)]
struct End {
    path: u64,
    /// Of the next block.
    depth: u32,
    /// The last block; [`NONE`] at a chain's start.
    block: BlockId,
    /// The pages of the last stretches, each in its place; [`NONE`] where it is not known.
    trail: [PageId; FAR],
}

/// How an event stores its blocks.
#[derive(Clone, Copy)]
pub(super) struct Way {
    pub(super) slot: Slot,
    pub(super) tier: Tier,
    pub(super) copies: Copies,
    /// What a block is marked with that was not held before.
    pub(super) mark: Mark,
    /// Whether that mark says all.
    pub(super) is_usual: bool,
}

impl Writer {
    pub(in crate::kv::index) fn store(
        &mut self,
        shared: &Shared,
        slot: Slot,
        after: After,
        blocks: &[NewBlock],
        tier: Tier,
        copies: Copies,
    ) -> Result<(), UnknownParent> {
        let known = self.tree(slot).ok_or(UnknownParent)?;
        known.prefetch();
        let mut end = match after {
            After::Root(root) => End {
                path: Path::start(root).0,
                depth: 0,
                block: NONE,
                trail: [NONE; FAR],
            },
            After::Block(name) => {
                // The first of them will be looked for next; both may be far away.
                if let Some(first) = blocks.first() {
                    self.names.prefetch(first.name.0);
                }
                let guess = known.end(name);
                if guess != NONE {
                    self.prefetch_block(shared, guess);
                }
                let block = self
                    .is_guess(shared, known, slot, guess, name)
                    .then_some(guess)
                    .or_else(|| self.resolve(shared, known, slot, name))
                    .ok_or(UnknownParent)?;
                let (page, at) = place_of(block);
                End {
                    path: shared.pages.at(page).1.paths[at].load(Relaxed),
                    depth: self.meta(page).depth + at as u32 + 1,
                    block,
                    trail: match blocks.len() {
                        0..TRAIL_MIN => [NONE; FAR],
                        _ => self.trail(page),
                    },
                }
            }
        };
        let first = first_copies(tier, copies);
        let way = Way {
            slot,
            tier,
            copies,
            mark: mark_of(first),
            is_usual: first == usual(mark_of(first)),
        };
        self.clock += 1;
        let clock = self.clock;
        let mut left = blocks;
        while !left.is_empty() {
            let (piece, rest) = left.split_at(left.len().min(PIECE));
            // This may take blocks of the very tree, and the one that these go on from.
            let is_cut = self.make_room(shared, piece.len());
            if is_cut && end.block != NONE && !self.is_at(shared, slot, end) {
                self.cut_short(slot, left.len());
                return Ok(());
            }
            let Some(mut known) = self.trees[slot as usize].take() else {
                return Ok(());
            };
            known.stored_at = clock;
            let placed = self.place(shared, &mut known, way, &mut end, piece);
            self.count_bytes(&mut known);
            self.trees[slot as usize] = Some(known);
            if placed < piece.len() {
                self.cut_short(slot, left.len() - placed);
                return Ok(());
            }
            left = rest;
        }
        if let (Some(last), Some(known)) = (blocks.last(), self.tree_mut(slot)) {
            known.set_end(last.name, end.block);
        }
        Ok(())
    }

    /// The pages of the stretches up to one page's, as they were once: guesses.
    fn trail(&self, mut page: PageId) -> [PageId; FAR] {
        let mut trail = [NONE; FAR];
        for _ in 0..FAR {
            let meta = self.meta(page);
            trail[meta.depth as usize / STRETCH % FAR] = page;
            if meta.up == NONE {
                break;
            }
            (page, _) = place_of(meta.up);
        }
        trail
    }

    fn is_at(&self, shared: &Shared, slot: Slot, end: End) -> bool {
        let (page, at) = place_of(end.block);
        let (head, body) = shared.pages.at(page);
        at < head.len()
            && body.paths[at].load(Relaxed) == end.path
            && self.mark(shared, slot, end.block) != Mark::Absent
    }

    fn cut_short(&mut self, slot: Slot, blocks: usize) {
        self.cut_blocks += blocks as u64;
        if let Some(known) = self.tree_mut(slot) {
            known.was_cut = true;
        }
    }

    /// Places blocks after `end`, which moves on. Returns how many; fewer than given where memory is
    /// at its bound.
    fn place(
        &mut self,
        shared: &Shared,
        known: &mut Known,
        way: Way,
        end: &mut End,
        blocks: &[NewBlock],
    ) -> usize {
        for block in blocks.iter().take(AHEAD) {
            self.names.prefetch(block.name.0);
        }
        let mut paths = std::mem::take(&mut self.paths);
        paths.clear();
        let (mut path, before) = (Path(end.path), end.path);
        paths.extend(blocks.iter().zip(end.depth..).map(|(block, depth)| {
            path = path.step(block.local, depth);
            path.0
        }));
        let start = end.depth;
        let to_stretch = (STRETCH - start as usize % STRETCH) % STRETCH;
        for path in paths.iter().skip(to_stretch).step_by(STRETCH) {
            self.starts.table.prefetch(Path(*path).mixed());
        }
        let alone = Registry::of_one(way.slot, way.mark);
        let mut placed = 0;
        // The page to go on in, and the place there.
        let mut next = (NONE, 0);
        if end.block != NONE && !is_start(end.depth) {
            let (page, at) = place_of(end.block);
            next = (page, at + 1);
        }
        while placed < blocks.len() {
            let depth = start + placed as u32;
            if next.0 == NONE {
                let up = match is_start(depth) {
                    true => end.block,
                    false => NONE,
                };
                let guess = self.page_after(shared, up, paths[placed]);
                let found = guess
                    .or_else(|| self.page_of(shared, paths[placed], depth))
                    .or_else(|| {
                        let up_path = placed.checked_sub(1).map_or(before, |at| paths[at]);
                        self.new_page(shared, paths[placed], depth, end.block, up_path)
                    });
                let Some(page) = found else {
                    break;
                };
                if is_start(depth) {
                    let before = &mut end.trail[depth as usize / STRETCH % FAR];
                    if let Some((_, far)) = shared.pages.ahead(std::mem::replace(before, page)) {
                        far.store(page, Relaxed);
                    }
                }
                if guess.is_none() && up != NONE {
                    let (up, _) = place_of(up);
                    shared.pages.at(up).0.next.store(page, Relaxed);
                }
                next = (page, 0);
            }
            let (page, at) = next;
            let mut at = at;
            let (head, body) = shared.pages.at(page);
            let room = STRETCH - self.meta(page).depth as usize % STRETCH;
            self.unsettle(shared, page);
            // Blocks that are there.
            let mut held = 0;
            while placed < blocks.len()
                && at < head.len()
                && body.paths[at].load(Relaxed) == paths[placed]
            {
                let block = block_id(page, at);
                let alike = match way.is_usual && !known.has_aliases() {
                    true => {
                        self.hold_alike(shared, way, block, &paths[placed..], &blocks[placed..])
                    }
                    false => 0,
                };
                if alike > 0 {
                    known.blocks[way.tier as usize] += alike as u64;
                    held += alike;
                    at += alike;
                    placed += alike;
                    end.block = block_id(page, at - 1);
                    continue;
                }
                let is_new = self.hold(shared, known, way, block);
                held += usize::from(is_new);
                let name = blocks[placed].name;
                if !self.has_name(block, name) || known.has_aliases() {
                    // Other blocks of the page may go for it, but not this one.
                    known.count_page(page, std::mem::take(&mut held));
                    self.name(shared, known, way.slot, block, name, is_new);
                    self.unsettle(shared, page);
                }
                end.block = block;
                at += 1;
                placed += 1;
            }
            known.count_page(page, held);
            next = (NONE, 0);
            // New ones after the last.
            if at == head.len() && at < room && placed < blocks.len() {
                let from = placed;
                let fits = (room - at).min(blocks.len() - placed);
                head.prepare();
                while placed - from < fits {
                    if !known.has_aliases() {
                        let fits = fits - (placed - from);
                        let new = self.append(
                            page,
                            at,
                            alone,
                            body,
                            &paths[placed..placed + fits],
                            &blocks[placed..],
                        );
                        at += new;
                        placed += new;
                        if new > 0 {
                            end.block = block_id(page, at - 1);
                        }
                        if new == fits {
                            break;
                        }
                    }
                    if at > 0
                        && let Some(fork) =
                            self.page_of(shared, paths[placed], start + placed as u32)
                    {
                        next = (fork, 0);
                        break;
                    }
                    let name = blocks[placed].name;
                    let block = block_id(page, at);
                    if known.alias(name).is_some() {
                        // The tree knows another block by this name.
                        break;
                    }
                    match self.name_in_table(block, name) {
                        Naming::Done => {}
                        Naming::Taken(owner)
                            if self.knows_by_own_name(shared, known, way.slot, owner) =>
                        {
                            break;
                        }
                        Naming::Taken(_) | Naming::NoRoom => known.set_alias(block, name),
                    }
                    body.paths[at].store(paths[placed], Relaxed);
                    body.held[at].store(alone, Relaxed);
                    end.block = block_id(page, at);
                    at += 1;
                    placed += 1;
                }
                head.open();
                if at > 0 {
                    head.last.store(body.paths[at - 1].load(Relaxed), Relaxed);
                }
                head.close(at);
                self.count_new(known, way, page, at - (placed - from)..at);
                if next.0 == NONE && placed - from < fits {
                    next = self.make_way(shared, known, way, page, at, &blocks[placed]);
                    if next.0 == page {
                        continue;
                    }
                }
            }
            if self.meta(page).live > 0 {
                self.settle(shared, page);
            }
        }
        end.path = placed.checked_sub(1).map_or(end.path, |at| paths[at]);
        end.depth = start + placed as u32;
        self.paths = paths;
        placed
    }

    /// Forgets the block that the tree knows by the name of the next one, which is to be placed in
    /// `page` at `at`. Tells whether it still can be.
    #[cold]
    fn make_way(
        &mut self,
        shared: &Shared,
        known: &mut Known,
        way: Way,
        page: u32,
        at: usize,
        next: &NewBlock,
    ) -> (u32, usize) {
        if let Some(other) = self.resolve(shared, known, way.slot, next.name) {
            self.forget(shared, known, way.slot, other);
        }
        // An empty page is one that was just made for this block.
        let is_there = at == 0 || self.meta(page).live > 0;
        if is_there && shared.pages.at(page).0.len() == at {
            (page, at)
        } else {
            (NONE, 0)
        }
    }

    /// Appends blocks with these paths to a page, as long as it is plain that nobody knows them: no page is
    /// seen to begin with one, and nothing is like its name. Returns how many.
    #[inline]
    fn append(
        &mut self,
        page: PageId,
        first: usize,
        alone: u32,
        body: &Body,
        paths: &[u64],
        blocks: &[NewBlock],
    ) -> usize {
        let Self { names, chunks, .. } = self;
        let chunk = &mut chunks[page as usize / CHUNK];
        let places = body.paths[first..].iter().zip(&body.held[first..]);
        let places = places
            .zip(&mut chunk.rows[page as usize % CHUNK].names[first..])
            .zip(first..);
        let new = paths.iter().zip(blocks).zip(places);
        let mut done = 0;
        for ((path, block), (((to_path, held), name), at)) in new {
            if at > 0 && has_fork_bit(&self.fork_bits, *path) {
                break;
            }
            if let Some(ahead) = blocks.get(done + AHEAD) {
                names.prefetch(ahead.name.0);
            }
            if !names.insert_plainly(block.name.0, block_id(page, at)) {
                break;
            }
            to_path.store(*path, Relaxed);
            held.store(alone, Relaxed);
            *name = block.name.0;
            done += 1;
        }
        chunk.rows[page as usize % CHUNK].meta.named |= ((1 << done) - 1) << first;
        done
    }

    /// Counts blocks that a page got, and that no tree held before.
    #[inline]
    fn count_new(&mut self, known: &mut Known, way: Way, page: PageId, places: Range<usize>) {
        let new = places.len();
        self.meta_mut(page).live += new as u32;
        self.blocks += new as u64;
        self.memberships += new as u64;
        known.count_page(page, new);
        if way.is_usual {
            known.blocks[way.tier as usize] += new as u64;
        } else {
            for at in places {
                self.first(known, way, block_id(page, at));
            }
        }
    }
}

pub(super) fn first_copies(tier: Tier, copies: Copies) -> [u16; Tier::COUNT] {
    let mut first = [0; Tier::COUNT];
    first[tier as usize] = match copies {
        Copies::Counted => 1,
        Copies::Unknown => UNKNOWN,
    };
    first
}
