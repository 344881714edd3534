//! Settings of the API: bodies, proxies, browsers.

use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{cors, endpoints};
use crate::http::client_address::Networks;
use crate::units::{DurationText, SizeText};

/// Bodies of clients' requests, and the proxies they come through.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Settings {
    /// A request with a larger body is answered with 413. 64 MiB are millions of tokens, or a dozen images.
    #[serde(with = "SizeText")]
    pub max_body: u64,
    /// Memory for the bodies of all clients' requests together, from their first byte until an engine has started to
    /// answer, with the histories that they continue; those of background responses until they have ended. Beyond it
    /// requests wait, and those of lower priority that wait for workers give theirs up; for the histories of lines
    /// of batches they do not wait, but are refused. One tenant (without tenants: one client address) gets no more than
    /// it leaves to all others: alone, half of it, and half as much on top for its background responses. 1 GiB is 16
    /// bodies of the largest size.
    #[serde(with = "SizeText")]
    pub max_total_body: u64,
    /// A request whose body finds no room in `max_total_body` for this long is answered with 503. Bodies are in memory
    /// until an engine starts to answer: for seconds while workers have room, longer while requests wait for them.
    /// `0s`: it does not wait.
    #[serde(with = "DurationText")]
    #[schemars(extend("min" = "0s"))]
    pub max_body_wait: Duration,
    /// A request of whose body less than 1 KiB a second comes for this long is refused; the whole body may take 10 times as
    /// long.
    #[serde(with = "DurationText")]
    pub body_timeout: Duration,
    /// Proxies in front of the router, as addresses or networks such as `10.0.0.0/8`. A request from one of them
    /// has the client address that its `X-Forwarded-For` reports.
    pub trusted_proxies: Networks,
    pub cors: cors::Settings,
    /// Paths of further endpoints of the engines, which are passed on to a worker of the request's `model`, by load:
    /// `/v1/score`, `/classify`, `/pooling`, `/v1/audio/transcriptions`. A body is JSON or a form (`multipart/form-data`). Only
    /// `POST`, only these paths, and never one that changes an engine, such as `/sleep` or `/v1/load_lora_adapter`.
    pub extra_endpoints: Vec<String>,
}

impl Settings {
    /// What is wrong with the settings, by key.
    pub fn check(&self) -> Vec<(String, String)> {
        let paths = self.extra_endpoints.iter().enumerate();
        let problems = paths.filter_map(|(index, path)| {
            let message = endpoints::check(path).err()?;
            Some((format!("extra_endpoints[{index}]"), message))
        });
        let cors = self.cors.check().into_iter();
        let cors = cors.map(|(key, message)| (format!("cors.{key}"), message));
        problems.chain(cors).collect()
    }
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            max_body: 64 << 20,
            max_total_body: 1 << 30,
            max_body_wait: Duration::from_secs(5),
            body_timeout: Duration::from_secs(30),
            trusted_proxies: Networks::default(),
            cors: cors::Settings::default(),
            extra_endpoints: Vec::new(),
        }
    }
}
