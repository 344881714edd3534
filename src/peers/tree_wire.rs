//! Trees and predicted blocks as messages between replicas. Pure. Nothing that arrives is trusted to be well formed.

use std::num::NonZeroU32;

use super::numbers::WorkerKey;
use super::wire;
use crate::ids::BlockHash;
use crate::kv::block::{BlockShape, ChainRoot, HASH_VERSION, LocalHash};
use crate::kv::event::{EngineHash, Tier};
use crate::kv::event_filter::LearnedFacts;
use crate::kv::index::{CopiedBlocks, CopiedRun, NewBlock, Parent};
use crate::kv::page_fold::{BLOCK_TOKENS, CopiedPages};
use crate::kv::predicted::PredictedBlock;
use crate::kv::stream::PeerTree;
use crate::kv::tree_copies::{NoTree, TreeCopy};

/// Upper bound on a chunk's size, so that the load reports of a slow network do not wait long for one.
pub const MAX_CHUNK_BYTES: usize = 256 << 10;

/// The rest of a chunk: its head, tags and lengths.
const CHUNK_REST: usize = 16 << 10;
const RUN_BYTES: usize = 8 + 5;
const BLOCK_BYTES: usize = 16;
/// A position and three counts, of up to five bytes each.
const COPIES_BYTES: usize = 20;
/// A page's name, parent, marks, and the name of a parent that is not known.
const PAGE_BYTES: usize = 8 + 5 + 1 + 5 + 8;
const TOKEN_BYTES: usize = 5;
const PREDICTED_BYTES: usize = 8 + 8 + 5 + 5;
/// A worker's address, at most, with its tags.
const WORKER_BYTES: usize = 300;

/// Why another replica's answer is of no use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unusable {
    /// What is wrong with a chunk, or with its place.
    Malformed(&'static str),
    /// It has no tree of that rank.
    Refused(String),
    /// Its hashes are of another version.
    HashVersion(u32),
    /// The tree is of blocks of another size.
    BlockSize(u32),
    /// Neither complete nor larger than what is known already.
    NotBetter,
    /// More blocks than this replica takes.
    TooLarge,
}

impl Unusable {
    /// The metric label.
    pub fn as_str(&self) -> &'static str {
        match self {
            Unusable::Malformed(_) => "malformed",
            Unusable::Refused(_) => "refused",
            Unusable::HashVersion(_) => "hash_version",
            Unusable::BlockSize(_) => "block_size",
            Unusable::NotBetter => "not_better",
            Unusable::TooLarge => "too_large",
        }
    }
}

/// What a tree must be to be of use.
#[derive(Clone, Copy, Debug, Default)]
pub struct Expected {
    pub shape: Option<BlockShape>,
    /// A tree that is not complete must have more blocks.
    pub known_blocks: u64,
    pub max_blocks: u64,
}

pub fn refusal(reason: NoTree) -> wire::TreeChunk {
    wire::TreeChunk {
        refusal: reason.as_str().to_owned(),
        is_last: true,
        ..empty()
    }
}

/// A chunk without anything, which others follow.
fn empty() -> wire::TreeChunk {
    wire::TreeChunk {
        hash_version: HASH_VERSION,
        ..wire::TreeChunk::default()
    }
}

pub fn chunks(copy: &TreeCopy) -> Vec<wire::TreeChunk> {
    let blocks = &copy.blocks;
    let mut chunks = Vec::new();
    let mut chunk = wire::TreeChunk {
        head: Some(head(copy)),
        ..empty()
    };
    let mut bytes = CHUNK_REST;
    let mut copies = blocks.copies.iter().peekable();
    let mut first = 0;
    for run in &blocks.runs {
        let end = first + run.len as usize;
        // A run of any length fits: it is at most as long as a page of the index.
        let most = RUN_BYTES + run.len as usize * (BLOCK_BYTES + COPIES_BYTES);
        if bytes + most > MAX_CHUNK_BYTES {
            chunks.push(std::mem::replace(&mut chunk, empty()));
            bytes = CHUNK_REST;
        }
        bytes += RUN_BYTES + run.len as usize * BLOCK_BYTES;
        let (parent, begins) = match run.parent {
            Parent::Root(root) => (root.0, 1),
            Parent::Block(name) => (name.0, 0),
        };
        chunk.runs.push(run.len << 1 | begins);
        chunk.parents.push(parent);
        while let Some((position, counts)) =
            copies.next_if(|(position, _)| (*position as usize) < end)
        {
            let position = chunk.names.len() + *position as usize - first;
            chunk.copies.push(position as u32);
            chunk.copies.extend(counts);
            bytes += COPIES_BYTES;
        }
        let of_run = &blocks.blocks[first..end];
        chunk.names.extend(of_run.iter().map(|block| block.name.0));
        chunk
            .locals
            .extend(of_run.iter().map(|block| block.local.0));
        first = end;
    }
    chunks.push(chunk);
    chunks.extend(page_chunks(&copy.pages));
    if let Some(last) = chunks.last_mut() {
        last.is_last = true;
    }
    chunks
}

