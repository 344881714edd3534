//! What each worker of a group holds of a prompt's start: exactly, where it tells of its cache and the
//! prompt's tokens are known; else what we sent it.

use std::num::NonZeroU32;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use serde::Serialize;
use smallvec::SmallVec;

use crate::fleet::Group;
use crate::ids::{Block, WorkerId};
use crate::kv::block::{self, ChainRoot, LocalHash};
use crate::kv::index::{PrefixIndex, RankPrefix};
use crate::kv::indexes::PrefixIndexes;
use crate::kv::parity::{self, Made, Parity, Subject};
use crate::kv::predicted::PredictedIndex;
use crate::kv::prefix_owners::PrefixOwner;
use crate::kv::subscriber::{Board, Seats};
use crate::kv::unconfirmed::{self, PrefixKeys, UnconfirmedBlocks};
use crate::routing::{Cached, TierCredit};

/// What is known of the workers' caches.
#[derive(Clone, Debug)]
pub struct Caches {
    /// What workers tell of themselves.
    pub indexes: Arc<PrefixIndexes>,
    /// Whom of them we hear.
    pub board: Arc<Board>,
    /// What was just sent to them, and they have not told of yet.
    pub unconfirmed: Arc<UnconfirmedBlocks>,
    /// What all were sent.
    pub predicted: Arc<PredictedIndex>,
    /// Whether what workers tell is of the same tokens.
    pub parity: Arc<Parity>,
}

/// Where the knowledge of a worker's cached prefix comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum PrefixSource {
    /// The worker's KV events.
    Exact,
    /// The worker computes the prefix or has just computed it, and has not reported it yet.
    Unconfirmed,
    /// What the worker was sent: its KV events do not reach the router, the prompt's tokens are not known,
    /// or the engine tokenizes differently.
    Predicted,
}

/// A prompt as caches are asked for it.
#[derive(Debug, Default)]
pub struct Prompt {
    /// As the predicted index is asked.
    pub blocks: Vec<Block>,
    /// As the trees are asked; none where its tokens are not known.
    pub exact: Option<TokenBlocks>,
}

/// A prompt's blocks, in every size in which its model's engines have them; nearly always one.
#[derive(Debug)]
pub struct TokenBlocks {
    root: ChainRoot,
    len: usize,
    cuts: SmallVec<[Cut; 1]>,
    /// How it came to be its tokens.
    pub(super) made: Made,
    /// Whether the prompt goes on after these blocks, with an image and what follows it.
    pub(super) ends_early: bool,
    /// Kept where they are to be compared with what the engine tells.
    tokens: Option<Arc<[u32]>>,
}

#[derive(Debug)]
struct Cut {
    size: NonZeroU32,
    index: Arc<PrefixIndex>,
    locals: Vec<LocalHash>,
    marks: PrefixKeys,
}

impl TokenBlocks {
    pub fn new(
        indexes: &PrefixIndexes,
        group: &Group,
        cache_salt: Option<&str>,
        token_ids: &[u32],
    ) -> Self {
        let adapter = group.is_adapter.then_some(&*group.model);
        let root = block::chain_root(adapter, cache_salt);
        let indexes = group.bases.iter().flat_map(|base| indexes.of(base));
        let cuts = indexes.map(|(size, index)| {
            let mut locals = Vec::new();
            block::hash_blocks(token_ids, size, &mut locals);
            Cut {
                size,
                index,
                marks: unconfirmed::prefix_keys(root, &locals),
                locals,
            }
        });
        Self {
            root,
            len: token_ids.len(),
            cuts: cuts.collect(),
            made: Made::Given,
            ends_early: false,
            tokens: None,
        }
    }

    pub(super) fn subject(&self, group: &Group) -> Subject {
        Subject {
            model: group.model.clone(),
            made: self.made,
        }
    }

    /// Tokens of the full blocks, where the prompt goes on after them unknown.
    fn known_tokens(&self) -> Option<u32> {
        let tokens = |cut: &Cut| (cut.locals.len() as u32).saturating_mul(cut.size.get());
        let full = self.cuts.iter().map(tokens).min().unwrap_or(0);
        self.ends_early.then_some(full)
    }

