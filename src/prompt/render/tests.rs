mod corpus;
mod expressions;

use std::path::Path;

use super::chat_message::{PlainContent, PlainMessage};
use super::kwargs::Kwargs;
use super::*;

const CHATML: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}\
                      {{ m.content }}{% else %}{% for p in m.content %}{{ p.text if p.type == 'text' \
                      else '<|image|>' }}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}\
                      {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
/// Prints everything that a template gets.
const ECHO: &str = "{{ messages | tojson }}{{ tools | tojson }}{{ documents | tojson }}";

fn renderer(source: &str) -> Renderer {
    renderer_with(source, Map::new())
}

fn renderer_with(source: &str, special_tokens: Map<String, Value>) -> Renderer {
    let templates = Templates {
        plain: Some(Template::new(source).unwrap()),
        with_tools: None,
    };
    Renderer::new(templates, special_tokens, Options::default())
}

/// Arguments of a request that sets these.
fn arguments(renderer: &Renderer, given: Map<String, Value>) -> Arguments<'_> {
    Arguments {
        engine: &renderer.options.chat_template_kwargs,
        tools: None,
        request: Kwargs::new(Some(given)),
    }
}

fn text(source: &str, api: Api, body: &Value) -> Result<RenderedText, TokenizeError> {
    let prompt = renderer(source).render(api, body.to_string().as_bytes(), 0)?;
    match prompt {
        RenderedPrompt::Text(text) => Ok(text),
        RenderedPrompt::Ids(ids) => panic!("ids: {ids:?}"),
    }
}

#[track_caller]
fn check(source: &str, api: Api, body: Value, expected: &str) {
    assert_eq!(
        text(source, api, &body)
            .map(|rendered| rendered.text)
            .as_deref(),
        Ok(expected)
    );
}

/// Checks the messages and tools that a template gets if contents are texts.
#[track_caller]
fn check_seen(api: Api, body: Value, messages: Value, tools: Value) {
    let expected = format!("{}{}null", python(&messages), python(&tools));
    check(ECHO, api, body, &expected);
}

/// JSON with the spaces that Python puts.
fn python(value: &Value) -> String {
    let template = Template::new("{{ x | tojson }}").unwrap();
    template
        .render(minijinja::Value::from_pairs([("x", to_jinja(value))]))
        .unwrap()
}

macro_rules! json {
    ($($json:tt)+) => { serde_json::json!($($json)+) };
}

#[test]
fn templates_render_like_transformers() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/templates");
    let vectors = std::fs::read(folder.join("vectors.json")).unwrap();
    let vectors: Value = serde_json::from_slice(&vectors).unwrap();
    let mut wrong = Vec::new();
    for (name, expected) in vectors["templates"].as_object().unwrap() {
        let source = std::fs::read_to_string(folder.join(format!("{name}.jinja"))).unwrap();
        let special_tokens = vectors["special"].as_object().unwrap().clone();
        let renderer = renderer_with(&source, special_tokens);
        let template = renderer.templates.plain.as_ref().unwrap();
        let format = serde_json::to_value(template.format).unwrap();
        assert_eq!(format, expected["format"], "{name}");
        for (case, expected) in expected["rendered"].as_object().unwrap() {
            let now_s = vectors["now_s"].as_i64();
            let found = reference(&renderer, &vectors["cases"][case], now_s, Message::from);
            let of_objects = reference(&renderer, &vectors["cases"][case], now_s, Message::Object);
            assert_eq!(found, of_objects, "{name}, {case}");
            let is_same = match (&found, expected["text"].as_str()) {
                (Ok(found), Some(expected)) => found == expected,
                (Err(_), None) => true,
                _ => false,
            };
            if !is_same {
                wrong.push(format!("{name}, {case}:\n {found:?}\n {expected}"));
            }
        }
    }
    assert!(
        wrong.is_empty(),
        "{} differ:\n{}",
        wrong.len(),
        wrong.join("\n")
    );
}

