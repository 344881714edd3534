//! Sends a body of the router's own to an engine through the relay.

use std::borrow::Cow;

use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::header::{self, HeaderValue};
use hyper::{HeaderMap, Response, Uri};
use tracing::debug;

use super::chat::{self, AnsweredTools, ChatBody};
use super::client_request::EngineCall;
use super::engine_error;
use super::http_response::mark_tools_left_out;
use super::service::Responses;
use crate::http;
use crate::openai::error::{Answer, ApiError};
use crate::prompt::{self, Api};
use crate::relay::{self, AnsweredAsChat, BatchLine, ChatForm, NotConvertible, ToolLoss};

/// How much of an engine's error is read: enough for its message.
const ERROR_BYTES_MAX: usize = 64 << 10;

/// How often an answer of a chat worker is asked for whose engine is lost.
const CHAT_ATTEMPTS: u32 = 2;

impl ChatForm for Responses {
    fn chat_body(&self, native: &Bytes, loss: ToolLoss) -> Result<Bytes, NotConvertible> {
        let chat = self.as_chat(native, loss);
        let replaced = chat.as_ref().ok().map(|chat| chat.replaced_arguments);
        self.metrics.on_converted(replaced);
        chat.map(|chat| chat.body)
    }
}

impl Responses {
    /// The request as a chat completion.
    pub(super) fn as_chat(
        &self,
        native: &[u8],
        loss: ToolLoss,
    ) -> Result<ChatBody, NotConvertible> {
        chat::chat_body(native, &self.settings.chat, loss, &|model| {
            let model = self.relay.names().canonical(model);
            self.relay
                .refuses_later_system(Some(model).filter(|name| !name.is_empty()))
        })
    }
}

impl Responses {
    pub(super) async fn ask_response(&self, call: &EngineCall<'_>, body: Bytes) -> Answer {
        let mut attempts = 0;
        loop {
            attempts += 1;
            let answer = self.ask(call, Api::Responses, "/v1/responses", body.clone());
            let answer = answer.await?;
            if answer.extensions().get::<AnsweredAsChat>().is_none() {
                return Ok(answer);
            }
            match self.native_answer(call, answer, &body).await {
                // The client has nothing of it. The relay itself tries again only before an answer begins, and that of a
                // chat completion begins before it is computed.
                Err(error) if attempts < CHAT_ATTEMPTS && relay::is_engine_lost(&error.message) => {
                    debug!(id = %call.context.id, "engine lost before the client got anything; trying again");
                }
                answer => return answer,
            }
        }
    }

    /// The answer of an engine that was sent a chat completion, as an engine with the Responses API would give it. Here,
    /// so that everything above reads one kind of answer.
    async fn native_answer(
        &self,
        call: &EngineCall<'_>,
        answer: Response<http::Body>,
        native: &[u8],
    ) -> Answer {
        let (mut head, engine) = answer.into_parts();
        if !is_events(&head.headers) {
            return Err(ApiError::invalid_engine_response(
                "the engine answered a streamed chat completion with something else than events",
            ));
        }
        let mut tools = AnsweredTools::of(native);
        tools.marks_phases = self.settings.chat.message_phases;
        if !tools.left_out.is_empty() {
            self.metrics.on_tools_left_out(&tools.left_out);
            mark_tools_left_out(&mut head.headers, &tools.left_out);
        }
        let bytes_max = self.event_options().bytes_max;
        let body = if tools.is_streamed {
            let written = call.resumed.map(|resumed| &resumed.written);
            chat::native_body(engine, tools, bytes_max, written).await?
        } else {
            let line = call.context.kind.batch_line();
            http::full(chat::native_whole(engine, tools, bytes_max, line).await?)
        };
        Ok(Response::from_parts(head, body))
    }

