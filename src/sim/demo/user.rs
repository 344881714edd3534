//! One simulated user: sends a question, reads the streamed answer, pauses, and sends the next question.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::{Request, StatusCode, header};
use serde_json::Value;
use tokio::sync::mpsc;

use super::deployment::MODEL;
use super::workload::{Dialogue, User};
use crate::http::client::{self, Pool};
use crate::http::sse::Decoder;
use crate::observe;
use crate::sim::report::Sample;

/// Much longer than any answer of the demo takes. Without it a lost answer would hang the demo.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(60);
/// One event of an answer is a few hundred bytes.
const MAX_EVENT_BYTES: usize = 1 << 20;

/// Has all conversations of one user, one after the other, each request with one of the routers, and sends the result of each to `results`. The
/// user stops at the first failed request.
pub(super) async fn run(
    user: User,
    answer_tokens: u32,
    routers: Arc<[Arc<Pool>]>,
    mut random: fastrand::Rng,
    results: mpsc::Sender<Result<Sample, String>>,
) {
    for conversation in user.conversations {
        let mut dialogue = Dialogue::new(&conversation.system);
        for turn in conversation.turns {
            tokio::time::sleep(turn.pause).await;
            let body = dialogue.ask(MODEL, &turn.question, answer_tokens);
            let router = &routers[random.usize(..routers.len())];
            let result = match tokio::time::timeout(RESPONSE_TIMEOUT, ask(router, body)).await {
                Ok(result) => result,
                Err(_) => Err(format!("no complete answer within {RESPONSE_TIMEOUT:?}")),
            };
            let has_failed = result.is_err();
            let result = result.map(|(text, sample)| {
                dialogue.add_answer(&text);
                sample
            });
            // The receiver is gone when the demo is being stopped.
            if results.send(result).await.is_err() || has_failed {
                return;
            }
        }
    }
}

/// The text of the answer, and what was measured.
async fn ask(router: &Arc<Pool>, body: String) -> Result<(String, Sample), String> {
    let body = Bytes::from(body);
    let sent = observe::now();
    let response = match router.send(request(router, body.clone())?).await {
        // The engine had closed the pooled connection before it read the request.
        Err(client::Error::Stale { .. }) => router.send_anew(request(router, body)?).await,
        other => other,
    };
    let response = response.map_err(|error| error.to_string())?;
    let status = response.status();
    let mut body = response.into_body();
    if status != StatusCode::OK {
        let body = body.collect().await.map(|body| body.to_bytes());
        return Err(error_text(status, &body.unwrap_or_default()));
    }

    let mut decoder = Decoder::bounded(MAX_EVENT_BYTES);
    let mut events = Vec::new();
    let mut answer = StreamedAnswer::default();
    let mut time_to_first_token = None;
    let mut inter_token_latencies = Vec::new();
    let mut last_token = sent;
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| format!("stream broken off: {error}"))?;
        decoder.push(frame.data_ref().map_or(&[], |data| &data[..]), &mut events);
        let text_before = answer.text.len();
        for event in events.drain(..) {
            answer.on_event(&event.data)?;
        }
        if answer.text.len() > text_before {
            let now = observe::now();
            let since = now.saturating_duration_since(last_token);
            last_token = now;
            match time_to_first_token {
                None => time_to_first_token = Some(since),
                Some(_) => inter_token_latencies.push(since),
            }
        }
    }
    let usage = &answer.usage;
    let (true, Some(time_to_first_token), Some(prompt_tokens), Some(cached_tokens)) = (
        answer.is_done,
        time_to_first_token,
        usage["prompt_tokens"].as_u64(),
        usage["prompt_tokens_details"]["cached_tokens"].as_u64(),
    ) else {
        return Err("stream ended before the answer did".to_owned());
    };
    let sample = Sample {
        prompt_tokens,
        cached_tokens,
        time_to_first_token,
        inter_token_latencies,
    };
    Ok((answer.text, sample))
}

/// The status and, if the body is an OpenAI error, its message.
fn error_text(status: StatusCode, body: &[u8]) -> String {
    let body: Value = serde_json::from_slice(body).unwrap_or_default();
    match body["error"]["message"].as_str() {
        Some(message) => format!("status {}: {message}", status.as_u16()),
        None => format!("status {}", status.as_u16()),
    }
}

fn request(router: &Pool, body: Bytes) -> Result<Request<Full<Bytes>>, String> {
    Request::post("/v1/chat/completions")
        .header(header::HOST, router.address())
        .header(header::CONTENT_TYPE, "application/json")
        .body(Full::new(body))
        .map_err(|error| error.to_string())
}

/// The content of a streamed chat completion so far.
#[derive(Default)]
struct StreamedAnswer {
    text: String,
    usage: Value,
    is_done: bool,
}

impl StreamedAnswer {
    fn on_event(&mut self, data: &str) -> Result<(), String> {
        if data == "[DONE]" {
            self.is_done = true;
            return Ok(());
        }
        let mut chunk: Value = serde_json::from_str(data)
            .map_err(|error| format!("invalid event in the stream: {error}"))?;
        if !chunk["error"].is_null() {
            return Err(format!("error in the stream: {}", chunk["error"]));
        }
        // The request asks for one answer.
        let content = chunk["choices"][0]["delta"]["content"].as_str();
        self.text.push_str(content.unwrap_or_default());
        if chunk["usage"].is_object() {
            self.usage = chunk["usage"].take();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_streamed_answer_collects_text_and_usage() {
        let mut answer = StreamedAnswer::default();
        for data in [
            r#"{"choices":[{"delta":{"role":"assistant","content":""}}]}"#,
            r#"{"choices":[{"delta":{"content":"so "}}]}"#,
            r#"{"choices":[{"delta":{"content":"it is"}}]}"#,
            r#"{"choices":[],"usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":4}}}"#,
            "[DONE]",
        ] {
            answer.on_event(data).unwrap();
        }
        assert_eq!(answer.text, "so it is");
        assert_eq!(answer.usage["prompt_tokens"], 9);
        assert!(answer.is_done);
    }

    #[test]
    fn an_error_text_has_the_status_and_the_message() {
        let body = br#"{"error":{"message":"too long"}}"#;
        assert_eq!(
            error_text(StatusCode::BAD_REQUEST, body),
            "status 400: too long"
        );
        assert_eq!(error_text(StatusCode::BAD_GATEWAY, b"oh"), "status 502");
    }

    #[test]
    fn an_error_in_the_stream_is_a_failure() {
        let error = StreamedAnswer::default().on_event(r#"{"error":{"message":"broken"}}"#);
        assert!(error.unwrap_err().contains("broken"));
    }
}
