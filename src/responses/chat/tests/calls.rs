use serde_json::{Value, json};

use super::answers::{delta, done, events, finish, fragment, item};

/// The calls of an answer: id, name and arguments.
fn calls(request: Value, chunks: &[Value]) -> Vec<(String, String, String)> {
    let events = events(&request, chunks);
    let done = events
        .iter()
        .filter(|event| event["type"] == "response.output_item.done");
    let text = |item: &Value, name: &str| item[name].as_str().unwrap_or_default().to_owned();
    done.map(|event| &event["item"])
        .map(|item| {
            (
                text(item, "call_id"),
                text(item, "name"),
                text(item, "arguments"),
            )
        })
        .collect()
}

#[test]
fn fragments_of_calls_are_joined_however_servers_cut_them() {
    let expected = [("1".to_owned(), "get_it".to_owned(), "{\"a\":1}".to_owned())];
    let check = |chunks: &[Value]| assert_eq!(calls(json!({}), chunks), expected, "{chunks:?}");
    // Id and name in each fragment.
    check(&[
        fragment(0, "1", "get_it", "{\"a\""),
        fragment(0, "1", "get_it", ":1}"),
        finish("stop"),
    ]);
    // The name in pieces, before the arguments.
    check(&[
        fragment(0, "1", "get", ""),
        fragment(0, "", "_it", ""),
        fragment(0, "", "", "{\"a\":1}"),
        finish("stop"),
    ]);
    // No index.
    let piece = |call: Value| delta(json!({"tool_calls": [call]}));
    check(&[
        piece(json!({"id": "1", "function": {"name": "get_it", "arguments": "{\"a\""}})),
        piece(json!({"function": {"arguments": ":1}"}})),
        finish("stop"),
    ]);
    // An index that is none, as of a tool that the engine does not know.
    check(&[
        piece(
            json!({"index": -1, "id": "1", "function": {"name": "get_it", "arguments": "{\"a\""}}),
        ),
        piece(json!({"index": -1, "function": {"arguments": ":1}"}})),
        finish("stop"),
    ]);
    // The arguments as an object.
    check(&[
        piece(
            json!({"index": 0, "id": "1", "function": {"name": "get_it", "arguments": {"a": 1}}}),
        ),
        finish("stop"),
    ]);
    // Arguments before the name are held.
    check(&[
        fragment(0, "1", "", "{\"a\""),
        fragment(0, "", "get_it", ":1}"),
        finish("stop"),
    ]);
    // The older form.
    let older = calls(
        json!({}),
        &[
            delta(json!({"function_call": {"name": "f", "arguments": "{}"}})),
            finish("function_call"),
        ],
    );
    assert_eq!((older[0].1.as_str(), older[0].2.as_str()), ("f", "{}"));
    assert!(older[0].0.starts_with("call_"));
}

/// The arguments or the input of the only call of an answer: joined from its deltas, at its end, and in its item.
fn said(chunks: &[Value], member: &str) -> [String; 3] {
    let request =
        json!({"tools": [{"type": "function", "name": "f"}, {"type": "custom", "name": "c"}]});
    let events = events(&request, chunks);
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let of_kind = |ends: &[&str]| {
        let is_kind = |event: &&Value| {
            let kind = event["type"].as_str().unwrap_or_default();
            ends.iter().any(|end| kind.ends_with(*end))
        };
        events.iter().filter(is_kind).collect::<Vec<_>>()
    };
    let deltas = of_kind(&[".delta"]);
    let deltas: String = deltas.iter().map(|event| text(&event["delta"])).collect();
    let ends = of_kind(&["_arguments.done", "_input.done"]);
    assert_eq!(ends.len(), 1, "{events:?}");
    [
        deltas,
        text(&ends[0][member]),
        text(&item(&events, 0)[member]),
    ]
}

#[test]
fn a_function_that_is_called_without_arguments_has_an_empty_object() {
    let bare = |name: &str| {
        let call = json!({"index": 0, "id": "1", "function": {"name": name}});
        delta(json!({"tool_calls": [call]}))
    };
    let one = |name: &str, arguments: &str| vec![fragment(0, "1", name, arguments)];
    let two = vec![fragment(0, "1", "f", ""), fragment(0, "", "", "")];
    for (fragments, reason, member, expected) in [
        (one("f", ""), "tool_calls", "arguments", "{}"),
        (one("f", ""), "stop", "arguments", "{}"),
        (vec![bare("f")], "tool_calls", "arguments", "{}"),
        // A tool that was not in the request.
        (one("g", ""), "tool_calls", "arguments", "{}"),
        (two, "tool_calls", "arguments", "{}"),
        (one("f", "{}"), "tool_calls", "arguments", "{}"),
        (one("f", "{\"a"), "tool_calls", "arguments", "{\"a"),
        // It was cut off, and what came of it is what there is.
        (one("f", ""), "length", "arguments", ""),
        (one("f", "{\"a"), "length", "arguments", "{\"a"),
        // The input of a custom tool is any text.
        (one("c", ""), "tool_calls", "input", ""),
        (vec![bare("c")], "stop", "input", ""),
    ] {
        let chunks = [fragments, vec![finish(reason), done()]].concat();
        assert_eq!(said(&chunks, member), [expected; 3], "{chunks:?}");
    }
}

