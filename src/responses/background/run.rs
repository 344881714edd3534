//! One background response, from its first event to its end: does what its course says.

mod engine;
mod words;

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use bytes::Bytes;
use hyper::HeaderMap;
use tokio::runtime::Handle;
use tokio::time::sleep;
use tracing::warn;

use self::engine::Hearing;
use self::words::{End, Words};
use super::course::{Step, Stop, Then};
use super::kept::Kept;
use super::{Seat, unreadable};
use crate::ids::RequestId;
use crate::observe;
use crate::relay::ServedBy;
use crate::responses::finish::{Carry, Finish};
use crate::responses::item::Ids;
use crate::responses::lock::Locked;
use crate::responses::object::{Outcome, Shape};
use crate::responses::request::Create;
use crate::responses::sealing::Opener;
use crate::responses::{Asking, Responses};
use crate::store::{self, Amend, Cas, Item, Status};

/// Before the store is asked again that did not answer. The lease ends it.
const STORE_PAUSE: Duration = Duration::from_millis(200);
/// Of another replica's events, read at once.
const RECALL_BYTES: u64 = 1 << 20;

/// What is to be done for one response.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) kept: Kept,
    /// The client's.
    pub(super) headers: HeaderMap,
    pub(super) id: RequestId,
    pub(super) own: Vec<Item>,
    pub(super) conversation: Option<Locked>,
    pub(super) carry: Option<Carry>,
}

impl Job {
    pub(super) fn adopted(kept: Kept) -> Self {
        Self {
            kept,
            headers: HeaderMap::new(),
            id: RequestId::new(fastrand::u128(..)),
            own: Vec::new(),
            conversation: None,
            carry: None,
        }
    }
}

/// Runs it until its end; the drain waits for it, and it ends soon after that is over.
pub(super) fn spawn(responses: Arc<Responses>, job: Job, seat: Seat) {
    let tracked = responses.tasks.clone().track(run(responses, job, seat));
    drop(Handle::current().spawn(tracked));
}

struct Runner<'a> {
    responses: &'a Responses,
    seat: &'a Seat,
    words: Words,
    finish: Finish,
    end: Option<End>,
}

async fn run(responses: Arc<Responses>, job: Job, seat: Seat) {
    let kept = job.kept;
    let key = seat.key;
    let text = key.id.to_string();
    let Ok(create) = Create::read_count(kept.client()) else {
        // Of a release that read more of a body than this one.
        return unreadable::end(&responses, &seat).await;
    };
    let opener = Opener {
        ring: &responses.ring,
        tenant: key.tenant,
        now_s: observe::unix_s().unsigned_abs(),
        model: &create.model,
        plain_bytes: AtomicU64::new(0),
    };
    let sealer = job.carry.as_ref().map(|carry| carry.sealer.clone());
    let sealer = sealer.or_else(|| responses.sealer(&create, &opener, &text));
    let shape = Shape::new(&create, &kept.header(&text), Ids::of(key.id));
    let finish = Finish {
        responses: responses.clone(),
        key,
        is_stored: false,
        past: None,
        model: (&*create.model).into(),
        worker: None,
        own: job.own,
        input: Bytes::new(),
        conversation: job.conversation,
        carry: job.carry,
        may_refuse: false,
        in_flight: responses.metrics.begin_background(),
    };
    let mut runner = Runner {
        responses: &responses,
        seat: &seat,
        words: Words::new(shape, responses.limits(), sealer),
        finish,
        end: None,
    };
    let asking = Asking {
        headers: &job.headers,
        id: job.id,
        begun: observe::now(),
    };
    tokio::select! {
        biased;
        why = stopped(&responses, &seat) => seat.run.course.lock().on_stop(why),
        () = runner.make(&create, &kept, &text, &asking) => {}
    }
    // The engine's connection went with what made it.
    if let Some(asked) = seat.run.cancelled.get() {
        let took = observe::now().saturating_duration_since(*asked);
        let seconds = &responses.background.metrics.cancel_stop_seconds;
        seconds.observe(took.as_secs_f64());
    }
    tokio::select! {
        biased;
        () = lost(&seat) => seat.run.course.lock().on_stop(Stop::Lost),
        () = runner.end() => {}
    }
    let why = seat.run.course.lock().why();
    if let Some(why) = why {
        let stopped = &responses.background.metrics.stopped;
        stopped.with_label_values(&[why.as_str()]).inc();
    }
    if let Some(lock) = runner.finish.conversation.take() {
        lock.release().await;
    }
}

