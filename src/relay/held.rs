//! What each worker of a group holds of a prompt's start: exactly, where it tells of its cache and the
//! prompt's tokens are known; else what we sent it.

use std::cmp::Reverse;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Instant;

use serde::Serialize;
use smallvec::SmallVec;

use crate::fleet::Group;
use crate::ids::Block;
use crate::ids::WorkerId;
use crate::kv::Holder;
use crate::kv::block;
use crate::kv::block::Local;
use crate::kv::block::Root;
use crate::kv::expected;
use crate::kv::expected::Expected;
use crate::kv::expected::Marks;
use crate::kv::forest::Forest;
use crate::kv::index::Depth;
use crate::kv::index::Index;
use crate::kv::predicted::Predicted;
use crate::kv::subscriber::Board;

/// What is known of the workers' caches.
#[derive(Clone, Debug)]
pub struct Caches {
    /// What workers tell of themselves.
    pub forest: Arc<Forest>,
    /// Whom of them we hear.
    pub board: Arc<Board>,
    /// What was just sent to them, and they have not told of yet.
    pub expected: Arc<Expected>,
    /// What all were sent.
    pub predicted: Arc<Predicted>,
}

/// Where the knowledge of what a worker holds of a prompt comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum KnownBy {
    /// The worker's own events.
    Events,
    /// It is computing it, or has just done so, and has not told yet.
    Expected,
    /// What it was sent: it tells no events that reach us, or the prompt's tokens are not known.
    Prediction,
}

/// A prompt as caches are asked for it.
#[derive(Debug, Default)]
pub(super) struct Prompt {
    /// As the predicted index is asked.
    pub(super) blocks: Vec<Block>,
    /// As the trees are asked; none where its tokens are not known.
    pub(super) exact: Option<Exact>,
}

/// A prompt's blocks, in every size in which its model's engines have them; nearly always one.
#[derive(Debug)]
pub(super) struct Exact {
    root: Root,
    cuts: SmallVec<[Cut; 1]>,
    /// Whether the prompt goes on after these blocks, with an image and what follows it.
    pub(super) ends_early: bool,
}

#[derive(Debug)]
struct Cut {
    size: NonZeroU32,
    index: Arc<Index>,
    locals: Vec<Local>,
    marks: Marks,
}

impl Exact {
    pub(super) fn new(
        forest: &Forest,
        group: &Group,
        cache_salt: Option<&str>,
        token_ids: &[u32],
    ) -> Self {
        let adapter = group.is_adapter.then_some(&*group.model);
        let root = block::root(adapter, cache_salt);
        let indexes = group.bases.iter().flat_map(|base| forest.of(base));
        let cuts = indexes.map(|(size, index)| {
            let mut locals = Vec::new();
            block::locals(token_ids, size, &mut locals);
            Cut {
                size,
                index,
                marks: expected::marks(root, &locals),
                locals,
            }
        });
        Self {
            root,
            cuts: cuts.collect(),
            ends_early: false,
        }
    }

    pub(super) fn blocks(&self) -> usize {
        let lengths = self.cuts.iter().map(|cut| cut.locals.len());
        lengths.max().unwrap_or(0)
    }

    /// Tokens of the full blocks.
    fn tokens(&self) -> u32 {
        let tokens = |cut: &Cut| (cut.locals.len() as u32).saturating_mul(cut.size.get());
        self.cuts.iter().map(tokens).min().unwrap_or(0)
    }

    /// As the prompt's blocks are counted while they are on their way.
    pub(super) fn marks(&self) -> impl Iterator<Item = &Marks> {
        self.cuts.iter().map(|cut| &cut.marks)
    }

