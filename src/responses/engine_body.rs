//! The body for an engine: the client's body without the members that the router handles. Pure.

use bytes::Bytes;

use super::additional_tools;
use super::grammar;
use super::member_table::{ALLOWED_TOOLS, member};
use super::members::{Members, put, put_number, put_read, put_string, quoted};
use super::request::CreateRequest;
use super::template::tool_choice;

/// Values of `include` that vLLM accepts. It refuses a list with any other.
const ENGINE_INCLUDES: [&str; 5] = [
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "message.output_text.logprobs",
];

const ENGINE_TIERS: [&str; 5] = [
    "\"auto\"",
    "\"default\"",
    "\"flex\"",
    "\"scale\"",
    "\"priority\"",
];

/// The body that asks for a summary of `input`. Its prompt begins as that of every other turn: tools stand in front of
/// the conversation, so they stay, but may not be called.
pub(super) fn summary_body(
    create: &CreateRequest<'_>,
    input: &[u8],
    id: &str,
    salt: Option<&str>,
    max_output_tokens: u64,
) -> Bytes {
    let mut out = Vec::with_capacity(input.len() + 1024);
    out.push(b'{');
    put_string(&mut out, "request_id", id);
    let separated = additional_tools::separated(create.members.get("tools"), input);
    for (name, value) in create.members.iter() {
        match name {
            "tools" if separated.is_some() => {}
            "tools" => put_tools(&mut out, value),
            _ if member(name).is_none_or(|member| member.to_summary) => {
                put_read(&mut out, name, value);
            }
            _ => {}
        }
    }
    let (input, tools) = match &separated {
        Some(separated) => {
            put_tools(&mut out, &separated.tools);
            (separated.input.as_slice(), Some(separated.tools.as_str()))
        }
        None => (input, create.members.get("tools")),
    };
    if tools.is_some_and(|raw| raw != "[]") {
        put(&mut out, "tool_choice", "\"none\"");
    }
    put_number(&mut out, "max_output_tokens", max_output_tokens);
    put(&mut out, "store", "false");
    finish(out, input, salt)
}

fn put_tools(out: &mut Vec<u8>, raw: &str) {
    let described = grammar::described(raw);
    put(out, "tools", described.as_deref().unwrap_or(raw));
}

/// Engines with the Responses API take `allowed_tools` and do not act on it: a call in a whole answer is then text. They
/// are sent its mode; the list stays in the body for workers that are sent a chat completion.
fn put_tool_choice(out: &mut Vec<u8>, raw: &str) {
    let written = tool_choice(raw);
    let choice = Members::parse(&written).unwrap_or_default();
    if choice.get("type") != Some("\"allowed_tools\"") {
        put(out, "tool_choice", &written);
        return;
    }
    put(out, "tool_choice", choice.get("mode").unwrap_or("\"auto\""));
    put(out, ALLOWED_TOOLS, &written);
}

/// `input`: the whole list of items. `salt`: a JSON member to add. `streams`: whether the answer is to be events.
pub(super) fn body(
    create: &CreateRequest<'_>,
    input: &[u8],
    id: &str,
    salt: Option<&str>,
    streams: bool,
) -> Bytes {
    let mut out = Vec::with_capacity(input.len() + 1024);
    out.push(b'{');
    if !id.is_empty() {
        put_string(&mut out, "request_id", id);
    }
    let separated = additional_tools::separated(create.members.get("tools"), input);
    for (name, value) in create.members.iter() {
        match name {
            "tool_choice" => put_tool_choice(&mut out, value),
            "tools" if separated.is_some() => {}
            "tools" => put_tools(&mut out, value),
            _ if member(name).is_none_or(|member| member.to_engine) => {
                put_read(&mut out, name, value);
            }
            _ => {}
        }
    }
    let input = match &separated {
        Some(separated) => {
            put_tools(&mut out, &separated.tools);
            separated.input.as_slice()
        }
        None => input,
    };
    let tier = create.members.get("service_tier");
    if let Some(tier) = tier.filter(|tier| ENGINE_TIERS.contains(tier)) {
        put(&mut out, "service_tier", tier);
    }
    let include = create.include.iter();
    let include = include.filter(|name| ENGINE_INCLUDES.contains(&&***name));
    let include: Vec<String> = include.map(|name| quoted(name)).collect();
    if !include.is_empty() {
        put(&mut out, "include", &format!("[{}]", include.join(",")));
    }
    put(&mut out, "store", "false");
    if streams {
        put(&mut out, "stream", "true");
    }
    finish(out, input, salt)
}

