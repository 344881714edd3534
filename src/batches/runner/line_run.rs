//! One line of a batch: through the gate, to an engine, and again if that fails.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU32};

use bytes::Bytes;
use parking_lot::Mutex;
use serde_json::value::RawValue;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::sleep;

use super::input_lines::InputLine;
use super::off_thread::off_thread;
use super::retry::{FailedTries, Tries};
use crate::batches::batch::Usage;
use crate::batches::line::{BYTES_PER_TOKEN, Flavor, LineEndpoint, LineError};
use crate::batches::memory_bounds::{HeldAnswer, MemoryBounds};
use crate::batches::metrics::Metrics;
use crate::batches::output::{self, PartLine, ResultOf};
use crate::batches::room_gate::RoomGate;
use crate::batches::send::{LineAnswer, LineRequest, SendLine};
use crate::openai::error::ApiError;

/// Of an answer that is no JSON, a result has so many bytes.
const MAX_TEXT_BYTES: usize = 64 << 10;

/// Models that a run of a shard has engines asked for, one after the other, for a second or two each. Lines of further
/// models that are not known are refused at once: a file with that many has names of its own making.
const MAX_LOOKED_UP: usize = 32;

/// What the lines of a shard share.
#[derive(Debug)]
pub(super) struct LineContext {
    pub(super) sender: Arc<dyn SendLine>,
    pub(super) gate: Arc<RoomGate>,
    pub(super) memory: Arc<MemoryBounds>,
    pub(super) metrics: Metrics,
    pub(super) flavor: Flavor,
    pub(super) endpoint: LineEndpoint,
    pub(super) tenant: Arc<str>,
    pub(super) batch: Arc<str>,
    /// Lines that are at an engine.
    pub(super) sending: AtomicU32,
    /// How often a try of a line has failed that counted: the line came nearer to its end.
    pub(super) retries: AtomicU32,
    /// Lines that wait for others of their conversation, here or elsewhere, or for the end of this run.
    pub(super) held_up: AtomicU32,
    /// No line begins any more: the shard is given back once those that run have ended.
    pub(super) is_ending: AtomicBool,
    /// For one line at a time of each conversation that lines name.
    pub(super) turns: Mutex<BTreeMap<Bytes, Arc<Semaphore>>>,
    /// Of lines without a result, before this run of the shard.
    pub(super) earlier_tries: FailedTries,
    /// Of lines without a result that were tried in this run, with the earlier ones.
    pub(super) tries: Mutex<FailedTries>,
    /// Models that engines were asked for in this run.
    pub(super) looked_up: Mutex<BTreeSet<Arc<str>>>,
    /// For one look-up at a time: the lines of a model share it, and leave the places of look-ups to other requests.
    pub(super) look_up_turn: Semaphore,
}

/// A line with its result.
#[derive(Debug)]
pub(super) struct FinishedLine {
    pub(super) line: PartLine,
    /// The result line.
    pub(super) text: String,
    /// Of the answer; `None` if the line was not sent.
    pub(super) held: Option<Arc<HeldAnswer>>,
}

/// Counts a line as in flight until it is dropped.
struct LineInFlight<'a>(&'a LineContext);

impl<'a> LineInFlight<'a> {
    fn begin(context: &'a LineContext) -> Self {
        context.metrics.lines_in_flight.inc();
        context.sending.fetch_add(1, Relaxed);
        Self(context)
    }
}

impl Drop for LineInFlight<'_> {
    fn drop(&mut self) {
        self.0.metrics.lines_in_flight.dec();
        self.0.sending.fetch_sub(1, Relaxed);
    }
}

/// Counts a line as held up until it is dropped.
struct HeldUp<'a>(&'a LineContext);

impl<'a> HeldUp<'a> {
    fn begin(context: &'a LineContext) -> Self {
        context.held_up.fetch_add(1, Relaxed);
        Self(context)
    }
}

impl Drop for HeldUp<'_> {
    fn drop(&mut self) {
        self.0.held_up.fetch_sub(1, Relaxed);
    }
}

