//! The network between replicas and store: delays, lost replies, and dispatch of what arrives.

use std::time::Duration;

use super::faults::Fault;
use super::store_request::{StoreReply, StoreRequest};
use super::{Event, Fleet, PAUSE, ReplicaEvent, ReplyTo, Scenario, Violation, key};
use warmroute::responses::background::run_step::{StopReason, Then};
use warmroute::store::{self, CancelOutcome, LockOutcome, Takeover};

impl Fleet {
    /// Sends a request to the store.
    pub(super) fn send(&mut self, at: usize, to: ReplyTo, ask: StoreRequest) {
        let fault = self.faults.on_send(at, &ask, &mut self.random);
        let incarnation = self.replicas[at].incarnation;
        let delay = self.delay(&ask);
        let when = self.now() + delay;
        self.world
            .set(when, Event::Arrive(at, incarnation, to, Box::new(ask)));
        if let Some(fault) = fault {
            let when = self.now() + self.ms(0..30);
            self.world.set(when, Event::Fault(fault));
        }
    }

    /// The network delay of a request or its reply.
    pub(super) fn delay(&mut self, ask: &StoreRequest) -> Duration {
        let is_slow = self.now() < self.quiet_from
            && self.scenario != Scenario::OnTime
            && match ask {
                // A create is never late, or it could recreate a deleted record.
                StoreRequest::Create(..) => false,
                StoreRequest::Heartbeat(..) => self.random.u8(..10) == 0,
                _ => self.random.u8(..40) == 0,
            };
        if is_slow {
            self.ms(100..8_000)
        } else {
            self.ms(0..20)
        }
    }

    pub(super) fn on_arrival(
        &mut self,
        at: usize,
        incarnation: u64,
        to: ReplyTo,
        ask: StoreRequest,
    ) -> Result<(), Violation> {
        let now = self.now();
        let retry_after = Duration::from_secs(1);
        let is_lost = now < self.quiet_from && self.faults.loses(now) && self.random.u8(..4) == 0;
        let is_node_down = self.store.is_node_down(now, &ask);
        self.counts.node_refusals += u64::from(is_node_down);
        let (said, delay) = if self.faults.is_down(now) || is_node_down {
            match self.random.u8(..4) {
                0 => {
                    let reason = "slow".into();
                    let error = store::Error::Unknown {
                        retry_after,
                        reason,
                    };
                    (ask.refused(error), Duration::from_secs(1))
                }
                _ => {
                    let reason = "down".into();
                    let error = store::Error::Unavailable {
                        retry_after,
                        reason,
                    };
                    (ask.refused(error), self.ms(0..20))
                }
            }
        } else if self.faults.finds_too_large(&ask) {
            (
                ask.refused(store::Error::TooLarge { bytes: 2, max: 1 }),
                Duration::ZERO,
            )
        } else {
            let said = self.store.ask(now, &ask)?;
            if is_lost {
                let reason = "slow".into();
                let error = store::Error::Unknown {
                    retry_after,
                    reason,
                };
                (ask.refused(error), Duration::from_secs(1))
            } else {
                (said, self.delay(&ask))
            }
        };
        if let StoreRequest::Cancel(key, _) = &ask
            && matches!(said, StoreReply::Cancelled(Ok(CancelOutcome::Done { .. })))
        {
            self.ledger.on_cancelled(*key);
            self.cancelled_at.entry(*key).or_insert(now);
        }
        let when = now + delay;
        self.world.set(
            when,
            Event::At(
                at,
                incarnation,
                ReplicaEvent::StoreReply(to, Box::new((ask, said))),
            ),
        );
        Ok(())
    }

