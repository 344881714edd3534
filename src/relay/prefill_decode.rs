//! One request over two workers: a leg that computes its prompt, and one that goes on from there and
//! answers.
//!
//! What the first hands over is used once, by the second leg of the same try, with the very prompt: an
//! engine does not notice anything else, and answers wrong text. So whatever happens after it, a try that
//! comes next begins with a new first leg. And nothing of the second leg passes before its first token,
//! since until then the blocks may not have come.

mod answers;
mod metrics;
mod settings;

use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use rustc_hash::FxHashSet;
use tracing::{debug, warn};

use self::answers::{open, read_whole};
pub(super) use self::metrics::{Families, OfModel};
pub use self::settings::{OnPrefillFailure, Settings};
use super::attempt::Failure;
use super::carry::{At, Blame, Lost, Outcome, Split, Tried};
use super::choice::{Choice, Failed, Prefill};
use super::direct::{self, Part};
use super::handoff::{Handed, Legs, Transfer, Unhanded};
use super::pinned::{Granted, Pinned};
use super::plan::Plan;
use super::running::{Belief, Running};
use super::{Job, Relay};
use crate::fleet::Snapshot;
use crate::fleet::handoff::pairs::Pairs;
use crate::fleet::handoff::{Connector, host};
use crate::fleet::load::InFlight;
use crate::ids::WorkerId;
use crate::observe;
use crate::observe::metrics::Registry;
use crate::routing::pair;

/// How often it is looked whether a prefill worker's process is still there.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// How requests are split; the relay has it where they are.
#[derive(Debug)]
pub(super) struct PrefillDecode {
    pub(super) connector: Connector,
    pub(super) pair: pair::Settings,
    pub(super) on_prefill_failure: OnPrefillFailure,
    lease: Duration,
    handoff_timeout: Duration,
    pinned: Arc<Pinned>,
    pub(super) families: Families,
}

impl PrefillDecode {
    pub(super) fn new(settings: &Settings, registry: &Registry) -> Option<Self> {
        let connector = settings.connector?;
        Some(Self {
            connector,
            pair: pair::Settings {
                remote_prefill_min_tokens: settings.remote_prefill_min_tokens,
            },
            on_prefill_failure: settings.on_prefill_failure,
            lease: settings.lease(connector),
            handoff_timeout: Duration::from_millis(settings.handoff_timeout_ms),
            pinned: Arc::default(),
            families: Families::new(registry),
        })
    }
}

impl Relay {
    /// Whether requests are split at all.
    pub fn splits(&self) -> bool {
        self.prefill_decode.is_some()
    }

    /// The pairs of the workers that are up now. None where requests are never split.
    pub fn pairs(&self) -> Option<(Connector, Pairs)> {
        let connector = self.prefill_decode.as_ref()?.connector;
        let pairs = Pairs::of(&self.fleet.snapshot(), connector, self.fleet.topology());
        Some((connector, pairs))
    }

    /// For how many handoffs a worker keeps blocks that were not fetched yet, and how many tokens they are.
    /// None where requests are never split.
    pub fn pinned(&self, now: Instant, worker: WorkerId) -> Option<(usize, u64)> {
        let it = self.prefill_decode.as_ref()?;
        Some(it.pinned.of(now, worker))
    }

    /// Whether a request whose handoffs have failed is tried without one, which it was not yet.
    pub(super) fn gives_up_handoffs(&self, failed: &mut Failed) -> bool {
        let is_local = self
            .prefill_decode
            .as_ref()
            .is_some_and(|it| it.on_prefill_failure == OnPrefillFailure::Local);
        is_local && !std::mem::replace(&mut failed.has_given_up_handoffs, true)
    }

    /// Forgets what a worker kept whose process is another one now.
    pub fn forget_pinned(&self, worker: WorkerId) {
        if let Some(it) = &self.prefill_decode {
            it.pinned.forget(worker);
        }
    }

    /// Forgets workers that left the fleet, and removes their metric series.
    pub fn forget_departed_workers(&self, fleet: &Snapshot) {
        if let Some(it) = &self.prefill_decode {
            let workers = fleet.workers.iter();
            let listed: FxHashSet<WorkerId> = workers.map(|status| status.worker.id).collect();
            it.pinned.retain(|worker| listed.contains(&worker));
        }
        self.models.remove_workers(fleet);
    }

    /// One try over two workers.
    pub(super) async fn attempt_split(
        &self,
        job: &Job<'_>,
        plan: &Plan,
        choice: &Choice,
        prefill: &Prefill,
        tries: u32,
        deadline: Instant,
    ) -> Outcome {
        let (Some(it), Some(Ok(legs)), Some(of_model)) =
            (&self.prefill_decode, &plan.legs, &plan.model.split)
        else {
            // A choice has a prefill worker only where all of these are.
            return Outcome::Lost(Lost::at_prefill(Failure::Handoff, "not split".to_owned()));
        };
        let tried = Try {
            relay: self,
            it,
            of_model,
            job,
            plan,
            choice,
            prefill,
            tries,
            deadline,
        };
        tried.run(legs).await
    }
}

