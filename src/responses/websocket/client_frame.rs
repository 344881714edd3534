//! What a client's frame asks for. Pure.

use std::sync::Arc;

use bytes::Bytes;

use crate::ids::ResponseId;
use crate::openai::error::ApiError;
use crate::prompt;
use crate::responses::members::{Members, put, put_read};

/// Longest name of a lane, in characters.
const LANE_LENGTH_MAX: usize = 256;

/// Members of a frame that are not part of a create's body. Streams are always streams here; `client_metadata` is for
/// the client's own tracing.
const NOT_IN_BODY: [&str; 6] = [
    "type",
    "stream_id",
    "generate",
    "stream",
    "stream_options",
    "client_metadata",
];

/// A sequence of turns, each after the one before: a name of the client's (`stream_id`), or the lane of frames
/// without a name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Lane(Option<Arc<str>>);

impl Lane {
    pub const DEFAULT: Self = Self(None);

    /// `None` for a name that no lane may have.
    pub fn named(name: &str) -> Option<Self> {
        let is_allowed =
            |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.');
        let is_valid = (1..=LANE_LENGTH_MAX).contains(&name.len()) && name.bytes().all(is_allowed);
        is_valid.then(|| Self(Some(name.into())))
    }

    pub fn name(&self) -> Option<&str> {
        self.0.as_deref()
    }
}

#[derive(Debug)]
pub enum ClientFrame {
    Create(CreateFrame),
    /// Needs no answer.
    Ignored,
    /// Answered with this frame.
    Answered(Bytes),
}

/// `response.create`.
#[derive(Debug)]
pub struct CreateFrame {
    pub lane: Lane,
    /// `None` for a text that is no id, too: nothing that is remembered has it.
    pub previous: Option<ResponseId>,
    /// Or the error that the turn ends with when it is its lane's turn.
    pub work: Result<Work, ApiError>,
}

/// What a turn does.
#[derive(Clone, Debug, PartialEq)]
pub struct Work {
    /// As `POST /v1/responses` would get it.
    pub body: Bytes,
    /// False: no model is asked.
    pub generates: bool,
}

/// Reads a text frame. The error of a frame that belongs to no lane.
pub fn read(text: &[u8]) -> Result<ClientFrame, ApiError> {
    prompt::check_nesting(text)?;
    let text = std::str::from_utf8(text).map_err(|error| ApiError::bad_frame(&error))?;
    let members = Members::parse(text).map_err(|error| ApiError::bad_frame(&error))?;
    match members.text("type").as_deref() {
        Some("response.create") => create(&members).map(ClientFrame::Create),
        Some("response.processed") => Ok(ClientFrame::Ignored),
        Some("response.steer") => steer(&members).map(ClientFrame::Answered),
        Some(other) => Err(ApiError::unknown_frame(other)),
        None => Err(ApiError::missing_parameter("type")),
    }
}

fn create(members: &Members<'_>) -> Result<CreateFrame, ApiError> {
    // `get` takes null for a missing member; as a name it is invalid.
    let named = members.iter().find(|(name, _)| *name == "stream_id");
    let lane = match named {
        None => Lane::DEFAULT,
        Some(_) => members
            .text("stream_id")
            .and_then(|name| Lane::named(&name))
            .ok_or_else(ApiError::invalid_stream_id)?,
    };
    // Read before anything else is checked: a turn that fails for its content is a failed continuation.
    let previous = members.text("previous_response_id");
    Ok(CreateFrame {
        lane,
        previous: previous.and_then(|id| id.parse().ok()),
        work: work(members),
    })
}

