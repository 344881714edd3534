//! Parses and checks the body of `POST /v1/responses`. The router parses the JSON members that it uses itself; all
//! others go to the engine unchanged. No I/O.

use std::borrow::Cow;

use super::known_json;
use super::member_checks;
use super::member_table;
use super::members::{self, Members};
use crate::openai::error::ApiError;
use crate::openai::metadata;
use crate::prompt;

/// Allowed values of `include`.
const INCLUDES: [&str; 8] = [
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
];

/// A parsed and checked body.
#[derive(Debug)]
pub(super) struct CreateRequest<'a> {
    pub(super) members: Members<'a>,
    pub(super) model: Cow<'a, str>,
    /// The JSON text of `input`: a string or a list.
    pub(super) input: Option<&'a str>,
    pub(super) parent: Parent<'a>,
    pub(super) store: bool,
    pub(super) stream: bool,
    pub(super) background: bool,
    pub(super) include: Vec<Cow<'a, str>>,
    pub(super) truncation: Truncation,
    /// When what comes before is compacted first.
    pub(super) compact_at: Option<CompactAt>,
    /// Whether `input` may be missing or empty: for a token count, if there are instructions or tools to count.
    pub(super) input_may_be_empty: bool,
}

/// What the request's input is appended to.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Parent<'a> {
    None,
    /// The stored response with this id.
    Response(Cow<'a, str>),
    /// The JSON of a Response object that the client kept, which contains a state token.
    ClientHeld(&'a str),
    Conversation(Cow<'a, str>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Truncation {
    /// An input that is too long for the model is an error.
    Disabled,
    /// The oldest items of an input that is too long are left out.
    Auto,
}

impl Parent<'_> {
    pub(super) fn is_in_store(&self) -> bool {
        matches!(self, Self::Response(_) | Self::Conversation(_))
    }
}

/// When the history of a response is compacted before its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CompactAt {
    /// If the prompt has more tokens.
    Tokens(u64),
    /// At once, and there is no other answer.
    Now,
}

impl CompactAt {
    /// The member that asks for it.
    pub(super) fn param(self) -> &'static str {
        match self {
            Self::Tokens(_) => "context_management",
            Self::Now => "input",
        }
    }
}

impl<'a> CreateRequest<'a> {
    pub(super) fn read(body: &'a [u8]) -> Result<Self, ApiError> {
        Self::checked(parse(body)?, true)
    }

    /// As [`CreateRequest::read`], but no member is required: for `POST /v1/responses/input_tokens`.
    pub(super) fn read_without_required(body: &'a [u8]) -> Result<Self, ApiError> {
        Self::checked(parse(body)?, false)
    }

    /// Reads the stored body of a background response, which was checked when it was accepted, maybe by a release that
    /// checked less: it was promised to run, so only what the router reads itself must be as it reads it. The engine
    /// judges the rest. What a client could harm others with is refused here, too.
    pub(super) fn read_stored(body: &'a [u8]) -> Result<Self, ApiError> {
        let members = parse(body)?;
        refuse_reserved(&members)?;
        Ok(Self {
            model: model(&members)?.unwrap_or_default(),
            input: members.get("input"),
            input_may_be_empty: false,
            store: flag(&members, "store", true)?,
            stream: flag(&members, "stream", false)?,
            background: flag(&members, "background", false)?,
            include: include(&members, |_, _| Ok(()))?,
            truncation: truncation(&members)?,
            // None is accepted in the background.
            compact_at: None,
            parent: parent(&members)?,
            members,
        })
    }

