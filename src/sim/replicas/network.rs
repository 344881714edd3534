//! What is asked of the store and what it says, on the way and when they get there; and what goes wrong.

use std::time::Duration;

use super::faults::Fault;
use super::shop::{Ask, Said};
use super::{Broken, CALM, Event, Fleet, PAUSE, To, What, key};
use crate::responses::background::run_step::{StopReason, Then};
use crate::store::{self, CancelOutcome, Takeover};

impl Fleet {
    /// On its way to the store.
    pub(super) fn send(&mut self, at: usize, to: To, ask: Ask) {
        let fault = self.faults.on_send(at, &ask, &mut self.random);
        let life = self.replicas[at].life;
        let delay = self.delay(&ask);
        let when = self.now() + delay;
        self.world
            .set(when, Event::Arrive(at, life, to, Box::new(ask)));
        if let Some(fault) = fault {
            let when = self.now() + self.ms(0..30);
            self.world.set(when, Event::Fault(fault));
        }
    }

    /// How long words about this take on their way, there or back.
    pub(super) fn delay(&mut self, ask: &Ask) -> Duration {
        let is_slow = self.now() < CALM
            && match ask {
                // One that makes a record is never late: none is made again after it was deleted.
                Ask::Create(..) => false,
                Ask::Beat(..) => self.random.u8(..10) == 0,
                _ => self.random.u8(..40) == 0,
            };
        match is_slow {
            true => self.ms(100..8_000),
            false => self.ms(0..20),
        }
    }

    pub(super) fn on_arrival(
        &mut self,
        at: usize,
        life: u64,
        to: To,
        ask: Ask,
    ) -> Result<(), Broken> {
        let now = self.now();
        let retry_after = Duration::from_secs(1);
        let is_lost = now < CALM && self.faults.loses(now) && self.random.u8(..4) == 0;
        let (said, delay) = if self.faults.is_down(now) {
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
            let said = self.shop.ask(now, &ask)?;
            match is_lost {
                true => {
                    let reason = "slow".into();
                    let error = store::Error::Unknown {
                        retry_after,
                        reason,
                    };
                    (ask.refused(error), Duration::from_secs(1))
                }
                false => (said, self.delay(&ask)),
            }
        };
        if let Ask::Cancel(key, _) = &ask
            && matches!(said, Said::Cancelled(Ok(CancelOutcome::Done { .. })))
        {
            self.ledger.on_cancelled(*key);
        }
        let when = now + delay;
        self.world.set(
            when,
            Event::At(at, life, What::Said(to, Box::new((ask, said)))),
        );
        Ok(())
    }

    pub(super) fn on_said(
        &mut self,
        at: usize,
        to: To,
        ask: Ask,
        said: Said,
    ) -> Result<(), Broken> {
        match (to, said) {
            (To::Beat(by), Said::Nothing(said)) => {
                let owner = self.owner();
                let now = self.instant();
                let step = self.replicas[at]
                    .table
                    .on_heartbeat(now, by, said.is_ok(), owner);
                self.on_step(at, by, step)?;
                self.set_lease(at);
            }
            (To::Run { key, serial, asked }, said) => {
                let Some(run) = self.find(at, key, serial).filter(|run| run.asked == asked) else {
                    return Ok(());
                };
                return match run.on_said(&said) {
                    Then::Continue => self.drive(at, key),
                    Then::RetryLater => {
                        let when = self.now() + PAUSE;
                        let life = self.replicas[at].life;
                        let what = What::Again(key, serial, asked);
                        self.world.set(when, Event::At(at, life, what));
                        Ok(())
                    }
                };
            }
            (To::Notices(owner), Said::Notices(Ok((notices, next)))) => {
                if self.replicas[at].cursor.0 == owner {
                    self.replicas[at].cursor.1 = next;
                }
                for notice in notices {
                    self.stop(at, notice.key, StopReason::Cancelled)?;
                }
            }
            (To::Check, Said::Lost(Ok(lost))) => {
                let Ask::Check(asked) = ask else {
                    return Ok(());
                };
                for (key, lost) in lost {
                    let reason = self.replicas[at].table.on_checked(&asked, key, lost);
                    if let Some(reason) = reason {
                        self.stop(at, key, reason)?;
                    }
                }
            }
            (To::Sweep, Said::Orphans(Ok(orphans))) if !self.replicas[at].is_draining => {
                for orphan in orphans {
                    self.adopt(at, orphan);
                }
            }
            (To::Adopt(orphan, by), Said::Adopted(said)) => {
                self.replicas[at].adopting.remove(&orphan.key);
                self.replicas[at].table.on_take_over(by, orphan, &said);
                if let Ok(Takeover::Done(adopted)) = said {
                    return self.on_adopted(at, &adopted, orphan.key);
                }
            }
            (To::HandBack(key), Said::Cas(said))
                if !said
                    .as_ref()
                    .is_err_and(|error| error.retry_after().is_some()) =>
            {
                self.replicas[at].table.on_released(key);
            }
            (
                To::Create {
                    number,
                    tries,
                    is_unknown,
                },
                Said::Nothing(said),
            ) => {
                return self.on_created(at, number, tries, is_unknown, ask, said);
            }
            (To::Forget, Said::Deleted(Err(_))) if !self.replicas[at].is_draining => {
                self.later(at, 1_000..1_001, What::Retry(to, Box::new(ask)));
            }
            (To::Cancel { number, .. }, Said::Cancelled(Ok(CancelOutcome::Done { .. }))) => {
                return self.stop(at, key(number), StopReason::Cancelled);
            }
            (To::Cancel { number, tries }, Said::Cancelled(Err(_))) if tries < 3 => {
                let to = To::Cancel {
                    number,
                    tries: tries + 1,
                };
                self.later(at, 100..1_400, What::Retry(to, Box::new(ask)));
            }
            (To::Reader { reader, asked }, said) => {
                return self.on_reader_said(reader, asked, said);
            }
            _ => {}
        }
        Ok(())
    }

    pub(super) fn on_fault(&mut self, fault: Fault) -> Result<(), Broken> {
        let now = self.now();
        match fault {
            Fault::Kill(at) if self.replicas[at].is_up => {
                self.replicas[at].is_up = false;
                let when = now + self.ms(100..8_000);
                self.world.set(when, Event::Start(at));
            }
            Fault::Pause(at, length) => {
                self.replicas[at].paused_until = now + length;
            }
            Fault::Drain(at) if self.replicas[at].is_up && !self.replicas[at].is_draining => {
                self.replicas[at].is_draining = true;
                self.later(at, 0..1, What::Lease);
                for key in self.replicas[at].table.keys() {
                    let run = self.replicas[at].table.find(key);
                    // What no engine has begun is handed back at once; the rest has until the end.
                    if run.is_some_and(|run| !run.state.is_begun()) {
                        self.stop(at, key, StopReason::Draining)?;
                    }
                }
                self.later(at, 2_000..9_000, What::Abort);
                self.later(at, 12_000..13_000, What::Exit);
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
                        self.met.broken += 1;
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
                self.shop.empty();
            }
            Fault::Lose(length) => self.faults.lose(now, length),
        }
        Ok(())
    }
}