    /// Tokens that workers hold or are about to, by worker.
    fn ask(
        &self,
        group: &Group,
        expected: &Expected,
        now: Instant,
        holders_max: usize,
    ) -> Vec<Known> {
        let mut held = self.ask_trees(group);
        for cut in &self.cuts {
            for holder in expected.overlap(now, &cut.marks, holders_max) {
                let tokens = holder.blocks.saturating_mul(cut.size.get());
                match held.binary_search_by_key(&holder.worker, |known| known.worker) {
                    Ok(found) if held[found].tokens < tokens => {
                        held[found] = Known::expected(holder.worker, tokens);
                    }
                    Ok(_) => {}
                    Err(place) if group.place.contains_key(&holder.worker) => {
                        held.insert(place, Known::expected(holder.worker, tokens));
                    }
                    Err(_) => {}
                }
            }
        }
        held
    }

    /// Tokens that workers say they hold, by worker. A worker of several ranks counts by the one that holds the
    /// least, since the request may go to any of them.
    fn ask_trees(&self, group: &Group) -> Vec<Known> {
        let mut depths: Vec<(Depth, u32)> = Vec::new();
        let mut found = Vec::new();
        for cut in &self.cuts {
            found.clear();
            cut.index.overlap(self.root, &cut.locals, &mut found);
            depths.extend(found.iter().map(|depth| (*depth, cut.size.get())));
        }
        depths.sort_unstable_by_key(|(depth, _)| (depth.worker, depth.rank));
        let mut held = Vec::with_capacity(depths.len());
        for ranks in depths.chunk_by(|(a, _), (b, _)| a.worker == b.worker) {
            let worker = ranks[0].0.worker;
            let tokens = ranks
                .iter()
                .map(|(depth, size)| depth.blocks.saturating_mul(*size));
            match group.place.get(&worker) {
                Some(place) if group.event_ranks[*place] as usize == ranks.len() => {
                    held.push(Known {
                        worker,
                        tokens: tokens.min().unwrap_or(0),
                        by: KnownBy::Events,
                    });
                }
                // Another model's, down, or a rank of it holds nothing.
                _ => {}
            }
        }
        held
    }
}

/// What one worker holds of a prompt.
#[derive(Clone, Copy, Debug)]
struct Known {
    worker: WorkerId,
    tokens: u32,
    by: KnownBy,
}

impl Known {
    fn expected(worker: WorkerId, tokens: u32) -> Self {
        let by = KnownBy::Expected;
        Self { worker, tokens, by }
    }
}

/// The answers for one prompt. Looked up once for the deepest holders, and for others when asked.
pub(super) struct Held<'a> {
    group: &'a Group,
    caches: &'a Caches,
    blocks: &'a [Block],
    /// By worker, in order; none where the prompt's tokens are not known.
    exact: Option<Vec<Known>>,
    /// Places of the deepest holders, and the tokens that each holds.
    places: SmallVec<[usize; 8]>,
    tokens: SmallVec<[u32; 8]>,
    /// No other worker is predicted to hold more than so many blocks: those of the last holder that
    /// was asked for, or none if there were fewer holders than that.
    others_max: usize,
}

impl<'a> Held<'a> {
    pub(super) fn new(
        group: &'a Group,
        caches: &'a Caches,
        prompt: &'a Prompt,
        now: Instant,
        holders_max: usize,
        seed: u64,
    ) -> Self {
        let overlap = caches.predicted.overlap(&prompt.blocks, holders_max, seed);
        let others_max = match overlap.last() {
            Some(last) if overlap.len() == holders_max => last.blocks as usize,
            _ => 0,
        };
        let mut held = Self {
            group,
            caches,
            blocks: &prompt.blocks,
            exact: prompt
                .exact
                .as_ref()
                .map(|exact| exact.ask(group, &caches.expected, now, holders_max)),
            places: SmallVec::new(),
            tokens: SmallVec::new(),
            others_max,
        };
        if let Some(exact) = prompt.exact.as_ref().filter(|exact| exact.ends_early) {
            held.go_on_after_image(exact.tokens(), &overlap);
        }
        for holder in overlap {
            // A holder that is down or serves another model now has no place.
            if let Some(place) = group.place.get(&holder.worker)
                && !held.is_exact(*place)
            {
                held.places.push(*place);
                held.tokens.push(held.of_blocks(holder.blocks));
            }
        }
        held.add_exact(holders_max, seed);
        held
    }

