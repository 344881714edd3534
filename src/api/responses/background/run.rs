//! One background response, from its first event to its end, under its owner's fence.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::HeaderMap;
use hyper::StatusCode;
use tokio::runtime::Handle;
use tokio::time::sleep;
use tracing::warn;

use super::super::super::error::ApiError;
use super::super::Asking;
use super::super::Responses;
use super::super::engine;
use super::super::events::Events;
use super::super::failure;
use super::super::finish::Carry;
use super::super::finish::Finish;
use super::super::item::Ids;
use super::super::lock::Locked;
use super::super::object::Outcome;
use super::super::object::Shape;
use super::super::request::Create;
use super::super::request::Truncation;
use super::super::retry;
use super::super::sealing::Opener;
use super::super::sealing::Sealer;
use super::super::sent;
use super::Seat;
use super::Stop;
use super::kept::Kept;
use super::log;
use super::log::Log;
use crate::http;
use crate::ids::RequestId;
use crate::observe;
use crate::relay::ServedBy;
use crate::store;
use crate::store::Amend;
use crate::store::Cas;
use crate::store::Final;
use crate::store::Hint;
use crate::store::Item;
use crate::store::Status;
use crate::store::Token;
use crate::store::record::Adopted;
use crate::store::record::Content;

/// Before the store is asked again that did not answer. The lease ends it.
const STORE_PAUSE: Duration = Duration::from_millis(200);
/// Between two asks for a worker, the first and the longest.
const WORKER_PAUSE: Duration = Duration::from_millis(250);
const WORKER_PAUSE_MAX: Duration = Duration::from_secs(5);
/// Of an engine's words that are gathered.
const GATHERED_MAX: usize = 64 << 10;
/// What an engine may still say after its last event, and for how long.
const REST_BYTES_MAX: usize = 16 << 10;
const REST: Duration = Duration::from_secs(1);
/// Events that say nothing of an answer: whoever begins again tells the same.
const FIRST_EVENTS: u64 = 3;
const MARK: &[u8] = b"data: [DONE]\n\n";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Plan {
    Run,
    /// What came of it, and no more.
    Fail(&'static str),
}

/// What is to be done for one response.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) kept: Kept,
    pub(super) streams: bool,
    /// Events that are stored.
    pub(super) stored: u64,
    pub(super) plan: Plan,
    /// The client's.
    pub(super) headers: HeaderMap,
    pub(super) id: RequestId,
    pub(super) own: Vec<Item>,
    pub(super) conversation: Option<Locked>,
    pub(super) carry: Option<Carry>,
}

