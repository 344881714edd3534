//! A router of a replay: the load counters of each worker, a cache index, and the router's own decision code over both.

mod cached_tokens;
mod fleet_view;
mod line;
mod reports;
mod speeds;

use std::sync::Arc;
use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;

use self::cached_tokens::{CachedTokens, tie_breaker};
use self::fleet_view::FleetView;
pub(super) use self::line::Sent;
use self::line::{Line, Workers};
use self::reports::{Peers, Report, Reported};
pub(super) use self::speeds::Rates;
use self::speeds::{Loads, Speeds};
use super::engine::EngineGauges;
use super::formula::Candidate;
use super::policy::ComparedPolicy;
use super::reported::ReportedIndex;
use super::workload::{Job, tokens_of};
use crate::fleet;
use crate::fleet::load::LoadShare;
use crate::fleet::speed::{AnswerTokens, Passed};
use crate::ids::{ViewIndex, WorkerId};
use crate::kv::predicted::{self, PredictedIndex};
use crate::kv::unconfirmed::{self, UnconfirmedBlocks, UnconfirmedPrompt};
use crate::observe::metrics::Registry;
use crate::queue;
use crate::routing::{self, PrefixCounts, Request, SharedPrefix};

/// Which cache index a router uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub(super) enum CacheIndexKind {
    /// Built from the engines' KV events.
    Exact,
    /// Built from this router's own decisions.
    Predicted,
}

/// Blocks whose hash a router prefers a worker by while it hears of no other: about 1,000 tokens.
const PREFIX_KEY_BLOCKS: usize = 2;

#[derive(Debug)]
pub(super) struct Router {
    /// The load of its own requests on each worker.
    own: Vec<LoadShare>,
    peers: Peers,
    reported: Reported,
    /// What engines said of their slots.
    engines: Vec<fleet::load::Load>,
    /// The requests that wait, if requests do.
    line: Option<Line>,
    is_alone: bool,
    in_flight: FxHashMap<usize, InFlight>,
    speeds: Speeds,
    answers: AnswerTokens,
    shared_prefixes: PrefixCounts,
    cache_index: CacheIndex,
    routing: routing::Settings,
    policy: ComparedPolicy,
    cache_tokens: u64,
    tickets: u64,
    /// The instant that stands for virtual time 0.
    epoch: Instant,
}

#[derive(Debug)]
enum CacheIndex {
    /// Blocks that chosen workers will soon report; the reported ones are in [`ReportedIndex`].
    Exact {
        unconfirmed: Option<Arc<UnconfirmedBlocks>>,
    },
    Predicted(Box<PredictedIndex>),
}

#[derive(Debug)]
struct InFlight {
    worker: usize,
    /// Since when its answer shows how fast the worker is: since it was sent, or since its first token.
    since: Option<Passed>,
    uncached_tokens: u32,
    coming: Option<UnconfirmedPrompt>,
    /// Its first token has come.
    is_computed: bool,
}

/// Progress of a request.
#[derive(Clone, Copy, Debug)]
pub(super) enum RequestEvent {
    Chosen { worker: usize, uncached_tokens: u32 },
    FirstToken,
    Ended,
}

pub(super) struct Settings {
    pub(super) policy: ComparedPolicy,
    pub(super) routing: routing::Settings,
    pub(super) queue: queue::Settings,
    pub(super) predicted: predicted::Settings,
    pub(super) unconfirmed: unconfirmed::Settings,
    pub(super) cache_index: CacheIndexKind,
    /// With the exact index: blocks count as cached as soon as a worker is chosen.
    pub(super) predicts_on_route: bool,
    pub(super) workers: usize,
    pub(super) cache_tokens: u64,
    /// Replicas share the prompts that they routed, beside their loads.
    pub(super) shares_routed: bool,
    /// There are other replicas, and none is connected.
    pub(super) is_alone: bool,
    pub(super) rates: Rates,
    /// By worker.
    pub(super) prefill_rates: Vec<f64>,
}

