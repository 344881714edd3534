//! The tasks that deliver events: one for each endpoint, which claims what is due, and one for each attempt.

use std::collections::BTreeSet;
use std::future::pending;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use tokio::sync::{OwnedSemaphorePermit, watch};
use tokio::time::{sleep, timeout};
use tracing::{debug, info, warn};

use super::attempt::Attempt;
use super::client::{self, Message};
use super::endpoint::{Endpoint, Table};
use super::event;
use super::metrics::Metrics;
use super::report::EndpointReport;
use super::retry::{self, Next, Reason};
use super::settings::Settings;
use super::signature;
use crate::http::circuit_breaker::State;
use crate::http::drain::Tasks;
use crate::http::keyed_tasks::KeyedTasks;
use crate::http::tls;
use crate::observe;
use crate::observe::metrics::Registry;
use crate::store::outbox::{Claim, Claimed, ClaimedEvent, Outbox, Settlement};

/// After an attempt, for its settlement in the store.
const LEASE_SPARE: Duration = Duration::from_secs(15);
/// After the store could not be asked.
const STORE_PAUSE: Duration = Duration::from_secs(1);
const SETTLE_TRIES: u32 = 5;

/// Delivers the events of the store's outbox to the endpoints of the latest configuration.
#[derive(Debug)]
pub struct Webhooks {
    outbox: Arc<dyn Outbox>,
    clients: Arc<tls::Clients>,
    table: watch::Sender<Arc<Table>>,
    metrics: Metrics,
    tasks: Tasks,
}

impl Webhooks {
    /// From now on ends are events. [`Webhooks::run`] delivers them.
    pub fn new(
        settings: &Settings,
        outbox: Arc<dyn Outbox>,
        clients: Arc<tls::Clients>,
        tasks: Tasks,
        registry: &Registry,
    ) -> Arc<Self> {
        let metrics = Metrics::new(registry);
        let table = Table::new(settings, &clients, None);
        outbox.subscribe(Arc::new(table.subscriptions(&metrics)));
        Arc::new(Self {
            outbox,
            clients,
            table: watch::Sender::new(Arc::new(table)),
            metrics,
            tasks,
        })
    }

    /// Uses the endpoints of another configuration. Attempts that run go on.
    pub fn replace(&self, settings: &Settings) {
        let before = self.table();
        if before.settings == *settings {
            return;
        }
        let table = Arc::new(Table::new(settings, &self.clients, Some(&before)));
        self.outbox
            .subscribe(Arc::new(table.subscriptions(&self.metrics)));
        for name in before.endpoints.keys() {
            if !table.endpoints.contains_key(name) {
                self.metrics.forget(name);
            }
        }
        self.table.send_replace(table.clone());
        // The task of an endpoint that has moved waits for an event of the former address. It claims for the new one at
        // once, so that the store knows which is newer.
        for (name, former) in &before.endpoints {
            let current = table.endpoints.get(name);
            if current.is_some_and(|current| !Arc::ptr_eq(&current.state, &former.state)) {
                former.state.wake.notify_one();
            }
        }
    }

    pub fn report(&self) -> Vec<EndpointReport> {
        let table = self.table();
        let endpoints = table.endpoints.values();
        endpoints
            .map(|endpoint| EndpointReport::new(endpoint))
            .collect()
    }

    /// Lets a disabled endpoint have events again. `None` if there is no such endpoint; false if it was not disabled.
    pub async fn enable(&self, name: &str) -> Option<Result<bool, String>> {
        let endpoint = self.table().endpoints.get(name).cloned()?;
        let enabled = self.outbox.enable(name).await;
        endpoint.state.wake.notify_one();
        Some(enabled.map_err(|error| error.to_string()))
    }

