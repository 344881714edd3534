//! How far a run has come: a small file beside its output, by which the same command goes on.

use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// The file's content. It is written anew at each step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct BegunRun {
    /// The router's API.
    pub(super) url: String,
    pub(super) input: InputIdentity,
    /// The input at the router.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) file_id: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) batch_id: Option<String>,
    /// Once the results are in their places.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) ended: Option<LineTally>,
}

/// By which an input is known again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct InputIdentity {
    pub(super) bytes: u64,
    pub(super) sha256: String,
}

/// What became of an input's lines.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct LineTally {
    pub(super) status: String,
    pub(super) lines: u64,
    /// Lines of the output file.
    pub(super) succeeded: u64,
    /// Lines of the error file.
    pub(super) failed: u64,
}

impl LineTally {
    /// Lines that are in neither file.
    pub(super) fn missing(&self) -> u64 {
        self.lines
            .saturating_sub(self.succeeded.saturating_add(self.failed))
    }
}

impl BegunRun {
    /// The file of a run with this output.
    pub(super) fn place(output: &Path) -> PathBuf {
        let mut place = OsString::from(output);
        place.push(".batch");
        place.into()
    }

    /// The run that was begun, if there is one.
    pub(super) fn read(place: &Path) -> Result<Option<Self>, String> {
        let text = match std::fs::read(place) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(format!("{}: {error}", place.display())),
        };
        serde_json::from_slice(&text).map(Some).map_err(|error| {
            let anew = Self::begin_anew(place);
            format!(
                "{}: was not written by `batch run` ({error}); {anew}",
                place.display()
            )
        })
    }

    /// What to do about a file that stands in the way.
    pub(super) fn begin_anew(place: &Path) -> String {
        format!("to begin anew, delete {}", place.display())
    }

    /// Replaces the file as a whole.
    pub(super) fn write(&self, place: &Path) -> Result<(), String> {
        let mut temporary = OsString::from(place);
        temporary.push(".new");
        // Texts and numbers always serialize.
        let text = serde_json::to_string_pretty(self).unwrap_or_default() + "\n";
        let written = std::fs::write(&temporary, text);
        let written = written.and_then(|()| std::fs::rename(&temporary, place));
        written.map_err(|error| format!("{}: {error}", place.display()))
    }

    /// Why this run is not gone on with, for another command.
    pub(super) fn refusal(&self, place: &Path, url: &str, input: &InputIdentity) -> Option<String> {
        let place_name = place.display();
        let batch = match &self.batch_id {
            Some(batch_id) => format!(" (its batch is {batch_id} at {})", self.url),
            None => String::new(),
        };
        if self.input != *input {
            let anew = Self::begin_anew(place);
            return Some(format!(
                "{place_name} is of a run with another input{batch}: name another output, or, {anew}"
            ));
        }
        if self.url != url {
            let anew = Self::begin_anew(place);
            return Some(format!(
                "{place_name} is of a run at {own}{batch}: go on there by --url {own}, or, {anew}",
                own = self.url
            ));
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run() -> BegunRun {
        BegunRun {
            url: "http://router:80".to_owned(),
            input: InputIdentity {
                bytes: 12,
                sha256: "ab".to_owned(),
            },
            file_id: Some("file-1".to_owned()),
            batch_id: None,
            ended: None,
        }
    }

    #[test]
    fn what_was_written_is_read_and_what_is_not_there_is_none() {
        let folder = std::env::temp_dir();
        let output = folder.join(format!("warmroute-begun-{}.jsonl", fastrand::u64(..)));
        let place = BegunRun::place(&output);
        assert!(place.to_string_lossy().ends_with(".jsonl.batch"));
        assert_eq!(BegunRun::read(&place), Ok(None));
        run().write(&place).unwrap();
        assert_eq!(BegunRun::read(&place), Ok(Some(run())));
        std::fs::write(&place, "{}").unwrap();
        let problem = BegunRun::read(&place).unwrap_err();
        assert!(problem.contains("to begin anew, delete "), "{problem}");
        std::fs::remove_file(place).unwrap();
    }

    #[test]
    fn only_the_same_input_at_the_same_router_is_gone_on_with() {
        let place = Path::new("out.jsonl.batch");
        let run = run();
        let refusal = |url: &str, input: &InputIdentity| run.refusal(place, url, input);
        assert_eq!(refusal("http://router:80", &run.input), None);
        let other = InputIdentity {
            bytes: 13,
            ..run.input.clone()
        };
        let problem = refusal("http://router:80", &other).unwrap();
        assert!(problem.contains("another input"), "{problem}");
        let problem = refusal("http://other:80", &run.input).unwrap();
        assert!(problem.contains("--url http://router:80"), "{problem}");
    }

    #[test]
    fn lines_in_neither_file_are_missing() {
        let tally = |succeeded, failed| LineTally {
            status: "completed".to_owned(),
            lines: 5,
            succeeded,
            failed,
        };
        assert_eq!(tally(4, 1).missing(), 0);
        assert_eq!(tally(1, 1).missing(), 3);
        assert_eq!(tally(5, 1).missing(), 0);
    }
}
