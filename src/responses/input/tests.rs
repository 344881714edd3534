use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::ids::Root;
use crate::responses::engine_input::EngineInput;
use crate::responses::truncation::shortened;

fn ids() -> Ids {
    Ids::of(ResponseId::new(Root(1), 2))
}

fn read(input: &str, referenced: &ReferencedItems) -> Result<NewInput, ApiError> {
    let registry = crate::observe::metrics::Registry::default();
    let key_ring = crate::state_token::KeyRing::new(
        crate::state_token::Settings::default(),
        [7; 32],
        &registry,
    );
    let key_ring = key_ring.unwrap();
    let reader = StateReader {
        key_ring: &key_ring,
        tenant: crate::ids::Tenant::default(),
        now_s: 1,
        model: "m",
        plain_bytes: Default::default(),
    };
    let reading = InputContext {
        ids: &ids(),
        referenced,
        referenced_bytes_max: 1_000_000,
        reader: &reader,
        keeps_ids: true,
        param: "input",
    };
    NewInput::read(Some(input), &reading)
}

fn own(input: &Value) -> Result<NewInput, ApiError> {
    read(&input.to_string(), &ReferencedItems::new())
}

/// The engine input for some stored lists.
fn engine(lists: &[Value]) -> Result<Value, ApiError> {
    let mut input = EngineInput::new(0);
    for list in lists {
        input.add_list(list.to_string().as_bytes())?;
    }
    Ok(serde_json::from_slice(&input.finish()?).unwrap())
}

fn normalised(input: Value) -> Value {
    serde_json::from_slice(&own(&input).unwrap().json()).unwrap()
}

fn user(text: &str) -> Value {
    json!({"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]})
}

fn call(id: &str) -> Value {
    json!({"type": "function_call", "call_id": id, "name": "f", "arguments": "{ }"})
}

fn output(id: &str) -> Value {
    json!({"type": "function_call_output", "call_id": id, "output": "1"})
}

#[test]
fn a_text_is_one_message_of_the_user() {
    let id = ids().input("msg", 0);
    assert_eq!(
        normalised(json!("hi \"you\"\n")),
        json!([{"id": id, "type": "message", "role": "user", "status": "completed",
            "content": [{"type": "input_text", "text": "hi \"you\"\n"}]}])
    );
}

#[test]
fn every_item_gets_an_id_and_keeps_a_valid_one() {
    let items = normalised(json!([
        {"role": "user", "content": "a", "id": "mine"},
        {"role": "user", "content": "b", "id": "mine"},
        {"role": "user", "content": "c", "id": "with space"},
        {"type": "reasoning", "summary": []},
        call("call_1"),
        output("call_1"),
    ]));
    let found: Vec<&str> = items
        .as_array()
        .unwrap()
        .iter()
        .map(|item| item["id"].as_str().unwrap())
        .collect();
    let minted = |prefix: &str, place| ids().input(prefix, place);
    assert_eq!(found[0], "mine");
    assert_eq!(found[1], minted("msg", 1));
    assert_eq!(found[2], minted("msg", 2));
    assert_eq!(found[3], minted("rs", 3));
    assert_eq!(found[4], minted("fc", 4));
    assert_eq!(found[5], minted("fco", 5));
}

#[test]
fn an_item_keeps_its_other_members() {
    let item = json!({"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "x"}], "extra": {"a": [1]}});
    let kept = &normalised(json!([item]))[0];
    assert_eq!(kept["extra"], json!({"a": [1]}));
    assert_eq!(kept["output"], item["output"]);
    assert_eq!(kept["status"], "completed");
    let phase = json!([{"role": "assistant", "content": "x", "phase": "commentary", "status": "incomplete"}]);
    let kept = &normalised(phase)[0];
    assert_eq!(
        (&kept["phase"], &kept["status"]),
        (&json!("commentary"), &json!("completed"))
    );
    assert_eq!(kept["content"][0]["type"], "output_text");
}

#[test]
fn a_listed_item_has_every_member_that_clients_require() {
    let items = normalised(json!([
        {"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,AA=="}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "x"}]},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "r"}]},
        {"type": "computer_call", "call_id": "c1", "action": {"type": "click", "x": 1, "y": 2}},
    ]));
    assert_eq!(items[0]["content"][0]["detail"], "auto");
    let text = &items[1]["content"][0];
    assert_eq!(
        (&text["annotations"], &text["logprobs"]),
        (&json!([]), &json!([]))
    );
    assert_eq!(items[2]["summary"], json!([]));
    assert_eq!(items[3]["pending_safety_checks"], json!([]));
    assert!(items[3]["id"].as_str().unwrap().starts_with("cu_"));
}