    /// Delivers events until the drain begins, which attempts that run then end with.
    pub async fn run(self: Arc<Self>) {
        let mut table = self.table.subscribe();
        let mut running = KeyedTasks::new("webhook_endpoint", self.tasks.clone());
        loop {
            let names: BTreeSet<Arc<str>> = table
                .borrow_and_update()
                .endpoints
                .keys()
                .cloned()
                .collect();
            running.set_keys(&names, |name| self.clone().deliver_to(name.clone()));
            tokio::select! {
                changed = table.changed() => {
                    if changed.is_err() {
                        return;
                    }
                }
                () = running.restart_due() => {}
            }
        }
    }

    fn table(&self) -> Arc<Table> {
        self.table.borrow().clone()
    }

    async fn deliver_to(self: Arc<Self>, name: Arc<str>) {
        loop {
            let table = self.table();
            let Some(endpoint) = table.endpoints.get(&name).cloned() else {
                // This task is about to end.
                return pending().await;
            };
            let pause = self.look(&table, &endpoint).await;
            // Added meanwhile, or room for more: at once.
            let _ = timeout(pause, endpoint.state.wake.notified()).await;
        }
    }

    /// Claims what is due, and starts its attempts. Returns when to look again.
    async fn look(self: &Arc<Self>, table: &Arc<Table>, endpoint: &Arc<Endpoint>) -> Duration {
        let scan = table.settings.advanced.scan_interval;
        let scan = scan.mul_f64(0.8 + 0.4 * fastrand::f64());
        let in_flight = endpoint.state.in_flight.load(Relaxed);
        let max = table.settings.advanced.max_concurrent_per_endpoint;
        let mut room = max.saturating_sub(in_flight) as usize;
        let breaker = {
            let breaker = endpoint.state.breaker.lock();
            (breaker.state(), breaker.wait(observe::now()))
        };
        match breaker {
            (_, Some(wait)) => return wait.min(scan),
            (State::Closed, None) => {}
            // One trial.
            (State::Open | State::HalfOpen, None) => room = room.min(1),
        }
        if room == 0 {
            return scan;
        }
        let Ok(permit) = table.permits.clone().acquire_owned().await else {
            return scan;
        };
        if !Arc::ptr_eq(table, &self.table()) {
            // It was replaced while this waited: a former address would get, and could confirm, what is for the new one.
            return Duration::ZERO;
        }
        let mut permits = vec![permit];
        while permits.len() < room
            && let Ok(permit) = table.permits.clone().try_acquire_owned()
        {
            permits.push(permit);
        }
        let claim = Claim {
            max: permits.len(),
            lease: table.settings.advanced.attempt_timeout + LEASE_SPARE,
            fingerprint: endpoint.fingerprint.to_string(),
            is_new_address: endpoint.state.is_new_address.load(Relaxed),
        };
        let claimed = match self.outbox.claim(&endpoint.name, claim).await {
            Ok(claimed) => claimed,
            Err(error) => {
                debug!(endpoint = %endpoint.name, %error, "webhook events not claimed");
                return error.retry_after().unwrap_or(scan).max(STORE_PAUSE);
            }
        };
        endpoint.state.is_new_address.store(false, Relaxed);
        self.on_claimed(endpoint, &claimed);
        let is_more = claimed.events.len() == permits.len();
        for (event, permit) in claimed.events.into_iter().zip(permits) {
            endpoint.state.breaker.lock().admit(observe::now());
            endpoint.state.in_flight.fetch_add(1, Relaxed);
            let attempt = self
                .clone()
                .attempt(table.clone(), endpoint.clone(), event, permit);
            // A drain waits for it.
            self.tasks.spawn(attempt);
        }
        if is_more {
            Duration::ZERO
        } else {
            claimed.next_due.map_or(scan, |due| due.min(scan))
        }
    }

