//! The settings of KV events over gRPC.

use std::time::Duration;

use crate::kv::protobuf::Service;

/// KV events over gRPC, the same for all workers.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// The engines' services that are asked, one after the other, until the other side knows one. A `warmroute bridge`
    /// knows all.
    pub services: &'static [Service],
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
            services: &Service::ALL,
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
