//! What a replica does as an owner: tells that it lives, hears of what was ended, takes over what
//! others lost.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::time::sleep;
use tracing::{debug, info, warn};

use super::run::{self, Job};
use super::run_state::{RunState, StopReason};
use super::run_table::{RunRefusal, RunTable};
use super::stored_request::StoredRequest;
use super::take_over::{self, OrphanState, TakeOver};
use super::{Background, Run, unreadable};
use crate::observe;
use crate::responses::Responses;
use crate::store::cancel::NoticeKind;
use crate::store::lease::Step;
use crate::store::{FencingToken, NoticeCursor, Orphan, Owner, ResponseKey, Takeover};

/// Between two looks for notices.
const NOTICES: Duration = Duration::from_millis(50);
/// Looks for notices for each question what became of all that runs.
const LOOKS: u32 = 10;
/// Taken over in one sweep.
const ORPHANS_MAX: usize = 64;

impl Background {
    /// Whether nothing runs here, nor will.
    fn is_over(&self) -> bool {
        self.tasks.is_stopping() && self.table.lock().is_empty()
    }

    /// Asks the lease, and does what its loss means: all that runs stops.
    fn on_lease(&self, ask: impl FnOnce(&mut RunTable<Arc<Run>>, Instant, Owner) -> Step) -> Step {
        let now = observe::now();
        let mut table = self.table.lock();
        let step = ask(&mut table, now, Owner(fastrand::u64(..)));
        if step == Step::Stop {
            warn!("the lease on background work was lost; all of it stops here");
            for run in table.runs() {
                run.stop.send_replace(Some(StopReason::LeaseLost));
            }
        }
        let is_held = table.is_held(now);
        drop(table);
        self.is_held
            .send_if_modified(|held| std::mem::replace(held, is_held) != is_held);
        step
    }

    /// Sleeps, but not for long while the process stops.
    async fn rest(&self, pause: Duration) {
        tokio::select! {
            () = sleep(pause) => {}
            () = self.tasks.stopped() => sleep(pause.min(NOTICES / 5)).await,
        }
    }
}

pub(in crate::responses) async fn own(responses: Arc<Responses>) {
    tokio::join!(beat(&responses), listen(&responses), sweep(&responses));
    let owner = responses.background.owner();
    if let Err(error) = responses.store.end_lease(owner).await {
        debug!(%error, "the lease was not given back; it ends by itself");
    }
}

async fn beat(responses: &Responses) {
    let background = &responses.background;
    let length = Duration::from_millis(background.lease.lease_ms);
    let name = format!("pid {}", std::process::id());
    while !background.is_over() {
        if background.on_lease(|table, now, next| table.on_timeout(now, next)) == Step::Beat {
            let owner = background.owner();
            let mut beat = responses.store.heartbeat(owner, &name, length);
            loop {
                let until = background.table.lock().next_timeout();
                let pause = until.saturating_duration_since(observe::now());
                let step = tokio::select! {
                    said = &mut beat => {
                        // Where the lease was lost, all was told so.
                        let is_done = said.is_ok();
                        let _ = background.on_lease(|table, now, next| table.on_heartbeat(now, owner, is_done, next));
                        break;
                    }
                    () = sleep(pause) => {
                        background.on_lease(|table, now, next| table.on_timeout(now, next))
                    }
                };
                if step == Step::Stop {
                    break;
                }
            }
        }
        let next = background.table.lock().next_timeout();
        let pause = next.saturating_duration_since(observe::now());
        tokio::select! {
            () = background.rest(pause) => {}
            () = background.wakes.notified() => {}
        }
    }
}

async fn listen(responses: &Responses) {
    let background = &responses.background;
    let (mut cursor, mut owner, mut looks) = (NoticeCursor::default(), background.owner(), 0);
    while !background.is_over() {
        background.rest(NOTICES).await;
        if background.owner() != owner {
            (cursor, owner) = (NoticeCursor::default(), background.owner());
        }
        if background.table.lock().is_empty() {
            continue;
        }
        if let Ok((notices, next)) = responses.store.notices(owner, cursor).await {
            cursor = next;
            for notice in notices {
                let ago = observe::unix_ms().saturating_sub(notice.at_ms);
                let now = observe::now();
                let asked = now.checked_sub(Duration::from_millis(ago)).unwrap_or(now);
                match notice.kind {
                    NoticeKind::Cancelled => background.on_cancelled(notice.key, asked),
                    NoticeKind::Deleted => background.stop(notice.key, StopReason::Cancelled),
                }
            }
        }
        looks = (looks + 1) % LOOKS;
        if looks > 0 {
            continue;
        }
        let asked = background.table.lock().to_check();
        let lost = responses.store.check_ownership(asked.clone()).await;
        for (key, lost) in lost.unwrap_or_default() {
            let why = background.table.lock().on_checked(&asked, key, lost);
            if let Some(why) = why {
                background.stop(key, why);
            }
        }
    }
}

