//! Requests that read without generating: embeddings and reranking. The numbers are made up, but the
//! prompts go through the engine, take their time there and fill its cache.

use std::io;
use std::sync::Arc;

use hyper::http::request::Parts;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::answer::json;
use super::ask::{self, Prompt};
use super::problem::Problem;
use super::serve::{self, Answer};
use super::{Shared, generate, tokenizer};
use crate::sim::engine::Request;
use crate::sim::fault::Faults;

const DIMENSIONS: u64 = 8;

#[derive(Deserialize)]
struct EmbeddingBody {
    model: Option<String>,
    input: Option<Prompt>,
}

#[derive(Deserialize)]
struct RerankBody {
    model: Option<String>,
    query: Option<String>,
    documents: Option<Vec<String>>,
    top_n: Option<usize>,
}

#[derive(Serialize)]
struct Embeddings<'a> {
    id: String,
    object: &'a str,
    created: u64,
    model: &'a str,
    data: Vec<Embedding>,
    usage: EmbeddingUsage,
}

#[derive(Serialize)]
struct Embedding {
    index: usize,
    object: &'static str,
    embedding: Vec<f64>,
}

#[derive(Serialize)]
struct EmbeddingUsage {
    prompt_tokens: usize,
    total_tokens: usize,
    completion_tokens: usize,
    prompt_tokens_details: (),
}

#[derive(Serialize)]
struct Reranked<'a> {
    id: String,
    model: &'a str,
    usage: RerankUsage,
    results: Vec<Ranked<'a>>,
}

#[derive(Serialize)]
struct RerankUsage {
    prompt_tokens: usize,
    total_tokens: usize,
}

#[derive(Serialize)]
struct Ranked<'a> {
    index: usize,
    document: Document<'a>,
    relevance_score: f64,
}

#[derive(Serialize)]
struct Document<'a> {
    text: &'a str,
}

/// What the engine is to read, and the body that is sent once it has.
struct Work {
    prompts: Vec<Vec<u32>>,
    answer: String,
}

pub(crate) async fn embeddings(
    shared: &Arc<Shared>,
    parts: &Parts,
    body: &[u8],
    faults: Faults,
) -> io::Result<Answer> {
    run(shared, parts, faults, || embed(shared, body)).await
}

pub(crate) async fn rerank(
    shared: &Arc<Shared>,
    parts: &Parts,
    body: &[u8],
    faults: Faults,
) -> io::Result<Answer> {
    run(shared, parts, faults, || rank(shared, body)).await
}

async fn run(
    shared: &Arc<Shared>,
    parts: &Parts,
    faults: Faults,
    read: impl FnOnce() -> Result<Work, Problem>,
) -> io::Result<Answer> {
    let in_flight = shared.seen.begin();
    if let Some(refusal) = generate::before_the_engine(&faults).await {
        in_flight.refuse();
        return Ok(refusal);
    }
    let submitted = serve::check_content_type(parts)
        .and_then(|()| read())
        .and_then(|work| {
            ask::check_prompts(&work.prompts, shared.settings.context_tokens())?;
            let request = |prompt| Request {
                prompt,
                ..Request::default()
            };
            let requests = work.prompts.into_iter().map(request).collect();
            Ok((work.answer, shared.ranks.driver(None).submit(requests)?))
        });
    let (answer, mut ticket) = match submitted {
        Ok(submitted) => submitted,
        Err(problem) => {
            in_flight.refuse();
            return Ok(serve::problem(&problem));
        }
    };
    let prompts = ticket.len();
    for _ in 0..prompts {
        // Without an answer to generate, the only event of a prompt is its end.
        if ticket.next().await.is_none() {
            return Err(io::Error::other("the engine has stopped"));
        }
    }
    in_flight.finish();
    Ok(serve::ok(answer))
}

fn embed(shared: &Shared, body: &[u8]) -> Result<Work, Problem> {
    let request: EmbeddingBody = ask::from_json(body)?;
    let input = request
        .input
        .ok_or_else(|| ask::missing_field("input", body))?;
    let model = ask::check_model(request.model, &shared.settings.models)?;
    let prompts = input.into_tokens();
    let tokens = prompts.iter().map(Vec::len).sum();
    let embedding = |(index, prompt): (usize, &Vec<u32>)| Embedding {
        index,
        object: "embedding",
        embedding: (0..DIMENSIONS).map(|at| score(prompt, at)).collect(),
    };
    let answer = json(&Embeddings {
        id: format!("embd-{:016x}", fastrand::u64(..)),
        object: "list",
        created: shared.now_unix_seconds(),
        model: &model,
        data: prompts.iter().enumerate().map(embedding).collect(),
        usage: EmbeddingUsage {
            prompt_tokens: tokens,
            total_tokens: tokens,
            completion_tokens: 0,
            prompt_tokens_details: (),
        },
    });
    Ok(Work { prompts, answer })
}

fn rank(shared: &Shared, body: &[u8]) -> Result<Work, Problem> {
    let request: RerankBody = ask::from_json(body)?;
    let query = request
        .query
        .ok_or_else(|| ask::missing_field("query", body))?;
    let documents = request
        .documents
        .ok_or_else(|| ask::missing_field("documents", body))?;
    let model = ask::check_model(request.model, &shared.settings.models)?;
    let pair = |document: &String| tokenizer::encode(&format!("{query}\n{document}"));
    let prompts: Vec<Vec<u32>> = documents.iter().map(pair).collect();
    let tokens = prompts.iter().map(Vec::len).sum();
    let mut results: Vec<Ranked<'_>> = documents
        .iter()
        .zip(&prompts)
        .enumerate()
        .map(|(index, (text, prompt))| Ranked {
            index,
            document: Document { text },
            relevance_score: score(prompt, 0).abs(),
        })
        .collect();
    results.sort_by(|one, other| other.relevance_score.total_cmp(&one.relevance_score));
    results.truncate(request.top_n.filter(|top| *top > 0).unwrap_or(usize::MAX));
    let answer = json(&Reranked {
        id: format!("rerank-{:016x}", fastrand::u64(..)),
        model: &model,
        usage: RerankUsage {
            prompt_tokens: tokens,
            total_tokens: tokens,
        },
        results,
    });
    Ok(Work { prompts, answer })
}

/// Between -1 and 1, and always the same for the same tokens.
fn score(tokens: &[u32], seed: u64) -> f64 {
    let chain = |sum: u64, token: &u32| xxh3_64_with_seed(&token.to_le_bytes(), sum);
    let hash = tokens.iter().fold(seed, chain);
    (hash >> 11) as f64 / (1u64 << 52) as f64 - 1.0
}
