//! The tasks of an owner: heartbeat, notices of cancelled responses, and the scan for orphans.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::time::sleep;
use tracing::{debug, info, warn};

use super::repeat_ends;
use super::run::{self, Job};
use super::run_state::RunState;
use super::run_step::StopReason;
use super::run_table::{RunRefusal, RunTable};
use super::runs::{Background, NO_MEMORY, Run};
use super::stored_request::StoredRequest;
use super::take_over::{OrphanState, TakeOver, must_rescan};
use super::unreadable;
use crate::ids::ClientKey;
use crate::observe;
use crate::openai::body_budget::KeptBody;
use crate::responses::service::{Latest, Responses};
use crate::responses::settings::Mode;
use crate::store::cancel::NoticeKind;
use crate::store::lease::Step;
use crate::store::{
    FencingToken, NoticeCursor, Orphan, Owner, ResponseKey, ResponseStore, TakenOver, Takeover,
};

const NOTICES_INTERVAL: Duration = Duration::from_millis(50);
/// All runs are checked against the store once in so many reads of notices.
const READS_PER_CHECK: u32 = 10;
/// Taken over in one scan.
const ORPHANS_MAX: usize = 64;

impl Background {
    /// Whether nothing runs here and nothing more will.
    fn is_over(&self) -> bool {
        self.tasks.is_stopping() && self.table.lock().is_empty()
    }

    /// Passes an input to the lease. If the lease was not renewed in time, runs go on until the store says that
    /// another replica has taken them over.
    fn on_lease(
        &self,
        input: impl FnOnce(&mut RunTable<Arc<Run>>, Instant, Owner) -> Step,
    ) -> Step {
        let now = observe::now();
        let mut table = self.table.lock();
        let step = input(&mut table, now, Owner(fastrand::u64(..)));
        if step == Step::Expired {
            self.metrics.leases_expired.inc();
            warn!(
                runs = table.len(),
                "lease not renewed in time; background runs of this replica go on unless another has taken them over"
            );
        }
        let (is_held, is_registered) = (table.holds_lease(now), table.is_registered);
        drop(table);
        for (known, value) in [
            (&self.lease_held, is_held),
            (&self.registered, is_registered),
        ] {
            known.send_if_modified(|known| std::mem::replace(known, value) != value);
        }
        step
    }

    /// Sleeps; only briefly while the process stops.
    pub(super) async fn pause(&self, pause: Duration) {
        tokio::select! {
            () = sleep(pause) => {}
            () = self.tasks.stopped() => sleep(pause.min(NOTICES_INTERVAL / 5)).await,
        }
    }
}

impl Responses {
    /// Owns background runs until the process stops. To be spawned once.
    pub async fn run_background(self: Arc<Self>) {
        if self.settings.mode != Mode::Stateful {
            return;
        }
        if self.settings.store.redis.is_none() {
            info!(
                "stored responses and conversations are in the memory of this process and end with it (set \
                 responses.store.redis to keep them)"
            );
        }
        let (background, store) = (self.background.clone(), self.store.clone());
        let latest = self.latest.clone();
        // This configuration may be replaced while the process runs, and is not kept for that long.
        drop(self);
        let (background, store) = (&*background, &*store);
        tokio::join!(
            send_heartbeats(background, store),
            read_notices(background, store),
            scan_for_orphans(background, store, &latest),
            repeat_ends::run(background, store)
        );
        if let Err(error) = store.end_lease(background.owner()).await {
            debug!(%error, "lease not released; it expires");
        }
    }
}

