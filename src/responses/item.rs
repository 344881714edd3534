//! One item of a conversation: its kind, its id, its parts. Pure.
//!
//! The ids that the router assigns contain the id of their response, so that an item can be found by its id.

use std::borrow::Cow;

use super::known_json;
use super::members::{self, Members};
use crate::ids::ResponseId;
use crate::openai::error::ApiError;

/// Decides what the router does with an item.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Message,
    Reasoning,
    FunctionCall,
    FunctionCallOutput,
    CustomToolCall,
    CustomToolCallOutput,
    /// A call of another tool, which the client answers by `call_id`. Sent to engines as a function call.
    ClientCall,
    ClientCallOutput,
    /// A screenshot, which the client took for a call.
    ComputerCallOutput,
    /// Calls that contain their own output.
    McpCall,
    CodeInterpreterCall,
    FileSearchCall,
    /// Contains nothing to show to a model.
    Hidden,
    Compaction,
    /// Lists tools. Engines get them in the body.
    AdditionalTools,
    /// Asks to compact what comes before it. Sent to no engine.
    CompactionTrigger,
    Reference,
}

/// The known types, each with the prefix of its ids.
static TYPES: [(&str, Kind, &str); 30] = [
    ("message", Kind::Message, "msg"),
    ("reasoning", Kind::Reasoning, "rs"),
    ("function_call", Kind::FunctionCall, "fc"),
    ("function_call_output", Kind::FunctionCallOutput, "fco"),
    ("custom_tool_call", Kind::CustomToolCall, "ctc"),
    (
        "custom_tool_call_output",
        Kind::CustomToolCallOutput,
        "ctco",
    ),
    ("local_shell_call", Kind::ClientCall, "lsh"),
    ("local_shell_call_output", Kind::ClientCallOutput, "lsho"),
    ("shell_call", Kind::ClientCall, "sh"),
    ("shell_call_output", Kind::ClientCallOutput, "sho"),
    ("apply_patch_call", Kind::ClientCall, "apc"),
    ("apply_patch_call_output", Kind::ClientCallOutput, "apco"),
    ("computer_call", Kind::ClientCall, "cu"),
    ("computer_call_output", Kind::ComputerCallOutput, "cuo"),
    ("program", Kind::ClientCall, "prog"),
    ("program_output", Kind::ClientCallOutput, "progo"),
    ("tool_search_call", Kind::Hidden, "tsc"),
    ("tool_search_output", Kind::Hidden, "tso"),
    ("mcp_call", Kind::McpCall, "mcp"),
    ("mcp_list_tools", Kind::Hidden, "mcpl"),
    ("mcp_approval_request", Kind::Hidden, "mcpr"),
    ("mcp_approval_response", Kind::Hidden, "mcpa"),
    ("code_interpreter_call", Kind::CodeInterpreterCall, "ci"),
    ("file_search_call", Kind::FileSearchCall, "fs"),
    ("web_search_call", Kind::Hidden, "ws"),
    ("image_generation_call", Kind::Hidden, "ig"),
    ("compaction", Kind::Compaction, "cmp"),
    ("compaction_trigger", Kind::CompactionTrigger, "cmpt"),
    ("additional_tools", Kind::AdditionalTools, "at"),
    ("item_reference", Kind::Reference, "ref"),
];

pub(super) fn is_user_message(raw: &str) -> bool {
    Members::parse(raw).is_ok_and(|item| item.get("role") == Some("\"user\""))
}

#[derive(Clone, Debug)]
pub(super) struct Item<'a> {
    pub(super) kind: Kind,
    pub(super) name: &'static str,
    pub(super) members: Members<'a>,
}

impl<'a> Item<'a> {
    /// Parses an item; `param` is its name in errors.
    pub(super) fn read(raw: &'a str, param: &str) -> Result<Self, ApiError> {
        let members = Members::parse(raw).map_err(|_| ApiError::wrong_type(param, "an object"))?;
        Self::of(members, &|| param.to_owned())
    }

