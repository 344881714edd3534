//! One task for each of a set of keys that changes.

use std::collections::BTreeMap;
use std::collections::BTreeSet;
use std::future::Future;

use tokio_util::sync::CancellationToken;
use tokio_util::sync::DropGuard;

use super::Tasks;

/// The tasks that run now. Dropped, it ends them all.
#[derive(Debug)]
pub struct Keyed<K> {
    tasks: Tasks,
    running: BTreeMap<K, DropGuard>,
}

impl<K: Ord + Clone> Keyed<K> {
    pub fn new(tasks: Tasks) -> Self {
        Self {
            tasks,
            running: BTreeMap::new(),
        }
    }

    /// Ends the tasks of keys that are not wanted any more and starts those that are new. A task that
    /// runs stays as it is.
    pub fn keep<F>(&mut self, wanted: &BTreeSet<K>, mut start: impl FnMut(&K) -> F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        self.running.retain(|key, _| wanted.contains(key));
        for key in wanted {
            if self.running.contains_key(key) {
                continue;
            }
            let token = CancellationToken::new();
            let (task, ended) = (start(key), token.clone().cancelled_owned());
            self.tasks.spawn_until_stopped(async move {
                tokio::select! {
                    () = task => {}
                    () = ended => {}
                }
            });
            self.running.insert(key.clone(), token.drop_guard());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

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
}
