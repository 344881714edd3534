//! Reads request traces in the format of Mooncake's public traces: one request per line, with its arrival time, its
//! lengths and the ids of its prompt's blocks. Equal ids mean equal prefixes; there is no text.
//!
//! ```json
//! {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353]}
//! ```

use std::io::{self, BufRead, Read};
use std::num::NonZeroU32;
use std::time::Duration;

use serde::Deserialize;

/// Longest line: enough for a prompt of 50 million tokens in blocks of 512.
const MAX_LINE_BYTES: u64 = 1 << 20;
/// Blocks of all requests together; a replay keeps 24 bytes for each.
const MAX_BLOCKS: usize = 50_000_000;
/// Latest timestamp: 30,000 years, so that no sum of times overflows.
const MAX_TIME: Duration = Duration::from_secs(1_000_000_000_000);
/// Longest prompt or answer: longer than any model's context, and no sum of them overflows.
const MAX_TOKENS: u32 = 100_000_000;

/// One request of a trace.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    /// Arrival, relative to the first request of the trace.
    pub at: Duration,
    pub input_tokens: u32,
    pub output_tokens: u32,
    /// Ids of the prompt's full blocks. Equal ids stand for equal prefixes.
    pub blocks: Vec<u64>,
}

/// Why a trace cannot be replayed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot be read: {0}")]
    Read(io::Error),
    #[error("line {number}: {message}")]
    Line { number: usize, message: String },
    #[error("has no requests")]
    Empty,
    #[error("has more than {max} blocks; replay fewer requests (--requests)", max = MAX_BLOCKS)]
    TooLong,
}

#[derive(Deserialize)]
struct Line {
    /// Milliseconds, which may have a fraction.
    timestamp: f64,
    input_length: u32,
    output_length: u32,
    hash_ids: Vec<u64>,
}

/// Reads the first `max_requests` requests of a trace, and orders them by time.
pub fn read(
    mut from: impl BufRead,
    block_tokens: NonZeroU32,
    max_requests: usize,
) -> Result<Vec<Entry>, Error> {
    let mut entries = Vec::new();
    let mut blocks = 0;
    let mut line = Vec::new();
    for number in 1.. {
        line.clear();
        let read = (&mut from)
            .take(MAX_LINE_BYTES)
            .read_until(b'\n', &mut line)
            .map_err(Error::Read)?;
        if read == 0 || entries.len() == max_requests {
            break;
        }
        if line.trim_ascii().is_empty() {
            continue;
        }
        let entry = parse(&line, block_tokens);
        let entry = entry.map_err(|message| Error::Line { number, message })?;
        blocks += entry.blocks.len();
        if blocks > MAX_BLOCKS {
            return Err(Error::TooLong);
        }
        entries.push(entry);
    }
    // A stable sort: requests with the same time stay in the order of the trace.
    entries.sort_by_key(|entry| entry.at);
    let Some(start) = entries.first().map(|first| first.at) else {
        return Err(Error::Empty);
    };
    for entry in &mut entries {
        entry.at -= start;
    }
    Ok(entries)
}

fn parse(line: &[u8], block_tokens: NonZeroU32) -> Result<Entry, String> {
    if line.len() as u64 == MAX_LINE_BYTES && !line.ends_with(b"\n") {
        return Err(format!("is longer than {MAX_LINE_BYTES} bytes"));
    }
    let line: Line =
        serde_json::from_slice(line.trim_ascii_end()).map_err(|error| without_line(&error))?;
    let at = Duration::try_from_secs_f64(line.timestamp / 1_000.0)
        .ok()
        .filter(|at| *at <= MAX_TIME)
        .ok_or_else(|| format!("timestamp {} is not a valid time", line.timestamp))?;
    for (name, tokens) in [
        ("input_length", line.input_length),
        ("output_length", line.output_length),
    ] {
        if tokens > MAX_TOKENS {
            return Err(format!("{name} {tokens} is more than {MAX_TOKENS}"));
        }
    }
    let full = (line.input_length / block_tokens) as usize;
    let started = line.input_length.div_ceil(block_tokens.get()) as usize;
    // The last block of a prompt is rarely full; traces may list its id or not.
    if !(full..=started).contains(&line.hash_ids.len()) {
        return Err(format!(
            "{} hash_ids for {} tokens, which are {started} blocks of {block_tokens}",
            line.hash_ids.len(),
            line.input_length,
        ));
    }
    let mut blocks = line.hash_ids;
    blocks.truncate(full);
    Ok(Entry {
        at,
        input_tokens: line.input_length,
        output_tokens: line.output_length,
        blocks,
    })
}

/// The text of the error without the line number, which is always 1 because the parser sees one line only.
fn without_line(error: &serde_json::Error) -> String {
    let text = error.to_string();
    match text.rsplit_once(" at line ") {
        Some((what, _)) => format!("{what} at column {}", error.column()),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trace(text: &str) -> Result<Vec<Entry>, String> {
        let block_tokens = NonZeroU32::new(512).unwrap();
        read(text.as_bytes(), block_tokens, usize::MAX).map_err(|error| error.to_string())
    }

    #[test]
    fn a_line_is_a_request_and_only_full_blocks_count() {
        let text = r#"{"timestamp": 1500, "input_length": 1030, "output_length": 7, "hash_ids": [4, 5, 6], "type": "chat"}

            {"timestamp": 1000.5, "input_length": 512, "output_length": 0, "hash_ids": [4]}"#;
        let entry = |at, input_tokens, output_tokens, blocks: &[u64]| Entry {
            at: Duration::from_micros(at),
            input_tokens,
            output_tokens,
            blocks: blocks.to_vec(),
        };
        let expected = [entry(0, 512, 0, &[4]), entry(499_500, 1_030, 7, &[4, 5])];
        assert_eq!(trace(text).unwrap(), expected);
    }

    #[test]
    fn an_error_names_the_line() {
        let good = r#"{"timestamp": 0, "input_length": 10, "output_length": 1, "hash_ids": []}"#;
        let check = |line: &str, expected: &str| {
            let found = trace(&format!("{good}\n\n{line}\n{good}")).unwrap_err();
            assert!(found.starts_with(&format!("line 3: {expected}")), "{found}");
        };
        check("{", "EOF while parsing an object at column 1");
        check(r#"{"timestamp": 0}"#, "missing field `input_length`");
        check(
            r#"{"timestamp": -1, "input_length": 10, "output_length": 1, "hash_ids": []}"#,
            "timestamp -1 is not a valid time",
        );
        check(
            r#"{"timestamp": 0, "input_length": 1025, "output_length": 1, "hash_ids": [1]}"#,
            "1 hash_ids for 1025 tokens, which are 3 blocks of 512",
        );
        check(
            r#"{"timestamp": 0, "input_length": 200000000, "output_length": 1, "hash_ids": []}"#,
            "input_length 200000000 is more than 100000000",
        );
        check(&"x".repeat(2 << 20), "is longer than 1048576 bytes");
    }

    #[test]
    fn a_trace_without_requests_is_refused() {
        assert_eq!(trace("\n \n").unwrap_err(), "has no requests");
    }

    #[test]
    fn only_the_first_requests_are_read() {
        let line = r#"{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": []}"#;
        let text = format!("{line}\n{line}\nbroken");
        let block_tokens = NonZeroU32::new(16).unwrap();
        assert_eq!(read(text.as_bytes(), block_tokens, 2).unwrap().len(), 2);
    }
}