fn work(members: &Members<'_>) -> Result<Work, ApiError> {
    match members.get("stream") {
        None | Some("true") => {}
        Some("false") => {
            let why = "cannot be false: responses are always streamed over a WebSocket";
            return Err(ApiError::unsupported("stream", why));
        }
        Some(_) => return Err(ApiError::wrong_type("stream", "true or false")),
    }
    match members.get("background") {
        None | Some("false") => {}
        Some("true") => {
            let why = "is not supported over a WebSocket: send `POST /v1/responses`";
            return Err(ApiError::unsupported("background", why));
        }
        Some(_) => return Err(ApiError::wrong_type("background", "true or false")),
    }
    let prewarms = members
        .get("prompt_cache_options")
        .and_then(|raw| Members::parse(raw).ok())
        .is_some_and(|options| options.get("prewarm") == Some("true"));
    let generates = match members.get("generate") {
        None | Some("true") => !prewarms,
        Some("false") => false,
        Some(_) => return Err(ApiError::wrong_type("generate", "true or false")),
    };
    let in_body = || {
        members
            .iter()
            .filter(|(name, _)| !NOT_IN_BODY.contains(name))
    };
    // No more than that: a turn that waits counts with the length of its body.
    let length: usize = in_body()
        .map(|(name, raw)| name.len() + raw.len() + 4)
        .sum();
    let mut body = Vec::with_capacity(length + 16);
    body.extend_from_slice(br#"{"stream":true"#);
    for (name, raw) in in_body() {
        put_read(&mut body, name, raw);
    }
    body.push(b'}');
    Ok(Work {
        body: body.into(),
        generates,
    })
}

/// Nothing is steered: the client gets its input back, for a create of its own.
fn steer(members: &Members<'_>) -> Result<Bytes, ApiError> {
    let required = |name: &str| {
        members
            .get(name)
            .ok_or_else(|| ApiError::missing_parameter(name))
    };
    let (previous, input) = (required("previous_response_id")?, required("input")?);
    let mut out = br#"{"type":"response.steer.failed","sequence_number":0,"error":{"code":"steering_not_supported","message":"A running response cannot be steered here: send its input with the next response.create.","type":"invalid_request_error"},"steer":{"#.to_vec();
    out.extend_from_slice(br#""previous_response_id":"#);
    out.extend_from_slice(previous.as_bytes());
    put(&mut out, "input", input);
    out.extend_from_slice(b"}}");
    Ok(out.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "resp_00000000000000ab000000000000000000000000000000cd";

    fn create_of(members: &str) -> CreateFrame {
        let text = format!(r#"{{"type":"response.create"{members}}}"#);
        match read(text.as_bytes()) {
            Ok(ClientFrame::Create(create)) => create,
            other => panic!("{text}: {other:?}"),
        }
    }

    /// The code and parameter of the error, with a space between.
    fn refused(text: &str) -> String {
        match read(text.as_bytes()) {
            Err(error) => format!("{} {}", error.code, error.param_or_empty()),
            Ok(frame) => panic!("{text}: {frame:?}"),
        }
    }

    #[test]
    fn a_create_is_the_body_of_a_streamed_request_over_http() {
        let create = create_of(
            r#","model":"m","input":"x","stream":true,"stream_options":{"a":1},"stream_id":"a.b-c_D","client_metadata":{"t":"1"},"generate":true,"store":false,"previous_response_id":"resp_1","odd \"name":1"#,
        );
        assert_eq!(create.lane.name(), Some("a.b-c_D"));
        let work = create.work.unwrap();
        assert!(work.generates);
        assert_eq!(
            work.body,
            r#"{"stream":true,"model":"m","input":"x","store":false,"previous_response_id":"resp_1","odd \"name":1}"#
        );
    }

    #[test]
    fn a_frame_that_generates_nothing_says_so_in_one_of_two_ways() {
        assert!(create_of("").work.unwrap().generates);
        let generates = |members: &str| create_of(members).work.unwrap().generates;
        assert!(!generates(r#","generate":false"#));
        assert!(!generates(r#","prompt_cache_options":{"prewarm":true}"#));
        assert!(!generates(
            r#","generate":true,"prompt_cache_options":{"prewarm":true}"#
        ));
        assert!(generates(r#","prompt_cache_options":{"prewarm":false}"#));
    }

    #[test]
    fn members_of_http_alone_fail_in_their_lane() {
        let check = |members: &str, expected: &str| {
            let create = create_of(&format!(
                r#"{members},"stream_id":"a","previous_response_id":"{ID}""#
            ));
            assert_eq!(create.lane.name(), Some("a"));
            assert_eq!(create.previous, ID.parse::<ResponseId>().ok());
            let error = create.work.unwrap_err();
            let found = format!("{} {}", error.code, error.param_or_empty());
            assert_eq!(found, expected);
        };
        check(r#","stream":false"#, "unsupported_parameter stream");
        check(r#","stream":1"#, "invalid_type stream");
        check(r#","background":true"#, "unsupported_parameter background");
        check(r#","generate":"no""#, "invalid_type generate");
        assert!(
            create_of(r#","background":false,"stream":null"#)
                .work
                .is_ok()
        );
    }

    #[test]
    fn a_previous_response_is_an_id_or_none() {
        let previous = |raw: &str| create_of(&format!(r#","previous_response_id":{raw}"#)).previous;
        assert_eq!(
            previous(&format!("\"{ID}\"")).map(|id| id.to_string()),
            Some(ID.to_owned())
        );
        let long = format!("\"{ID}{}\"", "0".repeat(1_000));
        for raw in ["null", "7", r#""resp_1""#, long.as_str()] {
            assert_eq!(previous(raw), None, "{raw}");
        }
    }

    #[test]
    fn what_is_not_in_the_body_takes_no_memory_there() {
        let create = create_of(&format!(
            r#","client_metadata":{{"k":"{}"}}"#,
            "x".repeat(1 << 20)
        ));
        let body = create.work.unwrap().body.try_into_mut().unwrap();
        assert!(body.capacity() < 1_000, "{}", body.capacity());
    }

    #[test]
    fn a_lane_has_a_name_of_1_to_256_plain_characters() {
        let check = |id: &str, is_valid: bool| {
            let text = format!(r#"{{"type":"response.create","stream_id":{id}}}"#);
            if is_valid {
                assert!(read(text.as_bytes()).is_ok(), "{id}");
            } else {
                assert_eq!(refused(&text), "invalid_stream_id stream_id", "{id}");
            }
        };
        check(r#""a""#, true);
        check(r#""A.9_-""#, true);
        check(&format!("\"{}\"", "x".repeat(256)), true);
        check(&format!("\"{}\"", "x".repeat(257)), false);
        for id in [r#""""#, "null", "7", r#""a b""#, r#""\u00e9""#, r#""a/b""#] {
            check(id, false);
        }
    }

    #[test]
    fn what_is_no_create_is_ignored_answered_or_refused() {
        let processed = br#"{"type":"response.processed","response_id":"resp_1"}"#;
        assert!(matches!(read(processed), Ok(ClientFrame::Ignored)));
        assert_eq!(refused("[]"), "invalid_json ");
        assert_eq!(refused("{"), "invalid_json ");
        assert_eq!(refused("{}"), "missing_required_parameter type");
        assert_eq!(
            refused(r#"{"type":"response.inject"}"#),
            "unknown_event_type type"
        );
        assert_eq!(
            refused(r#"{"type":"response.cancel"}"#),
            "unknown_event_type type"
        );
        let deep = format!(
            r#"{{"type":"response.create","input":{}"#,
            "[".repeat(5_000)
        );
        assert_eq!(refused(&deep), "nested_too_deeply input");
    }

    #[test]
    fn steering_fails_with_the_input_that_was_sent() {
        let steer = br#"{"type":"response.steer","previous_response_id":"resp_1","input":[{"role":"user","content":"x"}]}"#;
        let Ok(ClientFrame::Answered(answer)) = read(steer) else {
            panic!("not answered");
        };
        let answer: serde_json::Value = serde_json::from_slice(&answer).unwrap();
        assert_eq!(answer["type"], "response.steer.failed");
        assert_eq!(answer["error"]["code"], "steering_not_supported");
        assert_eq!(answer["steer"]["previous_response_id"], "resp_1");
        assert_eq!(answer["steer"]["input"][0]["content"], "x");
        assert_eq!(
            refused(r#"{"type":"response.steer","input":"x"}"#),
            "missing_required_parameter previous_response_id"
        );
    }
}