/// Renders the messages of a case unchanged, without the conversions of the engine.
fn reference(
    renderer: &Renderer,
    case: &Value,
    now_s: Option<i64>,
    form: impl Fn(Map<String, Value>) -> Message<'static>,
) -> Result<String, TokenizeError> {
    let messages = case["messages"].as_array().unwrap();
    let messages = messages
        .iter()
        .map(|message| form(message.as_object().unwrap().clone()));
    let given = case["kwargs"].as_object().cloned().unwrap_or_default();
    let mut arguments = arguments(renderer, given);
    for key in ["tools", "documents"] {
        arguments.request.override_with([(key, case[key].clone())]);
    }
    let generates = case["add_generation_prompt"].as_bool().unwrap_or(true);
    let generates = ("add_generation_prompt", generates.into());
    arguments.request.override_with([generates]);
    let continues = case["continue_final_message"].as_bool().unwrap_or(false);
    let template = renderer.templates.plain.as_ref().unwrap();
    renderer.apply(
        template,
        messages.collect(),
        &arguments,
        continues,
        now_s.unwrap(),
    )
}

/// Everything that a template can ask of a message.
const PROBE: &str = "{% for m in messages %}{{ m }}{{ m | tojson }}{{ m is mapping }}{{ m | length }}{{ m | list }}\
                     {{ m.items() | list }}{{ m.keys() | list }}{{ m.get('role') }}{{ m.get('name', 'x') }}{{ m['role'] }}\
                     {{ 'content' in m }}{{ 'name' in m }}{{ m.name is defined }}{{ m == messages[0] }}{{ m | dictsort }}\
                     {% for key in m %}{{ key }}{% endfor %}{{ m | items }}{{ dict(m, name='b') }}{% endfor %}\
                     {{ messages | map(attribute='content') | list }}{{ messages | selectattr('role', 'eq', 'user') | list }}";

#[test]
fn a_template_sees_a_plain_message_as_an_object() {
    let text = |text: &'static str| PlainContent::Text(text.into());
    let part = |text: &'static str| PlainContent::List(Some(text.into()));
    let plain = |role: &'static str, content| PlainMessage {
        role: role.into(),
        content,
    };
    let texts = [text("be brief"), text("hi \"you\""), text(""), text("go")];
    let lists = [
        part("be brief"),
        part("hi"),
        PlainContent::List(None),
        part("go"),
    ];
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/templates");
    let files = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let templates = files.filter(|path| {
        path.extension()
            .is_some_and(|extension| extension == "jinja")
    });
    let templates = templates.map(|path| std::fs::read_to_string(path).unwrap());
    for source in templates.chain([PROBE, ECHO, CHATML].map(str::to_owned)) {
        let renderer = renderer(&source);
        for contents in [&texts, &lists] {
            let roles = ["system", "user", "assistant", "user"];
            let messages = roles.into_iter().zip(contents.clone());
            let messages: Vec<_> = messages
                .map(|(role, content)| Message::Plain(plain(role, content)))
                .collect();
            let objects = messages.iter().cloned();
            let objects = objects
                .map(|message| Message::Object(message.into_object()))
                .collect();
            let template = renderer.templates.plain.as_ref().unwrap();
            let render = |messages| {
                renderer.apply(
                    template,
                    messages,
                    &arguments(&renderer, Map::new()),
                    false,
                    0,
                )
            };
            assert_eq!(render(messages), render(objects), "{source}");
        }
    }
}

#[test]
fn a_chat_ends_with_the_generation_prompt() {
    let body = json!({"messages": [{"role": "user", "content": "hi"}]});
    check(
        CHATML,
        Api::Chat,
        body,
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    );
}

#[test]
fn a_template_sees_all_arguments_however_many_there_are() {
    let source = "{{ a7 }} {{ a49 is defined }} {{ documents }} {{ add_generation_prompt }} {{ b is defined }}";
    for (count, expected) in [(8, "7 False [] True False"), (50, "7 True [] True False")] {
        let arguments = (0..count).map(|number| (format!("a{number}"), number.into()));
        let arguments: Map<String, Value> = arguments.collect();
        let body = json!({"messages": [{"role": "user", "content": "hi"}], "documents": [],
            "chat_template_kwargs": arguments});
        check(source, Api::Chat, body, expected);
    }
}

#[test]
fn the_last_message_can_be_continued() {
    let body = json!({
        "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "So "}],
        "continue_final_message": true, "add_generation_prompt": false,
    });
    let expected = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nSo ";
    check(CHATML, Api::Chat, body, expected);
    let both =
        json!({"messages": [{"role": "user", "content": "hi"}], "continue_final_message": true});
    assert!(matches!(
        text(CHATML, Api::Chat, &both),
        Err(TokenizeError::Refused(_))
    ));
}

