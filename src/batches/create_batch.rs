//! The body that creates a batch of OpenAI's API. Pure.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::time::Duration;

use super::line::LineEndpoint;
use crate::json_scan::Scan;
use crate::openai::error::ApiError;
use crate::openai::metadata;
use crate::units::{format_duration, parse_duration};

/// OpenAI's bounds of the time that output files are kept.
const MIN_EXPIRES_AFTER_S: u64 = 3_600;
const MAX_EXPIRES_AFTER_S: u64 = 2_592_000;

/// What a `completion_window` is.
pub const WINDOW_SHAPE: &str = "a duration such as '24h', '30m' or '7d'";

/// Characters of a `completion_window` at most: it is kept and shown as it was written.
const MAX_WINDOW_LENGTH: usize = 32;

/// What a client wants to be run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct CreateBatch {
    pub(super) input_file_id: String,
    pub(super) endpoint: LineEndpoint,
    /// As the client wrote it.
    pub(super) completion_window: String,
    /// The same.
    pub(super) window: Duration,
    pub(super) metadata: Option<BTreeMap<String, String>>,
    pub(super) output_expires_after: Option<Duration>,
}

/// The raw JSON of the members. Of a repeated member the last counts.
#[derive(Default)]
struct BatchMembers<'a> {
    input_file_id: Option<&'a str>,
    endpoint: Option<&'a str>,
    completion_window: Option<&'a str>,
    metadata: Option<&'a str>,
    output_expires_after: Option<&'a str>,
    unknown: Option<Cow<'a, str>>,
}

impl<'a> BatchMembers<'a> {
    fn of(body: &'a [u8]) -> Option<Self> {
        let mut found = Self::default();
        let scan = Scan::<true>::of_bytes(body)?;
        scan.whole_object(|name, value| {
            let member = match name.as_ref() {
                "input_file_id" => &mut found.input_file_id,
                "endpoint" => &mut found.endpoint,
                "completion_window" => &mut found.completion_window,
                "metadata" => &mut found.metadata,
                "output_expires_after" => &mut found.output_expires_after,
                _ => {
                    found.unknown.get_or_insert(name);
                    return;
                }
            };
            *member = Some(value).filter(|value| *value != "null");
        })?;
        Some(found)
    }
}

impl CreateBatch {
    /// `max_window`: the longest `completion_window`.
    pub(super) fn read(body: &[u8], max_window: Duration) -> Result<Self, ApiError> {
        let members = BatchMembers::of(body)
            .ok_or_else(|| ApiError::bad_json(&"it must be one JSON object"))?;
        if let Some(unknown) = members.unknown {
            return Err(ApiError::unknown_parameter(&unknown));
        }
        let endpoint = text(members.endpoint, "endpoint")?;
        let endpoint = LineEndpoint::of_path(&endpoint).ok_or_else(|| {
            let paths = LineEndpoint::ALL.map(|endpoint| format!("'{}'", endpoint.path()));
            let why = format!("supported values are {}", paths.join(", "));
            ApiError::wrong_value("endpoint", why)
        })?;
        let completion_window = text(members.completion_window, "completion_window")?.into_owned();
        let window = window(&completion_window, max_window)?;
        Ok(Self {
            input_file_id: text(members.input_file_id, "input_file_id")?.into_owned(),
            endpoint,
            completion_window,
            window,
            metadata: members.metadata.map(metadata::read).transpose()?,
            output_expires_after: members
                .output_expires_after
                .map(expires_after)
                .transpose()?,
        })
    }
}

fn text<'a>(raw: Option<&'a str>, param: &str) -> Result<Cow<'a, str>, ApiError> {
    let raw = raw.ok_or_else(|| ApiError::missing_parameter(param))?;
    let text = raw.starts_with('"').then(|| Scan::<false>::new(raw).text());
    text.flatten()
        .ok_or_else(|| ApiError::wrong_type(param, "a string"))
}

/// A `completion_window`, whatever time it names.
pub fn read_window(text: &str) -> Option<Duration> {
    if text.len() > MAX_WINDOW_LENGTH || text.contains(char::is_whitespace) {
        return None;
    }
    let window = parse_duration(text).ok();
    window.filter(|window| !window.is_zero())
}

fn window(text: &str, max_window: Duration) -> Result<Duration, ApiError> {
    let window = read_window(text).filter(|window| *window <= max_window);
    window.ok_or_else(|| {
        let most = format_duration(max_window);
        let why = format!("it must be {WINDOW_SHAPE}, up to '{most}'");
        ApiError::wrong_value("completion_window", why)
    })
}

