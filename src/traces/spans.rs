//! The spans of a [`Record`]. Pure.

use std::borrow::Cow;
use std::str::FromStr;
use std::time::{Instant, SystemTime};

use opentelemetry::trace::{
    Event as SpanEvent, Link, SpanContext, SpanId, SpanKind, Status, TraceFlags, TraceId,
    TraceState,
};
use opentelemetry::{Array, InstrumentationScope, KeyValue, StringValue, Value};
use opentelemetry_sdk::trace::{SpanData, SpanEvents, SpanLinks};

use super::context::TraceContext;
use super::names;
use super::record::{Decision, Event, Leg, Record, RequestEnd, Try};

/// The request's own span, then its tries in the order in which they ended.
pub(super) fn spans(record: &Record) -> Vec<SpanData> {
    let builder = Builder::new(record);
    let tries = record.tries.iter();
    let mut spans = vec![builder.request()];
    spans.extend(tries.map(|tried| builder.tried(tried)));
    spans
}

pub(super) fn scope() -> InstrumentationScope {
    InstrumentationScope::builder(names::SCOPE)
        .with_version(env!("CARGO_PKG_VERSION"))
        .with_schema_url(names::SCHEMA_URL)
        .build()
}

struct Builder<'a> {
    record: &'a Record,
    state: TraceState,
}

impl<'a> Builder<'a> {
    fn new(record: &'a Record) -> Self {
        let state = record.state.as_ref().and_then(|state| state.to_str().ok());
        let state = state.and_then(|state| TraceState::from_str(state).ok());
        Self {
            record,
            state: state.unwrap_or_default(),
        }
    }

    fn request(&self) -> SpanData {
        let record = self.record;
        let end = &record.end;
        // A request whose end was not seen ended with its last try.
        let last_try = record.tries.iter().filter_map(|tried| tried.ended).max();
        let ended = record.ended.or(last_try).unwrap_or(record.started);
        let (kind, name) = match &record.link {
            Some(_) => (SpanKind::Consumer, names::BACKGROUND_SPAN.into()),
            None => (SpanKind::Server, name_of(end)),
        };
        let mut events = SpanEvents::default();
        events.events = record
            .events
            .iter()
            .map(|event| self.event(event))
            .collect();
        events.dropped_count = record.dropped_events;
        let mut links = SpanLinks::default();
        let link = record.link.iter().map(|link| {
            let context = span_context(*link, true, TraceState::default());
            Link::new(context, Vec::new(), 0)
        });
        links.links = link.collect();
        let has_failed = end.status.is_none_or(|status| status >= 500);
        SpanData {
            span_context: span_context(record.context, false, self.state.clone()),
            parent_span_id: record.parent.map_or(SpanId::INVALID, span_id),
            parent_span_is_remote: record.parent.is_some(),
            span_kind: kind,
            name,
            start_time: record.started_at,
            end_time: self.time(ended),
            attributes: request_attributes(record),
            dropped_attributes_count: 0,
            events,
            links,
            status: match end.error {
                Some(error) if has_failed => Status::error(error),
                _ => Status::Unset,
            },
            instrumentation_scope: scope(),
        }
    }

    fn tried(&self, tried: &Try) -> SpanData {
        let context = TraceContext {
            span_id: tried.span_id,
            ..self.record.context
        };
        let mut events = SpanEvents::default();
        if let Some(at) = tried.first_token {
            events.events = vec![self.event(&(at, Event::FirstToken))];
        }
        SpanData {
            span_context: span_context(context, false, self.state.clone()),
            parent_span_id: span_id(self.record.context.span_id),
            parent_span_is_remote: false,
            span_kind: SpanKind::Client,
            name: format!("{} {}", tried.operation, tried.model).into(),
            start_time: self.time(tried.started),
            end_time: self.time(tried.ended.unwrap_or(tried.started)),
            attributes: try_attributes(self.record, tried),
            dropped_attributes_count: 0,
            events,
            links: SpanLinks::default(),
            status: match &tried.error {
                Some((_, message)) => Status::error(message.clone()),
                None => Status::Unset,
            },
            instrumentation_scope: scope(),
        }
    }