impl Router {
    pub(super) fn new(settings: &Settings, epoch: Instant) -> Self {
        // These metrics are not read.
        let registry = Registry::default();
        let cache_index = match settings.cache_index {
            CacheIndexKind::Predicted => CacheIndex::Predicted(Box::new(PredictedIndex::new(
                settings.predicted.clone(),
                predicted::Metrics::new(&registry),
                epoch,
            ))),
            CacheIndexKind::Exact => CacheIndex::Exact {
                unconfirmed: settings.predicts_on_route.then(|| {
                    let metrics = unconfirmed::Metrics::new(&registry);
                    UnconfirmedBlocks::new(settings.unconfirmed.clone(), metrics)
                }),
            },
        };
        Self {
            own: vec![LoadShare::default(); settings.workers],
            peers: Peers::new(settings.workers),
            reported: Reported::new(settings.workers, settings.shares_routed),
            engines: (0..settings.workers).map(|_| Default::default()).collect(),
            line: (settings.policy == ComparedPolicy::Queued)
                .then(|| Line::new(&settings.queue, settings.workers, epoch)),
            is_alone: settings.is_alone,
            in_flight: FxHashMap::default(),
            speeds: Speeds::new(settings.rates, &settings.prefill_rates),
            answers: AnswerTokens::default(),
            shared_prefixes: PrefixCounts::new(epoch),
            cache_index,
            routing: settings.policy.routing(&settings.routing),
            policy: settings.policy,
            cache_tokens: settings.cache_tokens,
            tickets: 0,
            epoch,
        }
    }

    /// Chooses a worker for a request. Also returns how many prompt tokens the worker has to compute. `gauges` is what
    /// engines say of themselves, by worker.
    pub(super) fn choose(
        &mut self,
        now: Duration,
        job: &Job,
        reported: &ReportedIndex,
        gauges: &[EngineGauges],
    ) -> Option<(usize, u32)> {
        let loads = self.loads().zip(&self.peers.waiting);
        let mut loads: Vec<LoadShare> = loads.map(|(load, waiting)| load.plus(*waiting)).collect();
        match &self.line {
            Some(line) => {
                for (load, waiting) in loads.iter_mut().zip(line.promised()) {
                    *load = load.plus(*waiting);
                }
            }
            None => self.count_prefix(now, job, reported),
        }
        self.choose_by(now, job, reported, gauges, &loads)
    }

    /// Counts that a request with this prompt is sent.
    fn count_prefix(&self, now: Duration, job: &Job, reported: &ReportedIndex) {
        let shared = self.cached(now, job, reported).most();
        if let Some(key) = routing::shared_key(&job.blocks, shared) {
            self.shared_prefixes.count(self.epoch + now, key);
        }
    }

    /// Whether a request that has arrived waits here until [`Self::release`] sends it. `chosen`: the worker where it
    /// costs the least now, with the tokens to compute there.
    pub(super) fn waits(
        &mut self,
        now: Duration,
        request: usize,
        job: &Job,
        (worker, tokens): (usize, u32),
    ) -> bool {
        let workers = self.workers();
        let Some(line) = &mut self.line else {
            return false;
        };
        let load = LoadShare::of_request(job.input_tokens, tokens);
        line.enter(now, request, (worker, load), &workers);
        true
    }

    /// The requests that waited and whose workers have room.
    pub(super) fn release(
        &mut self,
        now: Duration,
        jobs: &[Job],
        reported: &ReportedIndex,
        gauges: &[EngineGauges],
    ) -> Vec<Sent> {
        let Some(mut line) = self.line.take() else {
            return Vec::new();
        };
        let sent = line.release(now, self.workers(), |request, loads| {
            let job = &jobs[request];
            let chosen = self.choose_by(now, job, reported, gauges, loads);
            let (worker, uncached) = chosen.expect("every modelled engine is usable");
            (worker, job.input_tokens, uncached)
        });
        self.line = Some(line);
        for sent in &sent {
            self.count_prefix(now, &jobs[sent.request], reported);
        }
        sent
    }

    fn workers(&self) -> Workers {
        let engines = self.engines.iter();
        let workers = 0..self.own.len();
        Workers {
            loads: self.loads().collect(),
            promised: self.peers.waiting.clone(),
            peers_first: workers.map(|worker| self.peers.first(worker)).collect(),
            slots: engines.map(fleet::load::Load::learnt_slots).collect(),
            mean_prompt_token: self.speeds.mean_prompt_token(),
        }
    }

    /// All requests at each worker that it knows of.
    fn loads(&self) -> impl Iterator<Item = LoadShare> {
        let seen = self.own.iter().zip(&self.peers.loads);
        seen.map(|(own, peers)| own.plus(*peers))
    }

