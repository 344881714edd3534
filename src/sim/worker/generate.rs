//! Requests that generate: faults first, then the engine, then the answer, whole or streamed.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use hyper::http::request::Parts;
use hyper::{StatusCode, header};

use super::answer::Transcript;
use super::ask::{self, Api, Ask, Context};
use super::body::{AnswerBody, Events};
use super::driver::Ticket;
use super::problem::Problem;
use super::seen::InFlight;
use super::serve::{self, Answer, LastAnswer};
use super::transfer::{self, Asked, Connector, Grant, Leg, Received};
use super::{Shared, lists, tokenizer};
use crate::sim::engine::{Refused, Request};
use crate::sim::fault::{EarlyEnd, Faults};

/// A request on its way into the engine: at once, or once another engine's blocks are here.
pub(crate) type Start = Pin<Box<dyn Future<Output = Result<Started, Problem>> + Send + Sync>>;

/// A request that the engine has.
#[derive(Debug)]
pub(crate) struct Started {
    pub(crate) ticket: Ticket,
    pub(crate) received: Option<Received>,
}

/// Answers a request for text. An error drops the connection.
pub(crate) async fn answer(
    shared: &Arc<Shared>,
    api: Api,
    parts: &Parts,
    body: &[u8],
    faults: Faults,
) -> io::Result<Answer> {
    let asked = Asked::peek(body);
    let leg = asked.leg();
    let in_flight = begin(shared, leg);
    if faults.transfer.die_at_leg && leg != Leg::Whole {
        shared.life.end();
        return std::future::pending().await;
    }
    if let Some(refusal) = before_the_engine(&faults).await {
        in_flight.refuse();
        return Ok(refusal);
    }
    let (leg, connector) = (
        what_to_do(shared, leg, &asked),
        shared.settings.transfer.connector,
    );
    let submitted = match read(shared, api, parts, body) {
        Ok(ask) => start(shared, parts, ask, (leg, asked.clone()), &faults),
        Err(problem) => Err(problem),
    };
    let (transcript, start) = match submitted {
        Ok(submitted) => submitted,
        Err(problem) => {
            let is_refused = (400..500).contains(&problem.status);
            if is_refused && leg == Leg::Decode && connector == Some(Connector::Nixl) {
                transfer::give_up(&asked).await;
            }
            in_flight.refuse();
            return Ok(serve::problem(&problem));
        }
    };
    let grant = connector
        .filter(|_| leg == Leg::Prefill)
        .map(|connector| Grant {
            shared: Arc::clone(shared),
            connector,
            transfer_id: asked.transfer_id,
        });
    let dies_after = faults.transfer.die_after_answer && leg == Leg::Prefill;
    let mut answer = if transcript.ask.stream {
        let events = Events::new(shared, transcript, faults, start, in_flight, grant);
        let body = AnswerBody::events(events);
        let kind = "text/event-stream; charset=utf-8";
        serve::typed(StatusCode::OK, kind, body)
    } else {
        whole(shared, transcript, start, in_flight, grant, &faults).await?
    };
    if dies_after {
        answer.extensions_mut().insert(LastAnswer);
    }
    Ok(answer)
}

/// Counts a request, and how it ends.
fn begin(shared: &Arc<Shared>, leg: Leg) -> InFlight {
    let in_flight = shared.seen.begin();
    let is_misplaced = !leg.is_for(shared.settings.transfer.role());
    shared.transfers.count(|counts| {
        counts.wrong_role += u64::from(is_misplaced);
        match leg {
            Leg::Whole => {}
            Leg::Prefill => counts.prefill_legs += 1,
            Leg::Decode => counts.decode_legs += 1,
        }
    });
    let shared = Arc::clone(shared);
    in_flight.on_abort(move || {
        shared.transfers.count(|counts| match leg {
            Leg::Whole => {}
            Leg::Prefill => counts.aborted_prefill_legs += 1,
            Leg::Decode => counts.aborted_decode_legs += 1,
        });
    })
}