fn page_chunks(pages: &CopiedPages) -> impl Iterator<Item = wire::TreeChunk> {
    let size = pages.page_size as usize;
    let at_once = (MAX_CHUNK_BYTES - CHUNK_REST) / (PAGE_BYTES + TOKEN_BYTES * size);
    let starts = (0..pages.len()).step_by(at_once.max(1));
    starts.map(move |start| {
        let end = pages.len().min(start + at_once.max(1));
        let named = pages.named_parents.iter();
        let named = named.filter(|(position, _)| (start..end).contains(&(*position as usize)));
        let (positions, parents) = named
            .map(|(position, name)| (position - start as u32, name.0))
            .unzip();
        wire::TreeChunk {
            page_names: pages.names[start..end].iter().map(|name| name.0).collect(),
            page_parents: pages.parents[start..end].to_vec(),
            page_tokens: pages.tokens[start * size..end * size].to_vec(),
            page_marks: pages.marks[start..end].to_vec(),
            page_named_positions: positions,
            page_named_parents: parents,
            ..empty()
        }
    })
}

fn head(copy: &TreeCopy) -> wire::TreeHead {
    let group = |(number, is_kept): &(u32, bool)| wire::CacheGroup {
        number: *number,
        is_kept: *is_kept,
    };
    wire::TreeHead {
        block_size: copy.shape.size.get(),
        lookahead: copy.shape.lookahead,
        page_size: copy.pages.page_size,
        has_matching_names: copy.has_matching_names,
        sequence: copy.position.sequence,
        digest: copy.position.digest.to_be_bytes().to_vec(),
        is_complete: copy.position.is_complete,
        incarnation: copy.position.incarnation.clone(),
        blocks: copy.blocks.len() as u64,
        groups: copy.learned.groups.iter().map(group).collect(),
        ignored_media: copy
            .learned
            .media
            .iter()
            .map(|medium| medium.to_string())
            .collect(),
    }
}

/// Whether a chunk is of use to this release.
fn check(chunk: &wire::TreeChunk) -> Result<(), Unusable> {
    if !chunk.refusal.is_empty() {
        return Err(Unusable::Refused(chunk.refusal.clone()));
    }
    if chunk.hash_version != HASH_VERSION {
        return Err(Unusable::HashVersion(chunk.hash_version));
    }
    Ok(())
}

#[derive(Debug)]
pub struct ArrivingTree {
    expected: Expected,
    copy: Option<TreeCopy>,
}

impl ArrivingTree {
    pub fn new(expected: Expected) -> Self {
        Self {
            expected,
            copy: None,
        }
    }

    /// Takes the next chunk. Returns the tree with the last one.
    pub fn take(&mut self, chunk: wire::TreeChunk) -> Result<Option<TreeCopy>, Unusable> {
        check(&chunk)?;
        if let Some(head) = &chunk.head {
            self.copy = Some(self.begin(head)?);
        }
        let copy = self.copy.as_mut().ok_or(Unusable::Malformed("no head"))?;
        add_blocks(&mut copy.blocks, &chunk)?;
        add_pages(&mut copy.pages, &chunk)?;
        let max_tokens = self.expected.max_blocks * u64::from(BLOCK_TOKENS);
        let is_too_large = copy.blocks.len() as u64 > self.expected.max_blocks
            || copy.pages.tokens.len() as u64 > max_tokens;
        if is_too_large {
            return Err(Unusable::TooLarge);
        }
        if !chunk.is_last {
            return Ok(None);
        }
        // A tree without blocks would look like knowledge.
        match self.copy.take() {
            Some(copy) if !copy.pages.is_consistent() => Err(Unusable::Malformed("pages")),
            Some(copy) if !copy.blocks.is_empty() => Ok(Some(copy)),
            Some(_) | None => Err(Unusable::Malformed("no blocks")),
        }
    }