async fn send_heartbeats(background: &Background, store: &dyn ResponseStore) {
    let length = background.lease.duration;
    let name = format!("pid {}", std::process::id());
    while !background.is_over() {
        if background.on_lease(|table, now, _| table.on_timeout(now)) == Step::SendHeartbeat {
            let owner = background.owner();
            let mut heartbeat = store.heartbeat(owner, &name, length);
            loop {
                let until = background.table.lock().next_timeout();
                let pause = until.saturating_duration_since(observe::now());
                tokio::select! {
                    result = &mut heartbeat => {
                        let is_done = result.is_ok();
                        let _ = background.on_lease(|table, now, next| table.on_heartbeat(now, owner, is_done, next));
                        break;
                    }
                    () = sleep(pause) => {
                        let _ = background.on_lease(|table, now, _| table.on_timeout(now));
                    }
                }
            }
        }
        let next = background.table.lock().next_timeout();
        let pause = next.saturating_duration_since(observe::now());
        tokio::select! {
            () = background.pause(pause) => {}
            () = background.wakes.notified() => {}
        }
    }
}

async fn read_notices(background: &Background, store: &dyn ResponseStore) {
    let (mut cursor, mut owner, mut reads) = (NoticeCursor::default(), background.owner(), 0);
    while !background.is_over() {
        if background.table.lock().is_empty() {
            tokio::select! {
                () = background.first_run.notified() => {}
                () = background.tasks.stopped() => {}
            }
        }
        background.pause(NOTICES_INTERVAL).await;
        if background.owner() != owner {
            (cursor, owner) = (NoticeCursor::default(), background.owner());
        }
        if background.table.lock().is_empty() {
            continue;
        }
        if let Ok((notices, next)) = store.notices(owner, cursor).await {
            cursor = next;
            for notice in notices {
                let ago = observe::unix_ms().saturating_sub(notice.at_ms);
                let now = observe::now();
                let requested = now.checked_sub(Duration::from_millis(ago)).unwrap_or(now);
                match notice.kind {
                    NoticeKind::Cancelled => background.on_cancelled(notice.key, requested),
                    NoticeKind::Deleted => background.stop(notice.key, StopReason::Cancelled),
                }
            }
        }
        reads = (reads + 1) % READS_PER_CHECK;
        if reads > 0 {
            continue;
        }
        let checked = background.table.lock().to_check();
        let lost = store.check_ownership(checked.clone()).await;
        for (key, lost) in lost.unwrap_or_default() {
            let reason = background.table.lock().on_checked(&checked, key, lost);
            if let Some(reason) = reason {
                background.stop(key, reason);
            }
        }
    }
}

async fn scan_for_orphans(background: &Background, store: &dyn ResponseStore, latest: &Latest) {
    let mut rescan = false;
    while !background.tasks.is_stopping() {
        // Random, so that replicas that started together do not scan together.
        let interval = background.lease.scan_interval();
        let pause = if std::mem::take(&mut rescan) {
            Duration::ZERO
        } else {
            interval.mul_f64(0.75 + fastrand::f64() / 2.0)
        };
        tokio::select! {
            () = sleep(pause) => {}
            () = background.tasks.stopped() => return,
        }
        if !*background.lease_held.borrow() {
            continue;
        }
        let unconfirmed = background.table.lock().unconfirmed();
        for orphan in unconfirmed {
            take_over_by(latest, orphan).await;
        }
        let (by, running) = {
            let table = background.table.lock();
            (table.owner, table.keys())
        };
        // A run may have ended without storing an end; no other replica scans for it while its owner lives.
        let strays = store.untracked(by, running, ORPHANS_MAX).await;
        let mut strays = strays.unwrap_or_default();
        // Or the store has lost its end in a failover.
        let ended = strays.iter().filter_map(|(key, _)| {
            let write = background.recent_ends.lock().find(*key)?;
            Some((*key, write))
        });
        let ended: Vec<_> = ended.collect();
        strays.retain(|(key, _)| !ended.iter().any(|(ended, _)| ended == key));
        for (key, write) in ended {
            repeat_ends::repeat(background, store, key, &write).await;
        }
        let to_hand_back = {
            let mut table = background.table.lock();
            table.on_strays(by, &strays);
            table.to_hand_back()
        };
        for (key, fence) in to_hand_back {
            release(background, store, key, fence).await;
        }
        if !background.table.lock().unconfirmed().is_empty() {
            continue;
        }
        let orphans = store.orphans(ORPHANS_MAX).await;
        let orphans = orphans.unwrap_or_default();
        let is_whole = orphans.len() < ORPHANS_MAX;
        let now = observe::now();
        background.table.lock().on_orphans(now, &orphans, is_whole);
        background.waiting_orphans.lock().on_scan(now, &orphans);
        let (found, mut taken) = (orphans.len(), 0);
        for orphan in orphans {
            taken += usize::from(take_over_by(latest, orphan).await);
        }
        let has_room = background.table.lock().has_room();
        rescan = has_room && must_rescan(found, taken, ORPHANS_MAX);
    }
}