#[test]
fn two_calls_without_an_index_are_told_apart_by_their_ids() {
    let call =
        |id: &str, name: &str| json!({"id": id, "function": {"name": name, "arguments": "{}"}});
    let one = delta(json!({"tool_calls": [call("1", "f"), call("2", "g")]}));
    let two = [
        delta(json!({"tool_calls": [call("1", "f")]})),
        delta(json!({"tool_calls": [call("2", "g")]})),
    ];
    for chunks in [
        vec![one, finish("stop")],
        [&two[..], &[finish("stop")]].concat(),
    ] {
        let names: Vec<(String, String)> = calls(json!({}), &chunks)
            .into_iter()
            .map(|(id, name, _)| (id, name))
            .collect();
        assert_eq!(names, [("1".into(), "f".into()), ("2".into(), "g".into())]);
    }
}

#[test]
fn calls_that_share_an_index_are_told_apart_by_their_ids_and_names() {
    let check = |chunks: &[Value], expected: &[(&str, &str, &str)]| {
        let tools = ["f", "g"].map(|name| json!({"type": "function", "name": name}));
        let request = json!({"tools": tools});
        let found = calls(request, &[chunks, &[finish("stop")]].concat());
        let expected = expected.iter().copied();
        let expected: Vec<(String, String, String)> = expected
            .map(|(id, name, arguments)| (id.into(), name.into(), arguments.into()))
            .collect();
        assert_eq!(found, expected, "{chunks:?}");
    };
    let whole = |id, name| fragment(0, id, name, "{\"a\":1}");
    check(
        &[whole("1", "f"), whole("2", "g"), whole("3", "g")],
        &[
            ("1", "f", "{\"a\":1}"),
            ("2", "g", "{\"a\":1}"),
            ("3", "g", "{\"a\":1}"),
        ],
    );
    // In fragments, and a call without arguments.
    check(
        &[
            fragment(0, "1", "f", ""),
            fragment(0, "2", "g", ""),
            fragment(0, "", "", "{\"a\""),
            fragment(0, "", "", ":1}"),
        ],
        &[("1", "f", "{}"), ("2", "g", "{\"a\":1}")],
    );
    // Each fragment of one call has an id of its own.
    check(
        &[
            fragment(0, "1", "f", "{\"a\""),
            fragment(0, "2", "f", ":1}"),
            fragment(0, "3", "f", ""),
        ],
        &[("1", "f", "{\"a\":1}")],
    );
    check(
        &[
            fragment(0, "1", "f", ""),
            fragment(0, "2", "", "{}"),
            fragment(0, "3", "f", ""),
            fragment(0, "4", "", "{}"),
        ],
        &[("1", "f", "{}"), ("3", "f", "{}")],
    );
    // None of them belongs to a call before the last one, unless its id says so.
    check(
        &[
            fragment(0, "1", "f", ""),
            fragment(0, "2", "g", "{}"),
            fragment(0, "3", "f", "{}"),
        ],
        &[("1", "f", "{}"), ("2", "g", "{}"), ("3", "f", "{}")],
    );
    check(
        &[
            fragment(0, "1", "f", "{\"a\""),
            fragment(0, "2", "g", "{}"),
            fragment(0, "1", "f", ":1}"),
        ],
        &[("1", "f", "{\"a\":1}"), ("2", "g", "{}")],
    );
}

