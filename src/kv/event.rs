//! KV events as engines publish them, independent of the transport. Types only: [`super::event_filter`]
//! decides which events a tree can take.

use crate::observe::metrics::words;

/// The engine's own hash of a block (its low 64 bits), by which events refer to parents and removed
/// blocks. Two engines may hash the same content differently.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EngineHash(pub u64);

/// The cache changes of one scheduler step of one data-parallel rank.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Batch {
    /// Seconds since 1970 by the engine's clock.
    pub timestamp: f64,
    /// The data-parallel rank, if the batch names one.
    pub rank: Option<u32>,
    pub events: Vec<Event>,
    /// Events that the engine sent beside these: removals that were joined to the removal before them.
    pub joined: u64,
}

impl Batch {
    /// Adds a removal. Engines often send one for each block; those of a row become one event, because a tree removes
    /// many blocks at once for far less than one after the other.
    pub fn remove(&mut self, hashes: &[EngineHash], location: Location) {
        match self.events.last_mut() {
            Some(Event::Removed(before)) if before.location == location => {
                before.hashes.extend_from_slice(hashes);
                self.joined += 1;
            }
            _ => self.events.push(Event::Removed(Removed {
                hashes: hashes.to_vec(),
                location,
            })),
        }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    Stored(Stored),
    Removed(Removed),
    Cleared {
        ownership: Option<Box<str>>,
    },
    /// An event type that this version does not know.
    Unknown {
        kind: Box<str>,
        /// The blocks that it names; `None` if it may name some that cannot be read.
        hashes: Option<Vec<EngineHash>>,
    },
}

/// Consecutive blocks of one prompt that are cached now.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Stored {
    pub hashes: Vec<EngineHash>,
    /// The block before the first of `hashes`; `None` if that is the first block of a prompt.
    pub parent: Option<EngineHash>,
    /// `block_size` tokens for each of `hashes`, in order.
    pub token_ids: Vec<u32>,
    pub block_size: u32,
    pub lora_id: Option<i64>,
    pub lora_name: Option<Box<str>>,
    /// Set if the transport has a field for it; otherwise the salt is among the first block's `extra_keys`.
    pub cache_salt: Option<Box<str>>,
    /// Per block, what its content depends on besides tokens; empty if no block has extra keys.
    pub extra_keys: Vec<Vec<ExtraKey>>,
    pub location: Location,
    pub spec_kind: Option<Box<str>>,
    pub sliding_window: Option<u32>,
    pub session_id: Option<Box<str>>,
}

impl Stored {
    /// What the content of the block at `at` depends on besides tokens.
    pub fn keys(&self, at: usize) -> &[ExtraKey] {
        self.extra_keys.get(at).map_or(&[][..], Vec::as_slice)
    }

    /// The tokens after the block at `at` on which its content depends too.
    pub fn lookahead(&self, at: usize) -> &[u32] {
        let tokens = self.keys(at).iter().find_map(|key| match key {
            ExtraKey::Lookahead(tokens) => Some(&**tokens),
            ExtraKey::Text(_)
            | ExtraKey::Blob(_)
            | ExtraKey::Number(_)
            | ExtraKey::Multimodal { .. } => None,
        });
        tokens.unwrap_or_default()
    }
}

/// Blocks that lost one copy each.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Removed {
    pub hashes: Vec<EngineHash>,
    pub location: Location,
}

/// Where in an engine's memory a copy of a block lies.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Location {
    pub medium: Medium,
    /// The cache group, in engines whose layers need different caches.
    pub group: Option<u32>,
    pub locality: Option<Box<str>>,
    pub ownership: Option<Box<str>>,
}

/// Whether a cache is the engine's own: then no owner is named, or an empty one.
pub fn is_own_cache(ownership: Option<&str>) -> bool {
    ownership.is_none_or(str::is_empty)
}

/// The memory type, as engines name it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub enum Medium {
    /// Older engines send nothing; they mean the GPU.
    #[default]
    Unspecified,
    /// `GPU`; engines on other accelerators send this too.
    Gpu,
    Cpu,
    /// `STORAGE` or `DISK`.
    Disk,
    Other(Box<str>),
}

impl Medium {
    /// As engines and the stores beside them name it, in capital or small letters.
    pub fn named(name: &str) -> Self {
        let is = |known: &str| name.eq_ignore_ascii_case(known);
        if is("GPU") {
            Medium::Gpu
        } else if is("CPU") || is("CPU_PINNED") {
            Medium::Cpu
        } else if is("STORAGE") || is("DISK") {
            Medium::Disk
        } else {
            Medium::Other(name.into())
        }
    }
}

/// Something besides tokens that a block's content depends on.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum ExtraKey {
    Text(Box<str>),
    Blob(Box<[u8]>),
    Number(i64),
    /// An image or other media item, and where in the block it begins (negative: in an earlier block).
    Multimodal {
        identifier: Box<str>,
        offset: i64,
    },
    /// The tokens after the block on which its content depends too (vLLM 0.33 with some kinds of speculative decoding).
    Lookahead(Box<[u32]>),
}

words! {
    /// Where a copy of a block lies, as routing distinguishes it.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
    pub enum Tier {
        Gpu = "gpu",
        Cpu = "cpu",
        Disk = "disk",
    }
}

impl Tier {
    pub const COUNT: usize = Self::ALL.len();
}

/// An engine's load report, on transports that carry it beside events. It has no sequence number.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Load {
    pub running_requests: u32,
    pub waiting_requests: u32,
    /// Ratio of the cache in use, 0 to 1.
    pub token_usage: f64,
    /// Age of the report when it was sent.
    pub age_ms: u32,
}
