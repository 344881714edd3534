//! How far a run has come: a small file beside its output, by which the same command goes on.

use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// The file's content. It is written anew after each step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct BegunRun {
    /// Where the file is.
    #[serde(skip)]
    place: PathBuf,
    /// The router's API.
    pub(super) url: String,
    pub(super) input: InputIdentity,
    /// The input at the router.
    pub(super) file_id: Option<String>,
    pub(super) batch_id: Option<String>,
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

impl BegunRun {
    /// The run with this output: the one that was begun, or a new one. One of another input or router is an error.
    pub(super) fn of(output: &Path, url: &str, input: &InputIdentity) -> Result<Self, String> {
        let mut place = OsString::from(output);
        place.push(".batch");
        let place = PathBuf::from(place);
        let name = place.display().to_string();
        let new = Self {
            place,
            url: url.to_owned(),
            input: input.clone(),
            file_id: None,
            batch_id: None,
            ended: None,
        };
        let text = match std::fs::read(&new.place) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(new),
            Err(error) => return Err(format!("{name}: {error}")),
        };
        let anew = new.how_to_begin_anew();
        let begun: Self = serde_json::from_slice(&text)
            .map_err(|error| format!("{name}: was not written by `batch run` ({error}); {anew}"))?;
        let Some(file_id) = &begun.file_id else {
            // Nothing of it is at the router.
            return Ok(new);
        };
        let at_router = format!(
            "{} at {}",
            begun.batch_id.as_ref().unwrap_or(file_id),
            begun.url
        );
        if begun.input != new.input {
            return Err(format!(
                "{name} is of a run with another input ({at_router}): name another output, or, {anew}"
            ));
        }
        if begun.url != new.url {
            return Err(format!(
                "{name} is of a run elsewhere ({at_router}): go on there by --url {}, or, {anew}",
                begun.url
            ));
        }
        Ok(Self {
            place: new.place,
            ..begun
        })
    }

    /// Replaces the file as a whole.
    pub(super) fn write(&self) -> Result<(), String> {
        let mut temporary = OsString::from(&self.place);
        temporary.push(".new");
        // Texts and numbers always serialize.
        let text = serde_json::to_string_pretty(self).unwrap_or_default() + "\n";
        let written = std::fs::write(&temporary, text);
        let written = written.and_then(|()| std::fs::rename(&temporary, &self.place));
        written.map_err(|error| format!("{}: {error}", self.place.display()))
    }

    /// Nothing is to be had of the run any more, and its input has to change.
    pub(super) fn forget(&mut self) {
        (self.file_id, self.batch_id) = (None, None);
        let _ = std::fs::remove_file(&self.place);
    }

    pub(super) fn how_to_begin_anew(&self) -> String {
        format!("to begin anew, delete {}", self.place.display())
    }

    /// An end of this process that is not one of the run, with what to do.
    pub(super) fn stopped(&self, why: &str) -> String {
        let (url, anew) = (&self.url, self.how_to_begin_anew());
        match (&self.batch_id, &self.file_id) {
            (Some(batch_id), _) => format!(
                "{why}; the batch {batch_id} goes on at {url}: the same command again waits for it, \
                 `warmroute batch cancel {batch_id} --url {url}` ends it, and, {anew}"
            ),
            (None, Some(_)) => format!(
                "{why}; the input is uploaded: the same command again creates its batch, or, {anew}"
            ),
            (None, None) => why.to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_same_input_at_the_same_router_is_gone_on_with() {
        let name = format!("warmroute-begun-{}.jsonl", fastrand::u64(..));
        let output = std::env::temp_dir().join(name);
        let input = |bytes| InputIdentity {
            bytes,
            sha256: "ab".to_owned(),
        };
        let of = |url: &str, bytes| BegunRun::of(&output, url, &input(bytes));
        let mut run = of("http://router", 12).unwrap();
        run.write().unwrap();
        // Of this run nothing is at a router.
        assert_eq!(of("http://other", 13).unwrap().file_id, None);
        run.file_id = Some("file-1".to_owned());
        run.write().unwrap();
        assert_eq!(of("http://router", 12), Ok(run.clone()));
        let problem = of("http://router", 13).unwrap_err();
        assert!(problem.contains("another input"), "{problem}");
        let problem = of("http://other", 12).unwrap_err();
        assert!(problem.contains("--url http://router"), "{problem}");
        std::fs::write(&run.place, "{}").unwrap();
        let problem = of("http://router", 12).unwrap_err();
        assert!(problem.contains("to begin anew, delete "), "{problem}");
        run.forget();
        assert_eq!(of("http://other", 12).unwrap().file_id, None);
    }
}
