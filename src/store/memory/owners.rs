//! Leases and notices of the owners: usually one, since the store is not shared.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::store::cancel::Notices;
use crate::store::{Notice, NoticeCursor, Owner};

#[derive(Debug, Default)]
pub(super) struct Owners(HashMap<Owner, State>);

#[derive(Debug)]
struct State {
    name: String,
    until: Instant,
    notices: Notices,
}

impl Owners {
    pub(super) fn heartbeat(&mut self, now: Instant, owner: Owner, name: String, lease: Duration) {
        // Owners long dead read no notices.
        self.0
            .retain(|listed, state| *listed == owner || now < state.until + 10 * lease);
        let state = self.0.entry(owner).or_insert_with(|| State {
            name,
            until: now,
            notices: Notices::default(),
        });
        state.until = now + lease;
    }

    pub(super) fn end_lease(&mut self, owner: Owner) {
        self.0.remove(&owner);
    }

    pub(super) fn is_alive(&self, now: Instant, owner: Owner) -> bool {
        self.0.get(&owner).is_some_and(|state| now < state.until)
    }

    pub(super) fn alive(&self, now: Instant) -> HashSet<Owner> {
        let alive = self.0.iter().filter(|(_, state)| now < state.until);
        alive.map(|(owner, _)| *owner).collect()
    }

    pub(super) fn notify(&mut self, owner: Owner, notice: Notice) {
        if let Some(state) = self.0.get_mut(&owner) {
            state.notices.push(notice);
        }
    }

    pub(super) fn notices(&self, owner: Owner, after: NoticeCursor) -> (Vec<Notice>, NoticeCursor) {
        match self.0.get(&owner) {
            Some(state) => state.notices.after(after),
            None => (Vec::new(), after),
        }
    }

    pub(super) fn report(&self, now: Instant) -> Value {
        let owner = |(owner, state): (&Owner, &State)| {
            json!({
                "owner": owner.to_string(),
                "name": state.name,
                "lease_left_ms": state.until.saturating_duration_since(now).as_millis() as u64,
            })
        };
        self.0.iter().map(owner).collect()
    }
}
