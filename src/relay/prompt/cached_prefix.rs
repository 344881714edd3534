//! The prefix of a prompt that is cached at each place that the request can be sent to, a worker or one of its dp ranks: exactly, if the worker's KV events
//! reach the router and the prompt's tokens are known; else predicted from what the worker was sent.

mod reported;
mod top;
mod view_range;

use std::fmt;
use std::num::NonZeroU64;
use std::sync::Arc;
use std::time::Instant;

use smallvec::SmallVec;

pub use self::reported::PrefixSource;
use self::reported::ReportedPrefixes;
pub(in crate::relay) use self::reported::cached;
use self::top::Top;
pub use self::view_range::ViewRange;
use super::prompt_blocks::{Prompt, TokenBlocks};
use crate::fleet::{Places, Worker};
use crate::ids::{Block, RankPlace, ViewIndex};
use crate::kv::indexes::PrefixIndexes;
use crate::kv::predicted::PredictedIndex;
use crate::kv::prefix_owners::PrefixOwner;
use crate::kv::subscriber::{StatusBoard, StatusSnapshot};
use crate::kv::tokenizer_check::{Subject, TokenizerCheck};
use crate::kv::unconfirmed::UnconfirmedBlocks;
use crate::peers::routed::RoutedPrompts;
use crate::routing::{self, Cached, PrefixCounts, TierCredit};

#[derive(Clone, Debug)]
pub struct Caches {
    /// Blocks that workers reported.
    pub indexes: Arc<PrefixIndexes>,
    /// Which workers' KV events the router receives.
    pub board: Arc<StatusBoard>,
    /// Blocks that workers were just sent and have not reported yet.
    pub unconfirmed: Arc<UnconfirmedBlocks>,
    /// Blocks that workers were sent.
    pub predicted: Arc<PredictedIndex>,
    /// Which engines tokenize like the router.
    pub tokenizer_check: Arc<TokenizerCheck>,
    /// Announces this replica's choices to the other replicas.
    pub routed: Arc<RoutedPrompts>,
}

/// The cached prefixes of one prompt, for workers of every role. The longest ones are looked up at
/// once, the others when asked for.
pub struct CachedPrefixes<'a> {
    pub(in crate::relay) places: Places<'a>,
    caches: &'a Caches,
    statuses: StatusSnapshot<'a>,
    blocks: &'a [Block],
    tokens: Option<&'a TokenBlocks>,
    /// None if the prompt's tokens are not known.
    exact: Option<ReportedPrefixes>,
    /// The kind of prompt, while some engines' events show other tokens than the router's.
    suspected: Option<Subject>,
    /// Predicted tokens of the places with the longest predicted prefixes.
    predicted: SmallVec<[(RankPlace, u32); 8]>,
    /// No other worker is predicted to have more blocks than this: as many as the last owner found, or
    /// none if fewer owners were found than asked for.
    others_max_blocks: usize,
    max_owners: usize,
    seed: u64,
    counts: &'a PrefixCounts,
}

/// The candidates of a view with the longest cached prefixes.
#[derive(Debug)]
pub struct TopOwners {
    pub indices: SmallVec<[ViewIndex; 8]>,
    /// No other place has more, in tokens in the GPU.
    pub others_max: u32,
    /// The one with the longest, what it has, and the name of that prefix. Among several, one whose worker is free.
    pub longest: Option<(ViewIndex, u32, Option<NonZeroU64>)>,
}

impl<'a> CachedPrefixes<'a> {
    pub fn new(
        places: impl Into<Places<'a>>,
        caches: &'a Caches,
        prompt: &'a Prompt,
        credit: &TierCredit,
        (max_owners, seed): (usize, u64),
        counts: &'a PrefixCounts,
    ) -> Self {
        let places = places.into();
        let group = places.group();
        // If workers have roles, each role gets its longest prefixes.
        let has_roles = group.decode_only + group.prefill_only > 0;
        let search_limit = max_owners.saturating_mul(if has_roles { 2 } else { 1 });
        let unconfirmed = &caches.unconfirmed;
        let exact = prompt.exact.as_ref();
        let mut prefixes = Self {
            places,
            caches,
            statuses: caches.board.snapshot(),
            blocks: &prompt.blocks,
            tokens: exact,
            exact: exact.map(|tokens| {
                let limit = (search_limit, seed);
                ReportedPrefixes::find(tokens, places, unconfirmed, credit, limit)
            }),
            suspected: match exact {
                Some(tokens) if caches.tokenizer_check.has_mismatches() => {
                    Some(tokens.subject(group))
                }
                _ => None,
            },
            predicted: SmallVec::new(),
            others_max_blocks: 0,
            max_owners,
            seed,
            counts,
        };
        let before_image = exact.and_then(TokenBlocks::tokens_before_image);
        let all_report = prefixes.statuses.all_report && !group.event_ranks.contains(&0);
        let is_whole = prefixes.exact.is_some() && before_image.is_none();
        // With exact knowledge of all workers there is nothing to predict.
        if !is_whole || prefixes.suspected.is_some() || !all_report {
            prefixes.predict(search_limit, before_image);
        }
        prefixes
    }