/// One try: what its legs have in common.
struct Try<'a> {
    relay: &'a Relay,
    it: &'a PrefillDecode,
    of_model: &'a OfModel,
    job: &'a Job<'a>,
    plan: &'a Plan,
    choice: &'a Choice,
    prefill: &'a Prefill,
    tries: u32,
    deadline: Instant,
}

/// What was handed over and not fetched yet. Dropped, nobody will: the blocks stay until the lease ends.
struct Outstanding<'a> {
    of_model: &'a OfModel,
    granted: Option<Granted>,
}

impl Outstanding<'_> {
    /// They were fetched, or let go of.
    fn release(mut self) {
        if let Some(granted) = self.granted.take() {
            granted.release();
        }
    }

    /// They could not be fetched, and stay as well.
    fn fail(mut self) {
        self.granted = None;
        self.of_model.on_handoff("failed");
    }
}

impl Drop for Outstanding<'_> {
    fn drop(&mut self) {
        if self.granted.is_some() {
            self.of_model.on_handoff("abandoned");
        }
    }
}

/// What a prompt's leg came to.
enum First {
    Handed(Handed),
    /// Its answer is the client's.
    Answer(Tried),
    Lost(Lost),
}

/// Why a decode leg has no first token.
enum Unopened {
    /// The worker did not answer, or broke off.
    Worker(direct::Error),
    /// It says that it has failed before its first token, or breaks off as an engine does that has.
    Failed(&'static str),
    /// It keeps silent, and may be waiting for blocks or in a queue.
    Silent,
    /// It keeps silent, and nothing can come of it: the blocks are gone with their process.
    Orphaned,
}

impl Try<'_> {
    async fn run(&self, legs: &Legs) -> Outcome {
        let Self {
            relay,
            it,
            of_model,
            job,
            plan,
            choice,
            prefill,
            ..
        } = *self;
        let begun = observe::now();
        of_model.split.inc();
        // What the prefill worker holds is what nobody has to compute.
        plan.model
            .on_decision(plan.request.prompt_tokens, &prefill.decision);
        debug!(
            id = %job.id,
            worker = %choice.worker.name,
            prefill = %prefill.worker.name,
            cached_tokens = prefill.decision.cached_tokens,
            prompt_tokens = plan.request.prompt_tokens,
            "chosen, in two legs"
        );
        // Both count at once, each as what it will be doing.
        let in_flight = InFlight::decoding(choice.worker.clone(), plan.request.prompt_tokens);
        let running = Running::new(in_flight, Default::default(), None, None);
        let handed = match self.first_leg(legs, begun).await {
            First::Handed(handed) => handed,
            First::Answer(tried) => return Outcome::Answered(tried),
            First::Lost(lost) => return Outcome::Lost(lost),
        };
        if self.has_lost_prefill() {
            of_model.on_handoff("prefill_failed");
            let last = format!("{}: is another process now", prefill.worker.name);
            return Outcome::Lost(Lost::at_prefill(Failure::Handoff, last));
        }
        let computed = observe::now();
        let tokens = u32::try_from(handed.prompt_tokens).unwrap_or(u32::MAX);
        let granted = it
            .pinned
            .grant(computed, it.lease, prefill.worker.id, tokens);
        if granted.has_displaced {
            it.families.pinned_forgotten.inc();
        }
        // From here on its blocks are pinned, whether the client stays or not.
        let outstanding = Outstanding {
            of_model,
            granted: Some(granted),
        };
        let cached_tokens = handed.cached_tokens;
        let body = legs.decode(handed.params);
        let sent = observe::now();
        let answer = match self.second_leg(body, sent).await {
            Ok(answer) => answer,
            Err(unopened) => return Outcome::Lost(self.unopened(unopened, outstanding)),
        };
        let status = answer.head.status;
        let refusal = relay.refusal(&choice.worker, &answer);
        let is_failure = answer.is_failure();
        let tried = Tried {
            answer,
            running,
            decision: choice.decision,
            tries: self.tries,
            split: Some(Ok(self.split(status.is_success().then_some(cached_tokens)))),
        };
        if let Some(failure) = refusal {
            // Busy, and the blocks are for nobody else.
            return Outcome::Lost(Lost::refused(At::Worker, failure, tried));
        }
        if is_failure {
            self.on_failed_handoff(outstanding);
            return Outcome::Lost(Lost {
                blame: Blame::Handoffs,
                ..Lost::refused(At::Between, Failure::Handoff, tried)
            });
        }
        if !status.is_success() {
            // The engine that refuses such a request tells the other to let go of the blocks.
            outstanding.release();
            of_model.on_handoff("refused");
            return Outcome::Answered(tried);
        }
        outstanding.release();
        let now = observe::now();
        self.on_fetched(now);
        let parts = [
            (&of_model.queue, begun, job.begun),
            (&of_model.prefill, computed, begun),
            (&of_model.handoff, sent, computed),
            (&of_model.decode, now, sent),
        ];
        for (part, end, start) in parts {
            part.observe(end.saturating_duration_since(start).as_secs_f64());
        }
        Outcome::Answered(tried)
    }

