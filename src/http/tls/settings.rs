//! The settings of TLS: of a listener, and of connections to a worker.

use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// TLS of a listener. Its files are PEM, and are read again when they change.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct ServerSettings {
    /// Path of the listener's certificate, followed by those of intermediate CAs.
    pub certificate: String,
    /// Path of the certificate's private key, without a passphrase.
    pub key: String,
    /// A certificate that is made when the router starts, instead of `certificate` and `key`: connections are encrypted,
    /// and clients cannot verify with whom. For gateways in front of an endpoint picker, which do not try.
    pub self_signed: bool,
    /// The oldest version of TLS that is accepted.
    pub min_version: MinVersion,
    /// Path of the CA certificates by which clients' certificates are verified. Empty: clients are asked for none.
    pub client_ca: String,
    /// Whether each client needs a certificate. Only with `client_ca`.
    pub client_auth: ClientAuth,
    /// Names of which a client's certificate must have one, as subject alternative names: DNS names such as
    /// `gateway.example.com`, or URIs such as `spiffe://example.com/ns/prod/sa/gateway`. Empty: every certificate of
    /// `client_ca` is accepted.
    pub client_names: Vec<String>,
    /// No keys: fit for clients far away.
    #[serde(skip)]
    pub advanced: Advanced,
}

impl ServerSettings {
    /// By which metrics and logs name the certificate.
    pub(super) fn file(&self) -> &str {
        if self.self_signed {
            "self-signed"
        } else {
            &self.certificate
        }
    }
}

/// Whether each client needs a certificate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ClientAuth {
    /// A client without one is refused.
    #[default]
    Required,
    /// A client without one is served, as probes of Kubernetes have none. One that has a certificate must have a
    /// valid one.
    Optional,
}

/// The oldest version of TLS that is accepted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum MinVersion {
    /// TLS 1.2, with forward secrecy and authenticated encryption only.
    #[default]
    #[serde(rename = "tls1.2")]
    Tls12,
    /// TLS 1.3.
    #[serde(rename = "tls1.3")]
    Tls13,
}

/// Limits of handshakes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Advanced {
    /// A handshake that is not complete after this time, waiting for its turn included, ends its connection.
    pub handshake_timeout: Duration,
    /// Handshakes at a time, at most half as many as connections. More wait; for them a handshake that has taken a
    /// tenth of `handshake_timeout` is ended.
    pub max_concurrent_handshakes: u32,
}

impl Default for Advanced {
    fn default() -> Self {
        Self {
            // A client on another continent with lost packets needs 3 s.
            handshake_timeout: Duration::from_secs(10),
            // 30 KB each. Two cores complete as many in less than a second.
            max_concurrent_handshakes: 1_024,
        }
    }
}

/// TLS of the connections to a server; to a worker: requests, health checks, tokenization and KV events over gRPC. Its files
/// are PEM, and are read again when they change.
#[derive(
    Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(default)]
pub struct ClientSettings {
    /// Path of the CA certificates by which the server's certificate is verified. Empty: those of the operating
    /// system.
    pub ca: String,
    /// Path of the certificate that this router presents. Empty: none.
    pub certificate: String,
    /// Path of its private key, without a passphrase.
    pub key: String,
    /// The name that the server's certificate must have. Empty: the host of its URL; of workers that `dns` discovers, the DNS
    /// name.
    pub server_name: String,
}
