//! One model's settings and metric series, resolved once and shared by its requests.

mod forgetting;

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use hyper::HeaderMap;
use parking_lot::Mutex;
use prometheus::{Histogram, IntCounter, IntCounterVec, IntGauge};
use rustc_hash::{FxHashMap, FxHashSet};
use tracing::{info, warn};

use super::account::hindsight::{Choices, Hindsight};
use super::account::metrics::{Families, NONE};
use super::account::usage::CountersByTenant;
use super::account::worker_series::SeriesByWorker;
use super::continuation;
use super::failure::evidence::{NEXT_TRIAL_PAUSE, SharedEvidence};
use super::failure::failure_owner::FailureOwner;
use super::failure::open_share;
use super::failure::types::Outcome;
use super::prefill_decode;
use super::request::session_key::{KeySource, session_key};
use super::request::target::NameSettings;
use crate::fleet::registry::Registry;
use crate::fleet::speed::AnswerTokens;
use crate::fleet::{Role, Worker};
use crate::http::circuit_breaker::State;
use crate::ids::{ClientKey, Model};
use crate::observe;
use crate::observe::metrics;
use crate::prompt::PeekedBody;
use crate::routing::{self, Decision, PrefixCounts, Reason};

/// A model that no worker serves and that the configuration does not name is forgotten when no request has asked for it
/// for this long. The new pod of a model's only worker is there in minutes and finds what was learnt of the model, and
/// whoever looks at the last hour sees its last requests. Adapters that are replaced each day do not add up.
const REMEMBERED_FOR: Duration = Duration::from_secs(60 * 60);

/// Settings by model name, and the common ones of all other models.
#[derive(Clone, Debug)]
pub struct ModelSettings {
    pub common: PerModel,
    pub named: FxHashMap<String, PerModel>,
    /// Aliases, weighted targets and fallbacks.
    pub names: Vec<NameSettings>,
}

#[derive(Clone, Debug)]
pub struct PerModel {
    pub routing: routing::Settings,
    pub bytes_per_token: f64,
    /// Sends engines the token ids that a chat or Responses request was routed by.
    pub send_tokens: bool,
    /// `None`: a stream whose worker is lost ends with an error.
    pub stream_continuation: Option<continuation::Settings>,
}

impl ModelSettings {
    /// The models that the configuration names, also as the target or fallback of another name.
    pub(super) fn models(&self) -> FxHashSet<Model> {
        let redirected = self.names.iter().filter(|name| !name.targets.is_empty());
        let redirected: FxHashSet<&str> = redirected.map(|name| name.name.as_str()).collect();
        let own = self.named.keys().map(String::as_str);
        let own = own.filter(|name| !redirected.contains(name));
        let targets = self.names.iter().flat_map(|name| {
            let targets = name.targets.iter().map(|target| target.model.as_str());
            targets.chain(name.fallback.iter().map(String::as_str))
        });
        own.chain(targets).map(Model::from).collect()
    }
}

/// The models that requests have asked for, with the settings of one configuration.
#[derive(Debug)]
pub(super) struct Models {
    pub(super) settings: ModelSettings,
    states: Arc<States>,
    /// Decode workers compute prompts where no prefill worker does.
    computes_locally: bool,
    pub(super) shared: Arc<Shared>,
}

/// The states of one configuration.
type States = ArcSwap<FxHashMap<Model, Arc<ModelState>>>;

/// What outlives a configuration.
#[derive(Debug)]
pub(super) struct Shared {
    families: Arc<Families>,
    evidence: Arc<SharedEvidence>,
    transfer_evidence: Arc<SharedEvidence>,
    fleet: Arc<Registry>,
    disaggregation: Option<prefill_decode::Families>,
    pub(super) hindsight: Arc<Hindsight>,
    by_model: Mutex<FxHashMap<Model, RememberedModel>>,
    /// The states of each configuration that requests still run with.
    generations: Mutex<Vec<Weak<States>>>,
}

/// A model that requests have asked for.
#[derive(Debug)]
struct RememberedModel {
    counts: Arc<Counts>,
    /// How many tickets its requests had taken when that was last looked at.
    tickets: u64,
    /// When it was last known to be needed.
    needed_at: Instant,
}

