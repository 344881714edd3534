//! The data-parallel ranks of a worker: engines with caches of their own behind one address.

use std::convert::Infallible;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use hyper::HeaderMap;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use tokio::task::JoinSet;

use super::driver::Driver;
use super::problem::Problem;
use super::publisher::{self, Outlet, Publisher};
use super::settings::Settings;
use crate::sim::engine::cache::Held;
use crate::sim::engine::{Counters, Engine, Gauges};
use crate::sim::fault::kv::KvFaults;

#[derive(Debug)]
pub(crate) struct Ranks {
    ranks: Vec<Rank>,
    /// Whose turn it is among equals.
    turn: AtomicUsize,
}

#[derive(Debug)]
struct Rank {
    driver: Arc<Driver>,
    outlet: Option<Arc<Outlet>>,
}

/// What must be polled for the ranks to do anything.
#[derive(Debug)]
pub(crate) struct Engines {
    drivers: Vec<Arc<Driver>>,
    publishers: Vec<Publisher>,
}

/// What a rank holds, and what it has told of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Truth {
    /// In the order of names. What the step that is being computed evicts, and a reset, are seen here
    /// before they are told.
    pub held: Vec<Held>,
    /// The number of the last published batch; none if there was none yet, or if events are off.
    pub last_sequence: Option<u64>,
}

pub(crate) async fn bind(settings: &Settings) -> io::Result<(Ranks, Engines)> {
    let mut ranks = Vec::new();
    let mut publishers = Vec::new();
    for rank in 0..settings.data_parallel_size.get() {
        let publisher = publisher::bind(
            &settings.kv,
            rank,
            settings.block_tokens.get(),
            &settings.faults.kv,
        )
        .await?;
        let outlet = publisher.as_ref().map(Publisher::outlet);
        publishers.extend(publisher);
        let engine = Engine::new(settings.engine());
        let driver = Arc::new(Driver::new(engine, outlet.clone()));
        ranks.push(Rank { driver, outlet });
    }
    let engines = Engines {
        drivers: ranks.iter().map(|rank| Arc::clone(&rank.driver)).collect(),
        publishers,
    };
    let turn = AtomicUsize::new(0);
    Ok((Ranks { ranks, turn }, engines))
}

impl Engines {
    pub(crate) fn spawn(self) -> JoinSet<Infallible> {
        let mut tasks = JoinSet::new();
        for driver in self.drivers {
            tasks.spawn(async move { driver.run().await });
        }
        for publisher in self.publishers {
            tasks.spawn(publisher.run());
        }
        tasks
    }
}

impl Ranks {
    /// The rank that a request names in a header; one that is no number is not looked at.
    pub(crate) fn pinned(&self, headers: &HeaderMap) -> Result<Option<usize>, Problem> {
        let header = headers.get("x-data-parallel-rank");
        let named = header.and_then(|value| value.to_str().ok());
        let Some(rank) = named.and_then(|value| value.trim().parse::<i64>().ok()) else {
            return Ok(None);
        };
        let size = self.ranks.len();
        match usize::try_from(rank) {
            Ok(rank) if rank < size => Ok(Some(rank)),
            Ok(_) | Err(_) => {
                let message = format!("data_parallel_rank {rank} is out of range [0, {size}).");
                Err(Problem::bad_request(message))
            }
        }
    }

    /// The driver of the pinned rank, or of one that has the least to do.
    pub(crate) fn driver(&self, pinned: Option<usize>) -> &Arc<Driver> {
        let size = self.ranks.len();
        let load = |place: &usize| {
            let gauges = self.ranks[*place].driver.gauges();
            // A waiting request weighs more, as in vLLM.
            gauges.waiting * 4 + gauges.running
        };
        let place = pinned.unwrap_or_else(|| {
            let turn = self.turn.fetch_add(1, Ordering::Relaxed);
            let places = (0..size).map(|place| place.wrapping_add(turn) % size);
            places.min_by_key(load).expect("there is at least one rank")
        });
        &self.ranks[place].driver
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (Gauges, Counters)> {
        let state = |rank: &Rank| (rank.driver.gauges(), rank.driver.counters());
        self.ranks.iter().map(state)
    }

    /// Of all ranks; how full they are is a mean.
    pub(crate) fn gauges(&self) -> Gauges {
        let mut sum = Gauges::default();
        for (gauges, _) in self.iter() {
            sum.running += gauges.running;
            sum.waiting += gauges.waiting;
            sum.kv_usage += gauges.kv_usage / self.ranks.len() as f64;
            sum.kept += gauges.kept;
            sum.kept_blocks += gauges.kept_blocks;
        }
        sum
    }

    pub(crate) fn counters(&self) -> Counters {
        self.iter().map(|(_, counters)| counters).sum()
    }

    /// False if any rank could not.
    pub(crate) fn reset(&self) -> bool {
        let reset = self.ranks.iter().filter(|rank| rank.driver.reset());
        reset.count() == self.ranks.len()
    }

    /// The names by which other engines know them.
    pub(crate) fn engine_ids(&self) -> impl Iterator<Item = &str> {
        self.ranks.iter().map(|rank| rank.driver.id())
    }

    /// Tokens of a prompt that no rank holds.
    pub(crate) fn missing_tokens(&self, prompt: &[u32], salt: u64) -> usize {
        let missing = |rank: &Rank| rank.driver.missing_tokens(prompt, salt);
        self.ranks.iter().map(missing).min().unwrap_or(prompt.len())
    }

    /// As when vLLM's engine core dies.
    pub(crate) fn die(&self) {
        self.ranks.iter().for_each(|rank| rank.driver.die());
    }

    pub(crate) fn set_faults(&self, faults: &KvFaults) {
        for outlet in self.outlets() {
            outlet.set_faults(faults);
        }
    }

    pub(crate) fn bound(&self) -> Vec<publisher::Bound> {
        self.outlets().map(|it| it.bound().clone()).collect()
    }

    pub(crate) fn truth(&self, rank: usize) -> Truth {
        self.ranks[rank].driver.truth()
    }

    pub(crate) fn truths(&self) -> Vec<Truth> {
        self.ranks.iter().map(|rank| rank.driver.truth()).collect()
    }

    /// The answer to `GET /kv_event_sources`: by rank, and empty if events are off.
    pub(crate) fn sources(&self) -> Value {
        let source = |(rank, outlet): (usize, &Outlet)| {
            let source = serde_json::to_value(outlet.source());
            (rank.to_string(), source.expect("it has string keys only"))
        };
        let sources: Map<String, Value> = self.outlets().enumerate().map(source).collect();
        Value::Object(sources)
    }

    fn outlets(&self) -> impl Iterator<Item = &Outlet> {
        self.ranks.iter().filter_map(|rank| rank.outlet.as_deref())
    }
}
