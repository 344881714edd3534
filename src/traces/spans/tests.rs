use std::time::Duration;

use super::*;
use crate::traces::queue::tests::record;
use crate::traces::record::{RequestFields, ResponseFields, Usage};

fn tried(record: &Record) -> Try {
    Try {
        span_id: 9,
        started: record.started + Duration::from_millis(20),
        ended: Some(record.started + Duration::from_millis(400)),
        operation: "chat",
        api_type: Some("chat_completions"),
        model: "tiny".into(),
        requested_model: Some("alias".into()),
        worker: "gpu-0".into(),
        rank: Some(3),
        authority: "10.0.0.1:8000".to_owned(),
        leg: None,
        attempt: 1,
        decision: Decision {
            reason: "longest_prefix",
            prompt_tokens: 100,
            cached_tokens: 96,
            new_tokens: 4,
            queued_tokens: 50,
            cost: 12.5,
        },
        request: RequestFields {
            is_stream: true,
            max_tokens: Some(7),
            temperature: Some(0.5),
        },
        status: Some(200),
        error: None,
        first_token: Some(record.started + Duration::from_millis(120)),
        usage: Some(Usage {
            prompt_tokens: 100,
            cached_tokens: 96,
            output_tokens: 7,
            reasoning_tokens: Some(5),
        }),
        response: ResponseFields {
            id: Some("chatcmpl-1".to_owned()),
            model: Some("tiny-v2".to_owned()),
            finish_reasons: vec!["length".to_owned()],
        },
    }
}

fn ended() -> Record {
    let mut record = record();
    record.ended = Some(record.started + Duration::from_millis(500));
    record.end = RequestEnd {
        method: Some(hyper::Method::POST),
        path: Some("/v1/chat/completions".to_owned()),
        route: Some("/v1/chat/completions"),
        status: Some(200),
        client: Some([10, 1, 1, 1].into()),
        tenant: Some("team-a".into()),
        id: Some(crate::ids::RequestId::new(1)),
        ..RequestEnd::default()
    };
    record
}

fn lines(span: &SpanData) -> Vec<String> {
    let attributes = span.attributes.iter();
    let mut lines: Vec<_> = attributes
        .map(|attribute| format!("{}={}", attribute.key, attribute.value))
        .collect();
    lines.sort();
    lines
}

#[test]
fn a_request_is_a_server_span_with_a_client_span_of_its_try_below() {
    let mut record = ended();
    record.parent = Some(5);
    record.tries.push(tried(&record));
    let [server, client] = &spans(&record)[..] else {
        panic!("two spans")
    };
    assert_eq!(server.name, "POST /v1/chat/completions");
    assert_eq!(
        (&server.span_kind, &server.status),
        (&SpanKind::Server, &Status::Unset)
    );
    assert_eq!(server.parent_span_id, span_id(5));
    assert!(server.parent_span_is_remote);
    let took = server.end_time.duration_since(server.start_time).unwrap();
    assert_eq!(took, Duration::from_millis(500));
    assert_eq!(
        lines(server),
        [
            "client.address=10.1.1.1",
            "http.request.method=POST",
            "http.response.status_code=200",
            "http.route=/v1/chat/completions",
            "url.path=/v1/chat/completions",
            "warmroute.request.id=wr-100000000000000000000000",
            "warmroute.tenant=team-a",
        ]
    );
    assert_eq!(client.name, "chat tiny");
    assert_eq!(client.span_kind, SpanKind::Client);
    assert_eq!(client.parent_span_id, server.span_context.span_id());
    assert_eq!(
        client.span_context.trace_id(),
        server.span_context.trace_id()
    );
    assert!(!client.parent_span_is_remote && client.span_context.is_sampled());
    let took = client.end_time.duration_since(client.start_time).unwrap();
    assert_eq!(took, Duration::from_millis(380));
    assert_eq!(
        lines(client),
        [
            "gen_ai.operation.name=chat",
            "gen_ai.provider.name=openai",
            "gen_ai.request.max_tokens=7",
            "gen_ai.request.model=tiny",
            "gen_ai.request.stream=true",
            "gen_ai.request.temperature=0.5",
            "gen_ai.response.finish_reasons=[\"length\"]",
            "gen_ai.response.id=chatcmpl-1",
            "gen_ai.response.model=tiny-v2",
            "gen_ai.response.time_to_first_chunk=0.1",
            "gen_ai.usage.cache_read.input_tokens=96",
            "gen_ai.usage.input_tokens=100",
            "gen_ai.usage.output_tokens=7",
            "gen_ai.usage.reasoning.output_tokens=5",
            "http.response.status_code=200",
            "openai.api.type=chat_completions",
            "server.address=10.0.0.1",
            "server.port=8000",
            "warmroute.attempt=1",
            "warmroute.decision.cached_tokens=96",
            "warmroute.decision.cost=12.5",
            "warmroute.decision.new_tokens=4",
            "warmroute.decision.prompt_tokens=100",
            "warmroute.decision.queued_tokens=50",
            "warmroute.decision.reason=longest_prefix",
            "warmroute.dp_rank=3",
            "warmroute.requested_model=alias",
            "warmroute.worker=gpu-0",
        ]
    );
}

