//! Answers byte for byte as a real server wrote them, but for the generated words.

use serde_json::Value;

use super::*;
use crate::sim::engine::Event;
use crate::sim::worker::request::output::{Call, JsonFrame, Output};
use crate::sim::worker::request::{Context, EchoedFields, GenerationRequest, UsageReport};

const WORDS: [&str; 2] = ["ash ", "bay "];

fn request(api: Api, id: &str) -> GenerationRequest {
    GenerationRequest {
        api,
        id: id.to_owned(),
        created: 1795196868,
        model: "tiny".to_owned(),
        prompts: vec![vec![7; 33]],
        choices: 1,
        logprobs: None,
        answer_tokens: WORDS.len(),
        salt: 0,
        label: None,
        ignores_eos: false,
        stream: true,
        returns_token_ids: false,
        usage: UsageReport::Never,
        echoed: EchoedFields {
            temperature: Some(0.0),
            ..EchoedFields::default()
        },
        output: Output::default(),
    }
}

/// Generates the words and returns everything that a stream would send.
fn generate(request: GenerationRequest) -> (Generation, Vec<String>) {
    let mut generation = Generation::new(request, 32);
    let mut sent = generation.opening();
    for (place, word) in WORDS.into_iter().enumerate() {
        let token = tokenizer::encode(word)[0];
        let cached_tokens = 32;
        let event = match place {
            0 => Event::First {
                token,
                cached_tokens,
            },
            _ => Event::Token { token },
        };
        generation.on_event(0, event);
        sent.push(generation.token(0, token));
    }
    generation.on_event(0, Event::Done { cached_tokens: 32 });
    assert!(generation.is_complete());
    sent.extend(generation.closing());
    (generation, sent)
}

#[test]
fn a_whole_chat_answer() {
    let (generation, _) = generate(request(Api::Chat, "chatcmpl-my-req-2"));
    let expected = r#"{"id":"chatcmpl-my-req-2","object":"chat.completion","created":1795196868,"model":"tiny","choices":[{"index":0,"message":{"role":"assistant","content":"ash bay ","refusal":null,"annotations":null,"audio":null,"function_call":null,"reasoning":null},"logprobs":null,"finish_reason":"length","stop_reason":null,"token_ids":null,"routed_experts":null}],"service_tier":null,"system_fingerprint":"vllm-0.32.0-sim","usage":{"prompt_tokens":33,"total_tokens":35,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":32,"created_cache_tokens":0,"multimodal_tokens":null},"completion_tokens_details":null},"prompt_logprobs":null,"prompt_token_ids":null,"prompt_text":null,"kv_transfer_params":null,"ec_transfer_params":null,"metrics":null}"#;
    assert_eq!(generation.whole(), expected);
}

#[test]
fn a_streamed_chat_answer() {
    let (_, sent) = generate(request(Api::Chat, "chatcmpl-8c92e6ab9a3c8431"));
    let expected = [
        r#"data: {"id":"chatcmpl-8c92e6ab9a3c8431","object":"chat.completion.chunk","created":1795196868,"model":"tiny","choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],"prompt_token_ids":null,"prompt_text":null}"#,
        r#"data: {"id":"chatcmpl-8c92e6ab9a3c8431","object":"chat.completion.chunk","created":1795196868,"model":"tiny","choices":[{"index":0,"delta":{"content":"ash "},"logprobs":null,"finish_reason":null,"token_ids":null}]}"#,
        r#"data: {"id":"chatcmpl-8c92e6ab9a3c8431","object":"chat.completion.chunk","created":1795196868,"model":"tiny","choices":[{"index":0,"delta":{"content":"bay "},"logprobs":null,"finish_reason":"length","stop_reason":null,"token_ids":null}],"system_fingerprint":"vllm-0.32.0-sim"}"#,
        "data: [DONE]",
    ];
    assert_eq!(sent, expected.map(|event| format!("{event}\n\n")));
}