    fn predict(&mut self, search_limit: usize, before_image: Option<u32>) {
        let predicted = &self.caches.predicted;
        let owners = predicted.overlap(self.blocks, search_limit, self.seed);
        self.others_max_blocks = match owners.last() {
            Some(last) if owners.len() == search_limit => last.blocks as usize,
            _ => 0,
        };
        if let Some(before_image) = before_image {
            self.predict_after_image(before_image, &owners);
        }
        for owner in owners {
            // None for a worker that is down or serves another model now.
            if let Some(place) = self.places.of_cache_owner(owner.worker)
                && !self.is_exact(place)
            {
                let tokens = self.tokens_of(owner.blocks);
                self.predicted.push((place, tokens));
            }
        }
    }

    /// Events after an image cannot be compared with the prompt. A worker that has everything before the
    /// image is predicted to have what it was sent after it.
    fn predict_after_image(&mut self, before_image: u32, owners: &[PrefixOwner]) {
        for owner in owners {
            let tokens = self.tokens_of(owner.blocks);
            let place = self.places.of_cache_owner(owner.worker);
            let (Some(exact), Some(place)) = (&mut self.exact, place) else {
                continue;
            };
            let credit = exact.get(place).map_or(0, |prefix| prefix.credit);
            if (before_image..tokens).contains(&credit) {
                let prefix = exact.entry(place);
                prefix.set_in_gpu(tokens, PrefixSource::Predicted);
            }
        }
    }

    /// The longest cached prefixes among the candidates of a view. `is_free`: the request can be sent to a worker now.
    pub fn owners(&self, view: &ViewRange, is_free: impl Fn(&Worker) -> bool) -> TopOwners {
        let entries = self.predicted.iter();
        let predicted = entries.filter_map(|(place, tokens)| Some((*tokens, view.index(*place)?)));
        let mut indices: SmallVec<[ViewIndex; 8]> =
            predicted.clone().map(|(_, index)| index).collect();
        let mut longest = self.longest(view, predicted, &is_free);
        let mut is_exact = false;
        let mut others_max = self.tokens_of(self.others_max_blocks as u32);
        if let Some(exact) = &self.exact {
            let mut top = Top::new(self.max_owners);
            for prefix in exact.with_credit() {
                let Some(index) = view.index(prefix.place) else {
                    continue;
                };
                let key = (prefix.credit, order_of(self.seed, prefix.place));
                // `is_exact` comes last: most workers fail the cheap check before it.
                if top.accepts(key) && self.is_exact(prefix.place) {
                    top.add(key, index);
                }
            }
            others_max = others_max.max(top.others_max());
            let reported = self.longest(view, top.credits(), &is_free);
            is_exact = reported > longest;
            longest = longest.max(reported);
            indices.extend(top.indices());
        }
        TopOwners {
            indices,
            others_max,
            longest: longest.map(|(tokens, _, index)| (index, tokens, self.key(tokens, is_exact))),
        }
    }

    /// The longest of these prefixes: its tokens, whether its worker is free, and whose it is. Among equally long ones
    /// it is one whose worker is: where the request cannot be sent, it does not find the prefix.
    fn longest(
        &self,
        view: &ViewRange,
        owners: impl Iterator<Item = (u32, ViewIndex)> + Clone,
        is_free: impl Fn(&Worker) -> bool,
    ) -> Option<(u32, bool, ViewIndex)> {
        let most = owners.clone().map(|(tokens, _)| tokens).max()?;
        let longest = owners.filter(|(tokens, _)| *tokens == most);
        let with_state = longest.map(|(tokens, index)| {
            let worker = self.places.worker(view.place(index));
            (tokens, is_free(worker), index)
        });
        with_state.max()
    }

    /// Names the prefix of so many tokens of the prompt. Text blocks end elsewhere in each prompt, in tokens: with known tokens
    /// their number is an estimate.
    fn key(&self, tokens: u32, is_exact: bool) -> Option<NonZeroU64> {
        if is_exact {
            self.tokens.and_then(|known| known.shared_key(tokens))
        } else {
            routing::shared_key(self.blocks, tokens)
        }
    }

    /// How many requests of the last seconds had a prefix of this name.
    pub(in crate::relay) fn requests(&self, key: NonZeroU64, now: Instant) -> f64 {
        self.counts.requests(now, key)
    }

    /// Whether KV events decide what counts as cached at a place, even if they only say that nothing
    /// can be relied on now.
    #[inline]
    pub(in crate::relay) fn is_exact(&self, place: RankPlace) -> bool {
        let ranks = self.places.event_ranks(place);
        let has_events = self.exact.is_some() && ranks > 0;
        has_events
            && (self.statuses.all_report || self.reports(place, ranks))
            && self.is_trusted(place)
    }

    fn reports(&self, place: RankPlace, ranks: u32) -> bool {
        let worker = self.places.worker(place).id;
        match self.places.rank(place) {
            None => self.statuses.reports(worker, ranks),
            Some(rank) => self.statuses.rank_reports(worker, rank),
        }
    }

