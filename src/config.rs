//! The configuration: YAML text -> the settings of each part, checked once, with all problems together.

mod check;
mod discovery;
mod flags;
pub mod reader;
pub mod reference;
mod settings;
mod tls;
mod token_sources;
mod tokenizer;
mod worker_tls;

use std::path::Path;

pub use self::discovery::{DiscoveryEntry, DnsWorkers, StaticWorkers, WorkersFile, parse_workers};
pub use self::flags::Flags;
use self::reader::{Outside, Problems, Reader};
pub use self::settings::{
    Api, Config, Fleet, FleetAdvanced, KvEvents, KvEventsAdvanced, ModelAdvanced, ModelOverride,
    Runtime,
};
pub use self::token_sources::Unreadable;
pub use self::tokenizer::{From, Loaded, Tokenizer};

impl Config {
    /// Reads and checks a file.
    pub fn load(path: &Path) -> Result<Self, Problems> {
        Self::load_with(Some(path), Flags::default())
    }

    /// Reads a file, if there is one, puts the values of flags in, and checks the result.
    pub fn load_with(path: Option<&Path>, flags: Flags) -> Result<Self, Problems> {
        let Some(path) = path else {
            return Self::read("", b"", flags);
        };
        let name = path.display().to_string();
        match std::fs::read(path) {
            Ok(text) => Self::read(&name, &text, flags),
            Err(error) => Err(Problems::one(&name, &format!("cannot be read: {error}"))),
        }
    }

    /// Reads and checks a text.
    pub fn parse(name: &str, text: &str) -> Result<Self, Problems> {
        Self::read(name, text.as_bytes(), Flags::default())
    }

    /// `name` is that of the file, for messages.
    fn read(name: &str, text: &[u8], flags: Flags) -> Result<Self, Problems> {
        let (mut reader, mut config) = Reader::read(name, text, Outside::of_process());
        if let Some(config) = &mut config {
            flags.apply(config, &mut reader);
            check::check(config, &mut reader);
        }
        reader.finish(config)
    }
}
