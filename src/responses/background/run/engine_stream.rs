//! An engine's answer to a background run: waits for a free worker, then reads in pieces worth storing.

use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Body as _, Frame};
use http_body_util::BodyExt;
use hyper::StatusCode;
use tokio::time::{Instant, sleep, sleep_until};

use crate::openai::error::{
    Answer, ApiError, CUTS_CONNECTIONS, ENGINE_KEY_REFUSED, INVALID_ENGINE_RESPONSE,
};
use crate::responses::background::stored_request::StoredRequest;
use crate::responses::client_request::EngineCall;
use crate::responses::engine_call::is_events;
use crate::responses::request::{CreateRequest, Truncation};
use crate::responses::service::Responses;
use crate::responses::{engine_body, engine_error, truncation};
use crate::{http, observe, relay};

/// The first and the longest pause between attempts to find a worker.
const WORKER_PAUSE: Duration = Duration::from_millis(250);
const WORKER_PAUSE_MAX: Duration = Duration::from_secs(5);
/// The longest pause while a limit of the tenant has no room: a place may be kept for the run meanwhile.
const LIMIT_PAUSE_MAX: Duration = Duration::from_secs(2);
/// A piece is stored when it reaches this size.
const PIECE_BYTES_MAX: usize = 64 << 10;
/// Behind a frame of this size there may be more.
const FRAME_BYTES: usize = 4 << 10;
/// The shortest and the longest time between two reads while events are collected, and the longest while no client reads
/// them. The end of a stream, and a reader that comes, may be noticed so much later.
const STEP_MIN: Duration = Duration::from_millis(10);
const STEP_MAX: Duration = Duration::from_millis(50);
const UNWATCHED_STEP_MAX: Duration = Duration::from_millis(125);
/// What an engine may send after its last event, and for how long.
const TRAILER_BYTES_MAX: usize = 16 << 10;
const DRAIN_TIMEOUT: Duration = Duration::from_secs(1);

