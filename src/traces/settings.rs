//! The configuration's `traces`.

use std::collections::BTreeMap;
use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::http::tls::ClientSettings;
use crate::secret::Secret;

/// OpenTelemetry traces, exported over OTLP. The usual environment variables, such as `OTEL_EXPORTER_OTLP_ENDPOINT`,
/// turn them on as well, and win over what stands here.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Settings {
    /// The collector, as `http://HOST:PORT` or `https://HOST:PORT`. Empty: `http://localhost:4317`, or port 4318 with
    /// `http/protobuf`, for which `/v1/traces` is added to an URL without a path.
    pub endpoint: String,
    /// How spans are sent.
    pub protocol: Protocol,
    /// Share of the requests without a `traceparent` that are traced. For others their parent decides: flags 01 are
    /// traced, flags 00 are not.
    #[schemars(range(min = 0, max = 1))]
    pub sample_ratio: f64,
    /// `service.name` of the spans.
    pub service_name: String,
    /// More attributes of the resource, such as `deployment.environment.name: prod`.
    pub resource_attributes: BTreeMap<String, String>,
    /// Headers that the collector asks for, such as a key: text, `${NAME}` or `file:/path`.
    pub headers: BTreeMap<String, Secret>,
    /// Compression of what is sent.
    pub compression: Compression,
    /// TLS of the connection, for an `https` endpoint. Left out: the CAs of the operating system.
    pub tls: Option<ClientSettings>,
    /// No keys: set by OpenTelemetry's environment variables alone.
    #[serde(skip)]
    pub advanced: Advanced,
}

/// How spans are sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Protocol {
    /// gRPC, as a rule at port 4317.
    #[default]
    #[serde(rename = "grpc")]
    Grpc,
    /// Protobuf over HTTP/1.1, as a rule at port 4318.
    #[serde(rename = "http/protobuf")]
    Http,
}

/// Compression of what is sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Compression {
    #[default]
    None,
    Gzip,
}

/// What `OTEL_BSP_...` and `OTEL_EXPORTER_OTLP_TIMEOUT` set.
#[derive(Clone, Debug, PartialEq)]
pub struct Advanced {
    /// An export that takes longer, its retries included, has failed.
    pub timeout: Duration,
    /// Spans that wait for their export; more are dropped and counted.
    pub max_queue: u32,
    /// Spans in one export.
    pub max_batch: u32,
    /// Time between two exports.
    pub export_interval: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            endpoint: String::new(),
            protocol: Protocol::default(),
            // As OpenTelemetry's own default. A request of an LLM costs far more than its trace.
            sample_ratio: 1.0,
            service_name: "warmroute".to_owned(),
            resource_attributes: BTreeMap::new(),
            headers: BTreeMap::new(),
            compression: Compression::default(),
            tls: None,
            advanced: Advanced::default(),
        }
    }
}

impl Default for Advanced {
    fn default() -> Self {
        Self {
            // As OpenTelemetry's.
            timeout: Duration::from_secs(10),
            // About 2 KB each. OpenTelemetry's default is 2,048, which 200 requests a second fill in 5 s.
            max_queue: 8_192,
            // As OpenTelemetry's.
            max_batch: 512,
            // OpenTelemetry's is 5 s. A small batch costs little, and whoever looks for a trace waits for it.
            export_interval: Duration::from_secs(2),
        }
    }
}
