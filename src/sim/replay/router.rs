//! A router as the real one is: what it counts of each worker, what it believes them to hold, and the
//! real decision over both.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use super::formula::Candidate;
use super::line::Line;
use super::told::Told;
use super::workload::{Job, tokens_of};
use crate::ids::WorkerId;
use crate::kv::predicted::{self, PredictedIndex};
use crate::kv::unconfirmed::{self, UnconfirmedBlocks, UnconfirmedPrompt};
use crate::observe::metrics::Registry;
use crate::routing::{self, Cached, Request, State, View};

/// What routers know of caches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub(super) enum Knowledge {
    /// What the engines' cache events tell.
    Events,
    /// What this router sent them.
    Predicted,
}

#[derive(Debug)]
pub(super) struct Router {
    loads: Vec<Load>,
    in_flight: FxHashMap<usize, InFlight>,
    beliefs: Beliefs,
    routing: routing::Settings,
    line: Line,
    cache_tokens: u64,
    tickets: u64,
    /// The moment at which virtual time is 0.
    born: Instant,
}

#[derive(Debug)]
enum Beliefs {
    /// Beside what the engines tell.
    Events {
        unconfirmed: Option<Arc<UnconfirmedBlocks>>,
    },
    Predicted(Box<PredictedIndex>),
}

/// As `fleet::load` counts.
#[derive(Clone, Copy, Debug, Default)]
struct Load {
    requests: u32,
    queued_tokens: u64,
    decode_tokens: u64,
    /// Prompt tokens of all requests, for others' formulas.
    active_tokens: u64,
}

#[derive(Debug)]
struct InFlight {
    worker: usize,
    uncached_tokens: u32,
    coming: Option<UnconfirmedPrompt>,
    is_computed: bool,
}

/// A router's choice, and what becomes of it. Other routers may hear of it.
#[derive(Clone, Copy, Debug)]
pub(super) enum News {
    Chosen { worker: usize, uncached_tokens: u32 },
    FirstToken,
    Ended,
}

pub(super) struct Settings {
    pub(super) line: Line,
    pub(super) routing: routing::Settings,
    pub(super) predicted: predicted::Settings,
    pub(super) knowledge: Knowledge,
    /// Whether blocks count as held as soon as their worker is chosen.
    pub(super) expects: bool,
    pub(super) workers: usize,
    pub(super) cache_tokens: u64,
}

impl Router {
    pub(super) fn new(settings: &Settings, born: Instant) -> Self {
        // A run's own: nobody reads it.
        let registry = Registry::default();
        let beliefs = match settings.knowledge {
            Knowledge::Predicted => Beliefs::Predicted(Box::new(PredictedIndex::new(
                settings.predicted.clone(),
                predicted::Metrics::new(&registry),
                born,
            ))),
            Knowledge::Events => Beliefs::Events {
                unconfirmed: settings.expects.then(|| {
                    let metrics = unconfirmed::Metrics::new(&registry);
                    UnconfirmedBlocks::new(unconfirmed::Settings::default(), metrics, born)
                }),
            },
        };
        Self {
            loads: vec![Load::default(); settings.workers],
            in_flight: FxHashMap::default(),
            beliefs,
            routing: settings.line.routing(&settings.routing),
            line: settings.line,
            cache_tokens: settings.cache_tokens,
            tickets: 0,
            born,
        }
    }

    /// A worker for a request, and how many tokens it will have to compute as far as is known.
    pub(super) fn choose(&mut self, now: Duration, job: &Job, told: &Told) -> Option<(usize, u32)> {
        let request = Request {
            prompt_tokens: job.input_tokens,
            // A trace tells no session; a prompt's first block is what one would have in common.
            affinity: job.blocks.first().map(|first| first.path.0),
            ticket: self.tickets,
            seed: job.seed,
        };
        self.tickets += 1;
        let held = self.held(now, job, told);
        let worker = match self.line {
            Line::Ours(_) => {
                let view = Seen {
                    loads: &self.loads,
                    held: &held,
                };
                routing::decide(&self.routing, &request, &view)?.worker_index
            }
            Line::Theirs(formula) => {
                formula.choose(job.input_tokens, &self.candidates(&held, job))?
            }
        };
        let uncached_tokens = job.input_tokens.saturating_sub(held.tokens(worker));
        Some((worker, uncached_tokens))
    }