    fn begin(&self, head: &wire::TreeHead) -> Result<TreeCopy, Unusable> {
        let expected = &self.expected;
        let shape = BlockShape {
            size: NonZeroU32::new(head.block_size).ok_or(Unusable::Malformed("block size 0"))?,
            lookahead: head.lookahead,
        };
        if expected.shape.is_some_and(|known| known != shape) {
            return Err(Unusable::BlockSize(head.block_size));
        }
        if !head.is_complete && head.blocks <= expected.known_blocks {
            return Err(Unusable::NotBetter);
        }
        if head.blocks > expected.max_blocks {
            return Err(Unusable::TooLarge);
        }
        let digest = <[u8; 16]>::try_from(head.digest.as_slice());
        let digest = digest.map_err(|_| Unusable::Malformed("digest"))?;
        Ok(TreeCopy {
            position: PeerTree {
                sequence: head.sequence,
                digest: u128::from_be_bytes(digest),
                is_complete: head.is_complete,
                incarnation: head.incarnation.clone(),
            },
            shape,
            learned: LearnedFacts {
                groups: head
                    .groups
                    .iter()
                    .map(|group| (group.number, group.is_kept))
                    .collect(),
                media: head
                    .ignored_media
                    .iter()
                    .map(|medium| (**medium).into())
                    .collect(),
            },
            has_matching_names: head.has_matching_names,
            blocks: CopiedBlocks::default(),
            pages: CopiedPages {
                page_size: head.page_size,
                ..CopiedPages::default()
            },
        })
    }
}

fn add_pages(pages: &mut CopiedPages, chunk: &wire::TreeChunk) -> Result<(), Unusable> {
    let count = chunk.page_names.len();
    let tokens = count.checked_mul(pages.page_size as usize);
    let named = chunk.page_named_positions.len();
    // In each chunk, because only the number of tokens is limited, and so pages must have some.
    if tokens != Some(chunk.page_tokens.len())
        || [chunk.page_parents.len(), chunk.page_marks.len()] != [count; 2]
        || chunk.page_named_parents.len() != named
        || named > count
        || count > 0 && pages.page_size == 0
    {
        return Err(Unusable::Malformed("pages and their parts do not match"));
    }
    let start = pages.names.len() as u32;
    let names = chunk.page_names.iter();
    pages.names.extend(names.map(|name| EngineHash(*name)));
    pages.parents.extend(&chunk.page_parents);
    pages.tokens.extend(&chunk.page_tokens);
    pages.marks.extend(&chunk.page_marks);
    let named = chunk.page_named_positions.iter();
    let named = named.zip(&chunk.page_named_parents);
    pages
        .named_parents
        .extend(named.map(|(position, name)| (start.saturating_add(*position), EngineHash(*name))));
    Ok(())
}

