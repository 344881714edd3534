//! Numbers for the workers and ranks that messages name. Pure.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;

use super::wire;

/// A worker, or one rank of it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WorkerKey {
    /// `host:port`, as in the fleet.
    pub address: Arc<str>,
    /// `None`: all ranks together.
    pub rank: Option<u32>,
}

impl WorkerKey {
    /// A worker, all of its ranks together.
    pub fn worker(address: &Arc<str>) -> Self {
        Self {
            address: address.clone(),
            rank: None,
        }
    }

    pub fn rank(address: &Arc<str>, rank: u32) -> Self {
        Self {
            address: address.clone(),
            rank: Some(rank),
        }
    }
}

/// A number is given to another worker only after this time, so that no message on its way means the wrong one.
const REUSE_AFTER: Duration = Duration::from_secs(60);

/// The numbers that this replica uses. Other replicas are sent all of them when they connect, and each new one before
/// its first use.
#[derive(Debug, Default)]
pub struct Numbers {
    by_key: FxHashMap<WorkerKey, u32>,
    keys: Vec<Option<WorkerKey>>,
    /// Numbers of workers that left, with the time from which they may be used again.
    free: VecDeque<(Instant, u32)>,
    /// Numbers that the other replicas have not been sent yet.
    unannounced: Vec<u32>,
}

impl Numbers {
    /// The worker's number; a new one if it has none.
    pub fn number(&mut self, now: Instant, key: &WorkerKey) -> u32 {
        if let Some(number) = self.by_key.get(key) {
            return *number;
        }
        let number = match self.free.front() {
            Some((at, number)) if *at <= now => {
                let number = *number;
                self.free.pop_front();
                number
            }
            _ => {
                self.keys.push(None);
                (self.keys.len() - 1) as u32
            }
        };
        self.keys[number as usize] = Some(key.clone());
        self.by_key.insert(key.clone(), number);
        self.unannounced.push(number);
        number
    }

    pub fn known(&self, key: &WorkerKey) -> Option<u32> {
        self.by_key.get(key).copied()
    }

    pub fn key(&self, number: u32) -> Option<&WorkerKey> {
        self.keys.get(number as usize)?.as_ref()
    }

    /// Gives up the numbers of workers that `is_listed` does not know.
    pub fn forget(&mut self, now: Instant, mut is_listed: impl FnMut(&str) -> bool) {
        for (number, slot) in (0..).zip(&mut self.keys) {
            if let Some(key) = slot.take_if(|key| !is_listed(&key.address)) {
                self.by_key.remove(&key);
                self.unannounced
                    .retain(|unannounced| *unannounced != number);
                self.free.push_back((now + REUSE_AFTER, number));
            }
        }
    }

    /// One more than the largest number.
    pub fn len(&self) -> usize {
        self.keys.len()
    }

    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// The names that the other replicas have not been sent yet, if there are any.
    pub fn take_unannounced(&mut self) -> Option<wire::WorkerNames> {
        let unannounced = std::mem::take(&mut self.unannounced);
        let workers: Vec<_> = unannounced
            .iter()
            .filter_map(|number| self.name(*number))
            .collect();
        (!workers.is_empty()).then_some(wire::WorkerNames { workers })
    }

    pub fn all(&self) -> wire::WorkerNames {
        let workers = (0..self.keys.len() as u32).filter_map(|number| self.name(number));
        wire::WorkerNames {
            workers: workers.collect(),
        }
    }

    fn name(&self, number: u32) -> Option<wire::WorkerName> {
        let key = self.key(number)?;
        Some(wire::WorkerName {
            number,
            address: key.address.to_string(),
            rank: key.rank,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe;

    fn key(address: &str, rank: Option<u32>) -> WorkerKey {
        WorkerKey {
            address: address.into(),
            rank,
        }
    }

    #[test]
    fn a_worker_keeps_its_number_and_is_announced_once() {
        let (mut numbers, now) = (Numbers::default(), observe::now());
        assert_eq!(numbers.number(now, &key("a:1", None)), 0);
        assert_eq!(numbers.number(now, &key("a:1", Some(0))), 1);
        assert_eq!(numbers.number(now, &key("a:1", None)), 0);
        let sent = numbers.take_unannounced().unwrap();
        assert_eq!(sent, numbers.all());
        assert_eq!(sent.workers.len(), 2);
        assert_eq!(numbers.take_unannounced(), None);
    }

    #[test]
    fn a_number_is_given_to_another_worker_only_after_a_while() {
        let (mut numbers, now) = (Numbers::default(), observe::now());
        numbers.number(now, &key("a:1", None));
        numbers.forget(now, |_| false);
        assert_eq!(numbers.take_unannounced(), None);
        assert_eq!(numbers.number(now, &key("b:1", None)), 1);
        let later = now + REUSE_AFTER;
        assert_eq!(numbers.number(later, &key("c:1", None)), 0);
        assert_eq!(numbers.number(later, &key("d:1", None)), 2);
    }

    #[test]
    fn workers_that_come_and_go_for_hours_take_no_more_numbers() {
        let (mut numbers, start) = (Numbers::default(), observe::now());
        for second in 0..7_200 {
            let now = start + Duration::from_secs(second);
            let address = format!("10.0.0.1:{second}");
            numbers.number(now, &key(&address, None));
            numbers.forget(now, |listed| listed == address);
        }
        assert!(numbers.len() < 70, "{}", numbers.len());
        assert_eq!(numbers.all().workers.len(), 1);
    }
}
