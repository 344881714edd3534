//! The settings of KV events over gRPC.

use std::time::Duration;

use crate::kv::protobuf::Service;

/// KV events over gRPC, the same for all workers.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// Which engine's gRPC service is called. `auto` tries all; a `warmroute bridge` has all.
    pub service: Servicer,
    /// For one attempt to connect.
    pub connect_timeout: Duration,
    /// Wait before the second attempt to connect; doubles with each further one, less a random part.
    pub backoff: Duration,
    /// The longest wait between two attempts to connect.
    pub max_backoff: Duration,
    /// Wait after the other side said that it does not serve KV events.
    pub refused_backoff: Duration,
    /// Silence after which TCP checks whether the other host is alive.
    pub keepalive_interval: Duration,
    /// Silence after which an HTTP/2 ping checks whether the other process is alive. gRPC servers in C and Python
    /// close connections that ping more often than every five minutes.
    pub ping_interval: Duration,
    /// A larger message ends the connection. 100,000 blocks of 16 tokens are 10 MB.
    pub max_message: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            service: Servicer::Auto,
            // Beyond a lost first packet of the handshake (1 s).
            connect_timeout: Duration::from_secs(2),
            backoff: Duration::from_millis(100),
            // An engine takes longer to load its model.
            max_backoff: Duration::from_secs(5),
            // What an engine serves changes with its restart only.
            refused_backoff: Duration::from_secs(60),
            keepalive_interval: Duration::from_secs(20),
            ping_interval: Duration::from_secs(310),
            max_message: 64 << 20,
        }
    }
}

/// Which of the services to ask; `auto` asks one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Servicer {
    /// All of them, one after the other, until the engine knows one.
    Auto,
    /// vLLM's.
    Vllm,
    /// SGLang's.
    Sglang,
    /// TokenSpeed's.
    TokenSpeed,
    /// TensorRT-LLM's.
    TensorrtLlm,
}

impl Servicer {
    pub(super) fn choice(self) -> &'static [Service] {
        match self {
            Self::Auto => &Service::ALL,
            Self::Vllm => &[Service::Vllm],
            Self::Sglang => &[Service::Sglang],
            Self::TokenSpeed => &[Service::TokenSpeed],
            Self::TensorrtLlm => &[Service::TensorrtLlm],
        }
    }
}
