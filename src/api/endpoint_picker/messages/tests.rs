use hyper::header::CONTENT_TYPE;

use super::*;

fn field(key: &str, value: &str) -> wire::HeaderValue {
    wire::HeaderValue {
        key: Bytes::copy_from_slice(key.as_bytes()),
        value: Bytes::new(),
        raw_value: Bytes::copy_from_slice(value.as_bytes()),
    }
}

fn head(fields: Vec<wire::HeaderValue>) -> wire::HttpHeaders {
    wire::HttpHeaders {
        headers: Some(wire::HeaderMap { headers: fields }),
        end_of_stream: false,
    }
}

fn map(fields: &[(&'static str, &'static str)]) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for (name, value) in fields {
        headers.append(*name, HeaderValue::from_static(value));
    }
    headers
}

fn text(value: &str) -> wire::Value {
    wire::Value {
        kind: Some(Kind::StringValue(value.to_owned())),
    }
}

/// The metadata as it is sent, with one value of a filter.
fn metadata(namespace: &'static str, key: &'static str, value: wire::Value) -> Bytes {
    let namespace = wire::Namespace {
        name: Bytes::from_static(namespace.as_bytes()),
        fields: structure(key, value).encode_to_vec().into(),
    };
    let metadata = wire::Metadata {
        filter_metadata: vec![namespace],
    };
    metadata.encode_to_vec().into()
}

fn hint(value: wire::Value) -> Bytes {
    metadata("envoy.lb.subset_hint", SUBSET, value)
}

fn mutation(answer: &ProcessingResponse) -> &wire::HeaderMutation {
    let Some(Answer::RequestHeaders(headers) | Answer::ResponseHeaders(headers)) = &answer.response
    else {
        panic!("{answer:?}");
    };
    let common = headers.response.as_ref().unwrap();
    common.header_mutation.as_ref().unwrap()
}

fn set(mutation: &wire::HeaderMutation) -> Vec<(&str, &str)> {
    let mut set: Vec<(&str, &str)> = mutation
        .set_headers
        .iter()
        .map(|option| {
            let header = option.header.as_ref().unwrap();
            (
                std::str::from_utf8(&header.key).unwrap(),
                std::str::from_utf8(&header.raw_value).unwrap(),
            )
        })
        .collect();
    set.sort_unstable();
    set
}

#[test]
fn a_requests_head_is_read_from_either_form_of_values() {
    let old = wire::HeaderValue {
        key: Bytes::from_static(b"x-old"),
        value: Bytes::from_static(b"text"),
        raw_value: Bytes::new(),
    };
    let fields = vec![
        field(":method", "POST"),
        field(":path", "/v1/chat/completions?a=1"),
        field(":authority", "llm.test"),
        field("x-new", "bytes"),
        field("x-new", "twice"),
        old,
    ];
    let request = request_head(head(fields)).unwrap();
    assert_eq!(request.method(), Method::POST);
    assert_eq!(request.uri().path(), "/v1/chat/completions");
    assert_eq!(request.uri().query(), Some("a=1"));
    assert_eq!(request.headers()["x-old"], "text");
    assert_eq!(request.headers().get_all("x-new").iter().count(), 2);
    for (key, value) in [(":method", "A B"), (":path", "no path\u{7f}"), ("x y", "1")] {
        assert!(
            request_head(head(vec![field(key, value)])).is_err(),
            "{key}"
        );
    }
}

#[test]
fn an_answers_head_is_read() {
    let fields = vec![field(":status", "503"), field("content-type", "text/plain")];
    let answer = response_head(head(fields)).unwrap();
    assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(answer.headers[CONTENT_TYPE], "text/plain");
    let bad = response_head(head(vec![field(":status", "abc")]));
    assert_eq!(bad.unwrap_err(), BadHead(":status"));
}

