use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

fn reader<'a>(api: Api, is_router_made: bool) -> BodyReader<'a> {
    BodyReader {
        api,
        is_router_made,
        peek: PeekedBody::default(),
        hasher: BlockHasher::new(16),
        has_other_tokens: false,
        first_error: None,
    }
}

/// What the scanner finds, if anything; and what the parser finds.
fn both(api: Api, body: &[u8], is_router_made: bool) -> (Option<String>, String) {
    let scanned = scanned(body, reader(api, is_router_made)).map(BodyReader::finish);
    let parsed = parsed(body, reader(api, is_router_made));
    (
        scanned.map(|found| format!("{found:?}")),
        format!("{parsed:?}"),
    )
}

/// Both find the same, or both refuse the body. Only bytes that are no text are taken by the parser alone.
fn check_both(api: Api, body: &[u8], is_router_made: bool) -> Result<(), TestCaseError> {
    let (scanned, parsed) = both(api, body, is_router_made);
    match scanned {
        Some(scanned) => prop_assert_eq!(scanned, parsed),
        None => prop_assert!(parsed.starts_with("Err(Json(") || str::from_utf8(body).is_err()),
    }
    Ok(())
}

#[track_caller]
fn check_scanned(api: Api, body: &str) {
    let (scanned, parsed) = both(api, body.as_bytes(), false);
    assert_eq!(scanned.as_deref(), Some(&*parsed), "{body}");
}

#[test]
fn common_bodies_are_not_parsed() {
    let chat = json!({"model": "m", "messages": [
        {"role": "system", "content": "Be brief.\nUse \"quotes\", tabs\t and \\."},
        {"role": "user", "content": [
            {"type": "text", "text": "Grüße", "cache_control": {"type": "ephemeral"}},
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA", "detail": "low"}}]},
        {"role": "assistant", "content": null, "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{\"a\":1}"}}]}],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "x": [1, -2, 1.5, 1e3, true]}}}],
        "stream": true, "max_tokens": 5, "user": "u", "seed": 7});
    check_scanned(Api::Chat, &chat.to_string());
    check_scanned(Api::Chat, &format!(" {chat:#} \n"));
    let tokens =
        json!({"model": "m", "prompt": [1, 2, 3, 4_000_000_000_u64], "n": 2, "echo": true});
    check_scanned(Api::Completions, &tokens.to_string());
    let input = json!({"model": "m", "input": "hi", "instructions": "i", "request_id": "r", "kv_transfer_params": null});
    check_scanned(Api::Responses, &input.to_string());
    check_scanned(
        Api::Chat,
        r#"{"messages":[{"role":"user","content":"\u00e9\ud83d\ude00\/"}]}"#,
    );
    check_scanned(Api::Chat, "{}");
}

#[test]
fn a_name_with_escapes_is_scanned() {
    let body = r#"{"messages":[],"kv\u005ftransfer_params":{}}"#;
    check_scanned(Api::Chat, body);
    assert_eq!(
        peek(Api::Chat, body.as_bytes(), 16).unwrap_err(),
        Error::Forbidden("kv_transfer_params")
    );
    check_scanned(
        Api::Chat,
        r#"{"messages":[{"\u0072ole":"user","cache\u005fcontrol":{"a":"\ud800"},"\ud83d\ude00":1}]}"#,
    );
    let lone = r#"{"messages":[{"\ud83d":1}]}"#;
    check_both(Api::Chat, lone.as_bytes(), false).unwrap();
}

#[test]
fn of_a_repeated_key_the_last_value_alone_is_hashed_and_kept() {
    let hashed = |body: &str| {
        check_scanned(Api::Responses, body);
        let found = scanned(body.as_bytes(), reader(Api::Responses, false)).unwrap();
        let sections = found.hasher.section_count();
        (sections, found.finish().unwrap().prompt)
    };
    let last = r#""documents":["d"],"tools":["t"],"functions":["f"],"input":"a long conversation""#;
    let (sections, alone) = hashed(&format!("{{{last}}}"));
    assert_eq!((sections, alone.blocks.len()), (4, 4));
    let pairs = r#""tools":1,"input":1,"#.repeat(1_000);
    let all = r#""instructions":1,"functions":1,"documents":1,"chat_template":1,"#.repeat(10);
    assert_eq!(hashed(&format!("{{{pairs}{last}}}")), (4, alone));
    let (sections, _) = hashed(&format!("{{{pairs}{all}{last}}}"));
    assert_eq!(sections, 6);
}