impl RememberedModel {
    fn new(now: Instant, counts: Counts) -> Self {
        Self {
            counts: Arc::new(counts),
            tickets: 0,
            needed_at: now,
        }
    }

    /// Whether it is needed, or was lately. `is_known`: a worker serves it, or the configuration names it.
    fn is_needed(&mut self, now: Instant, is_known: bool) -> bool {
        let tickets = self.counts.tickets.load(Relaxed);
        if is_known || tickets != self.tickets {
            self.tickets = tickets;
            self.needed_at = now;
        }
        now.saturating_duration_since(self.needed_at) < REMEMBERED_FOR
    }
}

/// One model's counts, whatever the configuration.
#[derive(Debug)]
pub(super) struct Counts {
    tickets: AtomicU64,
    pub(super) series: SeriesByWorker,
    /// What its tenants use.
    pub(super) usage: CountersByTenant,
    /// How long its answers usually are.
    pub(super) answers: AnswerTokens,
    /// How many of them share a prefix that a worker has.
    pub(super) shared_prefixes: PrefixCounts,
    /// Where its requests were sent.
    pub(super) choices: Arc<Choices>,
}

/// One model's state, shared by its requests that started with the same configuration.
#[derive(Debug)]
pub(super) struct ModelState {
    pub(super) routing: routing::Settings,
    pub(super) bytes_per_token: f64,
    pub(super) send_tokens: bool,
    pub(super) stream_continuation: Option<continuation::Settings>,
    pub(super) name: Model,
    key_sources: Vec<KeySource>,
    pub(super) counts: Arc<Counts>,
    decisions: [IntCounter; Reason::ALL.len()],
    routed_prompt_tokens: IntCounter,
    expected_cached_tokens: IntCounter,
    random_worker_prompt_tokens: IntCounter,
    random_worker_cached_tokens: IntCounter,
    /// How long tokens took, divided by what was expected.
    pub(super) first_token_ratio: Histogram,
    pub(super) end_ratio: Histogram,
    pub(super) in_flight: IntGauge,
    pub(super) prompt_tokens: IntCounter,
    pub(super) cached_tokens: IntCounter,
    pub(super) generation_tokens: IntCounter,
    pub(super) families: Arc<Families>,
    /// The evidence about the workers of all models.
    evidence: Arc<SharedEvidence>,
    /// The evidence about KV transfers from their prefill workers.
    transfer_evidence: Arc<SharedEvidence>,
    fleet: Arc<Registry>,
    /// Decode workers compute prompts where no prefill worker does.
    computes_locally: bool,
    /// `None` if requests are not disaggregated.
    pub(super) disaggregated: Option<prefill_decode::ModelMetrics>,
}

impl Models {
    pub(super) fn new(
        settings: ModelSettings,
        fleet: Arc<Registry>,
        disaggregation: Option<prefill_decode::Families>,
        computes_locally: bool,
        registry: &metrics::Registry,
    ) -> Self {
        let shared = Arc::new(Shared {
            families: Arc::new(Families::new(registry)),
            evidence: Arc::default(),
            transfer_evidence: Arc::default(),
            hindsight: Arc::new(Hindsight::new(fleet.clone(), registry)),
            fleet,
            disaggregation,
            by_model: Mutex::default(),
            generations: Mutex::default(),
        });
        Self {
            settings,
            states: shared.new_states(),
            computes_locally,
            shared,
        }
    }

    /// The models of the next configuration: its settings, and what outlives a configuration.
    pub(super) fn successor(&self, settings: ModelSettings, computes_locally: bool) -> Self {
        Self {
            settings,
            states: self.shared.new_states(),
            computes_locally,
            shared: self.shared.clone(),
        }
    }

    pub(super) fn of(&self, name: &Model) -> Arc<ModelState> {
        if let Some(state) = self.states.load().get(name) {
            return state.clone();
        }
        let state = Arc::new(self.build(name));
        // Two first requests may build two states, with the same counts. The later one stays.
        self.states.rcu(|states| {
            let mut states = FxHashMap::clone(states);
            states.insert(name.clone(), state.clone());
            states
        });
        state
    }

    /// Counts a request that ended before its model was known to have a worker.
    pub(super) fn count_unsent(&self, api: &str, outcome: Outcome) {
        self.shared.families.count_unanswered(NONE, api, outcome);
    }

