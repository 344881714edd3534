//! What an engine tells of its cache, whatever wire it came over. Nothing here is judged yet: which
//! of it can be placed in a tree is for [`super::admit`].

/// The engine's own name of a block: the low 64 bits of its hash. Names parents and removals; two
/// engines may name the same content differently.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Name(pub u64);

/// What one scheduler step of one data-parallel rank did to its cache.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Batch {
    /// By the engine's clock; seconds since 1970.
    pub timestamp: f64,
    /// The data-parallel rank that it names, if it names one.
    pub rank: Option<u32>,
    pub events: Vec<Event>,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    Stored(Stored),
    Removed(Removed),
    Cleared {
        ownership: Option<Box<str>>,
    },
    /// An event of a type that is not known here.
    Unknown {
        kind: Box<str>,
    },
}

/// Consecutive blocks of one prompt, now held.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Stored {
    pub names: Vec<Name>,
    /// The block before the first of `names`; none where that is a prompt's first.
    pub parent: Option<Name>,
    /// `block_size` for each of `names`, in order.
    pub token_ids: Vec<u32>,
    pub block_size: u32,
    pub lora_id: Option<i64>,
    pub lora_name: Option<Box<str>>,
    /// Where a wire has a field of its own for it; else it is among the first block's `extra_keys`.
    pub cache_salt: Option<Box<str>>,
    /// What else makes each block's content; empty where no block has any.
    pub extra_keys: Vec<Vec<ExtraKey>>,
    pub place: Place,
    pub spec_kind: Option<Box<str>>,
    pub sliding_window: Option<u32>,
    pub session_id: Option<Box<str>>,
}

/// Blocks of which one copy each is gone.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Removed {
    pub names: Vec<Name>,
    pub place: Place,
}

/// Where in an engine's memory blocks are.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Place {
    pub medium: Medium,
    /// The cache group, in engines whose layers differ.
    pub group: Option<u32>,
    pub locality: Option<Box<str>>,
    pub ownership: Option<Box<str>>,
}

/// The memory that blocks lie in, as engines name it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub enum Medium {
    /// Older engines don't say; they mean the GPU.
    #[default]
    Unsaid,
    /// `GPU`, also on engines that compute elsewhere.
    Gpu,
    Cpu,
    /// `STORAGE` or `DISK`.
    Disk,
    Other(Box<str>),
}

/// Something beside tokens that a block's content depends on.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum ExtraKey {
    Text(Box<str>),
    Blob(Box<[u8]>),
    Number(i64),
    /// An image or the like, and where in the block it begins (negative: in an earlier one).
    Multimodal {
        identifier: Box<str>,
        offset: i64,
    },
}

/// A kind of memory, as routing sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Tier {
    Gpu,
    Cpu,
    Disk,
}

impl Tier {
    pub const COUNT: usize = 3;
    pub const ALL: [Tier; Self::COUNT] = [Tier::Gpu, Tier::Cpu, Tier::Disk];

    pub fn as_str(self) -> &'static str {
        match self {
            Tier::Gpu => "gpu",
            Tier::Cpu => "cpu",
            Tier::Disk => "disk",
        }
    }
}

/// What an engine says of its load, where a wire carries that beside events. Nothing of it counts for
/// the order of batches.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Load {
    pub running_requests: u32,
    pub waiting_requests: u32,
    /// Tokens of waiting requests that no cache holds.
    pub waiting_uncached_tokens: Option<u32>,
    /// Share of the cache that is in use, 0 to 1.
    pub token_usage: f64,
    pub max_running_requests: u32,
    /// How old the report was when it was sent.
    pub age_ms: u32,
    /// Tokens of running requests that are still to be prefilled.
    pub prefill_pending_tokens: Option<u32>,
    /// How long the engine has not said anything.
    pub engine_silence_ms: Option<u32>,
}
