//! Threads for prompts that are too long to tokenize on an I/O thread.
//!
//! There are few of them, because each keeps caches of about 100 MB once it has seen much text. A full queue
//! refuses work at once; work whose caller has given up is not started.

use std::time::Duration;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, mpsc};
use std::{io, thread};

use parking_lot::Mutex;
use prometheus::IntGauge;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;

use crate::observe::metrics::Registry;
use crate::units::DurationText;

/// Threads for texts that are too long to be tokenised on an I/O thread.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Settings {
    /// Number of threads. Each tokenises about 10 MB/s.
    #[schemars(range(min = 1, max = 256))]
    pub threads: u32,
    /// Prompts that wait for a thread; more are routed by prediction.
    #[schemars(range(min = 1, max = 1048576))]
    pub max_queued: u32,
    /// A request waits this long for its tokens, the queue included; then it is routed by prediction. A text of
    /// 5 MB takes 500 ms.
    #[serde(with = "DurationText")]
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

type Work = Box<dyn FnOnce() + Send>;

/// The threads end when this is dropped.
#[derive(Debug)]
pub struct Pool {
    queue: mpsc::SyncSender<Work>,
    waiting: IntGauge,
    #[cfg(test)]
    panics: prometheus::IntCounter,
}

/// The queue is full.
#[derive(Debug, PartialEq, Eq)]
pub struct Full;

impl Pool {
    pub fn start(settings: &Settings, registry: &Registry) -> io::Result<Self> {
        let (queue, works) = mpsc::sync_channel::<Work>(settings.max_queued as usize);
        let works = Arc::new(Mutex::new(works));
        let panics = registry.counter(
            "warmroute_tokenizer_pool_panics_total",
            "Panics of a tokenizer. The prompt is routed without token ids.",
        );
        for number in 1..=settings.threads.max(1) {
            let (works, panics) = (works.clone(), panics.clone());
            thread::Builder::new()
                .name(format!("tokens-{number}"))
                .spawn(move || {
                    loop {
                        // One thread waits for work, the others wait for the lock.
                        let work = works.lock().recv();
                        match work {
                            // A panic must not end the thread. The waiting request sees its channel closed.
                            Ok(work) => {
                                if catch_unwind(AssertUnwindSafe(work)).is_err() {
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
            waiting: registry.gauge(
                "warmroute_tokenizer_pool_queued",
                "Long prompts that wait for a tokenizer thread.",
            ),
        })
    }

    /// Runs `work` on one of the threads, unless the receiver is dropped before it starts.
    pub fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<oneshot::Receiver<T>, Full> {
        let (tell, told) = oneshot::channel();
        let waiting = self.waiting.clone();
        let work = move || {
            waiting.dec();
            if !tell.is_closed() {
                let _ = tell.send(work());
            }
        };
        self.waiting.inc();
        self.queue.try_send(Box::new(work)).map_err(|_| {
            self.waiting.dec();
            Full
        })?;
        Ok(told)
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
    async fn works_run_on_threads_of_their_own_and_side_by_side() {
        let pool = pool(2, 4);
        // Each waits for the other.
        let meet = Arc::new(Barrier::new(2));
        let asked: Vec<_> = (0..2)
            .map(|number| {
                let meet = meet.clone();
                let work = move || {
                    meet.wait();
                    (number, thread::current().name().map(str::to_owned))
                };
                pool.run(work).unwrap()
            })
            .collect();
        for (number, answer) in asked.into_iter().enumerate() {
            let (told, name) = answer.await.unwrap();
            assert_eq!(told, number);
            assert!(name.unwrap().starts_with("tokens-"));
        }
    }

    #[tokio::test]
    async fn a_work_that_panics_costs_no_thread() {
        let pool = pool(1, 4);
        for _ in 0..3 {
            let fallen = pool.run(|| -> u32 { panic!("an odd text") }).unwrap();
            assert!(fallen.await.is_err());
        }
        assert_eq!(pool.run(|| 7).unwrap().await, Ok(7));
        assert_eq!(pool.panics.get(), 3);
    }

    #[tokio::test]
    async fn what_finds_the_queue_full_is_refused_and_what_nobody_waits_for_is_not_begun() {
        let pool = pool(1, 1);
        let begun = Arc::new(Barrier::new(2));
        let end = Arc::new(Barrier::new(2));
        let busy = {
            let (begun, end) = (begun.clone(), end.clone());
            let work = move || {
                begun.wait();
                end.wait();
            };
            pool.run(work).unwrap()
        };
        begun.wait();
        let forgotten = pool.run(|| unreachable!("nobody waits for it")).unwrap();
        assert_eq!(pool.run(|| ()).unwrap_err(), Full);
        assert_eq!(pool.waiting.get(), 1);
        drop::<oneshot::Receiver<()>>(forgotten);
        end.wait();
        busy.await.unwrap();
        // The thread has gone past what was forgotten.
        let mut answer = None;
        while answer.is_none() {
            answer = pool.run(|| 7).ok();
            tokio::task::yield_now().await;
        }
        assert_eq!(answer.unwrap().await, Ok(7));
        assert_eq!(pool.waiting.get(), 0);
    }
}
