//! Stops the engine's work for clients that left before a whole answer. SGLang notices a closed connection after seconds
//! unless the answer is streamed, so the router names the request to abort.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use parking_lot::Mutex;
use prometheus::IntCounterVec;
use rustc_hash::FxHashMap;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tracing::debug;

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
/// An engine that did not answer in time is asked for nothing for so long, which gives health checks the time to find it.
/// Its aborts would take all places again and again.
const SILENT_FOR: Duration = Duration::from_secs(10);
/// Requests to abort that wait to be sent. With more, engines notice the closed connections themselves.
const MAX_QUEUED: usize = 1_024;

/// The requests to abort.
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
                 failed (a worker that is down, or did not answer a moment ago, is not asked); dropped (too many \
                 waited to be sent).",
                &["outcome"],
            ),
        })
    }

    /// Sends them, a few at the same time.
    pub async fn run(self: Arc<Self>) {
        let Some(mut queued) = self.queued.lock().take() else {
            return;
        };
        // Dropped with this future, it ends what is being sent.
        let mut sending = JoinSet::new();
        // The workers that did not answer in time, and until when they are not asked.
        let mut silent: FxHashMap<WorkerId, Instant> = FxHashMap::default();
        loop {
            tokio::select! {
                biased;
                Some(ended) = sending.join_next(), if !sending.is_empty() => {
                    if let Ok(Some(worker)) = ended {
                        let now = observe::now();
                        silent.retain(|_, until| now < *until);
                        silent.insert(worker, now + SILENT_FOR);
                    }
                }
                abort = queued.recv(), if sending.len() < MAX_AT_ONCE => match abort {
                    None => return,
                    // It would not answer, and notices the closed connections when it is back.
                    Some(abort) if abort.worker.is_down() || is_silent(&silent, abort.worker.id) => {
                        self.count("failed");
                    }
                    Some(abort) => _ = sending.spawn(self.clone().send(abort)),
                },
            }
        }
    }

    /// Returns the worker if it did not answer in time.
    async fn send(self: Arc<Self>, Abort { worker, id }: Abort) -> Option<WorkerId> {
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
        answered.is_err().then_some(worker.id)
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

fn is_silent(silent: &FxHashMap<WorkerId, Instant>, worker: WorkerId) -> bool {
    silent
        .get(&worker)
        .is_some_and(|until| observe::now() < *until)
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
    use std::net::TcpListener;

    use super::*;
    use crate::fleet::health::Health;
    use crate::fleet::registry::tests::{member, registry};
    use crate::fleet::{self, Member};

    /// A worker that accepts connections and says nothing.
    fn silent_worker() -> (TcpListener, Arc<fleet::registry::Registry>, Arc<Worker>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let engine = Member {
            address: listener.local_addr().unwrap().to_string(),
            ..member("a")
        };
        let fleet = registry(&[]);
        fleet.set_members("static", vec![engine]);
        let worker = fleet.snapshot().workers[0].worker.clone();
        (listener, fleet, worker)
    }

    fn abort(aborts: &Arc<Aborts>, worker: &Arc<Worker>) {
        let body = Bytes::from_static(br#"{"model":"m"}"#);
        drop(aborts.guard(Api::Chat, &body, worker, "id".to_owned()));
    }

    async fn have_failed(aborts: &Aborts, count: u64) {
        while aborts.requests.with_label_values(&["failed"]).get() < count {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    #[tokio::test]
    async fn a_worker_that_is_down_is_not_asked() {
        let (listener, fleet, worker) = silent_worker();
        fleet.set_health(worker.id, Health::Down);
        let aborts = Aborts::new(&Registry::default());
        abort(&aborts, &worker);
        tokio::select! {
            () = aborts.clone().run() => panic!("it runs until it is dropped"),
            () = have_failed(&aborts, 1) => {}
        }
        assert!(listener.accept().is_err(), "it was asked");
    }

    #[tokio::test]
    async fn a_worker_that_did_not_answer_in_time_is_not_asked_again_at_once() {
        let (listener, _fleet, worker) = silent_worker();
        let aborts = Aborts::new(&Registry::default());
        let leave = async {
            abort(&aborts, &worker);
            have_failed(&aborts, 1).await;
            (0..MAX_AT_ONCE).for_each(|_| abort(&aborts, &worker));
            have_failed(&aborts, 1 + MAX_AT_ONCE as u64).await;
        };
        tokio::select! {
            () = aborts.clone().run() => panic!("it runs until it is dropped"),
            () = leave => {}
        }
        assert!(listener.accept().is_ok(), "it was never asked");
        assert!(listener.accept().is_err(), "it was asked again");
    }
}
