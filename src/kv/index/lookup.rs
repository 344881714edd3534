//! How deep each tree holds a prompt, read while the writer goes on.
//!
//! What a reader reports of a block was true at one moment between the lookup's begin and its end:
//! page and version, the word of the holders and the set's generation are looked at again after what
//! they stand for was read, and what does not agree is read once more or not used.

mod tally;

use std::sync::atomic::Ordering::{Acquire, Relaxed};
use std::sync::atomic::{AtomicU32, AtomicU64};

use self::tally::Tally;
use super::holders::{Members, NOBODY};
use super::pages::{Body, FAR, Head, PageId, Version};
use super::pause::pause;
use super::simd::prefetch;
use super::table::Table;
use super::{Depth, Shared};
use crate::kv::block::{Local, Path, Root, STRETCH};

/// How often a page that the writer is changing is looked at again. A change is some stores, unless the
/// writer's thread was put to sleep among them; then its blocks are missed.
const TRIES: usize = 64;

/// A word that no block has: of a class of sets that there is not.
const NO_WORD: u32 = u32::MAX;

/// A lookup on its way along a prompt.
struct Walk<'a> {
    shared: &'a Shared,
    tally: Tally<'a>,
    /// Who is left in the tally is among these.
    last: Last<'a>,
    /// The holders that were read last.
    members: Members,
}

/// A word of holders, where its generation is, and which it was.
struct Last<'a> {
    word: u32,
    now: &'a AtomicU64,
    then: u64,
}

enum Next {
    GoOn,
    Over,
}

/// A page on the way: its head, and where its chain may be [`FAR`] stretches on.
type At<'a> = (&'a Head, &'a AtomicU32);

impl Shared {
    pub(super) fn overlap(&self, root: Root, locals: &[Local], found: &mut Vec<Depth>) {
        let mut walk = Walk {
            shared: self,
            tally: Tally::new(&self.roster, found),
            last: Last {
                word: NO_WORD,
                now: self.sets.generation(NO_WORD),
                then: 0,
            },
            members: Members::default(),
        };
        let nowhere = Head::nowhere();
        let mut at = (&nowhere, &nowhere.next);
        let mut state = Path::start(root);
        let mut depth = 0;
        let (stretches, rest) = locals.as_chunks::<STRETCH>();
        for stretch in stretches {
            let ends = state.stretch(stretch);
            let next = walk
                .goes_on(at, ends)
                .or_else(|| walk.turns(at, state, ends, stretch, depth));
            let Some(next) = next else {
                return;
            };
            at = next;
            (_, state) = ends;
            depth += STRETCH as u32;
        }
        if !rest.is_empty() {
            let ends = state.stretch(rest);
            if walk.turns(at, state, ends, rest, depth).is_none() {
                return;
            }
            depth += rest.len() as u32;
        }
        walk.tally.end(depth);
    }

