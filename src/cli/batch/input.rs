//! Looks through an input before it is sent, as the router will: a mistake in a line is named here, and not after an
//! upload of a gigabyte.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek};
use std::path::Path;

use indicatif::{HumanBytes, HumanCount};
use serde::Deserialize;
use sha2::{Digest, Sha256};

use super::batch_answer::problems;
use super::progress::{BYTES, bar, write_line};
use super::saved_run::InputIdentity;
use crate::batches::line::{Flavor, LineEndpoint, MAX_LINE_BYTES};
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

/// Reads all of an input. The error has a line for each of the first mistakes.
pub(super) fn check(path: &Path) -> Result<CheckedInput, String> {
    let name = path.display().to_string();
    let failed = |error: std::io::Error| format!("{name}: {error}");
    // Not opened before: a named pipe would wait for its writer.
    if name == "-" || !std::fs::metadata(path).map_err(failed)?.is_file() {
        return Err(format!(
            "{name}: the input must be a file, since it is read twice, to be checked and to be sent: write it to one"
        ));
    }
    let mut file = File::open(path).map_err(failed)?;
    let length = file.metadata().map_err(failed)?.len();
    let endpoint = endpoint_of(BufReader::new(&file)).map_err(|why| format!("{name}: {why}"))?;
    file.rewind().map_err(failed)?;
    let mut input = bar("check", BYTES, length).wrap_read(file);
    let mut validator = Validator::new(endpoint, Flavor::OpenAi, MAX_LINES, |_: &str| None);
    let mut hash = Sha256::new();
    let mut piece = vec![0; PIECE_BYTES];
    let mut bytes = 0;
    while !validator.is_decided() {
        let length = input.read(&mut piece).map_err(failed)?;
        if length == 0 {
            break;
        }
        hash.update(&piece[..length]);
        validator.push(&piece[..length]);
        bytes += length as u64;
    }
    drop(input);
    let plan = validator
        .finish()
        .map_err(|errors| problems(&name, &errors))?;
    let hex = hash.finalize();
    let hex = hex.iter().map(|byte| format!("{byte:02x}"));
    let checked = CheckedInput {
        identity: InputIdentity {
            bytes,
            sha256: hex.collect(),
        },
        lines: u64::from(plan.total),
        endpoint: endpoint.path(),
    };
    let (lines, bytes) = (HumanCount(checked.lines), HumanBytes(bytes));
    write_line(&format!(
        "check: {lines} lines, {bytes}, for {}",
        checked.endpoint
    ));
    Ok(checked)
}

/// What the first request is for; all others must be for the same. Lines that have no URL are left to the check.
fn endpoint_of(input: impl BufRead) -> Result<LineEndpoint, String> {
    #[derive(Deserialize)]
    struct FirstLine {
        url: String,
    }
    for (at, line) in input.take(MAX_LINE_BYTES).split(b'\n').enumerate() {
        let line = line.map_err(|error| error.to_string())?;
        let text = line.strip_prefix(BOM).unwrap_or(&line).trim_ascii();
        if let Ok(first) = serde_json::from_slice::<FirstLine>(text) {
            return LineEndpoint::of_path(&first.url).ok_or_else(|| {
                let paths = LineEndpoint::ALL.map(LineEndpoint::path).join(", ");
                format!("line {}: `url` must be one of {paths}", at + 1)
            });
        }
    }
    Ok(LineEndpoint::default())
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str =
        r#"{"custom_id":"a","method":"POST","url":"/v1/completions","body":{"model":"m"}}"#;

    fn checked(input: &str) -> Result<CheckedInput, String> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), input).unwrap();
        check(file.path())
    }

    #[test]
    fn an_input_has_lines_an_endpoint_and_a_hash() {
        let second = GOOD.replace("\"a\"", "\"b\"");
        for begin in ["", "\n  \n", "\u{feff}"] {
            let text = format!("{begin}{GOOD}\r\n\n{second}");
            let input = checked(&text).unwrap();
            assert_eq!((input.lines, input.endpoint), (2, "/v1/completions"));
            assert_eq!(input.identity.bytes, text.len() as u64);
            let digest = Sha256::digest(text.as_bytes());
            let hex: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
            assert_eq!(input.identity.sha256, hex);
        }
    }

    #[test]
    fn what_can_be_read_only_once_is_no_input() {
        for path in ["-", "/dev/null", "/"] {
            let problem = check(Path::new(path)).unwrap_err();
            assert!(problem.contains("must be a file"), "{problem}");
        }
    }

    #[test]
    fn what_the_router_would_refuse_is_refused_with_line_and_code() {
        let twice = format!("\nnothing\n{GOOD}\n{GOOD}\n");
        let no_endpoint = GOOD.replace("completions", "images");
        for (input, expected) in [
            (
                &*twice,
                "\nline 2: This line is not parseable as valid JSON. (invalid_json_line)\nline 4: ",
            ),
            (&*twice, "(duplicate_custom_id)"),
            (
                &*no_endpoint,
                ": line 1: `url` must be one of /v1/chat/completions, /v1/",
            ),
            ("", "(empty_file)"),
            ("\n \n", "(empty_file)"),
        ] {
            let problem = checked(input).unwrap_err();
            assert!(problem.contains(expected), "{input}: {problem}");
        }
    }
}
