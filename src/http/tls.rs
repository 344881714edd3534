//! TLS by rustls, for connections of clients, operators and replicas, and for connections to workers.
//!
//! Settings name files. What the files contain is read when the settings are checked and when a listener starts, and
//! again when the files change; connections that are open keep what they began with.

mod certificate;
mod client;
mod client_config;
mod contents;
mod handshakes;
mod metrics;
mod names;
mod peer_config;
mod self_signed;
mod server;
mod server_config;
mod settings;
mod socket;
mod watch;

pub use self::client::{Client, Clients, Protocol, refused_certificate, refused_certificate_in};
pub use self::client_config::Checked;
pub use self::metrics::Metrics;
pub use self::names::ClientNames;
pub use self::server::{Listener, Server};
pub use self::settings::{Advanced, ClientAuth, ClientSettings, MinVersion, ServerSettings};
pub use self::socket::Socket;
pub(in crate::http) use self::socket::write_to;
pub use self::watch::watch;
