use serde_json::{Value, json};

use super::*;

fn line() -> Value {
    json!({
        "custom_id": "a",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": "m", "messages": []},
    })
}

/// Has `change` change a right line, and expects this code and parameter.
fn check(code: &str, param: Option<&str>, change: impl FnOnce(&mut Value)) {
    let mut value = line();
    change(&mut value);
    let text = value.to_string();
    let error = read(text.as_bytes(), LineEndpoint::ChatCompletions).unwrap_err();
    assert_eq!(
        (error.code.as_str(), error.param.as_deref()),
        (code, param),
        "{text}: {}",
        error.message
    );
    assert_eq!(error.line, None);
}

#[test]
fn a_line_is_read_without_changing_its_body() {
    let text = r#" {"body": {"messages": [ {"a":1.00} ],"model":"m\u0031", "tools":[2]} ,"url":"/v1/chat/completions",
        "method":"POST","custom_id":"\"x\"","more":{}} "#;
    let line = read(text.as_bytes(), LineEndpoint::ChatCompletions).unwrap();
    assert_eq!(line.custom_id, "\"x\"");
    assert_eq!(line.model, "m1");
    let body = br#"{"messages": [ {"a":1.00} ],"model":"m\u0031", "tools":[2]}"#;
    assert_eq!(line.body, body);
    assert_eq!(line.sort_key(), ("m1", ["[2]", "", r#"[ {"a":1.00} ]"#]));
}

#[test]
fn a_member_that_is_missing_or_of_another_type_is_named() {
    for name in ["custom_id", "method", "url", "body"] {
        let missing = |line: &mut Value| drop(line.as_object_mut().unwrap().remove(name));
        check("missing_required_parameter", Some(name), missing);
        let null = |line: &mut Value| line[name] = Value::Null;
        check("missing_required_parameter", Some(name), null);
        check("invalid_type", Some(name), |line| line[name] = json!(1));
    }
    let model = Some("body.model");
    check("missing_required_parameter", model, |line| {
        line["body"] = json!({});
    });
    check("invalid_type", model, |line| {
        line["body"]["model"] = json!(["m"]);
    });
    check("empty_string", model, |line| {
        line["body"]["model"] = json!("");
    });
    let long = "m".repeat(MODEL_MAX + 1);
    check("string_above_max_length", model, |line| {
        line["body"]["model"] = json!(long);
    });
}

#[test]
fn a_custom_id_has_a_length() {
    let with = |id: String| {
        let mut line = line();
        line["custom_id"] = Value::from(id);
        let text = line.to_string();
        read(text.as_bytes(), LineEndpoint::ChatCompletions)
            .map(drop)
            .map_err(|error| error.code)
    };
    assert_eq!(with("ü".repeat(CUSTOM_ID_MAX)), Ok(()));
    let long = with("ü".repeat(CUSTOM_ID_MAX + 1));
    assert_eq!(long, Err("string_above_max_length".to_owned()));
    assert_eq!(with(String::new()), Err("empty_string".to_owned()));
}

#[test]
fn the_method_and_the_url_are_those_of_the_batch() {
    check("invalid_value", Some("method"), |line| {
        line["method"] = json!("GET");
    });
    check("invalid_url", Some("url"), |line| {
        line["url"] = json!("/v1/completions");
    });
    for endpoint in LineEndpoint::ALL {
        let mut line = line();
        line["url"] = json!(endpoint.path());
        assert!(read(line.to_string().as_bytes(), endpoint).is_ok());
        assert_eq!(LineEndpoint::of_path(endpoint.path()), Some(endpoint));
    }
    assert_eq!(LineEndpoint::of_path("/v1/models"), None);
}

#[test]
fn an_answer_that_is_no_whole_answer_is_refused() {
    for value in [json!(true), json!("true"), json!(1)] {
        check("unsupported_value", Some("body.stream"), |line| {
            line["body"]["stream"] = value;
        });
    }
    for value in [json!(false), Value::Null] {
        let mut line = line();
        line["body"]["stream"] = value;
        let text = line.to_string();
        assert!(read(text.as_bytes(), LineEndpoint::ChatCompletions).is_ok());
    }
    let mut background = line();
    background["body"]["background"] = json!(true);
    // Chat completions have no such field.
    let text = background.to_string();
    assert!(read(text.as_bytes(), LineEndpoint::ChatCompletions).is_ok());
    background["url"] = json!("/v1/responses");
    let text = background.to_string();
    let error = read(text.as_bytes(), LineEndpoint::Responses).unwrap_err();
    assert_eq!(error.param.as_deref(), Some("body.background"));
}

#[test]
fn what_is_no_object_is_told_apart_from_what_is_no_json() {
    let check = |line: &[u8], words: &str| {
        let error = read(line, LineEndpoint::Messages).unwrap_err();
        assert_eq!(error.code, "invalid_json_line");
        assert!(error.message.contains(words), "{error:?}");
    };
    check(b"[1]", "not an object");
    check(b"\"x\"", "not an object");
    for broken in [&b"{"[..], b"{}x", b"{\"a\":01}", b"\xff", b"{'a':1}"] {
        check(broken, "not parseable");
    }
}

#[test]
fn half_of_a_surrogate_pair_is_no_custom_id() {
    let text = line().to_string().replace("\"a\"", r#""\ud800""#);
    let error = read(text.as_bytes(), LineEndpoint::ChatCompletions).unwrap_err();
    assert_eq!(error.code, "invalid_string");
}

#[test]
fn of_a_repeated_member_the_last_counts() {
    let text = r#"{"custom_id":"a","method":"POST","url":"/v1/messages","custom_id":"b",
        "body":{"model":"m","model":"n"}}"#;
    let line = read(text.as_bytes(), LineEndpoint::Messages).unwrap();
    assert_eq!((line.custom_id.as_ref(), line.model.as_ref()), ("b", "n"));
}