async fn sweep(responses: &Arc<Responses>) {
    let background = &responses.background;
    let mut is_more_left = false;
    while !background.tasks.is_stopping() {
        // Replicas that started together should not look together.
        let pause = background.lease.sweep_ms;
        let pause = match std::mem::take(&mut is_more_left) {
            true => 0,
            false => pause * 3 / 4 + fastrand::u64(0..=pause / 2),
        };
        tokio::select! {
            () = sleep(Duration::from_millis(pause)) => {}
            () = background.tasks.stopped() => return,
        }
        if !*background.is_held.borrow() {
            continue;
        }
        let unconfirmed = background.table.lock().unconfirmed();
        for orphan in unconfirmed {
            adopt(responses, orphan).await;
        }
        let (by, running) = {
            let table = background.table.lock();
            (table.owner(), table.keys())
        };
        // A run may have ended without an end, and nobody else looks while its owner lives.
        let strays = responses.store.untracked(by, running, ORPHANS_MAX).await;
        let to_hand_back = {
            let mut table = background.table.lock();
            table.on_strays(by, &strays.unwrap_or_default());
            table.to_hand_back()
        };
        for (key, fence) in to_hand_back {
            release(responses, key, fence).await;
        }
        if !background.table.lock().unconfirmed().is_empty() {
            continue;
        }
        let orphans = responses.store.orphans(ORPHANS_MAX).await;
        let orphans = orphans.unwrap_or_default();
        let (found, mut taken) = (orphans.len(), 0);
        for orphan in orphans {
            taken += usize::from(adopt(responses, orphan).await);
        }
        let has_room = background.table.lock().has_room();
        is_more_left = has_room && take_over::is_more_left(found, taken, ORPHANS_MAX);
    }
}

async fn release(responses: &Responses, key: ResponseKey, fence: FencingToken) {
    let released = responses.store.release(key, fence).await;
    if released.is_err_and(|error| error.retry_after().is_some()) {
        return;
    }
    responses.background.table.lock().on_released(key);
}

/// True if it is dealt with here from now on.
async fn adopt(responses: &Arc<Responses>, orphan: Orphan) -> bool {
    let background = &responses.background;
    let by = {
        let table = background.table.lock();
        if !table.may_take_over(&orphan) {
            return false;
        }
        table.owner()
    };
    let said = responses.store.take_over(orphan, by).await;
    background.table.lock().on_take_over(by, orphan, &said);
    let Ok(Takeover::Done(adopted)) = said else {
        return false;
    };
    let kept = StoredRequest::read(&adopted.request);
    let orphan_state = OrphanState {
        is_portable: kept.as_ref().is_some_and(|kept| kept.is_portable),
        streams: adopted.streams,
        stored: adopted.last_event.map_or(0, |last| last + 1),
        attempts: adopted.attempts,
    };
    let (action, state) =
        match take_over::take_over(&orphan_state, background.settings.attempts_max) {
            TakeOver::Rerun => (
                "rerun",
                RunState::new(orphan_state.streams, orphan_state.stored),
            ),
            TakeOver::Fail(why) => (
                "failed",
                RunState::failing(orphan_state.streams, orphan_state.stored, why),
            ),
        };
    let guard = match background.sit(orphan.key, adopted.fence, state) {
        Ok(guard) => guard,
        Err(RunRefusal::AlreadyRunning) => return false,
        Err(_) => {
            // No room after all: to be adopted by anyone.
            let key = orphan.key;
            background.table.lock().hand_back(key, adopted.fence);
            release(responses, key, adopted.fence).await;
            return false;
        }
    };
    background.table.lock().on_stored(orphan.key);
    info!(id = %orphan.key.id, action, attempts = adopted.attempts, "took over a background response");
    background
        .metrics
        .orphans
        .with_label_values(&[action])
        .inc();
    match kept {
        Some(kept) => run::spawn(responses.clone(), Job::adopted(kept), guard),
        None => unreadable::spawn(responses.clone(), guard),
    }
    true
}
