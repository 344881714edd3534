//! One task for each of a set of keys that changes.
//!
//! They are meant to run until they are not wanted any more. One that ends before (it panicked) is told
//! of as an error and started anew, after a pause.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::future::Future;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::{CancellationToken, DropGuard};
use tracing::error;

use super::Tasks;

/// What breaks at once each time must not take a core, nor fill the log.
const PAUSE: Duration = Duration::from_secs(5);

/// The tasks that run now. Dropped, it ends them all.
#[derive(Debug)]
pub struct Keyed<K> {
    tasks: Tasks,
    pause: Duration,
    running: BTreeMap<K, Running>,
    started: u64,
    end: mpsc::UnboundedSender<(K, u64)>,
    ends: mpsc::UnboundedReceiver<(K, u64)>,
}

#[derive(Debug)]
struct Running {
    /// Which task of this key it is: an earlier one's end is of no matter.
    number: u64,
    /// It has ended, and is started anew then.
    again_at: Option<Instant>,
    _guard: DropGuard,
}

/// Tells a task's end, however it comes.
struct End<K> {
    of: Option<(K, u64)>,
    end: mpsc::UnboundedSender<(K, u64)>,
}

impl<K> Drop for End<K> {
    fn drop(&mut self) {
        if let Some(of) = self.of.take() {
            let _ = self.end.send(of);
        }
    }
}

impl<K: Ord + Clone + fmt::Debug + Send + 'static> Keyed<K> {
    pub fn new(tasks: Tasks) -> Self {
        let (end, ends) = mpsc::unbounded_channel();
        Self {
            tasks,
            pause: PAUSE,
            running: BTreeMap::new(),
            started: 0,
            end,
            ends,
        }
    }

    /// Ends the tasks of keys that are not wanted any more and starts those that are new. A task that
    /// runs stays as it is.
    pub fn keep<F>(&mut self, wanted: &BTreeSet<K>, mut start: impl FnMut(&K) -> F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        while let Ok((key, number)) = self.ends.try_recv() {
            self.note(&key, number);
        }
        let now = Instant::now();
        self.running.retain(|key, running| {
            wanted.contains(key) && running.again_at.is_none_or(|again_at| now < again_at)
        });
        for key in wanted {
            if self.running.contains_key(key) {
                continue;
            }
            self.started += 1;
            let number = self.started;
            let token = CancellationToken::new();
            let (task, ended) = (start(key), token.clone().cancelled_owned());
            let end = End {
                of: Some((key.clone(), number)),
                end: self.end.clone(),
            };
            self.tasks.spawn_until_stopped(async move {
                let _end = end;
                tokio::select! {
                    () = task => {}
                    () = ended => {}
                }
            });
            let running = Running {
                number,
                again_at: None,
                _guard: token.drop_guard(),
            };
            self.running.insert(key.clone(), running);
        }
    }

    /// Resolves when a task that ended by itself should be started anew, which [`Keyed::keep`] does.
    /// Dropping the future loses nothing.
    pub async fn ended(&mut self) {
        loop {
            let again_at = self
                .running
                .values()
                .filter_map(|running| running.again_at)
                .min();
            let pause = async {
                match again_at {
                    Some(at) => sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                Some((key, number)) = self.ends.recv() => self.note(&key, number),
                () = pause => return,
            }
        }
    }

    fn note(&mut self, key: &K, number: u64) {
        let running = self.running.get_mut(key);
        let Some(running) = running.filter(|running| running.number == number) else {
            return;
        };
        // All of them end then.
        if !self.tasks.is_stopping() {
            error!(
                ?key,
                pause = ?self.pause,
                "a task ended that should run on; it is started anew after a pause"
            );
        }
        running.again_at = Some(Instant::now() + self.pause);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[tokio::test]
    async fn a_key_has_one_task_for_as_long_as_it_is_wanted() {
        let tasks = Tasks::default();
        let mut keyed = Keyed::new(tasks.clone());
        let alive = Arc::new(());
        let mut started = Vec::new();
        for wanted in [vec![1, 2], vec![2, 3], vec![3], vec![2, 3]] {
            keyed.keep(&wanted.into_iter().collect(), |key| {
                started.push(*key);
                let alive = alive.clone();
                async move {
                    let _alive = alive;
                    std::future::pending().await
                }
            });
        }
        assert_eq!(started, [1, 2, 3, 2]);
        drop(keyed);
        assert_eq!(tasks.drain(Duration::from_secs(10)).await, 0);
        assert_eq!(Arc::strong_count(&alive), 1);
    }

    #[tokio::test]
    async fn a_task_that_ended_by_itself_is_started_anew_after_a_pause() {
        let tasks = Tasks::default();
        let mut keyed = Keyed::new(tasks.clone());
        keyed.pause = Duration::from_millis(50);
        let wanted = BTreeSet::from([1, 2, 3]);
        let mut started = Vec::new();
        let mut keep = |keyed: &mut Keyed<i32>| {
            let mut now_started = Vec::new();
            keyed.keep(&wanted, |key| {
                now_started.push(*key);
                let key = *key;
                async move {
                    match key {
                        1 => panic!("on purpose"),
                        2 => {}
                        _ => std::future::pending().await,
                    }
                }
            });
            started.push(now_started);
        };
        keep(&mut keyed);
        tokio::task::yield_now().await;
        // Not at once, however often it is looked at.
        keep(&mut keyed);
        let start = Instant::now();
        for _ in 0..2 {
            keyed.ended().await;
            keep(&mut keyed);
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
    async fn the_end_of_a_task_that_was_not_wanted_any_more_is_of_no_matter() {
        let tasks = Tasks::default();
        let mut keyed = Keyed::new(tasks);
        let pending = |_: &i32| std::future::pending();
        keyed.keep(&BTreeSet::from([1]), pending);
        keyed.keep(&BTreeSet::new(), pending);
        keyed.keep(&BTreeSet::from([1]), pending);
        let (key, number) = keyed.ends.recv().await.unwrap();
        keyed.note(&key, number);
        assert_eq!((key, number), (1, 1));
        assert!(keyed.running[&1].again_at.is_none());
    }
}