    /// As [`Item::read`], from a parsed object.
    pub(super) fn of(members: Members<'a>, path: &dyn Fn() -> String) -> Result<Self, ApiError> {
        let name = match members.get("type") {
            Some(raw) => match members::text(raw) {
                Some(name) => name,
                None => {
                    return Err(ApiError::wrong_type(
                        &format!("{}.type", path()),
                        "a string",
                    ));
                }
            },
            None if members.get("role").is_some() => Cow::Borrowed("message"),
            None if members.get("id").is_some() => Cow::Borrowed("item_reference"),
            None => return Err(ApiError::missing_parameter(&format!("{}.type", path()))),
        };
        let Some((name, kind, _)) = row(&name) else {
            let instead = if name == "configuration_update" {
                ": set the request's own parameters"
            } else {
                ""
            };
            let why = format!("items of type '{name}' are not supported{instead}");
            return Err(ApiError::wrong_value(&path(), why));
        };
        Ok(Self {
            kind: *kind,
            name,
            members,
        })
    }

    pub(super) fn id(&self) -> Option<Cow<'a, str>> {
        self.members.text("id")
    }

    pub(super) fn prefix(&self) -> &'static str {
        prefix(self.name)
    }
}

/// The id prefix of a type.
pub(super) fn prefix(name: &str) -> &'static str {
    row(name).map_or("item", |(_, _, prefix)| prefix)
}

/// The kind of a type; `None` if it is not known.
pub(super) fn kind(name: &str) -> Option<Kind> {
    row(name).map(|(_, kind, _)| *kind)
}

fn row(name: &str) -> Option<&'static (&'static str, Kind, &'static str)> {
    TYPES.iter().find(|(known, _, _)| *known == name)
}

/// Assigns the ids of the items of one response, or of one addition to a conversation.
#[derive(Clone, Debug)]
pub(super) struct Ids {
    /// Hex digits.
    base: Box<str>,
}

/// Added to the index of input items, so that their ids differ from those of output items.
const INPUT_OFFSET: usize = 0x8000;
const BASE_LENGTH: usize = 48;

impl Ids {
    pub(super) fn of(response: ResponseId) -> Self {
        let name = response.to_string();
        let base = name.strip_prefix(ResponseId::PREFIX).unwrap_or(&name);
        Self { base: base.into() }
    }

    /// For items that belong to no response.
    pub(super) fn random(random: u128) -> Self {
        Self {
            base: format!("{random:032x}").into(),
        }
    }

    pub(super) fn output(&self, prefix: &str, index: usize) -> String {
        self.id(prefix, index)
    }

    pub(super) fn input(&self, prefix: &str, index: usize) -> String {
        self.id(prefix, INPUT_OFFSET + index)
    }

    fn id(&self, prefix: &str, index: usize) -> String {
        format!("{prefix}_{}{index:04x}", self.base)
    }
}

/// The response that an item id belongs to, and whether the item is in its output.
pub(super) fn owner(id: &str) -> Option<(ResponseId, bool)> {
    let (_, digits) = id.rsplit_once('_')?;
    let (base, index) = digits.split_at_checked(BASE_LENGTH)?;
    let response = format!("{}{base}", ResponseId::PREFIX).parse().ok()?;
    let index = usize::from_str_radix(index, 16).ok()?;
    Some((response, index < INPUT_OFFSET))
}

/// The id that a call and its output share, as JSON.
pub(super) fn call_id<'a>(item: &Item<'a>) -> &'a str {
    let id = item.members.get("call_id");
    id.or_else(|| item.members.get("id")).unwrap_or("\"\"")
}

/// The text of a list of parts: each part's `text` or `refusal`, joined by `separator`, as a JSON string with
/// escapes and without quotes. `None` if no part has text.
pub(super) fn joined_text<'a>(content: &'a str, separator: &str) -> Option<Cow<'a, str>> {
    if let Some(text) = members::escaped(content) {
        return Some(Cow::Borrowed(text));
    }
    let mut joined: Option<Cow<'a, str>> = None;
    for part in known_json::objects(content)? {
        let Some(text) = text_of(&part?) else {
            continue;
        };
        match &mut joined {
            None => joined = Some(Cow::Borrowed(text)),
            Some(joined) => {
                let joined = joined.to_mut();
                joined.push_str(separator);
                joined.push_str(text);
            }
        }
    }
    joined
}

