//! Which dp ranks requests can be pinned to, by worker and API. Pure.

use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;

use super::engine::RankPinning;
use super::events::Events;
use super::status::Status;
use crate::ids::{RankPlace, WorkerIndex};

/// What engines take the header `x-data-parallel-rank` with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PinnedApi {
    /// Chat, completions and Messages.
    Chat,
    Responses,
}

/// How many dp ranks of a worker requests of an API can be pinned to: all of them, or none.
pub(super) fn pinnable_ranks(status: &Status, api: PinnedApi) -> u32 {
    let facts = &status.facts;
    let count = status.event_ranks() as u32;
    let are_all = match &status.worker.events {
        Events::Off | Events::At(_) => true,
        // A rank whose publisher cannot be used is a rank too, and then it is not known how many there are.
        Events::Auto => {
            facts.unusable_events.is_empty() && facts.event_endpoints.keys().copied().eq(0..count)
        }
    };
    let fits = || status.worker.id.at_rank(count - 1).is_some();
    let takes_rank = || match facts.capabilities().rank_pinning {
        RankPinning::Always => true,
        RankPinning::ByVersion { responses_since } => match api {
            PinnedApi::Chat => facts.version.is_some(),
            PinnedApi::Responses => {
                status.speaks_chat_only()
                    || facts.version.as_deref().and_then(release) >= Some(responses_since)
            }
        },
    };
    let refuses = status.worker.refuses_ranks.load(Relaxed);
    if count > 1 && are_all && fits() && takes_rank() && !refuses {
        count
    } else {
        0
    }
}

/// Major and minor number of a version.
fn release(version: &str) -> Option<(u32, u32)> {
    let mut numbers = version.trim_start_matches('v').split('.');
    let major = numbers.next()?.parse().ok()?;
    let minor = numbers.next()?;
    let end = minor.find(|c: char| !c.is_ascii_digit());
    let minor = minor[..end.unwrap_or(minor.len())].parse().ok()?;
    Some((major, minor))
}

/// Each worker's places, where some worker has several.
#[derive(Debug)]
pub(super) struct RankPlaces {
    /// By place the worker's index and its rank.
    places: Vec<(WorkerIndex, Option<u32>)>,
    /// For each worker its first place; then the end of all places.
    first: Vec<RankPlace>,
    /// Every worker has as many ranks as each other one, and says so itself.
    pub(super) are_alike: bool,
}

impl RankPlaces {
    /// `ranks`: for each worker how many ranks can be pinned to. `None` if that is none for all workers. `are_reported`: the
    /// engines report their ranks themselves.
    pub(super) fn new(ranks: &[u32], are_reported: bool) -> Option<Self> {
        if ranks.iter().all(|ranks| *ranks == 0) {
            return None;
        }
        let (mut places, mut first) = (Vec::new(), vec![RankPlace::new(0)]);
        for (worker_index, ranks) in WorkerIndex::range(0..ranks.len()).zip(ranks) {
            match ranks {
                0 => places.push((worker_index, None)),
                _ => places.extend((0..*ranks).map(|rank| (worker_index, Some(rank)))),
            }
            first.push(RankPlace::new(places.len()));
        }
        let are_alike = are_reported && ranks.windows(2).all(|two| two[0] == two[1]);
        Some(Self {
            places,
            first,
            are_alike,
        })
    }

    pub(super) fn len(&self) -> usize {
        self.places.len()
    }

    /// The worker of a place, and the rank to pin a request to.
    #[inline]
    pub(super) fn at(&self, place: RankPlace) -> (WorkerIndex, Option<u32>) {
        self.places[place.get()]
    }

    #[inline]
    pub(super) fn of_workers(&self, workers: Range<WorkerIndex>) -> Range<RankPlace> {
        self.first[workers.start.get()]..self.first[workers.end.get()]
    }

    #[inline]
    pub(super) fn of_worker(&self, worker_index: WorkerIndex) -> Range<RankPlace> {
        let position = worker_index.get();
        self.first[position]..self.first[position + 1]
    }
}
