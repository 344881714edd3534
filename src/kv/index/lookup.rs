//! How deep each tree holds a prompt, read while the writer goes on.
//!
//! What a reader reports of a block was true at one moment between the lookup's begin and its end:
//! page and version, the word of the holders and the set's generation are looked at again after what
//! they stand for was read, and what does not agree is read once more or not used.

use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Acquire;
use std::sync::atomic::Ordering::Relaxed;

use smallvec::SmallVec;

use super::Depth;
use super::Shared;
use super::holders::GROUP;
use super::holders::Groups;
use super::holders::Members;
use super::holders::NOBODY;
use super::holders::Slot;
use super::pages::Body;
use super::pages::FAR;
use super::pages::Head;
use super::pages::PageId;
use super::pages::Version;
use super::roster::Roll;
use super::simd::prefetch;
use super::table::Table;
use crate::kv::block::Local;
use crate::kv::block::Path;
use crate::kv::block::Root;
use crate::kv::block::STRETCH;

/// How often a page that the writer is changing is looked at again. A change takes nanoseconds, unless
/// the writer's thread was put to sleep in it; then its blocks are missed.
const TRIES: usize = 64;

/// How many stretches ahead a prompt is asked for.
const AHEAD: usize = 8;

/// A lookup on its way along a prompt.
struct Walk<'a> {
    shared: &'a Shared,
    roll: Roll,
    /// Trees that hold all blocks so far, and those of them that have all in the GPU.
    any: Groups,
    gpu: Groups,
    /// Those that have the last block on disk only; empty while nobody has.
    disk: Groups,
    /// Trees that do not have all in the GPU.
    lower: SmallVec<[Lower; 4]>,
    /// The word of holders that nobody of `any` was lost by last, and its generation.
    last: (u32, u64),
    members: Members,
    found: &'a mut Vec<Depth>,
}

/// A tree that does not have all in the GPU.
struct Lower {
    slot: Slot,
    gpu_blocks: u32,
    /// Blocks on disk only. While the last one is, less where they began: where they end is added.
    disk_blocks: u32,
}

enum Next {
    GoOn,
    Over,
}

impl Shared {
    pub(super) fn overlap(&self, root: Root, locals: &[Local], found: &mut Vec<Depth>) {
        let starts = self.starts.load();
        let roll = self.roster.call();
        let mut walk = Walk {
            shared: self,
            roll,
            any: Groups::new(),
            gpu: Groups::new(),
            disk: Groups::new(),
            lower: SmallVec::new(),
            last: (NOBODY, 0),
            members: Members::default(),
            found,
        };
        let mut state = Path::start(root);
        let mut page: Option<(PageId, &Head)> = None;
        for (number, stretch) in locals.chunks(STRETCH).enumerate() {
            let depth = (number * STRETCH) as u32;
            if let Some([first, .., last]) =
                locals.get((number + AHEAD) * STRETCH..(number + AHEAD + 1) * STRETCH)
            {
                prefetch(first);
                prefetch(last);
            }
            let (first, last) = state.stretch(stretch);
            let next = page.and_then(|page| self.page_after(page, first));
            let Some((at, head)) = next.or_else(|| self.page_at(&starts, first)) else {
                walk.end(depth);
                return;
            };
            page = Some((at, head));
            let passes = match depth {
                0 => walk.begins(head, first, last, stretch.len()),
                _ => walk.passes(head, first, last, stretch.len()),
            };
            if !passes {
                let Some((_, body)) = self.pages.page(at) else {
                    return;
                };
                if depth == 0 && !walk.begin(head, body, first) {
                    return;
                }
                page = walk.stretch((at, head, body), state, stretch, depth);
                if page.is_none() {
                    return;
                }
            }
            state = last;
        }
        walk.end(locals.len() as u32);
    }

    /// The page where a chain went on last after a page, if it is the one that begins with a path.
    #[inline]
    fn page_after(&self, (page, head): (PageId, &Head), first: Path) -> Option<(PageId, &Head)> {
        let next = head.next.load(Relaxed);
        if let Some((_, far)) = self.pages.ahead(page)
            && let Some((head, far)) = self.pages.ahead(far.load(Relaxed))
        {
            prefetch(head);
            prefetch(far);
        }
        let head = self.pages.head(next)?;
        begins_with(head, first).then_some((next, head))
    }

