//! The index against the plainest model of it, step by step.

mod concurrent;
mod copied;
mod listed;
mod memory_limit;
mod model;
mod shared_blocks;

use std::num::NonZeroU32;
use std::sync::Arc;

use proptest::prelude::*;

use self::model::Model;
use super::*;
use crate::ids::WorkerId;
use crate::kv::block::{ChainRoot, LocalHash};
use crate::kv::event::{EngineHash, Tier};
use crate::kv::indexes::{PrefixIndexes, Settings};
use crate::observe::metrics::Registry;

const BLOCK_SIZE: NonZeroU32 = NonZeroU32::new(16).unwrap();

fn index_of(max_index_memory: u64) -> (Arc<PrefixIndexes>, Arc<PrefixIndex>) {
    let indexes = PrefixIndexes::new(Settings { max_index_memory }, &Registry::default());
    let index = indexes.index(&"m".into(), BLOCK_SIZE);
    (indexes, index)
}

/// Where each prompt forks off the first one, and its root.
const PROMPTS: [(usize, u64); 7] = [(99, 7), (5, 7), (16, 7), (21, 7), (5, 8), (20, 7), (0, 7)];
const LENGTH: usize = 72;

fn local_at(prompt: usize, at: usize) -> LocalHash {
    let (forks_at, _) = PROMPTS[prompt];
    LocalHash(if at < forks_at {
        at as u64 % 3 + 1
    } else {
        (prompt * 1_000 + at) as u64
    })
}

fn locals_of(prompt: usize) -> Vec<LocalHash> {
    (0..LENGTH).map(|at| local_at(prompt, at)).collect()
}

fn root_of(prompt: usize) -> ChainRoot {
    ChainRoot(PROMPTS[prompt].1)
}

/// How an engine names its blocks.
#[derive(Clone, Copy, Debug)]
enum EngineNames {
    /// Like all other engines.
    Common,
    /// With a seed of its own.
    Private,
    /// With so few names that different blocks get the same one.
    Few,
}

fn name_of(naming: EngineNames, tree: usize, prompt: usize, at: usize) -> EngineHash {
    let mut content = vec![root_of(prompt).0];
    content.extend((0..=at).map(|at| local_at(prompt, at).0));
    let path = model::path_of(&content);
    EngineHash(match naming {
        EngineNames::Common => path,
        EngineNames::Private => path.wrapping_add(tree as u64 + 1),
        EngineNames::Few => path % 23,
    })
}

#[derive(Clone, Debug)]
struct Run {
    tree: usize,
    prompt: usize,
    from: usize,
    len: usize,
    naming: EngineNames,
    tier: Tier,
}

impl Run {
    fn names(&self) -> Vec<EngineHash> {
        let name = |at| name_of(self.naming, self.tree, self.prompt, at);
        (self.from..(self.from + self.len).min(LENGTH))
            .map(name)
            .collect()
    }

    fn blocks(&self) -> Vec<NewBlock> {
        let names = self.names().into_iter().zip(self.from..);
        names
            .map(|(name, at)| NewBlock {
                name,
                local: local_at(self.prompt, at),
            })
            .collect()
    }

    fn after(&self) -> Parent {
        match self.from.checked_sub(1) {
            None => Parent::Root(root_of(self.prompt)),
            Some(before) => Parent::Block(name_of(self.naming, self.tree, self.prompt, before)),
        }
    }
}

#[derive(Clone, Debug)]
enum Step {
    Store(Run, CopyReport),
    /// A store in whatever tier, treated as one in a lower tier; of the names alone, or with their contents.
    StoreLower(Run, CopyReport, bool),
    CountToRemove(Run),
    Remove(Run, bool),
    Clear(usize),
    Replace(usize),
}

fn run(trees: usize) -> impl Strategy<Value = Run> {
    let naming = prop_oneof![
        6 => Just(EngineNames::Common),
        3 => Just(EngineNames::Private),
        1 => Just(EngineNames::Few),
    ];
    let tier = prop_oneof![
        8 => Just(Tier::Gpu),
        3 => Just(Tier::Cpu),
        2 => Just(Tier::Disk),
    ];
    let from = prop_oneof![Just(0), 0..LENGTH];
    let length = prop_oneof![1..4usize, 1..LENGTH];
    (0..trees, 0..PROMPTS.len(), from, length, naming, tier).prop_map(
        |(tree, prompt, from, len, naming, tier)| Run {
            tree,
            prompt,
            from,
            len,
            naming,
            tier,
        },
    )
}

fn step(trees: usize) -> impl Strategy<Value = Step> {
    let copies = prop_oneof![8 => Just(CopyReport::OneMore), 1 => Just(CopyReport::AtLeastOne)];
    let copies_of_lower = copies.clone();
    prop_oneof![
        12 => (run(trees), copies).prop_map(|(run, copies)| Step::Store(run, copies)),
        4 => (run(trees), copies_of_lower, any::<bool>())
            .prop_map(|(run, copies, has_tokens)| Step::StoreLower(run, copies, has_tokens)),
        1 => run(trees).prop_map(Step::CountToRemove),
        8 => (run(trees), any::<bool>()).prop_map(|(run, is_tail_first)| Step::Remove(run, is_tail_first)),
        1 => (0..trees).prop_map(Step::Clear),
        1 => (0..trees).prop_map(Step::Replace),
    ]
}

