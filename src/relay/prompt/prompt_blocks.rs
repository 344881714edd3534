//! A request's prompt as blocks, in the forms in which the knowledge of caches is looked up.

use std::num::NonZeroU64;
use std::sync::Arc;

use smallvec::SmallVec;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::fleet::Group;
use crate::ids::Block;
use crate::kv::block::{self, BlockShape, ChainRoot, LocalHash};
use crate::kv::index::{PrefixIndex, RankPrefix};
use crate::kv::indexes::PrefixIndexes;
use crate::kv::tokenizer_check::{self, PromptSource, Subject, TokenizerCheck};
use crate::kv::unconfirmed::{self, PrefixKeys};

#[derive(Debug, Default)]
pub struct Prompt {
    /// Blocks of text, for predictions.
    pub blocks: Vec<Block>,
    /// Blocks of tokens, for what KV events reported; none if the prompt's tokens are not known.
    pub exact: Option<TokenBlocks>,
}

/// A prompt's token blocks, in every block size that engines of its model have; nearly always one.
#[derive(Debug)]
pub struct TokenBlocks {
    pub(in crate::relay) root: ChainRoot,
    len: usize,
    pub(in crate::relay) sizes: SmallVec<[SizedBlocks; 1]>,
    /// Where the tokens come from.
    pub(in crate::relay) source: PromptSource,
    /// Whether the prompt goes on after these blocks: with an image, and text after it.
    pub(in crate::relay) ends_early: bool,
    /// Whether the tokens of a prompt like this one may not be known in time.
    pub(in crate::relay) may_be_late: bool,
    /// Kept if they are to be compared with what the engine reports.
    tokens: Option<Arc<[u32]>>,
}