    /// The page that begins with a path.
    #[inline(never)]
    fn page_at(&self, table: &Table, first: Path) -> Option<(PageId, &Head)> {
        let found = table.find(first.mixed(), |page| {
            let head = self.pages.head(page);
            head.is_some_and(|head| begins_with(head, first))
        })?;
        // They mostly follow each other, two to a line.
        for ahead in (1..FAR as u32).step_by(2) {
            if let Some((head, far)) = self.pages.ahead(found.wrapping_add(ahead)) {
                prefetch(head);
                prefetch(far);
            }
        }
        Some((found, self.pages.head(found)?))
    }
}

impl<'a> Walk<'a> {
    /// Takes the holders of the first page, if they are the same for all of it and it is just this
    /// stretch: then its blocks need not be looked at.
    #[inline]
    fn begins(&mut self, head: &Head, first: Path, last: Path, len: usize) -> bool {
        let Some((version, all)) = whole(head, first, last, len) else {
            return false;
        };
        match self.read(&head.all, all) {
            Some(generation) if head.is_still(version) => {
                self.take(all, generation);
                true
            }
            _ => false,
        }
    }

    /// Goes on with `members`.
    fn take(&mut self, word: u32, generation: u64) {
        self.any.extend_from_slice(&self.members.gpu);
        self.gpu.extend_from_slice(&self.members.gpu);
        if self.members.has_low {
            for group in 0..self.roll.groups {
                let low = self.members.low[group];
                self.any[group] |= low;
                self.lower.extend(bits(group, low).map(|slot| Lower {
                    slot,
                    gpu_blocks: 0,
                    disk_blocks: 0,
                }));
            }
        }
        if self.members.has_disk {
            self.disk.extend_from_slice(&self.members.disk);
        }
        self.last = (word, generation);
    }

    /// Takes the holders of the first block. False if there are none.
    fn begin(&mut self, head: &Head, body: &Body, first: Path) -> bool {
        for _ in 0..TRIES {
            let Some(version) = head.version() else {
                std::hint::spin_loop();
                continue;
            };
            if version.len() == 0 || body.paths[0].load(Relaxed) != first.0 {
                return false;
            }
            pause();
            let held = body.held[0].load(Acquire);
            if held == NOBODY {
                return false;
            }
            if let Some(generation) = self.read(&body.held[0], held)
                && head.is_still(version)
            {
                self.take(held, generation);
                return true;
            }
        }
        false
    }

    /// Whether a page is just this stretch, and all trees hold all of it as they held what is before.
    #[inline]
    fn passes(&mut self, head: &Head, first: Path, last: Path, len: usize) -> bool {
        let Some((version, all)) = whole(head, first, last, len) else {
            return false;
        };
        if self.is_last(all) {
            return head.is_still(version);
        }
        let Some(generation) = self.read(&head.all, all) else {
            return false;
        };
        if !head.is_still(version) || self.loses() {
            return false;
        }
        self.last = (all, generation);
        true
    }