#[test]
fn errors_name_the_index_of_the_item() {
    let check = |item: Value, code: &str, param: &str| {
        let error = own(&json!([user("x"), item])).unwrap_err();
        assert_eq!(
            (error.code, error.param_or_empty()),
            (code, param),
            "{item}"
        );
    };
    check(json!(7), "invalid_type", "input[1]");
    check(json!({"type": "poem"}), "invalid_value", "input[1]");
    check(
        json!({"role": "poet", "content": "x"}),
        "invalid_value",
        "input[1].role",
    );
    check(
        json!({"role": "user"}),
        "missing_required_parameter",
        "input[1].content",
    );
    check(
        json!({"role": "user", "content": 7}),
        "invalid_type",
        "input[1].content",
    );
    check(
        json!({"role": "assistant", "content": ["x"]}),
        "invalid_type",
        "input[1].content[0]",
    );
    check(
        json!({"role": "user", "content": [{"type": "input_text", "text": 7}]}),
        "invalid_type",
        "input[1].content[0].text",
    );
    check(
        json!({"type": "computer_call_output", "call_id": "c", "output": {"type": "computer_screenshot"}}),
        "invalid_value",
        "input[1].output",
    );
    check(
        json!({"type": "additional_tools", "role": "developer"}),
        "missing_required_parameter",
        "input[1].tools",
    );
    check(
        json!({"type": "additional_tools", "tools": [{"type": "function"}]}),
        "missing_required_parameter",
        "input[1].tools[0].name",
    );
    check(
        json!({"type": "function_call", "name": "f", "arguments": "{}"}),
        "missing_required_parameter",
        "input[1].call_id",
    );
    check(
        json!({"type": "function_call", "name": "f", "call_id": "c", "arguments": {}}),
        "invalid_type",
        "input[1].arguments",
    );
    check(
        json!({"type": "function_call_output", "call_id": "c"}),
        "missing_required_parameter",
        "input[1].output",
    );
    check(
        output(&"x".repeat(257)),
        "invalid_value",
        "input[1].call_id",
    );
    check(
        json!({"type": "compaction", "encrypted_content": "abc"}),
        "invalid_encrypted_content",
        "",
    );
}

#[test]
fn the_call_id_that_an_engine_made_of_a_long_name_is_accepted() {
    let id = format!("functions.{}__{}:0", "n".repeat(64), "f".repeat(64));
    let items = normalised(json!([call(&id), output(&id)]));
    assert_eq!(items[1]["call_id"], id);
}

#[test]
fn an_engine_gets_items_without_ids() {
    let stored = json!([
        {"id": "msg_1", "type": "message", "role": "assistant", "status": "incomplete", "phase": "final_answer", "content": [
            {"type": "output_text", "text": "a\n", "annotations": [{"type": "url_citation"}], "logprobs": []},
            {"type": "refusal", "refusal": "b"}]},
        {"id": "rs_1", "type": "reasoning", "status": null, "summary": [], "content": [
            {"type": "reasoning_text", "text": "x"}, {"type": "reasoning_text", "text": "y"}], "encrypted_content": "sealed"},
    ]);
    assert_eq!(
        engine(&[stored]).unwrap(),
        json!([
            {"type": "message", "role": "assistant", "status": "completed",
             "content": [{"type": "output_text", "text": "a\nb", "annotations": []}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "x\ny"}]},
        ])
    );
}

#[test]
fn a_custom_call_keeps_its_namespace() {
    let item = json!({"type": "custom_tool_call", "call_id": "c", "namespace": "n", "name": "f", "input": "x"});
    assert_eq!(engine(&[json!([item])]).unwrap(), json!([item]));
}

