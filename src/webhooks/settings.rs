//! The `webhooks` section: who learns of the end of background responses and batches, and how hard it is tried.

use std::collections::BTreeMap;
use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::signature::SigningKey;
use super::target::Target;
use crate::http::client_address::Networks;
use crate::http::tls::ClientSettings;
use crate::ids::{NAME_RULE, is_name};
use crate::secret::Secret;
use crate::store::outbox::EventType;
use crate::units::DurationText;

/// Webhooks, which report the end of background responses (`background: true`) and of batches.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Settings {
    /// The endpoints. None: there are no webhooks.
    pub endpoints: Vec<EndpointSettings>,
    /// An event is dropped after this many failed attempts.
    #[schemars(range(min = 1, max = 1_000))]
    pub max_attempts: u32,
    /// An event that could not be delivered for this long is dropped.
    #[serde(with = "DurationText")]
    #[schemars(extend("min" = "1s", "max" = "30d"))]
    pub max_age: Duration,
    /// Events that wait for one endpoint. If there are more, the oldest are dropped.
    #[schemars(range(min = 1, max = 10_000_000))]
    pub max_waiting_events: u64,
    /// What an attempt may take. No keys.
    #[serde(skip)]
    pub advanced: Advanced,
}

/// One endpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct EndpointSettings {
    /// Its name in logs, metrics and the store: 1 to 64 of `A-Z`, `a-z`, `0-9`, `-`, `_` and `.`. Events that wait are
    /// those of the name, also after a change of the URL.
    pub name: String,
    /// The tenant of `tenants` whose responses and batches are reported; `"*"`: those of all tenants. Left out without
    /// `tenants`.
    pub tenant: String,
    /// Where events are posted, such as `https://example.com/hooks/responses`. Redirects are not followed.
    pub url: String,
    /// The events that are reported.
    pub events: Vec<EventType>,
    /// The secrets that events are signed with, at least one: text, `${NAME}` or `file:/path`. `whsec_` and the base64
    /// of 24 to 64 random bytes (`echo whsec_$(openssl rand -base64 32)`), or any text of at least 24 bytes. With
    /// several, every event has a signature of each, so that a receiver can change from one to the next.
    pub secrets: Vec<Secret>,
    /// Whether `url` may be `http`, so that anyone on the way can read events, which have no content but ids.
    pub allow_http: bool,
    /// Networks in which the endpoint may be although they are not public, such as `10.0.0.0/8`. Otherwise an address
    /// that is loopback, private, link-local, multicast or a cloud's metadata service is refused when it is connected
    /// to, whatever name led to it.
    pub allowed_networks: Networks,
    /// TLS of the connection to an `https` URL. Left out: with the CA certificates of the operating system.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tls: Option<ClientSettings>,
}

/// Intervals and bounds, the same for all endpoints.
#[derive(Clone, Debug, PartialEq)]
pub struct Advanced {
    /// An attempt that has no answer after this time has failed.
    pub attempt_timeout: Duration,
    /// An endpoint that accepts no connection within this time has failed the attempt.
    pub connect_timeout: Duration,
    /// Attempts at one endpoint at the same time, by each replica.
    pub max_concurrent_per_endpoint: u32,
    /// Attempts at all endpoints at the same time, by each replica.
    pub max_concurrent: u32,
    /// Of an answer's body no more is read than this. It is not looked at.
    pub max_answer: u64,
    /// Time between two looks into the store for events that other replicas have left. Events of what ends on
    /// this replica are sent at once.
    pub scan_interval: Duration,
    /// After this many failed attempts in a row a replica makes one attempt each `open_duration`, until one succeeds.
    pub failure_threshold: u32,
    /// Time between two attempts at an endpoint that fails.
    pub open_duration: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            endpoints: Vec::new(),
            // All that fit into 72 hours, with room for jitter.
            max_attempts: 40,
            // As at OpenAI: a receiver that fails on a Friday evening has its events on Monday.
            max_age: Duration::from_secs(72 * 3_600),
            // 200 bytes each in the store.
            max_waiting_events: 10_000,
            advanced: Advanced::default(),
        }
    }
}

