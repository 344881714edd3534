//! Engines whose blocks depend on the tokens after them, as vLLM 0.33 with some kinds of speculative decoding.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::kv::block::BlockShape;
use crate::kv::event::ExtraKey;

const BLOCK: usize = 2;

fn shape(lookahead: usize) -> BlockShape {
    BlockShape {
        size: NonZeroU32::new(BLOCK as u32).unwrap(),
        lookahead: lookahead as u32,
    }
}

/// The plainest engine: a block is everything up to the end of its lookahead.
struct Engine {
    lookahead: usize,
    names: BTreeMap<Vec<u32>, EngineHash>,
}

impl Engine {
    fn windows<'a>(&self, prompt: &'a [u32]) -> impl Iterator<Item = &'a [u32]> + use<'a> {
        let lookahead = self.lookahead;
        let ends = (BLOCK..).step_by(BLOCK).map(move |end| end + lookahead);
        let prompt_len = prompt.len();
        ends.take_while(move |end| *end <= prompt_len)
            .map(|end| &prompt[..end])
    }

    /// Computes a prompt; the events of its new blocks, one each.
    fn compute(&mut self, prompt: &[u32]) -> Vec<Event> {
        let mut events = Vec::new();
        let mut parent = None;
        for (at, window) in self.windows(prompt).enumerate() {
            let name = match self.names.get(window) {
                Some(name) => *name,
                None => {
                    let name = EngineHash(1000 + self.names.len() as u64);
                    self.names.insert(window.to_vec(), name);
                    let start = at * BLOCK;
                    let (tokens, after) = window[start..].split_at(BLOCK);
                    let keys = match after {
                        [] => vec![],
                        after => vec![vec![ExtraKey::Lookahead(after.into())]],
                    };
                    events.push(Event::Stored(Stored {
                        hashes: vec![name],
                        parent,
                        token_ids: tokens.to_vec(),
                        block_size: BLOCK as u32,
                        extra_keys: keys,
                        ..Stored::default()
                    }));
                    name
                }
            };
            parent = Some(name);
        }
        events
    }

    fn cached_blocks(&self, prompt: &[u32]) -> usize {
        self.windows(prompt)
            .take_while(|window| self.names.contains_key(*window))
            .count()
    }
}

proptest! {
    #[test]
    fn a_prefix_counts_as_far_as_the_engine_would_reuse_it(
        lookahead in 0usize..5,
        prompts in proptest::collection::vec(proptest::collection::vec(0u32..2, 0..14), 1..12),
        asked in proptest::collection::vec(proptest::collection::vec(0u32..2, 0..14), 12),
    ) {
        let indexes = PrefixIndexes::new(indexes::Settings::default(), &Registry::default());
        let mut tree = RankTree::new(indexes.clone(), &subject());
        tree.set_visible(true);
        let mut engine = Engine { lookahead, names: BTreeMap::new() };
        for prompt in &prompts {
            let batch = Batch { events: engine.compute(prompt), ..Batch::default() };
            let mut effect = BatchEffect::default();
            tree.apply(&batch, &mut effect);
            prop_assert_eq!(&effect.ignored, &[]);
        }
        for prompt in prompts.iter().chain(&asked) {
            let mut locals = Vec::new();
            block::hash_blocks(prompt, shape(lookahead), &mut locals);
            let mut found = Vec::new();
            let index = indexes.index(&"m".into(), shape(lookahead));
            index.overlap(block::chain_root(None, None), &locals, &mut found);
            let blocks = found.first().map_or(0, |prefix| prefix.blocks as usize);
            prop_assert_eq!(blocks, engine.cached_blocks(prompt), "{:?}", prompt);
        }
    }
}

#[test]
fn two_blocks_with_the_same_tokens_are_removed_one_at_a_time() {
    let indexes = PrefixIndexes::new(indexes::Settings::default(), &Registry::default());
    let mut tree = RankTree::new(indexes.clone(), &subject());
    tree.set_visible(true);
    let mut engine = Engine {
        lookahead: 1,
        names: BTreeMap::new(),
    };
    let mut apply = |events| {
        let batch = Batch {
            events,
            ..Batch::default()
        };
        tree.apply(&batch, &mut BatchEffect::default());
    };
    apply(engine.compute(&[1, 2, 3]));
    apply(engine.compute(&[1, 2, 4]));
    apply(vec![Event::Removed(Removed {
        hashes: vec![engine.names[&vec![1, 2, 3]]],
        ..Removed::default()
    })]);
    let index = indexes.index(&"m".into(), shape(1));
    let cached = |prompt: &[u32]| {
        let (mut locals, mut found) = (Vec::new(), Vec::new());
        block::hash_blocks(prompt, shape(1), &mut locals);
        index.overlap(block::chain_root(None, None), &locals, &mut found);
        found.first().map_or(0, |prefix| prefix.blocks)
    };
    assert_eq!(cached(&[1, 2, 3]), 0);
    assert_eq!(cached(&[1, 2, 4]), 1);
}