#[test]
fn a_list_of_tools_stays_for_the_body_of_an_engine() {
    let item = json!({"type": "additional_tools", "role": "developer", "id": "at_1", "tools": [{"type": "function", "name": "f"}]});
    let found = normalised(json!([item]));
    assert_eq!(found[0]["id"], "at_1");
    assert_eq!(
        engine(&[found]).unwrap(),
        json!([{"type": "additional_tools", "role": "developer", "tools": [{"type": "function", "name": "f"}]}])
    );
}

#[test]
fn arguments_keep_their_bytes() {
    let raw = r#"[{"type":"function_call","call_id":"c","name":"f","arguments":"{\"a\":1.0,  \"b\":\u0022x\u0022}"}]"#;
    let mut input = EngineInput::new(0);
    input.add_list(raw.as_bytes()).unwrap();
    let sent = String::from_utf8(input.finish().unwrap()).unwrap();
    assert_eq!(sent, raw);
}

#[test]
fn the_history_is_the_same_bytes_in_every_turn() {
    let first = own(&json!("hello")).unwrap();
    let mut alone = EngineInput::new(0);
    alone.add_new(&first).unwrap();
    let alone = alone.finish().unwrap();
    let mut later = EngineInput::new(0);
    later.add_list(&first.json()).unwrap();
    later
        .add_new(&own(&json!([user("more")])).unwrap())
        .unwrap();
    let later = later.finish().unwrap();
    assert!(later.starts_with(&alone[..alone.len() - 1]));
}

#[test]
fn the_short_and_long_form_of_a_message_are_sent_alike() {
    let easy = own(&json!([{"role": "user", "content": "x"}])).unwrap();
    let long = own(&json!([user("x")])).unwrap();
    let text = own(&json!("x")).unwrap();
    let sent = |own: &NewInput| {
        let mut input = EngineInput::new(0);
        input.add_new(own).unwrap();
        input.finish().unwrap()
    };
    assert_eq!(sent(&easy), sent(&long));
    assert_eq!(sent(&easy), sent(&text));
}

#[test]
fn calls_and_outputs_must_be_paired() {
    let check = |list: Value, message: &str| {
        let said = engine(std::slice::from_ref(&list))
            .err()
            .map(|error| error.message);
        assert_eq!(said.as_deref().unwrap_or_default(), message, "{list}");
    };
    check(json!([call("a"), output("a")]), "");
    check(
        json!([call("a"), call("b"), output("b"), output("a"), user("x")]),
        "",
    );
    check(json!([user("x"), call("a")]), "");
    check(json!([user("x"), call("a"), call("b")]), "");
    check(
        json!([output("a")]),
        "No tool call found for function call output with call_id a.",
    );
    check(
        json!([output("a"), call("a")]),
        "No tool call found for function call output with call_id a.",
    );
    check(
        json!([call("a"), user("x")]),
        "No tool output found for function call a.",
    );
    check(
        json!([call("a"), call("b"), output("a")]),
        "No tool output found for function call b.",
    );
    let custom = json!({"type": "custom_tool_call", "call_id": "c", "name": "f", "input": "x"});
    check(
        json!([custom, user("x")]),
        "No tool output found for custom tool call c.",
    );
}

#[test]
fn a_call_and_its_output_may_be_in_different_turns() {
    let turns = [json!([user("x")]), json!([call("a")]), json!([output("a")])];
    assert_eq!(engine(&turns).unwrap().as_array().unwrap().len(), 3);
}