fn add_blocks(blocks: &mut CopiedBlocks, chunk: &wire::TreeChunk) -> Result<(), Unusable> {
    let lengths = chunk.runs.iter().map(|run| u64::from(run >> 1));
    let is_consistent = chunk.runs.len() == chunk.parents.len()
        && chunk.names.len() == chunk.locals.len()
        && lengths.clone().all(|length| length > 0)
        && lengths.sum::<u64>() == chunk.names.len() as u64
        && chunk.copies.len().is_multiple_of(1 + Tier::COUNT);
    if !is_consistent {
        return Err(Unusable::Malformed("runs and blocks do not match"));
    }
    let start = blocks.blocks.len() as u32;
    let mut after = None;
    for noted in chunk.copies.chunks_exact(1 + Tier::COUNT) {
        let position = noted[0];
        if position as usize >= chunk.names.len() || after.is_some_and(|after| position <= after) {
            return Err(Unusable::Malformed("copies are not in order"));
        }
        after = Some(position);
        let counts = [noted[1], noted[2], noted[3]];
        if counts == [0; Tier::COUNT] {
            return Err(Unusable::Malformed("a block without copies"));
        }
        blocks.copies.push((start + position, counts));
    }
    let runs = chunk.runs.iter().zip(&chunk.parents);
    blocks.runs.extend(runs.map(|(run, parent)| CopiedRun {
        parent: match run & 1 {
            1 => Parent::Root(ChainRoot(*parent)),
            _ => Parent::Block(EngineHash(*parent)),
        },
        len: run >> 1,
    }));
    let pairs = chunk.names.iter().zip(&chunk.locals);
    blocks.blocks.extend(pairs.map(|(name, local)| NewBlock {
        name: EngineHash(*name),
        local: LocalHash(*local),
    }));
    Ok(())
}

pub fn predicted_chunks(
    caches: impl Iterator<Item = (WorkerKey, Vec<PredictedBlock>)>,
) -> impl Iterator<Item = wire::TreeChunk> {
    const BLOCKS: usize = (MAX_CHUNK_BYTES - CHUNK_REST - WORKER_BYTES) / PREDICTED_BYTES;
    let of_cache = |(key, blocks): (WorkerKey, Vec<PredictedBlock>)| {
        let parts: Vec<wire::TreeChunk> = blocks
            .chunks(BLOCKS)
            .map(|blocks| wire::TreeChunk {
                predicted: vec![wire::PredictedBlocks {
                    worker: key.address.to_string(),
                    rank: key.rank,
                    paths: blocks.iter().map(|block| block.path.0).collect(),
                    parents: blocks
                        .iter()
                        .map(|block| block.parent.map_or(0, |parent| parent.0))
                        .collect(),
                    tokens: blocks.iter().map(|block| block.tokens).collect(),
                    ages_s: blocks.iter().map(|block| block.age_s).collect(),
                }],
                ..empty()
            })
            .collect();
        parts
    };
    let last = wire::TreeChunk {
        is_last: true,
        ..empty()
    };
    caches.flat_map(of_cache).chain(std::iter::once(last))
}

/// The predicted blocks in a chunk, by worker and rank.
pub fn predicted(
    chunk: &wire::TreeChunk,
) -> Result<Vec<(WorkerKey, Vec<PredictedBlock>)>, Unusable> {
    check(chunk)?;
    let mut all = Vec::new();
    for part in &chunk.predicted {
        let count = part.paths.len();
        let lengths = [part.parents.len(), part.tokens.len(), part.ages_s.len()];
        if lengths != [count; 3] {
            return Err(Unusable::Malformed("predicted blocks"));
        }
        let blocks = (0..count).map(|at| PredictedBlock {
            path: BlockHash(part.paths[at]),
            parent: (part.parents[at] != 0).then_some(BlockHash(part.parents[at])),
            tokens: part.tokens[at],
            age_s: part.ages_s[at],
        });
        let key = WorkerKey {
            address: part.worker.as_str().into(),
            rank: part.rank,
        };
        all.push((key, blocks.collect()));
    }
    Ok(all)
}

#[cfg(test)]
pub(super) mod tests {
    use proptest::prelude::*;
    use prost::Message;

    use super::*;