    fn on_claimed(&self, endpoint: &Endpoint, claimed: &Claimed) {
        let name = &*endpoint.name;
        let oldest = claimed.oldest.unwrap_or_default();
        let was_disabled = {
            let mut seen = endpoint.state.seen.lock();
            seen.waiting = claimed.waiting;
            seen.oldest_age_s = oldest.as_secs();
            std::mem::replace(&mut seen.is_disabled, claimed.is_disabled)
        };
        if was_disabled && !claimed.is_disabled {
            info!(endpoint = name, "webhook endpoint is enabled again");
        }
        let of = [name];
        self.metrics
            .waiting
            .with_label_values(&of)
            .set(claimed.waiting as i64);
        self.metrics
            .oldest_age
            .with_label_values(&of)
            .set(oldest.as_secs_f64());
        self.set_state(endpoint);
        if claimed.expired > 0 {
            self.count_events(name, "dropped_age", claimed.expired);
            warn!(
                endpoint = name,
                events = claimed.expired,
                "webhook events dropped: they could not be delivered within `webhooks.max_age`"
            );
        }
        if claimed.dropped_disabled > 0 {
            self.count_events(name, "dropped_disabled", claimed.dropped_disabled);
            warn!(
                endpoint = name,
                events = claimed.dropped_disabled,
                "webhook events dropped: the endpoint is disabled, because it answered 410"
            );
        }
    }

    fn set_state(&self, endpoint: &Endpoint) {
        let is_disabled = endpoint.state.seen.lock().is_disabled;
        let is_closed = endpoint.state.breaker.lock().state() == State::Closed;
        let state = match (is_disabled, is_closed) {
            (true, _) => 2,
            (false, false) => 1,
            (false, true) => 0,
        };
        self.metrics
            .state
            .with_label_values(&[&endpoint.name])
            .set(state);
    }

    fn count_events(&self, endpoint: &str, outcome: &str, events: u64) {
        let counter = self.metrics.events.with_label_values(&[endpoint, outcome]);
        counter.inc_by(events);
    }

    async fn attempt(
        self: Arc<Self>,
        table: Arc<Table>,
        endpoint: Arc<Endpoint>,
        claimed: ClaimedEvent,
        permit: OwnedSemaphorePermit,
    ) {
        let _in_flight = InFlight(endpoint.clone());
        let started = observe::now();
        let result = self.send(&table, &endpoint, &claimed).await;
        let took = observe::now().saturating_duration_since(started);
        drop(permit);
        let name = &*endpoint.name;
        self.metrics
            .attempts
            .with_label_values(&[name, result.outcome()])
            .inc();
        self.metrics
            .attempt_seconds
            .with_label_values(&[name])
            .observe(took.as_secs_f64());
        let age = claimed.age + took;
        let settings = &table.settings;
        let next = retry::next(&result, claimed.attempt, age, settings, fastrand::f64());
        self.on_result(&endpoint, &result, observe::now());
        let (ended, attempt) = (claimed.event.key, claimed.attempt);
        let settle = |retry_in| self.settle(name, &claimed, retry_in);
        match next {
            Next::Delivered => {
                debug!(%ended, endpoint = name, attempt, "webhook event delivered");
                self.count_events(name, "delivered", 1);
                self.metrics
                    .delay_seconds
                    .with_label_values(&[name])
                    .observe(age.as_secs_f64());
                settle(None).await;
            }
            Next::RetryIn(pause) => {
                debug!(%ended, endpoint = name, attempt, reason = %result, ?pause, "webhook event not delivered; trying again");
                settle(Some(pause)).await;
            }
            Next::Drop(reason) => {
                let (outcome, setting) = match reason {
                    Reason::Attempts => ("dropped_attempts", "webhooks.max_attempts"),
                    Reason::Age => ("dropped_age", "webhooks.max_age"),
                };
                warn!(%ended, endpoint = name, attempt, reason = %result, "webhook event dropped: `{setting}` is reached");
                self.count_events(name, outcome, 1);
                settle(None).await;
            }
            Next::DisableEndpoint => self.disable(&endpoint, &claimed).await,
        }
    }

