//! Result lines: how they are written, how they lie in part objects until the batch ends, and how the files of results
//! are put together from these. Pure.

use std::borrow::Cow;
use std::fmt::{self, Display};

use hyper::StatusCode;
use serde::Deserialize;
use serde_json::value::RawValue;
use xxhash_rust::xxh3::xxh3_128;

use super::batch::{Ending, LineCounts, Usage};
use super::line::{Flavor, LineError};
use crate::openai::error::anthropic_of_engine;

/// Whose result a line is.
#[derive(Clone, Copy, Debug)]
pub struct ResultOf<'a> {
    pub flavor: Flavor,
    pub batch: &'a str,
    pub line: u32,
    pub custom_id: &'a str,
}

/// Whether an answer of this status counts as completed.
pub fn is_ok(status: u16) -> bool {
    (200..300).contains(&status)
}

/// Whether a body is a JSON object, as each answer of success is.
pub fn is_object(body: &[u8]) -> bool {
    let json = serde_json::from_slice::<&RawValue>(body);
    json.is_ok_and(|json| json.get().starts_with('{'))
}

impl ResultOf<'_> {
    /// The result of a line that was answered, by an engine or by the router.
    pub fn answer(&self, status: u16, request_id: &str, body: &[u8]) -> String {
        let json = OneLine::of(body);
        match self.flavor {
            Flavor::OpenAi => self.openai(
                format_args!(
                    r#"{{"status_code":{status},"request_id":{},"body":{json}}}"#,
                    quoted(request_id)
                ),
                "null",
            ),
            Flavor::Messages => {
                if is_ok(status) && json.0.starts_with('{') {
                    return self
                        .messages(format_args!(r#"{{"type":"succeeded","message":{json}}}"#));
                }
                // An answer that is no message is the engine's fault.
                let failure = StatusCode::from_u16(status).ok().filter(|_| !is_ok(status));
                let code = failure.unwrap_or(StatusCode::BAD_GATEWAY);
                let error = anthropic_of_engine(code, body);
                error.map_or_else(|| self.errored(&json), |error| self.errored(error))
            }
        }
    }

    /// The result of a line that cannot be sent.
    pub fn invalid(&self, error: &LineError) -> String {
        self.failure("invalid_request_error", &error.code, &error.message)
    }

    /// The result of a line whose batch has failed as a whole. The line itself may be sent again as it is.
    pub fn batch_failed(&self, error: &LineError) -> String {
        self.failure("api_error", &error.code, &error.message)
    }

    /// The result of a line that has none when the batch ends, which is ending like this.
    pub fn not_run(&self, ending: Ending) -> String {
        let (code, message) = match (ending, self.flavor) {
            (Ending::Expired, Flavor::Messages) => return self.messages(r#"{"type":"expired"}"#),
            (Ending::Cancelled, Flavor::Messages) => {
                return self.messages(r#"{"type":"canceled"}"#);
            }
            (Ending::Expired, Flavor::OpenAi) => (
                "batch_expired",
                "This request could not be executed before the completion window expired.",
            ),
            (Ending::Cancelled, Flavor::OpenAi) => (
                "batch_cancelled",
                "This request was not executed because the batch was cancelled.",
            ),
            (Ending::Completed, _) => (
                "result_lost",
                "The result of this request was lost. Please send the request again.",
            ),
        };
        self.failure("api_error", code, message)
    }

    /// The result of a line that has none when the batch ends, and whose `custom_id` went with the input file.
    pub fn input_gone(&self) -> String {
        let number = u64::from(self.line) + 1;
        let message = format!(
            "This request has no result, because the input file of the batch was deleted or has expired. It was line \
             {number} of the file, blank lines not counted; its custom_id is not known any more."
        );
        self.failure("api_error", "input_file_gone", &message)
    }

    /// `kind` is Anthropic's type of the error, `code` OpenAI's code.
    fn failure(&self, kind: &str, code: &str, message: &str) -> String {
        let message = quoted(message);
        match self.flavor {
            Flavor::OpenAi => {
                let error = format!(r#"{{"code":{},"message":{message}}}"#, quoted(code));
                self.openai("null", &error)
            }
            Flavor::Messages => self.errored(format_args!(
                r#"{{"type":"error","error":{{"type":"{kind}","message":{message}}}}}"#
            )),
        }
    }

    fn openai(&self, response: impl Display, error: &str) -> String {
        format!(
            r#"{{"id":"{}","custom_id":{},"response":{response},"error":{error}}}"#,
            self.request_id(),
            quoted(self.custom_id)
        )
    }

    fn messages(&self, result: impl Display) -> String {
        let custom_id = quoted(self.custom_id);
        format!(r#"{{"custom_id":{custom_id},"result":{result}}}"#)
    }

    fn errored(&self, error: impl Display) -> String {
        self.messages(format_args!(r#"{{"type":"errored","error":{error}}}"#))
    }

    /// OpenAI's id of a request in a batch: the same, whichever replica runs the line.
    fn request_id(&self) -> String {
        let hash = xxh3_128(format!("{} {}", self.batch, self.line).as_bytes());
        format!("batch_req_{hash:032x}")
    }
}

fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

/// A JSON text, which is written without line breaks and not copied before: it may be as long as an answer.
struct OneLine<'a>(Cow<'a, str>);

impl<'a> OneLine<'a> {
    /// What is no JSON becomes a string.
    fn of(body: &'a [u8]) -> Self {
        Self(match serde_json::from_slice::<&RawValue>(body) {
            Ok(value) => Cow::Borrowed(value.get()),
            Err(_) => Cow::Owned(quoted(&String::from_utf8_lossy(body))),
        })
    }
}

impl Display for OneLine<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Strings have none that is not escaped, so all of them stand between values.
        let mut pieces = self.0.split(['\n', '\r']);
        f.write_str(pieces.next().unwrap_or_default())?;
        for piece in pieces {
            f.write_str(" ")?;
            f.write_str(piece)?;
        }
        Ok(())
    }
}

/// The tokens that a whole answer of any of the APIs reports. None, if it reports none.
pub fn usage_of(body: &[u8]) -> Usage {
    let answer: Answer = serde_json::from_slice(body).unwrap_or_default();
    let Some(reported) = answer.usage else {
        return Usage::default();
    };
    let details = reported
        .prompt_tokens_details
        .or(reported.input_tokens_details);
    let cached = details.and_then(|details| details.cached_tokens);
    // Anthropic does not count these as input.
    let read = reported.cache_read_input_tokens.unwrap_or(0);
    let written = reported.cache_creation_input_tokens.unwrap_or(0);
    let input = reported.prompt_tokens.or(reported.input_tokens);
    let output = reported.completion_tokens.or(reported.output_tokens);
    Usage {
        input_tokens: input
            .unwrap_or(0)
            .saturating_add(read)
            .saturating_add(written),
        output_tokens: output.unwrap_or(0),
        cached_tokens: cached.unwrap_or(read),
    }
}

#[derive(Default, Deserialize)]
struct Answer {
    usage: Option<ReportedUsage>,
}

#[derive(Deserialize)]
struct ReportedUsage {
    prompt_tokens: Option<u64>,
    input_tokens: Option<u64>,
    completion_tokens: Option<u64>,
    output_tokens: Option<u64>,
    prompt_tokens_details: Option<TokensDetails>,
    input_tokens_details: Option<TokensDetails>,
    cache_read_input_tokens: Option<u64>,
    cache_creation_input_tokens: Option<u64>,
}

#[derive(Deserialize)]
struct TokensDetails {
    cached_tokens: Option<u64>,
}

/// What a line of a part object says beside the result line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartLine {
    /// The number of the input line.
    pub line: u32,
    /// The result line belongs to the output file, not to the error file.
    pub is_ok: bool,
    pub usage: Usage,
}

#[derive(Deserialize)]
struct WrittenPartLine<'a> {
    line: u32,
    ok: bool,
    #[serde(default, rename = "in")]
    input: u64,
    #[serde(default, rename = "out")]
    output: u64,
    #[serde(default)]
    cached: u64,
    #[serde(borrow)]
    text: &'a RawValue,
}

impl PartLine {
    /// Adds the line to a part. `text` is the result line.
    pub fn write(&self, text: &str, part: &mut Vec<u8>) {
        let usage = self.usage;
        let head = format!(
            r#"{{"line":{},"ok":{},"in":{},"out":{},"cached":{},"text":"#,
            self.line, self.is_ok, usage.input_tokens, usage.output_tokens, usage.cached_tokens
        );
        part.extend_from_slice(head.as_bytes());
        part.extend_from_slice(text.as_bytes());
        part.extend_from_slice(b"}\n");
    }

    /// The line and its result line. `None` if it is none that was written whole.
    pub fn read(line: &[u8]) -> Option<(Self, &[u8])> {
        let written: WrittenPartLine<'_> = serde_json::from_slice(line).ok()?;
        let part_line = Self {
            line: written.line,
            is_ok: written.ok,
            usage: Usage {
                input_tokens: written.input,
                output_tokens: written.output,
                cached_tokens: written.cached,
            },
        };
        Some((part_line, written.text.get().as_bytes()))
    }
}

/// What a part object says of a line without a result, so that the next run of its shard goes on counting.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub struct LineTries {
    /// How many tries have failed that counted.
    pub tries: u32,
    /// The number of the input line.
    pub line: u32,
}

impl LineTries {
    /// Adds it to a part. Readers of results pass it over.
    pub fn write(&self, part: &mut Vec<u8>) {
        let line = format!(r#"{{"tries":{},"line":{}}}"#, self.tries, self.line);
        part.extend_from_slice(line.as_bytes());
        part.push(b'\n');
    }

    /// `None` if the line is another one of a part.
    pub fn read(line: &[u8]) -> Option<Self> {
        // A result, which may be long, begins with another member.
        if !line.starts_with(br#"{"tries":"#) {
            return None;
        }
        serde_json::from_slice(line).ok()
    }
}

/// Puts the results of a batch together: of each number the first part line counts, in whatever order they come. It
/// holds a bit for each line.
#[derive(Debug)]
pub struct Assembler {
    total: u32,
    /// A bit for each number that has a result.
    has_result: Vec<u64>,
    /// The results so far.
    pub counts: LineCounts,
    pub usage: Usage,
}

impl Assembler {
    /// Of a batch with so many lines, or of a shard: then `total` is the number after its last line's.
    pub fn new(total: u32) -> Self {
        Self {
            total,
            has_result: vec![0; (total as usize).div_ceil(64)],
            counts: LineCounts::default(),
            usage: Usage::default(),
        }
    }

    /// Takes what a line of a part object says. Whether it is the first of its number.
    pub fn push(&mut self, found: PartLine) -> bool {
        if self.total <= found.line || self.has(found.line) {
            return false;
        }
        let (word, bit) = place(found.line);
        if let Some(word) = self.has_result.get_mut(word) {
            *word |= bit;
        }
        self.counts += LineCounts::one(found.is_ok);
        self.usage += found.usage;
        true
    }

    /// Whether the line of this number has a result.
    pub fn has(&self, line: u32) -> bool {
        let (word, bit) = place(line);
        let word = self.has_result.get(word);
        word.is_some_and(|word| word & bit != 0)
    }

    /// The numbers without a result, in order.
    pub fn missing(&self) -> impl Iterator<Item = u32> {
        (0..self.total).filter(move |line| !self.has(*line))
    }
}

/// A number's word, and its bit in it.
fn place(line: u32) -> (usize, u64) {
    ((line / 64) as usize, 1 << (line % 64))
}

#[cfg(test)]
mod tests;