    /// The page where a chain went on last after a page, if it is the one that begins with a path.
    #[inline]
    fn page_after(&self, head: &Head, first: Path) -> Option<(PageId, &Head)> {
        let next = head.next.load(Relaxed);
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
    /// The page after one, where the guess is right, it is just the stretch of these paths, and the same
    /// trees hold all of it as before: nearly every step of a long way.
    #[inline]
    fn goes_on(&self, (head, far): At<'a>, (first, last): (Path, Path)) -> Option<At<'a>> {
        let pages = &self.shared.pages;
        if let Some((head, far)) = pages.ahead(far.load(Relaxed)) {
            prefetch(head);
            prefetch(far);
        }
        let (head, far) = pages.ahead(head.next.load(Relaxed))?;
        let (version, all) = whole(head, first, last, STRETCH)?;
        (self.is_last(all) && head.is_still(version)).then_some((head, far))
    }

    /// Any other step, over the stretch that follows `before`. Returns its last page; none when it is over.
    #[inline(never)]
    fn turns(
        &mut self,
        (head, _): At<'a>,
        before: Path,
        (first, last): (Path, Path),
        stretch: &[Local],
        depth: u32,
    ) -> Option<At<'a>> {
        let next = self.shared.page_after(head, first);
        let next = next.or_else(|| self.shared.page_at(&self.shared.starts.load(), first));
        let Some((at, head)) = next else {
            self.tally.end(depth);
            return None;
        };
        let passes = match depth {
            0 => self.begins(head, first, last, stretch.len()),
            _ => self.passes(head, first, last, stretch.len()),
        };
        if passes {
            return self.shared.pages.ahead(at);
        }
        let (_, body) = self.shared.pages.page(at)?;
        prefetch(&body.paths);
        prefetch(&body.paths[STRETCH / 2]);
        prefetch(&body.held);
        if depth == 0 && !self.begin(head, body, first) {
            return None;
        }
        let last = self.stretch((at, head, body), before, stretch, depth)?;
        self.shared.pages.ahead(last)
    }

    /// Takes the holders of the first page, if they are the same for all of it and it is just this
    /// stretch: then its blocks need not be looked at.
    #[inline]
    fn begins(&mut self, head: &Head, first: Path, last: Path, len: usize) -> bool {
        let Some((version, all)) = whole(head, first, last, len) else {
            return false;
        };
        match self.read(&head.all, all) {
            Some(generation) if head.is_still(version) => {
                self.tally.begin(&self.members);
                self.keep(all, generation);
                true
            }
            _ => false,
        }
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
                self.tally.begin(&self.members);
                self.keep(held, generation);
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
        if !head.is_still(version) || self.tally.loses(&self.members) {
            return false;
        }
        self.keep(all, generation);
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
    ) -> Option<PageId> {
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
                return Some(at);
            }
            let forks = self.shared.forks.load();
            let fork = match matched {
                0 => None,
                _ => self.shared.page_at(&forks, Path(paths[done])),
            };
            let Some((next, (next_head, next_body))) =
                fork.and_then(|(next, _)| Some((next, self.shared.pages.page(next)?)))
            else {
                self.tally.end(depth + done as u32);
                return None;
            };
            (at, head, body) = (next, next_head, next_body);
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
            let there = body.paths.get(at..version.len()).unwrap_or_default();
            let these = there.iter().zip(&paths[at..]);
            let end = at + these.take_while(|(a, b)| a.load(Relaxed) == **b).count();
            while at < end {
                at += self.alike(head, version, &body.held[at..end]);
                if at == end {
                    break;
                }
                match self.block(head, version, &body.held[at], depth + at as u32) {
                    Ok(Next::GoOn) => at += 1,
                    Ok(Next::Over) => return None,
                    Err(Changed) => break,
                }
            }
            // That there are no more of these was so since `version`: a place is another block's only after
            // nobody held the one before.
            if at == end {
                break;
            }
        }
        Some(at)
    }

    /// How many blocks, from the first on, are held as the last one was.
    #[inline]
    fn alike(&self, head: &Head, version: Version, held: &[AtomicU32]) -> usize {
        pause();
        let alike = held
            .iter()
            .take_while(|held| held.load(Acquire) == self.last.word)
            .count();
        // What the word means is looked at after all of them were.
        match self.is_last(self.last.word) && head.is_still(version) {
            true => alike,
            false => 0,
        }
    }

    /// Takes out who does not hold a block.
    fn block(
        &mut self,
        head: &Head,
        version: Version,
        held: &AtomicU32,
        depth: u32,
    ) -> Result<Next, Changed> {
        pause();
        let word = held.load(Acquire);
        let generation = self.read(held, word).ok_or(Changed)?;
        if !head.is_still(version) {
            return Err(Changed);
        }
        self.tally.narrow(&self.members, depth);
        self.keep(word, generation);
        match self.tally.is_over() {
            true => Ok(Next::Over),
            false => Ok(Next::GoOn),
        }
    }

    fn keep(&mut self, word: u32, generation: u64) {
        self.last = Last {
            word,
            now: self.shared.sets.generation(word),
            then: generation,
        };
    }

    /// Whether a word means what the last one did, so that it takes nobody out.
    #[inline]
    fn is_last(&self, word: u32) -> bool {
        // A set's generation only rises: the same now as then is the same in between.
        word == self.last.word && self.last.now.load(Acquire) == self.last.then
    }

    /// Reads who is meant by a word into `members`, and that it still is what its place says.
    #[inline]
    fn read(&mut self, place: &AtomicU32, word: u32) -> Option<u64> {
        self.members.reset(self.tally.groups());
        pause();
        if word == NOBODY {
            return Some(0);
        }
        let generation = self.shared.sets.read(word, &mut self.members)?;
        pause();
        // In this order: at the moment of the first load the word was there, and it meant what was
        // read from before until after that.
        let is_there = place.load(Acquire) == word;
        let is_same = self.shared.sets.generation(word).load(Acquire) == generation;
        (is_there && is_same).then_some(generation)
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

/// The page changed while it was read.
struct Changed;