    async fn send(&self, table: &Table, endpoint: &Endpoint, claimed: &ClaimedEvent) -> Attempt {
        let event = &claimed.event;
        let (id, timestamp) = (event::id(event), observe::unix_s());
        let body = event::body(event, &id);
        let signatures = signature::signatures(&endpoint.keys, &id, timestamp, body.as_bytes());
        let message = Message {
            id: &id,
            timestamp,
            signatures: &signatures,
            body,
        };
        client::post(endpoint, message, &table.settings.advanced).await
    }

    fn on_result(&self, endpoint: &Endpoint, result: &Attempt, now: Instant) {
        let name = &*endpoint.name;
        if result.is_gone() {
            // It answers, and has taken nothing.
            endpoint.state.breaker.lock().on_success(true);
        } else if result.is_delivered() {
            endpoint.state.seen.lock().delivered_at = Some(observe::unix_s());
            // Any delivery shows that it takes events, also one that began before the trial.
            if endpoint.state.breaker.lock().on_success(true) {
                info!(endpoint = name, "webhook endpoint takes events again");
            }
        } else {
            {
                let mut seen = endpoint.state.seen.lock();
                seen.failed_at = Some(observe::unix_s());
                seen.failure = result.to_string();
            }
            if endpoint.state.breaker.lock().on_failure(now) {
                warn!(endpoint = name, reason = %result, "webhook endpoint fails; trying it now and then until it takes an event");
            }
        }
        self.set_state(endpoint);
    }

    /// If the store cannot be asked, the claim ends with its lease, and the event is delivered once more.
    async fn settle(&self, endpoint: &str, claimed: &ClaimedEvent, retry_in: Option<Duration>) {
        let settlement = Settlement {
            key: claimed.event.key,
            attempt: claimed.attempt,
            retry_in,
        };
        for number in 1..=SETTLE_TRIES {
            match self.outbox.settle(endpoint, settlement).await {
                Ok(_) => return,
                Err(error) => {
                    debug!(endpoint, %error, number, "webhook event not settled");
                    sleep(STORE_PAUSE / 4 * number).await;
                }
            }
        }
        let ended = claimed.event.key;
        warn!(%ended, endpoint, "webhook event not settled in the store; it will be delivered again");
    }

    /// The endpoint has answered that it is gone.
    async fn disable(&self, endpoint: &Endpoint, claimed: &ClaimedEvent) {
        let name = &*endpoint.name;
        let current = self.table().endpoints.get(&endpoint.name).cloned();
        let is_other = |current: &Endpoint| current.fingerprint != endpoint.fingerprint;
        if current.as_deref().is_none_or(is_other) {
            debug!(
                endpoint = name,
                is_listed = current.is_some(),
                "webhook endpoint answered 410, and its `url` has changed or it was removed; its event waits for it"
            );
            self.settle(name, claimed, Some(Duration::ZERO)).await;
            if let Some(current) = current {
                current.state.wake.notify_one();
            }
            return;
        }
        match self.outbox.disable(name, &endpoint.fingerprint).await {
            Ok(dropped) => {
                endpoint.state.seen.lock().is_disabled = true;
                self.count_events(name, "dropped_disabled", dropped);
                self.set_state(endpoint);
                warn!(
                    endpoint = name,
                    dropped,
                    "webhook endpoint answered 410 and is disabled; it takes events again with another `url`, or after \
                     POST /webhooks/enable?endpoint={name}"
                );
                // Where it was dropped, this changes nothing. Else other replicas have another `url` for it.
                self.settle(name, claimed, Some(Duration::ZERO)).await;
            }
            Err(error) => {
                debug!(endpoint = name, %error, "webhook endpoint not disabled");
                self.settle(name, claimed, Some(LEASE_SPARE)).await;
            }
        }
    }
}

/// Counts an attempt for as long as it lives.
struct InFlight(Arc<Endpoint>);

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.state.in_flight.fetch_sub(1, Relaxed);
        self.0.state.wake.notify_one();
    }
}

#[cfg(test)]
mod tests;