impl Default for EndpointSettings {
    fn default() -> Self {
        Self {
            name: String::new(),
            tenant: String::new(),
            url: String::new(),
            events: EventType::ALL.to_vec(),
            secrets: Vec::new(),
            allow_http: false,
            allowed_networks: Networks::default(),
            tls: None,
        }
    }
}

impl Default for Advanced {
    fn default() -> Self {
        Self {
            // OpenAI's receivers are asked to answer within seconds; a function that starts cold takes ten.
            attempt_timeout: Duration::from_secs(15),
            // Another continent, with a lost packet.
            connect_timeout: Duration::from_secs(5),
            max_concurrent_per_endpoint: 4,
            // One connection and 20 KB each.
            max_concurrent: 64,
            max_answer: 4 << 10,
            // Only what a replica left behind waits for it.
            scan_interval: Duration::from_secs(10),
            failure_threshold: 5,
            open_duration: Duration::from_secs(30),
        }
    }
}

/// The tenants that `tenant` may name.
#[derive(Clone, Copy, Debug)]
pub struct KnownTenants<'a> {
    pub names: &'a [&'a str],
    /// Whether tokens may name others too.
    pub are_open: bool,
}

pub(super) const EVERY_TENANT: &str = "*";
/// Each has a task, a queue, and labels in metrics.
const MAX_ENDPOINTS: usize = 1_000;
const MAX_SECRETS: usize = 8;

impl Settings {
    /// What is wrong beyond types and bounds: paths below `webhooks`, each with a message without any secret.
    pub fn check(&self, tenants: KnownTenants<'_>) -> Vec<(String, String)> {
        let mut problems = Vec::new();
        if self.endpoints.len() > MAX_ENDPOINTS {
            let message = format!("lists more than {MAX_ENDPOINTS}");
            problems.push(("endpoints".to_owned(), message));
        }
        let mut names = BTreeMap::new();
        for (index, endpoint) in self.endpoints.iter().enumerate() {
            let below =
                |(key, message): (String, String)| (format!("endpoints[{index}].{key}"), message);
            problems.extend(endpoint.check(tenants).into_iter().map(below));
            if let Some(first) = names.insert(&endpoint.name, index)
                && !endpoint.name.is_empty()
            {
                let message = format!("`{}` is endpoints[{first}] already", endpoint.name);
                problems.push((format!("endpoints[{index}].name"), message));
            }
        }
        problems
    }
}

impl EndpointSettings {
    fn check(&self, tenants: KnownTenants<'_>) -> Vec<(String, String)> {
        let mut problems = Vec::new();
        let mut wrong = |key: &str, message: String| problems.push((key.to_owned(), message));
        let name = &self.name;
        if !is_name(name) {
            wrong("name", format!("`{name}` {NAME_RULE}"));
        }
        if let Some(message) = self.tenant_problem(tenants) {
            wrong("tenant", message);
        }
        match Target::of(&self.url) {
            Err(message) => wrong("url", message),
            Ok(target) if !target.is_https && !self.allow_http => wrong(
                "url",
                "is `http`, which anyone on the way can read: write an `https` URL, or set `allow_http: true`".to_owned(),
            ),
            Ok(target) if !target.is_https && self.tls.is_some() => {
                wrong("tls", "is for an `https` URL".to_owned());
            }
            Ok(_) => {}
        }
        if self.events.is_empty() {
            let message = "lists none, so that nothing is reported; leave it out for all";
            wrong("events", message.to_owned());
        }
        if self.secrets.is_empty() {
            let message = "has none: make one with `echo whsec_$(openssl rand -base64 32)`, and give it to the receiver";
            wrong("secrets", message.to_owned());
        }
        if self.secrets.len() > MAX_SECRETS {
            let message =
                format!("lists more than {MAX_SECRETS}; each is a signature of every event");
            wrong("secrets", message);
        }
        for (index, secret) in self.secrets.iter().enumerate() {
            if let Err(message) = SigningKey::of(secret) {
                wrong(&format!("secrets[{index}]"), message);
            }
        }
        problems
    }