    /// Keeps the tokens, if some worker tells what they are to be compared with and another prompt of so
    /// many can be checked.
    pub(super) fn keep(&mut self, group: &Group, parity: &Parity, token_ids: &[u32]) {
        let is_told = group.event_ranks.iter().any(|ranks| *ranks > 0);
        let is_kept = is_told && parity.has_room(token_ids.len());
        self.tokens = is_kept.then(|| token_ids.into());
    }

    /// What is to be checked of it, where its tokens were kept.
    pub(super) fn checked(&self, group: &Group) -> Option<parity::Prompt> {
        let tokens = self.tokens.clone()?;
        Some(parity::Prompt {
            subject: self.subject(group),
            bases: group.bases.clone(),
            root: self.root,
            tokens,
        })
    }

    pub(super) fn blocks(&self) -> usize {
        let lengths = self.cuts.iter().map(|cut| cut.locals.len());
        lengths.max().unwrap_or(0)
    }

    /// As the prompt's blocks are counted while they are on their way.
    pub(super) fn marks(&self) -> impl Iterator<Item = &PrefixKeys> {
        self.cuts.iter().map(|cut| &cut.marks)
    }

    /// What each rank of each worker says it holds, with the size of its blocks.
    pub(super) fn rank_prefixes(&self) -> Vec<(RankPrefix, u32)> {
        let mut depths = Vec::new();
        let mut found = Vec::new();
        for cut in &self.cuts {
            found.clear();
            cut.index.overlap(self.root, &cut.locals, &mut found);
            depths.extend(found.iter().map(|depth| (*depth, cut.size.get())));
        }
        depths
    }

    /// Whether a worker's engine could reuse more of the prompt than its events have told. It never
    /// reuses the last token.
    pub(super) fn could_tell_more(&self, worker: WorkerId, ranks: u32) -> bool {
        let reusable = |size: u32| (self.len.saturating_sub(1) / size as usize) as u32;
        if self.cuts.is_empty() {
            // Nothing was told yet, not even how long its blocks are.
            return self.len > 1;
        }
        let depths = self.rank_prefixes();
        let whole = depths
            .iter()
            .filter(|(depth, size)| depth.worker == worker && depth.blocks >= reusable(*size));
        let has_reusable = self.cuts.iter().any(|cut| reusable(cut.size.get()) > 0);
        has_reusable && whole.count() < ranks as usize
    }

    /// What workers hold or are about to.
    fn ask(
        &self,
        group: &Group,
        unconfirmed: &UnconfirmedBlocks,
        credit: &TierCredit,
        now: Instant,
        holders_max: usize,
    ) -> KnownByPlace {
        let mut known = self.ask_trees(group, credit);
        for cut in &self.cuts {
            for holder in unconfirmed.overlap(now, &cut.marks, holders_max) {
                let Some(place) = group.place.get(&holder.worker) else {
                    continue;
                };
                let tokens = holder.blocks.saturating_mul(cut.size.get());
                let it = known.at(*place);
                if it.credit < tokens {
                    it.cached = Cached::in_gpu(tokens);
                    it.credit = tokens;
                    it.by = PrefixSource::Unconfirmed;
                }
            }
        }
        known
    }

    /// What workers say they hold. A worker of several ranks counts by the one that holds the least, since
    /// the request may go to any of them.
    fn ask_trees(&self, group: &Group, credit: &TierCredit) -> KnownByPlace {
        let mut known = KnownByPlace::new(group.workers.len());
        let mut found = Vec::new();
        for cut in &self.cuts {
            found.clear();
            cut.index.overlap(self.root, &cut.locals, &mut found);
            for depth in &found {
                // Another model's, or down.
                let Some(place) = group.place.get(&depth.worker) else {
                    continue;
                };
                let cached = cached(depth, cut.size.get());
                let worth = cached.credit(credit);
                let it = known.at(*place);
                if it.ranks == 0 || worth < it.credit {
                    it.cached = cached;
                    it.credit = worth;
                }
                it.ranks += 1;
            }
        }
        for it in &mut known.list {
            // A rank of it holds nothing.
            if it.ranks != group.event_ranks[it.place as usize] {
                it.cached = Cached::default();
                it.credit = 0;
            }
        }
        known
    }
}

