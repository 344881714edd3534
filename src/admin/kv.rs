//! `GET /kv` and `GET /kv/blocks`: what the router knows of the workers' prefix caches.

use std::sync::Arc;
use std::time::Instant;

use serde::{Deserialize, Serialize};

use crate::ids::WorkerId;
use crate::kv::event::{EngineHash, Tier};
use crate::kv::index::{IndexKey, PrefixIndex, TreeBlock};
use crate::kv::indexes::PrefixIndexes;
use crate::kv::subscriber::{Status, StatusBoard};
use crate::kv::tokenizer_check::{self, TokenizerCheck};

#[derive(Debug)]
pub struct KvPages {
    pub(crate) board: Arc<StatusBoard>,
    pub(crate) indexes: Arc<PrefixIndexes>,
    pub(crate) tokenizer_check: Arc<TokenizerCheck>,
}

/// `GET /kv`.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct KvPage {
    #[serde(skip_deserializing)]
    indexes: Vec<IndexRow>,
    /// For each model that was checked: whether router and engines have the same tokens for a prompt.
    pub tokenizer_check: Vec<tokenizer_check::Status>,
    /// The KV events of each rank of each worker that has them.
    pub ranks: Vec<Status>,
}

#[derive(Debug, Serialize)]
struct IndexRow {
    model: String,
    block_size: u32,
    /// Tokens after a block on which its content depends too.
    #[serde(skip_serializing_if = "is_zero")]
    lookahead: u32,
    /// Distinct blocks that any worker caches.
    blocks: u64,
    memory_bytes: usize,
}

fn is_zero(number: &u32) -> bool {
    *number == 0
}

/// `GET /kv/blocks`: every cached block of one rank, parents before children.
#[derive(Debug, Serialize)]
pub(super) struct Blocks {
    worker: String,
    rank: u32,
    state: &'static str,
    blocks: Vec<BlockRow>,
}

#[derive(Debug, Serialize)]
struct BlockRow {
    /// The engine's hash of the block, in hexadecimal: JSON readers round 64-bit numbers.
    hash: String,
    /// The engine's hash of the block before it.
    parent: Option<String>,
    /// The router's hash of the whole prefix that ends with this block.
    path: String,
    /// Number of blocks before this one.
    depth: u32,
    copies: Copies,
}

/// Copies in each tier. `null` means at least one, number unknown.
#[derive(Debug, Serialize)]
struct Copies {
    gpu: Option<u32>,
    cpu: Option<u32>,
    disk: Option<u32>,
}

impl KvPages {
    pub(super) fn page(&self, now: Instant) -> KvPage {
        let indexes = self.indexes.all().into_iter();
        let row = |((model, shape), index): (IndexKey, Arc<PrefixIndex>)| IndexRow {
            model: model.to_string(),
            block_size: u32::from(shape.size),
            lookahead: shape.lookahead,
            blocks: index.len(),
            memory_bytes: index.memory_bytes(),
        };
        KvPage {
            indexes: indexes.map(row).collect(),
            tokenizer_check: self.tokenizer_check.statuses(now),
            ranks: self.board.statuses(now),
        }
    }

    pub(super) fn ranks_of(&self, now: Instant, worker: &str) -> Vec<Status> {
        let statuses = self.board.statuses(now).into_iter();
        statuses.filter(|status| status.worker == worker).collect()
    }

    /// `None` if the rank has no KV events.
    pub(super) fn blocks(
        &self,
        now: Instant,
        id: WorkerId,
        name: &str,
        rank: u32,
    ) -> Option<Blocks> {
        let statuses = self.board.statuses(now);
        let is_rank = |status: &&Status| status.worker == name && status.rank == rank;
        let status = statuses.iter().find(is_rank)?;
        let listed = self.indexes.list(id, rank);
        Some(Blocks {
            worker: name.to_owned(),
            rank,
            state: status.state,
            blocks: listed.iter().map(row).collect(),
        })
    }
}

fn row(block: &TreeBlock) -> BlockRow {
    let hex = |name: EngineHash| format!("{:016x}", name.0);
    let copies = |tier: Tier| {
        let copies = block.copies[tier as usize];
        (copies != TreeBlock::UNKNOWN_COPIES).then_some(copies)
    };
    BlockRow {
        hash: hex(block.name),
        parent: block.parent.map(hex),
        path: format!("{:016x}", block.path),
        depth: block.depth,
        copies: Copies {
            gpu: copies(Tier::Gpu),
            cpu: copies(Tier::Cpu),
            disk: copies(Tier::Disk),
        },
    }
}
