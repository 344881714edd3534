//! The `endpoint_picker` section.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::http::tls;

/// The endpoint picker: gateways such as Envoy ask over gRPC (`ext_proc`) which worker is to get a request, and send it
/// themselves. Off unless `listen` is set. The API's listener stays as it is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Settings {
    /// Address and port for gateways, such as `:9002` (all addresses). gRPC with health service. Empty: no picker.
    pub listen: String,
    /// TLS with a certificate of your own. Left out: HTTP/2 in clear text.
    pub tls: Option<tls::ServerSettings>,
    /// Workers that the answer names after the chosen one, for gateways that try the next one if a worker cannot be
    /// reached. 0 for gateways that take a single address, such as Envoy clusters of type `ORIGINAL_DST`.
    #[schemars(range(max = 7))]
    pub fallbacks: u32,
    /// Settings for experts.
    pub advanced: Advanced,
}

/// Settings of the endpoint picker for experts.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Advanced {
    /// Obeys the header `test-epp-endpoint-selection` and reports who served a request, as the conformance tests of
    /// gateways need it. Clients could choose their worker with it.
    pub conformance_hooks: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            listen: String::new(),
            tls: None,
            // As many as the proxy itself tries by default.
            fallbacks: 2,
            advanced: Advanced::default(),
        }
    }
}

impl Settings {
    pub fn is_on(&self) -> bool {
        !self.listen.is_empty()
    }
}
