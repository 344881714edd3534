//! Starts a request: checks it, chooses a dp rank, and submits it to the engine, for a decode leg after its KV transfer.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use hyper::http::request::Parts;

use super::driver::Ticket;
use super::error::ApiError;
use super::generation::Generation;
use super::request::{Api, GenerationRequest};
use super::shared::Shared;
use super::tokenizer;
use super::transfer::fetch::{Received, receive};
use super::transfer::params::{Leg, TransferParams};
use super::transfer::settings::Connector;
use crate::sim::engine::{Refused, Request};
use crate::sim::fault::Faults;

/// Resolves once the engine has the request: at once, or for a decode leg once the blocks are transferred.
pub(crate) type Start = Pin<Box<dyn Future<Output = Result<Started, ApiError>> + Send + Sync>>;

/// A request that was submitted to the engine.
#[derive(Debug)]
pub(crate) struct Started {
    pub(crate) ticket: Ticket,
    pub(crate) received: Option<Received>,
}

/// Every rejection happens here; only a KV transfer can fail later.
pub(crate) fn start(
    shared: &Arc<Shared>,
    parts: &Parts,
    mut request: GenerationRequest,
    (leg, params): (Leg, TransferParams),
    faults: &Faults,
) -> Result<(Generation, Start), ApiError> {
    if let Some(from) = faults.other_tokens_from {
        for prompt in &mut request.prompts {
            tokenizer::garble(prompt, from);
        }
    }
    let own_end = if faults.stop_at_once {
        Some(1)
    } else {
        shared
            .settings
            .stop_after
            .map(|tokens| tokens.get() as usize)
    };
    let own_end = own_end.filter(|&end| !request.ignores_eos && end <= request.answer_tokens);
    let stops = own_end.is_some();
    request.answer_tokens = own_end.unwrap_or(request.answer_tokens);
    let rank = match request.api {
        Api::Chat | Api::Completions | Api::Messages => shared.ranks.pinned(&parts.headers)?,
        // vLLM ignores the header here.
        Api::Responses => None,
    };
    if shared.life.is_core_dead() {
        return Err(ApiError::engine_error());
    }
    let driver = Arc::clone(shared.ranks.driver(rank));
    let settings = &shared.settings.transfer;
    let start: Start = match (leg, settings.connector) {
        (Leg::Decode, Some(connector)) => {
            if driver.engine().is_full() {
                return Err(Refused::Busy.into());
            }
            let (shared, request, faults) = (Arc::clone(shared), request.clone(), faults.clone());
            Box::pin(async move {
                let received = receive(&shared, connector, &params, &request, &faults).await?;
                let ticket = driver.submit(received_requests(&request, &received))?;
                let received = Some(received);
                Ok(Started { ticket, received })
            })
        }
        (Leg::Prefill, Some(connector)) => {
            // Mooncake and MoRI-IO do not offer the blocks of an answer that ends before its limit.
            let offers_blocks = connector == Connector::Nixl || !stops;
            let keeps_blocks = offers_blocks && !faults.transfer.no_params;
            let mut requests = engine_requests(&request);
            for request in &mut requests {
                request.keep_for = keeps_blocks.then(|| settings.lease());
            }
            started(driver.submit(requests)?)
        }
        (Leg::Whole, _) | (_, None) => started(driver.submit(engine_requests(&request))?),
    };
    let block_tokens = shared.settings.block_tokens.get() as usize;
    let mut generation = Generation::new(request, block_tokens);
    generation.stops = stops;
    Ok((generation, start))
}

fn started(ticket: Ticket) -> Start {
    let received = None;
    Box::pin(std::future::ready(Ok(Started { ticket, received })))
}

/// One engine request for each prompt.
fn engine_requests(request: &GenerationRequest) -> Vec<Request> {
    let engine_request = |prompt: &Vec<u32>| Request {
        answer: tokenizer::answer(prompt, request.answer_tokens),
        prompt: prompt.clone(),
        salt: request.salt,
        label: request.label.clone(),
        ..Request::default()
    };
    request.prompts.iter().map(engine_request).collect()
}

/// The engine requests of a decode leg, whose first prompt needs no prefill.
fn received_requests(request: &GenerationRequest, received: &Received) -> Vec<Request> {
    let mut requests = engine_requests(request);
    if let Some(first) = requests.first_mut() {
        first.received_tokens = first.prompt.len();
        if received.is_wrong {
            first.answer = tokenizer::wrong(request.answer_tokens);
        }
    }
    requests
}
