//! How engines transfer KV blocks.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::observe::metrics::words;

words! {
    /// How engines transfer KV blocks. Each is a variant here and a file under `relay/kv_transfer`.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
    #[serde(rename_all = "snake_case")]
    pub enum Connector: Display {
        /// vLLM's `NixlConnector`: the response of the prefill leg says where the blocks are.
        Nixl = "nixl",
        /// vLLM's `MooncakeConnector`: both legs have an id that the router makes, and the decode leg has the address
        /// of the prefill worker's bootstrap server.
        Mooncake = "mooncake",
        /// vLLM's `MoRIIOConnector` with `read_mode`, for AMD GPUs: as with NIXL, the response of the prefill leg says where the
        /// blocks are. One data-parallel rank a worker. Not tried on hardware.
        Moriio = "moriio",
        /// SGLang's own, with any of its transfer backends: both legs run at the same time and meet at the prefill worker's
        /// bootstrap server. Its prefill and decode workers take no whole requests.
        Sglang = "sglang",
    }
}

impl Connector {
    /// True if a decode leg needs the [`BootstrapInfo`](super::BootstrapInfo) of its prefill worker.
    pub fn needs_bootstrap(self) -> bool {
        match self {
            Connector::Nixl | Connector::Moriio => false,
            Connector::Mooncake | Connector::Sglang => true,
        }
    }

    /// True if decode workers also take whole requests, without a prefill leg.
    pub fn decodes_alone(self) -> bool {
        self != Connector::Sglang
    }
}
