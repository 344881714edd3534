//! The connections that operations share, each made when it is needed and made anew when it is lost: one
//! of each carrier that has its own, driven there, and one of all others.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use parking_lot::Mutex;
use prometheus::IntCounter;
use redis::RedisError;
use tokio::sync::watch;
use tracing::debug;
use tracing::info;
use tracing::warn;

use super::target::Target;
use super::target::Wire;

/// The place of the connection that is nobody's own.
pub(super) const SHARED: usize = 0;

#[derive(Clone)]
enum State {
    /// Nobody has asked since it was lost.
    Idle,
    Connecting,
    Up {
        life: u64,
        wire: Wire,
    },
    /// The last attempt failed. Whoever waited for it is told; the next who asks begins another.
    Failed(Arc<str>),
}

struct Place {
    state: Mutex<State>,
    /// Rises with each change of the state.
    changed: watch::Sender<u64>,
}

pub(super) struct Link {
    target: Target,
    timeout: Duration,
    /// The shared one's, then that of each carrier with its own.
    places: Vec<Place>,
    lives: AtomicU64,
    /// How often all were lost, plus one; and up to which of these somebody has connected.
    eras: AtomicU64,
    era_begun: AtomicU64,
    connects: IntCounter,
}

impl std::fmt::Debug for Link {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Link")
            .field("target", &self.target)
            .finish_non_exhaustive()
    }
}

/// A connection, and which one it is.
pub(super) struct Joined {
    pub(super) wire: Wire,
    pub(super) life: u64,
}

impl Link {
    /// With connections of their own for the first `own` carriers.
    pub(super) fn new(target: Target, timeout: Duration, own: usize, connects: IntCounter) -> Self {
        let place = |_| Place {
            state: Mutex::new(State::Idle),
            changed: watch::Sender::new(0),
        };
        Self {
            target,
            timeout,
            places: (0..=own).map(place).collect(),
            lives: AtomicU64::new(0),
            eras: AtomicU64::new(1),
            era_begun: AtomicU64::new(0),
            connects,
        }
    }

    /// Where what is asked on a carrier goes; carrier 0 is none.
    pub(super) fn place_of(&self, carrier: usize) -> usize {
        match carrier < self.places.len() {
            true => carrier,
            false => SHARED,
        }
    }

    /// The connection of a place, if there is one.
    pub(super) fn up(&self, place: usize) -> Option<Joined> {
        match &*self.places[place].state.lock() {
            State::Up { life, wire } => Some(Joined {
                wire: wire.clone(),
                life: *life,
            }),
            State::Idle | State::Connecting | State::Failed(_) => None,
        }
    }

    /// The connection of a place, once there is one. An attempt goes on though its first asker gives up. To
    /// be called on the runtime that the connection's tasks shall run on.
    pub(super) async fn wire(self: &Arc<Self>, place: usize) -> Result<Joined, Arc<str>> {
        let Place { state, changed } = &self.places[place];
        let mut changed = changed.subscribe();
        let mut has_waited = false;
        loop {
            changed.mark_unchanged();
            let begins = {
                let mut state = state.lock();
                match &*state {
                    State::Up { life, wire } => {
                        return Ok(Joined {
                            wire: wire.clone(),
                            life: *life,
                        });
                    }
                    State::Failed(why) if has_waited => return Err(why.clone()),
                    State::Connecting => false,
                    State::Idle | State::Failed(_) => {
                        *state = State::Connecting;
                        true
                    }
                }
            };
            if begins {
                let link = self.clone();
                // Bounded by its deadline, and by the runtime's end.
                drop(tokio::runtime::Handle::current().spawn(link.connect(place)));
            }
            has_waited = true;
            // The sender is ours.
            let _ = changed.changed().await;
        }
    }

    async fn connect(self: Arc<Self>, place: usize) {
        let connected = tokio::time::timeout(self.timeout, self.target.connect()).await;
        let state = match connected {
            Ok(Ok(wire)) => {
                let life = self.lives.fetch_add(1, Relaxed) + 1;
                let era = self.eras.load(Relaxed);
                if self.era_begun.swap(era, Relaxed) == era {
                    debug!(target = ?self.target, place, "connected to Redis once more");
                } else {
                    info!(target = ?self.target, "connected to Redis");
                    self.warn_of_eviction(wire.clone()).await;
                }
                self.connects.inc();
                State::Up { life, wire }
            }
            Ok(Err(error)) => State::Failed(told(&error).into()),
            Err(_) => State::Failed("connecting took too long".into()),
        };
        let place = &self.places[place];
        *place.state.lock() = state;
        place.changed.send_modify(|number| *number += 1);
    }

    /// A server that drops keys as it likes makes histories break.
    async fn warn_of_eviction(&self, mut wire: Wire) {
        let mut command = redis::cmd("CONFIG");
        command.arg("GET").arg("maxmemory-policy");
        let asked = tokio::time::timeout(self.timeout, wire.one(&command)).await;
        // Managed services refuse it.
        let Ok(Ok(value)) = asked else { return };
        let Ok((_, policy)) = redis::from_redis_value::<(String, String)>(value) else {
            return;
        };
        if !matches!(policy.as_str(), "noeviction" | "volatile-ttl") {
            warn!(
                policy,
                "Redis may drop stored responses before their time when its memory is full; \
                 set maxmemory-policy to noeviction or volatile-ttl"
            );
        }
    }

    /// Not to be used again, nor are those beside it: a server that is gone, or is no master any more, is
    /// that for all of them. One that came after it stays.
    pub(super) fn lose(&self, place: usize, life: u64) {
        let is_there = {
            let state = self.places[place].state.lock();
            matches!(&*state, State::Up { life: current, .. } if *current == life)
        };
        if is_there {
            self.lose_all();
        }
    }

    pub(super) fn lose_all(&self) {
        self.eras.fetch_add(1, Relaxed);
        for place in &self.places {
            let mut state = place.state.lock();
            if matches!(&*state, State::Up { .. }) {
                *state = State::Idle;
            }
        }
    }

    pub(super) fn lives(&self) -> u64 {
        self.lives.load(Relaxed)
    }
}

/// An error's words, for logs and operators.
pub(super) fn told(error: &RedisError) -> String {
    match error.detail() {
        Some(detail) => format!("{}: {detail}", error.category()),
        None => error.to_string(),
    }
}