    fn build(&self, name: &Model) -> ModelState {
        let named = self.settings.named.get(name.as_ref());
        let settings = named.unwrap_or(&self.settings.common).clone();
        let families = self.shared.families.clone();
        let of_model = |counters: &IntCounterVec| counters.with_label_values(&[&**name]);
        let new = || {
            let now = observe::now();
            let counts = Counts {
                tickets: AtomicU64::new(0),
                series: SeriesByWorker::new(families.clone(), name.clone()),
                usage: CountersByTenant::default(),
                answers: AnswerTokens::default(),
                shared_prefixes: PrefixCounts::new(now),
                choices: self.shared.hindsight.of(name),
            };
            RememberedModel::new(now, counts)
        };
        let mut by_model = self.shared.by_model.lock();
        let remembered = by_model.entry(name.clone()).or_insert_with(new);
        let counts = remembered.counts.clone();
        drop(by_model);
        let keys = settings.routing.hash_on.iter();
        let disaggregation = self.shared.disaggregation.as_ref();
        ModelState {
            name: name.clone(),
            key_sources: keys.filter_map(|key| key.parse().ok()).collect(),
            counts,
            decisions: Reason::ALL.map(|reason| {
                let labels = [
                    name.as_ref(),
                    settings.routing.policy.as_str(),
                    reason.as_str(),
                ];
                families.decisions.with_label_values(&labels)
            }),
            routed_prompt_tokens: of_model(&families.routed_prompt_tokens),
            expected_cached_tokens: of_model(&families.expected_cached_tokens),
            random_worker_prompt_tokens: of_model(&families.random_worker_prompt_tokens),
            random_worker_cached_tokens: of_model(&families.random_worker_cached_tokens),
            first_token_ratio: families.expected_ratio(name, "first_token"),
            end_ratio: families.expected_ratio(name, "end"),
            in_flight: families.in_flight.with_label_values(&[&**name]),
            prompt_tokens: of_model(&families.prompt_tokens),
            cached_tokens: of_model(&families.cached_tokens),
            generation_tokens: of_model(&families.generation_tokens),
            routing: settings.routing,
            bytes_per_token: settings.bytes_per_token,
            send_tokens: settings.send_tokens,
            stream_continuation: settings.stream_continuation,
            disaggregated: disaggregation
                .map(|families| prefill_decode::ModelMetrics::new(families, name)),
            families,
            evidence: self.shared.evidence.clone(),
            transfer_evidence: self.shared.transfer_evidence.clone(),
            fleet: self.shared.fleet.clone(),
            computes_locally: self.computes_locally,
        }
    }
}

impl Shared {
    /// A worker has taken a new connection and answered a health check that began at `asked_at`.
    pub(super) fn on_connected(&self, worker: &Worker, asked_at: Instant) {
        if worker.breaker.on_health_check(asked_at) {
            info!(
                worker = %worker.name,
                "circuit breaker closed; the worker takes connections again, and requests"
            );
            self.families.on_breaker_transition(worker, State::Closed);
        }
    }

    fn new_states(&self) -> Arc<States> {
        let states = Arc::<States>::default();
        let mut generations = self.generations.lock();
        generations.retain(|states| states.strong_count() > 0);
        generations.push(Arc::downgrade(&states));
        states
    }
}

impl ModelState {
    pub(super) fn take_ticket(&self) -> u64 {
        self.counts.tickets.fetch_add(1, Relaxed)
    }

    /// The number that the next request will get.
    pub(super) fn next_ticket(&self) -> u64 {
        self.counts.tickets.load(Relaxed)
    }

    /// The hash of the request's first affinity key, by the order of `hash_on`.
    pub(super) fn affinity(&self, headers: &HeaderMap, peek: &PeekedBody<'_>) -> Option<u64> {
        if self.routing.policy != routing::Policy::ConsistentHash {
            return None;
        }
        session_key(&self.key_sources, headers, peek)
    }

    pub(super) fn on_decision(&self, prompt_tokens: u32, decision: &Decision) {
        self.decisions[decision.reason as usize].inc();
        self.routed_prompt_tokens.inc_by(u64::from(prompt_tokens));
        self.expected_cached_tokens
            .inc_by(u64::from(decision.cached_tokens));
    }