/// The index, and each tree beside its model.
struct Modelled {
    index: Arc<PrefixIndex>,
    trees: Vec<(Tree, Model, WorkerId)>,
    trees_added: u32,
}

impl Modelled {
    fn new(index: Arc<PrefixIndex>, trees: usize) -> Self {
        let mut both = Self {
            index,
            trees: Vec::new(),
            trees_added: 0,
        };
        for _ in 0..trees {
            let tree = both.add_tree();
            both.trees.push(tree);
        }
        both
    }

    fn add_tree(&mut self) -> (Tree, Model, WorkerId) {
        self.trees_added += 1;
        let worker = WorkerId(self.trees_added);
        let mut tree = self.index.add_tree(worker, self.trees_added % 2);
        tree.set_visible(true);
        (tree, Model::default(), worker)
    }

    fn take(&mut self, step: &Step) {
        match step {
            Step::Store(run, copies) => {
                let (tree, model, _) = &mut self.trees[run.tree];
                let expected = model.store(run.after(), &run.blocks(), run.tier, *copies);
                let found = tree.store(run.after(), &run.blocks(), run.tier, *copies);
                assert_eq!(found, expected, "{step:?}");
            }
            Step::StoreLower(run, copies, has_tokens) => {
                let (tree, model, _) = &mut self.trees[run.tree];
                let (expected, found) = if *has_tokens {
                    (
                        model.store_lower(run.after(), &run.blocks(), run.tier, *copies),
                        tree.store_lower(run.after(), &run.blocks(), run.tier, *copies),
                    )
                } else {
                    (
                        model.add_copies(&run.names(), run.tier, *copies),
                        tree.add_copies(&run.names(), run.tier, *copies),
                    )
                };
                assert_eq!(found, expected, "{step:?}");
            }
            Step::CountToRemove(run) => {
                let (tree, model, _) = &mut self.trees[run.tree];
                for name in run.names() {
                    let expected = model.count_copy_to_remove(name, run.tier);
                    assert_eq!(tree.count_copy_to_remove(name, run.tier), expected);
                }
            }
            Step::Remove(run, is_tail_first) => {
                let mut names = run.names();
                if *is_tail_first {
                    names.reverse();
                }
                // Many engines report each removed block alone.
                let at_once = if *is_tail_first && run.len % 2 == 1 {
                    1
                } else {
                    LENGTH
                };
                let (tree, model, _) = &mut self.trees[run.tree];
                for names in names.chunks(at_once) {
                    let expected = model.remove(names, run.tier);
                    assert_eq!(tree.remove(names, run.tier), expected, "{step:?}");
                }
            }
            Step::Clear(tree) => {
                self.trees[*tree].0.clear();
                self.trees[*tree].1 = Model::default();
            }
            Step::Replace(tree) => {
                let new = self.add_tree();
                // The old tree is removed after the new one came; its slot is free for the next one.
                self.trees[*tree] = new;
            }
        }
    }

    fn overlap(&self, prompt: usize, blocks: usize) -> Vec<RankPrefix> {
        let mut found = Vec::new();
        let locals = locals_of(prompt);
        self.index
            .overlap(root_of(prompt), &locals[..blocks], &mut found);
        found.sort();
        found
    }

    fn check_lookups(&self) {
        for prompt in 0..PROMPTS.len() {
            for blocks in [1, 13, 16, 17, 32, 64, LENGTH] {
                let locals = &locals_of(prompt)[..blocks];
                let mut expected = Vec::new();
                for (_, model, worker) in &self.trees {
                    let (blocks, gpu_blocks, disk_blocks) = model.depth(root_of(prompt), locals);
                    if blocks > 0 {
                        expected.push(RankPrefix {
                            worker: *worker,
                            rank: worker.0 % 2,
                            blocks,
                            gpu_blocks,
                            disk_blocks,
                        });
                    }
                }
                expected.sort();
                assert_eq!(self.overlap(prompt, blocks), expected, "prompt {prompt}");
            }
        }
    }

    fn check_trees(&self) {
        let mut contents = std::collections::HashSet::new();
        for (tree, model, _) in &self.trees {
            assert_eq!(tree.blocks(), model.in_tiers());
            assert_eq!(tree.len(), model.blocks.len() as u64);
            assert_eq!(tree.list(), model.list());
            contents.extend(model.blocks.keys().cloned());
        }
        assert_eq!(self.index.len(), contents.len() as u64);
    }
}

fn check(trees: usize, steps: &[Step]) {
    let (_indexes, index) = index_of(64 << 20);
    let mut both = Modelled::new(index, trees);
    for step in steps {
        both.take(step);
        both.check_lookups();
        both.check_trees();
    }
}

proptest! {
    #![proptest_config(ProptestConfig { max_shrink_iters: 20_000, ..ProptestConfig::with_cases(40) })]

    #[test]
    fn the_index_equals_its_model(steps in proptest::collection::vec(step(3), 1..60)) {
        check(3, &steps);
    }

    #[test]
    fn so_does_an_index_with_many_trees(steps in proptest::collection::vec(step(120), 1..60), trees in 100usize..120) {
        let steps: Vec<Step> = steps.into_iter().map(|mut step| {
            match &mut step {
                Step::Store(run, _)
                | Step::StoreLower(run, _, _)
                | Step::CountToRemove(run)
                | Step::Remove(run, _) => run.tree %= trees,
                Step::Clear(tree) | Step::Replace(tree) => *tree %= trees,
            }
            step
        }).collect();
        check(trees, &steps);
    }
}
