//! Embeddings and reranking. The numbers are pseudo-random, but the prompts go through the engine: they take prefill time
//! and fill the cache.

use std::io;
use std::sync::Arc;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use hyper::http::request::Parts;
use serde::Deserialize;
use serde_json::{Value, json};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::error::ApiError;
use super::fault_injection::before_the_engine;
use super::http_answer::{self, Answer};
use super::in_flight::InFlight;
use super::request::{self, Prompt};
use super::shared::Shared;
use super::tokenizer;
use super::transfer::params::Leg;
use crate::observe;
use crate::sim::engine::Request;
use crate::sim::fault::Faults;

const DIMENSIONS: u64 = 8;

#[derive(Deserialize)]
struct EmbeddingBody {
    model: Option<String>,
    input: Option<Prompt>,
    encoding_format: Option<String>,
}

#[derive(Deserialize)]
struct RerankBody {
    model: Option<String>,
    query: Option<String>,
    documents: Option<Vec<String>>,
    top_n: Option<usize>,
}

/// The prompts for the engine, and the body to answer once they are computed.
pub(crate) struct Work {
    prompts: Vec<Vec<u32>>,
    answer: Value,
}

/// Answers a request whose work is read by `read`.
pub(crate) async fn answer(
    shared: &Arc<Shared>,
    parts: &Parts,
    faults: Faults,
    read: impl FnOnce() -> Result<Work, ApiError>,
) -> io::Result<Answer> {
    let in_flight = InFlight::begin(shared, Leg::Whole);
    if let Some(rejection) = before_the_engine(&faults).await {
        in_flight.refuse();
        return Ok(rejection);
    }
    let submitted = http_answer::check_content_type(parts)
        .and_then(|()| read())
        .and_then(|work| {
            request::check_prompts(&work.prompts, shared.settings.context_tokens(), 0)?;
            let request = |prompt| Request {
                prompt,
                ..Request::default()
            };
            let requests = work.prompts.into_iter().map(request).collect();
            Ok((work.answer, shared.ranks.driver(None).submit(requests)?))
        });
    let (answer, mut ticket) = match submitted {
        Ok(submitted) => submitted,
        Err(error) => {
            in_flight.refuse();
            return Ok(http_answer::error(&error));
        }
    };
    let prompts = ticket.len();
    for _ in 0..prompts {
        // A prompt without an answer has one event: its end.
        if ticket.next().await.is_none() {
            return Err(io::Error::other("the engine has stopped"));
        }
    }
    in_flight.finish();
    Ok(http_answer::ok_json(&answer))
}

pub(crate) fn embed(shared: &Shared, body: &[u8]) -> Result<Work, ApiError> {
    let request: EmbeddingBody = request::from_json(body)?;
    let input = request
        .input
        .ok_or_else(|| request::missing_field("input", body))?;
    let model = request::check_model(request.model, &shared.models.list())?;
    let prompts = input.into_tokens();
    let tokens: usize = prompts.iter().map(Vec::len).sum();
    let is_base64 = request.encoding_format.as_deref() == Some("base64");
    let embedding = |(index, prompt): (usize, &Vec<u32>)| {
        let values = (0..DIMENSIONS).map(|seed| score(prompt, seed));
        let embedding = if is_base64 {
            let bytes: Vec<u8> = values
                .flat_map(|value| (value as f32).to_le_bytes())
                .collect();
            BASE64_STANDARD.encode(bytes).into()
        } else {
            json!(values.collect::<Vec<f64>>())
        };
        json!({"index": index, "object": "embedding", "embedding": embedding})
    };
    let data: Vec<Value> = prompts.iter().enumerate().map(embedding).collect();
    let answer = json!({
        "id": format!("embd-{:016x}", fastrand::u64(..)),
        "object": "list",
        "created": observe::since_epoch().as_secs(),
        "model": model,
        "data": data,
        "usage": {
            "prompt_tokens": tokens,
            "total_tokens": tokens,
            "completion_tokens": 0,
            "prompt_tokens_details": null,
        },
    });
    Ok(Work { prompts, answer })
}

pub(crate) fn rank(shared: &Shared, body: &[u8]) -> Result<Work, ApiError> {
    let request: RerankBody = request::from_json(body)?;
    let query = request
        .query
        .ok_or_else(|| request::missing_field("query", body))?;
    let documents = request
        .documents
        .ok_or_else(|| request::missing_field("documents", body))?;
    let model = request::check_model(request.model, &shared.models.list())?;
    let prompt = |document: &String| tokenizer::encode(&format!("{query}\n{document}"));
    let prompts: Vec<Vec<u32>> = documents.iter().map(prompt).collect();
    let tokens: usize = prompts.iter().map(Vec::len).sum();
    let scores = prompts.iter().map(|prompt| score(prompt, 0).abs());
    let mut ranking: Vec<(usize, f64)> = scores.enumerate().collect();
    ranking.sort_by(|(_, one), (_, other)| other.total_cmp(one));
    ranking.truncate(request.top_n.filter(|top| *top > 0).unwrap_or(usize::MAX));
    let result = |(index, score): (usize, f64)| {
        let text = &documents[index];
        json!({"index": index, "document": {"text": text}, "relevance_score": score})
    };
    let answer = json!({
        "id": format!("rerank-{:016x}", fastrand::u64(..)),
        "model": model,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        "results": ranking.into_iter().map(result).collect::<Vec<_>>(),
    });
    Ok(Work { prompts, answer })
}

/// A number between -1 and 1 that depends on the tokens and the seed only.
fn score(tokens: &[u32], seed: u64) -> f64 {
    let chain = |sum: u64, token: &u32| xxh3_64_with_seed(&token.to_le_bytes(), sum);
    let hash = tokens.iter().fold(seed, chain);
    (hash >> 11) as f64 / (1u64 << 52) as f64 - 1.0
}