    fn choose_by(
        &mut self,
        now: Duration,
        job: &Job,
        reported: &ReportedIndex,
        gauges: &[EngineGauges],
        loads: &[LoadShare],
    ) -> Option<(usize, u32)> {
        let request = Request {
            prompt_tokens: job.input_tokens,
            answer_tokens: self.answers.mean(),
            // Traces have no session keys; the first block of a prompt is the nearest thing.
            affinity: job.blocks.first().map(|first| first.path.0),
            prefix_key: routing::prefix_key(&job.blocks, PREFIX_KEY_BLOCKS),
            is_alone: self.is_alone,
            ticket: self.tickets,
            seed: job.seed,
        };
        self.tickets += 1;
        let cached = self.cached(now, job, reported);
        let worker = match self.policy {
            ComparedPolicy::Router(_) | ComparedPolicy::Queued => {
                let tokens = cached.most();
                let key = routing::shared_key(&job.blocks, tokens);
                let of_key = |key| self.shared_prefixes.requests(self.epoch + now, key);
                let view = FleetView {
                    shared: SharedPrefix {
                        tokens,
                        key,
                        requests: key.map_or(0.0, of_key),
                    },
                    loads,
                    engines: &self.engines,
                    speeds: &self.speeds,
                    cached: &cached,
                };
                routing::decide(&self.routing, &request, &view)?.index.get()
            }
            ComparedPolicy::Model(formula) => {
                let candidates = candidates(loads, &cached, gauges, job);
                formula.choose(job.input_tokens, &candidates)?
            }
        };
        let uncached_tokens = job
            .input_tokens
            .saturating_sub(cached.tokens(ViewIndex::new(worker)));
        Some((worker, uncached_tokens))
    }

    /// Counts the progress of one of its own requests.
    pub(super) fn apply(&mut self, now: Duration, number: usize, job: &Job, event: RequestEvent) {
        match event {
            RequestEvent::Chosen {
                worker,
                uncached_tokens,
            } => {
                self.reported.on_routed(number, worker);
                let since = self.speeds.on_sent(now, worker, self.loads_of(worker));
                let sent = LoadShare::of_request(job.input_tokens, uncached_tokens);
                self.own[worker] = self.own[worker].plus(sent);
                let request = InFlight {
                    worker,
                    since,
                    uncached_tokens,
                    coming: self.count_cached(now, worker, job),
                    is_computed: false,
                };
                self.in_flight.insert(number, request);
            }
            RequestEvent::FirstToken => {
                let Some(mut request) = self.in_flight.remove(&number) else {
                    return;
                };
                request.is_computed = true;
                let worker = request.worker;
                if let Some(sent) = &request.since {
                    let sent = (sent, request.uncached_tokens);
                    let loads = self.loads_of(worker);
                    request.since = self.speeds.on_first_token(now, worker, sent, loads);
                }
                self.own[worker].queued_tokens -= u64::from(request.uncached_tokens);
                if let Some(coming) = request.coming.take() {
                    coming.on_first_token(self.epoch + now);
                }
                self.in_flight.insert(number, request);
            }
            RequestEvent::Ended => {
                let Some(request) = self.in_flight.remove(&number) else {
                    return;
                };
                let worker = request.worker;
                if let Some(first) = request.since.filter(|_| request.is_computed) {
                    let tokens = job.output_tokens.saturating_sub(1);
                    let loads = self.loads_of(worker);
                    self.speeds.on_end(now, worker, (&first, tokens), loads);
                }
                self.answers.on_answer(job.output_tokens.into());
                let load = &mut self.own[worker];
                load.requests -= 1;
                load.context_tokens -= u64::from(job.input_tokens);
                if !request.is_computed {
                    load.queued_tokens -= u64::from(request.uncached_tokens);
                }
            }
        }
    }

    pub(super) fn has_waiting(&self) -> bool {
        self.line.as_ref().is_some_and(|line| !line.is_empty())
    }

    /// Whether something else waits than what it last reported.
    pub(super) fn has_unreported_line(&self) -> bool {
        let line = self.line.as_ref();
        line.is_some_and(|line| self.reported.is_other_line(line))
    }