    /// Whether a worker's engine is not known to tokenize differently.
    #[inline]
    pub(in crate::relay) fn is_trusted(&self, place: RankPlace) -> bool {
        self.suspected.as_ref().is_none_or(|subject| {
            let worker = self.places.worker(place).id;
            self.caches.tokenizer_check.trusts(subject, worker)
        })
    }

    pub(in crate::relay) fn source(&self, place: RankPlace) -> PrefixSource {
        match &self.exact {
            Some(exact) if self.is_exact(place) => exact
                .get(place)
                .map_or(PrefixSource::Exact, |prefix| prefix.source),
            _ => PrefixSource::Predicted,
        }
    }

    pub fn cached(&self, place: RankPlace) -> Cached {
        match &self.exact {
            Some(exact) if self.is_exact(place) => exact
                .get(place)
                .map_or(Cached::default(), |prefix| prefix.cached),
            _ => Cached::in_gpu(self.predicted_tokens(place)),
        }
    }

    fn predicted_tokens(&self, place: RankPlace) -> u32 {
        let mut predicted = self.predicted.iter();
        if let Some((_, tokens)) = predicted.find(|(owner, _)| *owner == place) {
            return *tokens;
        }
        if self.others_max_blocks == 0 {
            return 0;
        }
        // Usually the worker has all of them, which takes one lookup: a system prompt cached everywhere.
        let blocks = &self.blocks[..self.others_max_blocks];
        let owner = self.places.cache_owner(place);
        self.tokens_of(self.caches.predicted.depth(owner, blocks))
    }

    /// Tokens of the prompt's first text blocks.
    fn tokens_of(&self, blocks: u32) -> u32 {
        (blocks as usize)
            .checked_sub(1)
            .map_or(0, |last| self.blocks[last].end_tokens)
    }
}

impl fmt::Debug for CachedPrefixes<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CachedPrefixes").finish_non_exhaustive()
    }
}

/// Another order of places for each request, so that ties do not always fall on the same ones.
fn order_of(seed: u64, place: RankPlace) -> u64 {
    (seed ^ place.get() as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

#[cfg(test)]
pub(in crate::relay) mod tests {
    use super::*;
    use crate::fleet::registry::tests::{bring_up, registry};
    use crate::ids::{BlockHash, Model};
    use crate::kv::{predicted, unconfirmed};
    use crate::observe::{self, metrics};

    const MODEL: &str = "m";

    pub(in crate::relay) fn caches(now: Instant) -> Caches {
        let metrics = metrics::Registry::default();
        let predicted = Arc::new(PredictedIndex::new(
            predicted::Settings::default(),
            predicted::Metrics::new(&metrics),
            now,
        ));
        let unconfirmed = UnconfirmedBlocks::new(
            unconfirmed::Settings::default(),
            unconfirmed::Metrics::new(&metrics),
        );
        let routed = RoutedPrompts::new(16, predicted.clone(), unconfirmed.clone(), &metrics);
        Caches {
            indexes: PrefixIndexes::new(Default::default(), &metrics),
            board: Arc::new(StatusBoard::default()),
            unconfirmed,
            predicted,
            tokenizer_check: TokenizerCheck::new(Default::default(), &metrics).0,
            routed: Arc::new(routed),
        }
    }

    /// A prompt of 256 tokens in four blocks.
    pub(in crate::relay) fn prompt() -> Prompt {
        let blocks = (1..=4_u32).map(|number| Block {
            path: BlockHash(u64::from(number)),
            end_tokens: 64 * number,
        });
        Prompt {
            blocks: blocks.collect(),
            exact: None,
        }
    }

    #[test]
    fn of_equally_long_prefixes_one_counts_whose_worker_is_free() {
        let (now, prompt) = (observe::now(), prompt());
        let (credit, counts) = (TierCredit::default(), PrefixCounts::new(now));
        // The workers that have all of it; those that are not free; whose prefix counts.
        for (owners, busy, expected) in [
            (&["a", "b"][..], &["a"][..], "b"),
            (&["a", "b"][..], &["b"][..], "a"),
            (&["b"][..], &["b"][..], "b"),
        ] {
            let (fleet, caches) = (registry(&["a", "b"]), caches(now));
            bring_up(&fleet, MODEL);
            let snapshot = fleet.snapshot();
            let group = &*snapshot.models[&Model::from(MODEL)];
            for worker in &group.workers {
                let name = &*worker.name;
                // The other one has the shorter half.
                let length = if owners.contains(&name) { 4 } else { 2 };
                let cached = &prompt.blocks[..length];
                caches.predicted.record(now, worker.id, 0, cached);
            }
            let prefixes = CachedPrefixes::new(group, &caches, &prompt, &credit, (8, 7), &counts);
            let everywhere = ViewRange::everywhere(prefixes.places);
            let is_free = |worker: &Worker| !busy.contains(&&*worker.name);
            let owners_found = prefixes.owners(&everywhere, is_free);
            let (index, tokens, key) = owners_found.longest.unwrap();
            let place = everywhere.place(index);
            let found = &*prefixes.places.worker(place).name;
            assert_eq!((found, tokens), (expected, 256), "{owners:?} {busy:?}");
            assert!(key.is_some());
        }
    }
}