    fn checked(members: Members<'a>, has_required: bool) -> Result<Self, ApiError> {
        refuse_reserved(&members)?;
        for (param, why) in [
            (
                "prompt",
                "is not supported: send the text itself as `input` and `instructions`",
            ),
            (
                "previous_input_messages",
                "is not supported: send `input` or `previous_response_id`",
            ),
        ] {
            // An empty list asks for nothing, so it is accepted.
            if members.get(param).is_some_and(|raw| raw != "[]") {
                return Err(ApiError::unsupported(param, why));
            }
        }
        let model = match model(&members)? {
            None if has_required => return Err(ApiError::missing_parameter("model")),
            model => model.unwrap_or_default(),
        };
        if let Some(raw) = members.get("instructions") {
            string("instructions", raw)?;
        }
        if let Some(raw) = members.get("metadata") {
            metadata::read(raw)?;
        }
        member_checks::check(&members)?;
        let parent = parent(&members)?;
        let input = members.get("input");
        match input {
            None if has_required && parent == Parent::None => {
                return Err(ApiError::missing_parameter("input"));
            }
            Some(raw) if !raw.starts_with(['"', '[']) => {
                return Err(ApiError::wrong_type("input", "a string or a list of items"));
            }
            None | Some(_) => {}
        }
        let background = flag(&members, "background", false)?;
        if background && matches!(parent, Parent::ClientHeld(_)) {
            return Err(ApiError::mutually_exclusive(
                "previous_response",
                "background",
            ));
        }
        let compact_at = compact_at(&members, input)?;
        if let Some(at) = compact_at
            && background
        {
            let why = "is not supported in the background";
            return Err(ApiError::unsupported(at.param(), why));
        }
        let is_given = |name: &str| members.get(name).is_some_and(|raw| raw != "[]");
        Ok(Self {
            model,
            input,
            input_may_be_empty: !has_required && (is_given("instructions") || is_given("tools")),
            store: flag(&members, "store", true)?,
            stream: flag(&members, "stream", false)?,
            background,
            include: include(&members, check_include)?,
            truncation: truncation(&members)?,
            compact_at,
            parent,
            members,
        })
    }

    pub(super) fn includes(&self, value: &str) -> bool {
        self.include.iter().any(|included| included == value)
    }
}

/// Parses a body, which must be one JSON object.
pub(super) fn parse(body: &[u8]) -> Result<Members<'_>, ApiError> {
    let text = std::str::from_utf8(body).map_err(|error| ApiError::bad_json(&error))?;
    Members::parse(text).map_err(|error| ApiError::bad_json(&error))
}

/// Refuses what only the router may send to an engine.
fn refuse_reserved(members: &Members<'_>) -> Result<(), ApiError> {
    for member in member_table::MEMBERS
        .iter()
        .filter(|member| member.is_reserved)
    {
        if members.get(member.name).is_some() {
            return Err(ApiError::reserved_parameter(member.name));
        }
    }
    // Sending the request to an engine checks this again, but a background response is accepted before that.
    for (_, xargs) in members.iter().filter(|(name, _)| *name == "vllm_xargs") {
        prompt::check_xargs(xargs)?;
    }
    Ok(())
}

fn model<'a>(members: &Members<'a>) -> Result<Option<Cow<'a, str>>, ApiError> {
    let model = members.get("model");
    model.map(|raw| string("model", raw)).transpose()
}

fn string<'a>(param: &str, raw: &'a str) -> Result<Cow<'a, str>, ApiError> {
    members::text(raw).ok_or_else(|| ApiError::wrong_type(param, "a string"))
}

fn flag(members: &Members<'_>, param: &str, default: bool) -> Result<bool, ApiError> {
    match members.get(param) {
        None => Ok(default),
        Some("true") => Ok(true),
        Some("false") => Ok(false),
        Some(_) => Err(ApiError::wrong_type(param, "true or false")),
    }
}

fn parent<'a>(members: &Members<'a>) -> Result<Parent<'a>, ApiError> {
    let mut found: Option<(&str, Parent<'a>)> = None;
    for param in ["previous_response_id", "conversation", "previous_response"] {
        let Some(raw) = members.get(param) else {
            continue;
        };
        let parent = match param {
            "previous_response_id" => Parent::Response(id(param, string(param, raw)?)?),
            "conversation" => Parent::Conversation(conversation_id(raw)?),
            _ if !raw.starts_with('{') => {
                return Err(ApiError::wrong_type(param, "a response object"));
            }
            _ => Parent::ClientHeld(raw),
        };
        if let Some((other, _)) = found {
            return Err(ApiError::mutually_exclusive(param, other));
        }
        found = Some((param, parent));
    }
    Ok(found.map_or(Parent::None, |(_, parent)| parent))
}