#[test]
fn templates_see_only_known_keys_of_messages() {
    check_seen(
        Api::Chat,
        json!({"messages": [
            {"role": "user", "name": "bob", "extra": 1, "content": [
                {"type": "text", "text": "a", "cache_control": {}}, "b", {"type": "refusal", "refusal": "c"}]},
            {"role": "assistant", "content": null, "reasoning_content": "why", "prefix": true},
            {"role": "assistant", "content": "x", "tool_calls": []},
            {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "d"}]},
        ]}),
        json!([
            {"role": "user", "content": "a\nb\nc", "name": "bob"},
            {"role": "assistant", "content": "", "reasoning": "why", "reasoning_content": "why"},
            {"role": "assistant", "content": "x"},
            {"role": "tool", "content": "d", "tool_call_id": "1"},
        ]),
        Value::Null,
    );
}

#[test]
fn templates_of_parts_see_the_other_keys_of_each_part() {
    let source = format!(
        "{ECHO}{{% for m in messages %}}{{% for c in m.content %}}{{% endfor %}}{{% endfor %}}"
    );
    let body = json!({"messages": [
        {"role": "user", "content": [{"type": "input_text", "q": 1, "text": "a", "name": "n"}]},
        {"role": "tool", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]},
        {"role": "assistant", "content": null},
    ]});
    let seen = json!([
        {"role": "user", "content": [{"type": "text", "text": "a", "q": 1}]},
        {"role": "tool", "content": "b\nc"},
        {"role": "assistant", "content": []},
    ]);
    check(
        &source,
        Api::Chat,
        body,
        &format!("{}nullnull", python(&seen)),
    );
}

#[test]
fn call_arguments_become_objects_and_keys_are_reordered() {
    check_seen(
        Api::Chat,
        json!({"messages": [{"role": "assistant", "content": "", "tool_calls": [
            {"type": "function", "x": 1, "function": {"name": "f", "arguments": "{\"b\": 1, \"a\": 1e20}"}, "id": "1"},
            {"type": "function", "function": {"name": "g", "arguments": "{bad"}, "id": "2"},
            {"type": "function", "function": {"name": "h", "arguments": "[1]"}, "id": "3"},
        ]}]}),
        json!([{"role": "assistant", "content": "", "tool_calls": [
            {"id": "1", "function": {"arguments": {"b": 1, "a": 1e20}, "name": "f"}, "type": "function", "x": 1},
            {"id": "2", "function": {"arguments": {}, "name": "g"}, "type": "function"},
            {"id": "3", "function": {"arguments": {}, "name": "h"}, "type": "function"},
        ]}]),
        Value::Null,
    );
}

#[test]
fn tools_have_the_keys_and_order_of_the_engine() {
    check_seen(
        Api::Chat,
        json!({"messages": [{"role": "user", "content": "x"}], "tool_choice": "none", "tools": [
            {"function": {"strict": true, "z": 1, "parameters": {"b": 1, "a": 2}, "name": "f"}, "y": 1, "type": "function"},
            {"type": "function", "function": {"name": "g", "description": "d", "strict": null}},
        ]}),
        json!([{"role": "user", "content": "x"}]),
        json!([
            {"type": "function", "function": {"name": "f", "description": null, "parameters": {"b": 1, "a": 2}, "strict": true}},
            {"type": "function", "function": {"name": "g", "description": "d", "parameters": null}},
        ]),
    );
}

#[test]
fn developer_messages_become_system_messages_if_unsupported() {
    check_seen(
        Api::Chat,
        json!({"messages": [{"role": "system", "content": "A"}, {"role": "user", "content": "x"}, {"role": "developer", "content": "B"}]}),
        json!([{"role": "system", "content": "A\n\nB"}, {"role": "user", "content": "x"}]),
        Value::Null,
    );
    let knows = format!("{{{{ 'developer' }}}} {ECHO}");
    let body = json!({"messages": [{"role": "developer", "content": "B"}]});
    let seen = r#"developer [{"role": "developer", "content": "B", "tools": null}]nullnull"#;
    check(&knows, Api::Chat, body, seen);
}

