//! A router of a replay: the load counters of each worker, a cache index, and the router's own decision code over both.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use super::formula::Candidate;
use super::policy::ComparedPolicy;
use super::reported::ReportedIndex;
use super::workload::{Job, tokens_of};
use crate::ids::WorkerId;
use crate::kv::predicted::{self, PredictedIndex};
use crate::kv::unconfirmed::{self, UnconfirmedBlocks, UnconfirmedPrompt};
use crate::observe::metrics::Registry;
use crate::routing::{self, Cached, Request, State, View};

/// Which cache index a router uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub(super) enum CacheIndexKind {
    /// Built from the engines' KV events.
    Exact,
    /// Built from this router's own decisions.
    Predicted,
}

#[derive(Debug)]
pub(super) struct Router {
    loads: Vec<Load>,
    in_flight: FxHashMap<usize, InFlight>,
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

/// The counters of `fleet::load`.
#[derive(Clone, Copy, Debug, Default)]
struct Load {
    requests: u32,
    queued_tokens: u64,
    decode_tokens: u64,
    /// Prompt tokens of all requests, for the formulas of other routers.
    active_tokens: u64,
}

#[derive(Debug)]
struct InFlight {
    worker: usize,
    uncached_tokens: u32,
    coming: Option<UnconfirmedPrompt>,
    is_computed: bool,
}

/// Progress of a request, which a router counts for its own requests and gets in load reports for those of replicas.
#[derive(Clone, Copy, Debug)]
pub(super) enum RequestEvent {
    Chosen { worker: usize, uncached_tokens: u32 },
    FirstToken,
    Ended,
}

pub(super) struct Settings {
    pub(super) policy: ComparedPolicy,
    pub(super) routing: routing::Settings,
    pub(super) predicted: predicted::Settings,
    pub(super) cache_index: CacheIndexKind,
    /// With the exact index: blocks count as cached as soon as a worker is chosen.
    pub(super) predicts_on_route: bool,
    pub(super) workers: usize,
    pub(super) cache_tokens: u64,
}

impl Router {
    pub(super) fn new(settings: &Settings, epoch: Instant) -> Self {
        // Nobody reads these metrics.
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
                    UnconfirmedBlocks::new(unconfirmed::Settings::default(), metrics, epoch)
                }),
            },
        };
        Self {
            loads: vec![Load::default(); settings.workers],
            in_flight: FxHashMap::default(),
            cache_index,
            routing: settings.policy.routing(&settings.routing),
            policy: settings.policy,
            cache_tokens: settings.cache_tokens,
            tickets: 0,
            epoch,
        }
    }

    /// Chooses a worker for a request. Also returns how many prompt tokens the worker has to compute.
    pub(super) fn choose(
        &mut self,
        now: Duration,
        job: &Job,
        reported: &ReportedIndex,
    ) -> Option<(usize, u32)> {
        let request = Request {
            prompt_tokens: job.input_tokens,
            // Traces have no session keys; the first block of a prompt is the nearest thing.
            affinity: job.blocks.first().map(|first| first.path.0),
            ticket: self.tickets,
            seed: job.seed,
        };
        self.tickets += 1;
        let cached = self.cached(now, job, reported);
        let worker = match self.policy {
            ComparedPolicy::Router(_) => {
                let view = FleetView {
                    loads: &self.loads,
                    cached: &cached,
                };
                routing::decide(&self.routing, &request, &view)?.worker_index
            }
            ComparedPolicy::Model(formula) => {
                formula.choose(job.input_tokens, &self.candidates(&cached, job))?
            }
        };
        let uncached_tokens = job.input_tokens.saturating_sub(cached.tokens(worker));
        Some((worker, uncached_tokens))
    }

    /// Counts the progress of a request, of its own or of a replica.
    pub(super) fn apply(&mut self, now: Duration, number: usize, job: &Job, event: RequestEvent) {
        let at = self.epoch + now;
        match event {
            RequestEvent::Chosen {
                worker,
                uncached_tokens,
            } => {
                let load = &mut self.loads[worker];
                load.requests += 1;
                load.queued_tokens += u64::from(uncached_tokens);
                load.active_tokens += u64::from(job.input_tokens);
                let id = WorkerId(worker as u32);
                let coming = match &self.cache_index {
                    CacheIndex::Exact { unconfirmed } => unconfirmed
                        .as_ref()
                        .map(|it| it.insert(id, &job.prefix_keys)),
                    CacheIndex::Predicted(predicted) => {
                        predicted.record(at, id, self.cache_tokens, &job.blocks);
                        None
                    }
                };
                let request = InFlight {
                    worker,
                    uncached_tokens,
                    coming,
                    is_computed: false,
                };
                self.in_flight.insert(number, request);
            }
            RequestEvent::FirstToken => {
                let Some(request) = self.in_flight.get_mut(&number) else {
                    return;
                };
                request.is_computed = true;
                let load = &mut self.loads[request.worker];
                load.queued_tokens -= u64::from(request.uncached_tokens);
                load.decode_tokens += u64::from(job.input_tokens);
                if let Some(coming) = request.coming.take() {
                    coming.on_first_token(at);
                }
            }
            RequestEvent::Ended => {
                let Some(request) = self.in_flight.remove(&number) else {
                    return;
                };
                let load = &mut self.loads[request.worker];
                load.requests -= 1;
                load.active_tokens -= u64::from(job.input_tokens);
                match request.is_computed {
                    true => load.decode_tokens -= u64::from(job.input_tokens),
                    false => load.queued_tokens -= u64::from(request.uncached_tokens),
                }
            }
        }
    }

    /// Frees expired entries of the index.
    pub(super) fn expire(&self, now: Duration) {
        match &self.cache_index {
            CacheIndex::Exact { unconfirmed } => {
                if let Some(unconfirmed) = unconfirmed {
                    unconfirmed.remove_expired(self.epoch + now);
                }
            }
            CacheIndex::Predicted(predicted) => {
                predicted.remove_expired(self.epoch + now, |_| true)
            }
        }
    }

    fn cached<'a>(
        &'a self,
        now: Duration,
        job: &'a Job,
        reported: &ReportedIndex,
    ) -> CachedTokens<'a> {
        let holders_max = self.routing.advanced.prefix_candidates as usize;
        match &self.cache_index {
            CacheIndex::Exact { unconfirmed } => {
                let mut tokens = reported.cached_tokens(job);
                if let Some(unconfirmed) = unconfirmed {
                    let coming =
                        unconfirmed.overlap(self.epoch + now, &job.prefix_keys, holders_max);
                    for holder in coming {
                        let cached = &mut tokens[holder.worker.0 as usize];
                        *cached = (*cached).max(tokens_of(&job.blocks, holder.blocks as usize));
                    }
                }
                CachedTokens::exact(tokens, holders_max, job.seed)
            }
            CacheIndex::Predicted(predicted) => {
                CachedTokens::predicted(predicted, job, holders_max)
            }
        }
    }

    fn candidates(&self, cached: &CachedTokens<'_>, job: &Job) -> Vec<Candidate> {
        let loads = self.loads.iter().enumerate();
        loads
            .map(|(worker_index, load)| Candidate {
                requests: load.requests,
                queued_tokens: load.queued_tokens,
                active_tokens: load.active_tokens,
                cached_tokens: cached.tokens(worker_index),
                tie: tie_breaker(job.seed, worker_index),
            })
            .collect()
    }
}