    /// Counts what a worker that was drawn at random would have had of a prompt.
    pub(super) fn on_random_worker(&self, prompt_tokens: u32, cached_tokens: u32) {
        self.random_worker_prompt_tokens
            .inc_by(u64::from(prompt_tokens));
        self.random_worker_cached_tokens
            .inc_by(u64::from(cached_tokens.min(prompt_tokens)));
    }

    /// Reports a worker's answer to its circuit breaker, to a request that was sent at `sent`. `is_trial`: the request
    /// is the breaker's trial.
    pub(super) fn report_success(
        &self,
        worker: &Worker,
        client: ClientKey,
        is_trial: bool,
        sent: Instant,
    ) {
        let now = observe::now();
        self.evidence.on_success(now, worker.id, client, sent);
        if worker.breaker.on_success(now, is_trial) {
            worker.refuses_key.store(false, Relaxed);
            info!(worker = %worker.name, "circuit breaker closed; the worker takes requests again");
            self.families.on_breaker_transition(worker, State::Closed);
        }
    }

    /// Counts a failure at a worker, and reports it to the worker's circuit breaker if the worker is to blame.
    /// `is_trial`: the request is the breaker's trial.
    pub(super) fn report_failure(
        &self,
        worker: &Worker,
        client: ClientKey,
        is_trial: bool,
        owner: FailureOwner,
        reason: &str,
    ) {
        let now = observe::now();
        let is_unconnected = owner == FailureOwner::Worker;
        let state = worker.breaker.state();
        let failures = match owner {
            // One that was sent before the trial says nothing of it.
            FailureOwner::Worker => u32::from(state != State::HalfOpen || is_trial),
            FailureOwner::Request => {
                let is_unhealthy = worker.last_probe_error.load().is_some();
                let failures =
                    self.evidence
                        .on_failure(now, worker.id, client, state, is_unhealthy, is_trial);
                match state {
                    State::Closed if !is_unhealthy && !self.may_open_one_more(worker.role) => 0,
                    _ => failures,
                }
            }
            FailureOwner::Unattributed
            | FailureOwner::Router
            | FailureOwner::Client
            | FailureOwner::KvTransfer => 0,
        };
        let owner = match failures {
            0 => owner,
            _ => FailureOwner::Worker,
        };
        self.families.on_failure(&worker.name, owner);
        let has_opened = if is_unconnected {
            failures > 0 && worker.breaker.on_no_connection(now)
        } else {
            (0..failures).any(|_| worker.breaker.on_failure(now))
        };
        if has_opened {
            self.evidence.on_opened(worker.id);
            worker.on_breaker_open();
            let until = if worker.breaker.awaits_connection() {
                "a health check or a trial request"
            } else {
                "a trial request"
            };
            warn!(
                worker = %worker.name,
                reason,
                "circuit breaker open; the worker gets no requests until {until} succeeds"
            );
            self.families.on_breaker_transition(worker, State::Open);
        }
    }

    /// Reports to the circuit breaker of a prefill worker's KV transfers that a decode worker has the prompt of a
    /// client's request that was sent at `sent`. `is_trial`: the request is the breaker's trial.
    pub(super) fn report_transferred(
        &self,
        prefill: &Worker,
        client: ClientKey,
        is_trial: bool,
        sent: Instant,
    ) {
        let now = observe::now();
        let evidence = &self.transfer_evidence;
        evidence.on_success(now, prefill.id, client, sent);
        if prefill.kv_transfer_breaker.on_success(now, is_trial) {
            info!(worker = %prefill.name, "KV transfer circuit breaker closed; the worker gets prefill legs again");
        }
    }

