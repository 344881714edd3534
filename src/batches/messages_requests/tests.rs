use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::batches::line;

/// The lines and the number of requests.
fn read(pieces: &[&[u8]], max: u32) -> Result<(String, u32), String> {
    let mut reader = RequestReader::new(max);
    let mut lines = Vec::new();
    for piece in pieces {
        reader.push(piece, &mut lines)?;
    }
    let count = reader.finish()?;
    Ok((String::from_utf8(lines).unwrap(), count))
}

fn check_error(body: &str, expected: &str) {
    let error = read(&[body.as_bytes()], 3).unwrap_err();
    assert!(error.starts_with(expected), "{body}: {error}");
}

#[test]
fn each_request_becomes_a_line_that_can_be_read() {
    let body = r#" {"x": {"requests": [1]}, "y": "requests", "requests" : [
        {"params": {"model":"m", "n": "]}\\\"", "f": 1.50}, "custom_id": "a-1"},
        {"custom_id":"b_2","params":{
            "model":"m"
        },"more":[]}
    ], "z": null} "#;
    let (lines, count) = read(&[body.as_bytes()], 3).unwrap();
    assert_eq!((lines.lines().count(), count), (2, 2));
    let first = lines.lines().next().unwrap();
    let found = line::read(first.as_bytes(), LineEndpoint::Messages).unwrap();
    assert_eq!(found.custom_id, "a-1");
    assert_eq!(found.body, br#"{"model":"m", "n": "]}\\\"", "f": 1.50}"#);
    let second = lines.lines().last().unwrap();
    let found = line::read(second.as_bytes(), LineEndpoint::Messages).unwrap();
    assert_eq!(
        (found.custom_id.as_ref(), found.model.as_ref()),
        ("b_2", "m")
    );
}

#[test]
fn what_is_wrong_is_named() {
    let request = r#"{"custom_id":"a","params":{}}"#;
    let with = |requests: &str| format!(r#"{{"requests":[{requests}]}}"#);
    for broken in [
        "",
        "[]",
        "x",
        "{",
        r#"{"requests":["#,
        r#"{"requests":[]}x"#,
        "{]",
    ] {
        check_error(broken, "the request body is not valid JSON");
    }
    check_error("{}", "requests: Field required");
    let no_list = "requests: Input should be a list";
    check_error(r#"{"requests":3}"#, no_list);
    check_error(r#"{"requests" : {"a":[1]},"b":2}"#, no_list);
    check_error(r#"{"a":"requests"}"#, "requests: Field required");
    check_error(r#"{"x":{"requests":[{}]}}"#, "requests: Field required");
    check_error(&with(""), "requests: List should have at least 1 item");
    check_error(&with("1"), "requests.0: Input should be an object");
    check_error(&with("{}"), "requests.0.custom_id: Field required");
    check_error(
        &with(r#"{"custom_id":"a"}"#),
        "requests.0.params: Field required",
    );
    check_error(
        &with(r#"{"custom_id":"a","params":[]}"#),
        "requests.0.params: Input should be an object",
    );
    check_error(&with(r#"{"custom_id":}"#), "requests.0: the request is not");
    let long = "a".repeat(65);
    for id in [
        r#""""#,
        r#""a b""#,
        r#""\u0061""#,
        "1",
        &format!(r#""{long}""#),
    ] {
        let body = with(&format!(r#"{request},{{"custom_id":{id},"params":{{}}}}"#));
        check_error(&body, "requests.1.custom_id: String should match");
    }
    let twice = with(&format!("{request},{request}"));
    check_error(&twice, "requests.1.custom_id: Each request");
    let no_comma = with(&format!("{request} {request}"));
    check_error(&no_comma, "the request body is not valid JSON");
    let lists = format!(r#"{{"requests":[{request}],"requests":[]}}"#);
    check_error(&lists, "requests: given twice");
    let many: Vec<_> = (0..4)
        .map(|id| format!(r#"{{"custom_id":"{id}","params":{{}}}}"#))
        .collect();
    check_error(
        &with(&many.join(",")),
        "requests: List should have at most 3",
    );
    assert!(read(&[with(&many[..3].join(",")).as_bytes()], 3).is_ok());
}

#[test]
fn a_request_that_is_too_large_is_not_held() {
    let mut reader = RequestReader::new(3);
    let mut lines = Vec::new();
    let start = br#"{"requests":[{"custom_id":"a","params":{"x":""#;
    reader.push(start, &mut lines).unwrap();
    let piece = vec![b'x'; 3 << 20];
    reader.push(&piece, &mut lines).unwrap();
    reader.push(&piece, &mut lines).unwrap();
    let error = reader.push(&piece, &mut lines).unwrap_err();
    assert!(error.starts_with("requests.0: Input"), "{error}");
    assert!(reader.request.len() <= MAX_REQUEST_BYTES);
    // A name is not held either.
    let mut long_name = RequestReader::new(3);
    long_name.push(b"{\"", &mut lines).unwrap();
    long_name.push(&piece, &mut lines).unwrap();
    assert!(long_name.name.len() <= REQUESTS.len() + 1);
}

fn value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<u32>().prop_map(Value::from),
        r#"[a-z\\"\[\]{},:\n ]{0,8}"#.prop_map(Value::from),
    ];
    leaf.prop_recursive(3, 12, 3, |inner| {
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..3).prop_map(Value::from),
            proptest::collection::btree_map("[a-z]{1,3}", inner, 0..3)
                .prop_map(|members| Value::Object(members.into_iter().collect())),
        ]
    })
}

proptest! {
    #[test]
    fn pieces_give_the_lines_of_the_whole(
        params in proptest::collection::vec(value(), 1..6),
        others in (value(), value()),
        is_pretty: bool,
        cuts in proptest::collection::vec(any::<prop::sample::Index>(), 0..9),
    ) {
        let requests: Vec<_> = params
            .iter()
            .enumerate()
            .map(|(id, value)| json!({"custom_id": id.to_string(), "params": {"x": value}}))
            .collect();
        let body = json!({"before": others.0, "requests": requests, "after": others.1});
        let text = if is_pretty {
            serde_json::to_string_pretty(&body).unwrap()
        } else {
            body.to_string()
        };
        let text = text.as_bytes();
        let mut cuts: Vec<_> = cuts.iter().map(|cut| cut.index(text.len() + 1)).collect();
        cuts.sort_unstable();
        let mut pieces = Vec::new();
        let mut at = 0;
        for cut in cuts.into_iter().chain([text.len()]) {
            pieces.push(&text[at..cut]);
            at = cut;
        }
        let (lines, count) = read(&pieces, 9).unwrap();
        prop_assert_eq!(count as usize, params.len());
        let found = lines.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        let expected = requests.iter().map(|request| json!({
            "custom_id": request["custom_id"],
            "method": "POST",
            "url": "/v1/messages",
            "body": request["params"],
        }));
        prop_assert_eq!(found.collect::<Vec<_>>(), expected.collect::<Vec<_>>());
    }
}
