//! The dp ranks of a worker: engines with caches of their own behind one address.

use std::convert::Infallible;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use hyper::HeaderMap;
use serde_json::{Map, Value};
use tokio::task::JoinSet;

use super::driver::{CacheContents, Driver};
use super::error::ApiError;
use super::publisher;
use super::publisher::outlet::{BoundEndpoints, Outlet};
use super::publisher::sockets::Publisher;
use super::settings::Settings;
use crate::sim::engine::{Counters, Engine, Gauges};
use crate::sim::fault::kv::KvFaults;

#[derive(Debug)]
pub(crate) struct Ranks {
    ranks: Vec<Arc<Driver>>,
    /// Rotates the choice among equally loaded ranks.
    next_rank: AtomicUsize,
}

/// The tasks of the ranks.
#[derive(Debug)]
pub(crate) struct Engines {
    drivers: Vec<Arc<Driver>>,
    publishers: Vec<Publisher>,
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
        let outlet = publisher
            .as_ref()
            .map(|publisher| Arc::clone(&publisher.outlet));
        publishers.extend(publisher);
        let engine = Engine::new(settings.engine());
        ranks.push(Arc::new(Driver::new(engine, outlet)));
    }
    let engines = Engines {
        drivers: ranks.clone(),
        publishers,
    };
    let next_rank = AtomicUsize::new(0);
    Ok((Ranks { ranks, next_rank }, engines))
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
    /// The rank in the request header `x-data-parallel-rank`, which is ignored if it is not a number.
    pub(crate) fn pinned(&self, headers: &HeaderMap) -> Result<Option<usize>, ApiError> {
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
                Err(ApiError::bad_request(message))
            }
        }
    }

    /// The driver of the pinned rank, or of a least loaded one.
    pub(crate) fn driver(&self, pinned: Option<usize>) -> &Arc<Driver> {
        let size = self.ranks.len();
        let load = |rank: &usize| {
            let gauges = self.ranks[*rank].engine().gauges();
            // Weights of vLLM's load balancer.
            gauges.waiting * 4 + gauges.running
        };
        let rank = pinned.unwrap_or_else(|| {
            let first = self.next_rank.fetch_add(1, Ordering::Relaxed);
            let ranks = (0..size).map(|rank| rank.wrapping_add(first) % size);
            ranks.min_by_key(load).expect("there is at least one rank")
        });
        &self.ranks[rank]
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (Gauges, Counters)> {
        self.ranks.iter().map(|rank| {
            let engine = rank.engine();
            (engine.gauges(), engine.counters())
        })
    }

    /// The sum over all ranks, and the mean KV cache usage.
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

    /// The adapters of running requests, and of waiting ones.
    pub(crate) fn adapters(&self) -> (Vec<String>, Vec<String>) {
        let mut found = (Vec::new(), Vec::new());
        for rank in &self.ranks {
            let (running, waiting) = rank.engine().adapters();
            found.0.extend(running);
            found.1.extend(waiting);
        }
        for names in [&mut found.0, &mut found.1] {
            names.sort();
            names.dedup();
        }
        found
    }

    pub(crate) fn counters(&self) -> Counters {
        self.iter().map(|(_, counters)| counters).sum()
    }

    /// Clears all caches. False if any rank could not clear its cache.
    pub(crate) fn reset(&self) -> bool {
        let reset = self.ranks.iter().filter(|rank| rank.engine().reset());
        reset.count() == self.ranks.len()
    }

    /// The engine ids of the ranks.
    pub(crate) fn engine_ids(&self) -> impl Iterator<Item = &str> {
        self.ranks.iter().map(|rank| rank.id.as_str())
    }

    /// Prompt tokens that are cached on no rank.
    pub(crate) fn missing_tokens(&self, prompt: &[u32], salt: u64) -> usize {
        let ranks = self.ranks.iter();
        let missing = ranks.map(|rank| rank.engine().missing_tokens(prompt, salt));
        missing.min().unwrap_or(prompt.len())
    }

    /// The engine cores die.
    pub(crate) fn kill(&self) {
        self.ranks.iter().for_each(|rank| rank.kill());
    }

    pub(crate) fn set_faults(&self, faults: &KvFaults) {
        for outlet in self.outlets() {
            outlet.set_faults(faults);
        }
    }

    pub(crate) fn bound(&self) -> Vec<BoundEndpoints> {
        self.outlets().map(|outlet| outlet.bound.clone()).collect()
    }

    pub(crate) fn cache_contents(&self, rank: usize) -> CacheContents {
        self.ranks[rank].cache_contents()
    }

    pub(crate) fn all_cache_contents(&self) -> Vec<CacheContents> {
        let ranks = self.ranks.iter();
        ranks.map(|rank| rank.cache_contents()).collect()
    }

    /// The answer to `GET /kv_event_sources`: by rank, and empty if events are off.
    pub(crate) fn sources(&self) -> Value {
        let source = |(rank, outlet): (usize, &Outlet)| (rank.to_string(), outlet.source());
        let sources: Map<String, Value> = self.outlets().enumerate().map(source).collect();
        Value::Object(sources)
    }

    fn outlets(&self) -> impl Iterator<Item = &Outlet> {
        self.ranks.iter().filter_map(|rank| rank.outlet())
    }
}