/// Resolves when it must not go on as it does.
async fn stopped(responses: &Responses, seat: &Seat) -> Stop {
    let mut stop = seat.run.stop.subscribe();
    let told = async {
        match stop.wait_for(Option::is_some).await {
            Ok(why) => (*why).unwrap_or(Stop::Lost),
            Err(_) => Stop::Lost,
        }
    };
    let drained = async {
        responses.tasks.stopped().await;
        // What no engine has begun is handed over at once; the rest has until the end of the drain.
        let is_begun = seat.run.course.lock().is_begun();
        if is_begun {
            responses.tasks.aborted().await;
        }
        Stop::Draining
    };
    let limit = Duration::from_millis(responses.background.settings.run_max_ms);
    tokio::select! {
        biased;
        why = told => why,
        why = drained => why,
        () = sleep(limit) => Stop::TooLong,
    }
}

/// Resolves when another replica may have it.
async fn lost(seat: &Seat) {
    let mut stop = seat.run.stop.subscribe();
    let _ = stop.wait_for(|why| *why == Some(Stop::Lost)).await;
}

impl Runner<'_> {
    fn next(&self) -> Step {
        self.seat.run.course.lock().next()
    }

    /// Has it made, and stores its events as they come. The engine's connection goes with this future.
    async fn make(&mut self, create: &Create<'_>, kept: &Kept, id: &str, asking: &Asking<'_>) {
        let (store, key, fence) = (&self.responses.store, self.seat.key, self.seat.run.fence);
        let course = &self.seat.run.course;
        let flush = Duration::from_millis(self.responses.background.settings.flush_ms);
        let mut engine: Option<Hearing> = None;
        loop {
            let then = match self.next() {
                Step::Listen if !self.words.is_announced() => {
                    course.lock().on_events(&self.words.announce());
                    Then::Now
                }
                Step::Listen => {
                    let Some(hearing) = &mut engine else {
                        match self.answered(create, kept, id, asking).await {
                            Ok(answer) => {
                                let served_by = answer.extensions().get::<ServedBy>();
                                self.finish.worker = served_by.map(|it| it.0.clone());
                                engine = Some(Hearing::new(answer.into_body()));
                            }
                            Err(error) => {
                                let (said, outcome) = self.words.refuse(&error);
                                self.conclude(&said, outcome).await;
                            }
                        }
                        continue;
                    };
                    let is_over = hearing.hear(flush).await;
                    let (said, outcome) = self.words.push(&hearing.take(), is_over);
                    course.lock().on_begun();
                    let Some(outcome) = outcome else {
                        course.lock().on_events(&said);
                        continue;
                    };
                    let is_failed = outcome.status == Status::Failed;
                    self.conclude(&said, outcome).await;
                    if let Some(hearing) = engine.take().filter(|_| !is_failed) {
                        hearing.rest().await;
                    }
                    return;
                }
                Step::Start => {
                    let said = store.start(key, fence).await;
                    course.lock().on_started(&said)
                }
                Step::Append(batch) => {
                    let (last, bytes) = (batch.last, batch.bytes.len() as u64);
                    let said = store.append(key, fence, batch).await;
                    if let Err(error) = &said
                        && error.retry_after().is_none()
                    {
                        warn!(id = %key.id, %error, "events of a background response were not stored");
                    }
                    if said == Ok(Cas::Done) {
                        self.responses.background.metrics.event_bytes.inc_by(bytes);
                    }
                    let then = course.lock().on_appended(last, &said);
                    self.seat.run.news.send_modify(|news| *news += 1);
                    then
                }
                Step::Recall { after } => {
                    let said = store.events(key, after, RECALL_BYTES).await;
                    course.lock().on_recalled(&said)
                }
                _ => return,
            };
            if then == Then::Later {
                sleep(STORE_PAUSE).await;
            }
        }
    }

    /// Makes its last events, and all that is stored at its end.
    async fn conclude(&mut self, said: &[u8], mut outcome: Outcome) {
        let composed = self.words.compose(&self.finish, &mut outcome).await;
        let mut course = self.seat.run.course.lock();
        course.on_events(said);
        let end = self.words.conclude(&mut course, composed, outcome);
        self.end = Some(end);
    }

    /// Stores its end, or what is left of it.
    async fn end(&mut self) {
        let (store, key, fence) = (&self.responses.store, self.seat.key, self.seat.run.fence);
        let course = &self.seat.run.course;
        let mut response = Bytes::new();
        let mut left: Option<Amend> = None;
        loop {
            let then = match self.next() {
                Step::Leave => return,
                // What was left undone before it ended.
                Step::Start => {
                    let said = store.start(key, fence).await;
                    course.lock().on_started(&said)
                }
                Step::Fail { why, is_recalled } => {
                    let (said, outcome) = match is_recalled {
                        true => self.words.fail_after(course.lock().log(), why),
                        false => self.words.fail(why),
                    };
                    self.conclude(&said, outcome).await;
                    Then::Now
                }
                Step::Shorten { number } => {
                    let end = self.words.shorten(&mut course.lock(), number);
                    self.end = Some(end);
                    Then::Now
                }
                Step::Finalize(batch) => {
                    let Some(end) = &self.end else {
                        warn!(id = %key.id, "a background response has no end");
                        return;
                    };
                    let end = end.with(batch, &self.finish);
                    let said = store.finalize(key, fence, end).await;
                    if let Err(error) = &said {
                        warn!(id = %key.id, %error, "the end of a background response was not stored");
                    }
                    let then = course.lock().on_finalized(&said);
                    self.on_finalized(&said).await;
                    then
                }
                Step::Cut => {
                    let said = store.get(key).await.map(|found| {
                        let found = found?;
                        let last = found.background.and_then(|it| it.last_event);
                        response = found.content.response;
                        Some((found.status, last))
                    });
                    course.lock().on_record(&said)
                }
                Step::Amend => {
                    let amend = left.get_or_insert_with(|| {
                        let response = std::mem::take(&mut response);
                        self.words.cut(&course.lock(), response)
                    });
                    let said = store.amend(key, fence, amend.clone()).await;
                    if let Err(error) = &said {
                        warn!(id = %key.id, %error, "what there was of a cancelled response was not kept");
                    }
                    course.lock().on_amended(&said)
                }
                Step::Release => {
                    let said = store.release(key, fence).await;
                    if let Err(error) = &said {
                        warn!(id = %key.id, %error, "a background response was not handed over");
                    }
                    course.lock().on_released(&said)
                }
                Step::Recall { after } => {
                    let said = store.events(key, after, RECALL_BYTES).await;
                    course.lock().on_recalled(&said)
                }
                // These are done with.
                Step::Listen | Step::Append(_) => return,
            };
            if then == Then::Later {
                sleep(STORE_PAUSE).await;
            }
        }
    }

    /// It is stored: whoever reads it here is told, and its conversation gets it.
    async fn on_finalized(&mut self, said: &Result<Cas, store::Error>) {
        if *said != Ok(Cas::Done) {
            return;
        }
        self.seat.run.news.send_modify(|news| *news += 1);
        let Some(end) = self.end.take() else {
            return;
        };
        self.responses.metrics.on_end(end.outcome.status);
        if let Err(error) = self.finish.add_to_conversation(&end.outcome).await {
            let id = self.seat.key.id;
            warn!(%id, %error, "response was made and not added to its conversation");
        }
    }
}