    fn event(&self, (at, event): &(Instant, Event)) -> SpanEvent {
        let (name, attributes) = match event {
            Event::Queued { waited } => (
                names::QUEUE,
                vec![KeyValue::new(names::DURATION, waited.as_secs_f64())],
            ),
            Event::Tokenized { took, tokens } => {
                let mut attributes = vec![KeyValue::new(names::DURATION, took.as_secs_f64())];
                attributes.extend(tokens.map(|tokens| count(names::PROMPT_TOKENS, tokens)));
                (names::TOKENIZE, attributes)
            }
            Event::Decided {
                worker,
                rank,
                decision,
                leg,
            } => {
                let mut attributes = vec![KeyValue::new(names::WORKER, worker.clone())];
                attributes.extend(rank.map(rank_attribute));
                attributes.extend(leg.map(leg_attribute));
                attributes.extend(decision_attributes(decision));
                (names::DECIDE, attributes)
            }
            Event::PrefillLeg { worker, took } => (
                names::PREFILL_LEG,
                vec![
                    KeyValue::new(names::WORKER, worker.clone()),
                    KeyValue::new(names::DURATION, took.as_secs_f64()),
                ],
            ),
            Event::KvTransfer { worker, took } => (
                names::KV_TRANSFER,
                vec![
                    KeyValue::new(names::WORKER, worker.clone()),
                    KeyValue::new(names::DURATION, took.as_secs_f64()),
                ],
            ),
            Event::Continued {
                lost,
                answer_tokens,
            } => (
                names::CONTINUE,
                vec![
                    KeyValue::new(names::WORKER, lost.clone()),
                    count(names::ANSWER_TOKENS, *answer_tokens),
                ],
            ),
            Event::FirstToken => (names::FIRST_TOKEN, Vec::new()),
        };
        SpanEvent::new(name, self.time(*at), attributes, 0)
    }

    fn time(&self, at: Instant) -> SystemTime {
        let Record {
            started,
            started_at,
            ..
        } = self.record;
        match at.checked_duration_since(*started) {
            Some(later) => *started_at + later,
            None => *started_at - started.saturating_duration_since(at),
        }
    }
}

fn name_of(end: &RequestEnd) -> Cow<'static, str> {
    let method = end.method.as_ref();
    let method = method.map_or(names::UNKNOWN_METHOD, |method| known_method(method).0);
    match &end.route {
        Some(route) => format!("{method} {route}").into(),
        None => method.into(),
    }
}

/// A method as spans name it, and whether it is one of HTTP's: a client can write anything.
fn known_method(method: &hyper::Method) -> (&'static str, bool) {
    const KNOWN: [&str; 9] = [
        "GET", "POST", "DELETE", "OPTIONS", "HEAD", "PUT", "PATCH", "CONNECT", "TRACE",
    ];
    match KNOWN.iter().find(|known| **known == method.as_str()) {
        Some(known) => (known, true),
        None => (names::UNKNOWN_METHOD, false),
    }
}

/// Adds an attribute that has a value.
fn put(attributes: &mut Vec<KeyValue>, name: &'static str, value: Option<impl Into<Value>>) {
    attributes.extend(value.map(|value| KeyValue::new(name, value)));
}

fn request_attributes(record: &Record) -> Vec<KeyValue> {
    let end = &record.end;
    let mut attributes = Vec::with_capacity(10);
    let all = &mut attributes;
    let method = end.method.as_ref().map(known_method);
    let method = method.map(|(known, is_known)| if is_known { known } else { "_OTHER" });
    put(all, names::HTTP_REQUEST_METHOD, method);
    put(all, names::URL_PATH, end.path.clone());
    put(all, names::HTTP_ROUTE, end.route);
    let status = end.status.map(i64::from);
    put(all, names::HTTP_RESPONSE_STATUS_CODE, status);
    let client = end.client.map(|client| client.to_string());
    put(all, names::CLIENT_ADDRESS, client);
    put(all, names::ERROR_TYPE, end.error);
    put(all, names::TENANT, end.tenant.clone());
    put(all, names::REQUEST_ID, end.id.map(|id| id.to_string()));
    put(all, names::BACKGROUND_RESPONSE, end.response.clone());
    put(all, names::CONVERSATION_ID, record.conversation.clone());
    attributes
}

