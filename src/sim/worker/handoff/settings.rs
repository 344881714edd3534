//! The arguments about handing prompts over between engines. Pure.

use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::time::Duration;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

// The arguments around these are a group of the same name.
#[derive(clap::Args, Clone, Debug)]
#[group(skip)]
pub struct Settings {
    /// What this engine does where prompts and answers are computed by different ones.
    #[arg(
        long = "kv-role",
        value_name = "ROLE",
        value_enum,
        requires = "connector"
    )]
    pub role: Option<Role>,

    /// How blocks get from one engine to the other; without it, every request is computed here.
    #[arg(long = "kv-connector", value_name = "CONNECTOR", value_enum)]
    pub connector: Option<Connector>,

    /// Where a Mooncake prefill engine tells who it is; without it, at a free port of the address that
    /// requests come to.
    #[arg(long = "bootstrap", value_name = "ADDRESS")]
    pub bootstrap: Option<SocketAddr>,

    /// How long a prefill engine keeps blocks that nobody fetches, and a Mooncake decode engine waits for
    /// them, in milliseconds; without it 30,000 with NIXL and 480,000 with Mooncake, as in vLLM.
    #[arg(long = "handoff-lease-ms", value_name = "MILLISECONDS")]
    pub lease_ms: Option<u64>,

    /// How long a NIXL decode engine tries to reach the prefill engine, in milliseconds.
    #[arg(
        long = "handoff-connect-ms",
        value_name = "MILLISECONDS",
        default_value_t = CONNECT_MS
    )]
    pub connect_ms: u64,

    /// Speed at which blocks go from one engine to the other, in tokens a second.
    #[arg(
        long = "handoff-tokens-per-second",
        value_name = "TOKENS",
        default_value_t = TOKENS_PER_SECOND
    )]
    pub tokens_per_second: NonZeroU32,
}

/// vLLM's time limit of a handshake.
const CONNECT_MS: u64 = 5_000;
/// A model of 8 billion parameters has about 128 KiB a token, and 200 Gbit/s carry 190,000 of these.
const TOKENS_PER_SECOND: NonZeroU32 = NonZeroU32::new(190_000).expect("it is not zero");

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    Prefill,
    Decode,
    Both,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Connector {
    /// The prefill engine's answer says where its blocks are, and under which numbers.
    Nixl,
    /// Whoever sends the requests names the transfer, and both engines are told the name.
    Mooncake,
}

impl Settings {
    /// A connector without a role is one for both.
    pub fn role(&self) -> Option<Role> {
        self.connector.map(|_| self.role.unwrap_or(Role::Both))
    }

    pub(crate) fn lease(&self) -> Duration {
        let usual = match self.connector {
            Some(Connector::Mooncake) => 480_000,
            Some(Connector::Nixl) | None => 30_000,
        };
        Duration::from_millis(self.lease_ms.unwrap_or(usual))
    }

    pub(crate) fn transfer_time(&self, tokens: usize) -> Duration {
        let rate = u64::from(self.tokens_per_second.get());
        Duration::from_nanos(tokens as u64 * 1_000_000_000 / rate)
    }
}

/// As without any argument: nothing is handed over.
impl Default for Settings {
    fn default() -> Self {
        Self {
            role: None,
            connector: None,
            bootstrap: None,
            lease_ms: None,
            connect_ms: CONNECT_MS,
            tokens_per_second: TOKENS_PER_SECOND,
        }
    }
}
