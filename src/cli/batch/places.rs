//! The files of a run, by the name of its output. Pure.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// Every output has places of its own.
#[derive(Debug)]
pub(super) struct RunPlaces {
    pub(super) output: PathBuf,
    /// Requests that did not succeed: `day.errors.jsonl` of `day.jsonl`, `day.1.errors.jsonl` of `day.1`.
    pub(super) errors: PathBuf,
    /// How far the run has come.
    pub(super) state: PathBuf,
    /// The same of the one other output whose errors have that name: `day` of `day.jsonl`.
    twin_state: PathBuf,
}

impl RunPlaces {
    pub(super) fn of(output: &Path) -> Self {
        let is_jsonl = output.extension().is_some_and(|name| name == "jsonl");
        let (base, twin) = if is_jsonl {
            (output.with_extension(""), output.with_extension(""))
        } else {
            (output.to_owned(), named(output, ".jsonl"))
        };
        Self {
            output: output.to_owned(),
            errors: named(&base, ".errors.jsonl"),
            state: named(output, ".batch"),
            twin_state: named(&twin, ".batch"),
        }
    }

    /// Where nothing may be when a run begins.
    pub(super) fn of_new_run(&self) -> [PathBuf; 5] {
        [
            self.output.clone(),
            self.errors.clone(),
            part_of(&self.output),
            part_of(&self.errors),
            self.twin_state.clone(),
        ]
    }
}

/// Where a file lies until it is whole.
pub(super) fn part_of(place: &Path) -> PathBuf {
    named(place, ".part")
}

fn named(path: &Path, end: &str) -> PathBuf {
    let mut name = OsString::from(path);
    name.push(end);
    name.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outputs_share_no_place_unless_one_is_refused_while_the_other_is_there() {
        let errors = |output: &str| RunPlaces::of(Path::new(output)).errors;
        assert_eq!(errors("a/day.jsonl"), Path::new("a/day.errors.jsonl"));
        assert_eq!(errors("a.b/day.1"), Path::new("a.b/day.1.errors.jsonl"));
        assert_eq!(errors("day.2"), Path::new("day.2.errors.jsonl"));
        let [day, day_jsonl] = ["day", "day.jsonl"].map(|output| RunPlaces::of(Path::new(output)));
        assert_eq!(day.errors, day_jsonl.errors);
        assert!(day.of_new_run().contains(&day_jsonl.state));
        assert!(day_jsonl.of_new_run().contains(&day.state));
    }
}