#[test]
fn a_streamed_chat_answer_with_usage_in_every_event() {
    let mut request = request(Api::Chat, "chatcmpl-1");
    request.usage = UsageReport::Always;
    let (_, sent) = generate(request);
    let expected = [
        r#"data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1795196868,"model":"tiny","choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],"usage":{"prompt_tokens":33,"total_tokens":33,"completion_tokens":0,"completion_tokens_details":null},"prompt_token_ids":null,"prompt_text":null}"#,
        r#"data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1795196868,"model":"tiny","choices":[{"index":0,"delta":{"content":"ash "},"logprobs":null,"finish_reason":null,"token_ids":null}],"usage":{"prompt_tokens":33,"total_tokens":34,"completion_tokens":1,"completion_tokens_details":null}}"#,
        r#"data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1795196868,"model":"tiny","choices":[{"index":0,"delta":{"content":"bay "},"logprobs":null,"finish_reason":"length","stop_reason":null,"token_ids":null}],"usage":{"prompt_tokens":33,"total_tokens":35,"completion_tokens":2,"completion_tokens_details":null}}"#,
        r#"data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1795196868,"model":"tiny","choices":[],"usage":{"prompt_tokens":33,"total_tokens":35,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":32,"created_cache_tokens":0}},"system_fingerprint":"vllm-0.32.0-sim"}"#,
        "data: [DONE]",
    ];
    assert_eq!(sent, expected.map(|event| format!("{event}\n\n")));
}

#[test]
fn a_completion_whole_and_streamed() {
    let mut request = request(Api::Completions, "cmpl-my-req-1");
    request.usage = UsageReport::AtTheEnd;
    request.prompts = vec![vec![7; 2]];
    let (generation, sent) = generate(request);
    let whole = r#"{"id":"cmpl-my-req-1","object":"text_completion","created":1795196868,"model":"tiny","choices":[{"index":0,"text":"ash bay ","logprobs":null,"finish_reason":"length","stop_reason":null,"token_ids":null,"prompt_logprobs":null,"prompt_token_ids":null,"routed_experts":null}],"service_tier":null,"system_fingerprint":"vllm-0.32.0-sim","usage":{"prompt_tokens":2,"total_tokens":4,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":32,"created_cache_tokens":null,"multimodal_tokens":null},"completion_tokens_details":null},"kv_transfer_params":null,"ec_transfer_params":null,"metrics":null}"#;
    assert_eq!(generation.whole(), whole);
    let expected = [
        r#"data: {"id":"cmpl-my-req-1","object":"text_completion","created":1795196868,"model":"tiny","choices":[{"index":0,"text":"ash ","logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":null,"token_ids":null}]}"#,
        r#"data: {"id":"cmpl-my-req-1","object":"text_completion","created":1795196868,"model":"tiny","choices":[{"index":0,"text":"bay ","logprobs":null,"finish_reason":"length","stop_reason":null,"prompt_token_ids":null,"token_ids":null}]}"#,
        r#"data: {"id":"cmpl-my-req-1","object":"text_completion","created":1795196868,"model":"tiny","choices":[],"usage":{"prompt_tokens":2,"total_tokens":4,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":32}},"system_fingerprint":"vllm-0.32.0-sim"}"#,
        "data: [DONE]",
    ];
    assert_eq!(sent, expected.map(|event| format!("{event}\n\n")));
}

