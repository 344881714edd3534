//! What a replica does as an owner: tells that it lives, hears of what was ended, takes over what
//! others lost.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::sleep;
use tracing::debug;
use tracing::info;
use tracing::warn;

use super::super::Responses;
use super::Background;
use super::course::Course;
use super::course::Stop;
use super::kept::Kept;
use super::plan::Left;
use super::plan::Plan;
use super::plan::plan;
use super::run;
use super::run::Job;
use super::unreadable;
use crate::observe;
use crate::store::Adoption;
use crate::store::Cursor;
use crate::store::Fence;
use crate::store::Key;
use crate::store::Orphan;
use crate::store::lease::Lease;
use crate::store::lease::Step;

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

    /// Sleeps, but not for long while the process stops.
    async fn rest(&self, pause: Duration) {
        tokio::select! {
            () = sleep(pause) => {}
            () = self.tasks.stopped() => sleep(pause.min(NOTICES / 5)).await,
        }
    }
}

pub(in crate::api::responses) async fn own(responses: Arc<Responses>) {
    tokio::join!(beat(&responses), listen(&responses), sweep(&responses));
    let owner = responses.background.owner();
    if let Err(error) = responses.store.retire(owner).await {
        debug!(%error, "the lease was not given back; it ends by itself");
    }
}

async fn beat(responses: &Responses) {
    let background = &responses.background;
    let settings = &background.lease;
    let name = format!("pid {}", std::process::id());
    let mut lease = Lease::new(observe::now(), settings);
    while !background.is_over() {
        let step = match lease.on_timeout(observe::now()) {
            Step::Beat => {
                let owner = background.owner();
                let length = Duration::from_millis(settings.lease_ms);
                let mut beat = responses.store.beat(owner, &name, length);
                loop {
                    let until = lease.next_timeout();
                    let pause = until.saturating_duration_since(observe::now());
                    tokio::select! {
                        done = &mut beat => break match done {
                            Ok(()) => lease.on_beat(observe::now()),
                            Err(_) => lease.on_failure(observe::now()),
                        },
                        () = sleep(pause) => {
                            if lease.on_timeout(observe::now()) == Step::Stop {
                                break Step::Stop;
                            }
                        }
                    }
                }
            }
            step => step,
        };
        if step == Step::Stop {
            warn!("the lease on background work was lost; all of it stops here");
            background.lose();
            // Another owner, with a lease of its own.
            lease = Lease::new(observe::now(), settings);
            continue;
        }
        let is_held = lease.is_held(observe::now());
        background
            .is_held
            .send_if_modified(|held| std::mem::replace(held, is_held) != is_held);
        let next = lease.next_timeout();
        background
            .rest(next.saturating_duration_since(observe::now()))
            .await;
    }
}

async fn listen(responses: &Responses) {
    let background = &responses.background;
    let (mut cursor, mut owner, mut looks) = (Cursor::default(), background.owner(), 0);
    while !background.is_over() {
        background.rest(NOTICES).await;
        if background.owner() != owner {
            (cursor, owner) = (Cursor::default(), background.owner());
        }
        if background.table.lock().is_empty() {
            continue;
        }
        if let Ok((notices, next)) = responses.store.notices(owner, cursor).await {
            cursor = next;
            for notice in notices {
                background.stop(notice.key, Stop::Ended);
            }
        }
        looks = (looks + 1) % LOOKS;
        if looks > 0 {
            continue;
        }
        let running = background.table.lock().to_check();
        for (key, lost) in responses.store.check(running).await.unwrap_or_default() {
            let why = background.table.lock().on_checked(lost);
            background.stop(key, why);
        }
    }
}

async fn sweep(responses: &Arc<Responses>) {
    let background = &responses.background;
    while !background.tasks.is_stopping() {
        // Replicas that started together should not look together.
        let pause = background.lease.sweep_ms;
        let pause = pause * 3 / 4 + fastrand::u64(0..=pause / 2);
        tokio::select! {
            () = sleep(Duration::from_millis(pause)) => {}
            () = background.tasks.stopped() => return,
        }
        if !*background.is_held.borrow() {
            continue;
        }
        let unseated = background.table.lock().unseated();
        for (key, fence) in unseated {
            release(responses, key, fence).await;
        }
        let doubtful = background.table.lock().doubtful();
        for orphan in doubtful {
            adopt(responses, orphan).await;
        }
        if !background.table.lock().doubtful().is_empty() {
            continue;
        }
        let orphans = responses.store.orphans(ORPHANS_MAX).await;
        for orphan in orphans.unwrap_or_default() {
            adopt(responses, orphan).await;
        }
    }
}

async fn release(responses: &Responses, key: Key, fence: Fence) {
    let released = responses.store.release(key, fence).await;
    if released.is_err_and(|error| error.retry_after().is_some()) {
        return;
    }
    responses.background.table.lock().on_released(key);
}

async fn adopt(responses: &Arc<Responses>, orphan: Orphan) {
    let background = &responses.background;
    let by = {
        let table = background.table.lock();
        if !table.may_adopt(&orphan) {
            return;
        }
        table.owner()
    };
    let said = responses.store.adopt(orphan, by).await;
    background.table.lock().on_adoption(by, orphan, &said);
    let Ok(Adoption::Adopted(adopted)) = said else {
        return;
    };
    let kept = Kept::read(&adopted.request);
    let left = Left {
        is_portable: kept.as_ref().is_some_and(|kept| kept.is_portable),
        streams: adopted.streams,
        stored: adopted.last_event.map_or(0, |last| last + 1),
        attempts: adopted.attempts,
    };
    let plan = plan(&left, background.settings.attempts_max);
    let (action, course) = match plan {
        Plan::Run => ("rerun", Course::new(left.streams, left.stored)),
        Plan::Fail(why) => ("failed", Course::failing(left.streams, left.stored, why)),
    };
    let Ok(seat) = background.sit(orphan.key, adopted.fence, course) else {
        // No room after all: to be adopted by anyone.
        let key = orphan.key;
        background.table.lock().on_unseated(key, adopted.fence);
        release(responses, key, adopted.fence).await;
        return;
    };
    background.table.lock().on_stored(orphan.key);
    info!(id = %orphan.key.id, action, attempts = adopted.attempts, "took over a background response");
    background
        .metrics
        .orphans
        .with_label_values(&[action])
        .inc();
    match kept {
        Some(kept) => run::spawn(responses.clone(), Job::adopted(kept), seat),
        None => unreadable::spawn(responses.clone(), seat),
    }
}
