//! Commands that Redis refuses to the store: its user may not use them, or they have other names there. Known before
//! anything is generated that could not be stored.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use parking_lot::Mutex;
use tracing::{error, info};

use super::failure::{BUSY_RETRY, unavailable};
use crate::observe;
use crate::store::Error;

/// Time between two checks while Redis answers.
const RECHECK_MS: u64 = 10_000;
/// While a command is refused.
const RECHECK_LACKING_MS: u64 = 1_000;
const NAMED_MAX: usize = 4;

#[derive(Debug)]
pub(super) struct LackingCommands {
    started: Instant,
    /// Milliseconds after `started` at which to check again.
    due_ms: AtomicU64,
    /// What to say; empty if nothing is refused.
    said: Mutex<Arc<str>>,
}

impl Default for LackingCommands {
    fn default() -> Self {
        Self {
            started: observe::now(),
            due_ms: AtomicU64::new(0),
            said: Mutex::new("".into()),
        }
    }
}

impl LackingCommands {
    /// Whether the caller is the one that must check now.
    pub(super) fn is_due(&self) -> bool {
        let now = self.started.elapsed().as_millis() as u64;
        let next = |due: u64| (now >= due).then_some(now + RECHECK_LACKING_MS);
        self.due_ms.fetch_update(Relaxed, Relaxed, next).is_ok()
    }

    pub(super) fn said(&self) -> Arc<str> {
        self.said.lock().clone()
    }

    pub(super) fn check(&self) -> Result<(), Error> {
        match &**self.said.lock() {
            "" => Ok(()),
            said => Err(unavailable(BUSY_RETRY, said)),
        }
    }

    /// `refused`: commands, each with the reason.
    pub(super) fn on_checked(&self, refused: &[(String, String)]) {
        let text = said(refused);
        if refused.is_empty() {
            let now = self.started.elapsed().as_millis() as u64;
            self.due_ms.store(now + RECHECK_MS, Relaxed);
        }
        let mut known = self.said.lock();
        if **known != *text {
            if refused.is_empty() {
                info!("Redis refuses the store no command any more");
            } else {
                error!("{text}");
            }
            *known = text.into();
        }
    }
}

fn said(refused: &[(String, String)]) -> String {
    let Some((_, reason)) = refused.first() else {
        return String::new();
    };
    let names: Vec<&str> = refused.iter().map(|(name, _)| name.as_str()).collect();
    let more = match names.len().saturating_sub(NAMED_MAX) {
        0 => String::new(),
        more => format!(" and {more} more commands"),
    };
    let names = names[..names.len().min(NAMED_MAX)].join(", ");
    // What follows are the script's name and what was asked of it.
    let cuts = [" script: ", ", with args beginning with"];
    let reason = cuts.iter().fold(reason.as_str(), |reason, cut| {
        reason.split(cut).next().unwrap_or(reason)
    });
    format!("Redis refuses {names}{more} that the store needs: {reason}")
}
