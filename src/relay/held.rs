//! What each worker of a group holds of a prompt's start: exactly, where it tells of its cache and the
//! prompt's tokens are known; else what we sent it.

use std::cmp::Reverse;
use std::num::NonZeroU32;
use std::sync::Arc;

use smallvec::SmallVec;

use crate::fleet::Group;
use crate::ids::Block;
use crate::ids::WorkerId;
use crate::kv::block;
use crate::kv::block::Local;
use crate::kv::block::Root;
use crate::kv::forest::Forest;
use crate::kv::index::Depth;
use crate::kv::index::Index;
use crate::kv::predicted::Predicted;

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
}

#[derive(Debug)]
struct Cut {
    size: NonZeroU32,
    index: Arc<Index>,
    locals: Vec<Local>,
}

impl Exact {
    pub(super) fn new(
        forest: &Forest,
        group: &Group,
        cache_salt: Option<&str>,
        token_ids: &[u32],
    ) -> Self {
        let adapter = group.is_adapter.then_some(&*group.model);
        let indexes = group.bases.iter().flat_map(|base| forest.of(base));
        let cuts = indexes.map(|(size, index)| {
            let mut locals = Vec::new();
            block::locals(token_ids, size, &mut locals);
            Cut {
                size,
                index,
                locals,
            }
        });
        Self {
            root: block::root(adapter, cache_salt),
            cuts: cuts.collect(),
        }
    }

    pub(super) fn blocks(&self) -> usize {
        let lengths = self.cuts.iter().map(|cut| cut.locals.len());
        lengths.max().unwrap_or(0)
    }

    /// Tokens that workers hold, by worker. A worker of several ranks counts by the one that holds the
    /// least, since the request may go to any of them.
    fn ask(&self, group: &Group) -> Vec<(WorkerId, u32)> {
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
                    held.push((worker, tokens.min().unwrap_or(0)));
                }
                // Another model's, down, or a rank of it holds nothing.
                _ => {}
            }
        }
        held
    }
}

/// The answers for one prompt. Looked up once for the deepest holders, and for others when asked.
pub(super) struct Held<'a> {
    group: &'a Group,
    predicted: &'a Predicted,
    blocks: &'a [Block],
    /// By worker, in order; none where the prompt's tokens are not known.
    exact: Option<Vec<(WorkerId, u32)>>,
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
        predicted: &'a Predicted,
        prompt: &'a Prompt,
        holders_max: usize,
        seed: u64,
    ) -> Self {
        let overlap = predicted.overlap(&prompt.blocks, holders_max, seed);
        let others_max = match overlap.last() {
            Some(last) if overlap.len() == holders_max => last.blocks as usize,
            _ => 0,
        };
        let mut held = Self {
            group,
            predicted,
            blocks: &prompt.blocks,
            exact: prompt.exact.as_ref().map(|exact| exact.ask(group)),
            places: SmallVec::new(),
            tokens: SmallVec::new(),
            others_max,
        };
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

    fn add_exact(&mut self, holders_max: usize, seed: u64) {
        let Some(exact) = &self.exact else {
            return;
        };
        let mut deepest: Vec<(u32, u64, WorkerId)> = exact
            .iter()
            .map(|(worker, tokens)| (*tokens, drawn(seed, *worker), *worker))
            .collect();
        if deepest.len() > holders_max && holders_max > 0 {
            deepest.select_nth_unstable_by_key(holders_max - 1, |holder| Reverse(*holder));
            deepest.truncate(holders_max);
        }
        for (tokens, _, worker) in deepest {
            if let Some(place) = self.group.place.get(&worker) {
                self.places.push(*place);
                self.tokens.push(tokens);
            }
        }
    }

    pub(super) fn holders(&self) -> &[usize] {
        &self.places
    }

    /// Whether what is said of a worker is what it says itself.
    pub(super) fn is_exact(&self, place: usize) -> bool {
        self.exact.is_some() && self.group.event_ranks[place] > 0
    }

    pub(super) fn tokens(&self, place: usize) -> u32 {
        if let Some(known) = self.places.iter().position(|known| *known == place) {
            return self.tokens[known];
        }
        let worker = self.group.workers[place].id;
        match &self.exact {
            Some(exact) if self.is_exact(place) => exact
                .binary_search_by_key(&worker, |(worker, _)| *worker)
                .map_or(0, |found| exact[found].1),
            _ if self.others_max == 0 => 0,
            // Most often all of that, which takes one look: a system prompt that the whole fleet holds.
            _ => {
                let blocks = &self.blocks[..self.others_max];
                self.of_blocks(self.predicted.depth(worker, blocks))
            }
        }
    }

    fn of_blocks(&self, blocks: u32) -> u32 {
        (blocks as usize)
            .checked_sub(1)
            .map_or(0, |last| self.blocks[last].end_tokens)
    }
}

/// Another order of workers for each request, so that ties don't always fall on the same ones.
fn drawn(seed: u64, worker: WorkerId) -> u64 {
    (seed ^ u64::from(worker.0)).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}
