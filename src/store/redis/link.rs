//! The connections that operations share, each made when it is needed and made anew when it is lost: one
//! of each carrier that has its own, driven there, and one of all others.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use prometheus::IntCounter;
use redis::RedisError;
use tokio::sync::watch;
use tracing::{debug, info, warn};

use super::target::{Target, Wire};
use crate::observe;

/// The place of the connection that is nobody's own.
pub(super) const SHARED: usize = 0;
/// A connection whose answers were late so often in a row is not used again, whatever others do: one slow
/// command makes one late, and a reader waits for each.
const LATE_MAX: u32 = 3;
/// A carrier whose own connection could not be made does without for so long. A server that has as many
/// clients as it takes is not asked at once for one more.
const OWN_RETRY: Duration = Duration::from_secs(1);

#[derive(Clone)]
enum State {
    /// Nobody has asked since it was lost.
    Idle,
    Connecting {
        /// The attempt before failed.
        is_again: bool,
    },
    Up {
        life: u64,
        wire: Wire,
    },
    /// The last attempt failed. Whoever waited for it is told; the next who asks begins another.
    Failed {
        reason: Arc<str>,
        at: Instant,
    },
}

struct Place {
    state: Mutex<State>,
    /// Rises with each change of the state.
    changed: watch::Sender<u64>,
    /// Answers in a row that did not come in time.
    late: AtomicU32,
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
            late: AtomicU32::new(0),
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

    /// Where what is asked on a carrier goes; carrier 0 is none. One that could not connect goes with all
    /// others for a while, and while somebody tries again.
    pub(super) fn place_of(&self, carrier: usize) -> usize {
        let Some(place) = self.places.get(carrier) else {
            return SHARED;
        };
        let does_without = match &*place.state.lock() {
            State::Failed { at, .. } => observe::now().saturating_duration_since(*at) < OWN_RETRY,
            State::Connecting { is_again } => *is_again,
            State::Idle | State::Up { .. } => false,
        };
        match does_without {
            true => SHARED,
            false => carrier,
        }
    }

    /// The connection of a place, if there is one.
    pub(super) fn up(&self, place: usize) -> Option<Joined> {
        match &*self.places[place].state.lock() {
            State::Up { life, wire } => Some(Joined {
                wire: wire.clone(),
                life: *life,
            }),
            State::Idle | State::Connecting { .. } | State::Failed { .. } => None,
        }
    }

    /// The connection of a place, once there is one. An attempt goes on though its first asker gives up. To
    /// be called on the runtime that the connection's tasks shall run on.
    pub(super) async fn wire(self: &Arc<Self>, place: usize) -> Result<Joined, Arc<str>> {
        let Place { state, changed, .. } = &self.places[place];
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
                    State::Failed { reason, .. } if has_waited => return Err(reason.clone()),
                    State::Connecting { .. } => false,
                    State::Idle | State::Failed { .. } => {
                        let is_again = matches!(&*state, State::Failed { .. });
                        *state = State::Connecting { is_again };
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
        let failed = |reason: &str| State::Failed {
            reason: reason.into(),
            at: observe::now(),
        };
        let state = match connected {
            Ok(Ok(wire)) => {
                self.places[place].late.store(0, Relaxed);
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
            Ok(Err(error)) => failed(&told(&error)),
            Err(_) => failed("connecting took too long"),
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

    /// It answered in time.
    pub(super) fn on_answer(&self, place: usize) {
        let late = &self.places[place].late;
        // Read first: nothing is written while all is well.
        if late.load(Relaxed) != 0 {
            late.store(0, Relaxed);
        }
    }

    /// It did not answer in time. What hangs alone, while others answer, is lost alone.
    pub(super) fn on_late(&self, place: usize, life: u64) {
        let number = place;
        let place = &self.places[place];
        let is_lost = {
            let mut state = place.state.lock();
            let is_lost = matches!(&*state, State::Up { life: current, .. } if *current == life)
                && place.late.fetch_add(1, Relaxed) + 1 >= LATE_MAX;
            if is_lost {
                *state = State::Idle;
            }
            is_lost
        };
        if is_lost {
            warn!(
                place = number,
                "a connection to Redis does not answer; another is made"
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
