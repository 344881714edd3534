//! The endpoints as operators see them.

use std::sync::atomic::Ordering::Relaxed;

use serde::Serialize;

use super::endpoint::Endpoint;
use crate::store::outbox::EventType;

const OK: &str = "ok";

/// One endpoint, as this replica sees it.
#[derive(Clone, Debug, Serialize)]
pub struct EndpointReport {
    pub name: String,
    /// `*` for all tenants; empty without tenants.
    tenant: String,
    /// Host and port; the path of a URL may be a secret.
    host: String,
    events: Vec<&'static str>,
    /// `ok`, `failing`, or `disabled` after the answer 410.
    state: &'static str,
    in_flight: u32,
    /// Events in the outbox, at the last look.
    waiting_events: u64,
    oldest_event_age_s: u64,
    /// Unix seconds of the last delivery by this replica.
    delivered_at: Option<i64>,
    failed_at: Option<i64>,
    /// Why the last failed attempt of this replica failed.
    last_failure: String,
}

impl EndpointReport {
    /// Whether it takes events.
    pub fn is_ok(&self) -> bool {
        self.state == OK
    }

    pub(super) fn new(endpoint: &Endpoint) -> Self {
        let seen = endpoint.state.seen.lock().clone();
        let breaker = endpoint.state.breaker.lock().state();
        Self {
            name: endpoint.name.to_string(),
            tenant: endpoint.tenant.clone(),
            host: endpoint.target.authority.clone(),
            events: endpoint
                .events
                .iter()
                .copied()
                .map(EventType::as_str)
                .collect(),
            state: match (seen.is_disabled, breaker.number()) {
                (true, _) => "disabled",
                (false, 0) => OK,
                (false, _) => "failing",
            },
            in_flight: endpoint.state.in_flight.load(Relaxed),
            waiting_events: seen.waiting,
            oldest_event_age_s: seen.oldest_age_s,
            delivered_at: seen.delivered_at,
            failed_at: seen.failed_at,
            last_failure: seen.failure,
        }
    }
}
