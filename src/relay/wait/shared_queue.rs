//! The queue of one model as the I/O threads share it: entering, leaving, and being released.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::time::Instant;

use parking_lot::Mutex;
use tokio::sync::oneshot;

use crate::fleet::freed::Freed;
use crate::ids::Model;
use crate::queue::{ClassStatus, EntryId, Left, Outcome, Queue, Refusal, RefusalReason, Request};
use crate::queue::{Room, Settings};

/// How a waiting request learns that its wait is over.
type Waker = oneshot::Sender<Result<Grant, Refusal>>;

/// The queue of one model.
#[derive(Debug)]
pub(in crate::relay) struct ModelQueue {
    pub(in crate::relay) model: Model,
    /// Requests that wait, to be read without the lock.
    waiting: AtomicU32,
    /// Tokens of released requests that no worker counts yet.
    granted: AtomicU64,
    /// How many they are.
    granted_requests: AtomicU32,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    queue: Queue<Waker>,
    settings: Arc<Settings>,
    /// Removed from the queues: nothing may enter any more.
    is_closed: bool,
}

/// The right to be sent to a worker. Until it is dropped, its tokens count as queued at the workers.
#[derive(Debug)]
pub(in crate::relay) struct Grant {
    queue: Arc<ModelQueue>,
    freed: Arc<Freed>,
    tokens: u64,
}

impl Drop for Grant {
    fn drop(&mut self) {
        self.queue.granted.fetch_sub(self.tokens, Relaxed);
        self.queue.granted_requests.fetch_sub(1, Relaxed);
        self.freed.remove_waiting(1);
        if self.queue.waiting() > 0 {
            self.freed.notify();
        }
    }
}

#[cfg(test)]
impl Grant {
    /// One of a queue of its own, which counts it.
    pub(in crate::relay) fn of_own_queue(tokens: u64) -> (Self, Arc<ModelQueue>) {
        let settings = Arc::new(Settings::default());
        let queue = Arc::new(ModelQueue::new(Model::from("m"), settings));
        let freed = Arc::new(Freed::default());
        freed.add_waiting(1);
        queue.granted.fetch_add(tokens, Relaxed);
        queue.granted_requests.fetch_add(1, Relaxed);
        let grant = Self {
            queue: queue.clone(),
            freed,
            tokens,
        };
        (grant, queue)
    }
}

/// A request in the queue. Dropped, it leaves.
#[derive(Debug)]
pub(super) struct Ticket {
    queue: Arc<ModelQueue>,
    freed: Arc<Freed>,
    id: EntryId,
    granted: oneshot::Receiver<Result<Grant, Refusal>>,
    is_over: bool,
}

impl Ticket {
    pub(super) async fn granted(mut self) -> Result<Grant, Refusal> {
        let result = (&mut self.granted).await;
        self.is_over = true;
        // The sender is dropped with the queue, when the router ends.
        result.unwrap_or(Err(Refusal {
            reason: RefusalReason::Draining,
            retry_after: std::time::Duration::from_secs(1),
        }))
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if self.is_over {
            return;
        }
        let mut state = self.queue.state.lock();
        if state.queue.leave(self.id) {
            self.queue.count(&state);
            self.freed.remove_waiting(1);
        }
    }
}

/// A request that has left, with the name of its class.
pub(super) struct Gone {
    pub(super) left: Left<Waker>,
    pub(super) class: String,
}

impl ModelQueue {
    pub(super) fn new(model: Model, settings: Arc<Settings>) -> Self {
        Self {
            model,
            waiting: AtomicU32::new(0),
            granted: AtomicU64::new(0),
            granted_requests: AtomicU32::new(0),
            state: Mutex::new(State {
                queue: Queue::new(settings.clone()),
                settings,
                is_closed: false,
            }),
        }
    }

    /// Requests that wait.
    pub(in crate::relay) fn waiting(&self) -> u32 {
        self.waiting.load(Relaxed)
    }

    /// Tokens of released requests that no worker counts yet.
    pub(in crate::relay) fn granted(&self) -> u64 {
        self.granted.load(Relaxed)
    }

    /// How many requests were released that no worker counts yet.
    pub(in crate::relay) fn granted_requests(&self) -> u32 {
        self.granted_requests.load(Relaxed)
    }

    pub(super) fn set_settings(&self, settings: &Arc<Settings>) {
        let mut state = self.state.lock();
        state.queue.set_settings(settings.clone());
        state.settings = settings.clone();
    }

    /// `None` if the queue is closed.
    pub(super) fn enter(
        self: &Arc<Self>,
        freed: &Arc<Freed>,
        now: Instant,
        room: Room,
        request: Request,
    ) -> Option<Result<Ticket, Refusal>> {
        let (waker, granted) = oneshot::channel();
        let mut state = self.state.lock();
        if state.is_closed {
            return None;
        }
        let id = match state.queue.enter(now, room, request, waker) {
            Ok(id) => id,
            Err((refusal, _)) => return Some(Err(refusal)),
        };
        self.count(&state);
        drop(state);
        // The worker that had room meanwhile did not know of this request.
        freed.add_waiting(1);
        Some(Ok(Ticket {
            queue: self.clone(),
            freed: freed.clone(),
            id,
            granted,
            is_over: false,
        }))
    }

    /// Those who are released or refused now. They learn it by [`Self::wake`], without the lock.
    pub(super) fn advance(&self, now: Instant, room: Room, computed: u64) -> Vec<Gone> {
        let mut state = self.state.lock();
        let left = state.queue.advance(now, room, computed);
        self.count(&state);
        state.named(left)
    }

    /// Releases everyone.
    pub(super) fn release_all(&self, now: Instant) -> Vec<Gone> {
        let mut state = self.state.lock();
        let left = state.queue.end(now, Outcome::Released);
        self.count(&state);
        state.named(left)
    }

    pub(super) fn wake(self: &Arc<Self>, freed: &Arc<Freed>, left: Left<Waker>) {
        let result = match left.outcome {
            Outcome::Released => {
                self.granted.fetch_add(left.tokens, Relaxed);
                self.granted_requests.fetch_add(1, Relaxed);
                Ok(Grant {
                    queue: self.clone(),
                    freed: freed.clone(),
                    tokens: left.tokens,
                })
            }
            Outcome::Refused(refusal) => {
                freed.remove_waiting(1);
                Err(refusal)
            }
        };
        // If its client has disconnected meanwhile, the grant is dropped.
        let _ = left.waker.send(result);
    }

    /// Closes the queue, unless requests wait in it.
    pub(super) fn close_if_empty(&self) -> bool {
        let mut state = self.state.lock();
        state.is_closed |= state.queue.is_empty();
        state.is_closed
    }

    /// The classes with their names, and the measured tokens a second and worker.
    pub(super) fn status(&self, now: Instant) -> (Vec<(String, ClassStatus)>, Option<f64>) {
        let state = self.state.lock();
        let classes = state.queue.classes(now).into_iter();
        let named = classes.map(|status| (state.name_of(status.class), status));
        (named.collect(), state.queue.measured_rate())
    }

    fn count(&self, state: &State) {
        self.waiting.store(state.queue.len() as u32, Relaxed);
    }
}

impl State {
    fn name_of(&self, class: usize) -> String {
        let class = self.settings.classes.get(class);
        class.map_or_else(String::new, |class| class.name.clone())
    }

    fn named(&self, left: Vec<Left<Waker>>) -> Vec<Gone> {
        let gone = left.into_iter().map(|left| Gone {
            class: self.name_of(left.class),
            left,
        });
        gone.collect()
    }
}