#[test]
fn a_subset_is_a_list_or_a_text_and_an_empty_one_is_not_all() {
    let none = HeaderMap::new();
    let of = |metadata: &Bytes| subset(metadata, &none, false);
    assert_eq!(of(&Bytes::new()), None);
    assert_eq!(of(&metadata("envoy.lb", SUBSET, text("10.0.0.1"))), None);
    let other_key = metadata("envoy.lb.subset_hint", SERVED, text("10.0.0.1"));
    assert_eq!(of(&other_key), None);
    let texts = |list: &[&str]| {
        Some(
            list.iter()
                .map(|address| (*address).to_owned())
                .collect::<Vec<_>>(),
        )
    };
    assert_eq!(
        of(&hint(text("10.0.0.1:80, 10.0.0.2"))),
        texts(&["10.0.0.1:80", "10.0.0.2"])
    );
    let list = wire::Value {
        kind: Some(Kind::ListValue(wire::ListValue {
            values: vec![text("10.0.0.1:80"), text("10.0.0.2")],
        })),
    };
    assert_eq!(of(&hint(list)), texts(&["10.0.0.1:80", "10.0.0.2"]));
    assert_eq!(of(&hint(text(""))), texts(&[]));
    let number = wire::Value {
        kind: Some(Kind::NumberValue(1.0)),
    };
    assert_eq!(of(&hint(number)), texts(&[]));
    assert_eq!(of(&hint(wire::Value::default())), texts(&[]));
    let cut = hint(text("10.0.0.1")).slice(..30);
    assert_eq!(of(&cut), texts(&[]), "what cannot be read");
}

#[test]
fn the_worker_that_answered_is_read_from_the_metadata() {
    let of = |value| served(&metadata("envoy.lb", SERVED, value));
    assert_eq!(of(text("10.0.0.1:80")).as_deref(), Some("10.0.0.1:80"));
    assert_eq!(of(wire::Value::default()), None);
    assert_eq!(served(&Bytes::new()), None);
    assert_eq!(served(&Bytes::from_static(b"\xff")), None);
}

#[test]
fn the_header_of_conformance_tests_counts_only_where_it_is_allowed() {
    let headers = map(&[(TEST_SELECTION, "10.0.0.9")]);
    let hint = hint(text("10.0.0.1"));
    let selected = subset(&hint, &headers, true);
    assert_eq!(selected, Some(vec!["10.0.0.9".to_owned()]));
    let hinted = subset(&hint, &headers, false);
    assert_eq!(hinted, Some(vec!["10.0.0.1".to_owned()]));
}

#[test]
fn the_choice_is_a_header_and_metadata_of_the_same_value() {
    let destination = Destination {
        workers: "10.0.0.1:80,10.0.0.2:80".to_owned(),
        prefill: Some("10.0.0.3:80".to_owned()),
        has_hooks: false,
    };
    let client = map(&[
        ("x-gateway-destination-endpoint", "10.6.6.6:80"),
        ("x-gateway-destination-endpoint-subset", "10.6.6.6:80"),
        ("x-prefiller-host-port", "10.6.6.6:80"),
        ("x-request-id", "client's"),
        ("x-vllm-priority", "-9"),
        ("content-length", "5"),
        ("te", "trailers"),
        ("x-custom", "stays"),
    ]);
    // As the relay makes them: what a gateway's headers mean is unknown to it.
    let to_worker = map(&[
        ("x-gateway-destination-endpoint", "10.6.6.6:80"),
        ("x-gateway-destination-endpoint-subset", "10.6.6.6:80"),
        ("x-prefiller-host-port", "10.6.6.6:80"),
        ("host", "10.0.0.1:80"),
        ("x-request-id", "router's"),
        ("authorization", "Bearer engine"),
        ("x-custom", "stays"),
    ]);
    let answer = chosen(&client, &to_worker, &destination);
    let mutation = mutation(&answer);
    assert_eq!(
        set(mutation),
        [
            ("authorization", "Bearer engine"),
            ("x-gateway-destination-endpoint", "10.0.0.1:80,10.0.0.2:80"),
            ("x-prefiller-host-port", "10.0.0.3:80"),
            ("x-request-id", "router's"),
        ]
    );
    assert_eq!(
        mutation.remove_headers,
        ["x-gateway-destination-endpoint-subset", "x-vllm-priority"]
    );
    let overwrites = HeaderAppendAction::OverwriteIfExistsOrAdd as i32;
    assert!(
        mutation
            .set_headers
            .iter()
            .all(|option| option.append_action == overwrites)
    );
    let metadata = answer.dynamic_metadata.unwrap();
    let workers = structure(DESTINATION, text("10.0.0.1:80,10.0.0.2:80"));
    let lb = wire::Value {
        kind: Some(Kind::StructValue(workers)),
    };
    assert_eq!(metadata, structure("envoy.lb", lb));
}