/// A server without a connector does not look at the parameters. One with a connector has an engine that does
/// not survive parameters for another role, nor NIXL's without blocks.
fn what_to_do(shared: &Shared, leg: Leg, asked: &Asked) -> Leg {
    let settings = &shared.settings.transfer;
    let Some(connector) = settings.connector else {
        return Leg::Whole;
    };
    let has_blocks = connector == Connector::Mooncake || asked.remote_block_ids.is_some();
    if !leg.is_for(settings.role()) || (leg == Leg::Decode && !has_blocks) {
        shared.core_dies();
    }
    leg
}

/// What is refused, is refused here; a transfer can still fail.
fn start(
    shared: &Arc<Shared>,
    parts: &Parts,
    mut ask: Ask,
    (leg, asked): (Leg, Asked),
    faults: &Faults,
) -> Result<(Transcript, Start), Problem> {
    if faults.refuse_xargs && ask.has_xargs {
        return Err(Problem::bad_param(
            "vllm_xargs",
            "vllm_xargs is not supported",
        ));
    }
    if let Some(from) = faults.other_tokens_from {
        ask.prompts
            .iter_mut()
            .for_each(|prompt| tokenizer::garble(prompt, from));
    }
    let stops = faults.stop_at_once && !ask.ignores_eos;
    if stops {
        ask.answer_tokens = 1;
    }
    let rank = match ask.api {
        Api::Chat | Api::Completions => shared.ranks.pinned(&parts.headers)?,
        // vLLM does not look at the header here.
        Api::Responses => None,
    };
    if shared.life.is_core_dead() {
        return Err(Problem::engine_error());
    }
    let driver = Arc::clone(shared.ranks.driver(rank));
    let settings = &shared.settings.transfer;
    let start: Start = match (leg, settings.connector) {
        (Leg::Decode, Some(connector)) => {
            if driver.is_full() {
                return Err(Refused::Busy.into());
            }
            let (shared, ask, faults) = (Arc::clone(shared), ask.clone(), faults.clone());
            Box::pin(async move {
                let received = transfer::receive(&shared, connector, &asked, &ask, &faults).await?;
                let ticket = driver.submit(answers(&ask, &received))?;
                let received = Some(received);
                Ok(Started { ticket, received })
            })
        }
        (Leg::Prefill, Some(connector)) => {
            // Mooncake gives up what did not end at its limit.
            let is_kept = connector == Connector::Nixl || !stops;
            let keep = is_kept && !faults.transfer.no_params;
            let mut requests = requests(&ask);
            for request in &mut requests {
                request.keep_for = keep.then(|| settings.lease());
            }
            started(driver.submit(requests)?)
        }
        (Leg::Whole, _) | (_, None) => started(driver.submit(requests(&ask))?),
    };
    let mut transcript = Transcript::new(ask, shared.settings.block_tokens.get() as usize);
    transcript.stops = stops;
    Ok((transcript, start))
}

fn started(ticket: Ticket) -> Start {
    let received = None;
    Box::pin(std::future::ready(Ok(Started { ticket, received })))
}

/// The faults that come before anything is read; an answer, if that is all there will be.
pub(crate) async fn before_the_engine(faults: &Faults) -> Option<Answer> {
    if faults.hang {
        // Ends when the client does.
        std::future::pending::<()>().await;
    }
    if let Some(status) = faults.refuse {
        let mut refusal = serve::problem(&Problem::on_purpose(status));
        if let Some(seconds) = faults.retry_after {
            let headers = refusal.headers_mut();
            headers.insert(header::RETRY_AFTER, seconds.into());
        }
        return Some(refusal);
    }
    if faults.slow_first_ms > 0 {
        tokio::time::sleep(Duration::from_millis(faults.slow_first_ms)).await;
    }
    None
}