/// `conversation` is an id or an object with an id.
fn conversation_id(raw: &str) -> Result<Cow<'_, str>, ApiError> {
    let named = if raw.starts_with('{') {
        Members::parse(raw)
            .ok()
            .and_then(|object| object.text("id"))
    } else {
        members::text(raw)
    };
    let named = named
        .ok_or_else(|| ApiError::wrong_type("conversation", "an id, or an object with an `id`"))?;
    id("conversation", named)
}

/// Checks the length and the characters of the id in member `param`.
pub(super) fn id<'a>(param: &str, id: Cow<'a, str>) -> Result<Cow<'a, str>, ApiError> {
    /// Longer than any id of the router or of OpenAI.
    const LENGTH_MAX: usize = 256;
    if !id.bytes().all(is_id_byte) {
        Err(ApiError::malformed_id(param, &id))
    } else if (1..=LENGTH_MAX).contains(&id.len()) {
        Ok(id)
    } else {
        let why = format!("an ID has from 1 to {LENGTH_MAX} characters");
        Err(ApiError::wrong_value(param, why))
    }
}

pub(super) fn is_id_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-')
}

/// The values of `include`, each of which `check` has found good.
fn include<'a>(
    members: &Members<'a>,
    check: impl Fn(&str, &str) -> Result<(), ApiError>,
) -> Result<Vec<Cow<'a, str>>, ApiError> {
    let Some(raw) = members.get("include") else {
        return Ok(Vec::new());
    };
    let names = known_json::values(raw).ok_or_else(|| ApiError::wrong_type("include", "a list"))?;
    let mut include = Vec::new();
    for (index, raw) in names.enumerate() {
        let param = || format!("include[{index}]");
        let name = string(&param(), raw)?;
        check(&param(), &name)?;
        if !include.contains(&name) {
            include.push(name);
        }
    }
    Ok(include)
}

pub(super) fn check_include(param: &str, name: &str) -> Result<(), ApiError> {
    if INCLUDES.contains(&name) {
        return Ok(());
    }
    let known = INCLUDES.join("', '");
    let why = format!("'{name}' is not one of '{known}'");
    Err(ApiError::wrong_value(param, why))
}

fn compact_at(members: &Members<'_>, input: Option<&str>) -> Result<Option<CompactAt>, ApiError> {
    const TRIGGER: &str = "compaction_trigger";
    // A list is read here only if it may have one.
    let items = input.filter(|raw| raw.contains(TRIGGER));
    if let Some(mut items) = items.and_then(known_json::values) {
        let is_trigger = |raw: &str| {
            let item = Members::parse(raw).unwrap_or_default();
            item.text("type").as_deref() == Some(TRIGGER)
        };
        if let Some(place) = items.position(is_trigger) {
            if items.next().is_none() {
                return Ok(Some(CompactAt::Now));
            }
            let why = "a compaction_trigger must be the last item";
            return Err(ApiError::wrong_value(&format!("input[{place}]"), why));
        }
    }
    let Some(raw) = members.get("context_management") else {
        return Ok(None);
    };
    let entries = known_json::values(raw)
        .ok_or_else(|| ApiError::wrong_type("context_management", "a list of objects"))?;
    let mut found = None;
    for (index, raw) in entries.enumerate() {
        let param = |name: &str| format!("context_management[{index}]{name}");
        let entry =
            Members::parse(raw).map_err(|_| ApiError::wrong_type(&param(""), "an object"))?;
        if entry.text("type").as_deref() != Some("compaction") {
            let why = "it must be 'compaction'";
            return Err(ApiError::wrong_value(&param(".type"), why));
        }
        let threshold = entry.get("compact_threshold").filter(|raw| *raw != "null");
        let Some(threshold) = threshold else {
            continue;
        };
        let threshold = threshold.parse::<u64>().ok().filter(|tokens| *tokens > 0);
        let wrong = || ApiError::wrong_type(&param(".compact_threshold"), "a positive integer");
        found = found.or(Some(CompactAt::Tokens(threshold.ok_or_else(wrong)?)));
    }
    Ok(found)
}

