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
use super::Stop;
use super::kept::Kept;
use super::run;
use super::run::Job;
use super::run::Plan;
use crate::observe;
use crate::store::Adoption;
use crate::store::Cursor;
use crate::store::Lost;
use crate::store::Orphan;
use crate::store::lease::Lease;
use crate::store::lease::Step;
use crate::store::record::Adopted;

/// Between two looks for notices.
const NOTICES: Duration = Duration::from_millis(50);
/// Looks for notices for each question what became of all that runs.
const LOOKS: u32 = 10;
/// Taken over in one sweep.
const ORPHANS_MAX: usize = 64;
/// The events that are made before an engine has said anything: they can be made again.
const FIRST_EVENTS: u64 = 3;

impl Background {
    /// Whether nothing runs here, nor will.
    fn is_over(&self) -> bool {
        self.tasks.is_stopping() && self.running.lock().runs.is_empty()
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
        let running: Vec<_> = {
            let running = background.running.lock();
            let each = running.runs.iter();
            each.map(|(key, run)| (*key, run.fence)).collect()
        };
        if running.is_empty() {
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
        for (key, lost) in responses.store.check(running).await.unwrap_or_default() {
            match lost {
                // Its record may not be written yet; who runs it finds out.
                Lost::Gone => {}
                Lost::Fenced => background.stop(key, Stop::Lost),
                Lost::Terminal(_) => background.stop(key, Stop::Ended),
            }
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
        let orphans = responses.store.orphans(ORPHANS_MAX).await;
        for orphan in orphans.unwrap_or_default() {
            adopt(responses, orphan).await;
        }
    }
}

async fn adopt(responses: &Arc<Responses>, orphan: Orphan) {
    let background = &responses.background;
    let full = background.settings.running_max;
    if background.running.lock().runs.len() as u64 >= full || background.find(orphan.key).is_some()
    {
        return;
    }
    let owner = background.owner();
    let adopted = match responses.store.adopt(orphan, owner).await {
        Ok(Adoption::Adopted(adopted)) => adopted,
        Ok(Adoption::Raced | Adoption::Terminal(_) | Adoption::Gone) | Err(_) => return,
    };
    let plan = plan(&adopted, background.settings.attempts_max);
    let action = match plan {
        Plan::Run => "rerun",
        Plan::Fail(_) => "failed",
    };
    let Some(kept) = Kept::read(&adopted.request) else {
        warn!(id = %orphan.key.id, "what a lost replica kept of a response cannot be read");
        return;
    };
    let Ok(seat) = background.sit(orphan.key, adopted.fence) else {
        // No room after all: to be adopted by anyone.
        let _ = responses.store.release(orphan.key, adopted.fence).await;
        return;
    };
    info!(id = %orphan.key.id, action, attempts = adopted.attempts, "took over a background response");
    background
        .metrics
        .orphans
        .with_label_values(&[action])
        .inc();
    run::spawn(responses.clone(), Job::adopted(kept, &adopted, plan), seat);
}

/// What to do with a response whose replica was lost: nobody must see two beginnings of it.
fn plan(adopted: &Adopted, attempts_max: u32) -> Plan {
    let told = adopted.last_event.map_or(0, |last| last + 1);
    let is_portable = Kept::read(&adopted.request).is_some_and(|kept| kept.is_portable);
    if !is_portable || (adopted.streams && told > FIRST_EVENTS) {
        return Plan::Fail("The replica that ran this response was lost.");
    }
    if adopted.attempts > attempts_max {
        return Plan::Fail("Every replica that ran this response was lost.");
    }
    Plan::Run
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::Fence;
    use crate::store::Owner;
    use crate::store::Status;

    #[test]
    fn what_nobody_saw_is_run_again_and_the_rest_fails() {
        let portable = |is: bool| {
            format!(
                r#"{{"created_at":1,"previous":null,"conversation":null,"store":true,"salt":null,"is_portable":{is},"client":{{}},"input":[]}}"#
            )
        };
        let check = |streams, last_event, attempts, request: &str, runs: bool| {
            let adopted = Adopted {
                fence: Fence::first(Owner(1)),
                status: Status::InProgress,
                attempts,
                streams,
                last_event,
                request: request.to_owned().into(),
            };
            assert_eq!(plan(&adopted, 3) == Plan::Run, runs, "{adopted:?}");
        };
        let (yes, no) = (portable(true), portable(false));
        check(true, None, 2, &yes, true);
        check(true, Some(2), 2, &yes, true);
        check(true, Some(3), 2, &yes, false);
        check(false, None, 3, &yes, true);
        check(false, None, 4, &yes, false);
        check(true, None, 2, &no, false);
        check(true, None, 2, "what?", false);
    }
}
