//! Stops the engine's work for clients that left before a whole answer. SGLang notices a closed connection after seconds
//! unless the answer is streamed, so the router names the request to abort.

mod silent_workers;

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use prometheus::IntCounterVec;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tracing::debug;

use self::silent_workers::{AbortTurn, SilentWorkers};
use super::request::body_edit::{self, Edit};
use crate::fleet::Worker;
use crate::ids::WorkerId;
use crate::observe;
use crate::observe::metrics::Registry;
use crate::prompt::Api;

const PATH: &str = "/abort_request";
const TIMEOUT: Duration = Duration::from_secs(2);
const MAX_RESPONSE_BYTES: usize = 64 << 10;
/// Requests to abort that are sent at the same time, so that an engine that does not answer keeps back no others' aborts
/// before health checks have found it.
const MAX_AT_ONCE: usize = 16;
/// Those of them that are sent to workers that did not answer in time: the others keep half of the places.
const MAX_AT_SILENT: usize = MAX_AT_ONCE / 2;
/// Requests to abort that wait to be sent. With more, engines notice the closed connections themselves.
const MAX_QUEUED: usize = 1_024;

#[derive(Debug)]
pub struct Aborts {
    queue: mpsc::Sender<Abort>,
    queued: Mutex<Option<mpsc::Receiver<Abort>>>,
    requests: IntCounterVec,
}

#[derive(Debug)]
struct Abort {
    worker: Arc<Worker>,
    id: Box<str>,
}

impl Aborts {
    pub(super) fn new(registry: &Registry) -> Arc<Self> {
        let (queue, queued) = mpsc::channel(MAX_QUEUED);
        Arc::new(Self {
            queue,
            queued: Mutex::new(Some(queued)),
            requests: registry.counters(
                "warmroute_engine_aborts_total",
                "Requests that an engine was asked to abort, because their clients left before a whole answer: sent; \
                 failed (a worker that is down is not asked); dropped (too many waited to be sent).",
                &["outcome"],
            ),
        })
    }

    /// Sends them, a few at the same time, and once it is `stopped` those that are left.
    pub async fn run(self: Arc<Self>, stopped: impl Future<Output = ()>) {
        let Some(mut queued) = self.queued.lock().take() else {
            return;
        };
        // Dropped with this future, it ends what is being sent.
        let mut sending = JoinSet::new();
        let mut silent = SilentWorkers::new(MAX_AT_SILENT);
        let mut stopped = pin!(stopped);
        let mut is_stopped = false;
        let mut is_empty = false;
        loop {
            tokio::select! {
                biased;
                Some(ended) = sending.join_next(), if !sending.is_empty() => {
                    if let Ok((worker, in_time)) = ended
                        && let Some(abort) = silent.on_ended(observe::now(), worker, in_time)
                    {
                        sending.spawn(self.clone().send(abort));
                    }
                }
                abort = queued.recv(), if !is_empty && sending.len() < MAX_AT_ONCE => {
                    let Some(abort) = abort else {
                        is_empty = true;
                        continue;
                    };
                    match silent.admit(observe::now(), abort.worker.id, abort) {
                        AbortTurn::Now(abort) => _ = sending.spawn(self.clone().send(abort)),
                        AbortTurn::Waits => {}
                        AbortTurn::Dropped => self.count("dropped"),
                    }
                }
                () = stopped.as_mut(), if !is_stopped => {
                    is_stopped = true;
                    queued.close();
                }
                else => return,
            }
        }
    }

