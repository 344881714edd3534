//! The endpoints of one configuration, and what outlives it: how each of them does.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32};

use parking_lot::Mutex;
use sha2::{Digest, Sha256};
use tokio::sync::{Notify, Semaphore};

use super::metrics::Metrics;
use super::settings::{Advanced, EVERY_TENANT, EndpointSettings, Settings};
use super::signature::SigningKey;
use super::target::Target;
use crate::http::circuit_breaker::CircuitBreaker;
use crate::http::client_address::Networks;
use crate::http::tls;
use crate::ids::{self, Tenant};
use crate::store::outbox::{Bounds, EventType, Subscriber, Subscriptions};

/// An endpoint as one configuration has it.
#[derive(Debug)]
pub(super) struct Endpoint {
    pub(super) name: Arc<str>,
    /// As the configuration names it.
    pub(super) tenant: String,
    pub(super) target: Target,
    pub(super) tls: Option<Arc<tls::Client>>,
    pub(super) allowed_networks: Networks,
    pub(super) keys: Vec<SigningKey>,
    pub(super) events: Vec<EventType>,
    /// A fingerprint of the endpoint's URL: under another one the endpoint is no longer disabled.
    pub(super) fingerprint: Arc<str>,
    pub(super) state: Arc<EndpointState>,
}

/// What is known of an endpoint from its attempts.
#[derive(Debug)]
pub(super) struct EndpointState {
    /// An event was added, an attempt has ended, or an operator has enabled the endpoint.
    pub(super) wake: Arc<Notify>,
    /// Whether a reload brought this address, and no events were claimed for it yet.
    pub(super) is_new_address: AtomicBool,
    pub(super) in_flight: AtomicU32,
    pub(super) breaker: Mutex<CircuitBreaker>,
    pub(super) seen: Mutex<Seen>,
}

/// For operators.
#[derive(Clone, Debug, Default)]
pub(super) struct Seen {
    pub(super) is_disabled: bool,
    pub(super) waiting: u64,
    pub(super) oldest_age_s: u64,
    pub(super) delivered_at: Option<i64>,
    pub(super) failed_at: Option<i64>,
    pub(super) failure: String,
}

/// All endpoints of one configuration, with its limits.
#[derive(Debug)]
pub(super) struct Table {
    pub(super) endpoints: BTreeMap<Arc<str>, Arc<Endpoint>>,
    pub(super) settings: Settings,
    /// Bounds the attempts at all endpoints that run at the same time.
    pub(super) permits: Arc<Semaphore>,
}

impl Table {
    /// The endpoints of settings that were checked; an endpoint that the check would refuse is left out.
    pub(super) fn new(settings: &Settings, clients: &tls::Clients, before: Option<&Self>) -> Self {
        let endpoints = settings.endpoints.iter().filter_map(|listed| {
            let endpoint = Endpoint::new(listed, settings, clients, before)?;
            Some((endpoint.name.clone(), Arc::new(endpoint)))
        });
        let permits = match before {
            Some(before) => before.permits.clone(),
            None => Arc::new(Semaphore::new(settings.advanced.max_concurrent as usize)),
        };
        Self {
            endpoints: endpoints.collect(),
            permits,
            settings: settings.clone(),
        }
    }

    pub(super) fn subscriptions(&self, metrics: &Metrics) -> Subscriptions {
        let subscriber = |endpoint: &Arc<Endpoint>| Subscriber {
            name: endpoint.name.clone(),
            fingerprint: endpoint.fingerprint.clone(),
            tenant: match endpoint.tenant.as_str() {
                "" => Some(Tenant::default()),
                EVERY_TENANT => None,
                name => Some(Tenant::of(name)),
            },
            events: endpoint.events.clone(),
            added: endpoint.state.wake.clone(),
            counters: metrics.add_counters(&endpoint.name),
        };
        Subscriptions {
            subscribers: self.endpoints.values().map(subscriber).collect(),
            bounds: Bounds {
                max_events: self.settings.max_waiting_events,
                max_age: self.settings.max_age,
            },
        }
    }
}

impl Endpoint {
    fn new(
        listed: &EndpointSettings,
        settings: &Settings,
        clients: &tls::Clients,
        before: Option<&Table>,
    ) -> Option<Self> {
        let target = Target::of(&listed.url).ok()?;
        let keys: Result<_, _> = listed.secrets.iter().map(SigningKey::of).collect();
        let tls = listed.tls.clone().unwrap_or_default();
        let fingerprint = fingerprint(&listed.url);
        let known = before.and_then(|before| before.endpoints.get(&*listed.name));
        let known = known.filter(|known| *known.fingerprint == *fingerprint);
        let state = match known {
            Some(known) => known.state.clone(),
            None => Arc::new(EndpointState::new(&settings.advanced, before.is_some())),
        };
        Some(Self {
            name: listed.name.as_str().into(),
            tenant: listed.tenant.clone(),
            tls: target.is_https.then(|| clients.get(&tls)),
            target,
            allowed_networks: listed.allowed_networks.clone(),
            keys: keys.ok()?,
            events: listed.events.clone(),
            fingerprint: fingerprint.into(),
            state,
        })
    }
}

impl EndpointState {
    fn new(settings: &Advanced, is_new_address: bool) -> Self {
        Self {
            wake: Arc::default(),
            is_new_address: AtomicBool::new(is_new_address),
            in_flight: AtomicU32::new(0),
            breaker: Mutex::new(CircuitBreaker::new(
                settings.failure_threshold,
                settings.open_duration,
            )),
            seen: Mutex::default(),
        }
    }
}

/// Distinguishes URLs without showing them.
fn fingerprint(url: &str) -> String {
    String::from_iter(ids::hex::<16>(&Sha256::digest(url)).map(char::from))
}