/// A prompt's blocks of one size, and the index to look them up in.
#[derive(Debug)]
pub(in crate::relay) struct SizedBlocks {
    pub(in crate::relay) shape: BlockShape,
    pub(in crate::relay) index: Arc<PrefixIndex>,
    pub(in crate::relay) locals: Vec<LocalHash>,
    pub(in crate::relay) prefix_keys: PrefixKeys,
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
        let sizes = indexes.map(|(shape, index)| {
            let mut locals = Vec::new();
            block::hash_blocks(token_ids, shape, &mut locals);
            SizedBlocks {
                shape,
                index,
                prefix_keys: unconfirmed::prefix_keys(root, &locals),
                locals,
            }
        });
        Self {
            root,
            len: token_ids.len(),
            sizes: sizes.collect(),
            source: PromptSource::TokenIds,
            ends_early: false,
            may_be_late: false,
            tokens: None,
        }
    }

    pub(in crate::relay) fn subject(&self, group: &Group) -> Subject {
        Subject {
            model: group.model.clone(),
            source: self.source,
        }
    }

    /// Tokens of the full blocks, if the prompt's tokens after them are not known.
    pub(in crate::relay) fn tokens_before_image(&self) -> Option<u32> {
        let tokens = |sized: &SizedBlocks| {
            (sized.locals.len() as u32).saturating_mul(sized.shape.size.get())
        };
        let full = self.sizes.iter().map(tokens).min().unwrap_or(0);
        self.ends_early.then_some(full)
    }

    /// Keeps the tokens if a worker reports something to compare them with and there is room to check
    /// another prompt of this length.
    pub(in crate::relay) fn keep(
        &mut self,
        group: &Group,
        tokenizer_check: &TokenizerCheck,
        token_ids: &Arc<[u32]>,
    ) {
        let has_events = group.event_ranks.iter().any(|ranks| *ranks > 0);
        let is_kept = has_events && tokenizer_check.has_room(token_ids.len());
        self.tokens = is_kept.then(|| token_ids.clone());
    }

    /// What is to be checked of the prompt, if its tokens were kept.
    pub(in crate::relay) fn checked(&self, group: &Group) -> Option<tokenizer_check::Prompt> {
        let tokens = self.tokens.clone()?;
        Some(tokenizer_check::Prompt {
            subject: self.subject(group),
            bases: group.bases.clone(),
            root: self.root,
            tokens,
        })
    }

    /// The blocks of a size that an engine can reuse: it computes at least the last token, so of a prompt of exactly k
    /// blocks the last one is computed again. A prompt that goes on after its known tokens has its last token later.
    pub(in crate::relay) fn reusable<'a>(&self, sized: &'a SizedBlocks) -> &'a [LocalHash] {
        let reusable = if self.ends_early {
            sized.locals.len()
        } else {
            sized.shape.reusable_blocks(self.len)
        };
        &sized.locals[..reusable.min(sized.locals.len())]
    }

    /// Names the prefix of so many tokens, as far as they are whole blocks: by the cache salt, their number, the first block and
    /// the last two. Hashing all of them would take longer, and is as good for a count.
    pub(in crate::relay) fn shared_key(&self, tokens: u32) -> Option<NonZeroU64> {
        let sized = self.sizes.first()?;
        let blocks = (tokens / sized.shape.size.get()) as usize;
        let prefix = &sized.locals[..blocks.min(sized.locals.len())];
        let (first, last) = (prefix.first()?, prefix.last()?);
        let before_last = prefix[prefix.len().saturating_sub(2)];
        let mut hash = self.root.0 ^ prefix.len() as u64;
        for local in [*first, before_last, *last] {
            hash = xxh3_64_with_seed(&local.0.to_le_bytes(), hash);
        }
        NonZeroU64::new(hash)
    }

    /// Blocks of the smallest size.
    pub(in crate::relay) fn blocks(&self) -> usize {
        let lengths = self.sizes.iter().map(|sized| sized.locals.len());
        lengths.max().unwrap_or(0)
    }

    /// The prefixes to count as unconfirmed while the prompt is computed.
    pub(in crate::relay) fn prefix_keys(&self) -> impl Iterator<Item = &PrefixKeys> {
        self.sizes.iter().map(|sized| &sized.prefix_keys)
    }

    /// The prefix that each dp rank of each worker reported, with the shape of its blocks.
    pub(in crate::relay) fn rank_prefixes(&self) -> Vec<(RankPrefix, BlockShape)> {
        let mut prefixes = Vec::new();
        let mut found = Vec::new();
        for sized in &self.sizes {
            found.clear();
            let locals = self.reusable(sized);
            sized.index.overlap(self.root, locals, &mut found);
            prefixes.extend(found.iter().map(|prefix| (*prefix, sized.shape)));
        }
        prefixes
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::value::RawValue;

    use super::*;
    use crate::fleet::Members;
    use crate::ids::WorkerId;
    use crate::kv::indexes;
    use crate::observe::metrics::Registry;

    fn group(event_ranks: &[u32]) -> Group {
        let mut members = Members::default();
        members.event_ranks = event_ranks.to_vec();
        Group {
            model: "m".into(),
            members: Arc::new(members),
            card: RawValue::NULL.to_owned(),
            bases: vec!["m".into()],
            is_adapter: false,
            is_partial: false,
        }
    }

    /// Indexes of a model whose only worker has blocks of four tokens, while the other value lives.
    fn with_blocks_of_four() -> (Arc<PrefixIndexes>, impl Sized) {
        let indexes = PrefixIndexes::new(indexes::Settings::default(), &Registry::default());
        let size = std::num::NonZeroU32::new(4).unwrap();
        let index = indexes.index(&"m".into(), size);
        let mut tree = index.add_tree(WorkerId(1), 0);
        tree.set_visible(true);
        (indexes, (index, tree))
    }

    #[test]
    fn prompts_share_the_name_of_a_prefix_however_they_go_on() {
        let (indexes, _tree) = with_blocks_of_four();
        let group = group(&[1]);
        let blocks = |tokens: &[u32]| TokenBlocks::new(&indexes, &group, None, tokens);
        let system: Vec<u32> = (0..40).collect();
        let asking = |question: u32| blocks(&[&system[..], &[question; 9]].concat());
        let key = asking(1).shared_key(40);
        assert!(key.is_some());
        assert_eq!(asking(2).shared_key(40), key);
        assert_eq!(blocks(&system).shared_key(43), key);
        assert_ne!(asking(1).shared_key(44), asking(2).shared_key(44));
        assert_ne!(asking(1).shared_key(36), key);
        assert_eq!(asking(1).shared_key(3), None);
        let other: Vec<u32> = (1..41).collect();
        assert_ne!(blocks(&other).shared_key(40), key);
    }

    /// A copy that one of two tenants has computed serves the other one nothing.
    #[test]
    fn prompts_with_different_cache_salts_share_no_prefix() {
        let (indexes, _tree) = with_blocks_of_four();
        let group = group(&[1]);
        let tokens: Vec<u32> = (0..40).collect();
        let key = |salt| TokenBlocks::new(&indexes, &group, salt, &tokens).shared_key(40);
        assert!(key(None).is_some());
        assert_eq!(key(Some("a")), key(Some("a")));
        assert_ne!(key(Some("a")), key(Some("b")));
        assert_ne!(key(Some("a")), key(None));
    }

    #[test]
    fn the_block_with_the_last_token_is_computed_again() {
        use std::num::NonZeroU32;

        use crate::kv::event::{EngineHash, Tier};
        use crate::kv::index::{CopyReport, NewBlock, Parent};

        let registry = Registry::default();
        let indexes = PrefixIndexes::new(indexes::Settings::default(), &registry);
        let group = group(&[1]);
        let size = NonZeroU32::new(4).unwrap();
        let index = indexes.index(&"m".into(), size);
        let mut tree = index.add_tree(WorkerId(1), 0);
        tree.set_visible(true);
        let tokens: Vec<u32> = (0..12).collect();
        let mut locals = Vec::new();
        block::hash_blocks(&tokens, size, &mut locals);
        let blocks = locals.iter().zip(1..);
        let blocks: Vec<NewBlock> = blocks
            .map(|(local, name)| NewBlock {
                name: EngineHash(name),
                local: *local,
            })
            .collect();
        let root = Parent::Root(block::chain_root(None, None));
        tree.store(root, &blocks, Tier::Gpu, CopyReport::OneMore)
            .unwrap();
        let reused = |tokens: &[u32], ends_early: bool| {
            let mut prompt = TokenBlocks::new(&indexes, &group, None, tokens);
            prompt.ends_early = ends_early;
            let found = prompt.rank_prefixes();
            found.first().map_or(0, |(prefix, _)| prefix.blocks)
        };
        assert_eq!(reused(&tokens, false), 2);
        assert_eq!(reused(&tokens, true), 3);
        assert_eq!(reused(&tokens[..9], false), 2);
        assert_eq!(reused(&tokens[..8], false), 1);
        assert_eq!(reused(&tokens[..4], false), 0);
        let longer: Vec<u32> = (0..13).collect();
        assert_eq!(reused(&longer, false), 3);
    }

    #[test]
    fn tokens_are_kept_only_if_a_worker_reports_something_to_compare_them_with() {
        let registry = Registry::default();
        let indexes = PrefixIndexes::new(indexes::Settings::default(), &registry);
        let (tokenizer_check, _queue) =
            TokenizerCheck::new(tokenizer_check::Settings::default(), &registry);
        for (event_ranks, unconfirmed) in [(&[][..], false), (&[0, 0], false), (&[0, 2], true)] {
            let group = group(event_ranks);
            let mut exact = TokenBlocks::new(&indexes, &group, None, &[1, 2, 3]);
            exact.keep(&group, &tokenizer_check, &Arc::from([1, 2, 3]));
            assert_eq!(
                exact.checked(&group).is_some(),
                unconfirmed,
                "{event_ranks:?}"
            );
        }
    }
}
