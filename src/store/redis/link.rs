//! The one connection that all operations share, made when it is needed and made anew when it is lost.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use prometheus::IntCounter;
use redis::RedisError;
use tokio::sync::watch;
use tracing::info;
use tracing::warn;

use super::target::Target;
use super::target::Wire;

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

pub(super) struct Link {
    target: Target,
    timeout: Duration,
    state: Mutex<State>,
    /// Rises with each change of the state.
    changed: watch::Sender<u64>,
    lives: Mutex<u64>,
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
    pub(super) fn new(target: Target, timeout: Duration, connects: IntCounter) -> Self {
        Self {
            target,
            timeout,
            state: Mutex::new(State::Idle),
            changed: watch::Sender::new(0),
            lives: Mutex::new(0),
            connects,
        }
    }

    /// The connection, once there is one. An attempt goes on though its first asker gives up. To be
    /// called on the runtime that the connection's tasks shall run on.
    pub(super) async fn wire(self: &Arc<Self>) -> Result<Joined, Arc<str>> {
        let mut changed = self.changed.subscribe();
        let mut has_waited = false;
        loop {
            changed.mark_unchanged();
            let begins = {
                let mut state = self.state.lock();
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
                drop(tokio::runtime::Handle::current().spawn(link.connect()));
            }
            has_waited = true;
            // The sender is ours.
            let _ = changed.changed().await;
        }
    }

    async fn connect(self: Arc<Self>) {
        let connected = tokio::time::timeout(self.timeout, self.target.connect()).await;
        let state = match connected {
            Ok(Ok(wire)) => {
                let life = {
                    let mut lives = self.lives.lock();
                    *lives += 1;
                    *lives
                };
                info!(target = ?self.target, "connected to Redis");
                self.warn_of_eviction(wire.clone()).await;
                self.connects.inc();
                State::Up { life, wire }
            }
            Ok(Err(error)) => State::Failed(told(&error).into()),
            Err(_) => State::Failed("connecting took too long".into()),
        };
        *self.state.lock() = state;
        self.changed.send_modify(|number| *number += 1);
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

    /// Not to be used again. One that came after it stays.
    pub(super) fn lose(&self, life: u64) {
        let mut state = self.state.lock();
        if matches!(&*state, State::Up { life: current, .. } if *current == life) {
            *state = State::Idle;
        }
    }

    /// As [`Link::lose`], whichever it is.
    pub(super) fn lose_any(&self) {
        let mut state = self.state.lock();
        if matches!(&*state, State::Up { .. }) {
            *state = State::Idle;
        }
    }

    pub(super) fn lives(&self) -> u64 {
        *self.lives.lock()
    }
}

/// An error's words, for logs and operators.
pub(super) fn told(error: &RedisError) -> String {
    match error.detail() {
        Some(detail) => format!("{}: {detail}", error.category()),
        None => error.to_string(),
    }
}