#[test]
fn unreadable_reasoning_is_refused_and_empty_reasoning_left_out() {
    let sealed = json!([{"type": "reasoning", "summary": [], "encrypted_content": "gAAAAABoISQ24OyVRYbk=="}]);
    let error = engine(&[sealed]).unwrap_err();
    assert_eq!(error.code, "invalid_encrypted_content");
    assert_eq!(
        error.message,
        "The encrypted content gAAAAABo...bk== could not be verified."
    );
    let nothing = json!([{"type": "reasoning", "summary": [], "content": []}, user("x")]);
    assert_eq!(engine(&[nothing]).unwrap(), json!([user("x")]));
    let summary = json!([{"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "s"}], "encrypted_content": null}]);
    assert_eq!(
        engine(&[summary]).unwrap(),
        json!([{"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]}])
    );
}

#[test]
fn hosted_tools_with_text_become_function_calls() {
    let items = json!([
        {"type": "mcp_call", "id": "mcp_1", "name": "roll", "arguments": "{\"n\":1}", "output": "4", "server_label": "d"},
        {"type": "code_interpreter_call", "id": "ci_1", "code": "1+1", "outputs": [{"type": "logs", "logs": "2\n"}]},
        {"type": "web_search_call", "id": "ws_1", "action": {"type": "search"}},
        {"type": "shell_call", "id": "sh_1", "call_id": "c", "action": {"commands": ["ls"]}},
        {"type": "shell_call_output", "call_id": "c", "output": [{"stdout": "a"}]},
    ]);
    assert_eq!(
        engine(&[items]).unwrap(),
        json!([
            {"type": "function_call", "call_id": "mcp_1", "name": "roll", "arguments": "{\"n\":1}"},
            {"type": "function_call_output", "call_id": "mcp_1", "output": "4"},
            {"type": "function_call", "call_id": "ci_1", "name": "code_interpreter", "arguments": "{\"code\":\"1+1\"}"},
            {"type": "function_call_output", "call_id": "ci_1", "output": "2\n"},
            {"type": "function_call", "call_id": "c", "name": "shell_call", "arguments": "{\"commands\":[\"ls\"]}"},
            {"type": "function_call_output", "call_id": "c", "output": "[{\"stdout\":\"a\"}]"},
        ])
    );
}

#[test]
fn a_reference_is_replaced_by_its_item() {
    let input =
        json!([{"type": "item_reference", "id": "msg_1"}, {"id": "fc_1"}, user("x")]).to_string();
    let expected = ["msg_1", "fc_1"].map(str::to_owned);
    assert_eq!(references(Some(&input)), HashSet::from(expected));
    assert_eq!(references(Some("\"text\"")), HashSet::new());
    let mut found = ReferencedItems::new();
    let stored = json!([{"id": "msg_1", "type": "message", "role": "assistant", "content": []}, {"id": "other"}]);
    collect(
        stored.to_string().as_bytes(),
        &references(Some(&input)),
        &mut found,
    );
    assert_eq!(found.len(), 1);
    let error = read(&input, &found).unwrap_err();
    assert!(
        error
            .message
            .starts_with("Item with id 'fc_1' not found. Items are not persisted")
    );
    collect(
        br#"[{"id":"fc_1","type":"function_call","call_id":"c","name":"f","arguments":""}]"#,
        &references(Some(&input)),
        &mut found,
    );
    let own = read(&input, &found).unwrap();
    assert_eq!(own.items[0].id, "msg_1");
}

#[test]
fn a_long_list_is_read_to_its_first_wrong_item_only() {
    let long = "{},".repeat((1 << 20) / 3);
    for (input, expected) in [
        (
            format!("[{long}{{}}]"),
            "missing_required_parameter input[0].type",
        ),
        // What follows the items is not even JSON.
        (
            format!("[{long}not JSON"),
            "missing_required_parameter input[0].type",
        ),
        (format!("[7,{long}not JSON"), "invalid_type input[0]"),
        (
            format!(r#"[{{"role":"user","content":"a"}},[],{long}not JSON"#),
            "invalid_type input[1]",
        ),
        ("7".to_owned(), "invalid_type input"),
        (
            format!(r#"[{{"role":"user","content":[{long}{{}}]}}]"#),
            "missing_required_parameter input[0].content[0].type",
        ),
    ] {
        let error = read(&input, &ReferencedItems::new()).unwrap_err();
        let found = format!("{} {}", error.code, error.param_or_empty());
        assert_eq!(found, expected);
    }
    let references = references(Some(&format!(r#"[{long}{{"id":"msg_1"}}]"#)));
    assert_eq!(references, HashSet::from(["msg_1".to_owned()]));
}

/// Any item, valid or not.
fn any_item() -> impl Strategy<Value = Value> {
    let text = "[a-z\"\\\\\u{e9} ]{0,6}";
    prop_oneof![
        text.prop_map(|text| user(&text)),
        text.prop_map(|text| json!({"role": "assistant", "content": text})),
        (0..4_u8).prop_map(|id| call(&format!("c{id}"))),
        (0..4_u8).prop_map(|id| output(&format!("c{id}"))),
        text.prop_map(|text| json!({"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}]})),
        (0..24_usize, text).prop_map(|(kind, text)| {
            let names = ["mcp_call", "web_search_call", "shell_call", "shell_call_output", "item_reference", "compaction"];
            json!({"type": names[kind % names.len()], "id": text, "call_id": text, "name": text, "arguments": text, "output": text})
        }),
    ]
}

proptest! {
    #[test]
    fn the_engine_input_does_not_depend_on_turn_boundaries(items in proptest::collection::vec(any_item(), 0..12), cut in 0..12_usize) {
        let Ok(own) = own(&Value::Array(items)) else { return Ok(()) };
        let stored: Vec<Value> = serde_json::from_slice(&own.json()).unwrap();
        let cut = cut.min(stored.len());
        let whole = engine(&[Value::Array(stored.clone())]);
        let parts = engine(&[Value::Array(stored[..cut].to_vec()), Value::Array(stored[cut..].to_vec())]);
        prop_assert_eq!(whole.is_ok(), parts.is_ok());
        if let (Ok(whole), Ok(parts)) = (whole, parts) {
            prop_assert_eq!(whole, parts);
        }
    }

    #[test]
    fn normalising_twice_changes_nothing(items in proptest::collection::vec(any_item(), 0..8)) {
        let Ok(once) = own(&Value::Array(items)) else { return Ok(()) };
        let ids_of = |own: &NewInput| own.items.iter().map(|item| item.id.clone()).collect::<HashSet<_>>();
        let text = String::from_utf8(once.json().to_vec()).unwrap();
        let twice = read(&text, &ReferencedItems::new()).unwrap();
        prop_assert_eq!(ids_of(&once).len(), once.items.len());
        prop_assert_eq!(once.items, twice.items);
    }

    #[test]
    fn no_bytes_make_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let text = String::from_utf8_lossy(&bytes);
        let _ = read(&text, &ReferencedItems::new());
        let mut input = EngineInput::new(0);
        let _ = input.add_list(&bytes);
        references(Some(&text));
        collect(&bytes, &HashSet::from(["x".to_owned()]), &mut ReferencedItems::new());
    }
}

#[test]
fn fifty_thousand_items_take_linear_time() {
    const COUNT: usize = 50_000;
    let mut items = vec![user("go")];
    items.extend((0..COUNT).map(|number| call(&format!("c{number}"))));
    // In order, the worst case of a search from the end.
    items.extend((0..COUNT).map(|number| output(&format!("c{number}"))));
    items.push(user("on"));
    let list = Value::from(items).to_string();
    let mut input = EngineInput::new(list.len());
    input.add_list(list.as_bytes()).unwrap();
    let list = input.finish().unwrap();
    let left = shortened(&list).unwrap();
    // Half of the old items, and the outputs of the dropped calls.
    let left: Vec<Value> = serde_json::from_slice(&left).unwrap();
    assert_eq!(left.len(), 1);
    let references: Vec<Value> = (0..COUNT)
        .map(|index| json!({"type": "item_reference", "id": ids().output("fc", index)}))
        .collect();
    let wanted = references_of(&Value::from(references));
    assert_eq!(wanted.len(), COUNT);
    let kept: Vec<Value> = (0..COUNT)
        .map(|index| json!({"id": ids().output("fc", index), "type": "function_call"}))
        .collect();
    let mut found = ReferencedItems::new();
    collect(
        Value::from(kept).to_string().as_bytes(),
        &wanted,
        &mut found,
    );
    assert_eq!(found.len(), COUNT);
    assert_eq!(owners(&wanted).len(), 2);
}

fn references_of(input: &Value) -> HashSet<String> {
    references(Some(&input.to_string()))
}

#[test]
fn the_state_tokens_of_a_request_share_one_size_limit() {
    let registry = crate::observe::metrics::Registry::default();
    let settings = crate::state_token::Settings {
        max_plain_size: 10_000,
        ..Default::default()
    };
    let key_ring = crate::state_token::KeyRing::new(settings, [7; 32], &registry).unwrap();
    let sealed = |kind: crate::state_token::Kind| {
        let text = "x".repeat(4_000);
        let thought =
            json!([{"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}]}]);
        let content = crate::state_token::Content {
            kind,
            response_id: "resp_1",
            model: "m",
            items: &thought.to_string(),
        };
        let text = key_ring
            .issue(1, crate::ids::Tenant::default(), &content)
            .unwrap();
        json!({"type": "reasoning", "summary": [], "encrypted_content": text})
    };
    let count = |kind: crate::state_token::Kind, count: usize| {
        let reader = StateReader {
            key_ring: &key_ring,
            tenant: crate::ids::Tenant::default(),
            now_s: 1,
            model: "m",
            plain_bytes: Default::default(),
        };
        let reading = InputContext {
            ids: &ids(),
            referenced: &ReferencedItems::new(),
            referenced_bytes_max: 0,
            reader: &reader,
            keeps_ids: true,
            param: "input",
        };
        let input = Value::from(vec![sealed(kind); count]).to_string();
        NewInput::read(Some(&input), &reading).map(|own| own.items.len())
    };
    assert_eq!(count(crate::state_token::Kind::Reasoning, 2).unwrap(), 2);
    let error = count(crate::state_token::Kind::Reasoning, 3).unwrap_err();
    assert_eq!(
        (error.status.as_u16(), error.param_or_empty()),
        (400, "input")
    );
    assert!(error.message.contains("10000 bytes"), "{}", error.message);
    // A token whose items are in the input already is not unpacked.
    assert_eq!(count(crate::state_token::Kind::Turn, 100).unwrap(), 0);
}

#[test]
fn repeated_references_count_against_the_limit() {
    let mut kept = user(&"x".repeat(1_000));
    kept["id"] = "msg_1".into();
    let referenced = ReferencedItems::from([("msg_1".to_owned(), kept.to_string())]);
    let refer = |times: usize| {
        let reference = json!({"type": "item_reference", "id": "msg_1"});
        read(
            &Value::from(vec![reference; times]).to_string(),
            &referenced,
        )
    };
    assert_eq!(refer(500).unwrap().items.len(), 500);
    let error = refer(1_000).unwrap_err();
    assert_eq!(
        (error.code, error.status.as_u16()),
        ("context_length_exceeded", 400)
    );
}

#[test]
fn calls_of_one_turn_with_the_same_id_are_each_answered() {
    let output =
        |text: &str| json!({"type": "function_call_output", "call_id": "0", "output": text});
    let both = json!([call("0"), call("0"), output("a"), output("b"), user("u")]);
    assert_eq!(engine(&[both]).unwrap().as_array().unwrap().len(), 5);
    let one = json!([call("0"), call("0"), output("a"), user("u")]);
    assert!(engine(&[one]).is_err());
}

#[test]
fn a_surrogate_without_its_other_half_reaches_no_engine() {
    let mut input = EngineInput::new(0);
    let text =
        r#"[{"type":"message","role":"user","content":[{"type":"input_text","text":"a\ud83d"}]}]"#;
    input.add_list(text.as_bytes()).unwrap();
    let json = String::from_utf8(input.finish().unwrap()).unwrap();
    assert!(
        json.contains(r"a\ufffd") && !json.contains("ud83d"),
        "{json}"
    );
}

#[test]
fn an_item_that_several_lists_have_counts_once() {
    let item = json!({"id": "msg_1", "type": "message", "role": "user", "content": "same"});
    let other = json!({"id": "msg_2", "type": "message", "role": "user", "content": "other"});
    let wanted: HashSet<String> = ["msg_1", "msg_2"].map(str::to_owned).into();
    let mut found = ReferencedItems::new();
    let mut added = |list: Value| collect(list.to_string().as_bytes(), &wanted, &mut found);
    assert_eq!(added(json!([item])), item.to_string().len());
    assert_eq!(added(json!([item, other])), other.to_string().len());
    assert_eq!(added(json!([other, item])), 0);
    assert_eq!(found.len(), 2);
}