    fn tenant_problem(&self, tenants: KnownTenants<'_>) -> Option<String> {
        let tenant = self.tenant.as_str();
        let has_tenants = !tenants.names.is_empty();
        let is_known = tenants.are_open || tenants.names.contains(&tenant);
        match tenant {
            "" if has_tenants => Some(
                "is missing: name the tenant of `tenants` whose responses and batches are reported, or write `\"*\"` for all".to_owned(),
            ),
            "" | EVERY_TENANT => None,
            _ if !has_tenants => Some(format!(
                "`{tenant}` is none of `tenants`, which lists none; leave it out"
            )),
            _ if !is_known => Some(format!("`{tenant}` is none of `tenants`")),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn endpoint() -> EndpointSettings {
        EndpointSettings {
            name: "billing".to_owned(),
            tenant: "team-a".to_owned(),
            url: "https://example.com/hook".to_owned(),
            secrets: vec![Secret::new("whsec_MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIz")],
            ..EndpointSettings::default()
        }
    }

    fn problems(endpoints: Vec<EndpointSettings>, names: &[&str]) -> Vec<String> {
        let settings = Settings {
            endpoints,
            ..Settings::default()
        };
        let tenants = KnownTenants {
            names,
            are_open: false,
        };
        let found = settings.check(tenants).into_iter();
        found
            .map(|(path, message)| format!("{path}: {message}"))
            .collect()
    }

    #[test]
    fn a_wrong_endpoint_is_refused_with_what_to_write() {
        assert_eq!(problems(vec![endpoint()], &["team-a"]), [""; 0]);
        let check = |change: fn(&mut EndpointSettings), expected: &str| {
            let mut changed = endpoint();
            change(&mut changed);
            let found = problems(vec![changed], &["team-a"]);
            assert!(
                found.len() == 1 && found[0].contains(expected),
                "{expected}: {found:?}"
            );
            assert!(!found[0].contains("sesame"), "{found:?}");
        };
        check(
            |endpoint| endpoint.name = "a b".to_owned(),
            "endpoints[0].name: `a b` must be",
        );
        check(
            |endpoint| endpoint.tenant = String::new(),
            ".tenant: is missing",
        );
        check(
            |endpoint| endpoint.tenant = "team-b".to_owned(),
            "is none of `tenants`",
        );
        check(
            |endpoint| endpoint.url = "http://example.com".to_owned(),
            "`allow_http: true`",
        );
        check(|endpoint| endpoint.url = String::new(), ".url: is missing");
        check(
            |endpoint| endpoint.events = Vec::new(),
            ".events: lists none",
        );
        check(|endpoint| endpoint.secrets = Vec::new(), "openssl rand");
        check(
            |endpoint| endpoint.secrets[0] = Secret::new("sesame"),
            ".secrets[0]: has 6 bytes",
        );
        check(
            |endpoint| endpoint.secrets[0] = Secret::new("whsec_sesame!"),
            ".secrets[0]: is no base64",
        );
        let twice = problems(vec![endpoint(), endpoint()], &["team-a"]);
        assert_eq!(
            twice,
            ["endpoints[1].name: `billing` is endpoints[0] already"]
        );
    }

    #[test]
    fn without_tenants_an_endpoint_names_none() {
        let mut open = endpoint();
        assert_eq!(problems(vec![open.clone()], &[]).len(), 1);
        open.tenant = String::new();
        assert_eq!(problems(vec![open.clone()], &[]), [""; 0]);
        open.tenant = "*".to_owned();
        assert_eq!(problems(vec![open], &["team-a"]), [""; 0]);
    }
}
