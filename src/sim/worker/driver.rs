//! The task that lets real time pass for the engine, and the tickets by which answers reach their
//! connections.

use std::collections::HashMap;
use std::convert::Infallible;
use std::fmt;
use std::sync::Arc;
use std::task::Poll;
use std::time::Instant;

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::sync::mpsc;

use super::publisher::Outlet;
use super::ranks::Truth;
use crate::sim::engine::Counters;
use crate::sim::engine::Engine;
use crate::sim::engine::Event;
use crate::sim::engine::Gauges;
use crate::sim::engine::Refused;
use crate::sim::engine::Request;
use crate::sim::engine::RequestKey;

pub(crate) struct Driver {
    state: Mutex<State>,
    /// Who is told what happens to the blocks, if anybody.
    outlet: Option<Arc<Outlet>>,
    /// Rung when an idle engine gets something to do.
    wake: Notify,
}

struct State {
    engine: Engine,
    listeners: HashMap<RequestKey, Listener>,
}

/// Unbounded, for what can lie in it is bounded by the length of the answer, and a slow client must
/// not hold up the engine.
struct Listener {
    index: usize,
    sender: mpsc::UnboundedSender<(usize, Event)>,
}

/// The hold on one or more submitted prompts. Dropping it takes what is not done out of the engine.
#[must_use = "dropping the ticket cancels its requests"]
pub(crate) struct Ticket {
    driver: Arc<Driver>,
    keys: Vec<RequestKey>,
    receiver: mpsc::UnboundedReceiver<(usize, Event)>,
}

impl Driver {
    pub(crate) fn new(engine: Engine, outlet: Option<Arc<Outlet>>) -> Self {
        Self {
            state: Mutex::new(State {
                engine,
                listeners: HashMap::new(),
            }),
            outlet,
            wake: Notify::new(),
        }
    }

    /// Submits all of them or none. Events come with the index of their request.
    pub(crate) fn submit(self: &Arc<Self>, requests: Vec<Request>) -> Result<Ticket, Refused> {
        let (sender, receiver) = mpsc::unbounded_channel();
        let mut ticket = Ticket {
            driver: Arc::clone(self),
            keys: Vec::with_capacity(requests.len()),
            receiver,
        };
        let mut state = self.state.lock();
        let was_idle = state.engine.next_timeout().is_none();
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
        drop(state);
        if was_idle {
            self.wake.notify_one();
        }
        Ok(ticket)
    }

    /// Runs the engine for as long as it is polled.
    pub(crate) async fn run(&self) -> Infallible {
        loop {
            match self.advance() {
                Some(due) => tokio::time::sleep_until(due.into()).await,
                None => self.wake.notified().await,
            }
        }
    }

    pub(crate) fn reset(&self) -> bool {
        self.state.lock().engine.reset()
    }

    pub(crate) fn gauges(&self) -> Gauges {
        self.state.lock().engine.gauges()
    }

    pub(crate) fn counters(&self) -> Counters {
        self.state.lock().engine.counters()
    }

    pub(crate) fn truth(&self) -> Truth {
        // What a step did is told under the same lock, so both are of one moment.
        let state = self.state.lock();
        let outlet = self.outlet.as_ref();
        Truth {
            held: state.engine.held(),
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
            // A receiver that is gone cancels on its own.
            let _ = listener.sender.send((listener.index, event));
        }
        if matches!(event, Event::Done { .. }) {
            self.listeners.remove(&key);
        }
    }
}

impl Ticket {
    /// How many prompts it holds.
    pub(crate) fn len(&self) -> usize {
        self.keys.len()
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

impl fmt::Debug for Ticket {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let keys = &self.keys;
        formatter.debug_tuple("Ticket").field(keys).finish()
    }
}

/// The clock that tokio's timers follow, so that tests with paused time hold.
fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}
