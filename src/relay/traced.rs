//! What the relay says of a request that is traced: its tries, with what their bodies and answers say of themselves.
//! Pure. Nothing here runs for a request that is not traced.

use std::sync::{Arc, LazyLock};
use std::time::Instant;

use bytes::Bytes;
use hyper::StatusCode;
use memchr::memmem::{self, Finder};
use serde::Deserialize;

use super::answer::usage_reader;
use super::failure::types::Outcome;
use super::job::Job;
use super::plan::Plan;
use crate::fleet::Worker;
use crate::prompt::Api;
use crate::routing;
use crate::traces::{Decision, Event, Leg, RequestFields, ResponseFields, Try, TrySpan, Usage};

const USAGE: &[u8] = b"\"usage\":";
static FINISH: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("\"finish_reason\":\""));

/// The span of a try that begins now, if the request is traced.
pub(super) fn begin_try(
    job: &Job<'_>,
    plan: &Plan,
    now: Instant,
    (worker, decision): (&Arc<Worker>, &routing::Decision),
    rank: Option<u32>,
    leg: Option<Leg>,
    attempt: u32,
) -> Option<Box<TrySpan>> {
    let trace = job.context.trace()?;
    let decision = Decision {
        reason: decision.reason.as_str(),
        prompt_tokens: u64::from(plan.request.prompt_tokens),
        cached_tokens: u64::from(decision.cached_tokens),
        new_tokens: u64::from(decision.new_tokens),
        queued_tokens: worker.load.queued_tokens(),
        cost: decision.cost,
    };
    let decided = Event::Decided {
        worker: worker.name.clone(),
        rank,
        decision,
        leg,
    };
    trace.event(now, decided);
    Some(
        trace.begin_try(Try {
            span_id: 0,
            started: now,
            ended: None,
            operation: operation(job.api),
            api_type: api_type(job.api),
            model: plan.group.model.clone(),
            requested_model: job
                .requested
                .as_ref()
                .map(|requested| requested.name.clone()),
            worker: worker.name.clone(),
            rank,
            authority: worker.pool.authority().to_owned(),
            leg,
            attempt,
            decision,
            request: request_fields(&job.body, plan.is_stream),
            status: None,
            error: None,
            first_token: None,
            usage: None,
            response: ResponseFields::default(),
        }),
    )
}

/// The names of the GenAI conventions, and our own for what they do not know.
fn operation(api: Api) -> &'static str {
    match api {
        Api::Chat | Api::Responses | Api::Messages => "chat",
        Api::Completions | Api::Generate => "text_completion",
        Api::Embeddings => "embeddings",
        Api::Rerank | Api::Tokenize | Api::Detokenize | Api::CountTokens | Api::Other => {
            api.as_str()
        }
    }
}

fn api_type(api: Api) -> Option<&'static str> {
    match api {
        Api::Chat => Some("chat_completions"),
        Api::Responses => Some("responses"),
        Api::Messages => Some("messages"),
        Api::Completions
        | Api::Embeddings
        | Api::Rerank
        | Api::Tokenize
        | Api::Detokenize
        | Api::CountTokens
        | Api::Generate
        | Api::Other => None,
    }
}

fn request_fields(body: &[u8], is_stream: bool) -> RequestFields {
    #[derive(Default, Deserialize)]
    struct Wire {
        max_tokens: Option<u64>,
        max_completion_tokens: Option<u64>,
        max_output_tokens: Option<u64>,
        temperature: Option<f64>,
    }
    let wire: Wire = serde_json::from_slice(body).unwrap_or_default();
    RequestFields {
        is_stream,
        max_tokens: wire
            .max_completion_tokens
            .or(wire.max_tokens)
            .or(wire.max_output_tokens),
        temperature: wire.temperature,
    }
}

/// What passes of an answer: kept for its end.
#[derive(Debug, Default)]
pub(super) struct Passed {
    /// The last piece with a reason for which generation ended.
    finish: Option<Bytes>,
    /// The last piece with usage, or of a whole answer.
    last: Option<Bytes>,
}

impl Passed {
    pub(super) fn on_data(&mut self, data: &Bytes, is_events: bool) {
        if FINISH.find(data).is_some() {
            self.finish = Some(data.clone());
        }
        if !is_events || memmem::find(data, USAGE).is_some() {
            self.last = Some(data.clone());
        }
    }
}

/// The end of the try whose answer was passed on.
pub(super) fn end(
    span: &mut TrySpan,
    now: Instant,
    (status, outcome): (StatusCode, Outcome),
    passed: &Passed,
    usage: Option<&Usage>,
) {
    let last = passed.last.as_ref();
    let mut response = last.map(|last| response_fields(last)).unwrap_or_default();
    if let Some(finish) = &passed.finish {
        let finish = response_fields(finish);
        response.id = response.id.or(finish.id);
        response.model = response.model.or(finish.model);
        response.finish_reasons = finish.finish_reasons;
    }
    span.update(|tried| {
        tried.status = Some(status.as_u16());
        tried.usage = usage.copied();
        tried.response = response;
    });
    let answered = || format!("answered {status}");
    match outcome {
        Outcome::Complete if status.is_server_error() => span.fail(now, "server_error", answered()),
        Outcome::Complete if status.is_client_error() => span.fail(now, "client_error", answered()),
        Outcome::Complete => span.end(now),
        outcome => span.fail(now, outcome.as_str(), outcome.as_str().to_owned()),
    }
}

