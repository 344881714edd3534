//! Requests that generate: faults first, then the engine, then the answer, whole or streamed.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use hyper::StatusCode;
use hyper::header;
use hyper::http::request::Parts;

use super::Shared;
use super::answer::Transcript;
use super::ask::Api;
use super::ask::Ask;
use super::ask::Context;
use super::body::AnswerBody;
use super::body::Events;
use super::driver::Ticket;
use super::problem::Problem;
use super::seen::InFlight;
use super::serve;
use super::serve::Answer;
use super::tokenizer;
use crate::sim::engine::Request;
use crate::sim::fault::Ending;
use crate::sim::fault::Faults;

/// Answers a request for text. An error drops the connection.
pub(crate) async fn answer(
    shared: &Arc<Shared>,
    api: Api,
    parts: &Parts,
    body: &[u8],
    faults: Faults,
) -> io::Result<Answer> {
    let in_flight = shared.seen.begin();
    if let Some(refusal) = before_the_engine(&faults).await {
        in_flight.refuse();
        return Ok(refusal);
    }
    let submitted = read(shared, api, parts, body).and_then(|ask| {
        let rank = match api {
            Api::Chat | Api::Completions => shared.ranks.pinned(&parts.headers)?,
            // vLLM does not look at the header here.
            Api::Responses => None,
        };
        let ticket = shared.ranks.driver(rank).submit(requests(&ask))?;
        Ok((ask, ticket))
    });
    let (ask, ticket) = match submitted {
        Ok(submitted) => submitted,
        Err(problem) => {
            in_flight.refuse();
            return Ok(serve::problem(&problem));
        }
    };
    let stream = ask.stream;
    let transcript = Transcript::new(ask, shared.settings.block_tokens.get() as usize);
    if stream {
        let events = Events::new(transcript, faults, ticket, in_flight);
        let body = AnswerBody::events(events);
        let kind = "text/event-stream; charset=utf-8";
        return Ok(serve::typed(StatusCode::OK, kind, body));
    }
    whole(transcript, ticket, in_flight, &faults).await
}

/// What an engine would be given for a Responses request, as vLLM tells it with `--enable-scale-out`.
pub(crate) fn render(shared: &Arc<Shared>, parts: &Parts, body: &[u8]) -> Answer {
    match read(shared, Api::Responses, parts, body) {
        Ok(ask) => {
            let rendered = serde_json::json!({
                "request_id": ask.id,
                "token_ids": ask.prompts.first(),
                "features": null,
                "model": ask.model,
                "stream": ask.stream,
                "kv_transfer_params": null,
            });
            serve::ok(rendered.to_string())
        }
        Err(found) => serve::problem(&found),
    }
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
    Ask::read(api, body, context)
}

fn requests(ask: &Ask) -> Vec<Request> {
    let request = |prompt: &Vec<u32>| Request {
        answer: tokenizer::answer(prompt, ask.answer_tokens),
        prompt: prompt.clone(),
        salt: ask.salt,
        label: ask.label.clone(),
        report_cached: ask.report_cached,
    };
    ask.prompts.iter().map(request).collect()
}

async fn whole(
    mut transcript: Transcript,
    mut ticket: Ticket,
    in_flight: InFlight,
    faults: &Faults,
) -> io::Result<Answer> {
    loop {
        match faults.ending_after(transcript.completion_tokens()) {
            Some(Ending::Cut) => return Err(io::Error::other("cut by a fault switch")),
            Some(Ending::Stall) => std::future::pending().await,
            Some(Ending::Error) => return Ok(serve::problem(&Problem::engine_error())),
            None => {}
        }
        let Some((index, event)) = ticket.next().await else {
            return Err(io::Error::other("the engine has stopped"));
        };
        transcript.on_event(index, event);
        if transcript.is_complete() {
            in_flight.finish();
            return Ok(serve::ok(transcript.whole()));
        }
    }
}