async fn release(
    background: &Background,
    store: &dyn ResponseStore,
    key: ResponseKey,
    fence: FencingToken,
) {
    let released = store.release(key, fence).await;
    if released.is_err_and(|error| error.retry_after().is_some()) {
        return;
    }
    background.table.lock().on_released(key);
}

/// Lets any replica take over what this owner has now and does not run.
async fn hand_back(responses: &Responses, key: ResponseKey, fence: FencingToken) {
    responses.background.table.lock().hand_back(key, fence);
    release(&responses.background, &*responses.store, key, fence).await;
}

/// The request of an orphan; empty for one that cannot be run. `None`: the store cannot be asked now.
async fn read_request(responses: &Responses, key: ResponseKey) -> Option<Bytes> {
    match responses.store.request(key).await {
        // Ended meanwhile; its run learns that with its first write.
        Ok(request) => Some(request.unwrap_or_default()),
        Err(error) if error.retry_after().is_some() => {
            debug!(response_id = %key.id, %error, "request of an orphaned response not read; trying at the next scan");
            None
        }
        // It ends as failed.
        Err(_) => Some(Bytes::new()),
    }
}

/// Takes over with the settings of the latest configuration. There is none only while the process ends.
async fn take_over_by(latest: &Latest, orphan: Orphan) -> bool {
    let Some(responses) = latest.load().upgrade() else {
        return false;
    };
    // Whatever another replica has stored must not end each replica that looks at it. What a panic leaves taken over is handed
    // back by the next scan, and counts as an attempt.
    let supervisor = responses.background.tasks.supervisor();
    let taking = supervisor.attempt("orphans", take_over(&responses, orphan));
    taking.await.unwrap_or(false)
}

/// True if this replica took the response over.
async fn take_over(responses: &Arc<Responses>, orphan: Orphan) -> bool {
    let background = &responses.background;
    let key = orphan.key;
    // As which owner, and whether it may have been taken over already.
    let may_take_over = || {
        let table = background.table.lock();
        let may = table.may_take_over(observe::now(), &orphan);
        may.then(|| (table.owner, table.is_unconfirmed(key)))
    };
    let Some((_, is_unconfirmed)) = may_take_over() else {
        return false;
    };
    // Where there was none before, there must be memory before the request is read again.
    let (known_bytes, may_look, is_lost) = {
        let (now, waiting) = (observe::now(), background.waiting_orphans.lock());
        let (may_look, is_lost) = (waiting.may_look(now, key), waiting.is_lost(now, key));
        (waiting.bytes(key), may_look, is_lost)
    };
    // Without tenants all orphans are of this client, and keep no more together than one client may. With an owner
    // each, those of one client could take the memory of all others; so one waits until others have ended.
    let client = ClientKey::of_tenant(key.tenant);
    let mut memory = known_bytes.and_then(|bytes| background.bodies.try_keep(client, bytes));
    // Its owner may still run it, and the take-over would end that run. So there must be memory first, even for one
    // that turns out to need none, as one that only has to end as failed: that waits until it is surely lost.
    let is_lapsed = orphan.owner.is_some() && !is_unconfirmed && !is_lost;
    let request = if memory.is_some() || (may_look && !(is_lapsed && known_bytes.is_some())) {
        read_request(responses, key).await
    } else {
        None
    };
    // One that may be this owner's already is handed back, or no replica would take it over.
    if request.is_none() && !is_unconfirmed {
        return false;
    }
    if is_lapsed && memory.is_none() {
        let bytes = request.as_ref().map_or(0, |request| request.len() as u64);
        memory = background.bodies.try_keep(client, bytes);
        if memory.is_none() {
            on_no_memory(background, key, bytes);
            return false;
        }
    }
    // The lease may have run out meanwhile.
    let Some((by, _)) = may_take_over() else {
        return false;
    };
    let result = responses.store.take_over(orphan, by).await;
    background.table.lock().on_take_over(by, orphan, &result);
    let Ok(Takeover::Done(adopted)) = result else {
        let mut waiting = background.waiting_orphans.lock();
        waiting.on_not_taken_over(observe::now(), key);
        return false;
    };
    let fence = adopted.fence;
    let is_running = match request {
        Some(request) => run_orphan(responses, key, adopted, &request, memory),
        None => false,
    };
    if !is_running {
        hand_back(responses, key, fence).await;
    }
    is_running
}