fn read(shared: &Shared, api: Api, parts: &Parts, body: &[u8]) -> Result<Ask, Problem> {
    serve::check_content_type(parts)?;
    let header = |name: &str| parts.headers.get(name).and_then(|it| it.to_str().ok());
    let context = Context {
        models: &shared.settings.models,
        context_tokens_max: shared.settings.context_tokens(),
        now: shared.now_unix_seconds(),
        request_id: header("x-request-id"),
        session_id: header("x-session-id"),
        random_id: format!("{:016x}", fastrand::u64(..)),
    };
    let tokens_max = context.context_tokens_max;
    let mut ask = Ask::read(api, body, context)?;
    if let Some(own) = &shared.own_tokens
        && let Some(prompts) = own.prompts(api, body)?
    {
        ask::check_prompts(&prompts, tokens_max.saturating_sub(ask.answer_tokens))?;
        ask.prompts = prompts;
    }
    Ok(ask)
}

/// What would be computed of a request.
pub(crate) async fn rendered(
    shared: &Shared,
    api: Api,
    parts: &Parts,
    body: &[u8],
    faults: &Faults,
) -> Answer {
    tokens_pause(faults).await;
    if !shared.settings.enable_scale_out {
        return serve::problem(&Problem::without_scale_out());
    }
    match read(shared, api, parts, body) {
        Ok(ask) => serve::ok(lists::rendered(api, &ask)),
        Err(problem) => serve::problem(&problem),
    }
}

pub(crate) async fn tokens_pause(faults: &Faults) {
    if faults.slow_tokens_ms > 0 {
        tokio::time::sleep(Duration::from_millis(faults.slow_tokens_ms)).await;
    }
}

fn requests(ask: &Ask) -> Vec<Request> {
    let request = |prompt: &Vec<u32>| Request {
        answer: tokenizer::answer(prompt, ask.answer_tokens),
        prompt: prompt.clone(),
        salt: ask.salt,
        label: ask.label.clone(),
        report_cached: ask.report_cached,
        ..Request::default()
    };
    ask.prompts.iter().map(request).collect()
}

/// Of a prompt that was received: nothing of it is to be computed.
fn answers(ask: &Ask, received: &Received) -> Vec<Request> {
    let mut requests = requests(ask);
    if let Some(first) = requests.first_mut() {
        first.received_tokens = first.prompt.len();
        if received.is_wrong {
            first.answer = tokenizer::wrong(ask.answer_tokens);
        }
    }
    requests
}

async fn whole(
    shared: &Shared,
    mut transcript: Transcript,
    start: Start,
    in_flight: InFlight,
    grant: Option<Grant>,
    faults: &Faults,
) -> io::Result<Answer> {
    let mut ticket = match start.await {
        Ok(started) => {
            transcript.received = started.received;
            started.ticket
        }
        Err(problem) => {
            in_flight.refuse();
            return Ok(serve::problem(&problem));
        }
    };
    loop {
        match faults.early_end_after(transcript.completion_tokens()) {
            Some(EarlyEnd::Cut) => return Err(io::Error::other("cut by a fault switch")),
            Some(EarlyEnd::Stall) => std::future::pending().await,
            Some(EarlyEnd::Error) => return Ok(serve::problem(&Problem::engine_error())),
            Some(EarlyEnd::Death) => {
                shared.life.end();
                std::future::pending().await
            }
            None => {}
        }
        let Some((index, event)) = ticket.next().await else {
            if ticket.is_of_dead_engine() {
                return Ok(serve::problem(&Problem::engine_error()));
            }
            return Err(io::Error::other("the engine has stopped"));
        };
        transcript.on_event(index, event);
        if transcript.is_complete() {
            in_flight.finish();
            transcript.handed = grant.and_then(|grant| grant.offer(&ticket, &transcript));
            return Ok(serve::ok(transcript.whole()));
        }
    }
}
