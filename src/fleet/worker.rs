//! A worker, as a discovery lists it and as the router uses it.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};
use std::time::{Duration, Instant};

use arc_swap::ArcSwapOption;
use hyper::header::HeaderValue;
use parking_lot::Mutex;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tokio::sync::Notify;

use super::adapter_slots::AdapterSlots;
use super::circuit_breaker;
use super::events::Events;
use super::freed::Freed;
use super::kv_transfer::{BootstrapInfo, ReturnedParams};
use super::load::pinned::PinnedLoads;
use super::load::{DEFAULT_SLOTS, Load};
use super::process_end::ProcessEnds;
use super::responses_api::ResponsesApi;
use super::router_key::RouterKey;
use super::speed::{LoadNow, Passed, Seen, SharedF32, SharedSpeed, Speed};
use crate::http::circuit_breaker::{self as breaker, SharedBreaker};
use crate::http::client;
use crate::http::tls::ClientSettings;
use crate::ids::WorkerId;
use crate::observe;
use crate::observe::metrics::words;

words! {
    /// Which part of a request a worker computes.
    #[derive(
        Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
    )]
    #[serde(rename_all = "snake_case")]
    pub enum Role: Display {
        /// Prompts only; a decode worker fetches the KV blocks.
        Prefill = "prefill",
        /// Generates from KV blocks of a prefill worker; takes whole requests too.
        Decode = "decode",
        /// Everything.
        #[default]
        Both = "both",
    }
}

/// A worker as a discovery lists it.
#[derive(Clone, Debug, PartialEq)]
pub struct Member {
    /// Unique in the fleet; the address if no name is configured.
    pub name: String,
    /// `host:port`, with a path such as `/engine-0` if its own paths are below it.
    pub address: String,
    pub role: Role,
    /// The worker finishes its requests and gets no new ones.
    pub draining: bool,
    /// Sent to the worker as `authorization`, if it requires a key.
    pub authorization: Option<HeaderValue>,
    /// TLS of the connections to it, if it is connected over TLS.
    pub tls: Option<ClientSettings>,
    pub events: Events,
    pub responses: ResponsesApi,
    /// Set by the operator, for example `zone: a`.
    pub labels: BTreeMap<String, Arc<str>>,
    /// `http://host:port` (or https) of its Mooncake bootstrap server, unless that is at the worker's own host and the
    /// fleet's default port.
    pub bootstrap: Option<Arc<str>>,
    /// Prompt tokens that it computes in a second, as configured.
    pub prefill_rate: Option<NonZeroU32>,
    /// Answers that it generates at the same time, as configured.
    pub slots: Option<NonZeroU32>,
    /// Who it is, if its discovery knows: the uid of a pod. Another one at the same address is another worker.
    pub identity: Option<Arc<str>>,
}