/// A rank's depth in tokens.
pub(super) fn cached(depth: &RankPrefix, size: u32) -> Cached {
    Cached {
        gpu: depth.gpu_blocks.saturating_mul(size),
        cpu: depth.cpu_blocks().saturating_mul(size),
        disk: depth.disk_blocks.saturating_mul(size),
    }
}

/// What one worker holds of a prompt.
#[derive(Clone, Copy, Debug)]
struct Known {
    place: u32,
    /// How many of its ranks have told of any.
    ranks: u32,
    cached: Cached,
    /// Tokens in the GPU that it is worth.
    credit: u32,
    by: PrefixSource,
}

/// What is known of a group's workers, found by place at once: a prompt's start may be held by all.
#[derive(Debug)]
struct KnownByPlace {
    /// In `list`, one more; 0 for nothing known.
    at: Vec<u32>,
    list: Vec<Known>,
}

impl KnownByPlace {
    fn new(workers: usize) -> Self {
        Self {
            at: vec![0; workers],
            list: Vec::new(),
        }
    }

    fn at(&mut self, place: usize) -> &mut Known {
        let at = &mut self.at[place];
        if *at == 0 {
            self.list.push(Known {
                place: place as u32,
                ranks: 0,
                cached: Cached::default(),
                credit: 0,
                by: PrefixSource::Exact,
            });
            *at = self.list.len() as u32;
        }
        &mut self.list[*at as usize - 1]
    }

    #[inline]
    fn get(&self, place: usize) -> Option<&Known> {
        let at = self.at[place].checked_sub(1)?;
        Some(&self.list[at as usize])
    }
}

/// The answers for one prompt, of workers of every role. Looked up once for the deepest holders, and for
/// others when asked.
pub struct CachedPrefixes<'a> {
    group: &'a Group,
    caches: &'a Caches,
    seats: Seats,
    blocks: &'a [Block],
    /// None where the prompt's tokens are not known.
    exact: Option<KnownByPlace>,
    /// The prompt's kind, while some engines' events tell of other tokens than the router's.
    suspected: Option<Subject>,
    /// What each of the deepest holders that are predicted holds.
    predicted: SmallVec<[(usize, u32); 8]>,
    /// No other worker is predicted to hold more than so many blocks: those of the last holder that
    /// was asked for, or none if there were fewer holders than that.
    others_max: usize,
    holders_max: usize,
    seed: u64,
}

/// Of some of the workers, those that hold the most of the prompt.
#[derive(Debug)]
pub struct Holders {
    /// Counted from the first of those workers.
    places: SmallVec<[usize; 8]>,
    others_max: u32,
}

impl Holders {
    pub fn places(&self) -> &[usize] {
        &self.places
    }

    /// What no other one has more than, as tokens in the GPU.
    pub fn others_max(&self) -> u32 {
        self.others_max
    }
}

impl<'a> CachedPrefixes<'a> {
    pub fn new(
        group: &'a Group,
        caches: &'a Caches,
        prompt: &'a Prompt,
        credit: &TierCredit,
        now: Instant,
        holders_max: usize,
        seed: u64,
    ) -> Self {
        // Where workers have roles, each role is to have its deepest.
        let has_roles = group.decode_only + group.prefill_only > 0;
        let asked_max = holders_max.saturating_mul(if has_roles { 2 } else { 1 });
        let mut held = Self {
            group,
            caches,
            seats: caches.board.seats(),
            blocks: &prompt.blocks,
            exact: prompt
                .exact
                .as_ref()
                .map(|exact| exact.ask(group, &caches.unconfirmed, credit, now, asked_max)),
            suspected: match &prompt.exact {
                Some(exact) if caches.parity.has_alarms() => Some(exact.subject(group)),
                _ => None,
            },
            predicted: SmallVec::new(),
            others_max: 0,
            holders_max,
            seed,
        };
        let known_tokens = prompt.exact.as_ref().and_then(TokenBlocks::known_tokens);
        // Where all tell what they hold, there is nothing to predict.
        let all_tell = held.seats.are_all_heard() && !group.event_ranks.contains(&0);
        let is_known = held.exact.is_some() && known_tokens.is_none();
        if !is_known || held.suspected.is_some() || !all_tell {
            held.predict(asked_max, known_tokens);
        }
        held
    }