#[test]
fn a_response_streamed() {
    let (generation, sent) = generate(request(Api::Responses, "resp_1"));
    let open = r#"{"id":"resp_1","created_at":1795196868,"incomplete_details":null,"instructions":null,"metadata":null,"model":"tiny","object":"response","output":[],"parallel_tool_calls":true,"temperature":0.0,"tool_choice":"none","tools":[],"top_p":1.0,"background":false,"max_output_tokens":2,"max_tool_calls":null,"previous_response_id":null,"prompt":null,"reasoning":null,"service_tier":"auto","status":"in_progress","text":null,"top_logprobs":null,"truncation":"disabled","usage":null,"user":null,"presence_penalty":0.0,"frequency_penalty":0.0,"kv_transfer_params":null,"ec_transfer_params":null,"input_messages":null,"output_messages":null}"#;
    let item = generation.whole();
    let item = &item[item.find("msg_").unwrap()..][..20];
    let done = format!(
        r#"{{"id":"resp_1","created_at":1795196868,"incomplete_details":{{"reason":"max_output_tokens"}},"instructions":null,"metadata":null,"model":"tiny","object":"response","output":[{{"id":"{item}","content":[{{"annotations":[],"text":"ash bay ","type":"output_text","logprobs":null}}],"role":"assistant","status":"completed","type":"message","phase":null}}],"parallel_tool_calls":true,"temperature":0.0,"tool_choice":"none","tools":[],"top_p":1.0,"background":false,"max_output_tokens":2,"max_tool_calls":null,"previous_response_id":null,"prompt":null,"reasoning":null,"service_tier":"auto","status":"incomplete","text":null,"top_logprobs":null,"truncation":"disabled","usage":{{"input_tokens":33,"input_tokens_details":{{"cached_tokens":32,"cache_write_tokens":0,"input_tokens_per_turn":[],"cached_tokens_per_turn":[]}},"output_tokens":2,"output_tokens_details":{{"reasoning_tokens":0,"tool_output_tokens":0,"output_tokens_per_turn":[],"tool_output_tokens_per_turn":[]}},"total_tokens":35}},"user":null,"presence_penalty":0.0,"frequency_penalty":0.0,"kv_transfer_params":null,"ec_transfer_params":null,"input_messages":null,"output_messages":null}}"#
    );
    assert_eq!(generation.whole(), done);
    let expected = [
        format!(r#"{{"response":{open},"sequence_number":0,"type":"response.created"}}"#),
        format!(r#"{{"response":{open},"sequence_number":1,"type":"response.in_progress"}}"#),
        format!(
            r#"{{"item":{{"id":"{item}","content":[],"role":"assistant","status":"in_progress","type":"message","phase":null}},"output_index":0,"sequence_number":2,"type":"response.output_item.added"}}"#
        ),
        format!(
            r#"{{"content_index":0,"item_id":"{item}","output_index":0,"part":{{"annotations":[],"text":"","type":"output_text","logprobs":[]}},"sequence_number":3,"type":"response.content_part.added"}}"#
        ),
        format!(
            r#"{{"content_index":0,"delta":"ash ","item_id":"{item}","logprobs":[],"output_index":0,"sequence_number":4,"type":"response.output_text.delta"}}"#
        ),
        format!(
            r#"{{"content_index":0,"delta":"bay ","item_id":"{item}","logprobs":[],"output_index":0,"sequence_number":5,"type":"response.output_text.delta"}}"#
        ),
        format!(
            r#"{{"content_index":0,"item_id":"{item}","logprobs":[],"output_index":0,"sequence_number":6,"text":"ash bay ","type":"response.output_text.done"}}"#
        ),
        format!(
            r#"{{"content_index":0,"item_id":"{item}","output_index":0,"part":{{"annotations":[],"text":"ash bay ","type":"output_text","logprobs":null}},"sequence_number":7,"type":"response.content_part.done"}}"#
        ),
        format!(
            r#"{{"item":{{"id":"{item}","content":[{{"annotations":[],"text":"ash bay ","type":"output_text","logprobs":null}}],"role":"assistant","status":"completed","type":"message","phase":null}},"output_index":0,"sequence_number":8,"type":"response.output_item.done"}}"#
        ),
        format!(r#"{{"response":{done},"sequence_number":9,"type":"response.completed"}}"#),
    ];
    let expected = expected.map(|data| {
        let kind = data[data.rfind("\"type\":\"").unwrap() + 8..].trim_end_matches("\"}");
        format!("event: {kind}\ndata: {data}\n\n")
    });
    assert_eq!(sent.concat(), expected.concat());
}

/// The type of each event, and what it adds if it adds something.
fn events_of(sent: &[String]) -> Vec<(String, String)> {
    let events = sent.iter().flat_map(|chunk| chunk.split_terminator("\n\n"));
    let events_of = events.enumerate().map(|(number, event)| {
        let (_, data) = event.split_once("data: ").unwrap();
        let data: serde_json::Value = serde_json::from_str(data).unwrap();
        assert_eq!(data["sequence_number"], number, "{data}");
        let of = |name: &str| data[name].as_str().unwrap_or_default().to_owned();
        let kind = of("type");
        (kind.trim_start_matches("response.").to_owned(), of("delta"))
    });
    events_of.collect()
}

#[test]
fn a_response_that_thinks_and_then_calls_a_function() {
    let call = Call {
        name: "weather".to_owned(),
        arguments: JsonFrame {
            head: r#"{"city":""#.to_owned(),
            tail: r#""}"#.to_owned(),
            has_words: true,
        },
    };
    let (generation, sent) = generate(GenerationRequest {
        output: Output {
            has_reasoning: true,
            call: Some(call),
            format: None,
            has_no_token_limit: true,
        },
        ..request(Api::Responses, "resp_1")
    });
    let expected = [
        ("created", ""),
        ("in_progress", ""),
        ("output_item.added", ""),
        ("content_part.added", ""),
        ("reasoning_text.delta", "ash "),
        ("reasoning_text.done", ""),
        ("content_part.done", ""),
        ("output_item.done", ""),
        ("output_item.added", ""),
        ("function_call_arguments.delta", r#"{"city":"bay "#),
        ("function_call_arguments.delta", r#""}"#),
        ("function_call_arguments.done", ""),
        ("output_item.done", ""),
        ("completed", ""),
    ];
    let events_of = events_of(&sent);
    let events_of: Vec<(&str, &str)> = events_of
        .iter()
        .map(|(kind, delta)| (&**kind, &**delta))
        .collect();
    assert_eq!(events_of, expected);
    let whole: serde_json::Value = serde_json::from_str(&generation.whole()).unwrap();
    assert_eq!(whole["status"], "completed");
    assert_eq!(whole["incomplete_details"], serde_json::Value::Null);
    assert_eq!(whole["output"][0]["content"][0]["text"], "ash ");
    assert_eq!(whole["output"][1]["type"], "function_call");
    assert_eq!(whole["output"][1]["arguments"], r#"{"city":"bay "}"#);
    assert_eq!(
        whole["usage"]["output_tokens_details"]["reasoning_tokens"],
        1
    );
    assert!(sent.last().unwrap().contains(&generation.whole()));
}

#[test]
fn a_response_that_fits_a_schema() {
    let format = JsonFrame {
        head: r#"{"days":1,"city":""#.to_owned(),
        tail: r#""}"#.to_owned(),
        has_words: true,
    };
    let (generation, sent) = generate(GenerationRequest {
        output: Output {
            format: Some(format),
            ..Output::default()
        },
        ..request(Api::Responses, "resp_1")
    });
    let deltas: String = events_of(&sent)
        .into_iter()
        .map(|(_, delta)| delta)
        .collect();
    assert_eq!(deltas, r#"{"days":1,"city":"ash bay "}"#);
    let whole: serde_json::Value = serde_json::from_str(&generation.whole()).unwrap();
    assert_eq!(whole["output"][0]["content"][0]["text"], deltas);
}

/// The whole answer and the chunks of the stream of a chat with these members, with two words an answer.
fn chat(members: &str) -> (Value, Vec<Value>) {
    let models = ["tiny".to_owned()];
    let context = Context {
        models: &models,
        is_chat_only: false,
        max_context_tokens: 1_000,
        now: 1795196868,
        request_id: None,
        session_id: None,
        random_id: "1".to_owned(),
    };
    let body = format!(
        r#"{{"messages":[{{"role":"user","content":"hi"}}],"stream":true,"max_tokens":2{members}}}"#
    );
    let request = GenerationRequest::read(Api::Chat, body.as_bytes(), context).unwrap();
    let choices = request.choices;
    let mut generation = Generation::new(request, 32);
    let mut sent = generation.opening();
    for (place, word) in WORDS.into_iter().enumerate() {
        for index in 0..choices {
            let token = tokenizer::encode(word)[0];
            let event = match place {
                0 => Event::First {
                    token,
                    cached_tokens: 0,
                },
                _ => Event::Token { token },
            };
            generation.on_event(index, event);
            sent.push(generation.token(index, token));
        }
    }
    let chunk = |event: &String| {
        let data = event.strip_prefix("data: ").unwrap();
        serde_json::from_str(data).unwrap()
    };
    let whole = serde_json::from_str(&generation.whole()).unwrap();
    (whole, sent.iter().map(chunk).collect())
}

#[test]
fn a_chat_that_needs_a_function_calls_it_whole_and_streamed() {
    let function = r#"{"name":"weather","parameters":{"type":"object","properties":{"city":{"type":"string"},"days":{"type":"integer"}}}}"#;
    let (whole, chunks) = chat(&format!(
        r#","tools":[{{"type":"function","function":{function}}}],"tool_choice":"required""#
    ));
    let choice = &whole["choices"][0];
    assert_eq!(choice["finish_reason"], "tool_calls");
    assert_eq!(choice["message"]["content"], Value::Null);
    let call = &choice["message"]["tool_calls"][0];
    assert_eq!(call["function"]["name"], "weather");
    let arguments = r#"{"days":1,"city":"ash bay "}"#;
    assert_eq!(call["function"]["arguments"], arguments);
    let deltas: Vec<&Value> = chunks
        .iter()
        .map(|chunk| &chunk["choices"][0]["delta"]["tool_calls"][0])
        .collect();
    assert_eq!(deltas[1]["id"], call["id"]);
    let streamed = deltas
        .iter()
        .filter_map(|delta| delta["function"]["arguments"].as_str());
    assert_eq!(streamed.collect::<String>(), arguments);
    assert_eq!(chunks[2]["choices"][0]["finish_reason"], "tool_calls");
}

#[test]
fn a_chat_with_a_schema_is_json_whole_and_streamed() {
    let schema = r#"{"type":"object","properties":{"name":{"type":"string"}}}"#;
    let (whole, chunks) = chat(&format!(
        r#","response_format":{{"type":"json_schema","json_schema":{{"name":"x","schema":{schema}}}}}"#
    ));
    let expected = r#"{"name":"ash bay "}"#;
    assert_eq!(whole["choices"][0]["message"]["content"], expected);
    assert_eq!(whole["choices"][0]["finish_reason"], "stop");
    let streamed = chunks
        .iter()
        .filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str());
    assert_eq!(streamed.collect::<String>(), expected);
}

#[test]
fn a_chat_has_as_many_answers_as_it_asks_for_and_its_prompt_counts_once() {
    let (whole, chunks) = chat(r#","n":3"#);
    let contents: Vec<&Value> = (0..3)
        .map(|index| &whole["choices"][index]["message"]["content"])
        .collect();
    assert_eq!(contents, ["ash bay "; 3]);
    assert_eq!(whole["usage"]["completion_tokens"], 6);
    let (one, _) = chat("");
    assert_eq!(
        whole["usage"]["prompt_tokens"],
        one["usage"]["prompt_tokens"]
    );
    let ended = chunks
        .iter()
        .filter(|chunk| chunk["choices"][0]["finish_reason"] == "length");
    let ended: Vec<u64> = ended
        .map(|chunk| chunk["choices"][0]["index"].as_u64().unwrap())
        .collect();
    assert_eq!(ended, [0, 1, 2]);
}

#[test]
fn a_chat_has_the_probabilities_that_it_asks_for() {
    let (whole, chunks) = chat(r#","logprobs":true,"top_logprobs":2"#);
    let content = &whole["choices"][0]["logprobs"]["content"];
    assert_eq!(
        (&content[0]["token"], &content[1]["token"]),
        (&WORDS[0].into(), &WORDS[1].into())
    );
    assert_eq!(content[0]["top_logprobs"].as_array().unwrap().len(), 2);
    assert_eq!(content[0]["bytes"], serde_json::json!(WORDS[0].as_bytes()));
    assert_eq!(
        &chunks[1]["choices"][0]["logprobs"]["content"][0],
        &content[0]
    );
    assert_eq!(chat("").0["choices"][0]["logprobs"], Value::Null);
}
