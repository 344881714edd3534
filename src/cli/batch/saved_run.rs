//! How far a run has come: a small file beside its output, by which the same command goes on.

use std::fs::{self, File, TryLockError};
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::api::{AskError, AskErrorKind};
use crate::batches::create_batch::read_window;

/// The run with an output. No other process goes on with it meanwhile. Dropped before anything of the run is at a
/// router, it removes its file.
#[derive(Debug)]
pub(super) struct SavedRun {
    place: PathBuf,
    /// Locked. It is never replaced: the lock would stay with the old one.
    file: File,
    pub(super) steps: RunSteps,
}

/// The file's content. It is written anew after each step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct RunSteps {
    /// The router's API.
    pub(super) url: String,
    pub(super) input: InputIdentity,
    /// The input at the router.
    pub(super) file_id: Option<String>,
    pub(super) batch_id: Option<String>,
    pub(super) completion_window: Option<String>,
    /// Once the results are in their places.
    pub(super) ended: Option<EndedRun>,
}

/// By which an input is known again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct InputIdentity {
    pub(super) bytes: u64,
    pub(super) sha256: String,
}

/// What became of an input's lines.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct EndedRun {
    pub(super) status: String,
    pub(super) lines: u64,
    pub(super) succeeded: u64,
}

impl SavedRun {
    /// The run that was saved in this place, or a new one. One of another input or router is an error.
    pub(super) fn of(place: &Path, url: &str, input: &InputIdentity) -> Result<Self, String> {
        let name = place.display();
        let mut options = File::options();
        let options = options.read(true).write(true).create(true).truncate(false);
        let mut file = options.open(place).map_err(|error| {
            format!(
                "{name}: {error}; the output needs a folder that can be written to: make it, or name another output"
            )
        })?;
        // Where nothing can be locked, nothing is.
        if let Err(TryLockError::WouldBlock) = file.try_lock() {
            return Err(format!(
                "{name}: another command with this output is running: wait for its end, or name another output"
            ));
        }
        let mut text = Vec::new();
        let read = file.read_to_end(&mut text);
        read.map_err(|error| format!("{name}: {error}"))?;
        let new = RunSteps {
            url: url.to_owned(),
            input: input.clone(),
            file_id: None,
            batch_id: None,
            completion_window: None,
            ended: None,
        };
        let anew = format!("name another output, or, {}", how_to_begin_anew(place));
        // It is empty if it is new, or if a process was killed early.
        let parsed = (!text.is_empty()).then(|| serde_json::from_slice::<RunSteps>(&text));
        let saved = parsed
            .transpose()
            .map_err(|error| format!("{name}: was not written by `batch run` ({error}): {anew}"))?;
        let steps = match saved.filter(|saved| saved.file_id.is_some()) {
            Some(saved) => {
                let id = saved.batch_id.as_deref().or(saved.file_id.as_deref());
                let run = format!("{} at {}", id.unwrap_or_default(), saved.url);
                if saved.input != new.input {
                    return Err(format!(
                        "{name} is of a run with another input ({run}): {anew}"
                    ));
                }
                if saved.url != new.url {
                    let there = &saved.url;
                    return Err(format!(
                        "{name} is of a run elsewhere ({run}): go on there by --url {there}, {anew}"
                    ));
                }
                saved
            }
            None => new,
        };
        let place = place.to_owned();
        Ok(Self { place, file, steps })
    }

    /// Refuses another window than the one that the batch was created with. `None`: whichever that is.
    pub(super) fn check_window(&self, window: Option<&str>) -> Result<(), String> {
        let (Some(window), Some(own)) = (window, &self.steps.completion_window) else {
            return Ok(());
        };
        // They may be written in several ways.
        if read_window(window) == read_window(own) {
            return Ok(());
        }
        let (place, url) = (self.place.display(), &self.steps.url);
        let batch_id = self.steps.batch_id.as_deref().unwrap_or_default();
        let anew = self.how_to_begin_anew();
        Err(format!(
            "{place} is of a run with --completion-window {own} and not {window} ({batch_id} at {url}): go on with \
             --completion-window {own}, name another output, or, {anew}"
        ))
    }

    /// Writes a step down. One that cannot be written down is not remembered here either.
    pub(super) fn record(&mut self, step: impl FnOnce(&mut RunSteps)) -> Result<(), AskError> {
        let mut steps = self.steps.clone();
        step(&mut steps);
        // Texts and numbers always serialize.
        let text = serde_json::to_string_pretty(&steps).unwrap_or_default() + "\n";
        let written = self.file.write_all_at(text.as_bytes(), 0);
        let written = written.and_then(|()| self.file.set_len(text.len() as u64));
        let place = self.place.display();
        written.map_err(|error| AskError::local(format!("{place}: {error}")))?;
        self.steps = steps;
        Ok(())
    }

    /// Nothing is to be had of the run any more, and its input has to change.
    pub(super) fn forget(&mut self) {
        (self.steps.file_id, self.steps.batch_id) = (None, None);
    }

    pub(super) fn how_to_begin_anew(&self) -> String {
        how_to_begin_anew(&self.place)
    }