#[test]
fn the_billing_line_of_a_system_prompt_is_dropped() {
    check_seen(
        Api::Chat,
        json!({"messages": [
            {"role": "system", "content": "x-anthropic-billing-header: a\nrest"},
            {"role": "system", "content": [{"type": "text", "text": "x-anthropic-billing-header: a"}, {"type": "text", "text": "B"}]},
            {"role": "user", "content": "x-anthropic-billing-header: kept"},
        ]}),
        json!([
            {"role": "system", "content": "rest"},
            {"role": "system", "content": "B"},
            {"role": "user", "content": "x-anthropic-billing-header: kept"},
        ]),
        Value::Null,
    );
}

#[test]
fn fields_override_template_arguments_unless_null_or_auto() {
    let source = "{{ a is defined }} {{ b is defined }} {{ c }} {{ add_generation_prompt }} {{ enable_thinking }} {{ reasoning_effort }}{{ messages | length }}";
    let body = json!({
        "messages": [{"role": "user", "content": "x"}],
        "chat_template_kwargs": {"a": null, "b": "auto", "c": "d", "add_generation_prompt": false},
        "reasoning_effort": "low",
    });
    check(source, Api::Chat, body, "False False d True True low1");
}

#[test]
fn the_text_before_an_image_is_known() {
    let body = json!({"messages": [
        {"role": "system", "content": "S"},
        {"role": "user", "content": [{"type": "text", "text": "before "}, {"type": "image_url", "image_url": {"url": "u"}}, {"type": "text", "text": "after"}]},
    ]});
    let found = text(CHATML, Api::Chat, &body).unwrap();
    let known = "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nbefore ";
    assert_eq!(&found.text[..found.known_bytes], known);
    let one_text = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}";
    let found = text(one_text, Api::Chat, &body).unwrap();
    assert_eq!(&found.text[..found.known_bytes], "<system>S<user>");
}

#[test]
fn responses_items_become_messages() {
    check_seen(
        Api::Responses,
        json!({"instructions": "I", "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "q"}]},
            {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "s"}], "content": [{"type": "reasoning_text", "text": "t"}]},
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{\"a\": 1}"},
            {"type": "function_call", "call_id": "2", "name": "g", "namespace": "ns", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "o"}, {"type": "input_text", "text": "p"}]},
            {"type": "custom_tool_call", "call_id": "3", "name": "c", "input": "raw"},
            {"type": "custom_tool_call_output", "call_id": "3", "output": "x"},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "A"}, {"type": "output_text", "text": "B"}]},
            {"role": "assistant", "content": "C"},
        ]}),
        json!([
            {"role": "system", "content": "I"},
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "", "tool_calls": [
                {"id": "1", "function": {"name": "f", "arguments": {"a": 1}}, "type": "function"},
                {"id": "2", "function": {"name": "ns__g", "arguments": {}}, "type": "function"},
            ], "reasoning": "t", "reasoning_content": "t"},
            {"role": "tool", "content": "o\np", "tool_call_id": "1"},
            {"role": "assistant", "content": "", "tool_calls": [
                {"id": "3", "function": {"name": "c", "arguments": {"input": "raw"}}, "type": "function"}]},
            {"role": "tool", "content": "x", "tool_call_id": "3"},
            {"role": "assistant", "content": "A"},
            {"role": "assistant", "content": "C"},
        ]),
        Value::Null,
    );
}

#[test]
fn responses_tools_become_functions() {
    check_seen(
        Api::Responses,
        json!({"input": "x", "tools": [
            {"type": "function", "name": "f", "strict": true, "parameters": {"b": 1}, "description": "d"},
            {"type": "web_search"},
            {"type": "namespace", "name": "ns", "tools": [{"type": "function", "name": "g"}]},
        ]}),
        json!([{"role": "user", "content": "x"}]),
        json!([
            {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"b": 1}, "strict": true}},
            {"type": "function", "function": {"name": "ns__g", "description": null, "parameters": null}},
        ]),
    );
}

#[test]
fn an_unfinished_item_is_continued() {
    let body = json!({"input": [
        {"role": "user", "content": "q"},
        {"type": "message", "role": "assistant", "status": "incomplete", "content": [{"type": "output_text", "text": "So"}]},
    ]});
    let expected = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\nSo";
    check(CHATML, Api::Responses, body, expected);
}