fn try_attributes(record: &Record, tried: &Try) -> Vec<KeyValue> {
    let mut attributes = vec![
        KeyValue::new(names::OPERATION_NAME, tried.operation),
        KeyValue::new(names::PROVIDER_NAME, names::PROVIDER),
        KeyValue::new(names::REQUEST_MODEL, tried.model.clone()),
        KeyValue::new(names::REQUEST_STREAM, tried.request.is_stream),
        KeyValue::new(names::WORKER, tried.worker.clone()),
        KeyValue::new(names::ATTEMPT, i64::from(tried.attempt)),
    ];
    let authority = tried.authority.rsplit_once(':');
    let (host, port) = authority.unwrap_or((&tried.authority, ""));
    attributes.push(KeyValue::new(names::SERVER_ADDRESS, host.to_owned()));
    let all = &mut attributes;
    put(all, names::SERVER_PORT, port.parse::<i64>().ok());
    let requested = tried.requested_model.clone();
    put(all, names::REQUESTED_MODEL, requested);
    put(all, names::OPENAI_API_TYPE, tried.api_type);
    let max_tokens = tried.request.max_tokens.map(number);
    put(all, names::REQUEST_MAX_TOKENS, max_tokens);
    put(all, names::REQUEST_TEMPERATURE, tried.request.temperature);
    let status = tried.status.map(i64::from);
    put(all, names::HTTP_RESPONSE_STATUS_CODE, status);
    let response = &tried.response;
    put(all, names::RESPONSE_ID, response.id.clone());
    put(all, names::RESPONSE_MODEL, response.model.clone());
    let reasons = response.finish_reasons.iter().cloned();
    let reasons: Vec<StringValue> = reasons.map(StringValue::from).collect();
    let reasons = (!reasons.is_empty()).then_some(Value::Array(Array::String(reasons)));
    put(all, names::RESPONSE_FINISH_REASONS, reasons);
    let first = tried.first_token;
    let first = first.map(|at| at.saturating_duration_since(tried.started).as_secs_f64());
    put(all, names::TIME_TO_FIRST_CHUNK, first);
    if let Some(usage) = &tried.usage {
        all.push(count(names::INPUT_TOKENS, usage.prompt_tokens));
        all.push(count(names::CACHED_TOKENS, usage.cached_tokens));
        all.push(count(names::OUTPUT_TOKENS, usage.output_tokens));
        let reasoning = usage.reasoning_tokens.map(number);
        put(all, names::REASONING_TOKENS, reasoning);
    }
    let error = tried.error.as_ref().map(|(kind, _)| *kind);
    put(all, names::ERROR_TYPE, error);
    put(all, names::CONVERSATION_ID, record.conversation.clone());
    attributes.extend(tried.rank.map(rank_attribute));
    attributes.extend(tried.leg.map(leg_attribute));
    attributes.extend(decision_attributes(&tried.decision));
    attributes
}

fn rank_attribute(rank: u32) -> KeyValue {
    KeyValue::new(names::RANK, i64::from(rank))
}

fn leg_attribute(leg: Leg) -> KeyValue {
    let leg = match leg {
        Leg::Prefill => "prefill",
        Leg::Decode => "decode",
    };
    KeyValue::new(names::LEG, leg)
}

fn decision_attributes(decision: &Decision) -> [KeyValue; 6] {
    [
        KeyValue::new(names::DECISION_REASON, decision.reason),
        count(names::DECISION_PROMPT_TOKENS, decision.prompt_tokens),
        count(names::DECISION_CACHED_TOKENS, decision.cached_tokens),
        count(names::DECISION_NEW_TOKENS, decision.new_tokens),
        count(names::DECISION_QUEUED_TOKENS, decision.queued_tokens),
        KeyValue::new(names::DECISION_COST, decision.cost),
    ]
}

fn count(name: &'static str, count: u64) -> KeyValue {
    KeyValue::new(name, number(count))
}

fn number(count: u64) -> Value {
    Value::I64(i64::try_from(count).unwrap_or(i64::MAX))
}

fn span_context(context: TraceContext, is_remote: bool, state: TraceState) -> SpanContext {
    let flags = if context.is_sampled {
        TraceFlags::SAMPLED
    } else {
        TraceFlags::default()
    };
    let trace_id = TraceId::from_bytes(context.trace_id.to_be_bytes());
    SpanContext::new(trace_id, span_id(context.span_id), flags, is_remote, state)
}

fn span_id(id: u64) -> SpanId {
    SpanId::from_bytes(id.to_be_bytes())
}

#[cfg(test)]
mod tests;