/// Runs a line until it has a result. Dropped, it is given up.
pub(super) async fn run(context: Arc<LineContext>, line: InputLine) -> FinishedLine {
    if let Some(refused) = context.refused(&line).await {
        return refused;
    }
    let tokens = line.body.len() as u64 / BYTES_PER_TOKEN;
    let earlier = context.earlier_tries.get(&line.number);
    let counted = earlier.copied().unwrap_or(0);
    let mut tries = Tries { counted, locked: 0 };
    let mut gave_way = false;
    let _turn = context.turn(&line).await;
    loop {
        if context.is_ending.load(Relaxed) {
            // The shard ends, and with it this task.
            let _held_up = HeldUp::begin(&context);
            std::future::pending::<()>().await;
        }
        let Some(entering) = context.gate.enter(&line.model, tokens, gave_way).await else {
            // The router ends, and with it this task.
            std::future::pending::<()>().await;
            continue;
        };
        let held = HeldAnswer::new(&context.memory);
        let gives_way = entering.gives_way();
        let request = LineRequest {
            tenant: context.tenant.clone(),
            endpoint: context.endpoint,
            model: line.model.clone(),
            body: line.body.clone(),
            batch: context.batch.clone(),
            entering,
            held: held.clone(),
        };
        let answer = gives_way.run_until_cancelled_owned(context.send(request));
        let Some(answer) = answer.await else {
            context.metrics.gave_way.inc();
            gave_way = true;
            continue;
        };
        gave_way = false;
        let answer = checked(answer).await;
        let counted = tries.counted;
        let Some(pause) = tries.on_answer(&answer, fastrand::f64()) else {
            let bytes = answer.body.len();
            return off_thread(bytes, move || context.finish(&line, &answer, held)).await;
        };
        let status = answer.status.to_string();
        let is_locked = answer.is_locked;
        drop((answer, held));
        context.metrics.retries.with_label_values(&[&status]).inc();
        if tries.counted > counted {
            context.retries.fetch_add(1, Relaxed);
            let mut failed = context.tries.lock();
            failed.insert(line.number, tries.counted);
        }
        let _held_up = is_locked.then(|| HeldUp::begin(&context));
        sleep(pause).await;
    }
}

/// An answer of success that is no JSON object, such as the page of a proxy, becomes a failure of the engine.
async fn checked(answer: LineAnswer) -> LineAnswer {
    if !output::is_ok(answer.status) {
        return answer;
    }
    let body = answer.body.clone();
    if off_thread(body.len(), move || output::is_object(&body)).await {
        return answer;
    }
    let message = format!(
        "the engine answered {} with a body that is no JSON object",
        answer.status
    );
    let error = ApiError::invalid_engine_response(message);
    LineAnswer {
        status: error.status.as_u16(),
        body: error.into_text().into_body().into(),
        ..answer
    }
}

impl LineContext {
    async fn send(&self, request: LineRequest) -> LineAnswer {
        let _in_flight = LineInFlight::begin(self);
        self.sender.send(request).await
    }

    /// Waits for the lines before this one that name the same conversation: they cannot run beside each other, and each
    /// try would be a call of the store.
    async fn turn(&self, line: &InputLine) -> Option<OwnedSemaphorePermit> {
        let conversation = line.conversation.clone()?;
        let turn = {
            let mut turns = self.turns.lock();
            let entry = turns.entry(conversation);
            entry.or_insert_with(|| Arc::new(Semaphore::new(1))).clone()
        };
        let _held_up = HeldUp::begin(self);
        // The permit is never refused: nobody closes the semaphore.
        turn.acquire_owned().await.ok()
    }

    /// The result of a line whose model cannot be used. The lines of a file were checked for that before; those of a
    /// batch of Messages are checked one by one.
    async fn refused(&self, line: &InputLine) -> Option<FinishedLine> {
        if self.flavor == Flavor::OpenAi {
            return None;
        }
        let (code, message) = self.refusal(&line.model).await?;
        let error = LineError::new(&code, message, Some("model"));
        Some(self.unsent(line.number, &line.custom_id, &error))
    }

