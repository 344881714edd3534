//! Threads for prompts that are too long to tokenize on an I/O thread.
//!
//! There are few threads, because each keeps caches of about 100 MB after much text. A full queue refuses a task at
//! once. A task whose caller has stopped waiting is not started.

use std::time::Duration;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, mpsc};
use std::{io, thread};

use parking_lot::Mutex;
use prometheus::IntGauge;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;

use crate::observe::metrics::{Counted, Registry};

/// Threads for texts that are too long to be tokenised on an I/O thread.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Settings {
    /// Number of threads. Each tokenises about 10 MB/s.
    #[schemars(range(min = 1, max = 256))]
    pub threads: u32,
    /// Prompts that wait for a thread; more are routed by prediction.
    #[serde(skip)]
    pub max_queued: u32,
    /// A request waits this long for its tokens, the queue included; then it is routed by prediction. A text of
    /// 5 MB takes 500 ms.
    #[serde(skip)]
    pub timeout: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            threads: 2,
            // With both threads busy the last of these would wait its time in vain.
            max_queued: 64,
            timeout: Duration::from_millis(500),
        }
    }
}

type Task = Box<dyn FnOnce() + Send>;

/// Runs tasks on its own threads, which end when the pool is dropped.
#[derive(Debug)]
pub struct Pool {
    queue: mpsc::SyncSender<Task>,
    queued: IntGauge,
    #[cfg(test)]
    panics: prometheus::IntCounter,
}

/// The queue is full.
#[derive(Debug, PartialEq, Eq)]
pub struct QueueFull;

impl Pool {
    pub fn start(settings: &Settings, registry: &Registry) -> io::Result<Self> {
        let (queue, tasks) = mpsc::sync_channel::<Task>(settings.max_queued as usize);
        let tasks = Arc::new(Mutex::new(tasks));
        let panics = registry.counter(
            "warmroute_tokenizer_pool_panics_total",
            "Panics of a tokenizer. The prompt is routed without token ids.",
        );
        for number in 1..=settings.threads.max(1) {
            let (tasks, panics) = (tasks.clone(), panics.clone());
            thread::Builder::new()
                .name(format!("tokens-{number}"))
                .spawn(move || {
                    loop {
                        // One thread waits for a task, the others wait for the lock.
                        let task = tasks.lock().recv();
                        match task {
                            // A panic must not end the thread. The waiting request sees its channel closed.
                            Ok(task) => {
                                if catch_unwind(AssertUnwindSafe(task)).is_err() {
                                    panics.inc();
                                }
                            }
                            Err(mpsc::RecvError) => return,
                        }
                    }
                })?;
        }
        Ok(Self {
            queue,
            #[cfg(test)]
            panics,
            queued: registry.gauge(
                "warmroute_tokenizer_pool_queued",
                "Long prompts that wait for a tokenizer thread.",
            ),
        })
    }

    /// Runs `work` on one of the threads, unless the receiver is dropped before it starts.
    pub fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<oneshot::Receiver<T>, QueueFull> {
        let (sender, receiver) = oneshot::channel();
        let queued = Counted::new(&self.queued);
        let task = move || {
            drop(queued);
            if !sender.is_closed() {
                let _ = sender.send(work());
            }
        };
        self.queue.try_send(Box::new(task)).map_err(|_| QueueFull)?;
        Ok(receiver)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use super::*;

    fn pool(threads: u32, max_queued: u32) -> Pool {
        let settings = Settings {
            threads,
            max_queued,
            ..Settings::default()
        };
        Pool::start(&settings, &Registry::default()).unwrap()
    }

    #[tokio::test]
    async fn tasks_run_in_parallel_on_pool_threads() {
        let pool = pool(2, 4);
        // Each task waits for the other.
        let meet = Arc::new(Barrier::new(2));
        let results: Vec<_> = (0..2)
            .map(|number| {
                let meet = meet.clone();
                let work = move || {
                    meet.wait();
                    (number, thread::current().name().map(str::to_owned))
                };
                pool.run(work).unwrap()
            })
            .collect();
        for (number, result) in results.into_iter().enumerate() {
            let (task_number, name) = result.await.unwrap();
            assert_eq!(task_number, number);
            assert!(name.unwrap().starts_with("tokens-"));
        }
    }

    #[tokio::test]
    async fn a_panicking_task_does_not_end_its_thread() {
        let pool = pool(1, 4);
        for _ in 0..3 {
            let panicked = pool.run(|| -> u32 { panic!("a tokenizer bug") }).unwrap();
            assert!(panicked.await.is_err());
        }
        assert_eq!(pool.run(|| 7).unwrap().await, Ok(7));
        assert_eq!(pool.panics.get(), 3);
    }

    #[tokio::test]
    async fn a_full_queue_refuses_tasks_and_abandoned_tasks_are_not_started() {
        let pool = pool(1, 1);
        let started = Arc::new(Barrier::new(2));
        let end = Arc::new(Barrier::new(2));
        let busy = {
            let (started, end) = (started.clone(), end.clone());
            let work = move || {
                started.wait();
                end.wait();
            };
            pool.run(work).unwrap()
        };
        started.wait();
        let abandoned = pool
            .run(|| unreachable!("its receiver was dropped"))
            .unwrap();
        assert_eq!(pool.run(|| ()).unwrap_err(), QueueFull);
        assert_eq!(pool.queued.get(), 1);
        drop::<oneshot::Receiver<()>>(abandoned);
        end.wait();
        busy.await.unwrap();
        // Wait until the thread has skipped the abandoned task.
        let mut answer = None;
        while answer.is_none() {
            answer = pool.run(|| 7).ok();
            tokio::task::yield_now().await;
        }
        assert_eq!(answer.unwrap().await, Ok(7));
        assert_eq!(pool.queued.get(), 0);
    }
}