impl Responses {
    /// An engine's answer. Waits while every worker is busy or unavailable, or none serves the model any more. What an
    /// engine began and left is tried again as often as `max_attempts` allows; `attempts` counts those of the run.
    pub(super) async fn wait_for_engine(
        &self,
        create: &CreateRequest<'_>,
        request: &StoredRequest,
        id: &str,
        call: &EngineCall<'_>,
        attempts: &mut u32,
    ) -> Answer {
        let settings = &self.background.settings;
        let limit = settings.queue_timeout;
        let mut input = request.input().to_vec();
        let mut pause = WORKER_PAUSE;
        let began = observe::now();
        loop {
            let salt = request.salt.as_deref();
            let body = engine_body::body(create, &input, id, salt, true);
            let error = match self.ask_response(call, body).await {
                // A page of a proxy, say. Read as a stream, it would look like one whose engine was lost.
                Ok(answer) if !is_events(answer.headers()) => {
                    return Err(ApiError::invalid_engine_response(
                        "the engine answered a streamed response with something else than events",
                    ));
                }
                Ok(answer) => return Ok(answer),
                Err(error) => error,
            };
            let may_shorten = create.truncation == Truncation::Auto && call.resumed.is_none();
            if error.code == engine_error::TOO_LONG && may_shorten {
                input = truncation::shortened(&input).ok_or(error)?;
                continue;
            }
            let then = after_error(&error, || {
                self.relay.may_use(call.context.tenant, &create.model)
            });
            let may_ask = match then {
                AfterError::Wait => true,
                AfterError::TryAgain => *attempts < settings.max_attempts,
                AfterError::Fail => false,
            };
            let waited = observe::now().saturating_duration_since(began);
            if !may_ask || waited + pause > limit {
                return Err(error);
            }
            *attempts += u32::from(then == AfterError::TryAgain);
            let pause_max = if error.is_of_limit() {
                LIMIT_PAUSE_MAX
            } else {
                WORKER_PAUSE_MAX
            };
            sleep(pause.min(pause_max)).await;
            pause = (pause * 2).min(WORKER_PAUSE_MAX);
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AfterError {
    /// The error may pass: the run asks again for as long as it may wait.
    Wait,
    /// Engines have worked for it in vain, which may be the request's fault: it asks again, but not often.
    TryAgain,
    /// Asked again, engines would say it again.
    Fail,
}

/// What follows from an error for its run. `may_use`: whether the tenant may use the model.
fn after_error(error: &ApiError, may_use: impl FnOnce() -> bool) -> AfterError {
    // It ends the engines that get it, or somebody has to change the configuration.
    if matches!(error.code, CUTS_CONNECTIONS | ENGINE_KEY_REFUSED) {
        return AfterError::Fail;
    }
    if error.code == INVALID_ENGINE_RESPONSE && error.is_not_retried() {
        // Unless its engine was lost, another one would answer no better.
        return if relay::is_engine_lost(&error.message) {
            AfterError::TryAgain
        } else {
            AfterError::Fail
        };
    }
    match error.status {
        // A limit of the tenant never has room for it.
        StatusCode::TOO_MANY_REQUESTS if error.is_not_retried() => AfterError::Fail,
        StatusCode::TOO_MANY_REQUESTS
        | StatusCode::BAD_GATEWAY
        | StatusCode::SERVICE_UNAVAILABLE
        | StatusCode::GATEWAY_TIMEOUT => AfterError::Wait,
        StatusCode::REQUEST_TIMEOUT | StatusCode::CONFLICT | StatusCode::TOO_EARLY
            if error.is_from_engine =>
        {
            AfterError::TryAgain
        }
        // There was such a model when the response was accepted, so its workers may come back. A replica that takes the
        // run over may never have known them.
        _ => {
            if error.code == engine_error::UNKNOWN_MODEL && may_use() {
                AfterError::Wait
            } else {
                AfterError::Fail
            }
        }
    }
}

/// How long events are collected before they are stored and sent. It delays readers and saves writes to the store.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pace {
    /// While a reader on this replica waits for them.
    watched: Duration,
    /// While no client reads the response from the replica that runs it. What a replica has not stored when it dies is
    /// generated again or lost, and a response that is cancelled may end without it.
    unwatched: Duration,
}

pub(super) const PACE: Pace = Pace {
    // Readers take tokens that come 20 times a second for a stream.
    watched: Duration::from_millis(50),
    // At 50 tokens a second a write has 12 tokens instead of 2 or 3.
    unwatched: Duration::from_millis(250),
};

impl Pace {
    fn wait(self, is_watched: bool) -> Duration {
        if is_watched {
            self.watched
        } else {
            self.unwatched
        }
    }

    /// Time between two reads while events are collected.
    fn step(self, is_watched: bool) -> Duration {
        let step = self.watched.clamp(STEP_MIN, STEP_MAX);
        if is_watched {
            step
        } else {
            step.max((self.unwatched / 2).min(UNWATCHED_STEP_MAX))
        }
    }
}

/// An engine's stream. Dropping it closes the connection, and the engine stops generating.
pub(super) struct EngineStream {
    engine: http::Body,
    piece: Vec<u8>,
    has_started: bool,
}

impl EngineStream {
    pub(super) fn new(engine: http::Body) -> Self {
        Self {
            engine,
            piece: Vec::new(),
            has_started: false,
        }
    }

    /// Collects what arrives until the first bytes have waited for long enough; the very first bytes of the stream are
    /// returned at once. True at the end of the stream.
    ///
    /// An engine sends each token on its own. Once some bytes wait, those behind them are left in the connection for
    /// [`Pace::step`], and this task sleeps.
    pub(super) async fn read(&mut self, pace: Pace, is_watched: impl Fn() -> bool) -> bool {
        let frame = self.engine.frame().await;
        if self.on_frame(frame) {
            return true;
        }
        if !std::mem::replace(&mut self.has_started, true) {
            return false;
        }
        let mut now = Instant::from_std(observe::now());
        let began = now;
        while self.piece.len() < PIECE_BYTES_MAX {
            // A reader may come meanwhile.
            let is_watched = is_watched();
            let due = began + pace.wait(is_watched);
            if now >= due {
                return false;
            }
            sleep_until(due.min(now + pace.step(is_watched))).await;
            if self.read_available() {
                return true;
            }
            now = Instant::from_std(observe::now());
        }
        false
    }

    /// Reads what has arrived. True at the end of the stream. Nothing is woken by what arrives later.
    fn read_available(&mut self) -> bool {
        let mut quiet = Context::from_waker(Waker::noop());
        while self.piece.len() < PIECE_BYTES_MAX {
            let before = self.piece.len();
            let Poll::Ready(frame) = Pin::new(&mut self.engine).poll_frame(&mut quiet) else {
                break;
            };
            if self.on_frame(frame) {
                return true;
            }
            // A frame that is not large has all that there is.
            if self.piece.len() - before < FRAME_BYTES {
                break;
            }
        }
        self.engine.is_end_stream()
    }

    /// True at the end of the stream.
    fn on_frame(&mut self, frame: Option<Result<Frame<Bytes>, http::BodyError>>) -> bool {
        let Some(Ok(frame)) = frame else {
            return true;
        };
        let data = frame.into_data().unwrap_or_default();
        self.piece.extend_from_slice(&data);
        false
    }

    pub(super) fn take(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.piece)
    }

    /// Reads the rest for a while; otherwise the engine would see a disconnected client.
    pub(super) async fn drain(mut self) {
        let rest = async {
            let mut bytes = 0;
            while let Some(Ok(frame)) = self.engine.frame().await {
                bytes += frame.into_data().map_or(0, |data| data.len());
                if bytes > TRAILER_BYTES_MAX {
                    return;
                }
            }
        };
        let _ = tokio::time::timeout(DRAIN_TIMEOUT, rest).await;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;
    use std::sync::atomic::Ordering::Relaxed;

    use tokio::sync::mpsc;
    use tokio::time::timeout;

    use super::*;

    #[test]
    fn a_run_waits_for_a_model_that_no_worker_serves_any_more() {
        let unknown = ApiError::from(relay::Error::UnknownModel {
            model: "m".to_owned(),
            known: vec!["other".into()],
        });
        assert_eq!(after_error(&unknown, || true), AfterError::Wait);
        let refused = after_error(&unknown, || false);
        assert_eq!(refused, AfterError::Fail, "it never exists for it");
        let unavailable = ApiError::from(relay::Error::NoWorker {
            model: "m".to_owned(),
            is_known: true,
            retry_after: Duration::from_secs(1),
        });
        assert_eq!(after_error(&unavailable, || true), AfterError::Wait);
        let mistake = ApiError::from(relay::Error::NoModel { known: Vec::new() });
        assert_eq!(after_error(&mistake, || true), AfterError::Fail);
    }

    #[test]
    fn a_run_asks_again_only_where_engines_may_answer_something_else() {
        let check = |error: &ApiError, expected: AfterError| {
            let found = after_error(error, || true);
            assert_eq!(found, expected, "{error:?}");
        };
        for (status, expected) in [
            (400, AfterError::Fail),
            (401, AfterError::Fail),
            (403, AfterError::Fail),
            (408, AfterError::TryAgain),
            (409, AfterError::TryAgain),
            (422, AfterError::Fail),
            (425, AfterError::TryAgain),
            (429, AfterError::Wait),
            (500, AfterError::Fail),
            (502, AfterError::Wait),
            (503, AfterError::Wait),
            (504, AfterError::Wait),
        ] {
            let status = StatusCode::from_u16(status).unwrap();
            check(&engine_error::of_engine(status, b"{}"), expected);
        }
        let page = ApiError::invalid_engine_response("the engine answered with a page");
        check(&page, AfterError::Fail);
        // The relay's words for it.
        let lost = "the engine failed before the answer's end";
        let lost = ApiError::invalid_engine_response(lost);
        check(&lost, AfterError::TryAgain);
        let cuts = ApiError::from(relay::Error::CutsConnections);
        check(&cuts, AfterError::Fail);
        let refused = ApiError::from(relay::Error::KeyRefused);
        check(&refused, AfterError::Fail);
        // An engine was too slow, or died.
        let late = ApiError::from(relay::Error::TimedOut { attempts: 2 });
        check(&late, AfterError::Wait);
    }

    /// The pieces that a test sends.
    struct Pieces(mpsc::UnboundedReceiver<Bytes>);

    impl http_body::Body for Pieces {
        type Data = Bytes;
        type Error = http::BodyError;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            cx: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, http::BodyError>>> {
            let piece = self.0.poll_recv(cx);
            piece.map(|piece| Some(Ok(Frame::data(piece?))))
        }
    }

    #[tokio::test]
    async fn events_wait_longer_while_no_client_reads_them() {
        let (sender, receiver) = mpsc::unbounded_channel();
        let send = |text: &'static str| sender.send(Bytes::from_static(text.as_bytes())).unwrap();
        let mut stream = EngineStream::new(Pieces(receiver).boxed_unsync());
        let pace = Pace {
            watched: Duration::from_millis(10),
            unwatched: Duration::from_secs(600),
        };
        let is_watched = AtomicBool::new(false);
        send("1");
        assert!(!stream.read(pace, || is_watched.load(Relaxed)).await);
        assert_eq!(stream.take(), b"1", "the first bytes wait for nothing");
        send("2");
        let unread = timeout(Duration::from_millis(100), stream.read(pace, || false)).await;
        assert!(unread.is_err() && stream.piece == b"2");
        // A reader comes while some are collected.
        let reads = async {
            send("3");
            tokio::time::sleep(Duration::from_millis(50)).await;
            is_watched.store(true, Relaxed);
            send("4");
        };
        let (is_over, ()) = tokio::join!(stream.read(pace, || is_watched.load(Relaxed)), reads);
        assert!(!is_over);
        assert_eq!(stream.take(), b"234");
        // It waits for no more than its own interval.
        send("5");
        assert!(!stream.read(pace, || true).await);
        assert_eq!(stream.take(), b"5");
        // Nor is the end waited for.
        send("6");
        send("7");
        drop(sender);
        let end = timeout(Duration::from_secs(60), stream.read(pace, || false));
        assert!(end.await.unwrap());
        assert_eq!(stream.take(), b"67");
    }
}