/// The end of a prefill leg, whose answer is read here.
pub(super) fn end_prefill(span: &mut TrySpan, now: Instant, status: StatusCode, whole: &Bytes) {
    let usage = usage_reader::of_whole(Api::Chat, whole);
    let passed = Passed {
        finish: None,
        last: Some(whole.clone()),
    };
    let ended = (status, Outcome::Complete);
    end(span, now, ended, &passed, usage.as_ref());
}

/// The answer is another worker's than the chosen one's: a gateway may send a request elsewhere.
pub(super) fn answered_by(span: &mut TrySpan, worker: &Worker) {
    span.update(|tried| {
        tried.worker = worker.name.clone();
        tried.authority = worker.pool.authority().to_owned();
    });
}

/// The stream of a request is to go on on another worker than `lost`.
pub(super) fn continued(job: &Job<'_>, now: Instant, lost: &Worker, answer_tokens: u32) {
    if let Some(trace) = job.context.trace() {
        let continued = Event::Continued {
            lost: lost.name.clone(),
            answer_tokens: answer_tokens.into(),
        };
        trace.event(now, continued);
    }
}

/// What the events of a piece, or a whole answer, say of themselves.
fn response_fields(piece: &[u8]) -> ResponseFields {
    let mut fields = ResponseFields::default();
    if piece.starts_with(b"{") {
        add_fields(piece, &mut fields);
        return fields;
    }
    for line in piece.split(|byte| *byte == b'\n') {
        if let Some(data) = line.strip_prefix(b"data:") {
            add_fields(data, &mut fields);
        }
    }
    fields
}

fn add_fields(json: &[u8], fields: &mut ResponseFields) {
    #[derive(Deserialize)]
    struct Wire {
        id: Option<String>,
        model: Option<String>,
        #[serde(default)]
        choices: Vec<Choice>,
        /// Of an event of the Responses API.
        response: Option<Inner>,
    }
    #[derive(Deserialize)]
    struct Choice {
        finish_reason: Option<String>,
    }
    #[derive(Deserialize)]
    struct Inner {
        id: Option<String>,
        model: Option<String>,
    }
    let Ok(wire) = serde_json::from_slice::<Wire>(json) else {
        return;
    };
    let (id, model) = match wire.response {
        Some(inner) => (inner.id, inner.model),
        None => (wire.id, wire.model),
    };
    fields.id = id.or(fields.id.take());
    fields.model = model.or(fields.model.take());
    let reasons = wire.choices.into_iter();
    fields
        .finish_reasons
        .extend(reasons.filter_map(|choice| choice.finish_reason));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_of_a_request_are_those_of_its_api() {
        let check = |body: &str, max_tokens, temperature| {
            let expected = RequestFields {
                is_stream: true,
                max_tokens,
                temperature,
            };
            assert_eq!(request_fields(body.as_bytes(), true), expected, "{body}");
        };
        check(
            r#"{"messages":[{"role":"user"}],"max_tokens":3}"#,
            Some(3),
            None,
        );
        check(
            r#"{"max_tokens":3,"max_completion_tokens":4}"#,
            Some(4),
            None,
        );
        check(
            r#"{"max_output_tokens":5,"temperature":0.5}"#,
            Some(5),
            Some(0.5),
        );
        check(r#"{"temperature":"warm"}"#, None, None);
        check("not JSON", None, None);
    }

    #[test]
    fn an_answer_says_its_id_its_model_and_why_it_ended() {
        let check = |piece: &str, expected: [&str; 3]| {
            let found = response_fields(piece.as_bytes());
            let found = [
                found.id.unwrap_or_default(),
                found.model.unwrap_or_default(),
                found.finish_reasons.join(","),
            ];
            assert_eq!(found, expected, "{piece}");
        };
        check(
            r#"{"id":"c-1","model":"m","choices":[{"finish_reason":"stop"},{"finish_reason":"length"}]}"#,
            ["c-1", "m", "stop,length"],
        );
        check(
            "data: {\"id\":\"c-1\",\"model\":\"m\",\"choices\":[{\"finish_reason\":\"stop\"}]}\n\n\
             data: {\"id\":\"c-1\",\"model\":\"m\",\"choices\":[]}\n\ndata: [DONE]\n\n",
            ["c-1", "m", "stop"],
        );
        check(
            "event: response.completed\ndata: {\"response\":{\"id\":\"resp_1\",\"model\":\"m\"}}\n\n",
            ["resp_1", "m", ""],
        );
        check("data: {\"id\":7}\n\n", ["", "", ""]);
        check("the end of a longer answer\"}", ["", "", ""]);
    }
}
