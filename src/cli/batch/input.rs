//! Looks through an input before it is sent, as the router will: a mistake in a line is named here, and not after an
//! upload of a gigabyte.

use std::io::{self, BufRead, BufReader, Read, Seek};

use serde::Deserialize;
use sha2::{Digest, Sha256};

use super::batch_answer::AnsweredError;
use super::begun_run::InputIdentity;
use super::text;
use crate::batches::line::{Flavor, LineEndpoint, LineError, MAX_LINE_BYTES};
use crate::batches::validation::Validator;

/// Ten times as many as a router takes by default, which says itself how many it takes. The hashes of their ids have
/// some 100 MB.
const MAX_LINES: u32 = 2_000_000;
const PIECE_BYTES: usize = 256 << 10;
/// The byte order mark that some editors write.
const BOM: &[u8] = b"\xef\xbb\xbf";

/// An input that may be sent.
#[derive(Debug)]
pub(super) struct CheckedInput {
    pub(super) identity: InputIdentity,
    /// Lines that are not blank.
    pub(super) lines: u64,
    /// What all of them are for.
    pub(super) endpoint: &'static str,
}

/// Reads all of an input. `on_read` is called with the number of bytes so far. The error has a line for each of the
/// first mistakes.
pub(super) fn check(
    input: &mut (impl Read + Seek),
    mut on_read: impl FnMut(u64),
) -> Result<CheckedInput, String> {
    let failed = |error: io::Error| error.to_string();
    let endpoint = endpoint_of(&mut BufReader::new(&mut *input))?;
    input.rewind().map_err(failed)?;
    let mut validator = Validator::new(endpoint, Flavor::OpenAi, MAX_LINES, |_: &str| None);
    let mut hash = Sha256::new();
    let mut piece = vec![0; PIECE_BYTES];
    let mut bytes = 0;
    while !validator.is_decided() {
        let length = match input.read(&mut piece) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            length => length.map_err(failed)?,
        };
        if length == 0 {
            break;
        }
        hash.update(&piece[..length]);
        validator.push(&piece[..length]);
        bytes += length as u64;
        on_read(bytes);
    }
    let plan = validator.finish().map_err(|errors| {
        let errors: Vec<AnsweredError> = errors.into_iter().map(as_answered).collect();
        text::problems(&errors)
    })?;
    let digest = hash.finalize();
    let hex = digest.iter().map(|byte| format!("{byte:02x}"));
    Ok(CheckedInput {
        identity: InputIdentity {
            bytes,
            sha256: hex.collect(),
        },
        lines: u64::from(plan.total),
        endpoint: endpoint.path(),
    })
}

/// What the first request is for; all others must be for the same.
fn endpoint_of(input: &mut impl BufRead) -> Result<LineEndpoint, String> {
    #[derive(Deserialize)]
    struct FirstLine {
        url: String,
    }
    let mut line = Vec::new();
    let mut number: u64 = 0;
    let first = loop {
        number += 1;
        line.clear();
        let mut bounded = input.by_ref().take(MAX_LINE_BYTES);
        let read = bounded.read_until(b'\n', &mut line);
        if read.map_err(|error| error.to_string())? == 0 {
            return Err("has no requests".to_owned());
        }
        let text = line.strip_prefix(BOM).unwrap_or(&line).trim_ascii();
        if !text.is_empty() {
            break serde_json::from_slice::<FirstLine>(text);
        }
    };
    let first = first.map_err(|error| {
        let text = error.to_string();
        let text = text.split(" at line ").next().unwrap_or_default();
        format!("line {number}: is no JSON object with a `url`: {text}")
    })?;
    LineEndpoint::of_path(&first.url).ok_or_else(|| {
        let paths = LineEndpoint::ALL.map(LineEndpoint::path).join(", ");
        format!("line {number}: `url` must be one of {paths}")
    })
}

fn as_answered(error: LineError) -> AnsweredError {
    AnsweredError {
        code: Some(error.code),
        line: error.line.map(u64::from),
        message: Some(error.message),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use super::*;

    const GOOD: &str =
        r#"{"custom_id":"a","method":"POST","url":"/v1/completions","body":{"model":"m"}}"#;

    fn checked(input: &[u8]) -> Result<CheckedInput, String> {
        check(&mut Cursor::new(input), |_| {})
    }

    fn problem(input: &str) -> String {
        checked(input.as_bytes()).unwrap_err()
    }

    #[test]
    fn an_input_has_lines_an_endpoint_and_a_hash() {
        let second = GOOD.replace("\"a\"", "\"b\"");
        for begin in ["", "\n  \n", "\u{feff}"] {
            let text = format!("{begin}{GOOD}\r\n\n{second}");
            let input = checked(text.as_bytes()).unwrap();
            assert_eq!((input.lines, input.endpoint), (2, "/v1/completions"));
            assert_eq!(input.identity.bytes, text.len() as u64);
            let digest = Sha256::digest(text.as_bytes());
            let hex: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
            assert_eq!(input.identity.sha256, hex);
        }
    }

    #[test]
    fn bytes_are_reported_up_to_the_last() {
        let mut text = String::new();
        for number in 0..10_000 {
            text += &GOOD.replace("\"a\"", &format!("\"{number}\""));
            text.push('\n');
        }
        let mut reported = Vec::new();
        let input = check(&mut Cursor::new(&text), |bytes| reported.push(bytes)).unwrap();
        assert_eq!(input.lines, 10_000);
        assert_eq!(reported.last(), Some(&(text.len() as u64)));
        assert!(reported.len() > 1 && reported.is_sorted(), "{reported:?}");
    }

    #[test]
    fn a_first_line_without_an_endpoint_is_named_with_its_number() {
        for line in ["nothing", "[1]", "{\"custom_id\":\"a\"}", &GOOD[..40]] {
            let text = problem(&format!("\n\n{line}\n{GOOD}\n"));
            let expected = "line 3: is no JSON object with a `url`: ";
            assert!(text.starts_with(expected), "{line}: {text}");
        }
        let text = problem(&GOOD.replace("completions", "images"));
        let expected = "line 1: `url` must be one of /v1/chat/completions, /v1/completions, ";
        assert!(text.starts_with(expected), "{text}");
    }

    #[test]
    fn what_the_router_would_refuse_is_refused_with_line_and_code() {
        let text = problem(&format!("{GOOD}\n{GOOD}\nnothing\n"));
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 2, "{text}");
        assert!(lines[0].starts_with("line 2: "), "{text}");
        assert!(lines[0].ends_with("(duplicate_custom_id)"), "{text}");
        assert!(lines[1].starts_with("line 3: "), "{text}");
    }

    #[test]
    fn an_input_without_requests_is_refused() {
        assert_eq!(problem(""), "has no requests");
        assert_eq!(problem("\n \n"), "has no requests");
    }
}
