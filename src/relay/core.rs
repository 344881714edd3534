//! The [`Relay`]: what all requests share. Each step of a request is an `impl Relay` in a file of its own.

use std::sync::Arc;

use super::abort::Aborts;
use super::account::decision_log::DecisionLog;
use super::account::hindsight::Hindsight;
use super::account::usage::Usage;
use super::choose::chooser::Chooser;
use super::failure::budget::RetryBudget;
use super::failure::quarantine::SharedQuarantine;
use super::model::{ModelSettings, Models};
use super::prefill_decode::{self, Disaggregation};
use super::prompt::cached_prefix::Caches;
use super::prompt::tokens::Tokens;
use super::request::context::RequestKind;
use super::request::target::Names;
use super::request::tenants::TenantTable;
use super::settings::Settings;
use super::wait::Queues;
use crate::fleet::registry::Registry;
use crate::http::drain::LastPart;
use crate::kv::predicted::PredictedIndex;
use crate::observe::metrics::{self, metric_table};
use crate::peers::Peers;
use crate::queue;
use crate::routing::Policy;
use crate::traces::Tracer;

metric_table! {
    /// Metrics that are not a model's.
    #[derive(Clone, Debug)]
    pub(super) struct Metrics {
        pub(super) retries_refused: counter "warmroute_retry_budget_exhausted_total"
            "Retries that the retry budget did not allow.",
        pub(super) model_targets: counters "warmroute_model_targets_total" ["requested", "target", "reason"]
            "Requests for a name with aliases, targets or fallbacks, by the model that its workers were asked for: `name` (the \
             model's own name), `alias`, `weight`, `session` (by weight, the same for a session), `fallback`.",
        pub(super) model_lookups: counters "warmroute_model_lookups_total" ["outcome"]
            "Requests for a model that no worker was known to serve, by what asking the workers again came to: `found`, \
             `not_found`, `timeout` (not all workers answered), `full` (too many requests waited).",
    }
}

/// The relay with the settings of one configuration, shared by the requests that started with it. What outlives a
/// configuration is shared with its [successor](Relay::successor).
#[derive(Debug)]
pub struct Relay {
    pub(super) settings: Settings,
    fleet: Arc<Registry>,
    pub(super) caches: Caches,
    pub(super) models: Models,
    names: Names,
    pub(super) tokens: Arc<Tokens>,
    pub(super) budget: Arc<RetryBudget>,
    pub(super) quarantine: Arc<SharedQuarantine>,
    /// `None` if requests are not disaggregated.
    pub(super) prefill_decode: Option<Disaggregation>,
    pub(super) peers: Peers,
    tenants: TenantTable,
    /// `None`: requests do not wait for room at a worker.
    pub(super) queue: Option<Arc<queue::Settings>>,
    queues: Arc<Queues>,
    pub(super) usage: Arc<Usage>,
    pub(super) metrics: Metrics,
    /// Requests that engines are asked to abort.
    pub aborts: Arc<Aborts>,
    pub tracer: Tracer,
    /// A sample of the latest decisions, for operators.
    pub decisions: Arc<DecisionLog>,
    /// The part of the drain in which requests end with an error.
    pub ends_in: LastPart,
}