#[test]
fn prompts_with_other_templates_or_other_arguments_of_them_differ() {
    let hashed = |members: [&str; 2]| {
        let body = format!(r#"{{"messages":[],{}}}"#, members.join(","));
        peek(Api::Chat, body.as_bytes(), 16).unwrap().prompt
    };
    let [template, other_template] = [r#""chat_template":"a""#, r#""chat_template":"b""#];
    let kwargs = r#""chat_template_kwargs":{"k":1}"#;
    let other_kwargs = r#""chat_template_kwargs":{"k":2}"#;
    let prompt = hashed([template, kwargs]);
    assert_eq!(hashed([kwargs, template]), prompt);
    for other in [[other_template, kwargs], [template, other_kwargs]] {
        let [first, second] = other;
        assert_ne!(hashed(other), prompt, "{other:?}");
        assert_ne!(hashed([second, first]), prompt, "{other:?}");
    }
}

#[test]
fn tools_functions_and_documents_are_hashed_in_the_order_of_the_body() {
    let hashed = |members: [&str; 3]| {
        let body = format!(r#"{{"input":"i",{}}}"#, members.join(","));
        peek(Api::Responses, body.as_bytes(), 16).unwrap().prompt
    };
    let [tools, functions, documents] = [r#""tools":1"#, r#""functions":2"#, r#""documents":3"#];
    let in_order = hashed([tools, functions, documents]);
    let turned = hashed([documents, functions, tools]);
    let reversed: Vec<_> = in_order.blocks.iter().rev().collect();
    assert_eq!(turned.blocks.iter().collect::<Vec<_>>(), reversed);
    assert_ne!(in_order, turned);
}

#[test]
fn deep_values_are_scanned_as_far_as_they_are_parsed() {
    for levels in [63, 64, 65, 125, 126, 127, 128, 1_000] {
        for (begin, end) in [("[", "]"), ("{\"a\":", "}")] {
            for name in ["messages", "other", "model", "user"] {
                let (begin, end) = (begin.repeat(levels), end.repeat(levels));
                let body = format!("{{\"{name}\":{begin}1{end}}}");
                check_both(Api::Chat, body.as_bytes(), false).unwrap();
            }
        }
    }
    let most = format!("{{\"messages\":{}{}}}", "[".repeat(126), "]".repeat(126));
    check_scanned(Api::Chat, &most);
}

fn text() -> impl Strategy<Value = String> {
    prop_oneof![
        "[a-z ]{0,40}",
        "[\\PC\n\t\"\\\\/\u{1}é]{0,12}",
        Just("data:image/png;base64,\"\\".to_owned()),
    ]
}

fn value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        text().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        (0u32..70_000).prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        any::<bool>().prop_map(Value::from),
        Just(Value::Null),
    ];
    leaf.prop_recursive(4, 24, 5, |inner| {
        let names = prop_oneof![
            Just("role".to_owned()),
            Just("content".to_owned()),
            Just("image_url".to_owned()),
            Just("url".to_owned()),
            Just("source".to_owned()),
            Just("cache_control".to_owned()),
            text(),
        ];
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..5).prop_map(Value::from),
            proptest::collection::vec((names, inner), 0..5)
                .prop_map(|members| Value::Object(members.into_iter().collect())),
        ]
    })
}

const NAMES: &[&str] = &[
    "model",
    "messages",
    "prompt",
    "input",
    "tools",
    "instructions",
    "system",
    "metadata",
    "stream",
    "max_tokens",
    "n",
    "user",
    "cache_salt",
    "priority",
    "kv_transfer_params",
    "request_id",
    "vllm_xargs",
    "stream_options",
    "chat_template_kwargs",
    "other",
    "echo",
    "service_tier",
];

