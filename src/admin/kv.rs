//! What is known of the workers' caches, as JSON.

use std::sync::Arc;
use std::time::Instant;

use serde::Serialize;

use crate::ids::WorkerId;
use crate::kv::event::{Name, Tier};
use crate::kv::forest::{Forest, Key};
use crate::kv::index::Index;
use crate::kv::parity::{self, Parity};
use crate::kv::radix::Listed;
use crate::kv::subscriber::{Board, Status};

/// Where the pages read.
#[derive(Debug)]
pub struct KvPages {
    board: Arc<Board>,
    forest: Arc<Forest>,
    parity: Arc<Parity>,
}

/// `GET /kv`.
#[derive(Debug, Serialize)]
pub(super) struct Page {
    /// Distinct blocks that any worker holds, and what it takes to know them.
    indexes: Vec<IndexRow>,
    /// Whether engines have the tokens that prompts are looked up by, for each model that was checked.
    parity: Vec<parity::Status>,
    /// Each rank of each worker whose events are followed.
    ranks: Vec<Status>,
}

#[derive(Debug, Serialize)]
struct IndexRow {
    model: String,
    block_size: u32,
    blocks: u64,
    memory_bytes: usize,
}

/// `GET /kv/blocks`: all that is known of one rank, parents before children.
#[derive(Debug, Serialize)]
pub(super) struct Blocks {
    worker: String,
    rank: u32,
    state: &'static str,
    blocks: Vec<BlockRow>,
}

#[derive(Debug, Serialize)]
struct BlockRow {
    /// The engine's own name; hexadecimal, as JSON's numbers are not exact at 64 bits.
    name: String,
    parent: Option<String>,
    /// Stands for the block and all before it, in this router.
    path: String,
    /// Blocks before it.
    depth: u32,
    copies: Copies,
}

/// None: some, and it is not known how many.
#[derive(Debug, Serialize)]
struct Copies {
    gpu: Option<u32>,
    cpu: Option<u32>,
    disk: Option<u32>,
}

impl KvPages {
    pub fn new(board: Arc<Board>, forest: Arc<Forest>, parity: Arc<Parity>) -> Self {
        Self {
            board,
            forest,
            parity,
        }
    }

    pub(super) fn page(&self, now: Instant) -> Page {
        let indexes = self.forest.all().into_iter();
        let row = |((model, block_size), index): (Key, Arc<Index>)| IndexRow {
            model: model.to_string(),
            block_size: u32::from(block_size),
            blocks: index.len(),
            memory_bytes: index.memory_bytes(),
        };
        Page {
            indexes: indexes.map(row).collect(),
            parity: self.parity.statuses(now),
            ranks: self.board.statuses(now),
        }
    }

    /// None where no events of that rank are followed.
    pub(super) fn blocks(
        &self,
        now: Instant,
        id: WorkerId,
        name: &str,
        rank: u32,
    ) -> Option<Blocks> {
        let statuses = self.board.statuses(now);
        let is_it = |status: &&Status| status.worker == name && status.rank == rank;
        let status = statuses.iter().find(is_it)?;
        let listed = self.forest.list(id, rank);
        Some(Blocks {
            worker: name.to_owned(),
            rank,
            state: status.state,
            blocks: listed.iter().map(row).collect(),
        })
    }
}

fn row(block: &Listed) -> BlockRow {
    let hex = |name: Name| format!("{:016x}", name.0);
    let copies = |tier: Tier| {
        let copies = block.copies[tier as usize];
        (copies != Listed::UNKNOWN).then_some(copies)
    };
    BlockRow {
        name: hex(block.name),
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