    pub(in crate::peers) fn copy(runs: &[(u32, bool, u8)]) -> TreeCopy {
        let mut blocks = CopiedBlocks::default();
        for (at, (len, begins, copies)) in runs.iter().enumerate() {
            let parent = if *begins {
                Parent::Root(ChainRoot(at as u64))
            } else {
                Parent::Block(EngineHash(at as u64 * 7))
            };
            blocks.runs.push(CopiedRun { parent, len: *len });
            for _ in 0..*len {
                let position = blocks.blocks.len() as u32;
                match copies % 4 {
                    0 => {}
                    1 => blocks.copies.push((position, [0, 1, 0])),
                    2 => blocks.copies.push((position, [3, 0, u32::MAX])),
                    _ if position.is_multiple_of(3) => blocks.copies.push((position, [2, 1, 1])),
                    _ => {}
                }
                blocks.blocks.push(NewBlock {
                    name: EngineHash(u64::from(position) << 7),
                    local: LocalHash(u64::from(position).wrapping_mul(0x9e37_79b9)),
                });
            }
        }
        TreeCopy {
            position: PeerTree {
                sequence: 77,
                digest: 1 << 100,
                is_complete: true,
                incarnation: Some("a".to_owned()),
            },
            shape: BlockShape {
                size: NonZeroU32::new(16).unwrap(),
                lookahead: 3,
            },
            learned: LearnedFacts {
                groups: vec![(0, true), (3, false)],
                media: vec!["TAPE".into()],
            },
            has_matching_names: true,
            pages: pages_of(blocks.len() as u32),
            blocks,
        }
    }

    /// Chains of five pages of two tokens; some chains follow a page that is not known.
    fn pages_of(count: u32) -> CopiedPages {
        let name = |at: u32| EngineHash(u64::from(at) << 9 | 1);
        CopiedPages {
            page_size: 2,
            names: (0..count).map(name).collect(),
            parents: (0..count).map(|at| u32::from(at % 5 > 0)).collect(),
            named_parents: (0..count)
                .filter(|at| at % 10 == 0)
                .map(|at| (at, EngineHash(u64::from(at))))
                .collect(),
            tokens: (0..count * 2).collect(),
            marks: (0..count)
                .map(|at| [0b1, 0b01_0011, 0b100][at as usize % 3])
                .collect(),
        }
    }

    fn expected() -> Expected {
        Expected {
            max_blocks: 1 << 20,
            ..Expected::default()
        }
    }

    fn take_all(expected: Expected, chunks: Vec<wire::TreeChunk>) -> Result<TreeCopy, Unusable> {
        let mut arriving = ArrivingTree::new(expected);
        for chunk in chunks {
            if let Some(copy) = arriving.take(chunk)? {
                return Ok(copy);
            }
        }
        Err(Unusable::Malformed("no last chunk"))
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn a_tree_arrives_as_it_was_in_chunks_that_are_not_too_large(
            runs in proptest::collection::vec((1u32..=16, any::<bool>(), any::<u8>()), 1..4_000),
        ) {
            let copy = copy(&runs);
            let chunks = chunks(&copy);
            for chunk in &chunks {
                prop_assert!(chunk.encoded_len() <= MAX_CHUNK_BYTES);
            }
            prop_assert_eq!(take_all(expected(), chunks), Ok(copy));
        }

        #[test]
        fn foreign_bytes_are_refused_and_nothing_else_happens(
            bytes in proptest::collection::vec(any::<u8>(), 0..200),
            runs in proptest::collection::vec(0u32..40, 0..6),
            parents in proptest::collection::vec(any::<u64>(), 0..6),
            names in proptest::collection::vec(any::<u64>(), 0..40),
            locals in proptest::collection::vec(any::<u64>(), 0..40),
            copies in proptest::collection::vec(0u32..40, 0..9),
        ) {
            if let Ok(chunk) = wire::TreeChunk::decode(bytes.as_slice()) {
                let _ = ArrivingTree::new(expected()).take(chunk.clone());
                let _ = predicted(&chunk);
            }
            let head = chunks(&copy(&[(1, true, 0)])).remove(0).head;
            let chunk = wire::TreeChunk { head, runs, parents, names, locals, copies, is_last: true, ..empty() };
            if let Ok(Some(copy)) = ArrivingTree::new(expected()).take(chunk) {
                let blocks: u32 = copy.blocks.runs.iter().map(|run| run.len).sum();
                prop_assert_eq!(blocks as usize, copy.blocks.len());
                let positions = copy.blocks.copies.iter().map(|(position, _)| *position);
                prop_assert!(positions.is_sorted());
            }
        }
    }