    /// Has the prompt computed. The prefill worker's part of the request ends with it.
    async fn first_leg(&self, legs: &Legs, now: Instant) -> First {
        let Self {
            relay,
            it,
            of_model,
            job,
            plan,
            prefill,
            ..
        } = *self;
        let worker = &prefill.worker;
        let belief = Belief::new(&relay.caches.predicted, now, worker, &plan.prompt.blocks);
        let tokens = plan.request.prompt_tokens;
        let held_tokens = tokens.saturating_sub(prefill.decision.new_tokens);
        let report = plan.asks(&relay.caches.board, worker);
        let mut running = Running::new(
            InFlight::new(worker.clone(), tokens, held_tokens),
            plan.expect(&relay.caches.unconfirmed, worker),
            plan.check(&relay.caches.parity, now, worker),
            report.map(|_| relay.caches.board.ask(worker.id)),
        );
        let transfer = Transfer::begin(
            it.connector,
            job.api,
            // Of no other try: what was handed over under it is not to be found by another.
            format!("{}-{}", job.id, self.tries),
            host(worker),
            prefill.peer.clone(),
            plan.request.seed,
        );
        let transfer = match transfer {
            Ok(transfer) => transfer,
            Err(unhanded) => return self.unhanded(unhanded),
        };
        let body = legs.prefill(&transfer);
        let part = Part::Leg {
            rank: transfer.rank(),
            // An id that the router makes is of one request; what an engine makes is another's each time.
            is_once: it.connector.needs_peer(),
        };
        // A prompt's leg is a first token.
        let limit = Duration::from_millis(relay.settings.first_byte_timeout_ms);
        let timer = tokio::time::sleep_until((now + limit).min(self.deadline).into());
        let timer = Box::pin(timer);
        let sent = match report {
            None => direct::attempt(job, &body, part, worker, timer).await,
            Some(report) => {
                let whole = plan.body.as_ref().unwrap_or(&job.body);
                let asking = match Legs::of(job.api, &report.put_into(whole)) {
                    Ok(legs) => legs.prefill(&transfer),
                    Err(_) => body.clone(),
                };
                relay
                    .attempt_asking(job, (&asking, &body), part, plan, worker, timer)
                    .await
            }
        };
        let mut answer = match sent {
            Ok(answer) => answer,
            Err(error) => return self.first_failed(&error),
        };
        let status = answer.head.status;
        if !status.is_success() {
            let refusal = relay.refusal(worker, &answer);
            let is_failure = answer.is_failure();
            running.on_refusal();
            let tried = Tried {
                answer,
                running,
                decision: prefill.decision,
                tries: self.tries,
                split: Some(Ok(self.split(None))),
            };
            let failure = match refusal {
                Some(failure) => failure,
                None if is_failure => Failure::Handoff,
                // The decode worker would say the same.
                None => return First::Answer(tried),
            };
            of_model.on_handoff("prefill_failed");
            return First::Lost(Lost::refused(At::Prefill, failure, tried));
        }
        let whole = match read_whole(&mut answer).await {
            Ok(whole) => whole,
            Err(error) => return self.first_failed(&error),
        };
        // Nobody else hears how its answer ended.
        plan.model.report_to_breaker(worker, true);
        belief.confirm();
        running.on_first_token(observe::now());
        match transfer.end(&whole) {
            Ok(handed) => First::Handed(handed),
            Err(unhanded) => self.unhanded(unhanded),
        }
    }

    /// The worker has computed the prompt, perhaps, and nobody can fetch it.
    fn unhanded(&self, unhanded: Unhanded) -> First {
        let worker = &self.prefill.worker;
        self.of_model.on_handoff(unhanded.as_str());
        let last = format!("{}: {unhanded}", worker.name);
        First::Lost(Lost {
            blame: Blame::Handoffs,
            ..Lost::at_prefill(Failure::Handoff, last)
        })
    }

    fn first_failed(&self, error: &direct::Error) -> First {
        self.of_model.on_handoff("prefill_failed");
        let last = format!("{}: {error}", self.prefill.worker.name);
        First::Lost(Lost {
            blame: Blame::of(error),
            ..Lost::at_prefill(error.failure(), last)
        })
    }

