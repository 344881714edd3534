//! `warmroute batch run`: from an input to its results, over as many tries as it takes.

use std::fs::File;
use std::io::{self, Seek, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use indicatif::{HumanBytes, HumanCount};

use super::api_access::ApiAccess;
use super::begun_run::{BegunRun, LineTally};
use super::input::{self, CheckedInput};
use super::step_progress::{StepProgress, write_line};
use super::steps::Steps;
use super::text;
use crate::http::drain::StopSignals;
use crate::observe;
use crate::units::parse_duration;

/// Some lines did not succeed.
const SOME_FAILED: u8 = 2;
/// What is read of an input between two looks at the clock.
const SHOWN_BYTES: u64 = 4 << 20;

/// Run a file of requests as a batch, and write the results to a file. The same command again goes on where it was
/// stopped: OUT.JSONL.batch says where that is. Exit code 0: all requests succeeded; 2: some did not, they are in the
/// error file; 1: anything else.
#[derive(Args)]
pub(crate) struct RunBatch {
    /// The requests, a JSON object a line: `custom_id`, `url` (such as /v1/chat/completions, in all the same) and
    /// `body`.
    #[arg(value_name = "IN.JSONL")]
    input: PathBuf,
    /// The results, a line for each request that succeeded. The lines are in any order.
    #[arg(short, long, value_name = "OUT.JSONL")]
    output: PathBuf,
    /// The requests that did not succeed, if there are any; without it OUT.errors.jsonl.
    #[arg(long, value_name = "ERRORS.JSONL")]
    error_file: Option<PathBuf>,
    /// The time after which what has not run is given up.
    #[arg(long, value_name = "TIME", default_value = "24h")]
    completion_window: String,
    /// A pair that the batch object has; may be repeated.
    #[arg(long, value_name = "KEY=VALUE", value_parser = metadata_pair)]
    metadata: Vec<(String, String)>,
    /// Time between two looks at the batch, at least 100ms.
    #[arg(long, value_name = "TIME", default_value = "2s", value_parser = interval)]
    interval: Duration,
    /// For how long a router that does not answer is asked again, once it has answered.
    #[arg(long, value_name = "TIME", default_value = "10m", value_parser = parse_duration)]
    give_up_after: Duration,
    #[command(flatten)]
    access: ApiAccess,
}

fn metadata_pair(text: &str) -> Result<(String, String), String> {
    let pair = text.split_once('=').filter(|(key, _)| !key.is_empty());
    let (key, value) = pair.ok_or_else(|| "expected KEY=VALUE".to_owned())?;
    Ok((key.to_owned(), value.to_owned()))
}

fn interval(text: &str) -> Result<Duration, String> {
    let interval = parse_duration(text)?;
    if interval >= Duration::from_millis(100) {
        Ok(interval)
    } else {
        Err("expected at least `100ms`".to_owned())
    }
}

impl RunBatch {
    pub(super) async fn run(self) -> ExitCode {
        let errors = self.errors();
        match self.finish(&errors).await {
            Ok(tally) => {
                let text = text::result(&tally, &self.output, &errors);
                // The reader of the output may want no more of it.
                let _ = io::stdout().write_all(text.as_bytes());
                match (tally.missing(), tally.failed) {
                    (0, 0) => ExitCode::SUCCESS,
                    (0, _) => ExitCode::from(SOME_FAILED),
                    _ => ExitCode::FAILURE,
                }
            }
            Err(problem) => {
                write_line(problem.trim_end());
                ExitCode::FAILURE
            }
        }
    }

    /// Where requests go that did not succeed.
    fn errors(&self) -> PathBuf {
        let given = self.error_file.clone();
        given.unwrap_or_else(|| self.output.with_extension("errors.jsonl"))
    }

    async fn finish(&self, errors: &Path) -> Result<LineTally, String> {
        let client = self.access.client()?;
        if errors == self.output {
            return Err("--error-file and --output name the same file".to_owned());
        }
        let place = BegunRun::place(&self.output);
        // Before the input was uploaded, nothing of a run is worth going on with.
        let begun = BegunRun::read(&place)?.filter(|begun| begun.file_id.is_some());
        if begun.is_none() {
            refuse_to_overwrite(&[self.output.as_path(), errors])?;
        }
        let (input, checked) = self.check_input()?;
        let is_new = begun.is_none();
        let begun = begun.unwrap_or_else(|| BegunRun {
            url: client.base.clone(),
            input: checked.identity.clone(),
            file_id: None,
            batch_id: None,
            ended: None,
        });
        if let Some(refusal) = begun.refusal(&place, &client.base, &checked.identity) {
            return Err(refusal);
        }
        if let Some(tally) = begun.ended.clone().filter(|_| self.output.exists()) {
            let anew = BegunRun::begin_anew(&place);
            write_line(&format!(
                "this run has ended before; {anew}, and the results"
            ));
            return Ok(tally);
        }
        let mut signals = StopSignals::listen().map_err(|error| error.to_string())?;
        let name = self.input.file_name();
        let name = name.map(|name| name.to_string_lossy().into_owned());
        let steps = Steps {
            client,
            place,
            input_name: name.unwrap_or_default(),
            output: &self.output,
            errors,
            completion_window: &self.completion_window,
            metadata: &self.metadata,
            interval: self.interval,
            give_up_after: self.give_up_after,
        };
        tokio::select! {
            ended = steps.go_on(begun, is_new, input, &checked) => ended,
            _ = signals.next() => Err(steps.interrupted()),
        }
    }

    fn check_input(&self) -> Result<(File, CheckedInput), String> {
        let name = self.input.display();
        let failed = |error: io::Error| format!("{name}: {error}");
        let mut file = File::open(&self.input).map_err(failed)?;
        let length = file.metadata().map_err(failed)?.len();
        let mut progress = StepProgress::start(observe::now(), "check");
        let mut shown = 0;
        let on_read = |bytes: u64| {
            if bytes >= shown + SHOWN_BYTES {
                shown = bytes;
                progress.show(observe::now(), (bytes, length), || {
                    text::bytes(bytes, length)
                });
            }
        };
        let checked = input::check(&mut file, on_read).map_err(|problems| {
            let problems = problems
                .lines()
                .map(|problem| format!("{name}: {problem}\n"));
            problems.collect::<String>()
        })?;
        file.rewind().map_err(failed)?;
        let lines = HumanCount(checked.lines);
        let bytes = HumanBytes(checked.identity.bytes);
        progress.end(&format!("{lines} lines, {bytes}, for {}", checked.endpoint));
        Ok((file, checked))
    }
}

fn refuse_to_overwrite(places: &[&Path]) -> Result<(), String> {
    let mut there = places.iter().filter(|place| place.exists());
    match there.next() {
        None => Ok(()),
        Some(place) => Err(format!(
            "{} exists already; delete it, or name another one",
            place.display()
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metadata_are_pairs_and_a_value_may_have_an_equals_sign() {
        let pair = |key: &str, value: &str| Ok((key.to_owned(), value.to_owned()));
        assert_eq!(metadata_pair("a=b=c"), pair("a", "b=c"));
        assert_eq!(metadata_pair("a="), pair("a", ""));
        assert!(metadata_pair("a").is_err() && metadata_pair("=b").is_err());
    }
}