    fn predict(&mut self, asked_max: usize, known_tokens: Option<u32>) {
        let predicted = &self.caches.predicted;
        let overlap = predicted.overlap(self.blocks, asked_max, self.seed);
        self.others_max = match overlap.last() {
            Some(last) if overlap.len() == asked_max => last.blocks as usize,
            _ => 0,
        };
        if let Some(known_tokens) = known_tokens {
            self.go_on_after_image(known_tokens, &overlap);
        }
        for holder in overlap {
            // A holder that is down or serves another model now has no place.
            if let Some(place) = self.group.place.get(&holder.worker)
                && !self.is_exact(*place)
            {
                self.predicted.push((*place, self.of_blocks(holder.blocks)));
            }
        }
    }

    /// Of what comes after an image events tell nothing that can be compared: who holds all `known_tokens`
    /// before it is believed to hold what it was sent.
    fn go_on_after_image(&mut self, known_tokens: u32, overlap: &[PrefixOwner]) {
        for holder in overlap {
            let tokens = self.of_blocks(holder.blocks);
            let (Some(exact), Some(place)) =
                (&mut self.exact, self.group.place.get(&holder.worker))
            else {
                continue;
            };
            let credit = exact.get(*place).map_or(0, |known| known.credit);
            if (known_tokens..tokens).contains(&credit) {
                let it = exact.at(*place);
                it.cached = Cached::in_gpu(tokens);
                it.credit = tokens;
                it.by = PrefixSource::Predicted;
            }
        }
    }

    /// The deepest holders among the workers of some places.
    pub fn holders(&self, among: Range<usize>) -> Holders {
        let predicted = self.predicted.iter().map(|(place, _)| *place);
        let mut places: SmallVec<[usize; 8]> = predicted
            .filter(|place| among.contains(place))
            .map(|place| place - among.start)
            .collect();
        let mut others_max = self.of_blocks(self.others_max as u32);
        if let Some(exact) = &self.exact {
            let mut deepest = Deepest::new(self.holders_max);
            let held_some = exact.list.iter().filter(|known| known.credit > 0);
            for known in held_some.filter(|known| among.contains(&(known.place as usize))) {
                let order = (known.credit, drawn(self.seed, known.place));
                // Looked at last, for it is of no matter to most.
                if deepest.takes(order) && self.is_exact(known.place as usize) {
                    deepest.add(order, known.place as usize);
                }
            }
            others_max = others_max.max(deepest.others_max());
            places.extend(deepest.of.iter().map(|(_, place)| *place - among.start));
        }
        Holders { places, others_max }
    }

    /// Whether what is said of a worker is what it says itself, if only that it cannot be relied on now.
    pub(super) fn is_exact(&self, place: usize) -> bool {
        let ranks = self.group.event_ranks[place];
        let tells = self.exact.is_some() && ranks > 0;
        tells
            && (self.seats.are_all_heard() || self.is_heard(place, ranks))
            && self.is_trusted(place)
    }

    fn is_heard(&self, place: usize, ranks: u32) -> bool {
        self.seats.is_heard(self.group.workers[place].id, ranks)
    }

    /// Whether a worker's engine is not known to have other tokens.
    pub(super) fn is_trusted(&self, place: usize) -> bool {
        let worker = self.group.workers[place].id;
        let parity = &self.caches.parity;
        self.suspected
            .as_ref()
            .is_none_or(|subject| parity.trusts(subject, worker))
    }