    /// Sends the request with what was handed over, and waits for its first token, or for an answer that is
    /// no stream.
    async fn second_leg(&self, body: Bytes, now: Instant) -> Result<direct::Answer, Unopened> {
        let Self { job, choice, .. } = *self;
        let limit = self.relay.try_limit(self.plan, now).min(self.deadline);
        let timer = Box::pin(tokio::time::sleep_until(limit.into()));
        // Blocks that were fetched once are other blocks the second time.
        let part = Part::Leg {
            rank: None,
            is_once: true,
        };
        let mut opened = pin!(async {
            let mut answer = direct::attempt(job, &body, part, &choice.worker, timer)
                .await
                .map_err(Unopened::Worker)?;
            open(job.api, &mut answer).await?;
            Ok(answer)
        });
        if !self.it.connector.needs_peer() {
            // An engine that was told whom to fetch from says itself that it could not.
            return opened.await;
        }
        let patience = match self.plan.is_stream {
            true => self.it.handoff_timeout,
            // Silent until its end. That a process is gone is noticed late, and long after that the blocks
            // have come.
            false => 2 * self.it.handoff_timeout,
        };
        let watched_until = now + patience;
        loop {
            if self.has_lost_prefill() {
                return Err(Unopened::Orphaned);
            }
            let now = observe::now();
            if now >= watched_until {
                break;
            }
            let look = tokio::time::sleep_until((now + LOOK_EVERY).min(watched_until).into());
            tokio::select! {
                biased;
                opened = &mut opened => return opened,
                () = look => {}
            }
        }
        match self.plan.is_stream {
            true => Err(Unopened::Silent),
            false => opened.await,
        }
    }

    /// Whether the process that computed the prompt is known to be gone.
    fn has_lost_prefill(&self) -> bool {
        let peer = &self.prefill.peer;
        peer.is_some() && *peer != self.prefill.worker.peer.load_full()
    }

    /// A decode leg without a first token.
    fn unopened(&self, unopened: Unopened, outstanding: Outstanding<'_>) -> Lost {
        let name = &self.choice.worker.name;
        match unopened {
            Unopened::Worker(error) => Lost {
                at: At::Worker,
                failure: error.failure(),
                blame: Blame::of(&error),
                last: format!("{name}: {error}"),
                answer: None,
            },
            Unopened::Failed(_) | Unopened::Silent | Unopened::Orphaned => {
                self.on_failed_handoff(outstanding);
                let (why, blame) = match unopened {
                    Unopened::Failed(why) => (why, Blame::Handoffs),
                    Unopened::Orphaned => (
                        "the process that computed its prompt is gone",
                        Blame::Handoffs,
                    ),
                    // Or a queue, which is nobody's fault.
                    _ => (
                        "no token came in time of a prompt that another worker computed",
                        Blame::Nobody,
                    ),
                };
                Lost {
                    at: At::Between,
                    failure: Failure::Handoff,
                    last: format!("{name}: {why}"),
                    answer: None,
                    blame,
                }
            }
        }
    }

    /// What was computed at the one did not get to the other: who of them is to blame is not known, and
    /// either may be well. The one that computes is asked for no more when it happens to one request after
    /// another, for then prompts are computed where they are needed.
    fn on_failed_handoff(&self, outstanding: Outstanding<'_>) {
        let prefill = &self.prefill.worker;
        outstanding.fail();
        warn!(
            id = %self.job.id,
            prefill = %prefill.name,
            decode = %self.choice.worker.name,
            "a handoff failed"
        );
    }

    /// The decode worker has the blocks now, and the other needs not keep them.
    fn on_fetched(&self, now: Instant) {
        let Self {
            relay,
            plan,
            choice,
            prefill,
            ..
        } = *self;
        self.of_model.used.inc();
        if prefill.worker.kv_transfer_breaker.on_success(now) {
            debug!(worker = %prefill.worker.name, "its handoffs succeed again");
        }
        let worker = &choice.worker;
        Belief::new(&relay.caches.predicted, now, worker, &plan.prompt.blocks).confirm();
        for coming in plan.expect(&relay.caches.unconfirmed, worker) {
            coming.on_first_token(now);
        }
    }

    fn split(&self, cached_tokens: Option<u64>) -> Split {
        Split {
            prefill: self.prefill.worker.name.clone(),
            decision: self.prefill.decision,
            cached_tokens,
        }
    }
}

impl Lost {
    fn at_prefill(failure: Failure, last: String) -> Self {
        Self {
            at: At::Prefill,
            failure,
            last,
            answer: None,
            blame: Blame::Nobody,
        }
    }
}