fn body() -> impl Strategy<Value = String> {
    let member = (0..NAMES.len(), value(), any::<bool>(), 0..8_u8);
    proptest::collection::vec(member, 0..6).prop_map(|members| {
        let members: Vec<_> = members
            .into_iter()
            .map(|(name, value, is_pretty, odd)| {
                let (first, rest) = NAMES[name].split_at(1);
                let name = match odd {
                    0 => format!("\\u{:04x}{rest}", first.as_bytes()[0]),
                    _ => format!("{first}{rest}"),
                };
                let value = if is_pretty {
                    format!("{value:#}")
                } else {
                    value.to_string()
                };
                // Names within the value too, and half of a pair.
                let value = match odd {
                    1 => value.replace('o', "\\u006f"),
                    2 => value.replace('o', "\\uD83D"),
                    _ => value,
                };
                format!("\"{name}\" :{value}")
            })
            .collect();
        format!("{{{}}}", members.join(", "))
    })
}

fn api() -> impl Strategy<Value = Api> {
    prop_oneof![
        Just(Api::Chat),
        Just(Api::Completions),
        Just(Api::Responses),
        Just(Api::Messages),
        Just(Api::Other),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn the_scanner_finds_what_the_parser_finds(api in api(), body in body(), is_router_made: bool) {
        check_both(api, body.as_bytes(), is_router_made)?;
    }

    #[test]
    fn of_a_changed_body_too(api in api(), body in body(), at: proptest::sample::Index, byte: u8, is_inserted: bool) {
        let mut body = body.into_bytes();
        let at = at.index(body.len());
        if is_inserted {
            body.insert(at, byte);
        } else {
            body[at] = byte;
        }
        check_both(api, &body, false)?;
    }
}

#[test]
fn tokens_in_tokens_out_are_read_like_a_completion_of_ids() {
    let ids: Vec<u32> = (0..300).collect();
    let params = r#"{"max_tokens":7,"n":2,"temperature":0.5}"#;
    let body = |rest: &str| {
        format!(r#"{{"model":"m","token_ids":{ids:?},"sampling_params":{params}{rest}}}"#)
    };
    let text = body("");
    let peek = peek(Api::Generate, text.as_bytes(), 64).unwrap();
    assert_eq!(peek.token_ids.as_ref(), Some(&ids));
    assert_eq!(
        (peek.max_tokens, peek.choices, peek.sampling_params),
        (Some(7), Some(2), Some(params))
    );
    assert!(!peek.prompt.blocks.is_empty());
    // Ids that stand for an image are no key of blocks, and another image is another prompt.
    let image = |hash: &str| {
        let text = body(&format!(
            r#","features":{{"mm_hashes":{{"image":["{hash}"]}}}}"#
        ));
        let peek = super::peek(Api::Generate, text.as_bytes(), 64).unwrap();
        assert_eq!(peek.token_ids, None);
        peek.prompt
    };
    assert_eq!(image("a"), image("a"));
    assert_ne!(image("a"), image("b"));
    let text = body(r#","features":null"#);
    assert_eq!(
        super::peek(Api::Generate, text.as_bytes(), 64)
            .unwrap()
            .token_ids,
        Some(ids.clone())
    );
}

#[test]
fn tokens_in_tokens_out_set_nothing_that_is_the_routers() {
    let check = |members: &str, expected: Result<(), &str>| {
        let body = format!(r#"{{"token_ids":[1],{members}}}"#);
        let found = peek(Api::Generate, body.as_bytes(), 64).map(drop);
        assert_eq!(
            found,
            expected.map_err(|name| Error::Forbidden(Box::leak(name.into()))),
            "{members}"
        );
    };
    check(r#""sampling_params":{"extra_args":{"a":1}}"#, Ok(()));
    check(r#""sampling_params":{"extra_args":null}"#, Ok(()));
    check(
        r#""sampling_params":{"extra_\u0061rgs":{"kv_transfer_params":{}}}"#,
        Err("sampling_params.extra_args.kv_transfer_params"),
    );
    check(r#""kv_transfer_params":{}"#, Err("kv_transfer_params"));
    check(r#""request_id":"a""#, Err("request_id"));
    check(r#""data_parallel_rank":1"#, Err("data_parallel_rank"));
    let odd = peek(Api::Generate, br#"{"sampling_params":"max_tokens"}"#, 64).unwrap();
    assert_eq!(odd.odd_value, Some("sampling_params"));
}
