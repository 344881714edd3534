//! Drives an engine in real time, and delivers its events to the connections through tickets.

use std::collections::HashMap;
use std::convert::Infallible;
use std::fmt;
use std::sync::Arc;
use std::task::Poll;
use std::time::Instant;

use parking_lot::{MappedMutexGuard, Mutex, MutexGuard};
use serde::{Deserialize, Serialize};
use tokio::sync::{Notify, mpsc};

use super::publisher::outlet::Outlet;
use crate::observe::now;
use crate::sim::engine::cache::CachedBlock;
use crate::sim::engine::{Engine, Event, Refused, Request, RequestKey};

pub(crate) struct Driver {
    /// The engine id, a new one for each process.
    pub(crate) id: String,
    state: Mutex<State>,
    /// Publishes the KV events, unless they are off.
    outlet: Option<Arc<Outlet>>,
    /// Notified when an idle engine gets work.
    wake: Notify,
}

struct State {
    engine: Engine,
    listeners: HashMap<RequestKey, Listener>,
    is_dead: bool,
}

/// The receiver of one request's events. Its channel is unbounded because the length of the answer bounds its content,
/// and because a slow client must not stall the engine.
struct Listener {
    index: usize,
    sender: mpsc::UnboundedSender<(usize, Event)>,
}

/// One or more submitted prompts. Dropping the ticket cancels those that are not finished.
#[derive(Debug)]
#[must_use = "dropping the ticket cancels its requests"]
pub(crate) struct Ticket {
    driver: Arc<Driver>,
    keys: Vec<RequestKey>,
    receiver: mpsc::UnboundedReceiver<(usize, Event)>,
}

/// The cached blocks of a dp rank, and the last KV event batch that reported them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheContents {
    /// Sorted by hash. Evictions of the current step, and a reset, show here before they are reported.
    pub blocks: Vec<CachedBlock>,
    /// The sequence number of the last published batch; `None` if there was none, or if events are off.
    pub last_sequence: Option<u64>,
}

impl Driver {
    pub(crate) fn new(engine: Engine, outlet: Option<Arc<Outlet>>) -> Self {
        Self {
            id: new_id(),
            state: Mutex::new(State {
                engine,
                listeners: HashMap::new(),
                is_dead: false,
            }),
            outlet,
            wake: Notify::new(),
        }
    }

    /// Submits all requests or none. Their events have the index of their request.
    pub(crate) fn submit(self: &Arc<Self>, requests: Vec<Request>) -> Result<Ticket, Refused> {
        let (sender, receiver) = mpsc::unbounded_channel();
        let mut ticket = Ticket {
            driver: Arc::clone(self),
            keys: Vec::with_capacity(requests.len()),
            receiver,
        };
        let mut state = self.state.lock();
        let before = state.engine.next_timeout();
        for (index, request) in requests.into_iter().enumerate() {
            match state.engine.submit(now(), request) {
                Ok(key) => {
                    let sender = sender.clone();
                    state.listeners.insert(key, Listener { index, sender });
                    ticket.keys.push(key);
                }
                Err(refused) => {
                    // The ticket takes the lock when it is dropped.
                    drop(state);
                    return Err(refused);
                }
            }
        }
        if state.is_dead {
            state.listeners.clear();
        }
        drop(state);
        self.wake_before(before);
        Ok(ticket)
    }

    /// What publishes the KV events, unless they are off.
    pub(crate) fn outlet(&self) -> Option<&Outlet> {
        self.outlet.as_deref()
    }

    /// The engine core dies: no submitted request gets another event.
    pub(crate) fn kill(&self) {
        let mut state = self.state.lock();
        state.is_dead = true;
        state.listeners.clear();
    }

    /// The engine stands still while it is looked at.
    pub(crate) fn engine(&self) -> MappedMutexGuard<'_, Engine> {
        MutexGuard::map(self.state.lock(), |state| &mut state.engine)
    }

    pub(crate) fn release_kept(&self, key: RequestKey) -> bool {
        let mut state = self.state.lock();
        let before = state.engine.next_timeout();
        let was_kept = state.engine.release_kept(key);
        drop(state);
        self.wake_before(before);
        was_kept
    }

    /// Wakes the driver if the engine has something to do before `before`.
    fn wake_before(&self, before: Option<Instant>) {
        let next = self.state.lock().engine.next_timeout();
        if next.is_some_and(|next| before.is_none_or(|before| next < before)) {
            self.wake.notify_one();
        }
    }

    /// Runs the engine while it is polled.
    pub(crate) async fn run(&self) -> Infallible {
        loop {
            match self.advance() {
                Some(due) => tokio::select! {
                    () = tokio::time::sleep_until(due.into()) => {}
                    () = self.wake.notified() => {}
                },
                None => self.wake.notified().await,
            }
        }
    }

    pub(crate) fn cache_contents(&self) -> CacheContents {
        // Steps are published under the same lock, so both are consistent.
        let state = self.state.lock();
        let outlet = self.outlet.as_ref();
        CacheContents {
            blocks: state.engine.cached_blocks(),
            last_sequence: outlet.and_then(|outlet| outlet.last_sequence()),
        }
    }

    fn advance(&self) -> Option<Instant> {
        let mut state = self.state.lock();
        for output in state.engine.on_timeout(now()) {
            state.deliver(output.key, output.event);
        }
        for changes in state.engine.drain_steps() {
            if let Some(outlet) = &self.outlet {
                outlet.publish(&changes);
            }
        }
        state.engine.next_timeout()
    }

    fn cancel(&self, keys: &[RequestKey]) {
        let mut state = self.state.lock();
        for key in keys {
            state.engine.cancel(*key);
            state.listeners.remove(key);
        }
    }
}

impl State {
    fn deliver(&mut self, key: RequestKey, event: Event) {
        if let Some(listener) = self.listeners.get(&key) {
            // A dropped receiver cancels the request itself.
            let _ = listener.sender.send((listener.index, event));
        }
        if matches!(event, Event::Done { .. }) {
            self.listeners.remove(&key);
        }
    }
}

impl Ticket {
    /// The number of prompts.
    pub(crate) fn len(&self) -> usize {
        self.keys.len()
    }

    /// The first request.
    pub(crate) fn first(&self) -> Option<(&Arc<Driver>, RequestKey)> {
        Some((&self.driver, *self.keys.first()?))
    }

    pub(crate) fn is_of_dead_engine(&self) -> bool {
        self.driver.state.lock().is_dead
    }

    /// The next event; `None` when all requests are done.
    pub(crate) async fn next(&mut self) -> Option<(usize, Event)> {
        std::future::poll_fn(|context| self.poll_next(context)).await
    }

    pub(crate) fn poll_next(
        &mut self,
        context: &mut std::task::Context<'_>,
    ) -> Poll<Option<(usize, Event)>> {
        self.receiver.poll_recv(context)
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.driver.cancel(&self.keys);
    }
}

impl fmt::Debug for Driver {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Driver").finish_non_exhaustive()
    }
}

/// A random UUID of version 4.
fn new_id() -> String {
    let bits = fastrand::u128(..);
    let (first, second, third) = (
        bits as u32,
        (bits >> 32) as u16,
        (bits >> 48) as u16 & 0xfff,
    );
    let (fourth, fifth) = ((bits >> 64) as u16 & 0xfff, (bits >> 80) as u64);
    format!("{first:08x}-{second:04x}-4{third:03x}-8{fourth:03x}-{fifth:012x}")
}
