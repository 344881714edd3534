use proptest::prelude::*;
use serde_json::{Map, Value, json};

use super::*;
use crate::fleet::kv_transfer::BootstrapInfo;

fn transfer(connector: Connector) -> Transfer {
    let info = BootstrapInfo::parse(br#"{"0":{"engine_id":"e"}}"#, "http://p:1");
    let (id, info) = ("xfer-1".to_owned(), info.map(std::sync::Arc::new));
    Transfer::begin(connector, Api::Chat, id, "p", info, None, 0).unwrap()
}

fn legs(api: Api, body: &str) -> Result<Legs, SingleWorkerReason> {
    Legs::of(api, &Bytes::copy_from_slice(body.as_bytes()))
}

fn check(api: Api, connector: Connector, body: &str, prefill: &str, decode: &str) {
    let legs = legs(api, body).unwrap();
    assert_eq!(legs.prefill(&transfer(connector)), prefill);
    assert_eq!(legs.decode(TransferParams(r#""p":1"#.to_owned())), decode);
}

#[test]
fn fields_are_put_first_and_left_out_and_the_rest_is_untouched() {
    const ASK: &str = r#""kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false}"#;
    check(
        Api::Chat,
        Connector::Nixl,
        r#" {"stream" : true , "messages": [ {"role":"user"} ], "stop":["\n"],"max_completion_tokens":7,"a" :1.00 }  "#,
        &format!(
            r#" {{"stream":false,"max_tokens":1,{ASK} , "messages": [ {{"role":"user"}} ],"a" :1.00 }}  "#
        ),
        r#" {"kv_transfer_params":{"p":1},"stream" : true , "messages": [ {"role":"user"} ], "stop":["\n"],"max_completion_tokens":7,"a" :1.00 }  "#,
    );
    check(
        Api::Completions,
        Connector::Nixl,
        r#"{"prompt":[1,2],"min_tokens":3,"max_tokens":5,"stream_options":{"include_usage":true},"stop_token_ids":[7]}"#,
        &format!(r#"{{"stream":false,"max_tokens":1,{ASK},"prompt":[1,2]}}"#),
        r#"{"kv_transfer_params":{"p":1},"prompt":[1,2],"min_tokens":3,"max_tokens":5,"stream_options":{"include_usage":true},"stop_token_ids":[7]}"#,
    );
    check(
        Api::Responses,
        Connector::Nixl,
        r#"{"request_id":"resp_1","store":false,"stream":true,"input":[1],"max_output_tokens":16}"#,
        &format!(
            r#"{{"stream":false,"store":false,"max_output_tokens":1,{ASK},"request_id":"resp_1","input":[1]}}"#
        ),
        r#"{"kv_transfer_params":{"p":1},"request_id":"resp_1","store":false,"stream":true,"input":[1],"max_output_tokens":16}"#,
    );
    check(
        Api::Chat,
        Connector::Mooncake,
        "{ }",
        r#"{"stream":false,"max_tokens":1,"ignore_eos":true,"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,"transfer_id":"xfer-1"} }"#,
        r#"{"kv_transfer_params":{"p":1} }"#,
    );
}

#[test]
fn token_ids_that_the_router_put_in_go_to_both_legs() {
    check(
        Api::Chat,
        Connector::Nixl,
        r#"{"kv_transfer_params":null,"m":1,"kv_transfer_params":{"prompt_token_ids":[7,8]}}"#,
        r#"{"stream":false,"max_tokens":1,"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,"prompt_token_ids":[7,8]},"m":1}"#,
        r#"{"kv_transfer_params":{"p":1,"prompt_token_ids":[7,8]},"m":1}"#,
    );
    check(
        Api::Chat,
        Connector::Nixl,
        r#"{"m":1,"kv_transfer_params":null}"#,
        r#"{"stream":false,"max_tokens":1,"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false},"m":1}"#,
        r#"{"kv_transfer_params":{"p":1},"m":1}"#,
    );
}

#[test]
fn what_cannot_be_split_runs_on_one_worker() {
    let is_split = |api, body: &str| assert!(legs(api, body).is_ok(), "{body}");
    let is_whole = |api, body: &str, why| {
        assert_eq!(legs(api, body).map(|_| ()), Err(why), "{body}");
    };
    use Api::{Chat, Completions, Responses};
    use SingleWorkerReason::{
        Body, Embeds, EngineState, OneToken, PromptOutput, Several, Truncated, Turns,
    };

    is_whole(Api::Embeddings, r#"{"input":"a"}"#, SingleWorkerReason::Api);
    is_whole(Chat, "[]", Body);
    is_whole(Chat, r#"{"n":1}{"#, Body);
    is_whole(Chat, "{\"a\":\"\u{1}\"}", Body);

    is_split(Chat, r#"{"n":1,"best_of":null,"n":null}"#);
    is_split(Chat, r#"{"use_beam_search":false}"#);
    is_whole(Chat, r#"{"n":2}"#, Several);
    is_whole(Chat, r#"{"\u006e":2}"#, Several);
    is_whole(Completions, r#"{"best_of":3}"#, Several);
    is_whole(Chat, r#"{"use_beam_search":true}"#, Several);
    let prompt = |json: &str| format!(r#"{{"prompt":{json}}}"#);
    for one in [r#""a""#, "[1,2]", "[ 1]", r#"["a"]"#, "[[1,2]]"] {
        is_split(Completions, &prompt(one));
    }
    is_split(Completions, &prompt(r#" [ "a\",\"b" ]"#));
    for several in [r#"["a","b"]"#, "[[1],[2]]", r#"[ [1] , "b"]"#] {
        is_whole(Completions, &prompt(several), Several);
    }
    for none in ["[]", "null", "7", "{}"] {
        is_whole(Completions, &prompt(none), Body);
    }

    is_whole(Completions, r#"{"echo":true}"#, PromptOutput);
    is_whole(Chat, r#"{"prompt_logprobs":0}"#, PromptOutput);
    is_split(Chat, r#"{"echo":false,"prompt_logprobs":null}"#);
    is_split(Chat, r#"{"logprobs":true}"#);

    is_whole(Chat, r#"{"max_tokens":1}"#, OneToken);
    let tokens = |older: &str, newer: &str| {
        format!(r#"{{"max_tokens":{older},"max_completion_tokens":{newer}}}"#)
    };
    is_whole(Chat, &tokens("9", "1"), OneToken);
    is_split(Chat, &tokens("1", "9"));
    is_split(Chat, &tokens("null", "null"));
    is_whole(Completions, r#"{"max_tokens":0}"#, OneToken);
    is_whole(Responses, r#"{"max_output_tokens":1}"#, OneToken);
    is_whole(Chat, r#"{"max_tokens":"many"}"#, Body);
    is_whole(Chat, r#"{"stream":"yes"}"#, Body);

    is_whole(Chat, r#"{"truncate_prompt_tokens":-1}"#, Truncated);
    is_whole(Responses, r#"{"truncation":"auto"}"#, Truncated);
    is_whole(Responses, r#"{"truncation":null}"#, Truncated);
    is_split(Responses, r#"{"truncation":"disabled"}"#);

    let tools = |tools: &str| format!(r#"{{"tools":[{{"type":"function","name":"f"}},{tools}]}}"#);
    is_whole(Responses, &tools(r#"{"type":"mcp"}"#), Turns);
    is_whole(Responses, r#"{"tools":[{"name":"f"}]}"#, Body);
    is_split(Responses, &tools(r#"{"name":"g","type":"custom"}"#));
    is_split(
        Responses,
        &tools(r#"{"type":"namespace","name":"n","tools":[]}"#),
    );
    is_split(Responses, r#"{"tools":null}"#);
    is_split(Chat, r#"{"tools":[{"type":"function"}]}"#);

    is_whole(Responses, r#"{"background":true}"#, EngineState);
    is_whole(Responses, r#"{"previous_response_id":"r"}"#, EngineState);
    is_whole(Completions, r#"{"prompt":"a","prompt_embeds":""}"#, Embeds);
}

proptest! {
    /// Against a tree: both legs are the object that it would be with these fields set.
    #[test]
    fn legs_are_what_setting_fields_in_a_tree_would_make(
        fields in proptest::collection::vec((0usize..14, any::<bool>()), 0..10), blanks in any::<u64>(),
    ) {
        let all: [(&str, Value); 14] = [
            ("messages", json!([{"role": "user", "content": "a,b}\"{"}])), ("stream", json!(true)), ("stop", json!("x")),
            ("max_tokens", json!(9)), ("max_completion_tokens", json!(null)), ("min_tokens", json!(2)), ("n", json!(1)),
            ("stream_options", json!({"include_usage": true})), ("temperature", json!(0.5)), ("tools", json!([])),
            ("kv_transfer_params", json!({"prompt_token_ids": [1, 2]})), ("seed", json!(7)), ("ignore_eos", json!(false)),
            ("model", json!("m")),
        ];
        let mut tree = Map::new();
        let mut body = String::from("{");
        for (at, (field, is_null)) in fields.iter().enumerate() {
            let (name, value) = &all[*field];
            if tree.contains_key(*name) {
                continue;
            }
            let value = if *is_null && *name != "messages" { Value::Null } else { value.clone() };
            let blank = |bit: usize| if blanks.rotate_left((at * 4 + bit) as u32) & 1 == 1 { " \n" } else { "" };
            let comma = if tree.is_empty() { "" } else { "," };
            body += &format!("{}{comma}{}\"{name}\"{}:{}{value}", blank(0), blank(1), blank(2), blank(3));
            tree.insert((*name).to_owned(), value);
        }
        body.push('}');
        let legs = legs(Api::Chat, &body).unwrap();

        let own = tree.shift_remove("kv_transfer_params").unwrap_or_default();
        let with_own = |mut params: Value| {
            if let Some(ids) = own.get("prompt_token_ids") {
                params["prompt_token_ids"] = ids.clone();
            }
            params
        };
        let mut decode = tree.clone();
        decode.insert("kv_transfer_params".to_owned(), with_own(json!({"p": 1})));
        let sent = legs.decode(TransferParams(r#""p":1"#.to_owned()));
        prop_assert_eq!(serde_json::from_slice::<Value>(&sent).unwrap(), Value::Object(decode));

        let mut prefill = tree;
        for name in ["stop", "max_completion_tokens", "min_tokens", "stream_options", "ignore_eos"] {
            prefill.shift_remove(name);
        }
        prefill.insert("stream".to_owned(), json!(false));
        prefill.insert("max_tokens".to_owned(), json!(1));
        let asks = json!({"do_remote_decode": true, "do_remote_prefill": false});
        prefill.insert("kv_transfer_params".to_owned(), with_own(asks));
        let sent = legs.prefill(&transfer(Connector::Nixl));
        prop_assert_eq!(serde_json::from_slice::<Value>(&sent).unwrap(), Value::Object(prefill));
    }

    #[test]
    fn no_body_makes_it_panic(body in "(\\{|\\}|\\[|\\]|,|:|\"kv_transfer_params\"|\"max_tokens\"|\"prompt\"|\"tools\"|null|1| |\"é\"){0,16}") {
        for api in Api::ALL {
            if let Ok(legs) = legs(api, &body) {
                let prefill = legs.prefill(&transfer(Connector::Mooncake));
                prop_assert!(serde_json::from_slice::<Value>(&prefill).is_ok());
            }
        }
    }
}
