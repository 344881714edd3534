//! The configuration: YAML text -> the settings of each part, checked once, with all problems together.

mod check;
pub mod diff;
mod discovery;
mod effect;
mod flags;
mod load;
mod misplaced;
mod model;
mod model_names;
mod model_settings;
pub mod reader;
pub mod reference;
mod retired;
mod set_flags;
mod settings;
mod source;
mod summary;
mod tls;
mod token_sources;
mod tokenizer;
mod watched;
mod worker_tls;

use std::path::Path;

pub use self::discovery::{
    DiscoveryEntry, DnsWorkers, ParsedWorkers, StaticWorkers, WorkersFile, parse_workers,
};
pub use self::effect::Effect;
pub use self::flags::Flags;
pub use self::load::{Refused, unreadable};
pub use self::model::ModelOverride;
use self::reader::Problems;
pub use self::settings::{Api, Config, Fleet, KvEvents, KvEventsAdvanced, Reload, Runtime};
pub use self::source::Source;
pub use self::token_sources::Unreadable;
pub use self::tokenizer::{From, Loaded, Tokenizer};
pub use self::watched::{FileHash, WatchedFiles};

impl Config {
    /// Reads and checks a file.
    pub fn load(path: &Path) -> Result<Self, Problems> {
        Self::load_with(Some(path), Flags::default())
    }
}
