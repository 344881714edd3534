//! Result lines: how they are written, how they lie in part objects until the batch ends, and how the files of results
//! are put together from these. Pure.

use std::borrow::Cow;

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
    /// The id of the batch.
    pub batch: &'a str,
    /// The number of the line.
    pub line: u32,
    pub custom_id: &'a str,
}

/// Whether an answer of this status counts as completed.
pub fn is_ok(status: u16) -> bool {
    (200..300).contains(&status)
}

impl ResultOf<'_> {
    /// The result of a line that was answered, by an engine or by the router.
    pub fn answer(&self, status: u16, request_id: &str, body: &[u8]) -> String {
        match self.flavor {
            Flavor::OpenAi => {
                let response = format!(
                    r#"{{"status_code":{status},"request_id":{},"body":{}}}"#,
                    quoted(request_id),
                    on_one_line(body)
                );
                self.openai(&response, "null")
            }
            Flavor::Messages => {
                let json = on_one_line(body);
                if is_ok(status) && json.starts_with('{') {
                    return self.messages(&format!(r#"{{"type":"succeeded","message":{json}}}"#));
                }
                // An answer that is no message is the engine's fault.
                let failure = StatusCode::from_u16(status).ok().filter(|_| !is_ok(status));
                let code = failure.unwrap_or(StatusCode::BAD_GATEWAY);
                let error = anthropic_of_engine(code, body);
                self.errored(error.as_deref().unwrap_or(&json))
            }
        }
    }

    /// The result of a line that cannot be sent.
    pub fn invalid(&self, error: &LineError) -> String {
        self.failure("invalid_request_error", &error.code, &error.message)
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
            Flavor::Messages => self.errored(&format!(
                r#"{{"type":"error","error":{{"type":"{kind}","message":{message}}}}}"#
            )),
        }
    }

    fn openai(&self, response: &str, error: &str) -> String {
        format!(
            r#"{{"id":"{}","custom_id":{},"response":{response},"error":{error}}}"#,
            self.request_id(),
            quoted(self.custom_id)
        )
    }

    fn messages(&self, result: &str) -> String {
        let custom_id = quoted(self.custom_id);
        format!(r#"{{"custom_id":{custom_id},"result":{result}}}"#)
    }

    fn errored(&self, error: &str) -> String {
        self.messages(&format!(r#"{{"type":"errored","error":{error}}}"#))
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

/// The JSON text without line breaks. What is no JSON becomes a string.
fn on_one_line(body: &[u8]) -> Cow<'_, str> {
    let Ok(value) = serde_json::from_slice::<&RawValue>(body) else {
        return Cow::Owned(quoted(&String::from_utf8_lossy(body)));
    };
    let json = value.get();
    if memchr::memchr2(b'\n', b'\r', json.as_bytes()).is_none() {
        return Cow::Borrowed(json);
    }
    // Strings have none that is not escaped, so all of them stand between values.
    Cow::Owned(json.replace(['\n', '\r'], " "))
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

/// Puts the results of a batch together: of each number the first part line counts, in whatever order they come. It
/// holds a bit for each line.
#[derive(Debug)]
pub struct Assembler {
    total: u32,
    /// A bit for each number that has a result.
    has_result: Vec<u64>,
    counts: LineCounts,
    usage: Usage,
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

    /// Takes a line of a part object. Returns whether the result is a good one, and the result line, if it is the
    /// first of its number.
    pub fn push<'l>(&mut self, part_line: &'l [u8]) -> Option<(bool, &'l [u8])> {
        let (found, text) = PartLine::read(part_line)?;
        if self.total <= found.line || self.has(found.line) {
            return None;
        }
        let (word, bit) = place(found.line);
        *self.has_result.get_mut(word)? |= bit;
        self.counts += LineCounts {
            completed: u32::from(found.is_ok),
            failed: u32::from(!found.is_ok),
        };
        self.usage += found.usage;
        Some((found.is_ok, text))
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

    /// The results so far.
    pub fn counts(&self) -> LineCounts {
        self.counts
    }

    pub fn usage(&self) -> Usage {
        self.usage
    }
}

/// A number's word, and its bit in it.
fn place(line: u32) -> (usize, u64) {
    ((line / 64) as usize, 1 << (line % 64))
}

#[cfg(test)]
mod tests;
