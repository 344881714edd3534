//! One handing over, tried on purpose: a prompt that nobody has seen is computed by a prefill worker and gone
//! on with by a decode worker, and the text must be what the decode worker says alone.

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::header::{self, HeaderValue};
use hyper::{HeaderMap, Method, Request};
use serde::Deserialize;
use serde_json::json;

use super::handoff::{ANSWER_BYTES_MAX, Legs, Transfer};
use super::{engine_answer, headers};
use crate::fleet::handoff::{Connector, host};
use crate::fleet::{Worker, probe};
use crate::ids::RequestId;
use crate::observe;
use crate::prompt::Api;

const PATH: &str = "/v1/completions";
/// Two or three tokens each: some blocks of any size that engines have, computed in no time.
const WORDS: usize = 160;
const ANSWER_TOKENS: u32 = 8;
/// An engine counts what it received a moment after it has answered.
const COUNTED_WITHIN: Duration = Duration::from_secs(3);
const COUNTED_EVERY: Duration = Duration::from_millis(200);

/// What was seen to work.
#[derive(Debug)]
pub struct Proof {
    pub prompt_tokens: u64,
    /// Tokens whose blocks the decode worker says it received; none where it does not tell.
    pub received_tokens: Option<u64>,
    /// From the first leg's beginning to the second's end.
    pub took: Duration,
}

/// Tries it. Both workers must have the roles that they are listed with: an engine that is sent the other
/// role's parameters dies. `limit` is for each request. Else, why it did not work.
pub async fn run(
    connector: Connector,
    prefill: &Arc<Worker>,
    decode: &Arc<Worker>,
    model: &str,
    limit: Duration,
) -> Result<Proof, String> {
    let id = RequestId::new(fastrand::u128(..));
    let prompt = prompt();
    // Each has its salt, so that the second run computes its prompt and finds nothing of the first.
    let body = |salt: &str| {
        let body = json!({
            "model": model, "prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0,
            "cache_salt": format!("{id}-{salt}"),
        });
        Bytes::from(body.to_string())
    };
    let legs = Legs::of(Api::Completions, &body("split"))
        .map_err(|why| format!("its own request cannot be split: {}", why.as_str()))?;
    let peer = prefill.peer.load_full();
    let transfer = Transfer::begin(
        connector,
        Api::Completions,
        format!("xfer-{id}"),
        host(prefill),
        peer,
        fastrand::u64(..),
    )
    .map_err(|why| why.to_string())?;
    let received_before = probe::received_tokens(decode, limit).await;
    let begun = observe::now();

    let rank = transfer.rank();
    let first = post(prefill, legs.prefill(&transfer), id, rank, limit)
        .await
        .map_err(|why| format!("prefill: {why}"))?;
    let handed = transfer
        .end(&first)
        .map_err(|why| format!("prefill: {why}"))?;
    let second = post(decode, legs.decode(handed.params), id, None, limit)
        .await
        .map_err(|why| format!("decode: {why}"))?;
    let took = observe::now().saturating_duration_since(begun);
    let split = text(&second).ok_or("decode: the answer is no completion")?;

    let alone = post(decode, body("alone"), id, None, limit)
        .await
        .map_err(|why| format!("decode, unsplit: {why}"))?;
    let alone = text(&alone).ok_or("decode, unsplit: the answer is no completion")?;
    if split != alone {
        return Err(format!(
            "the text is not what the decode worker says alone: {split:?} against {alone:?}"
        ));
    }
    let received_tokens = match received_before {
        Some(before) => Some(received(decode, before, limit).await?),
        None => None,
    };
    Ok(Proof {
        prompt_tokens: engine_answer::last_usage(&second)
            .unwrap_or_default()
            .prompt_tokens,
        received_tokens,
        took,
    })
}

/// Words that no engine has a block of.
fn prompt() -> String {
    let mut prompt = String::new();
    for _ in 0..WORDS {
        // Writing to memory cannot fail.
        let _ = write!(prompt, "word{} ", fastrand::u32(..1_000));
    }
    prompt
}

async fn post(
    worker: &Arc<Worker>,
    body: Bytes,
    id: RequestId,
    rank: Option<u32>,
    limit: Duration,
) -> Result<Bytes, String> {
    let mut client = HeaderMap::new();
    let json = HeaderValue::from_static("application/json");
    client.insert(header::CONTENT_TYPE, json);
    let mut request = Request::new(Full::new(body));
    *request.method_mut() = Method::POST;
    *request.uri_mut() = PATH.parse().map_err(|_| "no path".to_owned())?;
    *request.headers_mut() = headers::to_engine(&client, worker, id);
    headers::of_leg(request.headers_mut(), rank);
    let exchange = async {
        let answer = worker
            .pool
            .send_anew(request)
            .await
            .map_err(|error| error.to_string())?;
        let status = answer.status();
        let body = Limited::new(answer.into_body(), ANSWER_BYTES_MAX)
            .collect()
            .await;
        let body = body.map_err(|error| error.to_string())?.to_bytes();
        match status.is_success() {
            true => Ok(body),
            false => Err(format!("answered {status}: {}", beginning(&body))),
        }
    };
    tokio::time::timeout(limit, exchange)
        .await
        .unwrap_or_else(|_| Err(format!("no answer within {limit:?}")))
}

/// So much of an error as a line has room for.
fn beginning(body: &[u8]) -> String {
    const CHARS: usize = 200;
    let text = String::from_utf8_lossy(body);
    text.split_whitespace()
        .collect::<Vec<_>>()
        .join(" ")
        .chars()
        .take(CHARS)
        .collect()
}

fn text(answer: &[u8]) -> Option<String> {
    #[derive(Deserialize)]
    struct Answer {
        choices: Vec<Choice>,
    }
    #[derive(Deserialize)]
    struct Choice {
        text: String,
    }
    let answer: Answer = serde_json::from_slice(answer).ok()?;
    answer.choices.into_iter().next().map(|choice| choice.text)
}

/// What the decode worker received since. It answers the same where it has no connector: it computes all
/// itself.
async fn received(decode: &Worker, before: u64, limit: Duration) -> Result<u64, String> {
    let until: Instant = observe::now() + COUNTED_WITHIN;
    loop {
        let now = probe::received_tokens(decode, limit)
            .await
            .unwrap_or(before);
        if now > before {
            return Ok(now - before);
        }
        if observe::now() >= until {
            return Err(
                "the text is right, but the decode worker received nothing and computed all itself: \
                 has it the connector?"
                    .to_owned(),
            );
        }
        tokio::time::sleep(COUNTED_EVERY).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_prompts_are_the_same() {
        assert_ne!(prompt(), prompt());
        assert_eq!(prompt().split_whitespace().count(), WORDS);
    }

    #[test]
    fn an_error_is_told_in_one_line() {
        assert_eq!(beginning(b"{\n  \"a\": 1\n}"), "{ \"a\": 1 }");
        assert_eq!(beginning(&[b'x'; 1_000]).len(), 200);
    }
}
