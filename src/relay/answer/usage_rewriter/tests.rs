use proptest::prelude::*;
use serde_json::{Map, Value, json};

use super::*;
use crate::fleet::kv_transfer::Connector;
use crate::relay::kv_transfer::recorded;

/// What passes of an answer that comes in pieces of these lengths, again and again.
fn passed(answer: &[u8], is_events: bool, cached_tokens: u64, lengths: &[usize]) -> Vec<u8> {
    let mut usage = UsageRewriter::new(cached_tokens, is_events);
    let mut lengths = lengths.iter().cycle();
    let (mut rest, mut out) = (answer, Vec::new());
    while !rest.is_empty() {
        let length = lengths.next().copied().unwrap_or(usize::MAX);
        let (piece, after) = rest.split_at(length.clamp(1, rest.len()));
        out.extend_from_slice(&usage.on_data(Bytes::copy_from_slice(piece)));
        rest = after;
    }
    out
}

fn check(answer: &str, is_events: bool, expected: &str) {
    for lengths in [&[][..], &[1], &[2, 3], &[7]] {
        let found = passed(answer.as_bytes(), is_events, 64, lengths);
        assert_eq!(str::from_utf8(&found).unwrap(), expected, "{lengths:?}");
    }
}

#[test]
fn cached_tokens_are_the_prefill_legs_and_params_do_not_show() {
    check(
        r#"{"usage": {"prompt_tokens":413,"prompt_tokens_details": {"cached_tokens" : 413, "x":[]}},"kv_transfer_params":{"a":["}\"",{}],"b":1},"m":1}"#,
        false,
        r#"{"usage": {"prompt_tokens":413,"prompt_tokens_details": {"cached_tokens" : 64, "x":[]}},"kv_transfer_params":null,"m":1}"#,
    );
    check(
        "event: response.completed\ndata: {\"response\":{\"usage\":{\"input_tokens_details\":{\"cached_tokens\":398}},\"kv_transfer_params\":\"x\\\"y\"},\"n\":9}\n\ndata: [DONE]\n\n",
        true,
        "event: response.completed\ndata: {\"response\":{\"usage\":{\"input_tokens_details\":{\"cached_tokens\":64}},\"kv_transfer_params\":null},\"n\":9}\n\ndata: [DONE]\n\n",
    );
    check(
        "data: {\"kv_transfer_params\":17 }\r\n\r\ndata:{\"usage\":{\"prompt_tokens_details\":{\"cached_tokens\":5}}}\r\n\r\n",
        true,
        "data: {\"kv_transfer_params\":null }\r\n\r\ndata:{\"usage\":{\"prompt_tokens_details\":{\"cached_tokens\":64}}}\r\n\r\n",
    );
}

#[test]
fn usage_of_messages_is_the_prefill_legs() {
    let rewritten = |answer: &'static str, is_events| {
        let mut usage = UsageRewriter::of_messages(413, 64, is_events);
        let out = usage.on_data(Bytes::from_static(answer.as_bytes()));
        String::from_utf8(out.to_vec()).unwrap()
    };
    assert_eq!(
        rewritten(
            r#"{"content":[{"input":{"usage":{"input_tokens":1}}}],"usage":{"input_tokens":1,"output_tokens":4,"cache_creation_input_tokens":7,"cache_read_input_tokens":405},"kv_transfer_params":{"a":1}}"#,
            false
        ),
        r#"{"content":[{"input":{"usage":{"input_tokens":1}}}],"usage":{"input_tokens":349,"output_tokens":4,"cache_creation_input_tokens":0,"cache_read_input_tokens":64},"kv_transfer_params":null}"#
    );
    let end = "event: message_delta\ndata: {\"usage\":{\"cache_read_input_tokens\":413,\"input_tokens\":0}}\n\n";
    let expected = "event: message_delta\ndata: {\"usage\":{\"cache_read_input_tokens\":64,\"input_tokens\":349}}\n\n";
    assert_eq!(rewritten(end, true), expected);
    let start = "event: message_start\ndata: {\"message\":{\"usage\":{\"input_tokens\":413,\"output_tokens\":0}}}\n\n";
    assert_eq!(rewritten(start, true), start);
}

#[test]
fn what_only_looks_like_it_passes() {
    for answer in [
        r#"{"choices":[{"message":{"content":"{\"usage\":{\"prompt_tokens_details\":{\"cached_tokens\":5}},\"kv_transfer_params\":{}}"}}]}"#,
        r#"{"metadata":{"usage":{"prompt_tokens_details":{"cached_tokens":5}},"kv_transfer_params":{"a":1}}}"#,
        r#"{"tools":[{"usage":{"prompt_tokens_details":{"cached_tokens":5}}}],"cached_tokens":5}"#,
        r#"{"usage":{"prompt_tokens_details":{"cached_tokens":null}},"kv_transfer_params":null}"#,
        r#"{"usage":{"prompt_tokens_details":null,"cached_tokens":5}}"#,
        r#"{"usage":{"input_tokens_details":{"cached_tokens_per_turn":[5],"xcached_tokens":5,"\"cached_tokens":5}}}"#,
        r#"[{"usage":{"prompt_tokens_details":{"cached_tokens":5}}}]"#,
        r#"{"a":{"b":{"c":{"d":{"response":{"usage":{"prompt_tokens_details":{"cached_tokens":5}}}}}}}}"#,
    ] {
        check(answer, false, answer);
        let event = format!("data: {answer}\n\n");
        check(&event, true, &event);
        let comment = format!(": {answer}\nid: {answer}\n\n");
        check(&comment, true, &comment);
    }
}