    /// A stretch block by block, through the pages that part within it. Returns the last of them; none
    /// when it is over.
    #[inline(never)]
    fn stretch(
        &mut self,
        page: (PageId, &'a Head, &Body),
        before: Path,
        stretch: &[Local],
        depth: u32,
    ) -> Option<(PageId, &'a Head)> {
        let mut paths = [0; STRETCH];
        let mut path = before;
        for (at, local) in stretch.iter().enumerate() {
            path = path.step(*local, depth + at as u32);
            paths[at] = path.0;
        }
        let paths = &paths[..stretch.len()];
        let mut done = 0;
        let (mut at, mut head, mut body) = page;
        loop {
            let matched = self.page(head, body, &paths[done..], depth + done as u32)?;
            done += matched;
            if done == paths.len() {
                return Some((at, head));
            }
            let forks = self.shared.forks.load();
            let next = match matched {
                0 => None,
                _ => self.shared.page_at(&forks, Path(paths[done])),
            };
            let Some(page) = next.and_then(|(next, _)| self.shared.pages.page(next)) else {
                self.end(depth + done as u32);
                return None;
            };
            at = next.map_or(at, |(next, _)| next);
            (head, body) = page;
        }
    }

    /// Goes along one page's blocks as far as they are these. None when nobody is left.
    fn page(&mut self, head: &Head, body: &Body, paths: &[u64], depth: u32) -> Option<usize> {
        let mut tries = TRIES;
        let mut at = 0;
        while at < paths.len() {
            tries -= 1;
            if tries == 0 {
                break;
            }
            let Some(version) = head.version() else {
                std::hint::spin_loop();
                continue;
            };
            // Blocks that were passed before the page changed were there; these go on from them.
            while at < version.len().min(paths.len()) && body.paths[at].load(Relaxed) == paths[at] {
                match self.block(head, version, &body.held[at], depth + at as u32) {
                    Ok(Next::GoOn) => at += 1,
                    Ok(Next::Over) => return None,
                    Err(Changed) => break,
                }
            }
            if head.is_still(version) {
                let is_end = at >= version.len().min(paths.len())
                    || body.paths[at].load(Relaxed) != paths[at];
                if is_end && head.is_still(version) {
                    break;
                }
            }
        }
        Some(at)
    }

    fn block(
        &mut self,
        head: &Head,
        version: Version,
        held: &AtomicU32,
        depth: u32,
    ) -> Result<Next, Changed> {
        pause();
        let word = held.load(Acquire);
        if self.is_last(word) {
            return match head.is_still(version) {
                true => Ok(Next::GoOn),
                false => Err(Changed),
            };
        }
        let generation = self.read(held, word).ok_or(Changed)?;
        if !head.is_still(version) {
            return Err(Changed);
        }
        self.narrow(depth);
        self.last = (word, generation);
        if self.any.iter().all(|group| *group == 0) {
            return Ok(Next::Over);
        }
        Ok(Next::GoOn)
    }

    /// Whether a word means what nobody was lost by last.
    #[inline]
    fn is_last(&self, word: u32) -> bool {
        // A set's generation only rises: the same now as then is the same in between.
        word == self.last.0 && word != NOBODY && self.shared.sets.generation(word) == self.last.1
    }

    /// Reads who is meant by a word into `members`, and that it still is what its place says.
    #[inline]
    fn read(&mut self, place: &AtomicU32, word: u32) -> Option<u64> {
        self.members.reset(self.roll.groups);
        pause();
        let generation = self.shared.sets.read(word, &mut self.members)?;
        pause();
        // In this order: at the moment of the first load the word was there, and it meant what was
        // read from before until after that.
        let is_there = place.load(Acquire) == word;
        let is_same = word == NOBODY || self.shared.sets.generation(word) == generation;
        (is_there && is_same || word == NOBODY).then_some(generation)
    }

    /// Whether `members` would take anybody out, or say another tier of anybody.
    #[inline]
    fn loses(&self) -> bool {
        let gpu = self.gpu.iter().zip(&self.members.gpu);
        let lost = gpu.fold(0, |lost, (gpu, held)| lost | (gpu & !held));
        if !self.members.has_low && self.lower.is_empty() {
            return lost != 0;
        }
        let any = self.any.iter().enumerate();
        let lost_at_all = any.fold(0, |lost, (group, any)| {
            let disk = self.members.disk(group) & any;
            lost | (any & !(self.members.gpu[group] | self.members.low[group]))
                | (disk ^ self.disk.get(group).copied().unwrap_or(0))
        });
        (lost | lost_at_all) != 0
    }

    /// Reports the trees that are not among `members`.
    fn narrow(&mut self, depth: u32) {
        for group in 0..self.roll.groups {
            let gpu = self.members.gpu[group];
            let low = match self.members.has_low {
                true => self.members.low[group],
                false => 0,
            };
            let from_gpu = self.gpu[group] & !gpu;
            self.gpu[group] &= gpu;
            let gone = self.any[group] & !(gpu | low);
            self.any[group] &= gpu | low;
            for slot in bits(group, from_gpu & !gone) {
                self.lower.push(Lower {
                    slot,
                    gpu_blocks: depth,
                    disk_blocks: 0,
                });
            }
            if self.members.has_disk || !self.disk.is_empty() {
                self.narrow_disk(group, depth);
            }
            for slot in bits(group, gone) {
                self.report(slot, depth);
            }
        }
    }

    /// Counts from where on trees have a prompt's blocks on disk only, and up to where.
    #[inline(never)]
    fn narrow_disk(&mut self, group: usize, depth: u32) {
        self.disk.resize(self.any.len(), 0);
        let now = self.members.disk(group) & self.any[group];
        let before = std::mem::replace(&mut self.disk[group], now);
        for slot in bits(group, now ^ before) {
            let bit = 1 << (slot as usize % GROUP);
            if let Some(lower) = self.lower.iter_mut().find(|lower| lower.slot == slot) {
                lower.disk_blocks = match now & bit {
                    0 => lower.disk_blocks.wrapping_add(depth),
                    _ => lower.disk_blocks.wrapping_sub(depth),
                };
            }
        }
    }

    /// Reports all who are left.
    fn end(&mut self, depth: u32) {
        if !self.disk.is_empty() {
            self.members.reset(self.roll.groups);
            (0..self.disk.len()).for_each(|group| self.narrow_disk(group, depth));
        }
        for group in 0..self.any.len() {
            for slot in bits(group, self.any[group]) {
                self.report(slot, depth);
            }
        }
    }

    #[inline]
    fn report(&mut self, slot: Slot, blocks: u32) {
        let Some((worker, rank)) = self.shared.roster.who(self.roll, slot) else {
            return;
        };
        let lower = self.lower.iter().find(|lower| lower.slot == slot);
        self.found.push(Depth {
            worker,
            rank,
            blocks,
            gpu_blocks: lower.map_or(blocks, |lower| lower.gpu_blocks),
            disk_blocks: lower.map_or(0, |lower| lower.disk_blocks),
        });
    }
}

#[inline]
fn begins_with(head: &Head, first: Path) -> bool {
    head.first.load(Relaxed) == first.0 && head.len() > 0
}

/// A page's version and the word of its common holders, if it is just this stretch and has any.
#[inline]
fn whole(head: &Head, first: Path, last: Path, len: usize) -> Option<(Version, u32)> {
    let version = head.version()?;
    let is_it = version.len() == len
        && head.last.load(Relaxed) == last.0
        && head.first.load(Relaxed) == first.0;
    pause();
    let all = head.all.load(Acquire);
    let is_whole = is_it && all != NOBODY;
    is_whole.then_some((version, all))
}

/// Where a reader may be overtaken. Tests let it be: it waits now and then while the writer goes on,
/// or the writer goes on right here.
#[cfg(not(test))]
#[inline(always)]
fn pause() {}

#[cfg(test)]
thread_local! {
    /// What happens where this thread's readers pause.
    pub(super) static AT_PAUSE: std::cell::RefCell<Option<Box<dyn FnMut()>>> =
        const { std::cell::RefCell::new(None) };
}

#[cfg(test)]
fn pause() {
    if let Some(mut at_pause) = AT_PAUSE.take() {
        at_pause();
        AT_PAUSE.set(Some(at_pause));
    }
    thread_local! {
        static PASSED: std::cell::Cell<u32> = const { std::cell::Cell::new(0) };
    }
    let passed = PASSED.get().wrapping_add(1);
    PASSED.set(passed);
    if passed.is_multiple_of(11) {
        std::thread::yield_now();
        (0..300).for_each(|_| std::hint::spin_loop());
    }
}

/// The page changed while it was read.
struct Changed;

fn bits(group: usize, mut bits: u64) -> impl Iterator<Item = Slot> {
    std::iter::from_fn(move || {
        let bit = (bits != 0).then(|| bits.trailing_zeros())?;
        bits &= bits - 1;
        Some((group * GROUP) as Slot + bit)
    })
}
