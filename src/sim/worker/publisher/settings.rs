//! Command-line arguments of KV events, and the ZeroMQ endpoints in them. Pure.

use std::fmt;
use std::net::{Ipv4Addr, SocketAddr};
use std::num::NonZeroUsize;
use std::str::FromStr;

use clap::ValueEnum;

use crate::sim::default_arguments;

// Without this, clap makes a group of the same name as the outer arguments' group.
#[derive(clap::Args, Clone, Debug)]
#[group(skip)]
pub struct Settings {
    /// Publish KV events on this ZeroMQ endpoint, as tcp://HOST:PORT. `*` means all addresses, port 0 a free port.
    /// Data-parallel rank r uses port PORT + r.
    #[arg(long = "kv-events", value_name = "ENDPOINT")]
    pub events: Option<Endpoint>,

    /// Answer replay requests for KV events on this ZeroMQ endpoint.
    #[arg(long = "kv-replay", value_name = "ENDPOINT", requires = "events")]
    pub replay: Option<Endpoint>,

    /// Topic of the KV events.
    #[arg(long = "kv-topic", value_name = "TOPIC", default_value = "")]
    pub topic: String,

    /// Encoding of events: as maps (vLLM 0.24 and later) or as arrays (earlier releases, which also leave the topic
    /// out of replays).
    #[arg(long = "kv-layout", value_name = "LAYOUT", value_enum, default_value_t = Layout::Map)]
    pub layout: Layout,

    /// Encoding of block hashes: as an integer, or as all bytes of the hash.
    #[arg(long = "kv-hashes", value_name = "KIND", value_enum, default_value_t = Hashes::Int)]
    pub hashes: Hashes,

    // The default is vLLM's.
    /// Number of batches that can be replayed.
    #[arg(
        long = "kv-buffer-steps",
        value_name = "BATCHES",
        default_value = "10000"
    )]
    pub buffer_steps: NonZeroUsize,

    /// Sequence number of the first batch. A real engine starts at 0.
    #[arg(long = "kv-first-sequence", value_name = "NUMBER", default_value_t = 0)]
    pub first_sequence: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Layout {
    #[default]
    Map,
    Array,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Hashes {
    #[default]
    Int,
    Bytes,
}

/// `tcp://HOST:PORT`, a local endpoint to bind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// As given: a host name, an address, or `*`.
    pub host: String,
    pub port: u16,
}

impl Default for Settings {
    fn default() -> Self {
        default_arguments()
    }
}

impl Settings {
    /// Events and replays on free ports of the loopback interface.
    pub fn loopback() -> Self {
        let endpoint = Endpoint::from(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)));
        Self {
            events: Some(endpoint.clone()),
            replay: Some(endpoint),
            ..Self::default()
        }
    }
}

impl Endpoint {
    /// The endpoint of a dp rank, or none if its port number would be too large.
    pub(crate) fn of_rank(&self, rank: u16) -> Option<Self> {
        let port = match self.port {
            0 => 0,
            port => port.checked_add(rank)?,
        };
        Some(Self {
            host: self.host.clone(),
            port,
        })
    }

    /// Host and port to bind.
    pub(crate) fn address(&self) -> (&str, u16) {
        let host = match self.host.as_str() {
            "*" => "0.0.0.0",
            host => host.trim_start_matches('[').trim_end_matches(']'),
        };
        (host, self.port)
    }
}

impl From<SocketAddr> for Endpoint {
    fn from(address: SocketAddr) -> Self {
        let host = match address {
            SocketAddr::V4(address) => address.ip().to_string(),
            SocketAddr::V6(address) => format!("[{}]", address.ip()),
        };
        let port = address.port();
        Self { host, port }
    }
}

impl FromStr for Endpoint {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let rest = text.strip_prefix("tcp://");
        let parts = rest.and_then(|rest| rest.rsplit_once(':'));
        match parts.map(|(host, port)| (host, port.parse())) {
            Some((host, Ok(port))) if !host.is_empty() => Ok(Self {
                host: host.to_owned(),
                port,
            }),
            Some(_) | None => Err("expected an endpoint such as tcp://127.0.0.1:5557".to_owned()),
        }
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { host, port } = self;
        write!(f, "tcp://{host}:{port}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_are_parsed_and_formatted() {
        for text in ["tcp://*:5557", "tcp://127.0.0.1:0", "tcp://[::1]:80"] {
            assert_eq!(text.parse::<Endpoint>().unwrap().to_string(), text);
        }
        for text in [
            "ipc://engine.sock",
            "tcp://:1",
            "tcp://x:70000",
            "x:1",
            "tcp://x",
        ] {
            text.parse::<Endpoint>().unwrap_err();
        }
    }

    #[test]
    fn each_rank_has_its_own_port_and_port_0_stays_0() {
        let of = |port| Endpoint::from(SocketAddr::from((Ipv4Addr::LOCALHOST, port)));
        assert_eq!(of(5557).of_rank(2), Some(of(5559)));
        assert_eq!(of(0).of_rank(2), Some(of(0)));
        assert_eq!(of(65_535).of_rank(1), None);
    }
}