    /// Of what comes after an image events tell nothing that can be compared: who holds all `known_tokens`
    /// before it is believed to hold what it was sent.
    fn go_on_after_image(&mut self, known_tokens: u32, overlap: &[Holder]) {
        for holder in overlap {
            let tokens = self.of_blocks(holder.blocks);
            let Some(exact) = &mut self.exact else {
                return;
            };
            let by = KnownBy::Prediction;
            let worker = holder.worker;
            let predicted = Known { worker, tokens, by };
            match exact.binary_search_by_key(&worker, |known| known.worker) {
                Ok(found) if (known_tokens..tokens).contains(&exact[found].tokens) => {
                    exact[found] = predicted;
                }
                Err(place) if known_tokens == 0 => exact.insert(place, predicted),
                _ => {}
            }
        }
    }

    fn add_exact(&mut self, holders_max: usize, seed: u64) {
        let Some(exact) = &self.exact else {
            return;
        };
        let mut deepest: Vec<(u32, u64, WorkerId)> = exact
            .iter()
            .map(|known| (known.tokens, drawn(seed, known.worker), known.worker))
            .collect();
        if deepest.len() > holders_max && holders_max > 0 {
            deepest.select_nth_unstable_by_key(holders_max - 1, |holder| Reverse(*holder));
            deepest.truncate(holders_max);
        }
        for (tokens, _, worker) in deepest {
            if let Some(place) = self.group.place.get(&worker)
                && self.is_exact(*place)
            {
                self.places.push(*place);
                self.tokens.push(tokens);
            }
        }
    }

    pub(super) fn holders(&self) -> &[usize] {
        &self.places
    }

    /// Whether what is said of a worker is what it says itself, if only that it cannot be relied on now.
    pub(super) fn is_exact(&self, place: usize) -> bool {
        let ranks = self.group.event_ranks[place];
        let worker = self.group.workers[place].id;
        self.exact.is_some() && ranks > 0 && self.caches.board.is_heard(worker, ranks)
    }

    pub(super) fn known_by(&self, place: usize) -> KnownBy {
        match &self.exact {
            Some(exact) if self.is_exact(place) => {
                let worker = self.group.workers[place].id;
                known(exact, worker).map_or(KnownBy::Events, |it| it.by)
            }
            _ => KnownBy::Prediction,
        }
    }

    pub(super) fn tokens(&self, place: usize) -> u32 {
        if let Some(known) = self.places.iter().position(|known| *known == place) {
            return self.tokens[known];
        }
        let worker = self.group.workers[place].id;
        match &self.exact {
            Some(exact) if self.is_exact(place) => known(exact, worker).map_or(0, |it| it.tokens),
            _ if self.others_max == 0 => 0,
            // Most often all of that, which takes one look: a system prompt that the whole fleet holds.
            _ => {
                let blocks = &self.blocks[..self.others_max];
                self.of_blocks(self.caches.predicted.depth(worker, blocks))
            }
        }
    }

    fn of_blocks(&self, blocks: u32) -> u32 {
        (blocks as usize)
            .checked_sub(1)
            .map_or(0, |last| self.blocks[last].end_tokens)
    }
}

fn known(exact: &[Known], worker: WorkerId) -> Option<&Known> {
    let found = exact.binary_search_by_key(&worker, |known| known.worker);
    found.ok().map(|found| &exact[found])
}

/// Another order of workers for each request, so that ties don't always fall on the same ones.
fn drawn(seed: u64, worker: WorkerId) -> u64 {
    (seed ^ u64::from(worker.0)).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}