/// There was no memory for the request of an orphan.
fn on_no_memory(background: &Background, key: ResponseKey, bytes: u64) {
    let is_first = {
        let mut waiting = background.waiting_orphans.lock();
        waiting.on_no_memory(observe::now(), key, bytes)
    };
    if is_first {
        background.count_refusal(NO_MEMORY);
    }
    debug!(response_id = %key.id, bytes, "no memory for an orphaned response; trying at the next scan");
}

/// Runs or ends what was taken over. False if it must be handed back. `memory`: for its request, if there is some
/// already.
fn run_orphan(
    responses: &Arc<Responses>,
    key: ResponseKey,
    adopted: TakenOver,
    request: &Bytes,
    memory: Option<KeptBody>,
) -> bool {
    let background = &responses.background;
    let bytes = request.len() as u64;
    let stored_request = StoredRequest::read(request);
    let streams = adopted.streams;
    let stored = adopted.last_event.map_or(0, |last| last + 1);
    let orphan_state = OrphanState {
        status: adopted.status,
        is_portable: stored_request.as_ref().is_some_and(StoredRequest::may_move),
        streams,
        stored,
        attempts: adopted.attempts,
        lost_owners: adopted.lost_owners,
        may_continue: responses.relay.continues_streams(),
    };
    let decision = orphan_state.decide(background.settings.max_attempts);
    let client = ClientKey::of_tenant(key.tenant);
    let kept = if stored_request.is_some() && decision.may_generate() {
        memory.or_else(|| background.bodies.try_keep(client, bytes))
    } else {
        Some(background.bodies.keep_nothing(client))
    };
    let Some(kept) = kept else {
        on_no_memory(background, key, bytes);
        return false;
    };
    let (action, state) = match decision {
        TakeOver::Rerun => ("rerun", RunState::new(streams, stored)),
        TakeOver::Continue => ("continue", RunState::continuing(streams, stored)),
        TakeOver::Fail(reason) => ("failed", RunState::failing(streams, stored, reason)),
        TakeOver::StoreCancelled => ("cancelled", RunState::cancelled(streams, stored)),
    };
    let guard = match background.admit(key, adopted.fence, state) {
        Ok(guard) => guard,
        Err(refused) => return refused == RunRefusal::AlreadyRunning,
    };
    background.table.lock().on_stored(key);
    background.waiting_orphans.lock().on_taken_over(key);
    info!(response_id = %key.id, action, attempts = adopted.attempts, "took over an orphaned background response");
    // A run that may go on counts once it knows.
    if action != "continue" {
        background.metrics.on_orphan(action);
    }
    match stored_request {
        Some(request) => {
            let job = Job::taken_over(request, client, kept);
            run::spawn_taken_over(responses.clone(), job, guard);
        }
        None if adopted.status.is_terminal() => {}
        None => unreadable::spawn(responses.clone(), guard),
    }
    true
}