    #[test]
    fn what_is_of_no_use_is_refused_by_its_first_chunk() {
        let whole = copy(&[(3, true, 0), (2, false, 1)]);
        let with = |change: fn(&mut wire::TreeChunk)| {
            let mut chunks = chunks(&whole);
            change(&mut chunks[0]);
            chunks
        };
        let head = |chunk: &mut wire::TreeChunk| chunk.head.clone().unwrap();
        assert_eq!(
            take_all(expected(), with(|chunk| chunk.hash_version += 1)),
            Err(Unusable::HashVersion(HASH_VERSION + 1))
        );
        let other_size = Expected {
            shape: NonZeroU32::new(32).map(BlockShape::from),
            ..expected()
        };
        assert_eq!(
            take_all(other_size, chunks(&whole)),
            Err(Unusable::BlockSize(16))
        );
        assert_eq!(
            take_all(expected(), vec![refusal(NoTree::Cold)]),
            Err(Unusable::Refused("cold".to_owned()))
        );
        let small = Expected {
            max_blocks: 4,
            ..Expected::default()
        };
        assert_eq!(take_all(small, chunks(&whole)), Err(Unusable::TooLarge));
        // It says less than it sends.
        let mut liar = chunks(&whole);
        liar[0].head = Some(wire::TreeHead {
            blocks: 1,
            ..head(&mut liar[0])
        });
        assert_eq!(take_all(small, liar), Err(Unusable::TooLarge));
        let mut partial = whole.clone();
        partial.position.is_complete = false;
        let knows = |known_blocks| Expected {
            known_blocks,
            ..expected()
        };
        assert_eq!(
            take_all(knows(5), chunks(&partial)),
            Err(Unusable::NotBetter)
        );
        assert_eq!(take_all(knows(4), chunks(&partial)), Ok(partial));
        assert_eq!(take_all(knows(5), chunks(&whole)), Ok(whole));
    }

    #[test]
    fn parts_of_pages_without_pages_are_refused_by_their_chunk() {
        type Change = fn(&mut wire::TreeChunk);
        let changes: [Change; 4] = [
            |chunk| chunk.page_marks.push(1),
            |chunk| chunk.page_parents.push(0),
            |chunk| {
                chunk.page_named_positions.push(0);
                chunk.page_named_parents.push(7);
            },
            // A page without tokens.
            |chunk| {
                chunk.head.as_mut().unwrap().page_size = 0;
                chunk.page_names.push(9);
                chunk.page_parents.push(0);
                chunk.page_marks.push(1);
            },
        ];
        for change in changes {
            let mut chunk = chunks(&copy(&[(3, true, 0)])).remove(0);
            assert!(chunk.page_names.is_empty());
            change(&mut chunk);
            assert_eq!(
                ArrivingTree::new(expected()).take(chunk),
                Err(Unusable::Malformed("pages and their parts do not match"))
            );
        }
    }

    #[test]
    fn an_empty_tree_is_no_knowledge() {
        let empty = chunks(&copy(&[]));
        assert_eq!(
            take_all(expected(), empty),
            Err(Unusable::Malformed("no blocks"))
        );
    }

    #[test]
    fn predicted_blocks_arrive_as_they_were() {
        let blocks = |count: u32| -> Vec<PredictedBlock> {
            let block = |at| PredictedBlock {
                path: BlockHash(u64::from(at) << 40),
                parent: (at % 3 > 0).then_some(BlockHash(u64::from(at) << 20)),
                tokens: at,
                age_s: u32::MAX - at,
            };
            (0..count).map(block).collect()
        };
        let key = |address: &str, rank| WorkerKey {
            address: address.into(),
            rank,
        };
        let caches = vec![
            (key("a:1", None), blocks(40_000)),
            (key("a:1", Some(0)), blocks(5)),
            (key("b:2", Some(7)), blocks(3)),
        ];
        let chunks: Vec<_> = predicted_chunks(caches.clone().into_iter()).collect();
        let mut arrived: Vec<(WorkerKey, Vec<PredictedBlock>)> = Vec::new();
        for chunk in &chunks {
            assert!(chunk.encoded_len() <= MAX_CHUNK_BYTES);
            for (key, blocks) in predicted(chunk).unwrap() {
                match arrived.last_mut() {
                    Some((last, all)) if *last == key => all.extend(blocks),
                    _ => arrived.push((key, blocks)),
                }
            }
        }
        assert!(chunks.last().unwrap().is_last);
        assert_eq!(arrived, caches);
    }
}