#[test]
fn control_headers_of_clients_reach_no_worker() {
    let destination = Destination {
        workers: "10.0.0.1:80".to_owned(),
        prefill: None,
        has_hooks: false,
    };
    let names = [
        "x-data-parallel-host-port",
        "x-encoder-hosts-ports",
        "x-gateway-inference-objective",
        "x-llm-d-inference-fairness-id",
        "x-llm-d-slo-ttft-ms",
        "x-prefiller-host-port",
        "x-prefiller-url",
        "x-slo-tpot-ms",
    ];
    let client = map(&names.map(|name| (name, "10.6.6.6:80")));
    let answer = chosen(&client, &client, &destination);
    assert_eq!(mutation(&answer).remove_headers, names);
    assert_eq!(set(mutation(&answer)), [(DESTINATION, "10.0.0.1:80")]);
}

#[test]
fn conformance_tests_see_the_choice_only_where_it_is_allowed() {
    for has_hooks in [false, true] {
        let destination = Destination {
            workers: "10.0.0.1:80,10.0.0.2:80".to_owned(),
            prefill: None,
            has_hooks,
        };
        let answer = chosen(&map(&[]), &map(&[]), &destination);
        let mut expected = vec![(DESTINATION, "10.0.0.1:80,10.0.0.2:80")];
        if has_hooks {
            expected.insert(
                0,
                (TEST_ECHO, "x-conformance-test-served-endpoint:10.0.0.1:80"),
            );
        }
        assert_eq!(set(mutation(&answer)), expected);
    }
}

#[test]
fn a_client_names_no_prefill_worker() {
    let destination = Destination {
        workers: "10.0.0.1:80".to_owned(),
        prefill: None,
        has_hooks: false,
    };
    let client = map(&[("x-prefiller-host-port", "10.6.6.6:80")]);
    let answer = chosen(&client, &client, &destination);
    let mutation = mutation(&answer);
    assert_eq!(mutation.remove_headers, ["x-prefiller-host-port"]);
    assert_eq!(
        set(mutation),
        [("x-gateway-destination-endpoint", "10.0.0.1:80")]
    );
}

#[test]
fn a_body_comes_back_whole_in_pieces_that_a_gateway_takes() {
    for length in [0, 1, PIECE_BYTES, PIECE_BYTES + 1, 5 * PIECE_BYTES] {
        for ends in [true, false] {
            let body: Bytes = (0..length).map(|at| at as u8).collect::<Vec<_>>().into();
            let (mut whole, mut ended) = (Vec::new(), Vec::new());
            for piece in pieces(&body, ends, Answer::RequestBody) {
                let Some(Answer::RequestBody(part)) = piece.response else {
                    panic!("{piece:?}");
                };
                let mutation = part.response.unwrap().body_mutation.unwrap();
                let streamed = mutation.streamed_response.unwrap();
                assert!(streamed.body.len() <= PIECE_BYTES);
                whole.extend_from_slice(&streamed.body);
                ended.push(streamed.end_of_stream);
            }
            assert_eq!(whole, body);
            let (last, before) = ended.split_last().unwrap();
            assert_eq!(*last, ends, "{length} bytes");
            assert!(!before.contains(&true), "{length} bytes");
        }
    }
}

#[test]
fn the_client_gets_the_routers_headers_instead_of_the_workers() {
    let from_worker = map(&[
        ("x-request-id", "a"),
        ("content-length", "3"),
        ("vary", "x"),
    ]);
    let to_client = map(&[("x-request-id", "b"), ("vary", "x"), ("vary", "y")]);
    let answer = response_headers(&from_worker, &to_client, Some("10.0.0.1:80"));
    let mutation = mutation(&answer);
    assert_eq!(
        set(mutation),
        [
            ("vary", "x"),
            ("vary", "y"),
            ("x-conformance-test-served-endpoint", "10.0.0.1:80"),
            ("x-request-id", "b"),
        ]
    );
    let actions: Vec<i32> = mutation
        .set_headers
        .iter()
        .filter(|option| option.header.as_ref().unwrap().key == "vary")
        .map(|option| option.append_action)
        .collect();
    assert_eq!(
        actions,
        [
            HeaderAppendAction::OverwriteIfExistsOrAdd as i32,
            HeaderAppendAction::AppendIfExistsOrAdd as i32
        ]
    );
    assert_eq!(mutation.remove_headers, [""; 0]);
}