    pub(super) fn on_said(
        &mut self,
        at: usize,
        to: ReplyTo,
        ask: StoreRequest,
        said: StoreReply,
    ) -> Result<(), Violation> {
        self.on_end_reply(at, &ask, &said);
        match (to, said) {
            (ReplyTo::Heartbeat(by), StoreReply::Nothing(said)) => {
                let owner = self.owner();
                let now = self.instant();
                let step = self.replicas[at]
                    .table
                    .on_heartbeat(now, by, said.is_ok(), owner);
                self.on_step(at, by, step);
                self.set_lease(at);
            }
            (ReplyTo::Run { key, serial, asked }, said) => {
                if self
                    .find(at, key, serial)
                    .is_none_or(|run| run.asked != asked)
                {
                    return Ok(());
                }
                self.check_failure(at, key, &ask, &said)?;
                let Some(run) = self.find(at, key, serial) else {
                    return Ok(());
                };
                return match run.on_said(&said) {
                    Then::Continue => {
                        self.after_end(at, key, &said);
                        self.drive(at, key)
                    }
                    Then::RetryLater => {
                        let when = self.now() + PAUSE;
                        let incarnation = self.replicas[at].incarnation;
                        let what = ReplicaEvent::Again(key, serial, asked);
                        self.world.set(when, Event::At(at, incarnation, what));
                        Ok(())
                    }
                };
            }
            (ReplyTo::Notices(owner), StoreReply::Notices(Ok((notices, next)))) => {
                if self.replicas[at].cursor.0 == owner {
                    self.replicas[at].cursor.1 = next;
                }
                if self.loses_notices() {
                    return Ok(());
                }
                for notice in notices {
                    self.stop(at, notice.key, StopReason::Cancelled)?;
                }
            }
            (ReplyTo::Check, StoreReply::Lost(Ok(lost))) => {
                let StoreRequest::CheckOwnership(asked) = ask else {
                    return Ok(());
                };
                for (key, lost) in lost {
                    let reason = self.replicas[at].table.on_checked(&asked, key, lost);
                    if let Some(reason) = reason {
                        self.stop(at, key, reason)?;
                    }
                }
            }
            (ReplyTo::Scan, StoreReply::Orphans(Ok(orphans))) if !self.replicas[at].is_draining => {
                let now = self.instant();
                let table = &mut self.replicas[at].table;
                table.on_orphans(now, &orphans, true);
                for orphan in orphans {
                    self.adopt(at, orphan);
                }
            }
            (ReplyTo::TakeOver(orphan, by), StoreReply::TakenOver(said)) => {
                self.replicas[at].adopting.remove(&orphan.key);
                self.replicas[at].table.on_take_over(by, orphan, &said);
                if let Ok(Takeover::Done(adopted)) = said {
                    self.replicas[at].adopting.insert(orphan.key);
                    let request = StoreRequest::Request(orphan.key, Box::new(adopted));
                    self.send(at, ReplyTo::Request(orphan.key), request);
                }
            }
            (ReplyTo::Request(key), StoreReply::Request(said)) => {
                self.replicas[at].adopting.remove(&key);
                let StoreRequest::Request(_, adopted) = ask else {
                    return Ok(());
                };
                match said {
                    Ok(request) => {
                        let request = request.unwrap_or_default();
                        return self.on_adopted(at, &adopted, key, &request);
                    }
                    Err(_) => self.hand_back(at, key, adopted.fence),
                }
            }
            (ReplyTo::HandBack(key), StoreReply::Write(said))
                if !said
                    .as_ref()
                    .is_err_and(|error| error.retry_after().is_some()) =>
            {
                self.replicas[at].table.on_released(key);
            }
            (
                ReplyTo::Create {
                    number,
                    tries,
                    is_unknown,
                },
                StoreReply::Nothing(said),
            ) => {
                return self.on_created(at, number, tries, is_unknown, ask, said);
            }
            (ReplyTo::Forget, StoreReply::Deleted(Err(_))) if !self.replicas[at].is_draining => {
                self.later(at, 1_000..1_001, ReplicaEvent::Retry(to, Box::new(ask)));
            }
            (
                ReplyTo::Cancel { number, .. },
                StoreReply::Cancelled(Ok(CancelOutcome::Done { .. })),
            ) => {
                return self.stop(at, key(number), StopReason::Cancelled);
            }
            (ReplyTo::Cancel { number, tries }, StoreReply::Cancelled(Err(_))) if tries < 3 => {
                let to = ReplyTo::Cancel {
                    number,
                    tries: tries + 1,
                };
                self.later(at, 100..1_400, ReplicaEvent::Retry(to, Box::new(ask)));
            }
            (ReplyTo::SetUp { key, serial, asked }, said) => {
                return self.on_set_up(at, key, serial, asked, &ask, said);
            }
            (ReplyTo::RenewLock { key, serial }, StoreReply::Lock(said)) => {
                if let Some(run) = self.find(at, key, serial)
                    && let Some(turn) = &mut run.turn
                {
                    turn.on_renewed(&said);
                }
                self.counts.locks_renewed += u64::from(said == Ok(LockOutcome::Locked));
                self.counts.locks_lost += u64::from(said == Ok(LockOutcome::Lost));
            }
            (ReplyTo::CreateTurn(number, token), said) => {
                self.on_locked_for(at, number, token, said);
            }
            (ReplyTo::Turn(turn), said) => self.on_turn_said(at, turn, ask, said),
            (ReplyTo::Reader { reader, asked }, said) => {
                return self.on_reader_said(reader, asked, said);
            }
            _ => {}
        }
        Ok(())
    }

    pub(super) fn on_fault(&mut self, fault: Fault) -> Result<(), Violation> {
        let now = self.now();
        let empties = matches!(fault, Fault::Empty(_)) && self.scenario != Scenario::Faults;
        if self.has_failed_over() || empties {
            return Ok(());
        }
        match fault {
            Fault::Kill(at) if self.replicas[at].is_up => {
                self.on_killed(at);
                self.replicas[at].is_up = false;
                let when = now + self.ms(100..8_000);
                self.world.set(when, Event::Start(at));
            }
            Fault::Pause(at, length) => {
                self.replicas[at].paused_until = now + length;
            }
            Fault::Drain(at) if self.replicas[at].is_up && !self.replicas[at].is_draining => {
                self.replicas[at].is_draining = true;
                self.later(at, 0..1, ReplicaEvent::Lease);
                for key in self.replicas[at].table.keys() {
                    let run = self.replicas[at].table.find(key);
                    // Runs that no engine has started are released at once; the others may finish.
                    if run.is_some_and(|run| !run.state.has_engine_started) {
                        self.stop(at, key, StopReason::Draining)?;
                    }
                }
                self.later(at, 2_000..9_000, ReplicaEvent::Abort);
                self.later(at, 12_000..13_000, ReplicaEvent::Exit);
                self.exit(at);
            }
            Fault::Break(at) if self.replicas[at].is_up => {
                let keys = self.replicas[at].table.keys();
                for key in keys {
                    let table = &mut self.replicas[at].table;
                    if table.find(key).is_some_and(|run| run.is_stored)
                        && let Some(mut run) = table.remove(key)
                    {
                        run.state.on_left();
                        self.counts.broken += 1;
                        self.leave_conversation(at, &run);
                        self.replicas[at].left.insert(run.serial, run);
                    }
                }
                self.exit(at);
            }
            Fault::Kill(_) | Fault::Drain(_) | Fault::Break(_) => {}
            Fault::Down(length) => self.faults.down(now, length),
            Fault::Empty(length) => {
                self.faults.down(now, length);
                self.faults.empty();
                self.store.empty();
            }
            Fault::Lose(length) => self.faults.lose(now, length),
        }
        Ok(())
    }
}
