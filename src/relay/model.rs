//! One model's settings and metric series, resolved once and shared by its requests.

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
use super::account::usage::{CountersByTenant, Usage};
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
use crate::fleet::{Role, Snapshot, Worker};
use crate::http::circuit_breaker::State;
use crate::ids::{ClientKey, Model};
use crate::observe;
use crate::observe::metrics::{self, FoundSeries};
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

    /// Removes the metric series of workers that left the fleet, or dropped a model where places are short, and forgets
    /// models that are gone. `is_configured`: the newest configuration names the model.
    pub(super) fn forget_departed(
        &self,
        now: Instant,
        fleet: &Snapshot,
        is_configured: impl Fn(&str) -> bool,
        usage: &Usage,
    ) {
        let workers = fleet.workers.iter();
        let listed: FxHashMap<&str, _> = workers
            .map(|status| (&*status.worker.name, &status.facts))
            .collect();
        let is_listed = |worker: &str| listed.contains_key(worker);
        self.families.remove_workers(is_listed);
        let mut unneeded = FxHashSet::default();
        let mut models = Vec::new();
        for (name, model) in &mut *self.by_model.lock() {
            let is_known = fleet.models.contains_key(name) || is_configured(name);
            if !model.is_needed(now, is_known) {
                unneeded.insert(name.clone());
            }
            models.push((name.clone(), model.counts.clone()));
        }
        for (name, counts) in models {
            // A worker that has not said yet what it serves may serve the model as before.
            let serves = |worker: &str| {
                let facts = listed.get(worker);
                facts.is_some_and(|facts| {
                    facts.models.is_empty() || facts.models.contains_key(&name)
                })
            };
            counts.series.remove_workers(is_listed, serves);
            counts.usage.release_shared(usage);
        }
        if !unneeded.is_empty() {
            self.forget(now, &unneeded, usage);
        }
    }

    /// Forgets models and removes their series, but for those that a request has or waits with: they go later.
    fn forget(&self, now: Instant, unneeded: &FxHashSet<Model>, usage: &Usage) {
        let unused = self.drop_states(now, unneeded);
        if unused.is_empty() {
            return;
        }
        let found = self.find_series(&unused);
        self.remove_unused(now, &unused, found, usage);
    }

    /// Drops the states of models. Returns those models that no request has or waits with.
    fn drop_states(&self, now: Instant, unneeded: &FxHashSet<Model>) -> FxHashSet<Model> {
        let generations: Vec<Arc<States>> = {
            let generations = self.generations.lock();
            generations.iter().filter_map(Weak::upgrade).collect()
        };
        for states in generations {
            states.rcu(|states| {
                let mut states = FxHashMap::clone(states);
                states.retain(|name, _| !unneeded.contains(name));
                states
            });
        }
        let mut unused = FxHashSet::default();
        let mut by_model = self.by_model.lock();
        for name in unneeded {
            let Some(model) = by_model.get_mut(name) else {
                continue;
            };
            // The state of a request has the counts, too: it may be one that takes more than an hour.
            if Arc::strong_count(&model.counts) == 1 {
                unused.insert(name.clone());
            } else {
                model.needed_at = now;
            }
        }
        unused
    }

    /// Looks through the metric families. First requests of models do not wait for that, so one may come meanwhile.
    fn find_series(&self, models: &FxHashSet<Model>) -> FoundSeries {
        let mut found = FoundSeries::by("model");
        self.families.find_models(models, &mut found);
        if let Some(families) = &self.disaggregation {
            families.find_models(models, &mut found);
        }
        found
    }

    /// Forgets those models that no request has asked for meanwhile, and removes the series that were found.
    fn remove_unused(
        &self,
        now: Instant,
        unused: &FxHashSet<Model>,
        mut found: FoundSeries,
        usage: &Usage,
    ) {
        let mut gone = 0_usize;
        for name in unused {
            // Nobody gets the model's counts from here until its series are removed.
            let mut by_model = self.by_model.lock();
            let Some(model) = by_model.get_mut(name) else {
                continue;
            };
            // What a request has counted since then was not found.
            if model.is_needed(now, false) {
                continue;
            }
            let Some(counts) = Arc::get_mut(&mut model.counts) else {
                model.needed_at = now;
                continue;
            };
            counts.series.remove();
            counts.usage.remove(usage, name);
            found.remove(name);
            self.families.remove_unanswered(name);
            self.hindsight.remove(name);
            by_model.remove(name);
            gone += 1;
        }
        if gone == 0 {
            return;
        }
        info!(
            models = gone,
            "models are forgotten, and their metric series removed: no worker has served them and no request has asked \
             for them for an hour"
        );
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
    use hyper::StatusCode;

    use super::*;
    use crate::fleet::registry::tests::{bring_up, registry, worker};
    use crate::ids::Tenant;
    use crate::prompt::Api;

    fn models(counts: &metrics::Registry) -> Models {
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

    /// A request for a model, until it is dropped. It shows in most of the model's series.
    fn serve(models: &Models, usage: &Usage, name: &str, worker: &Worker) -> Arc<ModelState> {
        let name = Model::from(name);
        let state = models.of(&name);
        state.take_ticket();
        let series = state.counts.series.of(worker);
        series.count(Api::Chat, StatusCode::OK, Outcome::Complete);
        let families = &state.families;
        families.count_unanswered(&name, Api::Chat.as_str(), Outcome::ClientDisconnected);
        let reports = &families.reports;
        reports.with_label_values(&[&*name, "asked"]).inc();
        let continuations = &families.continuations;
        continuations
            .with_label_values(&[&*name, "refused", "api"])
            .inc();
        state.counts.usage.of(usage, Tenant::of("a"), "a", &name);
        state
    }

    fn remembered(models: &Models) -> Vec<String> {
        let by_model = models.shared.by_model.lock();
        let mut names: Vec<String> = by_model.keys().map(|name| name.to_string()).collect();
        names.sort_unstable();
        names
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

    #[test]
    fn models_that_no_worker_serves_are_forgotten_after_an_hour_without_requests() {
        let counts = metrics::Registry::default();
        let usage = Usage::new(None, &counts);
        let models = models(&counts);
        let fleet = registry(&["w"]);
        let worker = fleet.snapshot().workers[0].worker.clone();
        for number in 0..100 {
            let name = format!("m{number}");
            bring_up(&fleet, &name);
            serve(&models, &usage, &name, &worker);
        }
        let now = observe::now();
        let forget = |after: Duration| {
            let snapshot = fleet.snapshot().clone();
            let is_configured = |name: &str| name == "m1";
            let shared = &models.shared;
            shared.forget_departed(now + after, &snapshot, is_configured, &usage);
        };
        forget(Duration::ZERO);
        forget(REMEMBERED_FOR - Duration::from_secs(1));
        assert_eq!(remembered(&models).len(), 100);
        // The worker serves another model by now, and what it answered for this one is still shown.
        let shown = "model=\"m0\",outcome=\"complete\",status=\"200\",worker=\"w\"} 1";
        assert!(counts.text().contains(shown));
        forget(REMEMBERED_FOR);
        // One is configured, the other is served.
        assert_eq!(remembered(&models), ["m1", "m99"]);
        assert_eq!(models.states.load().len(), 2);
        let text = counts.text();
        for number in [0, 50, 98] {
            let label = format!("\"m{number}\"");
            let left: Vec<&str> = text.lines().filter(|line| line.contains(&label)).collect();
            assert!(left.is_empty(), "{left:#?}");
        }
        assert!(text.contains("\"m1\"") && text.contains("\"m99\""));
    }

    #[test]
    fn the_new_pod_of_the_only_worker_finds_what_was_learnt_of_its_model() {
        let counts = metrics::Registry::default();
        let usage = Usage::new(None, &counts);
        let models = models(&counts);
        let fleet = registry(&[]).snapshot().clone();
        serve(&models, &usage, "m", &worker("a"));
        let now = observe::now();
        for minutes in [0, 5, 30] {
            let later = now + Duration::from_secs(60 * minutes);
            let shared = &models.shared;
            shared.forget_departed(later, &fleet, |_| false, &usage);
        }
        let after = models.successor(models.settings.clone(), true);
        assert_eq!(after.of(&Model::from("m")).next_ticket(), 1);
    }

    #[test]
    fn a_model_is_remembered_for_an_hour_after_a_request_of_several_hours_was_seen() {
        let counts = metrics::Registry::default();
        let usage = Usage::new(None, &counts);
        let models = models(&counts);
        let fleet = registry(&[]).snapshot().clone();
        let start = observe::now();
        let forget = |after: Duration| {
            let shared = &models.shared;
            shared.forget_departed(start + after, &fleet, |_| false, &usage);
        };
        let request = serve(&models, &usage, "m", &worker("a"));
        forget(Duration::ZERO);
        forget(3 * REMEMBERED_FOR);
        drop(request);
        forget(4 * REMEMBERED_FOR - Duration::from_secs(1));
        assert_eq!(remembered(&models), ["m"]);
        forget(4 * REMEMBERED_FOR);
        assert!(remembered(&models).is_empty());
    }

    #[test]
    fn a_model_that_is_asked_for_while_its_series_are_looked_for_keeps_them() {
        let counts = metrics::Registry::default();
        let usage = Usage::new(None, &counts);
        let models = models(&counts);
        let shared = &models.shared;
        let (now, worker) = (observe::now() + 2 * REMEMBERED_FOR, worker("a"));
        let mut unneeded = FxHashSet::default();
        for name in ["again", "gone", "held"] {
            let state = serve(&models, &usage, name, &worker);
            unneeded.insert(state.name.clone());
        }
        for model in shared.by_model.lock().values_mut() {
            // An earlier look has seen it.
            model.tickets = 1;
        }
        let unused = shared.drop_states(now, &unneeded);
        assert_eq!(unused, unneeded);
        let found = shared.find_series(&unused);
        serve(&models, &usage, "again", &worker);
        let held = models.of(&Model::from("held"));
        shared.remove_unused(now, &unused, found, &usage);
        assert_eq!(remembered(&models), ["again", "held"]);
        held.in_flight.inc();
        let text = counts.text();
        assert!(text.contains("warmroute_requests_in_flight{model=\"held\"} 1"));
        assert!(text.contains("\"again\"") && !text.contains("\"gone\""));
    }

    #[test]
    fn a_model_is_not_forgotten_while_a_request_has_it_of_whatever_configuration() {
        let counts = metrics::Registry::default();
        let usage = Usage::new(None, &counts);
        let models = models(&counts);
        let newer = models.successor(models.settings.clone(), true);
        let fleet = registry(&[]).snapshot().clone();
        let mut now = observe::now();
        let mut forget = || {
            // The first look sees that tickets were taken, or that a request had the model until now.
            for _ in 0..2 {
                now += REMEMBERED_FOR;
                let shared = &models.shared;
                shared.forget_departed(now, &fleet, |_| false, &usage);
            }
        };
        let worker = worker("a");
        for running in [&models, &newer] {
            let request = serve(running, &usage, "m", &worker);
            request.in_flight.inc();
            forget();
            assert_eq!(remembered(&models), ["m"]);
            // The next one counts with it.
            let next = serve(&newer, &usage, "m", &worker);
            next.in_flight.inc();
            let shown = "warmroute_requests_in_flight{model=\"m\"} 2";
            assert!(counts.text().contains(shown));
            for ended in [request, next] {
                ended.in_flight.dec();
            }
            forget();
            assert!(remembered(&models).is_empty());
            assert!(!counts.text().contains("\"m\""));
        }
    }
}
