//! Chat completions, completions and responses: injected faults first, then the engine, then the answer, whole or
//! streamed. Also their render endpoints.

use std::io;
use std::sync::Arc;

use hyper::StatusCode;
use hyper::http::request::Parts;

use super::body::{AnswerBody, Events};
use super::error::ApiError;
use super::fault_injection::{before_the_engine, delay_tokenization};
use super::generation::Generation;
use super::http_answer::{self, Answer, LastAnswer, Result};
use super::in_flight::InFlight;
use super::lists;
use super::request::{self, Api, Context, GenerationRequest};
use super::shared::Shared;
use super::start::{Start, start};
use super::transfer::fetch;
use super::transfer::offer::BlockOffer;
use super::transfer::params::{Leg, TransferParams};
use super::transfer::settings::Connector;
use crate::observe;
use crate::sim::fault::{EarlyEnd, Faults};

/// Answers an inference request.
pub(crate) async fn answer(
    shared: &Arc<Shared>,
    api: Api,
    parts: &Parts,
    body: &[u8],
    faults: Faults,
) -> Result<Answer> {
    let params = TransferParams::of_body(body);
    let leg = params.leg();
    let in_flight = InFlight::begin(shared, leg);
    if faults.transfer.die_at_leg && leg != Leg::Whole {
        shared.life.end();
        return std::future::pending().await;
    }
    if let Some(rejection) = before_the_engine(&faults).await {
        in_flight.refuse();
        return Ok(rejection);
    }
    let leg = effective_leg(shared, leg, &params);
    let connector = shared.settings.transfer.connector;
    let submitted = read(shared, api, parts, body)
        .and_then(|request| start(shared, parts, request, (leg, params.clone()), &faults));
    let (generation, start) = match submitted {
        Ok(submitted) => submitted,
        Err(error) => {
            let is_client_error = (400..500).contains(&error.status);
            if is_client_error && leg == Leg::Decode && connector == Some(Connector::Nixl) {
                fetch::release(&params).await;
            }
            in_flight.refuse();
            return Ok(http_answer::error(&error));
        }
    };
    let offer = connector
        .filter(|_| leg == Leg::Prefill)
        .map(|connector| BlockOffer {
            shared: Arc::clone(shared),
            connector,
            transfer_id: params.transfer_id,
        });
    let dies_after = faults.transfer.die_after_answer && leg == Leg::Prefill;
    let mut answer = if generation.request.stream {
        let events = Events::new(shared, generation, faults, start, in_flight, offer);
        let body = AnswerBody::events(events);
        http_answer::typed(StatusCode::OK, "text/event-stream; charset=utf-8", body)
    } else {
        whole(shared, generation, start, in_flight, offer, faults).await?
    };
    if dies_after {
        answer.extensions_mut().insert(LastAnswer);
    }
    Ok(answer)
}

/// What the engine does with the leg that the parameters ask for. Without a connector, vLLM ignores the parameters. With
/// one, parameters for another role, or NIXL's without block ids, kill its engine core.
fn effective_leg(shared: &Shared, leg: Leg, params: &TransferParams) -> Leg {
    let settings = &shared.settings.transfer;
    let Some(connector) = settings.connector else {
        return Leg::Whole;
    };
    let has_blocks = connector == Connector::Mooncake || params.remote_block_ids.is_some();
    if !leg.is_for(settings.role()) || (leg == Leg::Decode && !has_blocks) {
        shared.kill_core();
    }
    leg
}

fn read(
    shared: &Shared,
    api: Api,
    parts: &Parts,
    body: &[u8],
) -> std::result::Result<GenerationRequest, ApiError> {
    http_answer::check_content_type(parts)?;
    let header = |name: &str| {
        parts
            .headers
            .get(name)
            .and_then(|value| value.to_str().ok())
    };
    let models = shared.models.list();
    let context = Context {
        models: &models,
        max_context_tokens: shared.settings.context_tokens(),
        is_chat_only: shared.settings.no_responses,
        now: observe::since_epoch().as_secs(),
        request_id: header("x-request-id"),
        session_id: header("x-session-id"),
        random_id: format!("{:016x}", fastrand::u64(..)),
    };
    let max_tokens = context.max_context_tokens;
    let mut request = GenerationRequest::read(api, body, context)?;
    if let Some(own) = &shared.own_tokens
        && let Some(prompts) = own.prompts(api, body)?
    {
        request::check_prompts(&prompts, max_tokens, request.answer_tokens)?;
        request.prompts = prompts;
    }
    Ok(request)
}

/// The answer of a render endpoint: the tokens of the prompts.
pub(crate) async fn rendered(
    shared: &Shared,
    api: Api,
    parts: &Parts,
    body: &[u8],
    faults: &Faults,
) -> Answer {
    delay_tokenization(faults).await;
    if !shared.settings.enable_scale_out {
        return http_answer::error(&ApiError::scale_out_disabled());
    }
    let request = read(shared, api, parts, body);
    http_answer::json_or_error(request.map(|request| lists::rendered(api, &request)))
}

async fn whole(
    shared: &Shared,
    mut generation: Generation,
    start: Start,
    in_flight: InFlight,
    offer: Option<BlockOffer>,
    mut faults: Faults,
) -> Result<Answer> {
    let mut ticket = match start.await {
        Ok(started) => {
            generation.received = started.received;
            started.ticket
        }
        Err(error) => {
            in_flight.refuse();
            return Ok(http_answer::error(&error));
        }
    };
    loop {
        match faults.early_end_after(generation.completion_tokens()) {
            Some(EarlyEnd::Cut) => return Err(io::Error::other("closed by an injected fault")),
            Some(EarlyEnd::Stall) => {
                faults = shared.stall_is_over(generation.completion_tokens()).await;
            }
            Some(EarlyEnd::Error) => return Ok(http_answer::error(&ApiError::engine_error())),
            Some(EarlyEnd::Death) => {
                shared.life.end();
                std::future::pending().await
            }
            None => {}
        }
        let Some((index, event)) = ticket.next().await else {
            if ticket.is_of_dead_engine() {
                return Ok(http_answer::error(&ApiError::engine_error()));
            }
            return Err(io::Error::other("the engine has stopped"));
        };
        generation.on_event(index, event);
        if generation.is_complete() {
            in_flight.finish();
            generation.transfer_params = offer.and_then(|offer| offer.make(&ticket, &generation));
            return Ok(http_answer::ok(generation.whole()));
        }
    }
}