#[test]
fn calls_without_ids_are_told_apart_once_their_arguments_are_whole() {
    let bare = |name: &str, arguments: &str| {
        let function = json!({"name": name, "arguments": arguments});
        delta(json!({"tool_calls": [{"function": function}]}))
    };
    let shared = |name: &str, arguments: &str| fragment(0, "", name, arguments);
    for chunks in [
        // Without an index, too.
        vec![bare("f", "{\"a\":1}"), bare("g", "{}"), bare("g", "{}")],
        vec![
            shared("f", "{\"a\":1}"),
            shared("g", "{}"),
            shared("g", "{}"),
        ],
        // In pieces, some of them with the name.
        vec![
            shared("f", "{\"a\""),
            shared("f", ":1"),
            shared("", "}"),
            shared("g", "{}"),
            shared("g", ""),
            shared("g", "{}"),
        ],
    ] {
        let calls = calls(json!({}), &[&chunks[..], &[finish("stop")]].concat());
        let found: Vec<(&str, &str)> = calls
            .iter()
            .map(|(_, name, arguments)| (name.as_str(), arguments.as_str()))
            .collect();
        let expected = [("f", "{\"a\":1}"), ("g", "{}"), ("g", "{}")];
        assert_eq!(found, expected, "{chunks:?}");
    }
}

#[test]
fn another_name_is_another_call_although_none_has_an_id_or_the_first_no_arguments() {
    let tools = ["f", "g"].map(|name| json!({"type": "function", "name": name}));
    let chunks = [
        fragment(0, "", "f", ""),
        fragment(0, "", "g", "{}"),
        finish("stop"),
    ];
    let calls = calls(json!({"tools": tools}), &chunks);
    let found: Vec<(&str, &str)> = calls
        .iter()
        .map(|(_, name, arguments)| (name.as_str(), arguments.as_str()))
        .collect();
    assert_eq!(found, [("f", "{}"), ("g", "{}")]);
}

#[test]
fn custom_tools_and_namespaces_come_back_by_the_request_and_not_by_their_names() {
    let request = json!({"tools": [
        {"type": "custom", "name": "c"},
        {"type": "namespace", "name": "ns", "tools": [{"type": "function", "name": "f"}, {"type": "custom", "name": "c"}]},
        {"type": "function", "name": "a__b"},
    ]});
    let chunks = [
        fragment(0, "1", "c", "{\"inp"),
        fragment(0, "", "", "ut\": \"a\\n\u{e9}\"}"),
        fragment(1, "2", "ns__f", "{}"),
        fragment(2, "3", "a__b", "{}"),
        fragment(3, "4", "ns__c", "{\"input\":\"x\"}"),
        finish("tool_calls"),
        done(),
    ];
    let events = events(&request, &chunks);
    assert_eq!(
        *item(&events, 0),
        json!({"type": "custom_tool_call", "call_id": "1", "name": "c", "input": "a\n\u{e9}"})
    );
    assert_eq!(
        *item(&events, 1),
        json!({"type": "function_call", "call_id": "2", "name": "f", "namespace": "ns", "arguments": "{}"})
    );
    assert_eq!(item(&events, 2)["name"], "a__b");
    assert_eq!(
        *item(&events, 3),
        json!({"type": "custom_tool_call", "call_id": "4", "name": "c", "namespace": "ns", "input": "x"})
    );
    let inputs: Vec<&Value> = events
        .iter()
        .filter(|event| event["type"] == "response.custom_tool_call_input.delta")
        .map(|event| &event["delta"])
        .collect();
    assert_eq!(inputs, [&json!("a\n\u{e9}"), &json!("x")]);
    let pieces = [
        fragment(0, "1", "c", "{\"input\":\"a\\"),
        fragment(0, "", "", "nb"),
        fragment(0, "", "", "c\"}"),
        finish("stop"),
    ];
    let pieces = self::events(&request, &pieces);
    let inputs: Vec<&Value> = pieces
        .iter()
        .filter(|event| event["type"] == "response.custom_tool_call_input.delta")
        .map(|event| &event["delta"])
        .collect();
    assert_eq!(inputs, [&json!("a"), &json!("\nb"), &json!("c")]);
    assert_eq!(item(&pieces, 0)["input"], "a\nbc");
    // What is no JSON is the input itself.
    let raw = [fragment(0, "1", "c", "not json"), finish("stop")];
    let raw = self::events(&request, &raw);
    assert_eq!(item(&raw, 0)["input"], "not json");
}

#[test]
fn the_input_of_a_custom_tool_may_have_line_ends_that_the_model_did_not_escape() {
    for (fragments, expected) in [
        (vec!["{\"input\":\"a\n\tb\\d\"}"], "a\n\tb\\d"),
        (vec!["{\"input\":\"a\n", "b\\", "d\"}"], "a\nb\\d"),
        (vec!["{\"input\":\"\\u12\"}"], "\\u12"),
    ] {
        let first = fragment(0, "1", "c", "");
        let rest = fragments.iter().map(|piece| fragment(0, "", "", piece));
        let mut chunks: Vec<Value> = std::iter::once(first).chain(rest).collect();
        chunks.push(finish("tool_calls"));
        assert_eq!(said(&chunks, "input"), [expected; 3], "{fragments:?}");
    }
}
