//! KV transfer check (`check --live --transfer`): sends a new prompt through a prefill and a decode worker. The text must be
//! the one that the decode worker generates alone.

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::header::{self, HeaderValue};
use hyper::{HeaderMap, Method, Request};
use serde::Deserialize;
use serde_json::json;

use crate::fleet::kv_transfer::Connector;
use crate::fleet::{Worker, probe};
use crate::ids::RequestId;
use crate::observe;
use crate::prompt::Api;
use crate::relay::answer::usage_reader;
use crate::relay::headers;
use crate::relay::kv_transfer::{ANSWER_BYTES_MAX, Legs, Rendezvous, Transfer};

const PATH: &str = "/v1/completions";
/// Two or three tokens each: several blocks of any usual size.
const WORDS: usize = 160;
const ANSWER_TOKENS: u32 = 8;
/// An engine counts received tokens a moment after it has answered.
const COUNTED_WITHIN: Duration = Duration::from_secs(3);
const COUNTED_EVERY: Duration = Duration::from_millis(200);

#[derive(Debug)]
pub(super) struct Transferred {
    pub(super) prompt_tokens: u64,
    /// Tokens of the KV blocks that the decode worker received; `None` if it does not report that.
    pub(super) received_tokens: Option<u64>,
    /// From the beginning of the prefill leg to the end of the decode leg.
    pub(super) took: Duration,
}

/// Runs the check. Both workers must have the roles that they are listed with: an engine crashes on the other role's
/// parameters. `limit` is the time limit of each request. The error says what failed.
pub(super) async fn run(
    connector: Connector,
    prefill: &Arc<Worker>,
    decode: &Arc<Worker>,
    model: &str,
    limit: Duration,
) -> Result<Transferred, String> {
    let id = RequestId::new(fastrand::u128(..));
    let prompt = prompt();
    // Each with a salt of its own, so that the second request does not hit the cache of the first.
    let body = |salt: &str| {
        let body = json!({
            "model": model, "prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0,
            "cache_salt": format!("{id}-{salt}"),
        });
        Bytes::from(body.to_string())
    };
    let legs = Legs::of(Api::Completions, &body("transfer")).map_err(|why| {
        format!(
            "the check's own request cannot be disaggregated: {}",
            why.as_str()
        )
    })?;
    let bootstrap_info = prefill.bootstrap_info.load_full();
    if connector == Connector::Sglang {
        return run_together(prefill, decode, &legs, id, limit).await;
    }
    let transfer = Transfer::begin(
        connector,
        Api::Completions,
        format!("xfer-{id}"),
        prefill.host(),
        bootstrap_info,
        None,
        fastrand::u64(..),
    )
    .map_err(|why| why.to_string())?;
    let received_before = probe::received_tokens(decode, limit).await;
    let started = observe::now();

    let rank = transfer.rank();
    let first = post(prefill, legs.prefill(&transfer), id, rank, limit)
        .await
        .map_err(|why| format!("prefill: {why}"))?;
    let result = transfer
        .end(&first)
        .map_err(|why| format!("prefill: {why}"))?;
    let second = post(decode, legs.decode(result.params), id, None, limit)
        .await
        .map_err(|why| format!("decode: {why}"))?;
    let took = observe::now().saturating_duration_since(started);
    let transferred = text(&second).ok_or("decode: the answer is no completion")?;

    let alone = post(decode, body("alone"), id, None, limit)
        .await
        .map_err(|why| format!("decode worker alone: {why}"))?;
    let alone = text(&alone).ok_or("decode worker alone: the answer is no completion")?;
    if transferred != alone {
        return Err(format!(
            "the text differs from the decode worker's own: {transferred:?} instead of {alone:?}"
        ));
    }
    let received_tokens = match received_before {
        Some(before) => Some(received(decode, before, limit).await?),
        None => None,
    };
    Ok(Transferred {
        prompt_tokens: usage_reader::of_whole(Api::Completions, &second)
            .unwrap_or_default()
            .prompt_tokens,
        received_tokens,
        took,
    })
}

/// Both legs at the same time. Without the prefill worker's blocks the decode worker answers nothing.
async fn run_together(
    prefill: &Arc<Worker>,
    decode: &Arc<Worker>,
    legs: &Legs,
    id: RequestId,
    limit: Duration,
) -> Result<Transferred, String> {
    let started = observe::now();
    let bootstrap_info = prefill.bootstrap_info.load_full();
    let room = bootstrap_info.and_then(|info| Rendezvous::new(&info, fastrand::u64(..), None));
    let room = room.ok_or_else(|| "its bootstrap server does not answer".to_owned())?;
    let first = post(prefill, legs.meeting(&room), id, room.rank(), limit);
    let second = post(decode, legs.meeting(&room), id, None, limit);
    let first = async { first.await.map_err(|why| format!("prefill: {why}")) };
    let second = async { second.await.map_err(|why| format!("decode: {why}")) };
    // The first to fail ends both.
    let (_, second) = tokio::try_join!(first, second)?;
    text(&second).ok_or("decode: the answer is no completion")?;
    let prompt_tokens = usage_reader::of_whole(Api::Completions, &second)
        .unwrap_or_default()
        .prompt_tokens;
    Ok(Transferred {
        prompt_tokens,
        received_tokens: None,
        took: observe::now().saturating_duration_since(started),
    })
}

/// Random words that no engine has cached.
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
    if let Some(rank) = rank {
        headers::pin(request.headers_mut(), rank);
    }
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
        if status.is_success() {
            Ok(body)
        } else {
            Err(format!("answered {status}: {}", beginning(&body)))
        }
    };
    tokio::time::timeout(limit, exchange)
        .await
        .unwrap_or_else(|_| Err(format!("no answer within {limit:?}")))
}

/// The beginning of an error, on one line.
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

/// Tokens that the decode worker received since `before`. Without a connector its text is right as well, because it
/// computes the whole prompt itself.
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
                "the text is right, but the decode worker received no KV blocks and computed the prompt itself; \
                 is its KV connector configured?"
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
    fn an_error_is_shown_on_one_line() {
        assert_eq!(beginning(b"{\n  \"a\": 1\n}"), "{ \"a\": 1 }");
        assert_eq!(beginning(&[b'x'; 1_000]).len(), 200);
    }
}