impl Member {
    /// True if another pod than this one had the address: then another process has it now.
    pub(super) fn is_other_pod(&self, before: Option<&Arc<str>>) -> bool {
        matches!((&self.identity, before), (Some(new), Some(old)) if new != old)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RateSource {
    Configured,
    Learnt,
}

/// One worker as it is listed now. Listed with another key or other labels it is another `Worker` with the same
/// `WorkerState`; a request keeps the one that it was sent with.
#[derive(Debug)]
pub struct Worker {
    pub id: WorkerId,
    pub name: Arc<str>,
    /// The name that clients may see: of one that is called by its address, nothing of that.
    pub client_name: Arc<str>,
    pub role: Role,
    pub authorization: Option<HeaderValue>,
    pub events: Events,
    pub responses: ResponsesApi,
    pub labels: BTreeMap<String, Arc<str>>,
    pub bootstrap: Option<Arc<str>>,
    configured_prefill_rate: Option<NonZeroU32>,
    configured_slots: Option<NonZeroU32>,
    pub pool: Arc<client::Pool>,
    /// What its answers showed of `authorization`.
    pub key: RouterKey,
    pub(super) state: Arc<WorkerState>,
}

/// What is known of a worker, for as long as its address is listed or requests run there.
#[derive(Debug)]
pub struct WorkerState {
    pub load: Load,
    /// The load of requests that are pinned to a dp rank.
    pub pinned: PinnedLoads,
    /// Dp ranks that publish KV events, as of the last snapshot; 0 if none does.
    event_ranks: AtomicU32,
    /// The engine refuses requests for the rank that they are pinned to. In the next snapshot it has no ranks to pin to.
    pub(super) refuses_ranks: AtomicBool,
    /// When its process ended, as requests saw it.
    pub ends: ProcessEnds,
    /// One for the whole fleet.
    pub(super) freed: Arc<Freed>,
    pub breaker: SharedBreaker,
    /// Open after several KV transfers from this prefill worker failed in a row. Its engine may be healthy; it
    /// only gets no prefill legs for a while.
    pub kv_transfer_breaker: SharedBreaker,
    /// Whether its prefill legs return the parameters of a KV transfer.
    pub returned_params: ReturnedParams,
    /// What its answers showed of its speed.
    pub(super) seen: Seen,
    /// What decisions would count with, were no prefill rate configured.
    pub learnt_speed: SharedSpeed,
    /// Seconds that its first tokens take beside its steps.
    pub overhead: SharedF32,
    /// Rows that its own speed was learnt from.
    speed_samples: AtomicU64,
    /// What another replica has learnt of its speed, and from how many rows, until the learner takes it.
    peer_speed: Mutex<Option<(Speed, u64)>>,
    /// The adapters that its engine has in its GPU.
    pub adapters: AdapterSlots,
    /// When it joined.
    since: Instant,
    /// When the newest request was sent that it has taken, in microseconds since it joined; 0 before the first.
    newest_taken_us: AtomicU64,
    /// What its answers reported of their prompts.
    pub usage: PromptUsage,
    /// Capacity of its prefix cache in tokens, of all dp ranks together; 0 if the engine does not report it.
    pub cache_tokens: AtomicU64,
    /// The engine refuses streamed chats for token ids, as SGLang does, which has those of completions.
    pub refuses_chat_token_ids: AtomicBool,
    /// The engine refuses streamed completions for token ids.
    pub refuses_completion_token_ids: AtomicBool,
    /// What its bootstrap server reported last. Cleared when the engine may have restarted.
    pub bootstrap_info: ArcSwapOption<BootstrapInfo>,
    /// Health checks that failed since it joined.
    pub health_failures: AtomicU64,
    /// Questions to its bootstrap server that failed since it joined.
    pub bootstrap_failures: AtomicU64,
    /// Why the last probe of its `/health` failed; none after one that succeeded.
    pub last_probe_error: ArcSwapOption<String>,
    /// Its health checks fail, or it sleeps.
    is_down: AtomicBool,
    /// Wakes the requests that wait for its answer when it is taken out, and its health checks.
    taken_out: Notify,
}

/// Prompt tokens of the answers of a worker, as its engine reported them.
#[derive(Debug, Default)]
pub struct PromptUsage {
    prompt_tokens: AtomicU64,
    cached_tokens: AtomicU64,
}

impl PromptUsage {
    pub fn add(&self, prompt_tokens: u64, cached_tokens: u64) {
        self.prompt_tokens.fetch_add(prompt_tokens, Relaxed);
        self.cached_tokens.fetch_add(cached_tokens, Relaxed);
    }

    pub fn prompt_tokens(&self) -> u64 {
        self.prompt_tokens.load(Relaxed)
    }

    /// The prompt tokens that were read from the prefix cache.
    pub fn cached_tokens(&self) -> u64 {
        self.cached_tokens.load(Relaxed)
    }
}

impl WorkerState {
    pub(super) fn new(breakers: &circuit_breaker::Settings, freed: Arc<Freed>) -> Arc<Self> {
        Arc::new(Self {
            load: Load::default(),
            pinned: PinnedLoads::default(),
            event_ranks: AtomicU32::new(0),
            refuses_ranks: AtomicBool::new(false),
            ends: ProcessEnds::default(),
            freed,
            breaker: breakers.build(),
            kv_transfer_breaker: breakers.build(),
            returned_params: ReturnedParams::default(),
            seen: Seen::default(),
            learnt_speed: SharedSpeed::default(),
            overhead: SharedF32::default(),
            speed_samples: AtomicU64::new(0),
            peer_speed: Mutex::default(),
            adapters: AdapterSlots::default(),
            since: observe::now(),
            newest_taken_us: AtomicU64::new(0),
            usage: PromptUsage::default(),
            cache_tokens: AtomicU64::new(0),
            refuses_chat_token_ids: AtomicBool::new(false),
            refuses_completion_token_ids: AtomicBool::new(false),
            bootstrap_info: ArcSwapOption::empty(),
            health_failures: AtomicU64::new(0),
            bootstrap_failures: AtomicU64::new(0),
            last_probe_error: ArcSwapOption::empty(),
            is_down: AtomicBool::new(false),
            taken_out: Notify::new(),
        })
    }

    pub(super) fn set_event_ranks(&self, ranks: usize) {
        let ranks = u32::try_from(ranks).unwrap_or(u32::MAX);
        self.event_ranks.store(ranks, Relaxed);
    }

    /// The dp ranks of its engine, as far as they publish KV events: 1 where nothing is known of them. Each computes prompts
    /// and generates answers as one engine without ranks does.
    #[inline]
    pub fn ranks(&self) -> u32 {
        self.event_ranks.load(Relaxed).max(1)
    }

    /// Capacity in tokens of the prefix cache of one dp rank, or of all together; 0 if the engine does not report it.
    pub fn cache_tokens_of(&self, rank: Option<u32>) -> u64 {
        let all = self.cache_tokens.load(Relaxed);
        match rank {
            None => all,
            Some(_) => all / u64::from(self.ranks()),
        }
    }

    /// Its slots while nothing is known of them.
    fn default_slots(&self) -> u32 {
        DEFAULT_SLOTS.saturating_mul(self.ranks())
    }

    pub(super) fn set_down(&self, is_down: bool) {
        self.is_down.store(is_down, Release);
        if is_down {
            self.taken_out.notify_waiters();
        }
    }

    pub fn on_breaker_open(&self) {
        self.taken_out.notify_waiters();
    }

    /// True if its health checks fail, or it sleeps.
    pub fn is_down(&self) -> bool {
        self.is_down.load(Acquire)
    }

    /// True if its health checks or its circuit breaker keep requests from it.
    fn is_out(&self) -> bool {
        self.is_down() || self.breaker.state() == breaker::State::Open
    }

    /// Resolves once its health checks or its circuit breaker keep requests from it.
    pub async fn taken_out(&self) {
        loop {
            // Before the look, so that no change in between is missed.
            let taken_out = self.taken_out.notified();
            if self.is_out() {
                return;
            }
            taken_out.await;
        }
    }

    /// Resolves once its circuit breaker waits for it to take connections again. While it is known to be down, the rounds
    /// of health checks are enough.
    pub(super) async fn awaits_connection(&self) {
        loop {
            // Before the look, so that no change in between is missed.
            let taken_out = self.taken_out.notified();
            if self.breaker.awaits_connection() && !self.is_down() {
                return;
            }
            taken_out.await;
        }
    }

    /// The engine may be another process now.
    pub(super) fn forget_engine(&self) {
        self.bootstrap_info.store(None);
        self.adapters.clear();
        self.load.forget_slots();
        self.returned_params.forget();
        let refusals = [
            &self.refuses_ranks,
            &self.refuses_chat_token_ids,
            &self.refuses_completion_token_ids,
        ];
        for refusal in refusals {
            refusal.store(false, Relaxed);
        }
    }
}

impl Deref for Worker {
    type Target = WorkerState;

    fn deref(&self) -> &WorkerState {
        &self.state
    }
}

fn client_name(id: WorkerId, member: &Member) -> Arc<str> {
    if member.name == member.address {
        format!("worker-{}", id.0).into()
    } else {
        member.name.as_str().into()
    }
}

impl Worker {
    /// The rank to pin a request to that was planned for it.
    pub fn pinned_to(&self, planned: Option<u32>) -> Option<u32> {
        planned.filter(|_| !self.refuses_ranks.load(Relaxed))
    }

    pub(super) fn new(
        id: WorkerId,
        member: &Member,
        pool: Arc<client::Pool>,
        state: Arc<WorkerState>,
    ) -> Arc<Self> {
        let worker = Self {
            id,
            name: member.name.as_str().into(),
            client_name: client_name(id, member),
            role: member.role,
            authorization: member.authorization.clone(),
            events: member.events.clone(),
            responses: member.responses,
            labels: member.labels.clone(),
            bootstrap: member.bootstrap.clone(),
            configured_prefill_rate: member.prefill_rate,
            configured_slots: member.slots,
            pool,
            // The key may be another one now. Refusals of the former one that are still on their way are noted in the
            // former `Worker`.
            key: RouterKey::default(),
            state,
        };
        worker.set_speed(&worker.learnt_speed.get(), worker.speed_samples());
        Arc::new(worker)
    }

    /// Prompt tokens that it computes in a second, if that is known.
    pub fn prefill_rate(&self) -> Option<(f64, RateSource)> {
        if let Some(rate) = self.configured_prefill_rate {
            return Some((rate.get().into(), RateSource::Configured));
        }
        (self.speed_samples() > 0).then(|| (self.load.speed.get().rate(), RateSource::Learnt))
    }

    /// Answers that it generates at the same time: as configured, as seen, or what most engines have at each rank.
    #[inline]
    pub fn slots(&self) -> u32 {
        self.known_slots().unwrap_or_else(|| self.default_slots())
    }

    /// Its slots, if they are configured or were seen.
    #[inline]
    pub fn known_slots(&self) -> Option<u32> {
        match self.configured_slots {
            Some(slots) => Some(slots.get()),
            None => self.load.learnt_slots(),
        }
    }

    /// Requests that may be sent to it before all of its slots are taken; `None` while an engine that would show it has let none
    /// wait. A few more than it was seen to have: its engine runs them if it can, and then it is seen to have more. One that
    /// never shows what it runs has as many as most have at each rank: else one client's flood would stand in it before
    /// everybody else.
    pub fn free_slots(&self) -> Option<u32> {
        let slots = match self.known_slots() {
            None if self.load.has_reported() => return None,
            slots => slots.unwrap_or_else(|| self.default_slots()),
        };
        Some(super::load::free_slots(slots, self.load.requests()))
    }

    /// From how many observations its own speed was learnt.
    pub fn speed_samples(&self) -> u64 {
        self.speed_samples.load(Relaxed)
    }

    /// Another replica has learnt it.
    pub fn on_peer_speed(&self, speed: &Speed, samples: u64, slots: u32) {
        *self.peer_speed.lock() = Some((*speed, samples));
        self.load.on_peer_slots(slots);
    }

    pub(super) fn take_peer_speed(&self) -> Option<(Speed, u64)> {
        self.peer_speed.lock().take()
    }

    /// As learnt; a configured prefill rate counts before.
    pub(super) fn set_speed(&self, learnt: &Speed, samples: u64) {
        let configured = self.configured_prefill_rate;
        let configured = configured.map(|rate| 1.0 / f64::from(rate.get()));
        self.learnt_speed.set(learnt);
        self.load.speed.set(&Speed {
            prompt_token: configured.unwrap_or(learnt.prompt_token),
            ..*learnt
        });
        self.speed_samples.store(samples, Relaxed);
    }

    /// A request is sent. Called when it counts already.
    pub(super) fn on_sent(&self, now: Instant, is_stream: bool) -> Passed {
        self.seen
            .on_sent(self.age(now), &self.load_now(), is_stream)
    }

    /// The point in time from which an answer shows how long tokens take.
    pub(super) fn passed(&self, now: Instant) -> Passed {
        self.seen.passed(self.age(now), &self.load_now())
    }

    /// The first token of a streamed answer came. Called while the prompt still counts as queued.
    pub(super) fn on_first_token(&self, now: Instant, sent: &Passed, uncached: u32) -> Passed {
        let load = self.load_now();
        self.seen
            .on_first_token(self.age(now), sent, uncached, &load)
    }

    /// An answer is complete. Called while the request still counts.
    pub(super) fn on_answered(&self, now: Instant, from: &Passed, tokens: u64, uncached: u32) {
        let load = self.load_now();
        self.seen
            .on_end(self.age(now), from, tokens, uncached, &load);
    }

    fn load_now(&self) -> LoadNow {
        self.load.now(self.slots())
    }

    /// Its answer to a request that was sent at `sent` has begun, and is no refusal.
    pub fn on_taken(&self, sent: Instant) {
        let sent = self.age_us(sent);
        self.newest_taken_us.fetch_max(sent, Relaxed);
    }

    /// True if it has taken a request that was sent after this time.
    pub fn has_taken_since(&self, sent: Instant) -> bool {
        self.newest_taken_us.load(Relaxed) > self.age_us(sent)
    }

    fn age_us(&self, now: Instant) -> u64 {
        u64::try_from(self.age(now).as_micros()).unwrap_or(u64::MAX)
    }

    /// The time since it joined.
    fn age(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.since)
    }

    pub fn host(&self) -> &str {
        let address = self.pool.authority();
        address.rsplit_once(':').map_or(address, |(host, _)| host)
    }

    /// `http://host:port` of its bootstrap server: as configured, else at its own host and `default_port`.
    pub fn bootstrap_url(&self, default_port: u16) -> String {
        match &self.bootstrap {
            Some(configured) => configured.to_string(),
            None => format!("http://{}:{default_port}", self.host()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::registry::tests::worker;

    #[test]
    fn a_dp_rank_has_its_part_of_the_cache() {
        let worker = worker("a");
        worker.cache_tokens.store(4_000, Relaxed);
        assert_eq!(worker.cache_tokens_of(Some(0)), 4_000);
        worker.set_event_ranks(4);
        assert_eq!(worker.cache_tokens_of(None), 4_000);
        assert_eq!(worker.cache_tokens_of(Some(3)), 1_000);
    }

    #[test]
    fn the_newest_request_that_it_has_taken_is_known_in_whatever_order_answers_begin() {
        let (worker, now) = (worker("a"), observe::now());
        let at = |ms| now + Duration::from_millis(ms);
        assert!(!worker.has_taken_since(now));
        worker.on_taken(at(2));
        worker.on_taken(at(1));
        assert!(worker.has_taken_since(at(1)));
        assert!(!worker.has_taken_since(at(2)));
        assert!(!worker.has_taken_since(at(3)));
    }
}