#[test]
fn a_failed_try_and_a_failed_request_have_the_status_of_an_error() {
    let mut record = ended();
    record.end.status = Some(502);
    record.end.error = Some("engine_unreachable");
    let mut failed = tried(&record);
    failed.error = Some(("connect", "gpu-0: connection refused".to_owned()));
    failed.leg = Some(Leg::Prefill);
    (failed.first_token, failed.usage, failed.status) = (None, None, None);
    record.tries.push(failed);
    let spans = spans(&record);
    assert_eq!(spans[0].status, Status::error("engine_unreachable"));
    assert!(lines(&spans[0]).contains(&"error.type=engine_unreachable".to_owned()));
    assert_eq!(spans[1].status, Status::error("gpu-0: connection refused"));
    let found = lines(&spans[1]);
    assert!(found.contains(&"error.type=connect".to_owned()));
    assert!(found.contains(&"warmroute.leg=prefill".to_owned()));
    assert!(!found.iter().any(|line| line.starts_with("gen_ai.usage")));
}

#[test]
fn a_mistake_of_the_client_is_no_error_of_the_server() {
    let mut record = ended();
    (record.end.status, record.end.error) = (Some(404), Some("model_not_found"));
    assert_eq!(spans(&record)[0].status, Status::Unset);
}

#[test]
fn what_a_client_writes_is_no_name_of_a_span() {
    let check = |method: &str, route: Option<&'static str>, expected: &str| {
        let mut record = ended();
        record.end.method = Some(method.parse().unwrap());
        record.end.route = route;
        let span = &spans(&record)[0];
        assert_eq!(span.name, expected);
        let is_other = lines(span).contains(&"http.request.method=_OTHER".to_owned());
        assert_eq!(is_other, method == "SECRET");
    };
    check("GET", None, "GET");
    check("SECRET", None, "HTTP");
    check("GET", Some("/v1/models/{model}"), "GET /v1/models/{model}");
}

#[test]
fn events_stand_in_the_span_of_the_request_with_their_times() {
    let mut record = ended();
    let decision = tried(&record).decision;
    let worker: std::sync::Arc<str> = "p".into();
    let took = Duration::from_millis(3);
    let events = [
        (Event::Queued { waited: took }, "warmroute.queue", 1),
        (
            Event::Tokenized {
                took,
                tokens: Some(9),
            },
            "warmroute.tokenize",
            2,
        ),
        (
            Event::Tokenized { took, tokens: None },
            "warmroute.tokenize",
            1,
        ),
        (
            Event::Decided {
                worker: worker.clone(),
                rank: Some(1),
                decision,
                leg: Some(Leg::Decode),
            },
            "warmroute.decide",
            9,
        ),
        (
            Event::PrefillLeg {
                worker: worker.clone(),
                took,
            },
            "warmroute.prefill_leg",
            2,
        ),
        (
            Event::KvTransfer { worker, took },
            "warmroute.kv_transfer",
            2,
        ),
        (
            Event::Continued {
                lost: "d".into(),
                answer_tokens: 12,
            },
            "warmroute.continue",
            2,
        ),
        (Event::FirstToken, "warmroute.first_token", 0),
    ];
    for (number, (event, _, _)) in (1..).zip(&events) {
        let at = record.started + Duration::from_millis(number);
        record.push_event(at, event.clone());
    }
    let span = &spans(&record)[0];
    for (number, (found, (_, name, attributes))) in (1..).zip(span.events.iter().zip(&events)) {
        assert_eq!((&*found.name, found.attributes.len()), (*name, *attributes));
        let since = found.timestamp.duration_since(span.start_time).unwrap();
        assert_eq!(since, Duration::from_millis(number));
    }
    assert_eq!(span.events.len(), events.len());
}

#[test]
fn a_record_is_bounded_and_says_what_it_left_out() {
    let mut record = ended();
    for _ in 0..100 {
        record.push_event(record.started, Event::FirstToken);
        record.push_try(tried(&record));
    }
    let spans = spans(&record);
    assert_eq!((spans.len(), record.spans()), (33, 33));
    assert_eq!(
        (spans[0].events.len(), spans[0].events.dropped_count),
        (64, 36)
    );
    assert_eq!(record.dropped_tries, 68);
}

#[test]
fn a_background_response_has_a_trace_of_its_own_with_a_link_to_its_create() {
    let mut record = ended();
    let create = TraceContext {
        trace_id: 3,
        span_id: 4,
        is_sampled: true,
    };
    record.link = Some(create);
    record.end.response = Some("resp_1".to_owned());
    record.conversation = Some("conv_1".into());
    let span = &spans(&record)[0];
    assert_eq!(
        (&*span.name, &span.span_kind),
        ("background response", &SpanKind::Consumer)
    );
    assert_eq!(span.parent_span_id, SpanId::INVALID);
    assert_eq!(
        span.links[0].span_context,
        span_context(create, true, TraceState::default())
    );
    for line in [
        "warmroute.response.id=resp_1",
        "gen_ai.conversation.id=conv_1",
    ] {
        assert!(lines(span).contains(&line.to_owned()), "{line}");
    }
}

#[test]
fn the_clients_tracestate_stays_with_the_trace_unless_it_is_no_tracestate() {
    let check = |state: &'static str, expected: &str| {
        let mut record = ended();
        record.state = Some(hyper::header::HeaderValue::from_static(state));
        assert_eq!(
            spans(&record)[0].span_context.trace_state().header(),
            expected
        );
    };
    check("vendor=1,other=2", "vendor=1,other=2");
    check("no state", "");
}

#[test]
fn a_request_whose_end_is_not_known_ends_with_its_last_try() {
    let mut record = record();
    record.tries.push(tried(&record));
    let span = &spans(&record)[0];
    let took = span.end_time.duration_since(span.start_time).unwrap();
    assert_eq!(took, Duration::from_millis(400));
}
