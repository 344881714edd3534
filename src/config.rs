//! The configuration: YAML text -> the settings of each part, checked once, with all problems together.

mod check;
mod discovery;
pub mod reader;
pub mod reference;
mod settings;
mod token_sources;
mod tokenizer;

use std::path::Path;

pub use self::discovery::{DiscoveryEntry, DnsWorkers, StaticWorkers, WorkersFile, parse_workers};
use self::reader::{Outside, Problems, Reader};
pub use self::settings::{
    Admin, Api, Config, Fleet, FleetAdvanced, KvEvents, KvEventsAdvanced, ModelAdvanced,
    ModelOverride, Replicas, Runtime, listen_address,
};
pub use self::token_sources::Unreadable;
pub use self::tokenizer::{From, Loaded, Tokenizer};

impl Config {
    /// Reads and checks a file.
    pub fn load(path: &Path) -> Result<Self, Problems> {
        Self::load_with(path, |_| {})
    }

    /// Reads a file, changes the value, and checks it.
    pub fn load_with(path: &Path, change: impl FnOnce(&mut Self)) -> Result<Self, Problems> {
        let name = path.display().to_string();
        match std::fs::read(path) {
            Ok(text) => Self::read(&name, &text, change),
            Err(error) => Err(Problems::one(&name, &format!("cannot be read: {error}"))),
        }
    }

    /// Reads and checks a text.
    pub fn parse(name: &str, text: &str) -> Result<Self, Problems> {
        Self::read(name, text.as_bytes(), |_| {})
    }

    /// Reads a text, changes the value, and checks it. `name` is that of the file, for messages.
    pub fn read(name: &str, text: &[u8], change: impl FnOnce(&mut Self)) -> Result<Self, Problems> {
        let (mut reader, mut config) = Reader::read(name, text, Outside::of_process());
        if let Some(config) = &mut config {
            change(config);
            check::check(config, &mut reader);
        }
        reader.finish(config)
    }
}