impl Job {
    pub(super) fn adopted(kept: Kept, adopted: &Adopted, plan: Plan) -> Self {
        Self {
            kept,
            streams: adopted.streams,
            stored: adopted.last_event.map_or(0, |last| last + 1),
            plan,
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
    log: Log,
    streams: bool,
    worker: Option<Arc<str>>,
}

/// How to make events for this response.
struct Maker {
    shape: Shape,
    sealer: Option<Sealer>,
}

async fn run(responses: Arc<Responses>, job: Job, seat: Seat) {
    let kept = job.kept;
    let key = seat.key;
    let text = key.id.to_string();
    let Ok(create) = Create::read_count(kept.client()) else {
        warn!(id = %key.id, "what was kept of a response cannot be read");
        return;
    };
    let opener = Opener {
        ring: &responses.ring,
        tenant: key.tenant,
        now_s: observe::unix_s().unsigned_abs(),
        model: &create.model,
        plain_bytes: AtomicU64::new(0),
    };
    let sealer = job.carry.as_ref().map(|carry| carry.sealer.clone());
    let maker = Maker {
        shape: Shape::new(&create, &kept.header(&text), Ids::of(key.id)),
        sealer: sealer.or_else(|| responses.sealer(&create, &opener, &text)),
    };
    let mut events = maker.events(&responses);
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
        log: Log::after(job.stored),
        streams: job.streams,
        worker: None,
    };
    let asking = Asking {
        headers: &job.headers,
        id: job.id,
        begun: observe::now(),
    };
    let made = match job.plan {
        Plan::Run => tokio::select! {
            biased;
            why = stopped(&responses, &seat) => Err(why),
            made = runner.make(&mut events, &create, &kept, &text, &asking) => made,
        },
        Plan::Fail(why) => runner.give_up(why, &maker, &mut events).await,
    };
    runner.end(made, events, &maker, finish).await;
}

impl Maker {
    fn events(&self, responses: &Responses) -> Events {
        let events = Events::new(self.shape.clone(), responses.limits(), self.sealer.clone());
        events.in_background()
    }
}

/// Resolves when it must not go on.
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
        if seat
            .run
            .is_started
            .load(std::sync::atomic::Ordering::Relaxed)
        {
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

impl Runner<'_> {
    /// Has it made, and stores its events as they come. The engine's connection goes with this future.
    async fn make(
        &mut self,
        events: &mut Events,
        create: &Create<'_>,
        kept: &Kept,
        id: &str,
        asking: &Asking<'_>,
    ) -> Result<Outcome, Stop> {
        let mut out = Vec::new();
        events.announce(&mut out);
        self.tell(&out).await?;
        let answer = match self.answered(create, kept, id, asking).await {
            Ok(answer) => answer,
            Err(error) => {
                let mut out = Vec::new();
                let mut outcome = events.refuse(&error.message, &mut out);
                if let Some(failure) = &mut outcome.error
                    && error.status.is_client_error()
                {
                    failure.code = "invalid_prompt";
                }
                self.log_only(&out);
                return Ok(outcome);
            }
        };
        self.worker = answer.extensions().get::<ServedBy>().map(|it| it.0.clone());
        let mut engine = answer.into_body();
        let flush = Duration::from_millis(self.responses.background.settings.flush_ms);
        let mut gathered: Vec<u8> = Vec::new();
        let mut due = None;
        let mut is_started = false;
        loop {
            let mut is_over = false;
            let is_due = async {
                match due {
                    None => std::future::pending().await,
                    Some(due) => tokio::time::sleep_until(due).await,
                }
            };
            tokio::select! {
                biased;
                () = is_due => {}
                frame = engine.frame() => match frame {
                    Some(Ok(frame)) => {
                        gathered.extend_from_slice(&frame.into_data().unwrap_or_default());
                        if is_started && gathered.len() < GATHERED_MAX {
                            let now = tokio::time::Instant::from_std(observe::now());
                            due.get_or_insert(now + flush);
                            continue;
                        }
                    }
                    Some(Err(_)) | None => is_over = true,
                },
            }
            due = None;
            if !is_started {
                is_started = true;
                self.start().await?;
            }
            let mut out = Vec::new();
            let mut outcome = events.push(&gathered, &mut out);
            gathered.clear();
            if is_over && outcome.is_none() {
                outcome = events.finish(&mut out);
            }
            if let Some(outcome) = outcome {
                self.log_only(&out);
                if outcome.status != Status::Failed {
                    let _ = tokio::time::timeout(REST, hear_out(engine)).await;
                }
                return Ok(outcome);
            }
            self.tell(&out).await?;
        }
    }

    /// An engine's answer, waited for while there is none to be had.
    async fn answered(
        &self,
        create: &Create<'_>,
        kept: &Kept,
        id: &str,
        asking: &Asking<'_>,
    ) -> Result<hyper::Response<http::Body>, ApiError> {
        let settings = &self.responses.background.settings;
        let limit = Duration::from_millis(settings.queue_max_ms);
        let mut input = kept.input().to_vec();
        let mut pause = WORKER_PAUSE;
        loop {
            let body = engine::streamed_body(create, &input, id, kept.salt.as_deref());
            let error = match self.responses.ask_response(asking, body).await {
                Ok(answer) => return Ok(answer),
                Err(error) => error,
            };
            if error.code == failure::TOO_LONG && create.truncation == Truncation::Auto {
                input = sent::shortened(&input).ok_or(error)?;
                continue;
            }
            let may_help = matches!(
                error.status,
                StatusCode::TOO_MANY_REQUESTS
                    | StatusCode::BAD_GATEWAY
                    | StatusCode::SERVICE_UNAVAILABLE
                    | StatusCode::GATEWAY_TIMEOUT
            );
            let waited = observe::now().saturating_duration_since(asking.begun);
            if !may_help || waited + pause > limit {
                return Err(error);
            }
            sleep(pause).await;
            pause = (pause * 2).min(WORKER_PAUSE_MAX);
        }
    }

    async fn start(&self) -> Result<(), Stop> {
        self.seat
            .run
            .is_started
            .store(true, std::sync::atomic::Ordering::Relaxed);
        loop {
            let started = self
                .responses
                .store
                .start(self.seat.key, self.seat.run.fence);
            match started.await {
                Ok(Cas::Gone | Cas::Terminal(_)) => return Err(Stop::Ended),
                Ok(Cas::Fenced) => return Err(Stop::Lost),
                Ok(_) => return Ok(()),
                Err(_) => sleep(STORE_PAUSE).await,
            }
        }
    }

    fn log_only(&mut self, out: &[u8]) {
        if self.streams {
            self.log.push(out);
        }
    }

    /// Stores events, and lets readers know.
    async fn tell(&mut self, out: &[u8]) -> Result<(), Stop> {
        self.log_only(out);
        while let Some(batch) = self.log.batch().filter(|_| self.streams) {
            let last = batch.last;
            let (key, fence) = (self.seat.key, self.seat.run.fence);
            match self.responses.store.append(key, fence, batch).await {
                Ok(Cas::Done | Cas::Duplicate { .. }) => self.log.on_stored(last),
                Ok(Cas::Overflow) => {
                    self.log.on_overflow();
                    self.log.on_stored(last);
                }
                Ok(Cas::Gap { last }) => {
                    if !self.log.rewind(last) {
                        return Err(Stop::Lost);
                    }
                }
                Ok(Cas::Gone | Cas::Terminal(_)) => return Err(Stop::Ended),
                Ok(Cas::Fenced) => return Err(Stop::Lost),
                Err(store::Error::Unavailable { .. } | store::Error::Unknown { .. }) => {
                    sleep(STORE_PAUSE).await;
                }
                Err(error) => {
                    warn!(id = %key.id, %error, "events of a background response were not stored");
                    return Err(Stop::TooLong);
                }
            }
        }
        self.seat.run.news.send_modify(|news| *news += 1);
        Ok(())
    }

    /// Ends what another replica has told events of: its output is what they say.
    async fn give_up(
        &mut self,
        why: &'static str,
        maker: &Maker,
        events: &mut Events,
    ) -> Result<Outcome, Stop> {
        let mut after = None;
        let stored = self.log.stored();
        let mut text = Vec::new();
        while self.streams && after.map_or(0, |after: u64| after + 1) < stored {
            let read = self.responses.store.events(self.seat.key, after, 1 << 20);
            let Ok(Some(read)) = read.await else {
                sleep(STORE_PAUSE).await;
                if let Some(why) = *self.seat.run.stop.borrow() {
                    return Err(why);
                }
                continue;
            };
            let Some(last) = read.batches.last().map(|batch| batch.last) else {
                break;
            };
            for batch in &read.batches {
                text.extend_from_slice(log::beyond(&batch.bytes, batch.first, after).0);
            }
            after = Some(last);
        }
        self.log.push(&text);
        if self.streams && self.log.stored_text().is_none() {
            self.log.on_overflow_at(stored);
        }
        let partial = maker.events(self.responses).cut_again(&text);
        events.go_on_at(stored);
        Ok(Outcome {
            output: partial.output,
            told: partial.told,
            ..Outcome::failed("server_error", why)
        })
    }

    async fn end(
        mut self,
        made: Result<Outcome, Stop>,
        mut events: Events,
        maker: &Maker,
        finish: Finish,
    ) {
        let why = match made {
            Ok(outcome) => return self.finalize(outcome, events, maker, finish).await,
            Err(why) => why,
        };
        let stopped = &self.responses.background.metrics.stopped;
        stopped.with_label_values(&[why.as_str()]).inc();
        match why {
            Stop::Ended => self.amend(events, maker).await,
            Stop::Lost => {}
            Stop::Draining if !self.streams || self.log.stored() <= FIRST_EVENTS => {
                self.release().await
            }
            Stop::Draining | Stop::TooLong => {
                let message = match why {
                    Stop::TooLong => "The response took too long.",
                    _ => "The router that ran this response was stopped.",
                };
                let mut out = Vec::new();
                let outcome = events.refuse(message, &mut out);
                self.log_only(&out);
                self.finalize(outcome, events, maker, finish).await;
            }
        }
    }

    async fn release(&self) {
        let (key, fence) = (self.seat.key, self.seat.run.fence);
        let released = retry::until_known(|| self.responses.store.release(key, fence)).await;
        if let Err(error) = released {
            // The end of its owner's lease releases it.
            warn!(id = %key.id, %error, "a background response was not handed over");
        }
    }

    async fn finalize(
        &mut self,
        mut outcome: Outcome,
        mut events: Events,
        maker: &Maker,
        mut finish: Finish,
    ) {
        let (key, fence) = (self.seat.key, self.seat.run.fence);
        let (response, state) = finish.compose(events.shape(), &mut outcome, events.place());
        let mut out = Vec::new();
        if let Some((added, done)) = &state {
            events.add_item(added, done, &mut out);
        }
        self.log_only(&out);
        let cut = self.log.text().filter(|_| self.streams).map(log::sealed);
        out.clear();
        events.end(&response, &outcome, &mut out);
        self.log_only(out.strip_suffix(MARK).unwrap_or(&out));
        let mut end = Final {
            token: Token(fastrand::u64(..)),
            status: outcome.status,
            content: Content {
                response: response.into(),
                output: Bytes::copy_from_slice(&outcome.output),
            },
            hint: Hint {
                model: finish.model.clone(),
                worker: self.worker.clone(),
            },
            batch: None,
            cut: cut.unwrap_or_default(),
        };
        loop {
            end.batch = self.log.batch().filter(|_| self.streams);
            let mut stop = self.seat.run.stop.subscribe();
            let is_lost = stop.wait_for(|why| *why == Some(Stop::Lost));
            let done = tokio::select! {
                biased;
                done = self.responses.store.finalize(key, fence, end.clone()) => done,
                _ = is_lost => return,
            };
            match done {
                Ok(Cas::Done) => break,
                Ok(Cas::Terminal(Status::Cancelled)) => return self.amend(events, maker).await,
                Ok(Cas::Terminal(_) | Cas::Gone | Cas::Fenced) => return,
                Ok(Cas::Gap { last }) if self.log.rewind(last) => {}
                Ok(Cas::Gap { .. }) => return,
                Ok(Cas::Duplicate { last }) => self.log.on_stored(last),
                Ok(Cas::Overflow) => self.log.on_overflow(),
                Err(store::Error::TooLarge { .. }) if end.status != Status::Failed => {
                    // Too large to be kept, now and at any time: it ends without what cannot be kept.
                    let message = "The response is larger than the store allows.";
                    let failed = Outcome::failed("server_error", message);
                    let response = maker.shape.ended(&failed, observe::unix_s().unsigned_abs());
                    end.status = Status::Failed;
                    end.content = Content {
                        response: response.into(),
                        output: b"[]".as_slice().into(),
                    };
                    end.cut = Bytes::new();
                    self.log.on_overflow();
                }
                Err(store::Error::Unavailable { .. } | store::Error::Unknown { .. }) => {
                    sleep(STORE_PAUSE).await
                }
                Err(error) => {
                    warn!(id = %key.id, %error, "a background response was not ended");
                    return;
                }
            }
        }
        self.responses.metrics.on_end(end.status);
        if let Err(error) = finish.add_to_conversation(&outcome).await {
            warn!(id = %key.id, %error, "response was made and not added to its conversation");
        }
    }

    /// Leaves what there is of a cancelled response: what its readers were told, and no more.
    async fn amend(&mut self, events: Events, maker: &Maker) {
        let (key, fence) = (self.seat.key, self.seat.run.fence);
        let Ok(Some(record)) = retry::until_known(|| self.responses.store.get(key)).await else {
            return;
        };
        if record.status != Status::Cancelled {
            return;
        }
        // The last event is the cancel's.
        let last = record.background.and_then(|it| it.last_event);
        let _ = self.log.rewind(last.and_then(|last| last.checked_sub(1)));
        let told = self.log.stored_text().filter(|_| self.streams);
        let outcome = match told {
            Some(told) => maker.events(self.responses).cut_again(told),
            None => events.cut(),
        };
        let amend = Amend {
            content: Content {
                response: record.content.response.clone(),
                output: outcome.output.into(),
            },
            cut: told.map(log::sealed).unwrap_or_default(),
        };
        let amended = retry::until_known(|| self.responses.store.amend(key, fence, amend.clone()));
        if let Err(error) = amended.await {
            warn!(id = %key.id, %error, "what there was of a cancelled response was not kept");
        }
    }
}

/// Else it would look to the engine as if it was left.
async fn hear_out(mut engine: http::Body) {
    let mut bytes = 0;
    while let Some(Ok(frame)) = engine.frame().await {
        bytes += frame.into_data().map_or(0, |data| data.len());
        if bytes > REST_BYTES_MAX {
            return;
        }
    }
}
