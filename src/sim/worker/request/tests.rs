use super::*;

fn context(models: &[String]) -> Context<'_> {
    Context {
        models,
        is_chat_only: false,
        max_context_tokens: 1000,
        now: 5,
        request_id: None,
        session_id: None,
        random_id: "abc".to_owned(),
    }
}

fn read(api: Api, body: &str) -> Result<GenerationRequest, ApiError> {
    let models = ["sim".to_owned(), "adapter".to_owned()];
    GenerationRequest::read(api, body.as_bytes(), context(&models))
}

fn message_of(result: Result<GenerationRequest, ApiError>) -> String {
    result.unwrap_err().body()
}

#[test]
fn text_parts_and_plain_text_give_the_same_prompt() {
    let plain = r#"{"messages":[{"role":"user","content":"hello"}]}"#;
    let parts = r#"{"messages":[{"role":"user","content":[{"type":"text","text":"hello"}]}],"temperature":1}"#;
    let item = r#"{"input":"hello"}"#;
    let plain = read(Api::Chat, plain).unwrap();
    assert_eq!(read(Api::Chat, parts).unwrap().prompts, plain.prompts);
    assert_eq!(read(Api::Responses, item).unwrap().prompts, plain.prompts);
}

#[test]
fn a_completion_takes_text_tokens_and_lists_of_both() {
    let prompts = |body: &str| read(Api::Completions, body).unwrap().prompts;
    assert_eq!(prompts(r#"{"prompt":[1,2,3]}"#), [[1, 2, 3]]);
    assert_eq!(prompts(r#"{"prompt":[[1],[2]]}"#), [[1], [2]]);
    assert_eq!(prompts(r#"{"prompt":"abcdefgh"}"#)[0].len(), 2);
    assert_eq!(prompts(r#"{"prompt":["abcd","efgh"]}"#).len(), 2);
}

#[test]
fn the_name_of_the_limit_depends_on_the_api() {
    let tokens = |api, body: &str| read(api, body).unwrap().answer_tokens;
    let chat =
        r#"{"messages":[{"role":"user","content":"x"}],"max_tokens":3,"max_completion_tokens":4}"#;
    assert_eq!(tokens(Api::Chat, chat), 4);
    let completion = r#"{"prompt":"x","max_tokens":5}"#;
    assert_eq!(tokens(Api::Completions, completion), 5);
    let responses = r#"{"input":"x","max_output_tokens":6}"#;
    assert_eq!(tokens(Api::Responses, responses), 6);
    assert_eq!(tokens(Api::Responses, r#"{"input":"x"}"#), 16);
}

#[test]
fn tokens_sent_along_replace_the_rendered_prompt() {
    let body = r#"{"messages":[{"role":"user","content":"x"}],"kv_transfer_params":{"prompt_token_ids":[7,8]}}"#;
    assert_eq!(read(Api::Chat, body).unwrap().prompts, [[7, 8]]);
}

#[test]
fn an_id_comes_from_the_request_or_is_random() {
    let chat = r#"{"messages":[{"role":"user","content":"x"}],"request_id":"mine"}"#;
    assert_eq!(read(Api::Chat, chat).unwrap().id, "chatcmpl-mine");
    let completion = r#"{"prompt":"x"}"#;
    assert_eq!(read(Api::Completions, completion).unwrap().id, "cmpl-abc");
    let responses = r#"{"input":"x","request_id":"a b/c"}"#;
    assert_eq!(read(Api::Responses, responses).unwrap().id, "a b/c");
    assert_eq!(
        read(Api::Responses, r#"{"input":"x"}"#).unwrap().id,
        "resp_abc"
    );
}

#[test]
fn salts_and_adapters_keep_blocks_apart() {
    let salt = |body: &str| read(Api::Completions, body).unwrap().salt;
    assert_eq!(salt(r#"{"prompt":"x","model":"sim"}"#), 0);
    assert_ne!(salt(r#"{"prompt":"x","model":"adapter"}"#), 0);
    assert_ne!(salt(r#"{"prompt":"x","cache_salt":"tenant"}"#), 0);
}

#[test]
fn invalid_requests_are_rejected_with_the_reason() {
    let cases = [
        (Api::Chat, r#"{"model":"sim""#, "JSON decode error"),
        (Api::Chat, r#"{"model":"sim"}"#, "body.messages"),
        (Api::Chat, r#"{"messages":[]}"#, "empty conversation"),
        (Api::Chat, r#"{"messages":7}"#, "invalid type"),
        (Api::Completions, r#"{"prompt":""}"#, "cannot be empty"),
        (
            Api::Completions,
            r#"{"prompt":"x","max_tokens":0}"#,
            "at least 1",
        ),
        (
            Api::Completions,
            r#"{"prompt":"x","max_tokens":1001}"#,
            "max_model_len=1000",
        ),
        (
            Api::Completions,
            r#"{"prompt":"x","model":"nope"}"#,
            "Valid aliases: sim, adapter.",
        ),
        (Api::Responses, r#"{"input":[]}"#, "empty conversation"),
        (
            Api::Responses,
            r#"{"input":"x","previous_response_id":"resp_1"}"#,
            "'resp_1' not found",
        ),
        (
            Api::Responses,
            r#"{"input":[{"type":"reasoning","summary":[],"encrypted_content":"x"}]}"#,
            "Encrypted content is not supported",
        ),
        (
            Api::Responses,
            r#"{"input":[{"type":"item_reference","id":"msg_1"}]}"#,
            "Unsupported input item type: item_reference",
        ),
    ];
    for (api, body, expected) in cases {
        let message = message_of(read(api, body));
        assert!(message.contains(expected), "{body}: {message}");
    }
    let long = format!(r#"{{"prompt":"{}"}}"#, "x".repeat(4000));
    let message = message_of(read(Api::Completions, &long));
    assert!(message.contains("1000 input tokens"), "{message}");
}

#[test]
fn more_answers_or_probabilities_than_engines_give_are_refused() {
    let chat = |members: &str| {
        let body = format!(r#"{{"messages":[{{"role":"user","content":"x"}}],{members}}}"#);
        read(Api::Chat, &body)
    };
    assert_eq!(
        chat(r#""n":2,"logprobs":true,"top_logprobs":20"#)
            .unwrap()
            .choices,
        2
    );
    for members in [
        r#""n":0"#,
        r#""n":129"#,
        r#""logprobs":true,"top_logprobs":21"#,
    ] {
        assert!(message_of(chat(members)).contains("must be"), "{members}");
    }
    let completion = read(Api::Completions, r#"{"prompt":"x","logprobs":4000000000}"#);
    assert!(message_of(completion).contains("at most 20"));
}