/// The end of a body: what separates tenants, and the items.
fn finish(mut out: Vec<u8>, input: &[u8], salt: Option<&str>) -> Bytes {
    if let Some(salt) = salt {
        out.push(b',');
        out.extend_from_slice(salt.as_bytes());
    }
    put(&mut out, "input", "");
    out.extend_from_slice(input);
    out.push(b'}');
    out.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(client: &str, expected: &str) {
        let create = CreateRequest::read(client.as_bytes()).unwrap();
        let salt = Some(r#""cache_salt":"s""#);
        let body = body(&create, b"[1]", "resp_1", salt, create.stream);
        assert_eq!(body, expected, "{client}");
    }

    #[test]
    fn client_members_pass_byte_for_byte() {
        check(
            r#"{"model":"m", "input":"x", "temperature": 0.10, "tools":[ {"type":"function","name":"f", "x":1e2} ], "odd\u0020key":"\u0041"}"#,
            r#"{"request_id":"resp_1","model":"m","temperature":0.10,"tools":[ {"type":"function","name":"f", "x":1e2} ],"odd key":"\u0041","store":false,"cache_salt":"s","input":[1]}"#,
        );
    }

    #[test]
    fn no_engine_is_sent_the_grammar_of_a_custom_tool() {
        let client = r#"{"model":"m","input":"x","tools":[{"type":"custom","format":{"type":"grammar","syntax":"regex","definition":"a+"},"name":"c"}]}"#;
        let tools = r#""tools":[{"type":"custom","name":"c","description":"`input` must match this grammar (regex):\na+"}]"#;
        check(
            client,
            &format!(
                r#"{{"request_id":"resp_1","model":"m",{tools},"store":false,"cache_salt":"s","input":[1]}}"#
            ),
        );
        let create = CreateRequest::read(client.as_bytes()).unwrap();
        let body = summary_body(&create, b"[1]", "resp_1", None, 100);
        let expected = format!(
            r#"{{"request_id":"resp_1","model":"m",{tools},"tool_choice":"none","max_output_tokens":100,"store":false,"input":[1]}}"#
        );
        assert_eq!(body, expected);
    }

    #[test]
    fn tools_that_an_item_lists_are_those_of_the_body() {
        let item = r#"{"type":"additional_tools","role":"developer","tools":[{"type":"function","name":"f"}]}"#;
        let input = format!("[{item},1]");
        let tools = r#""tools":[{"type":"function","name":"f"}]"#;
        for client in [
            r#"{"input":"x","model":"m"}"#,
            r#"{"tools":[],"input":"x","model":"m"}"#,
            r#"{"input":"x","model":"m","tools":null}"#,
        ] {
            let create = CreateRequest::read(client.as_bytes()).unwrap();
            let sent = body(&create, input.as_bytes(), "", None, false);
            let expected = format!(r#"{{"model":"m",{tools},"store":false,"input":[1]}}"#);
            assert_eq!(sent, expected, "{client}");
            let sent = summary_body(&create, input.as_bytes(), "r", None, 9);
            let expected = format!(
                r#"{{"request_id":"r","model":"m",{tools},"tool_choice":"none","max_output_tokens":9,"store":false,"input":[1]}}"#
            );
            assert_eq!(sent, expected, "{client}");
        }
    }

    #[test]
    fn engines_are_sent_the_mode_of_allowed_tools() {
        check(
            r#"{"model":"m","input":"x","tool_choice":{"type":"allowed_tools","tools":[]}}"#,
            r#"{"request_id":"resp_1","model":"m","tool_choice":"auto","allowed_tools":{"type":"allowed_tools","tools":[],"mode":"auto"},"store":false,"cache_salt":"s","input":[1]}"#,
        );
        check(
            r#"{"model":"m","input":"x","allowed_tools":1,"tool_choice":{"mode":"required","type":"allowed_tools","tools":[]}}"#,
            r#"{"request_id":"resp_1","model":"m","tool_choice":"required","allowed_tools":{"mode":"required","type":"allowed_tools","tools":[]},"store":false,"cache_salt":"s","input":[1]}"#,
        );
        check(
            r#"{"model":"m","input":"x","tool_choice":{"type":"function","name":"f"}}"#,
            r#"{"request_id":"resp_1","model":"m","tool_choice":{"type":"function","name":"f"},"store":false,"cache_salt":"s","input":[1]}"#,
        );
    }

    #[test]
    fn a_summary_has_no_form_and_no_end_that_the_answer_is_to_have() {
        let client = r#"{"model":"m","input":"x","tools":[{"type":"function","name":"f"}],"temperature":0.5,"stop":["\n"],
            "stop_token_ids":[7],"ignore_eos":true,"logit_bias":{"7":-100},"structured_outputs":{"json":{}},
            "min_tokens":9000,"stop_regex":"x","bad_words":["a"],"allowed_token_ids":[7],"regex":"a","ebnf":"root ::= \"a\"",
            "text":{"format":{"type":"json_object"}},"tool_choice":"required","max_output_tokens":5}"#;
        let create = CreateRequest::read(client.as_bytes()).unwrap();
        let body = summary_body(&create, b"[1]", "resp_1", None, 100);
        let expected = r#"{"request_id":"resp_1","model":"m","tools":[{"type":"function","name":"f"}],"temperature":0.5,"tool_choice":"none","max_output_tokens":100,"store":false,"input":[1]}"#;
        assert_eq!(body, expected);
    }

    #[test]
    fn members_that_the_router_handles_do_not_pass() {
        check(
            r#"{"input":"x","model":"m","store":true,"stream":true,"background":false,"truncation":"auto","conversation":"c",
                "metadata":{"a":"b"},"request_id":null,"stream_options":{"include_obfuscation":true},"service_tier":"turbo",
                "include":["reasoning.encrypted_content","message.output_text.logprobs","web_search_call.results"]}"#,
            r#"{"request_id":"resp_1","model":"m","include":["message.output_text.logprobs"],"store":false,"stream":true,"cache_salt":"s","input":[1]}"#,
        );
        check(
            r#"{"input":"x","model":"m","service_tier":"flex","include":["reasoning.encrypted_content"]}"#,
            r#"{"request_id":"resp_1","model":"m","service_tier":"flex","store":false,"cache_salt":"s","input":[1]}"#,
        );
    }
}