    /// An end of this process that is not one of the run, with what to do.
    pub(super) fn stopped(&self, error: &AskError) -> String {
        let (url, anew) = (&self.steps.url, self.how_to_begin_anew());
        let next = match (&self.steps.batch_id, &self.steps.file_id) {
            _ if error.kind == AskErrorKind::OtherRun => return error.to_string(),
            (None, None) if error.kind == AskErrorKind::Passing => {
                "nothing is at the router: run the same command again".to_owned()
            }
            (None, None) => return error.to_string(),
            _ if error.kind == AskErrorKind::Gone => {
                format!("{anew}, and run the same command again")
            }
            (Some(batch_id), _) => format!(
                "the same command again goes on with the batch {batch_id} at {url}; \
                 `warmroute batch cancel {batch_id} --url {url}` ends the batch if it runs; {anew}"
            ),
            (None, Some(_)) => {
                format!("the input is uploaded: the same command again goes on from there; {anew}")
            }
        };
        format!("{error}\n{next}")
    }
}

impl Drop for SavedRun {
    fn drop(&mut self) {
        if self.steps.file_id.is_none() {
            let _ = fs::remove_file(&self.place);
        }
    }
}

fn how_to_begin_anew(place: &Path) -> String {
    format!("to begin anew, delete {}", place.display())
}

#[cfg(test)]
mod tests {
    use tempfile::TempDir;

    use super::*;

    fn input(bytes: u64) -> InputIdentity {
        InputIdentity {
            bytes,
            sha256: "ab".to_owned(),
        }
    }

    /// A place in a folder that no other test has, and that goes with the first value.
    fn place() -> (TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let place = folder.path().join("out.jsonl.batch");
        (folder, place)
    }

    #[test]
    fn only_the_same_input_at_the_same_router_is_gone_on_with() {
        let (_folder, place) = place();
        let of = |url: &str, bytes| SavedRun::of(&place, url, &input(bytes));
        let mut run = of("http://router", 12).unwrap();
        run.record(|_| {}).unwrap();
        drop(run);
        // Of that run nothing is at a router.
        assert!(!place.exists());
        drop(of("http://other", 13).unwrap());
        let mut run = of("http://router", 12).unwrap();
        run.record(|steps| steps.file_id = Some("file-1".to_owned()))
            .unwrap();
        let steps = run.steps.clone();
        drop(run);
        assert_eq!(of("http://router", 12).unwrap().steps, steps);
        let problem = of("http://router", 13).unwrap_err();
        assert!(problem.contains("another input"), "{problem}");
        let problem = of("http://other", 12).unwrap_err();
        assert!(problem.contains("--url http://router"), "{problem}");
        fs::write(&place, "{}").unwrap();
        let problem = of("http://router", 12).unwrap_err();
        assert!(problem.contains("to begin anew, delete "), "{problem}");
        // As of a process that was killed at once.
        fs::write(&place, "").unwrap();
        of("http://other", 12).unwrap();
        assert!(!place.exists());
    }

    #[test]
    fn a_run_keeps_the_window_of_its_batch() {
        let (_folder, place) = place();
        let mut run = SavedRun::of(&place, "http://router", &input(12)).unwrap();
        assert_eq!(run.check_window(Some("1h")), Ok(()));
        run.steps.batch_id = Some("batch_1".to_owned());
        run.steps.completion_window = Some("2h".to_owned());
        for same in [None, Some("2h"), Some("120m")] {
            assert_eq!(run.check_window(same), Ok(()), "{same:?}");
        }
        let problem = run.check_window(Some("24h")).unwrap_err();
        for expected in [
            "--completion-window 2h and not 24h (batch_1 at http://router)",
            "go on with --completion-window 2h",
            "to begin anew, delete ",
        ] {
            assert!(problem.contains(expected), "{problem}");
        }
        assert_eq!(run.stopped(&AskError::other_run(&problem)), problem);
    }

    #[test]
    fn a_run_has_one_process_at_a_time() {
        let (_folder, place) = place();
        let run = SavedRun::of(&place, "http://router", &input(12)).unwrap();
        let problem = SavedRun::of(&place, "http://router", &input(12)).unwrap_err();
        assert!(problem.contains("is running"), "{problem}");
        drop(run);
        SavedRun::of(&place, "http://router", &input(12)).unwrap();
    }

    #[test]
    fn whoever_is_stopped_learns_what_to_do() {
        let (_folder, place) = place();
        let mut run = SavedRun::of(&place, "http://router", &input(12)).unwrap();
        let check = |run: &SavedRun, error: AskError, expected: &str| {
            let text = run.stopped(&error);
            assert!(text.contains(expected), "{text}");
        };
        check(&run, AskError::passing("x"), "x\nnothing is at the router");
        assert_eq!(run.stopped(&AskError::local("x")), "x");
        run.steps.file_id = Some("file-1".to_owned());
        check(&run, AskError::passing("x"), "x\nthe input is uploaded");
        run.steps.batch_id = Some("batch_1".to_owned());
        let cancel = "`warmroute batch cancel batch_1 --url http://router`";
        check(&run, AskError::local("x"), cancel);
        run.forget();
    }
}
