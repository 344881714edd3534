//! Command-line arguments of KV transfers. Pure.

use std::num::NonZeroU32;
use std::time::Duration;

use clap::ValueEnum;
use clap::builder::{PossibleValuesParser, TypedValueParser};

use crate::fleet::Role;
use crate::sim::default_arguments;
use crate::units::parse_milliseconds;

// Without this, clap makes a group of the same name as the outer arguments' group.
#[derive(clap::Args, Clone, Debug)]
#[group(skip)]
pub struct Settings {
    /// Role of this engine in disaggregated prefill/decode.
    #[arg(
        long = "kv-role",
        value_name = "ROLE",
        value_parser = roles(),
        requires = "connector"
    )]
    pub role: Option<Role>,

    /// KV connector to imitate. Without it the engine transfers nothing and does everything itself.
    #[arg(long = "kv-connector", value_name = "CONNECTOR", value_enum)]
    pub connector: Option<Connector>,

    /// How long a prefill engine keeps blocks for a decode engine to fetch, and how long a Mooncake decode engine
    /// waits for them. By default as in vLLM: 30s for NIXL, 480s for Mooncake.
    #[arg(
        long = "kv-transfer-lease",
        value_name = "DURATION",
        value_parser = parse_milliseconds
    )]
    pub lease_ms: Option<u64>,

    /// How long a NIXL decode engine tries to connect to the prefill engine. The default is vLLM's.
    #[arg(
        long = "kv-transfer-connect-timeout",
        value_name = "DURATION",
        default_value = "5s",
        value_parser = parse_milliseconds
    )]
    pub connect_ms: u64,

    // The default is 200 Gbit/s, with 128 KiB per token as in a model of 8 billion parameters.
    /// Transfer speed, in tokens per second.
    #[arg(
        long = "kv-transfer-tokens-per-second",
        value_name = "TOKENS",
        default_value = "190000"
    )]
    pub tokens_per_second: NonZeroU32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Connector {
    /// The prefill engine's answer has the address and the ids of its blocks.
    Nixl,
    /// The router gives both engines the same transfer id.
    Mooncake,
    /// As NIXL, with other fields (MoRI-IO in read mode).
    Moriio,
}

impl Settings {
    /// The role; with a connector and no role, [`Role::Both`].
    pub fn role(&self) -> Option<Role> {
        self.connector.map(|_| self.role.unwrap_or(Role::Both))
    }

    pub(crate) fn lease(&self) -> Duration {
        let usual = match self.connector {
            Some(Connector::Mooncake) => 480_000,
            Some(Connector::Nixl | Connector::Moriio) | None => 30_000,
        };
        Duration::from_millis(self.lease_ms.unwrap_or(usual))
    }

    pub(crate) fn transfer_time(&self, tokens: usize) -> Duration {
        let rate = u64::from(self.tokens_per_second.get());
        Duration::from_nanos(tokens as u64 * 1_000_000_000 / rate)
    }
}

impl Default for Settings {
    fn default() -> Self {
        default_arguments()
    }
}

fn roles() -> impl TypedValueParser<Value = Role> {
    PossibleValuesParser::new(Role::ALL.map(Role::as_str)).map(|word| {
        let mut roles = Role::ALL.into_iter();
        let role = roles.find(|role| role.as_str() == word);
        role.expect("one of the possible values")
    })
}