    /// Why a model cannot be used, after the engines were asked for it.
    async fn refusal(&self, model: &Arc<str>) -> Option<(String, String)> {
        let refusal = || self.sender.refusal(&self.tenant, model, self.endpoint);
        refusal()?;
        // The permit is never refused: nobody closes the semaphore.
        let _turn = self.look_up_turn.acquire().await;
        let refused = refusal()?;
        {
            let mut looked_up = self.looked_up.lock();
            if looked_up.len() >= MAX_LOOKED_UP || !looked_up.insert(model.clone()) {
                return Some(refused);
            }
        }
        if self.sender.look_up(&self.tenant, model).await {
            refusal()
        } else {
            Some(refused)
        }
    }

    /// The result of a line that cannot be sent because of this error.
    pub(super) fn unsent(&self, number: u32, custom_id: &str, error: &LineError) -> FinishedLine {
        FinishedLine {
            text: self.result_of(number, custom_id).invalid(error),
            line: PartLine {
                line: number,
                is_ok: false,
                usage: Usage::default(),
            },
            held: None,
        }
    }

    /// The result of a line that was answered. It goes through the body several times.
    fn finish(&self, line: &InputLine, answer: &LineAnswer, held: Arc<HeldAnswer>) -> FinishedLine {
        let is_ok = output::is_ok(answer.status);
        let body = if is_ok {
            answer.body.clone()
        } else {
            bounded(&answer.body)
        };
        let of = self.result_of(line.number, &line.custom_id);
        let usage = if is_ok {
            output::usage_of(&body)
        } else {
            Usage::default()
        };
        FinishedLine {
            text: of.answer(answer.status, &answer.request_id, &body),
            line: PartLine {
                line: line.number,
                is_ok,
                usage,
            },
            held: Some(held),
        }
    }

    fn result_of<'a>(&'a self, line: u32, custom_id: &'a str) -> ResultOf<'a> {
        ResultOf {
            flavor: self.flavor,
            batch: &self.batch,
            line,
            custom_id,
        }
    }
}

