use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

fn peeked(api: Api, body: &Value) -> HashedPrompt {
    peek(api, body.to_string().as_bytes(), 64).unwrap().prompt
}

fn chat(messages: &Value) -> HashedPrompt {
    peeked(Api::Chat, &json!({"model": "m", "messages": messages}))
}

fn user(text: &str) -> Value {
    json!({"role": "user", "content": text})
}

#[test]
fn routing_fields_are_found_in_any_order() {
    let body = br#" {"unknown": [{"model": "no"}], "stream" : true, "user":"u\u0031",
        "messages": [], "prompt_cache_key": "k", "session_id": "s", "cache_salt": "c", "model": "tiny"} "#;
    let peek = peek(Api::Chat, body, 64).unwrap();
    assert_eq!(peek.model.as_deref(), Some("tiny"));
    assert!(peek.is_stream);
    assert_eq!(peek.user.as_deref(), Some("u1"));
    assert_eq!(peek.prompt_cache_key.as_deref(), Some("k"));
    assert_eq!(peek.session_id.as_deref(), Some("s"));
    assert_eq!(peek.cache_salt.as_deref(), Some("c"));
}

#[test]
fn a_name_that_is_given_to_a_medium_is_seen_and_no_other_uuid() {
    let names_media = |api: Api, body: &str| peek(api, body.as_bytes(), 64).unwrap().names_media;
    let part = |member: &str| {
        let image = format!(r#"{{"type":"image_url","image_url":null{member}}}"#);
        format!(r#"{{"model":"m","messages":[{{"role":"user","content":[{image}]}}]}}"#)
    };
    for member in [
        r#","uuid":"a""#,
        r#","uu\u0069d":"a""#,
        r#","uuid":"\n""#,
        r#","uuid":"\u0061""#,
        r#","uuid":7"#,
        r#","uuid":-1.5"#,
        r#","uuid":true"#,
        r#","uuid":[]"#,
        r#","uuid":[null]"#,
        r#","uuid":{}"#,
    ] {
        assert!(names_media(Api::Chat, &part(member)), "{member}");
        assert!(names_media(Api::Embeddings, &part(member)), "{member}");
        // Python reads bytes that are no text here.
        let mut odd = part(member).into_bytes();
        odd.pop();
        odd.extend_from_slice(b",\"x\":\"\xed\xa0\x80\"}");
        let found = peek(Api::Chat, &odd, 64).unwrap();
        assert!(found.names_media, "{member}");
    }
    for member in [
        "",
        r#","uuid":null"#,
        r#","text":"uuid""#,
        r#","input":{"uuid":"a"}"#,
    ] {
        assert!(!names_media(Api::Chat, &part(member)), "{member}");
    }
    let call = r#"{"role":"assistant","uuid":"a","tool_calls":[{"uuid":"a"}]}"#;
    let elsewhere = format!(r#"{{"uuid":"a","messages":[{call}],"tools":[{{"uuid":"a"}}]}}"#);
    assert!(!names_media(Api::Chat, &elsewhere));
    let features = |value: &str| format!(r#"{{"token_ids":[1],"features":{value}}}"#);
    assert!(names_media(Api::Generate, &features("{}")));
    assert!(!names_media(Api::Generate, &features("null")));
}

#[test]
fn a_name_is_seen_in_what_is_ranked_and_in_what_a_tool_has_put_out() {
    let names_media = |api: Api, body: &str| peek(api, body.as_bytes(), 64).unwrap().names_media;
    let parts = r#"[{"type":"image_url","image_url":{"url":"u"},"uuid":"a"}]"#;
    for body in [
        format!(r#"{{"query":{{"content":{parts}}},"documents":["d"]}}"#),
        format!(r#"{{"query":"q","documents":{{"content":{parts}}}}}"#),
        format!(r#"{{"query":"q","documents":["d",{{"content":{parts}}}]}}"#),
    ] {
        assert!(names_media(Api::Rerank, &body), "{body}");
    }
    let document = r#"{"uuid":"a","content":"c","meta":{"uuid":"b"}}"#;
    let chat = format!(r#"{{"messages":[],"documents":[{document}]}}"#);
    assert!(!names_media(Api::Chat, &chat));
    let output = r#"[{"type":"input_image","image_url":"u","uuid":"a"}]"#;
    let item = format!(r#"{{"type":"function_call_output","call_id":"c","output":{output}}}"#);
    let body = format!(r#"{{"input":[{item}]}}"#);
    assert!(names_media(Api::Responses, &body));
}

fn token_ids(prompt: &Value) -> Option<Vec<u32>> {
    let body = json!({"prompt": prompt, "suffix": null, "best_of": 3}).to_string();
    let api = Api::Completions;
    peek(api, body.as_bytes(), 64).unwrap().token_ids
}

#[test]
fn only_a_flat_list_of_u32_is_a_prompt_of_token_ids() {
    assert_eq!(
        token_ids(&json!([1, 2, 4_000_000_000_u32])),
        Some(vec![1, 2, 4_000_000_000])
    );
    for other in [
        json!("text"),
        json!([]),
        json!([[1, 2], [3]]),
        json!([1, "two"]),
        json!([1, [2]]),
        json!([1, -2]),
        json!([1, 2.5]),
        json!([1, 5_000_000_000_u64]),
        json!({"ids": [1]}),
        Value::Null,
    ] {
        assert_eq!(token_ids(&other), None, "{other}");
    }
    let elsewhere = json!({"input": [1, 2]}).to_string();
    let peeked = peek(Api::Responses, elsewhere.as_bytes(), 64).unwrap();
    assert_eq!(peeked.token_ids, None);
}

#[test]
fn token_ids_of_which_the_engine_computes_others_are_not_known() {
    for (name, value) in [
        ("truncate_prompt_tokens", "32"),
        ("prompt_embeds", "\"AA==\""),
        ("suffix", "\"end\""),
    ] {
        for (value, expected) in [(value, None), ("null", Some(vec![1, 2]))] {
            let body = format!(r#"{{"prompt": [1, 2], "{name}": {value}}}"#);
            let peeked = peek(Api::Completions, body.as_bytes(), 64).unwrap();
            assert_eq!(peeked.token_ids, expected, "{body}");
        }
    }
}

#[test]
fn the_last_of_two_prompts_is_used() {
    for (body, expected) in [
        (r#"{"prompt": [1], "prompt": [2, 3]}"#, Some(vec![2, 3])),
        (r#"{"prompt": [1], "prompt": "text"}"#, None),
    ] {
        let peeked = peek(Api::Completions, body.as_bytes(), 64).unwrap();
        assert_eq!(peeked.token_ids, expected);
    }
}

fn check_error(api: Api, body: &str, expected: &str) {
    let error = peek(api, body.as_bytes(), 64).unwrap_err().to_string();
    assert!(error.contains(expected), "{body}: {error}");
}

#[test]
fn an_invalid_body_is_refused_with_its_position() {
    check_error(Api::Chat, "", "EOF while parsing");
    check_error(Api::Chat, "{\"model\": \"tiny\", ", "line 1 column 18");
    check_error(Api::Chat, "[1]", "a JSON object");
    check_error(Api::Chat, "{} {}", "trailing characters");
    check_error(Api::Chat, "{\"model\": 7}", "`model` must be a string");
    let deep = format!("{{\"messages\": {}", "[".repeat(100_000));
    assert!(
        peek(Api::Chat, deep.as_bytes(), 64)
            .unwrap_err()
            .to_string()
            .contains("recursion limit")
    );
}

#[test]
fn fields_that_only_the_router_may_send_are_refused_by_name() {
    for name in ["kv_transfer_params", "ec_transfer_params"] {
        for api in [Api::Chat, Api::Completions, Api::Responses] {
            check_error(api, &format!("{{\"{name}\": {{}}}}"), name);
        }
    }
    check_error(Api::Responses, r#"{"request_id": "x"}"#, "request_id");
    check_error(
        Api::Chat,
        r#"{"kv_transfer\u005fparams": 1}"#,
        "kv_transfer_params",
    );
    check_error(
        Api::Chat,
        r#"{"kv_transfer_params": null, "kv_transfer_params": 1}"#,
        "kv_transfer_params",
    );
    let hidden = [
        r#"{"vllm_xargs": {"kv_cache_report_mode": "full"}}"#,
        r#"{"vllm_xargs": {"a": 1, "kv_cache_report\u005fmode": "full"}}"#,
        r#"{"vllm_xargs": {"kv_cache_report_mode": null, "kv_cache_report_mode": "full"}}"#,
        r#"{"vllm_xargs": {"kv_cache_report_mode": "full", "kv_cache_report_mode": null}}"#,
        r#"{"vllm_xargs": {"kv\u005fcache_report_mode":"full","kv\u005fcache_report_mode":"full"}}"#,
    ];
    for body in hidden {
        check_error(Api::Chat, body, "vllm_xargs.kv_cache_report_mode");
    }
}

/// vLLM copies members of `vllm_xargs` into its own parameters, and some of these values crash the engine.
#[test]
fn vllm_xargs_cannot_contain_transfer_params() {
    for name in ["kv_transfer_params", "ec_transfer_params"] {
        let named = format!("`vllm_xargs.{name}`");
        let escaped = name.replacen('_', "\\u005f", 1);
        for value in [
            "{}",
            "null",
            "\"\"",
            "0",
            "[]",
            r#"{"do_remote_prefill":true}"#,
        ] {
            for xargs in [
                format!(r#"{{"{name}":{value}}}"#),
                format!(r#"{{"a":1,"{escaped}":{value},"b":[{{}}]}}"#),
            ] {
                for api in [Api::Chat, Api::Completions, Api::Responses] {
                    check_error(api, &format!(r#"{{"vllm_xargs":{xargs}}}"#), &named);
                    // If the key is repeated, each occurrence is checked.
                    let twice = format!(r#"{{"vllm_xargs":{xargs},"vllm_xargs":{{"a":1}}}}"#);
                    check_error(api, &twice, &named);
                }
            }
        }
    }
    let deeper = br#"{"vllm_xargs": {"mine": {"kv_transfer_params": {}}}}"#;
    assert!(peek(Api::Chat, deeper, 64).is_ok());
    // A lone surrogate does not hide the keys after it.
    check_error(
        Api::Chat,
        r#"{"vllm_xargs": {"\ud800": 1, "kv_transfer_params": {}}}"#,
        "not valid JSON",
    );
}

#[test]
fn null_fields_from_an_engine_response_may_be_sent_back() {
    let body = br#"{"kv_transfer_params": null, "vllm_xargs": {"mine": 1}, "request_id": "x"}"#;
    assert!(peek(Api::Chat, body, 64).is_ok());
    for odd in ["null", "true", "-1", "1", "1.5", "\"x\"", "[{}]"] {
        let body = format!("{{\"vllm_xargs\": {odd}}}");
        assert!(peek(Api::Chat, body.as_bytes(), 64).is_ok(), "{body}");
    }
}

#[test]
fn white_space_and_escapes_do_not_change_a_prompt() {
    let text = "naïve \"quoted\"\n".repeat(40);
    let plain = json!({"messages": [user(&text)]}).to_string();
    let mut escaped = String::new();
    for c in plain.chars() {
        match c {
            'ï' => escaped.push_str("\\u00ef"),
            ',' | ':' => escaped.extend([c, ' ']),
            _ => escaped.push(c),
        }
    }
    // The text has no commas or colons of its own, so both bodies have the same value.
    let a = peek(Api::Chat, plain.as_bytes(), 64).unwrap().prompt;
    let b = peek(Api::Chat, escaped.as_bytes(), 64).unwrap().prompt;
    assert_eq!(a, b);
    assert!(a.blocks.len() > 5);
}

#[test]
fn tools_and_instructions_are_hashed_before_the_conversation() {
    let tools = json!([{"type": "function", "function": {"name": "f"}}]);
    let long = "x".repeat(300);
    let first = format!(r#"{{"tools": {tools}, "instructions": "be brief", "input": "{long}"}}"#);
    let last = format!(r#"{{"input": "{long}", "instructions": "be brief", "tools": {tools}}}"#);
    let first = peek(Api::Responses, first.as_bytes(), 64).unwrap().prompt;
    assert_eq!(
        first,
        peek(Api::Responses, last.as_bytes(), 64).unwrap().prompt
    );
    let without = peeked(Api::Responses, &json!({"input": long}));
    assert_ne!(first.blocks[0], without.blocks[0]);
    assert_eq!(
        first.blocks[first.blocks.len() - without.blocks.len()..],
        without.blocks
    );
}

#[test]
fn every_field_of_the_prompt_changes_its_blocks() {
    let long = "y".repeat(200);
    let base = json!({"messages": [user(&long)], "tools": [{"name": "a"}]});
    let base_blocks = peeked(Api::Chat, &base).blocks;
    for (place, value) in [
        ("/messages/0/role", json!("system")),
        ("/tools/0/name", json!("b")),
        ("/tools", json!(null)),
        (
            "/messages/0/content",
            json!([{"type": "image_url", "image_url": {"url": "data:..."}}, {"type": "text", "text": long}]),
        ),
    ] {
        let mut other = base.clone();
        *other.pointer_mut(place).unwrap() = value;
        let other = peeked(Api::Chat, &other).blocks;
        assert!(
            other[0] != base_blocks[0] || other[1] != base_blocks[1],
            "{place}"
        );
    }
    let mut sampled = base.clone();
    sampled["temperature"] = json!(0.3);
    assert_eq!(peeked(Api::Chat, &sampled).blocks, base_blocks);
}

#[test]
fn an_image_counts_as_a_fixed_number_of_bytes() {
    let with_image = |data: &str| {
        chat(&json!([{"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": data}}, {"type": "text", "text": "what is it? ".repeat(20)}]}]))
    };
    let (small, large) = (with_image("data:1"), with_image(&"data:2".repeat(10_000)));
    assert_eq!(small.bytes, large.bytes);
    assert!(small.bytes > 3_200 && small.bytes < 4_000);
    assert_ne!(small.blocks, large.blocks);
    let in_blocks: u64 = small
        .blocks
        .iter()
        .map(|block| u64::from(block.bytes))
        .sum();
    assert!((small.bytes - 64..=small.bytes).contains(&in_blocks));
}

#[test]
fn options_of_an_image_do_not_count_as_media() {
    let check = |part: Value, images: u64| {
        let prompt = chat(&json!([{"role": "user", "content": [part]}]));
        assert_eq!(prompt.bytes / 3_200, images, "{part}");
    };
    check(json!({"image_url": {"url": "u", "detail": "low"}}), 1);
    check(json!({"image_url": "u", "detail": "low"}), 1);
    check(json!({"input_audio": {"data": "d", "format": "wav"}}), 1);
    check(json!({"file": {"file_data": "d", "filename": "f"}}), 1);
    check(json!({"file_url": "u", "filename": "f"}), 1);
    check(json!({"type": "url_citation", "url": "u", "data": "d"}), 0);
}

#[test]
fn tool_parameters_named_like_media_count_as_text() {
    let property = json!({"type": "string", "description": "what to look at", "url": "u"});
    let tools = json!([{"function": {"parameters": {"properties":
        {"image_url": property, "file": property, "file_data": "d", "input_audio": {"data": "d"}}}}}]);
    assert!(peeked(Api::Chat, &json!({"tools": tools})).bytes < 1_000);
}

#[test]
fn token_ids_are_hashed_as_four_bytes_each() {
    let ids: Vec<u32> = (0..64).collect();
    let prompt = peeked(Api::Completions, &json!({"prompt": ids}));
    assert_eq!((prompt.bytes, prompt.blocks.len()), (256, 4));
}

#[test]
fn a_long_prompt_has_few_blocks() {
    let prompt = chat(&json!([user(&"z".repeat(4_000_000))]));
    assert!(prompt.blocks.len() < 1_000, "{}", prompt.blocks.len());
}

proptest! {
    #[test]
    fn the_next_turn_keeps_every_block(
        turns in proptest::collection::vec("[a-zé\"\\\\ ]{0,200}", 1..8),
        next in "[a-z]{0,300}",
    ) {
        let mut messages: Vec<Value> = turns.iter().map(|turn| user(turn)).collect();
        let now = chat(&Value::from(messages.clone()));
        messages.push(user(&next));
        let later = chat(&Value::from(messages));
        prop_assert!(later.blocks.starts_with(&now.blocks));
        prop_assert!(later.bytes > now.bytes);
    }

    #[test]
    fn random_bytes_do_not_panic(body in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ = peek(Api::Chat, &body, 64);
    }

    #[test]
    fn a_corrupted_byte_does_not_panic(at in any::<usize>(), byte in any::<u8>(), api in 0usize..3) {
        let mut body = json!({"model": "m", "stream": true, "tools": [{"a": 1.5}], "vllm_xargs": {"b": -1},
            "messages": [{"role": "user", "content": [{"image_url": {"url": "x"}}, "t"]}]}).to_string().into_bytes();
        let at = at % body.len();
        body[at] = byte;
        let _ = peek([Api::Chat, Api::Completions, Api::Responses][api], &body, 16);
    }
}

#[test]
fn fields_between_routers_and_engines_are_refused_by_name() {
    for api in [Api::Chat, Api::Completions, Api::Responses, Api::Messages] {
        for name in [
            "bootstrap_host",
            "bootstrap_port",
            "bootstrap_room",
            "routed_dp_rank",
            "data_parallel_rank",
            "disagg_prefill_dp_rank",
            "rid",
            "extra_key",
            "lora_path",
            "input_ids",
        ] {
            let body = format!(r#"{{"model":"m","{name}":7}}"#);
            let error = peek(api, body.as_bytes(), 64).unwrap_err();
            assert!(
                matches!(error, Error::Forbidden(found) if found == name),
                "{api:?} {name}"
            );
        }
    }
    assert!(peek(Api::Embeddings, br#"{"input_ids":[1]}"#, 64).is_ok());
}
