//! An engine's chat stream, read as the answer of an engine with the Responses API: events, or one whole object.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http_body::Frame;
use http_body_util::BodyExt;
use hyper::StatusCode;

use super::answer::ChatAnswer;
use super::tools::AnsweredTools;
use super::written::Written;
use crate::http::{self, BodyError};
use crate::openai::error::ApiError;
use crate::relay::{self, BatchLine};
use crate::responses::engine_error;
use crate::responses::engine_events::EngineEvents;

const TOO_LONG: &str = "the engine sent a chunk that is longer than the router allows";
/// What an engine may send after the end of its answer.
const TRAILER_BYTES_MAX: usize = 16 << 10;

/// The bytes of a chat stream as native events.
#[derive(Debug)]
struct Converter {
    events: EngineEvents,
    answer: ChatAnswer,
}

impl Converter {
    fn new(tools: AnsweredTools, bytes_max: usize, keeps_items: bool) -> Self {
        Self {
            events: EngineEvents::new(bytes_max),
            answer: ChatAnswer::new(tools, bytes_max, keeps_items),
        }
    }

    fn push(&mut self, bytes: &[u8], out: &mut Vec<u8>) {
        let answer = &mut self.answer;
        if answer.is_over {
            return;
        }
        let pushed = self.events.push(bytes, |event| {
            answer.on_data(&event.data, out);
            !answer.is_over
        });
        if pushed.is_err() {
            answer.fail(TOO_LONG, out);
        }
    }

    /// Why the answer failed, as an HTTP error.
    fn error(&self) -> Option<ApiError> {
        let message = self.answer.error.as_deref()?;
        if relay::is_drained(message) {
            return Some(ApiError::draining());
        }
        let data = self.answer.engine_error.as_deref();
        let Some(data) = data.filter(|_| !relay::is_engine_lost(message)) else {
            return Some(ApiError::invalid_engine_response(message));
        };
        let status = engine_error::status_within(data);
        let status = status.unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        Some(engine_error::of_chat(status, data.as_bytes()))
    }
}

pub(super) fn converted(tools: AnsweredTools, pieces: &[&[u8]]) -> Vec<u8> {
    let mut converter = Converter::new(tools, 1 << 20, false);
    let mut out = Vec::new();
    for piece in pieces {
        converter.push(piece, &mut out);
    }
    converter.answer.on_end(&mut out);
    out
}

struct NativeBody {
    /// `None` once the engine has closed the stream, or the router has.
    engine: Option<http::Body>,
    converter: Converter,
    /// The events of the first piece.
    first: Option<Bytes>,
    trailer_bytes: usize,
}

/// The stream as native events; of an answer that has `written` already, the events after those. An error that an engine sends before anything else is an HTTP error.
pub(in crate::responses) async fn native_body(
    mut engine: http::Body,
    tools: AnsweredTools,
    bytes_max: usize,
    written: Option<&Written>,
) -> Result<http::Body, ApiError> {
    let mut converter = Converter::new(tools, bytes_max, false);
    if let Some(written) = written {
        converter.answer.go_on_after(written);
    }
    let mut first = Vec::new();
    // The relay answers only once the engine has sent something.
    match engine.frame().await {
        Some(Ok(frame)) => {
            let data = frame.into_data().unwrap_or_default();
            converter.push(&data, &mut first);
        }
        Some(Err(_)) | None => converter.answer.on_end(&mut first),
    }
    if let Some(error) = converter.error()
        && !converter.answer.has_items()
    {
        return Err(error);
    }
    let body = NativeBody {
        engine: Some(engine),
        converter,
        first: (!first.is_empty()).then(|| first.into()),
        trailer_bytes: 0,
    };
    Ok(body.boxed_unsync())
}

/// The whole answer as a Response object. `line`: the line of a batch that is answered, within whose room it grows.
pub(in crate::responses) async fn native_whole(
    mut engine: http::Body,
    tools: AnsweredTools,
    bytes_max: usize,
    line: Option<&BatchLine>,
) -> Result<Bytes, ApiError> {
    let mut converter = Converter::new(tools, bytes_max, true);
    let mut events = Vec::new();
    let mut trailer_bytes = 0;
    // It is read to its end, or the engine would see a client that left.
    while let Some(Ok(frame)) = engine.frame().await {
        let data = frame.into_data().unwrap_or_default();
        if converter.answer.is_over {
            trailer_bytes += data.len();
            if trailer_bytes > TRAILER_BYTES_MAX {
                break;
            }
            continue;
        }
        events.clear();
        converter.push(&data, &mut events);
        if converter.answer.error.is_some() {
            break;
        }
        if let Some(line) = line {
            line.grow_to(converter.answer.bytes).await;
        }
    }
    if !converter.answer.is_over {
        events.clear();
        converter.answer.on_end(&mut events);
    }
    match converter.error() {
        Some(error) => Err(error),
        None => Ok(converter.answer.whole.into()),
    }
}

impl http_body::Body for NativeBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let this = self.get_mut();
        if let Some(first) = this.first.take() {
            return Poll::Ready(Some(Ok(Frame::data(first))));
        }
        loop {
            let Some(engine) = &mut this.engine else {
                return Poll::Ready(None);
            };
            let data = match ready!(Pin::new(engine).poll_frame(cx)) {
                Some(Ok(frame)) => Some(frame.into_data().unwrap_or_default()),
                Some(Err(_)) | None => None,
            };
            let mut out = Vec::new();
            match data {
                None => {
                    this.engine = None;
                    this.converter.answer.on_end(&mut out);
                }
                Some(data) if this.converter.answer.is_over => {
                    this.trailer_bytes += data.len();
                    if this.trailer_bytes > TRAILER_BYTES_MAX {
                        this.engine = None;
                    }
                }
                Some(data) => {
                    out.reserve(data.len() + 64);
                    this.converter.push(&data, &mut out);
                }
            }
            if !out.is_empty() {
                return Poll::Ready(Some(Ok(Frame::data(out.into()))));
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        let is_engine_over = self
            .engine
            .as_ref()
            .is_none_or(|engine| engine.is_end_stream());
        self.first.is_none() && self.converter.answer.is_over && is_engine_over
    }
}