/// An answer that is no JSON becomes a string, several times as long as it was.
fn bounded(body: &Bytes) -> Bytes {
    if body.len() <= MAX_TEXT_BYTES || serde_json::from_slice::<&RawValue>(body).is_ok() {
        return body.clone();
    }
    body.slice(..MAX_TEXT_BYTES)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::{Value, json};

    use super::*;
    use crate::batches::send::SendFuture;
    use crate::ids::WorkerId;
    use crate::observe::metrics::Registry;
    use crate::relay::{LinesByWorker, SpareRoom};

    /// A fleet that gives everybody the same answer, but for the first, and counts how many lines it has at the same time.
    #[derive(Debug)]
    struct Fleet {
        first: Mutex<Option<First>>,
        others: LineAnswer,
        lines: AtomicU32,
        most: AtomicU32,
    }

    impl Fleet {
        fn new(first: Option<First>, others: LineAnswer) -> Arc<Self> {
            Arc::new(Self {
                first: Mutex::new(first),
                others,
                lines: AtomicU32::new(0),
                most: AtomicU32::new(0),
            })
        }
    }

    /// What becomes of the first line.
    #[derive(Debug)]
    enum First {
        Answered(LineAnswer),
        /// It is asked to give way while it is generated.
        GivesWay,
    }

    impl SendLine for Fleet {
        fn send(&self, line: LineRequest) -> SendFuture<'_> {
            assert_eq!(&*line.tenant, "default");
            let first = self.first.lock().take();
            Box::pin(async move {
                let lines = self.lines.fetch_add(1, Relaxed) + 1;
                self.most.fetch_max(lines, Relaxed);
                tokio::task::yield_now().await;
                let answer = match first {
                    None => self.others.clone(),
                    Some(First::Answered(answer)) => answer,
                    Some(First::GivesWay) => {
                        line.entering.gives_way().cancel();
                        std::future::pending().await
                    }
                };
                self.lines.fetch_sub(1, Relaxed);
                drop(line);
                answer
            })
        }

        fn to_give_way(&self, _: &LinesByWorker, _: u32) -> Vec<(WorkerId, u32)> {
            Vec::new()
        }

        fn room(&self, _: &str, _: &LinesByWorker) -> SpareRoom {
            SpareRoom {
                requests: 10,
                prompt_tokens: 1_000,
                workers: 1,
            }
        }

        fn refusal(&self, _: &str, _: &str, _: LineEndpoint) -> Option<(String, String)> {
            None
        }
    }

    fn answer(status: u16, body: &str, may_retry: bool) -> LineAnswer {
        LineAnswer {
            status,
            request_id: "wr-1".to_owned(),
            retry_after: None,
            may_retry,
            is_locked: false,
            body: Bytes::copy_from_slice(body.as_bytes()),
        }
    }

    /// The result of a line that is answered once.
    async fn result(flavor: Flavor, status: u16, body: &str) -> (PartLine, Value) {
        result_after(None, flavor, answer(status, body, false)).await
    }

    async fn result_after(
        first: Option<First>,
        flavor: Flavor,
        others: LineAnswer,
    ) -> (PartLine, Value) {
        let (line, text, _) = run_line(first, flavor, others).await;
        (line, text)
    }

    /// The result of a line, and how many of its tries have failed that counted.
    async fn run_line(
        first: Option<First>,
        flavor: Flavor,
        others: LineAnswer,
    ) -> (PartLine, Value, u32) {
        let context = context_of(Fleet::new(first, others), flavor);
        let finished = tokio::select! {
            finished = run(context.clone(), line_of(3, None)) => finished,
            () = context.gate.run(&*context.sender) => panic!("the gate has ended"),
        };
        assert_eq!(context.metrics.lines_in_flight.get(), 0);
        assert_eq!(finished.line.line, 3);
        let text = serde_json::from_str(&finished.text).unwrap();
        (finished.line, text, context.retries.load(Relaxed))
    }

    /// What the lines of a shard share that are sent so.
    fn context_of(sender: Arc<dyn SendLine>, flavor: Flavor) -> Arc<LineContext> {
        let metrics = Metrics::new(&Registry::default());
        Arc::new(LineContext {
            sender,
            gate: Arc::new(RoomGate::new(metrics.lines_waiting.clone())),
            memory: Arc::default(),
            metrics,
            flavor,
            endpoint: LineEndpoint::ChatCompletions,
            tenant: "default".into(),
            batch: "batch_1".into(),
            sending: AtomicU32::new(0),
            retries: AtomicU32::new(0),
            held_up: AtomicU32::new(0),
            is_ending: AtomicBool::new(false),
            turns: Mutex::default(),
            earlier_tries: FailedTries::new(),
            tries: Mutex::default(),
            looked_up: Mutex::default(),
            look_up_turn: Semaphore::new(1),
        })
    }

    fn line_of(number: u32, conversation: Option<&'static str>) -> InputLine {
        InputLine {
            number,
            custom_id: "a".to_owned(),
            model: "m".into(),
            body: Bytes::from_static(b"{}"),
            conversation: conversation.map(|id| Bytes::from_static(id.as_bytes())),
        }
    }

    #[tokio::test]
    async fn lines_of_one_conversation_are_sent_one_after_the_other() {
        for (conversation, most) in [(Some("\"conv_1\""), 1), (None, 3)] {
            let fleet = Fleet::new(None, answer(200, "{}", false));
            let context = context_of(fleet.clone(), Flavor::OpenAi);
            let line = |number| run(context.clone(), line_of(number, conversation));
            let all = async { tokio::join!(line(1), line(2), line(3)) };
            tokio::select! {
                _ = all => {}
                () = context.gate.run(&*context.sender) => panic!("the gate has ended"),
            }
            assert_eq!(fleet.most.load(Relaxed), most);
            assert_eq!(context.held_up.load(Relaxed), 0);
        }
    }

    #[tokio::test]
    async fn no_line_begins_once_its_shard_ends() {
        let fleet = Fleet::new(None, answer(200, "{}", false));
        let context = context_of(fleet.clone(), Flavor::OpenAi);
        context.is_ending.store(true, Relaxed);
        let is_held_up = async {
            while context.held_up.load(Relaxed) == 0 {
                tokio::task::yield_now().await;
            }
        };
        tokio::select! {
            _ = run(context.clone(), line_of(1, None)) => panic!("it was sent"),
            () = context.gate.run(&*context.sender) => panic!("the gate has ended"),
            () = is_held_up => {}
        }
        assert_eq!(fleet.most.load(Relaxed), 0);
    }

    #[tokio::test]
    async fn an_answer_is_the_result_with_what_it_used() {
        let usage = json!({"usage": {"prompt_tokens": 9, "completion_tokens": 2}}).to_string();
        let (line, text) = result(Flavor::OpenAi, 200, &usage).await;
        assert!(line.is_ok && line.usage.input_tokens == 9);
        assert_eq!(text["response"]["status_code"], 200);
        assert_eq!(text["response"]["request_id"], "wr-1");
        let (line, text) = result(Flavor::OpenAi, 500, &usage).await;
        assert!(!line.is_ok && line.usage == Usage::default());
        assert_eq!(text["response"]["status_code"], 500);
    }

    #[tokio::test]
    async fn of_an_answer_that_is_no_json_the_beginning_is_kept() {
        let long = "x".repeat(2 * MAX_TEXT_BYTES);
        let (line, text) = result(Flavor::OpenAi, 502, &long).await;
        assert!(!line.is_ok);
        let body = text["response"]["body"].as_str().unwrap();
        assert_eq!(body.len(), MAX_TEXT_BYTES);
    }

    #[tokio::test]
    async fn a_success_that_is_no_object_is_a_failure() {
        for body in ["<html>busy</html>", "", "7"] {
            let (line, text) = result(Flavor::OpenAi, 200, body).await;
            assert!(!line.is_ok && line.usage == Usage::default());
            let response = &text["response"];
            assert_eq!(response["status_code"], 502, "{text}");
            let error = &response["body"]["error"];
            assert_eq!(error["code"], "invalid_engine_response", "{text}");
        }
        let (line, text) = result(Flavor::Messages, 200, "ok").await;
        assert!(!line.is_ok);
        assert_eq!(text["result"]["type"], "errored");
        let error = &text["result"]["error"]["error"];
        let message = error["message"].as_str().unwrap();
        assert!(message.contains("no JSON object"), "{message}");
        let message = json!({"type": "message"}).to_string();
        let (line, text) = result(Flavor::Messages, 200, &message).await;
        assert!(line.is_ok);
        assert_eq!(text["result"]["type"], "succeeded");
    }

    #[tokio::test]
    async fn a_success_that_is_no_object_is_tried_again() {
        let page = First::Answered(answer(200, "<html>busy</html>", true));
        let good = answer(200, "{}", true);
        let (line, text) = result_after(Some(page), Flavor::OpenAi, good).await;
        assert!(line.is_ok);
        assert_eq!(text["response"]["body"], json!({}));
    }

    #[tokio::test]
    async fn a_line_that_is_refused_for_now_comes_no_nearer_to_its_end() {
        let refused = LineAnswer {
            retry_after: Some(Duration::from_secs(1)),
            ..answer(503, "{}", true)
        };
        let failed = answer(503, "{}", true);
        for (refusal, expected) in [(refused, 0), (failed, 1)] {
            let (first, good) = (First::Answered(refusal), answer(200, "{}", true));
            let (line, _, retries) = run_line(Some(first), Flavor::OpenAi, good).await;
            assert!(line.is_ok);
            assert_eq!(retries, expected);
        }
    }

    #[tokio::test]
    async fn a_line_that_gives_way_is_sent_again() {
        let good = answer(200, "{}", true);
        let (line, text) = result_after(Some(First::GivesWay), Flavor::OpenAi, good).await;
        assert!(line.is_ok);
        assert_eq!(text["response"]["body"], json!({}));
    }

    #[tokio::test]
    async fn a_long_answer_is_a_result_as_a_short_one_is() {
        let embedding = json!({"data": vec![0.25; 200_000]}).to_string();
        let (line, text) = result(Flavor::OpenAi, 200, &embedding).await;
        assert!(line.is_ok);
        let data = text["response"]["body"]["data"].as_array().unwrap();
        assert_eq!(data.len(), 200_000);
    }
}