    /// Reports a failed transfer to the circuit breaker of a prefill worker's KV transfers. The engines' errors do not
    /// say whether that is due to the client's request. That an engine has never returned parameters is not. `is_trial`:
    /// the request is the breaker's trial.
    pub(super) fn report_transfer_failure(
        &self,
        prefill: &Worker,
        client: ClientKey,
        is_trial: bool,
    ) {
        let now = observe::now();
        let breaker = &prefill.kv_transfer_breaker;
        let is_unhealthy = prefill.last_probe_error.load().is_some();
        let evidence = &self.transfer_evidence;
        let state = breaker.state();
        let failures = if prefill.returned_params.are_never_returned() {
            u32::from(state != State::HalfOpen || is_trial)
        } else {
            let failures =
                evidence.on_failure(now, prefill.id, client, state, is_unhealthy, is_trial);
            match state {
                State::Closed if !is_unhealthy && !self.may_stop_transfers() => 0,
                _ => failures,
            }
        };
        if failures == 0 && is_trial && state == State::HalfOpen {
            // The request may be to blame. One that was sent before the trial says nothing of it. Once another request
            // has closed the breaker, none is kept back.
            breaker.pause(now + NEXT_TRIAL_PAUSE);
        }
        if (0..failures).any(|_| breaker.on_failure(now)) {
            evidence.on_opened(prefill.id);
            warn!(
                worker = %prefill.name,
                "KV transfers from this worker fail; its KV transfer circuit breaker is open and it gets no prefill legs"
            );
        }
    }

    /// Reports that one worker alone has answered a client's request whose KV transfer had failed.
    pub(super) fn report_whole(&self, client: ClientKey, is_success: bool) {
        self.transfer_evidence.on_whole(client, is_success);
    }

    /// Whether failed requests alone may open the circuit breaker of a worker of this role. A worker that refuses
    /// connections or fails health checks is not asked about.
    fn may_open_one_more(&self, role: Role) -> bool {
        self.has_room_for_one(role, |worker| worker.breaker.state() != State::Closed)
    }

    /// Whether failed transfers alone may open the circuit breaker of a prefill worker's transfers. Where no decode worker
    /// computes prompts, requests fail without prefill workers.
    fn may_stop_transfers(&self) -> bool {
        let is_out = |worker: &Worker| {
            let breakers = [&worker.breaker, &worker.kv_transfer_breaker];
            breakers
                .iter()
                .any(|breaker| breaker.state() != State::Closed)
        };
        self.computes_locally || self.has_room_for_one(Role::Prefill, is_out)
    }