/// Whether a part of a list has text.
pub(super) fn has_text(content: &str) -> bool {
    known_json::each_object(Some(content)).any(|part| text_of(&part).is_some())
}

/// The text of a part, with escapes and without quotes.
fn text_of<'a>(part: &Members<'a>) -> Option<&'a str> {
    let text = part.get("text").or_else(|| part.get("refusal"));
    text.and_then(members::escaped)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::Root;

    #[test]
    fn an_item_without_a_type_is_recognised_by_its_members() {
        let kind = |raw: &str| Item::read(raw, "input[0]").map(|item| item.kind);
        assert_eq!(
            kind(r#"{"role":"user","content":"x"}"#).unwrap(),
            Kind::Message
        );
        assert_eq!(kind(r#"{"type":"reasoning"}"#).unwrap(), Kind::Reasoning);
        assert_eq!(kind(r#"{"id":"msg_1"}"#).unwrap(), Kind::Reference);
        let check = |raw: &str, code: &str, param: &str| {
            let error = kind(raw).unwrap_err();
            assert_eq!((error.code, error.param_or_empty()), (code, param), "{raw}");
        };
        check("7", "invalid_type", "input[0]");
        check("{}", "missing_required_parameter", "input[0].type");
        check(r#"{"type":7}"#, "invalid_type", "input[0].type");
        check(r#"{"type":"poem"}"#, "invalid_value", "input[0]");
    }

    #[test]
    fn an_id_contains_the_response_it_belongs_to() {
        let response = ResponseId::new(Root(7), 9);
        let ids = Ids::of(response);
        let output = ids.output("msg", 2);
        assert_eq!(output, format!("msg_{}0002", &response.to_string()[5..]));
        assert_eq!(owner(&output), Some((response, true)));
        assert_eq!(owner(&ids.input("fco", 0)), Some((response, false)));
        for foreign in [
            "",
            "msg_",
            "msg_12",
            "rs_abc",
            &Ids::random(7).output("msg", 0),
            "é",
        ] {
            assert_eq!(owner(foreign), None, "{foreign}");
        }
    }

    #[test]
    fn texts_of_parts_are_joined_with_their_escapes() {
        let parts = r#"[{"type":"output_text","text":"a\n"},{"type":"refusal","refusal":"\u0062"},{"x":1}]"#;
        assert_eq!(joined_text(parts, "").unwrap(), r"a\n\u0062");
        assert_eq!(joined_text(parts, r"\n").unwrap(), r"a\n\n\u0062");
        assert_eq!(joined_text(r#""plain""#, "").unwrap(), "plain");
        assert_eq!(joined_text("[]", ""), None);
        assert_eq!(joined_text("7", ""), None);
        assert_eq!(joined_text(r#"[{"text":"a"},7]"#, ""), None);
    }

    #[test]
    fn a_separator_stands_between_any_two_of_several_texts() {
        let parts = r#"[{"text":"a"},{"text":""},{"x":1},{"text":"b"},{"text":"c"}]"#;
        assert_eq!(joined_text(parts, "").unwrap(), "abc");
        assert_eq!(joined_text(parts, r"\n").unwrap(), r"a\n\nb\nc");
    }

    #[test]
    fn a_list_has_text_if_a_part_of_it_has() {
        for (parts, expected) in [
            ("[]", false),
            (
                r#"[{"type":"input_image","image_url":"u"},{"text":7}]"#,
                false,
            ),
            (r#"[{"x":1},{"type":"output_text","text":""}]"#, true),
            (r#"[{"type":"refusal","refusal":"no"},{"x":1}]"#, true),
        ] {
            assert_eq!(has_text(parts), expected, "{parts}");
            assert_eq!(joined_text(parts, "").is_some(), expected, "{parts}");
        }
    }
}