#[test]
fn only_chats_are_tokenized_without_bos() {
    let chat = json!({"messages": [{"role": "user", "content": "x"}]});
    let marked =
        json!({"messages": [{"role": "user", "content": "x"}], "add_special_tokens": true});
    assert!(!text(CHATML, Api::Chat, &chat).unwrap().add_special_tokens);
    assert!(text(CHATML, Api::Chat, &marked).unwrap().add_special_tokens);
    let response = json!({"input": "x"});
    assert!(
        text(CHATML, Api::Responses, &response)
            .unwrap()
            .add_special_tokens
    );
    let bare = json!({"prompt": "x", "add_special_tokens": false});
    assert!(
        !text(CHATML, Api::Completions, &bare)
            .unwrap()
            .add_special_tokens
    );
}

#[test]
fn a_completion_prompt_is_not_changed() {
    check(
        "",
        Api::Completions,
        json!({"prompt": "a<|im_end|>"}),
        "a<|im_end|>",
    );
    check("", Api::Completions, json!({"prompt": ["a"]}), "a");
    let ids = renderer("").render(Api::Completions, br#"{"prompt": [1, 2]}"#, 0);
    assert_eq!(ids, Ok(RenderedPrompt::Ids(vec![1, 2])));
    let ids = renderer("").render(Api::Completions, br#"{"prompt": [[1, 2]]}"#, 0);
    assert_eq!(ids, Ok(RenderedPrompt::Ids(vec![1, 2])));
}

#[test]
fn unsupported_requests_are_refused_with_a_reason() {
    let unknown = |api, body: Value| text(CHATML, api, &body).unwrap_err();
    let messages = json!([{"role": "user", "content": "x"}]);
    let field = TokenizeError::Field("chat_template");
    assert_eq!(
        unknown(
            Api::Chat,
            json!({"messages": messages, "chat_template": "x"})
        ),
        field
    );
    let field = TokenizeError::Field("previous_response_id");
    assert_eq!(
        unknown(
            Api::Responses,
            json!({"input": "x", "previous_response_id": "r"})
        ),
        field
    );
    assert_eq!(
        unknown(Api::Completions, json!({"prompt": ["a", "b"]})),
        TokenizeError::Field("prompt")
    );
    assert_eq!(
        unknown(Api::Embeddings, json!({"input": "x"})),
        TokenizeError::Api
    );
    assert!(matches!(
        unknown(Api::Chat, json!([])),
        TokenizeError::Body(_)
    ));
    assert!(matches!(
        unknown(Api::Chat, json!({"messages": []})),
        TokenizeError::Refused(_)
    ));
    let without = Renderer::new(Templates::default(), Map::new(), Options::default());
    let chat = br#"{"messages": [{"role": "user", "content": "x"}]}"#;
    assert_eq!(without.render(Api::Chat, chat, 0), Err(TokenizeError::Api));
}

#[test]
fn the_template_gets_the_effort_that_the_engine_maps_it_to() {
    let templates = Templates {
        plain: Some(Template::new("{{ reasoning_effort }} {{ enable_thinking }}").unwrap()),
        with_tools: None,
    };
    let options = Options {
        reasoning_effort_map: [("xhigh", "high"), ("minimal", "none")]
            .map(|(from, to)| (from.to_owned(), to.to_owned()))
            .into(),
        ..Options::default()
    };
    let renderer = Renderer::new(templates, Map::new(), options);
    let render = |api, body: Value| match renderer.render(api, body.to_string().as_bytes(), 0) {
        Ok(RenderedPrompt::Text(text)) => text.text,
        other => panic!("{other:?}"),
    };
    let chat = |effort| json!({"messages": [{"role": "user", "content": "x"}], "reasoning_effort": effort});
    assert_eq!(render(Api::Chat, chat("xhigh")), "high True");
    assert_eq!(render(Api::Chat, chat("minimal")), "none False");
    assert_eq!(render(Api::Chat, chat("low")), "low True");
    let responses = json!({"input": "x", "reasoning": {"effort": "xhigh"}});
    assert_eq!(render(Api::Responses, responses), "high True");
}