impl Relay {
    #[expect(
        clippy::too_many_arguments,
        reason = "each is another part of the router, named once"
    )]
    pub fn new(
        settings: Settings,
        fleet: Arc<Registry>,
        caches: Caches,
        models: ModelSettings,
        prefill_decode: &prefill_decode::Settings,
        tokens: Arc<Tokens>,
        peers: Peers,
        tenants: TenantTable,
        queue: Option<queue::Settings>,
        usage: Arc<Usage>,
        registry: &metrics::Registry,
    ) -> Self {
        let prefill_decode = Disaggregation::new(prefill_decode, registry);
        let connector = prefill_decode.as_ref().map(|settings| settings.connector);
        let queues = Queues::new(fleet.clone(), connector, registry);
        let queue = queue.map(Arc::new);
        queues.set(queue.as_ref(), models.models());
        usage.set_tenants(tenants.ids());
        let families = prefill_decode
            .as_ref()
            .map(|disaggregation| disaggregation.families.clone());
        Self {
            budget: Arc::new(RetryBudget::new(&settings)),
            quarantine: Arc::new(SharedQuarantine::new(registry)),
            settings,
            caches,
            names: Names::new(&models.names),
            models: Models::new(
                models,
                fleet.clone(),
                families,
                computes_locally(prefill_decode.as_ref()),
                registry,
            ),
            fleet,
            prefill_decode,
            tokens,
            peers,
            tenants,
            queue,
            queues,
            usage,
            aborts: Aborts::new(registry),
            tracer: Tracer::default(),
            decisions: Arc::default(),
            ends_in: LastPart::default(),
            metrics: Metrics::new(registry),
        }
    }

    /// The relay of the next configuration: with other settings, and with the state of this one. `prefill_decode` has
    /// the same connector.
    pub fn successor(
        &self,
        settings: Settings,
        models: ModelSettings,
        prefill_decode: &prefill_decode::Settings,
        tokens: Arc<Tokens>,
        tenants: TenantTable,
        queue: Option<queue::Settings>,
    ) -> Self {
        let queue = queue.map(Arc::new);
        let former = self.prefill_decode.as_ref();
        let disaggregation = former.map(|settings| settings.successor(prefill_decode));
        self.queues.set(queue.as_ref(), models.models());
        self.usage.set_tenants(tenants.ids());
        let budget = if RetryBudget::is_same(&self.settings, &settings) {
            self.budget.clone()
        } else {
            Arc::new(RetryBudget::new(&settings))
        };
        Self {
            settings,
            fleet: self.fleet.clone(),
            caches: self.caches.clone(),
            names: Names::new(&models.names),
            models: self
                .models
                .successor(models, computes_locally(disaggregation.as_ref())),
            tokens,
            budget,
            quarantine: self.quarantine.clone(),
            prefill_decode: disaggregation,
            peers: self.peers.clone(),
            tenants,
            queue,
            queues: self.queues.clone(),
            usage: self.usage.clone(),
            metrics: self.metrics.clone(),
            aborts: self.aborts.clone(),
            tracer: self.tracer.clone(),
            decisions: self.decisions.clone(),
            ends_in: self.ends_in.clone(),
        }
    }

    /// The part of the drain in which a request ends with an error. `None` for one whose client does not wait: background
    /// responses and lines of batches are given up for another replica.
    pub(super) fn last_part(&self, kind: &RequestKind) -> Option<&LastPart> {
        kind.is_interactive().then_some(&self.ends_in)
    }

    pub(super) fn chooser(&self) -> Chooser<'_> {
        Chooser {
            caches: &self.caches,
            disaggregation: self.prefill_decode.as_ref(),
        }
    }

    pub fn fleet(&self) -> &Arc<Registry> {
        &self.fleet
    }

    pub fn names(&self) -> &Names {
        &self.names
    }

    pub fn tenants(&self) -> &TenantTable {
        &self.tenants
    }

    /// Where requests wait for room at a worker.
    pub fn queues(&self) -> &Arc<Queues> {
        &self.queues
    }

    /// Whether the choice was worse than others would have been.
    pub fn hindsight(&self) -> &Arc<Hindsight> {
        &self.models.shared.hindsight
    }

    /// Whether streams of any model may be continued.
    pub fn continues_streams(&self) -> bool {
        let ModelSettings { common, named, .. } = &self.models.settings;
        let mut all = named.values().chain([common]);
        all.any(|model| model.stream_continuation.is_some())
    }

    /// The routing policy of models that have none of their own.
    pub fn policy(&self) -> Policy {
        self.models.settings.common.routing.policy
    }

    pub fn predicted(&self) -> &PredictedIndex {
        &self.caches.predicted
    }

    /// Length of a prompt's first blocks, for [`crate::prompt::peek`].
    pub fn block_bytes(&self) -> u32 {
        self.caches.predicted.settings().block_size
    }
}

/// Whether decode workers compute prompts where no prefill worker does.
fn computes_locally(disaggregation: Option<&Disaggregation>) -> bool {
    disaggregation.is_none_or(Disaggregation::is_local_prefill_allowed)
}