    /// Returns the worker, and whether it did not keep the router waiting.
    async fn send(self: Arc<Self>, Abort { worker, id }: Abort) -> (WorkerId, bool) {
        if worker.is_down() {
            // It would not answer, and notices the closed connections when it is back.
            self.count("failed");
            return (worker.id, true);
        }
        // An id of the router's own needs no escapes.
        let body = format!(r#"{{"rid":"{id}"}}"#);
        let authorization = worker.authorization.as_ref();
        let post = worker
            .pool
            .post(PATH, authorization, body, MAX_RESPONSE_BYTES);
        let answered = tokio::time::timeout(TIMEOUT, post).await;
        let outcome = match &answered {
            Ok(Ok((status, _))) if status.is_success() => "sent",
            _ => "failed",
        };
        debug!(worker = %worker.name, %id, outcome, "engine asked to abort a request");
        self.count(outcome);
        (worker.id, answered.is_ok())
    }

    fn count(&self, outcome: &str) {
        self.requests.with_label_values(&[outcome]).inc();
    }

    /// The body with an id for the engine, and a guard that aborts it. `None` for an API without ids.
    pub(super) fn guard(
        self: &Arc<Self>,
        api: Api,
        body: &Bytes,
        worker: &Arc<Worker>,
        id: String,
    ) -> Option<(Bytes, AbortOnDrop)> {
        if !matches!(api, Api::Chat | Api::Completions) {
            return None;
        }
        let field = Edit::last_field(body, "rid", &format!("\"{id}\""))?;
        let guard = AbortOnDrop {
            aborts: self.clone(),
            abort: Some(Abort {
                worker: worker.clone(),
                id: id.into(),
            }),
        };
        Some((body_edit::applied(body, &mut [field]), guard))
    }
}

/// Dropped before the engine has answered, it has the request aborted.
#[must_use = "dropping it aborts the request"]
#[derive(Debug)]
pub(super) struct AbortOnDrop {
    aborts: Arc<Aborts>,
    abort: Option<Abort>,
}

impl AbortOnDrop {
    /// The engine has answered.
    pub(super) fn disarm(mut self) {
        self.abort = None;
    }
}

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        if let Some(abort) = self.abort.take()
            && self.aborts.queue.try_send(abort).is_err()
        {
            self.aborts.count("dropped");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::{pending, ready};
    use std::net::TcpListener;

    use super::*;
    use crate::fleet::Member;
    use crate::fleet::health::Health;
    use crate::fleet::registry::tests::{member, registry};

    #[tokio::test]
    async fn a_worker_that_is_down_is_not_asked() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let engine = Member {
            address: listener.local_addr().unwrap().to_string(),
            ..member("a")
        };
        let fleet = registry(&[]);
        fleet.set_members("static", vec![engine]);
        let worker = fleet.snapshot().workers[0].worker.clone();
        fleet.set_health(worker.id, Health::Down);
        let aborts = Aborts::new(&Registry::default());
        let body = Bytes::from_static(br#"{"model":"m"}"#);
        drop(aborts.guard(Api::Chat, &body, &worker, "id".to_owned()));
        let failed = aborts.requests.with_label_values(&["failed"]);
        let counted = async {
            while failed.get() == 0 {
                tokio::task::yield_now().await;
            }
        };
        tokio::select! {
            () = aborts.clone().run(pending()) => panic!("it runs until it is dropped"),
            () = counted => {}
        }
        assert!(listener.accept().is_err(), "it was asked");
    }

    #[tokio::test]
    async fn what_waits_when_the_router_stops_is_still_sent() {
        let fleet = registry(&["a"]);
        let worker = fleet.snapshot().workers[0].worker.clone();
        fleet.set_health(worker.id, Health::Down);
        let aborts = Aborts::new(&Registry::default());
        let body = Bytes::from_static(br#"{"model":"m"}"#);
        let count = 2 * MAX_AT_ONCE;
        for number in 0..count {
            drop(aborts.guard(Api::Chat, &body, &worker, number.to_string()));
        }
        aborts.clone().run(ready(())).await;
        let failed = aborts.requests.with_label_values(&["failed"]);
        assert_eq!(failed.get(), count as u64);
        drop(aborts.guard(Api::Chat, &body, &worker, "late".to_owned()));
        let dropped = aborts.requests.with_label_values(&["dropped"]);
        assert_eq!(dropped.get(), 1);
    }
}