    pub(super) fn known_by(&self, place: usize) -> PrefixSource {
        match &self.exact {
            Some(exact) if self.is_exact(place) => {
                exact.get(place).map_or(PrefixSource::Exact, |it| it.by)
            }
            _ => PrefixSource::Predicted,
        }
    }

    pub fn cached(&self, place: usize) -> Cached {
        match &self.exact {
            Some(exact) if self.is_exact(place) => {
                exact.get(place).map_or(Cached::default(), |it| it.cached)
            }
            _ => Cached::in_gpu(self.predicted(place)),
        }
    }

    fn predicted(&self, place: usize) -> u32 {
        let mut known = self.predicted.iter();
        if let Some((_, tokens)) = known.find(|(known, _)| *known == place) {
            return *tokens;
        }
        if self.others_max == 0 {
            return 0;
        }
        // Most often all of that, which takes one look: a system prompt that the whole fleet holds.
        let blocks = &self.blocks[..self.others_max];
        let worker = self.group.workers[place].id;
        self.of_blocks(self.caches.predicted.depth(worker, blocks))
    }

    fn of_blocks(&self, blocks: u32) -> u32 {
        (blocks as usize)
            .checked_sub(1)
            .map_or(0, |last| self.blocks[last].end_tokens)
    }
}

impl std::fmt::Debug for CachedPrefixes<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CachedPrefixes").finish_non_exhaustive()
    }
}

/// The greatest of many, a few of them, in one pass: most are not even kept.
struct Deepest {
    max: usize,
    of: SmallVec<[((u32, u64), usize); 8]>,
    /// Where the least of them is, once there are as many as wanted.
    least: usize,
}

impl Deepest {
    fn new(max: usize) -> Self {
        Self {
            max,
            of: SmallVec::new(),
            least: 0,
        }
    }

    #[inline]
    fn takes(&self, order: (u32, u64)) -> bool {
        self.of.len() < self.max || self.of.get(self.least).is_some_and(|least| order > least.0)
    }

    /// What is not among them is no greater.
    fn others_max(&self) -> u32 {
        match self.of.len() < self.max {
            true => 0,
            false => self.of.get(self.least).map_or(u32::MAX, |least| least.0.0),
        }
    }

    fn add(&mut self, order: (u32, u64), place: usize) {
        match self.of.len() < self.max {
            true => self.of.push((order, place)),
            false => self.of[self.least] = (order, place),
        }
        if self.of.len() == self.max {
            let places = 0..self.of.len();
            self.least = places.min_by_key(|at| self.of[*at].0).unwrap_or(0);
        }
    }
}

/// Another order of workers for each request, so that ties don't always fall on the same ones.
fn drawn(seed: u64, place: u32) -> u64 {
    (seed ^ u64::from(place)).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

#[cfg(test)]
mod tests {
    use serde_json::value::RawValue;

    use super::*;
    use crate::kv::indexes;
    use crate::observe::metrics::Registry;

    fn group(event_ranks: &[u32]) -> Group {
        Group {
            model: "m".into(),
            workers: Vec::new(),
            decode_only: 0,
            prefill_only: 0,
            shapes: Vec::new(),
            place: Default::default(),
            event_ranks: event_ranks.to_vec(),
            card: RawValue::NULL.to_owned(),
            bases: vec!["m".into()],
            is_adapter: false,
        }
    }

    #[test]
    fn tokens_are_kept_only_where_a_worker_tells_what_to_compare_them_with() {
        let registry = Registry::default();
        let indexes = PrefixIndexes::new(indexes::Settings::default(), &registry);
        let no_words: parity::Words = Arc::new(|_, _| None);
        let (parity, _watcher) = Parity::new(parity::Settings::default(), &registry, no_words);
        for (event_ranks, unconfirmed) in [(&[][..], false), (&[0, 0], false), (&[0, 2], true)] {
            let group = group(event_ranks);
            let mut exact = TokenBlocks::new(&indexes, &group, None, &[1, 2, 3]);
            exact.keep(&group, &parity, &[1, 2, 3]);
            assert_eq!(
                exact.checked(&group).is_some(),
                unconfirmed,
                "{event_ranks:?}"
            );
        }
    }
}
