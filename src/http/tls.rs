//! TLS by rustls, for connections of clients, operators and replicas, and for connections to workers.
//!
//! Settings name files. What the files contain is read when the settings are checked and when a listener starts, and
//! again when the files change; connections that are open keep what they began with.

mod certificate;
mod check;
mod client_config;
mod contents;
mod names;
mod provider;
mod server_config;
mod settings;

pub use self::check::Checked;
pub use self::names::ClientNames;
pub use self::settings::{Advanced, ClientAuth, ClientSettings, MinVersion, ServerSettings};