    /// Counts what happened to a request, its own or another router's.
    pub(super) fn hear(&mut self, now: Duration, number: usize, job: &Job, news: News) {
        let at = self.born + now;
        match news {
            News::Chosen {
                worker,
                uncached_tokens,
            } => {
                let load = &mut self.loads[worker];
                load.requests += 1;
                load.queued_tokens += u64::from(uncached_tokens);
                load.active_tokens += u64::from(job.input_tokens);
                let id = WorkerId(worker as u32);
                let coming = match &self.beliefs {
                    Beliefs::Events { unconfirmed } => unconfirmed
                        .as_ref()
                        .map(|it| it.insert(id, &job.prefix_keys)),
                    Beliefs::Predicted(predicted) => {
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
            News::FirstToken => {
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
            News::Ended => {
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

    /// Frees what counts no more.
    pub(super) fn sweep(&self, now: Duration) {
        match &self.beliefs {
            Beliefs::Events { unconfirmed } => {
                if let Some(unconfirmed) = unconfirmed {
                    unconfirmed.remove_expired(self.born + now);
                }
            }
            Beliefs::Predicted(predicted) => predicted.remove_expired(self.born + now, |_| true),
        }
    }

    fn held<'a>(&'a self, now: Duration, job: &'a Job, told: &Told) -> Held<'a> {
        let holders_max = self.routing.holders as usize;
        match &self.beliefs {
            Beliefs::Events { unconfirmed } => {
                let mut tokens = told.tokens(job);
                if let Some(unconfirmed) = unconfirmed {
                    let coming =
                        unconfirmed.overlap(self.born + now, &job.prefix_keys, holders_max);
                    for holder in coming {
                        let known = &mut tokens[holder.worker.0 as usize];
                        *known = (*known).max(tokens_of(&job.blocks, holder.blocks as usize));
                    }
                }
                Held::exact(tokens, holders_max, job.seed)
            }
            Beliefs::Predicted(predicted) => Held::predicted(predicted, job, holders_max),
        }
    }

    fn candidates(&self, held: &Held<'_>, job: &Job) -> Vec<Candidate> {
        let loads = self.loads.iter().enumerate();
        loads
            .map(|(place, load)| Candidate {
                requests: load.requests,
                pending_tokens: load.queued_tokens,
                active_tokens: load.active_tokens,
                cached_tokens: held.tokens(place),
                tie: drawn(job.seed, place),
            })
            .collect()
    }
}

/// What each worker holds of one prompt.
enum Held<'a> {
    Exact {
        tokens: Vec<u32>,
        places: SmallVec<[usize; 8]>,
    },
    /// The deepest holders are known, and the others looked up when asked for.
    Predicted {
        index: &'a PredictedIndex,
        job: &'a Job,
        places: SmallVec<[usize; 8]>,
        max_cached_elsewhere: usize,
    },
}

impl<'a> Held<'a> {
    fn exact(tokens: Vec<u32>, holders_max: usize, seed: u64) -> Self {
        let mut places: SmallVec<[usize; 8]> = (0..tokens.len())
            .filter(|place| tokens[*place] > 0)
            .collect();
        let order = |place: &usize| (u32::MAX - tokens[*place], drawn(seed, *place));
        if places.len() > holders_max && holders_max > 0 {
            places.select_nth_unstable_by_key(holders_max - 1, order);
        }
        places.truncate(holders_max);
        Held::Exact { tokens, places }
    }

    fn predicted(index: &'a PredictedIndex, job: &'a Job, holders_max: usize) -> Self {
        let overlap = index.overlap(&job.blocks, holders_max, job.seed);
        let max_cached_elsewhere = match overlap.last() {
            Some(last) if overlap.len() == holders_max => last.blocks as usize,
            _ => 0,
        };
        Held::Predicted {
            index,
            job,
            places: overlap.iter().map(|it| it.worker.0 as usize).collect(),
            max_cached_elsewhere,
        }
    }

    fn places(&self) -> &[usize] {
        match self {
            Held::Exact { places, .. } | Held::Predicted { places, .. } => places,
        }
    }

    fn tokens(&self, place: usize) -> u32 {
        match self {
            Held::Exact { tokens, .. } => tokens[place],
            Held::Predicted {
                index,
                job,
                places,
                max_cached_elsewhere,
            } => {
                let asked = if places.contains(&place) {
                    &job.blocks[..]
                } else {
                    &job.blocks[..*max_cached_elsewhere]
                };
                let depth = index.depth(WorkerId(place as u32), asked);
                tokens_of(&job.blocks, depth as usize)
            }
        }
    }
}

/// The modelled fleet as a decision sees it.
struct Seen<'a> {
    loads: &'a [Load],
    held: &'a Held<'a>,
}

impl View for Seen<'_> {
    fn len(&self) -> usize {
        self.loads.len()
    }

    fn state(&self, place: usize) -> State {
        let load = &self.loads[place];
        State {
            is_usable: true,
            requests: load.requests,
            queued_tokens: load.queued_tokens,
            decode_tokens: load.decode_tokens,
        }
    }

    fn identity(&self, place: usize) -> u64 {
        drawn(0, place)
    }

    fn prefix_owners(&self) -> &[usize] {
        self.held.places()
    }

    fn cached(&self, place: usize) -> Cached {
        Cached::in_gpu(self.held.tokens(place))
    }
}

/// Another order of workers for each request, so that ties don't always fall on the same ones.
fn drawn(seed: u64, place: usize) -> u64 {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    bytes[8..].copy_from_slice(&(place as u64).to_le_bytes());
    xxhash_rust::xxh3::xxh3_64(&bytes)
}