#[test]
fn a_line_that_is_no_json_does_not_lead_the_next_one_astray() {
    let next = "data: {\"kv_transfer_params\":{\"a\":1}}\n\n";
    for bad in [
        "data: {\"a\":\"\n",
        "data: {\"kv_transfer_params\":{\"a\n",
        "data: [[[[[[\n",
        "data\n",
        "data: \\\n",
    ] {
        let hidden = bad.replace("{\"a\n", "null\n");
        check(
            &format!("{bad}{next}"),
            true,
            &format!("{hidden}data: {{\"kv_transfer_params\":null}}\n\n"),
        );
    }
}

#[test]
fn a_piece_with_nothing_to_change_is_not_copied() {
    let mut usage = UsageRewriter::new(3, true);
    for piece in [
        "data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\n",
        "data: {\"response\":{\"kv_transfer_params\":null}}\n\n",
        "data: {\"usage\":{\"prompt_tokens_details\":{\"cached_",
    ] {
        let piece = Bytes::from_static(piece.as_bytes());
        let passed = usage.on_data(piece.clone());
        assert_eq!(
            (passed.as_ptr(), passed.len()),
            (piece.as_ptr(), piece.len())
        );
    }
}

#[test]
fn of_real_answers_only_the_count_changes() {
    let mut counts = 0;
    for connector in Connector::ALL {
        for exchange in recorded(connector) {
            let answer = &exchange.answer;
            let is_events = !answer.starts_with('{');
            let found = passed(answer.as_bytes(), is_events, 77, &[5, 1, 64]);
            let found = str::from_utf8(&found).unwrap();
            let mut expected = String::new();
            let mut rest = &**answer;
            while let Some(at) = rest.find("\"cached_tokens\":") {
                let (before, after) = rest.split_at(at + "\"cached_tokens\":".len());
                expected += &format!("{before}77");
                rest = after.trim_start_matches(|c: char| c.is_ascii_digit());
                counts += 1;
            }
            expected += rest;
            if let Some(at) = expected.find("\"kv_transfer_params\":{") {
                let start = at + "\"kv_transfer_params\":".len();
                let end = start + expected[start..].find('}').unwrap() + 1;
                expected.replace_range(start..end, "null");
            }
            assert_eq!(found, expected, "{}", exchange.name);
        }
    }
    assert_eq!(counts, 38);
}

fn trees() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(json!(null)),
        (0u64..100_000).prop_map(Value::from),
        Just(json!(true)),
        Just(json!(-1.5)),
        "[a\"\\\\{},:é\n]{0,6}".prop_map(Value::from),
    ];
    let key = prop_oneof![
        3 => proptest::sample::select(vec![
            "usage", "response", "kv_transfer_params", "prompt_tokens_details", "input_tokens_details", "cached_tokens",
        ]).prop_map(str::to_owned),
        1 => "[a\"\\\\]{0,30}",
    ];
    leaf.prop_recursive(7, 40, 4, move |inner| {
        prop_oneof![
            1 => proptest::collection::vec(inner.clone(), 0..3).prop_map(Value::from),
            5 => proptest::collection::vec((key.clone(), inner), 0..4)
                .prop_map(|members| Value::Object(members.into_iter().collect::<Map<_, _>>())),
        ]
    })
}

/// The plainest: in a tree.
fn corrected(mut tree: Value, cached_tokens: u64) -> Value {
    let Some(root) = tree.as_object_mut() else {
        return tree;
    };
    correct(root, cached_tokens);
    if let Some(Value::Object(response)) = root.get_mut("response") {
        correct(response, cached_tokens);
    }
    tree
}

fn correct(answer: &mut Map<String, Value>, cached_tokens: u64) {
    if let Some(params) = answer.get_mut("kv_transfer_params") {
        *params = Value::Null;
    }
    let Some(Value::Object(usage)) = answer.get_mut("usage") else {
        return;
    };
    for details in ["prompt_tokens_details", "input_tokens_details"] {
        if let Some(Value::Object(details)) = usage.get_mut(details)
            && let Some(cached) = details.get_mut("cached_tokens")
            && cached.is_u64()
        {
            *cached = cached_tokens.into();
        }
    }
}

proptest! {
    /// Against a tree, over any split: the same bytes but for what is corrected.
    #[test]
    fn any_split_of_an_answer_passes_as_its_tree_says(
        trees in proptest::collection::vec(trees(), 1..4), cached_tokens in 0u64..10_000,
        lengths in proptest::collection::vec(1usize..40, 0..8),
    ) {
        let whole = trees[0].to_string();
        let found = passed(whole.as_bytes(), false, cached_tokens, &lengths);
        prop_assert_eq!(String::from_utf8(found).unwrap(), corrected(trees[0].clone(), cached_tokens).to_string());

        let events: String = trees.iter().map(|tree| format!("event: x\ndata: {tree}\n\n")).collect();
        let expected: String = trees.into_iter()
            .map(|tree| format!("event: x\ndata: {}\n\n", corrected(tree, cached_tokens))).collect();
        let found = passed(events.as_bytes(), true, cached_tokens, &lengths);
        prop_assert_eq!(String::from_utf8(found).unwrap(), expected);
    }

    /// Also of what is no answer at all.
    #[test]
    fn any_split_of_any_bytes_passes_as_the_whole(
        text in "(\\{|\\}|\\[|\\]|,|:|\"usage\"|\"prompt_tokens_details\"|\"cached_tokens\"|\"kv_transfer_params\"|data: |\n|\r|\"|\\\\|1|é){0,40}",
        lengths in proptest::collection::vec(1usize..12, 1..8), is_events in any::<bool>(),
    ) {
        let whole = passed(text.as_bytes(), is_events, 5, &[]);
        prop_assert_eq!(passed(text.as_bytes(), is_events, 5, &lengths), whole);
    }
}