    fn has_room_for_one(&self, role: Role, is_open: impl Fn(&Worker) -> bool) -> bool {
        let snapshot = self.fleet.snapshot();
        snapshot.models.get(&self.name).is_none_or(|group| {
            let workers = group.workers.iter();
            let seen = workers.map(|worker| (worker.role, is_open(worker)));
            open_share::may_open_one_more(role, self.computes_locally, seen)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::registry::tests::{registry, worker};
    use crate::ids::Tenant;
    use crate::relay::account::usage::Usage;

    pub(super) fn models(counts: &metrics::Registry) -> Models {
        let common = PerModel {
            routing: routing::Settings::default(),
            bytes_per_token: 4.0,
            send_tokens: false,
            stream_continuation: None,
        };
        let settings = ModelSettings {
            common,
            named: FxHashMap::default(),
            names: Vec::new(),
        };
        let families = prefill_decode::Families::new(counts);
        Models::new(settings, registry(&[]), Some(families), true, counts)
    }

    fn model() -> Arc<ModelState> {
        models(&metrics::Registry::default()).of(&Model::from("m"))
    }

    /// A worker whose KV transfers failed, so that the circuit breaker for them opened, and is half-open from the time that is
    /// returned: its trial runs.
    fn with_trial_transfer(model: &ModelState) -> (Arc<Worker>, Instant) {
        let prefill = worker("p");
        for client in [1, 2, 1, 2, 1, 2] {
            model.report_transfer_failure(&prefill, ClientKey(client), false);
        }
        let (now, breaker) = (observe::now(), &prefill.kv_transfer_breaker);
        assert!(breaker.admit(now + Duration::from_secs(3_600)));
        assert_eq!(breaker.state(), State::HalfOpen);
        (prefill, now)
    }

    #[test]
    fn a_request_from_before_a_breaker_opened_takes_no_success_from_its_trial() {
        let (model, worker) = (model(), worker("a"));
        let now = observe::now();
        while !worker.breaker.on_failure(now) {}
        assert!(worker.breaker.admit(now + Duration::from_secs(3_600)));
        for owner in [FailureOwner::Request, FailureOwner::Worker] {
            model.report_failure(&worker, ClientKey(1), false, owner, "502");
            assert_eq!(worker.breaker.state(), State::HalfOpen, "{owner:?}");
        }
        model.report_success(&worker, ClientKey(2), true, now);
        assert_eq!(worker.breaker.state(), State::Closed);
    }

    #[test]
    fn a_request_from_before_a_breaker_opened_does_not_close_it() {
        let (model, worker) = (model(), worker("a"));
        let now = observe::now();
        let breakers = [&worker.breaker, &worker.kv_transfer_breaker];
        for breaker in breakers {
            while !breaker.on_failure(now) {}
        }
        let ends_well = |is_trial: bool| {
            model.report_success(&worker, ClientKey(1), is_trial, now);
            model.report_transferred(&worker, ClientKey(1), is_trial, now);
        };
        let are = |state: State| breakers.iter().all(|breaker| breaker.state() == state);
        ends_well(false);
        assert!(are(State::Open));
        for breaker in breakers {
            assert!(breaker.admit(now + Duration::from_secs(3_600)));
        }
        ends_well(false);
        assert!(are(State::HalfOpen));
        ends_well(true);
        assert!(are(State::Closed));
    }

    #[test]
    fn a_trial_that_gets_no_connection_opens_its_breaker_again() {
        let (model, worker) = (model(), worker("a"));
        let now = observe::now();
        while !worker.breaker.on_no_connection(now) {}
        assert!(worker.breaker.admit(now + Duration::from_secs(3_600)));
        model.report_failure(&worker, ClientKey(1), true, FailureOwner::Worker, "connect");
        assert_eq!(worker.breaker.state(), State::Open);
    }

    #[test]
    fn a_trial_transfer_for_which_its_client_may_be_to_blame_is_not_followed_by_the_next_at_once() {
        let model = model();
        let (prefill, now) = with_trial_transfer(&model);
        let (breaker, admitted) = (
            &prefill.kv_transfer_breaker,
            now + Duration::from_secs(3_600),
        );
        // One that was sent before it opened.
        model.report_transfer_failure(&prefill, ClientKey(1), false);
        breaker.release_trial(admitted, now);
        assert!(breaker.admit(now));
        model.report_transfer_failure(&prefill, ClientKey(1), true);
        breaker.release_trial(now, now);
        assert_eq!(breaker.state(), State::HalfOpen);
        assert!(!breaker.may_admit(now));
        assert!(breaker.may_admit(observe::now() + NEXT_TRIAL_PAUSE));
    }

    #[test]
    fn a_trial_transfer_that_fails_once_the_breaker_is_closed_keeps_no_others_back() {
        let model = model();
        let (prefill, now) = with_trial_transfer(&model);
        let breaker = &prefill.kv_transfer_breaker;
        model.report_transferred(&prefill, ClientKey(3), true, now);
        model.report_transfer_failure(&prefill, ClientKey(1), true);
        assert_eq!(breaker.state(), State::Closed);
        assert!(breaker.may_admit(now));
    }

    #[test]
    fn one_clients_transfers_count_against_an_engine_that_has_never_returned_parameters() {
        let opens = |has_returned: bool| {
            let (model, prefill) = (model(), worker("p"));
            if has_returned {
                prefill.returned_params.on_returned();
            }
            for _ in 0..9 {
                prefill.returned_params.on_missing(observe::now());
                model.report_transfer_failure(&prefill, ClientKey(1), false);
            }
            prefill.kv_transfer_breaker.state() == State::Open
        };
        assert!(opens(false));
        assert!(!opens(true));
    }

    /// The pairs that have series of their own are bounded, and a reload makes no new ones.
    #[test]
    fn a_tenant_keeps_its_series_through_any_number_of_reloads() {
        let counts = metrics::Registry::default();
        let usage = Usage::new(None, &counts);
        let mut models = models(&counts);
        let tenant = Tenant::of("a");
        let count = |models: &Models, name: &str| {
            let name = Model::from(name);
            let state = models.of(&name);
            state.counts.usage.of(&usage, tenant, "a", &name);
        };
        for _ in 0..4_001 {
            count(&models, "m");
            models = models.successor(models.settings.clone(), true);
        }
        count(&models, "new");
        let text = counts.text();
        assert!(text.contains("warmroute_usage_requests_total{model=\"new\",tenant=\"a\"}"));
        assert!(!text.contains("tenant=\"other\""));
    }
}