fn truncation(members: &Members<'_>) -> Result<Truncation, ApiError> {
    match members.get("truncation") {
        None | Some("\"disabled\"") => Ok(Truncation::Disabled),
        Some("\"auto\"") => Ok(Truncation::Auto),
        Some(_) => Err(ApiError::wrong_value(
            "truncation",
            "it must be 'auto' or 'disabled'",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `expected`: the error's code and parameter with a space between; empty for a valid body.
    fn check(body: &str, expected: &str) {
        let found = match CreateRequest::read(body.as_bytes()) {
            Ok(_) => String::new(),
            Err(error) => format!("{} {}", error.code, error.param_or_empty()),
        };
        assert_eq!(found, expected, "{body}");
    }

    fn with(members: &str) -> String {
        format!(r#"{{"model":"m","input":"x",{members}}}"#)
    }

    #[test]
    fn parameters_and_defaults_are_read() {
        let body = with(r#""stream":true,"store":null,"include":["message.output_text.logprobs"]"#);
        let create = CreateRequest::read(body.as_bytes()).unwrap();
        assert_eq!((&*create.model, create.input), ("m", Some("\"x\"")));
        assert!(create.store && create.stream && !create.background);
        assert!(create.includes("message.output_text.logprobs"));
        assert_eq!(create.parent, Parent::None);
    }

    #[test]
    fn each_mistake_has_its_code_and_param() {
        check("[]", "invalid_json ");
        check(r#"{"model":"m","input":"x"} x"#, "invalid_json ");
        check(r#"{"input":"x"}"#, "missing_required_parameter model");
        check(r#"{"model":7,"input":"x"}"#, "invalid_type model");
        check(r#"{"model":"m"}"#, "missing_required_parameter input");
        check(r#"{"model":"m","input":7}"#, "invalid_type input");
        check(&with(r#""stream":1"#), "invalid_type stream");
        check(&with(r#""store":"no""#), "invalid_type store");
        check(
            &with(r#""instructions":["a"]"#),
            "invalid_type instructions",
        );
        check(&with(r#""truncation":"half""#), "invalid_value truncation");
        check(&with(r#""include":["all"]"#), "invalid_value include[0]");
        check(&with(r#""include":"all""#), "invalid_type include");
        check(
            &with(r#""prompt":{"id":"p"}"#),
            "unsupported_parameter prompt",
        );
        let managed = |value: &str| with(&format!(r#""context_management":{value}"#));
        check(&managed("[]"), "");
        check(&managed(r#"[{"type":"compaction"}]"#), "");
        check(
            &managed(r#"[{"type":"compaction","compact_threshold":9}]"#),
            "",
        );
        check(&managed("{}"), "invalid_type context_management");
        check(&managed("[7]"), "invalid_type context_management[0]");
        check(
            &managed(r#"[{"type":"other"}]"#),
            "invalid_value context_management[0].type",
        );
        check(
            &managed(r#"[{"type":"compaction","compact_threshold":0}]"#),
            "invalid_type context_management[0].compact_threshold",
        );
        check(
            &managed(r#"[{"type":"compaction","compact_threshold":9}],"background":true"#),
            "unsupported_parameter context_management",
        );
        check(
            r#"{"model":"m","input":[{"type":"compaction_trigger"},{"role":"user","content":"a"}]}"#,
            "invalid_value input[0]",
        );
    }

    #[test]
    fn an_id_is_refused_for_what_is_wrong_with_it() {
        let long = "a".repeat(257);
        for (id, expected) in [
            ("a b", "additional characters"),
            ("", "from 1 to 256 characters"),
            (&*long, "from 1 to 256 characters"),
        ] {
            for param in ["previous_response_id", "conversation"] {
                let body = with(&format!(r#""{param}":"{id}""#));
                check(&body, &format!("invalid_value {param}"));
                let error = CreateRequest::read(body.as_bytes()).err();
                let message = error.map(|error| error.message).unwrap_or_default();
                assert!(message.ends_with(&format!("{expected}.")), "{message}");
            }
        }
    }

    #[test]
    fn reserved_members_are_refused_by_name() {
        for name in ["request_id", "kv_transfer_params", "ec_transfer_params"] {
            let expected = format!("unsupported_parameter {name}");
            check(&with(&format!(r#""{name}":"x""#)), &expected);
            check(&with(&format!(r#""{name}":null"#)), "");
        }
        check(
            &with(r#""\u0072equest_id":"x""#),
            "unsupported_parameter request_id",
        );
        for name in ["kv_transfer_params", "ec_transfer_params"] {
            let expected = format!("unsupported_parameter vllm_xargs.{name}");
            let xargs = format!(r#""vllm_xargs":{{"{name}":null}}"#);
            check(&with(&xargs), &expected);
            check(&with(&format!(r#""vllm_xargs":null,{xargs}"#)), &expected);
            // `Members` keeps the last of two members with the same name.
            check(&with(&format!(r#"{xargs},"vllm_xargs":null"#)), "");
        }
        check(&with(r#""vllm_xargs":{"a":1}"#), "");
    }

    #[test]
    fn a_stored_request_is_read_as_the_release_that_accepted_it_read_it() {
        let stored = |members: &str| {
            let body = with(&format!(r#""background":true,{members}"#));
            CreateRequest::read_stored(body.as_bytes())
                .map(|create| create.include.len())
                .map_err(|error| error.code.to_owned())
        };
        for (members, included) in [
            (r#""max_output_tokens":"100""#, 0),
            (r#""temperature":"0.7","user":7"#, 0),
            (r#""instructions":["a"],"metadata":{"k":1}"#, 0),
            (r#""include":["of.another.release"]"#, 1),
            (
                r#""context_management":[{"type":"compaction","compact_threshold":9}]"#,
                0,
            ),
        ] {
            let body = with(&format!(r#""background":true,{members}"#));
            assert!(CreateRequest::read(body.as_bytes()).is_err(), "{members}");
            assert_eq!(stored(members), Ok(included), "{members}");
        }
        for (members, code) in [
            (r#""stream":1"#, "invalid_type"),
            (r#""truncation":"half""#, "invalid_value"),
            (r#""request_id":"x""#, "unsupported_parameter"),
            (
                r#""vllm_xargs":{"kv_transfer_params":1}"#,
                "unsupported_parameter",
            ),
        ] {
            assert_eq!(stored(members), Err(code.to_owned()), "{members}");
        }
    }

    #[test]
    fn only_one_parent_is_allowed() {
        let previous = r#""previous_response_id":"resp_1""#;
        let conversation = r#""conversation":{"id":"conv_1"}"#;
        let client_held = r#""previous_response":{"id":"resp_1"}"#;
        for (body, param) in [
            (format!("{previous},{conversation}"), "conversation"),
            (format!("{previous},{client_held}"), "previous_response"),
            (format!("{conversation},{client_held}"), "previous_response"),
        ] {
            let expected = format!("mutually_exclusive_parameters {param}");
            check(&with(&body), &expected);
        }
        check(&format!(r#"{{"model":"m",{previous}}}"#), "");
        check(&format!(r#"{{"model":"m",{conversation}}}"#), "");
        check(
            &with(&format!(r#"{client_held},"background":true"#)),
            "mutually_exclusive_parameters previous_response",
        );
    }

    #[test]
    fn the_characters_of_ids_are_checked() {
        let previous = |id: &str| with(&format!(r#""previous_response_id":"{id}""#));
        check(&previous("resp_a-B9"), "");
        check(&previous("resp a"), "invalid_value previous_response_id");
        check(&previous(""), "invalid_value previous_response_id");
        check(&previous("resp_é"), "invalid_value previous_response_id");
        check(
            &with(r#""conversation":"a/b""#),
            "invalid_value conversation",
        );
        check(
            &with(r#""conversation":{"x":1}"#),
            "invalid_type conversation",
        );
    }

    #[test]
    fn metadata_is_limited() {
        let metadata = |pairs: String| with(&format!(r#""metadata":{{{pairs}}}"#));
        let pairs = |count: usize| {
            let pairs: Vec<String> = (0..count)
                .map(|number| format!(r#""k{number}":"v""#))
                .collect();
            pairs.join(",")
        };
        check(&metadata(pairs(16)), "");
        check(&metadata(pairs(17)), "invalid_value metadata");
        check(
            &metadata(format!(r#""{}":"v""#, "k".repeat(65))),
            "invalid_value metadata",
        );
        check(&metadata(format!(r#""k":"{}""#, "é".repeat(512))), "");
        check(
            &metadata(format!(r#""k":"{}""#, "é".repeat(513))),
            "invalid_value metadata",
        );
        check(&metadata(r#""k":1"#.to_owned()), "invalid_type metadata.k");
        check(&with(r#""metadata":[]"#), "invalid_type metadata");
    }
}