    /// What changed since the last report.
    pub(super) fn report(&mut self) -> Report {
        self.reported.report(&self.own, self.line.as_ref())
    }

    /// Counts what another replica reported.
    pub(super) fn on_report(&mut self, now: Duration, peer: usize, jobs: &[Job], report: &Report) {
        self.peers.on_report(peer, report);
        for (number, worker) in &report.routed {
            let (job, id) = (&jobs[*number], WorkerId(*worker as u32));
            match &self.cache_index {
                CacheIndex::Exact { unconfirmed } => {
                    if let Some(unconfirmed) = unconfirmed {
                        let paths: Vec<u64> =
                            job.prefix_keys.iter().map(|key| key.path.0).collect();
                        unconfirmed.insert_routed(self.epoch + now, id, &paths);
                    }
                }
                CacheIndex::Predicted(_) => {
                    let _ = self.count_cached(now, *worker, job);
                }
            }
        }
    }

    /// Counts a prompt's blocks as cached by the worker that was chosen for it.
    fn count_cached(&self, now: Duration, worker: usize, job: &Job) -> Option<UnconfirmedPrompt> {
        let id = WorkerId(worker as u32);
        match &self.cache_index {
            CacheIndex::Exact { unconfirmed } => {
                let unconfirmed = unconfirmed.as_ref()?;
                Some(unconfirmed.insert(id, &job.prefix_keys))
            }
            CacheIndex::Predicted(predicted) => {
                predicted.record(self.epoch + now, id, self.cache_tokens, &job.blocks);
                None
            }
        }
    }

    fn loads_of(&self, worker: usize) -> Loads<'_> {
        Loads {
            own: &self.own[worker],
            peers: &self.peers.loads[worker],
            reported: &self.engines[worker],
        }
    }

    /// What a router does each second: asks engines how many requests they have, learns the workers' speeds, and frees expired
    /// entries of the index.
    pub(super) fn on_second(&mut self, now: Duration, gauges: &[EngineGauges]) {
        let loads: Vec<LoadShare> = self.loads().collect();
        for ((engine, gauges), load) in self.engines.iter().zip(gauges).zip(&loads) {
            engine.set_peers(load.requests, load.queued_tokens, load.context_tokens);
            engine.set_peers_uncomputed_prompts((load.waiting_prompts() * 1e6) as u64);
            engine.see_requests();
            engine.report(fleet::load::LoadReport {
                at: self.epoch + now,
                running: gauges.running,
                waiting: gauges.waiting,
                deferred: 0,
                kv_usage: gauges.kv_usage,
            });
        }
        self.speeds.learn();
        if let CacheIndex::Predicted(predicted) = &self.cache_index {
            predicted.remove_expired(self.epoch + now, |_| true);
        }
    }

    fn cached(&self, now: Duration, job: &Job, reported: &ReportedIndex) -> CachedTokens {
        let max_owners = routing::PREFIX_CANDIDATES;
        match &self.cache_index {
            CacheIndex::Exact { unconfirmed } => {
                let mut tokens = reported.cached_tokens(job);
                if let Some(unconfirmed) = unconfirmed {
                    unconfirmed.remove_ended(self.epoch + now, |_| None);
                    let coming = unconfirmed.overlap(&job.prefix_keys, max_owners, job.seed);
                    for owner in coming {
                        let cached = &mut tokens[owner.worker.0 as usize];
                        *cached = (*cached).max(tokens_of(&job.blocks, owner.blocks as usize));
                    }
                }
                CachedTokens::exact(tokens, max_owners, job.seed)
            }
            CacheIndex::Predicted(predicted) => {
                CachedTokens::predicted(predicted, job, self.own.len(), max_owners)
            }
        }
    }
}

fn candidates(
    loads: &[LoadShare],
    cached: &CachedTokens,
    gauges: &[EngineGauges],
    job: &Job,
) -> Vec<Candidate> {
    let workers = loads.iter().zip(gauges).enumerate();
    workers
        .map(|(worker_index, (load, gauges))| Candidate {
            requests: load.requests,
            queued_tokens: load.queued_tokens,
            active_tokens: load.context_tokens,
            cached_tokens: cached.tokens(ViewIndex::new(worker_index)),
            waiting: gauges.waiting,
            kv_usage: gauges.kv_usage,
            tie: tie_breaker(job.seed, worker_index),
        })
        .collect()
}