    /// Sends `body` to an engine. An error status becomes an [`ApiError`].
    pub(super) async fn ask(
        &self,
        call: &EngineCall<'_>,
        api: Api,
        path: &'static str,
        body: Bytes,
    ) -> Answer {
        let headers = engine_headers(call.headers);
        let peek = prompt::peek_router_made(api, &body, self.relay.block_bytes())?;
        if call.is_salted && peek.names_media {
            return Err(ApiError::media_named());
        }
        let (context, target) = (call.context.clone(), Uri::from_static(path));
        let job = relay::Job {
            reserved_bytes: call.reserved_bytes,
            standing: call.standing,
            chat: (api == Api::Responses).then_some(self as &dyn ChatForm),
            progress: call.progress,
            resume: call.resumed.map(|resumed| &resumed.tokens),
            ..relay::Job::new(context, api, target, &headers, body.clone(), call.original)
        };
        let answer = self.relay.run(&job, Box::new(peek)).await;
        let answer = answer.map_err(ApiError::of_run)?;
        let status = answer.status();
        if status.is_success() {
            return Ok(answer);
        }
        let retry_after = engine_error::retry_after(answer.headers());
        let is_of_chat = answer.extensions().get::<AnsweredAsChat>().is_some();
        let body = collect(answer.into_body(), ERROR_BYTES_MAX, None).await;
        let body = body.unwrap_or_default();
        let mut error = if is_of_chat {
            engine_error::of_chat(status, &body)
        } else {
            engine_error::of_engine(status, &body)
        };
        error.retry_after = retry_after;
        Err(error)
    }
}

/// Whether an answer is a stream of events, as it is of an engine that was asked for one.
pub(super) fn is_events(headers: &HeaderMap) -> bool {
    let kind = headers.get(header::CONTENT_TYPE);
    kind.is_some_and(|kind| kind.as_bytes().starts_with(b"text/event-stream"))
}

/// The client's headers, adjusted to the router's body; no compression, since the router reads the answer.
fn engine_headers(headers: &HeaderMap) -> Cow<'_, HeaderMap> {
    const JSON: &str = "application/json";
    let kinds = headers.get_all(header::CONTENT_TYPE).iter();
    if kinds.eq([JSON]) && !headers.contains_key(header::ACCEPT_ENCODING) {
        return Cow::Borrowed(headers);
    }
    let mut headers = headers.clone();
    headers.remove(header::ACCEPT_ENCODING);
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(JSON));
    Cow::Owned(headers)
}

/// Reads a whole answer of up to `bytes_max` bytes. `line`: the line of a batch that is answered, within whose room the
/// answer grows.
pub(super) async fn collect(
    mut body: http::Body,
    bytes_max: usize,
    line: Option<&BatchLine>,
) -> Result<Bytes, ApiError> {
    let (mut first, mut rest) = (Bytes::new(), Vec::new());
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| {
            ApiError::invalid_engine_response(format!("the engine's answer ended early: {error}"))
        })?;
        let data = frame.into_data().unwrap_or_default();
        let bytes = first.len() + rest.len() + data.len();
        if bytes > bytes_max {
            return Err(ApiError::invalid_engine_response(
                "the engine's answer is longer than the router allows",
            ));
        }
        if let Some(line) = line {
            line.grow_to(bytes).await;
        }
        if first.is_empty() {
            first = data;
        } else {
            rest.extend_from_slice(&data);
        }
    }
    // An answer in one piece, as most are, is not copied.
    if rest.is_empty() {
        return Ok(first);
    }
    Ok([&*first, &*rest].concat().into())
}

#[cfg(test)]
mod tests {
    use std::future::ready;
    use std::sync::Arc;
    use std::sync::atomic::AtomicUsize;
    use std::sync::atomic::Ordering::Relaxed;

    use super::*;
    use crate::relay::{AnswerRoom, EnteringLines, GrowFuture};

    /// The most bytes that it was asked for.
    #[derive(Debug, Default)]
    struct AskedRoom(AtomicUsize);

    impl AnswerRoom for AskedRoom {
        fn grow_to(&self, bytes: usize) -> GrowFuture<'_> {
            self.0.fetch_max(bytes, Relaxed);
            Box::pin(ready(()))
        }
    }

    #[tokio::test]
    async fn the_answer_of_a_line_grows_within_its_room() {
        let room = Arc::new(AskedRoom::default());
        let entering = Arc::<EnteringLines>::default().enter(1, Arc::default());
        let line = BatchLine::new("batch_1".into(), entering).with_room(room.clone());
        let answer = http::full(vec![b'x'; 1_000]);
        let whole = collect(answer, 2_000, Some(&line)).await.unwrap();
        assert_eq!((whole.len(), room.0.load(Relaxed)), (1_000, 1_000));
        room.0.store(0, Relaxed);
        let text = r#"{"choices":[{"delta":{"content":"0123456789"},"finish_reason":"stop"}]}"#;
        let chunks = format!("data: {text}\n\ndata: [DONE]\n\n");
        let tools = AnsweredTools::of(b"{}");
        let native = chat::native_whole(http::full(chunks), tools, 2_000, Some(&line));
        assert!(!native.await.unwrap().is_empty());
        assert_eq!(room.0.load(Relaxed), 10);
    }
}
