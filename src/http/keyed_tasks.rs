//! One task for each key of a set that changes: a probe for each worker, a subscriber for each rank.
//!
//! A task is meant to run until its key is removed. One that exits before (because it panicked) is
//! logged as an error, counted and restarted after a pause.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::future::Future;
use std::hash::Hash;
use std::time::Duration;

use tokio::task::JoinError;
use tokio::time::Instant;
use tokio_util::task::JoinMap;
use tracing::error;

use super::drain::Tasks;
use crate::observe;

/// A task that panics at once each time must neither use up a core nor fill the log.
const RESTART_PAUSE: Duration = Duration::from_secs(5);

/// The running tasks. Dropping this ends them all.
#[derive(Debug)]
pub struct KeyedTasks<K> {
    /// What one of them is, for the log and the metric of panics.
    name: &'static str,
    tasks: Tasks,
    restart_pause: Duration,
    running: JoinMap<K, ()>,
    /// Every key that has a task, with the time to restart it if the task exited by itself.
    keys: BTreeMap<K, Option<Instant>>,
}

impl<K: Ord + Hash + Clone + Debug + Send + 'static> KeyedTasks<K> {
    pub fn new(name: &'static str, tasks: Tasks) -> Self {
        tasks.supervisor().show(name);
        Self {
            name,
            tasks,
            restart_pause: RESTART_PAUSE,
            running: JoinMap::new(),
            keys: BTreeMap::new(),
        }
    }

    /// Ends the tasks whose keys are not in `wanted`, starts one for each new key, and restarts those
    /// whose pause is over. Other tasks are left alone.
    pub fn set_keys<F>(&mut self, wanted: &BTreeSet<K>, mut start: impl FnMut(&K) -> F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        self.running.abort_matching(|key| !wanted.contains(key));
        let now = Instant::now();
        self.keys.retain(|key, restart_at| {
            wanted.contains(key) && restart_at.is_none_or(|restart_at| now < restart_at)
        });
        for key in wanted {
            if !self.keys.contains_key(key) {
                self.keys.insert(key.clone(), None);
                let task = self.tasks.track_until_stopped(start(key));
                self.running.spawn(key.clone(), task);
            }
        }
    }

    /// Resolves when a task that exited by itself should be restarted, which [`Self::set_keys`] does.
    /// Cancel safe.
    pub async fn restart_due(&mut self) {
        loop {
            let next = self.keys.values().flatten().min().copied();
            let pause = observe::sleep_until(next.map(Instant::into_std));
            tokio::select! {
                Some((key, result)) = self.running.join_next() => {
                    self.on_exit(&key, result.err());
                }
                () = pause => return,
            }
        }
    }

    /// A task whose key was removed has no entry any more, and its exit is ignored.
    fn on_exit(&mut self, key: &K, error: Option<JoinError>) {
        let Some(restart_at) = self.keys.get_mut(key) else {
            return;
        };
        *restart_at = Some(Instant::now() + self.restart_pause);
        if error.as_ref().is_some_and(JoinError::is_panic) {
            self.tasks.supervisor().on_panic(self.name);
        }
        if !self.tasks.is_stopping() {
            let (pause, error) = (self.restart_pause, error.map(|error| error.to_string()));
            error!(
                task = self.name,
                ?key,
                error,
                ?pause,
                "background task exited; restarting it after a pause"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;
    use std::sync::Arc;

    use super::*;

    #[tokio::test]
    async fn a_key_has_one_task_for_as_long_as_it_is_wanted() {
        let tasks = Tasks::default();
        let mut keyed = KeyedTasks::new("test", tasks.clone());
        let alive = Arc::new(());
        let mut started = Vec::new();
        for wanted in [vec![1, 2], vec![2, 3], vec![3], vec![2, 3]] {
            keyed.set_keys(&wanted.into_iter().collect(), |key| {
                started.push(*key);
                let alive = alive.clone();
                async move {
                    let _alive = alive;
                    pending().await
                }
            });
        }
        assert_eq!(started, [1, 2, 3, 2]);
        drop(keyed);
        assert_eq!(tasks.drain(Duration::from_secs(10)).await, 0);
        assert_eq!(Arc::strong_count(&alive), 1);
    }

    #[tokio::test]
    async fn a_task_that_exited_by_itself_is_restarted_after_a_pause() {
        let tasks = Tasks::default();
        let mut keyed = KeyedTasks::new("test", tasks.clone());
        keyed.restart_pause = Duration::from_millis(50);
        let wanted = BTreeSet::from([1, 2, 3]);
        let mut started = Vec::new();
        let mut set_keys = |keyed: &mut KeyedTasks<i32>| {
            let mut now_started = Vec::new();
            keyed.set_keys(&wanted, |key| {
                now_started.push(*key);
                let key = *key;
                async move {
                    match key {
                        1 => panic!("on purpose"),
                        2 => {}
                        _ => pending().await,
                    }
                }
            });
            started.push(now_started);
        };
        set_keys(&mut keyed);
        tokio::task::yield_now().await;
        // Not at once, however often the keys are set.
        set_keys(&mut keyed);
        let start = Instant::now();
        for _ in 0..2 {
            keyed.restart_due().await;
            set_keys(&mut keyed);
        }
        assert!(start.elapsed() >= Duration::from_millis(25));
        let again = started.split_off(2).concat();
        assert_eq!(started, [vec![1, 2, 3], vec![]]);
        let again = BTreeSet::from_iter(again);
        assert_eq!(again, BTreeSet::from([1, 2]));
        drop(keyed);
        assert_eq!(tasks.drain(Duration::from_secs(10)).await, 0);
    }

    #[tokio::test]
    async fn the_end_of_a_task_whose_key_was_removed_restarts_nothing() {
        let mut keyed = KeyedTasks::new("test", Tasks::default());
        keyed.restart_pause = Duration::ZERO;
        let pending = |_: &i32| pending();
        for wanted in [&[1][..], &[], &[1]] {
            keyed.set_keys(&wanted.iter().copied().collect(), pending);
        }
        let due = tokio::time::timeout(Duration::from_millis(50), keyed.restart_due());
        assert!(due.await.is_err());
        assert_eq!(keyed.keys, BTreeMap::from([(1, None)]));
    }
}
