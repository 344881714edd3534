//! CPU offload as vLLM 0.32.0 reported it: with placeholders, and with events that describe their blocks.

use std::collections::BTreeMap;

use super::*;
use crate::kv::index::RankPrefix;
use crate::kv::msgpack;

const BLOCK: NonZeroU32 = NonZeroU32::new(32).unwrap();
const SALT: &str = "tenant-7";

fn batches(recording: &str) -> Vec<Batch> {
    let messages = recording.lines().filter(|line| !line.starts_with('#'));
    let payload = |message: &str| {
        let digits = message.rsplit(' ').next().unwrap().as_bytes();
        let pairs = digits.chunks(2).map(|pair| str::from_utf8(pair).unwrap());
        let bytes = pairs.map(|pair| u8::from_str_radix(pair, 16).unwrap());
        bytes.collect::<Vec<_>>()
    };
    messages
        .map(|message| msgpack::decode(&payload(message)).unwrap())
        .collect()
}

/// The copies of each block by tier, counted without an index.
#[derive(Debug, Default)]
struct Copies(BTreeMap<u64, [u32; Tier::COUNT]>);

impl Copies {
    fn apply(&mut self, batch: &Batch) {
        for event in &batch.events {
            match event {
                Event::Stored(event) => {
                    for hash in &event.hashes {
                        self.0.entry(hash.0).or_default()[tier(&event.location.medium)] += 1;
                    }
                }
                Event::Removed(event) => {
                    for hash in &event.hashes {
                        self.0.get_mut(&hash.0).unwrap()[tier(&event.location.medium)] -= 1;
                    }
                }
                other => panic!("not recorded: {other:?}"),
            }
        }
        self.0.retain(|_, copies| *copies != [0; Tier::COUNT]);
    }
}

fn tier(medium: &Medium) -> usize {
    match medium {
        Medium::Gpu => Tier::Gpu as usize,
        Medium::Cpu => Tier::Cpu as usize,
        other => panic!("not recorded: {other:?}"),
    }
}

/// The recorded prompts: each number gives another one.
fn prompt(number: u32, tokens: u32) -> Vec<u32> {
    (0..tokens)
        .map(|at| (number * 7 + at * 17) % 4_000 + 20)
        .collect()
}

/// A rank that has applied some of the recorded batches.
struct Replayed {
    tree: RankTree,
    indexes: Arc<PrefixIndexes>,
}

impl Replayed {
    fn found(&self, tokens: &[u32], salt: Option<&str>) -> (u32, u32) {
        let mut locals = Vec::new();
        block::hash_blocks(tokens, BLOCK, &mut locals);
        let mut found: Vec<RankPrefix> = Vec::new();
        let index = self.indexes.index(&"m".into(), BLOCK);
        index.overlap(block::chain_root(None, salt), &locals, &mut found);
        found
            .pop()
            .map_or((0, 0), |prefix| (prefix.blocks, prefix.gpu_blocks))
    }
}

/// Applies a recording; after each batch the tree is compared with the plain count of copies. `look` is called with
/// the number of batches applied.
fn replay(recording: &str, mut look: impl FnMut(usize, &Replayed)) {
    let indexes = PrefixIndexes::new(indexes::Settings::default(), &Registry::default());
    let mut tree = RankTree::new(indexes.clone(), &subject());
    tree.set_visible(true);
    let mut replayed = Replayed { tree, indexes };
    let mut expected = Copies::default();
    for (number, batch) in batches(recording).iter().enumerate() {
        expected.apply(batch);
        let mut effect = BatchEffect::default();
        replayed.tree.apply(batch, &mut effect);
        assert_eq!(effect.ignored, [], "batch {number}");
        assert_eq!(effect.unknown_removals, 0, "batch {number}");
        assert_eq!(effect.impact, TreeImpact::None, "batch {number}");
        let (_, tree) = replayed.tree.tree().unwrap();
        let listed = tree.list();
        let listed: BTreeMap<_, _> = listed
            .iter()
            .map(|block| (block.name.0, block.copies))
            .collect();
        assert_eq!(listed, expected.0, "batch {number}");
        look(number + 1, &replayed);
    }
}

fn check(recording: &str) {
    let (first, longer) = (prompt(1_000, 100), prompt(1_000, 200));
    let mut seen = Vec::new();
    replay(recording, |_, replayed| {
        let found = (
            replayed.found(&first, None),
            replayed.found(&first, Some(SALT)),
            replayed.found(&longer, None),
        );
        if seen.last() != Some(&found) {
            seen.push(found);
        }
    });
    assert_eq!(seen, EXPECTED);
}

/// (Blocks in whatever tier, of which at the start in the GPU) of the first prompt, of the salted one and of the longer
/// one, whenever one of them changes.
type Seen = ((u32, u32), (u32, u32), (u32, u32));

const EXPECTED: &[Seen] = &[
    ((3, 3), (0, 0), (3, 3)),
    ((3, 3), (3, 3), (3, 3)),
    ((3, 3), (3, 3), (6, 6)),
    // The GPU gives up the salted prompt and the longer one's end, then the rest.
    ((3, 3), (3, 0), (6, 3)),
    ((3, 0), (3, 0), (6, 0)),
    // Both are asked again and loaded from CPU memory.
    ((3, 3), (3, 0), (6, 6)),
    ((3, 3), (3, 3), (6, 6)),
    ((3, 0), (3, 3), (6, 0)),
    ((3, 0), (3, 0), (6, 0)),
    // Only the first two blocks are asked again.
    ((3, 2), (3, 0), (6, 2)),
];

#[test]
fn placeholders_of_cpu_offload_keep_blocks_that_the_gpu_gave_up() {
    check(include_str!("../../../../tests/fixtures/kv/offloaded.txt"));
}

#[test]
fn offloaded_blocks_with_tokens_are_copies_under_their_own_salt() {
    check(include_str!(
        "../../../../tests/fixtures/kv/offloaded_with_tokens.txt"
    ));
}
