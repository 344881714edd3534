//! One user: asks, reads the answer as it streams in, thinks, and asks on.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::{Request, StatusCode, header};
use serde::Deserialize;
use tokio::sync::mpsc;

use super::stage::MODEL;
use super::workload::{Dialogue, User};
use crate::http::client::{self, Pool};
use crate::http::sse::Decoder;
use crate::observe;
use crate::sim::report::Sample;

/// Long past what any answer of the demo takes; without it one lost answer would hang the demo.
const ANSWER_LIMIT: Duration = Duration::from_secs(60);
/// One event of an answer is a few hundred bytes.
const EVENT_BYTES_MAX: usize = 1 << 20;

/// Holds all conversations of one user and tells what came of each request. A conversation whose
/// answer failed is not continued, and none of the user's others begins.
pub(super) async fn play(
    user: User,
    answer_tokens: u32,
    router: Arc<Pool>,
    results: mpsc::Sender<Result<Sample, String>>,
) {
    for conversation in user.conversations {
        let mut dialogue = Dialogue::new(&conversation.system);
        for turn in conversation.turns {
            tokio::time::sleep(turn.pause).await;
            let body = dialogue.ask(MODEL, &turn.question, answer_tokens);
            let result = match tokio::time::timeout(ANSWER_LIMIT, ask(&router, body)).await {
                Ok(result) => result,
                Err(_) => Err(format!("no whole answer within {ANSWER_LIMIT:?}")),
            };
            let has_failed = result.is_err();
            let result = result.map(|answer| {
                dialogue.hear(&answer.text);
                answer.sample
            });
            // Nobody listens any more when the demo is being stopped.
            if results.send(result).await.is_err() || has_failed {
                return;
            }
        }
    }
}

struct Answer {
    text: String,
    sample: Sample,
}

async fn ask(router: &Arc<Pool>, body: String) -> Result<Answer, String> {
    let body = Bytes::from(body);
    let sent = observe::now();
    let response = match router.send(request(router, body.clone())?).await {
        // A connection that had waited in the pool; the request has not been read.
        Err(client::Error::Stale(_)) => router.send_anew(request(router, body)?).await,
        other => other,
    };
    let response = response.map_err(|error| error.to_string())?;
    let status = response.status();
    let mut body = response.into_body();
    if status != StatusCode::OK {
        let said = body.collect().await.map(|it| it.to_bytes());
        return Err(refusal(status, &said.unwrap_or_default()));
    }

    let mut decoder = Decoder::bounded(EVENT_BYTES_MAX);
    let mut events = Vec::new();
    let mut transcript = Transcript::default();
    let mut first_token = None;
    let mut gaps = Vec::new();
    let mut last_token = sent;
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| format!("stream broke off: {error}"))?;
        decoder.push(frame.data_ref().map_or(&[], |data| &data[..]), &mut events);
        let heard = transcript.text.len();
        for event in events.drain(..) {
            transcript.on_event(&event.data)?;
        }
        if transcript.text.len() > heard {
            let now = observe::now();
            let since = now.saturating_duration_since(last_token);
            last_token = now;
            match first_token {
                None => first_token = Some(since),
                Some(_) => gaps.push(since),
            }
        }
    }
    let usage = transcript.usage.filter(|_| transcript.is_done);
    let (Some(first_token), Some(usage)) = (first_token, usage) else {
        return Err("stream ended before the answer did".to_owned());
    };
    Ok(Answer {
        text: transcript.text,
        sample: Sample {
            prompt_tokens: usage.prompt_tokens,
            cached_tokens: usage.prompt_tokens_details.cached_tokens,
            first_token,
            gaps,
        },
    })
}

/// The status, and what the error body says if it is one.
fn refusal(status: StatusCode, body: &[u8]) -> String {
    #[derive(Deserialize)]
    struct Body {
        error: Problem,
    }
    #[derive(Deserialize)]
    struct Problem {
        message: String,
    }
    match serde_json::from_slice::<Body>(body) {
        Ok(body) => format!("status {}: {}", status.as_u16(), body.error.message),
        Err(_) => format!("status {}", status.as_u16()),
    }
}

fn request(router: &Pool, body: Bytes) -> Result<Request<Full<Bytes>>, String> {
    Request::post("/v1/chat/completions")
        .header(header::HOST, router.address())
        .header(header::CONTENT_TYPE, "application/json")
        .body(Full::new(body))
        .map_err(|error| error.to_string())
}

/// What a streamed answer has told so far.
#[derive(Default)]
struct Transcript {
    text: String,
    usage: Option<Usage>,
    is_done: bool,
}

#[derive(Deserialize)]
struct Chunk {
    #[serde(default)]
    choices: Vec<Choice>,
    usage: Option<Usage>,
    error: Option<serde_json::Value>,
}

#[derive(Deserialize)]
struct Choice {
    delta: Delta,
}

#[derive(Deserialize)]
struct Delta {
    content: Option<String>,
}

#[derive(Deserialize)]
struct Usage {
    prompt_tokens: u64,
    prompt_tokens_details: Details,
}

#[derive(Deserialize)]
struct Details {
    cached_tokens: u64,
}

impl Transcript {
    fn on_event(&mut self, data: &str) -> Result<(), String> {
        if data == "[DONE]" {
            self.is_done = true;
            return Ok(());
        }
        let chunk: Chunk = serde_json::from_str(data)
            .map_err(|error| format!("an event of the stream cannot be read: {error}"))?;
        if let Some(error) = chunk.error {
            return Err(format!("error in the stream: {error}"));
        }
        for choice in chunk.choices {
            self.text
                .push_str(choice.delta.content.as_deref().unwrap_or_default());
        }
        self.usage = chunk.usage.or(self.usage.take());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_transcript_gathers_text_and_usage() {
        let mut transcript = Transcript::default();
        for data in [
            r#"{"choices":[{"delta":{"role":"assistant","content":""}}]}"#,
            r#"{"choices":[{"delta":{"content":"so "}}]}"#,
            r#"{"choices":[{"delta":{"content":"it is"}}]}"#,
            r#"{"choices":[],"usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":4}}}"#,
            "[DONE]",
        ] {
            transcript.on_event(data).unwrap();
        }
        assert_eq!(transcript.text, "so it is");
        assert_eq!(transcript.usage.unwrap().prompt_tokens, 9);
        assert!(transcript.is_done);
    }

    #[test]
    fn a_refusal_says_what_the_body_says() {
        let body = br#"{"error":{"message":"too long"}}"#;
        assert_eq!(
            refusal(StatusCode::BAD_REQUEST, body),
            "status 400: too long"
        );
        assert_eq!(refusal(StatusCode::BAD_GATEWAY, b"oh"), "status 502");
    }

    #[test]
    fn an_error_in_the_stream_is_a_failure() {
        let error = Transcript::default().on_event(r#"{"error":{"message":"broken"}}"#);
        assert!(error.unwrap_err().contains("broken"));
    }
}