/// The cached tokens of one prompt, by worker.
enum CachedTokens<'a> {
    Exact {
        tokens: Vec<u32>,
        holders: SmallVec<[usize; 8]>,
    },
    /// The workers with the longest cached prefix are known; others are looked up on demand.
    Predicted {
        index: &'a PredictedIndex,
        job: &'a Job,
        holders: SmallVec<[usize; 8]>,
        max_cached_elsewhere: usize,
    },
}

impl<'a> CachedTokens<'a> {
    fn exact(tokens: Vec<u32>, holders_max: usize, seed: u64) -> Self {
        let mut holders: SmallVec<[usize; 8]> = (0..tokens.len())
            .filter(|worker| tokens[*worker] > 0)
            .collect();
        let order = |worker: &usize| (u32::MAX - tokens[*worker], tie_breaker(seed, *worker));
        if holders.len() > holders_max && holders_max > 0 {
            holders.select_nth_unstable_by_key(holders_max - 1, order);
        }
        holders.truncate(holders_max);
        CachedTokens::Exact { tokens, holders }
    }

    fn predicted(index: &'a PredictedIndex, job: &'a Job, holders_max: usize) -> Self {
        let overlap = index.overlap(&job.blocks, holders_max, job.seed);
        let max_cached_elsewhere = match overlap.last() {
            Some(last) if overlap.len() == holders_max => last.blocks as usize,
            _ => 0,
        };
        CachedTokens::Predicted {
            index,
            job,
            holders: overlap.iter().map(|it| it.worker.0 as usize).collect(),
            max_cached_elsewhere,
        }
    }

    fn holders(&self) -> &[usize] {
        match self {
            CachedTokens::Exact { holders, .. } | CachedTokens::Predicted { holders, .. } => {
                holders
            }
        }
    }

    fn tokens(&self, worker_index: usize) -> u32 {
        match self {
            CachedTokens::Exact { tokens, .. } => tokens[worker_index],
            CachedTokens::Predicted {
                index,
                job,
                holders,
                max_cached_elsewhere,
            } => {
                let blocks = if holders.contains(&worker_index) {
                    &job.blocks[..]
                } else {
                    &job.blocks[..*max_cached_elsewhere]
                };
                let depth = index.depth(WorkerId(worker_index as u32), blocks);
                tokens_of(&job.blocks, depth as usize)
            }
        }
    }
}

/// The view of the fleet that a routing decision gets.
struct FleetView<'a> {
    loads: &'a [Load],
    cached: &'a CachedTokens<'a>,
}

impl View for FleetView<'_> {
    fn len(&self) -> usize {
        self.loads.len()
    }

    fn state(&self, worker_index: usize) -> State {
        let load = &self.loads[worker_index];
        State {
            is_usable: true,
            requests: load.requests,
            queued_tokens: load.queued_tokens,
            decode_tokens: load.decode_tokens,
        }
    }

    fn identity(&self, worker_index: usize) -> u64 {
        tie_breaker(0, worker_index)
    }

    fn prefix_owners(&self) -> &[usize] {
        self.cached.holders()
    }

    fn cached(&self, worker_index: usize) -> Cached {
        Cached::in_gpu(self.cached.tokens(worker_index))
    }
}

/// A pseudo-random number per request and worker, so that ties do not always go to the same worker.
fn tie_breaker(seed: u64, worker_index: usize) -> u64 {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    bytes[8..].copy_from_slice(&(worker_index as u64).to_le_bytes());
    xxhash_rust::xxh3::xxh3_64(&bytes)
}
