//! One model's settings and metric series, resolved once and shared by its requests.

mod breaker_reports;
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

use super::account::hindsight::{Choices, Hindsight};
use super::account::metrics::{Families, NONE};
use super::account::usage::CountersByTenant;
use super::account::worker_series::SeriesByWorker;
use super::continuation;
use super::failure::evidence::SharedEvidence;
use super::failure::types::Outcome;
use super::prefill_decode;
use super::request::session_key::{KeySource, session_key};
use super::request::target::NameSettings;
use crate::fleet::registry::Registry;
use crate::fleet::speed::AnswerTokens;
use crate::ids::Model;
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
    /// The number of its first request, drawn at random: or else the turns of each replica, and of each adapter, would begin at
    /// the same worker.
    first_ticket: u64,
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

    /// Counts a request that ended without a worker's answer. `model`: `None` if it was not known to have a worker.
    pub(super) fn count_unanswered(&self, model: Option<&Model>, api: &str, outcome: Outcome) {
        let model = model.map_or(NONE, |model| &**model);
        self.shared.families.count_unanswered(model, api, outcome);
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
                first_ticket: u64::from(fastrand::u32(..)),
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
        self.counts.first_ticket + self.counts.tickets.fetch_add(1, Relaxed)
    }

    /// The number that the next request will get.
    pub(super) fn next_ticket(&self) -> u64 {
        self.counts.first_ticket + self.counts.tickets.load(Relaxed)
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
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::registry::tests::registry;
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

    #[test]
    fn turns_of_replicas_and_of_adapters_do_not_all_begin_at_the_same_worker() {
        let counts = metrics::Registry::default();
        let models = models(&counts);
        let begins_at = |number: u32| {
            let name = format!("adapter-{number}");
            models.of(&Model::from(&*name)).next_ticket() % 4
        };
        let workers: FxHashSet<u64> = (0..64).map(begins_at).collect();
        assert_eq!(workers.len(), 4);
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