fn expires_after(raw: &str) -> Result<Duration, ApiError> {
    const PARAM: &str = "output_expires_after";
    let (mut anchor, mut seconds) = (None, None);
    let scan = Scan::<false>::new(raw);
    let read = scan.whole_object(|name, value| match name.as_ref() {
        "anchor" => anchor = Some(value),
        "seconds" => seconds = Some(value),
        _ => {}
    });
    if read.is_none() {
        return Err(ApiError::wrong_type(PARAM, "an object"));
    }
    let anchor = text(anchor, "output_expires_after.anchor")?;
    if anchor != "created_at" {
        let why = "it must be 'created_at'";
        return Err(ApiError::wrong_value("output_expires_after.anchor", why));
    }
    let param = "output_expires_after.seconds";
    let seconds = seconds.ok_or_else(|| ApiError::missing_parameter(param))?;
    let (least, most) = (MIN_EXPIRES_AFTER_S, MAX_EXPIRES_AFTER_S);
    let seconds = seconds.parse::<u64>().ok();
    let seconds = seconds.filter(|seconds| (least..=most).contains(seconds));
    seconds
        .map(Duration::from_secs)
        .ok_or_else(|| ApiError::wrong_value(param, format!("it must be from {least} to {most}")))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    const DAY: Duration = Duration::from_secs(24 * 3_600);

    fn body() -> Value {
        json!({
            "input_file_id": "file-1",
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
        })
    }

    fn read(body: &Value) -> Result<CreateBatch, ApiError> {
        CreateBatch::read(body.to_string().as_bytes(), 30 * DAY)
    }

    #[test]
    fn a_body_of_an_sdk_is_read() {
        let expected = CreateBatch {
            input_file_id: "file-1".to_owned(),
            endpoint: LineEndpoint::ChatCompletions,
            completion_window: "24h".to_owned(),
            window: DAY,
            metadata: None,
            output_expires_after: None,
        };
        assert_eq!(read(&body()).unwrap(), expected);
        let mut all = body();
        all["metadata"] = json!({"job": "nightly"});
        all["output_expires_after"] = json!({"anchor": "created_at", "seconds": 3_600});
        let found = read(&all).unwrap();
        assert_eq!(found.output_expires_after, Some(Duration::from_secs(3_600)));
        assert_eq!(found.metadata.unwrap()["job"], "nightly");
        let mut none = body();
        none["metadata"] = Value::Null;
        assert_eq!(read(&none).unwrap(), expected);
    }

    #[test]
    fn any_window_up_to_the_longest_is_taken() {
        let of = |window: &str| {
            let mut body = body();
            body["completion_window"] = json!(window);
            read(&body).map(|create| create.window)
        };
        assert_eq!(of("1h").unwrap(), DAY / 24);
        assert_eq!(of("7d").unwrap(), 7 * DAY);
        assert_eq!(of("30d").unwrap(), 30 * DAY);
        let of_length = |length: usize| format!("{}1h", "0".repeat(length - 2));
        let (longest, too_long) = (of_length(32), of_length(33));
        assert_eq!(of(&longest).unwrap(), DAY / 24);
        let wrong = ["31d", "0s", "24", "soon", "", "24h ", " 24h", "24 h"];
        for text in wrong.into_iter().chain([&*too_long]) {
            let error = of(text).unwrap_err();
            assert_eq!(error.param_or_empty(), "completion_window", "{text}");
            assert!(error.message.contains("up to '30d'"), "{}", error.message);
        }
    }

    #[test]
    fn what_is_wrong_is_named() {
        let check = |name: &str, value: Value, param: &str| {
            let mut wrong = body();
            wrong[name] = value;
            assert_eq!(read(&wrong).unwrap_err().param_or_empty(), param);
        };
        check("input_file_id", Value::Null, "input_file_id");
        check("input_file_id", json!(1), "input_file_id");
        check("endpoint", json!("/v1/audio"), "endpoint");
        check("completion_windo", json!("24h"), "completion_windo");
        check("metadata", json!([]), "metadata");
        check("output_expires_after", json!(1), "output_expires_after");
        let anchor = "output_expires_after.anchor";
        check("output_expires_after", json!({"seconds": 3_600}), anchor);
        let seconds = "output_expires_after.seconds";
        let short = json!({"anchor": "created_at", "seconds": 60});
        check("output_expires_after", short, seconds);
        let text = CreateBatch::read(b"[]", DAY).unwrap_err();
        assert_eq!(text.code, "invalid_json");
    }
}
