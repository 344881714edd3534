//! `warmroute batch run`: upload, create, wait, fetch, over as many tries as it takes. What each step has done is
//! written down before the next begins.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Args;
use hyper::Method;
use indicatif::{HumanBytes, HumanCount, ProgressBar};
use serde::Deserialize;
use serde_json::json;

use super::api::{ApiAccess, ApiClient, AskError, AskErrorKind};
use super::batch_answer::{BatchAnswer, BatchPage};
use super::fetch::fetch;
use super::input::{self, CheckedInput};
use super::places::RunPlaces;
use super::progress::{BYTES, LINES, bar, say, write_line};
use super::saved_run::{EndedRun, SavedRun};
use super::sent_body::SentBody;
use crate::batches::create_batch::{WINDOW_SHAPE, read_window};
use crate::http::drain::StopSignals;
use crate::observe;

/// OpenAI's.
const DEFAULT_WINDOW: &str = "24h";
/// Some lines did not succeed.
const SOME_FAILED: u8 = 2;
/// Between two looks at a batch: small batches end soon, and large ones run for hours.
const INTERVALS: [Duration; 2] = [Duration::from_millis(100), Duration::from_secs(5)];
/// Between two lines of progress where no bar shows it.
const LINE_INTERVAL: Duration = Duration::from_secs(10);
/// Before a router that has not answered is asked again, and for how long it is while no try comes further.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);
const GIVE_UP_AFTER: Duration = Duration::from_secs(600);
/// Pages of 100 batches in which an earlier process's batch is looked for: all that a router keeps for a key.
const MAX_PAGES: usize = 10;

/// Run a file of requests as a batch, and write the results to a file. The same command again goes on where it was
/// stopped: OUT.JSONL.batch says where that is. Exit code 0: all requests succeeded; 2: some did not, they are in
/// OUT.errors.jsonl; 64: the arguments cannot be read; 1: anything else.
#[derive(Args)]
pub(crate) struct RunBatch {
    /// The requests, a JSON object a line: `custom_id`, `method` (POST), `url` (such as
    /// /v1/chat/completions, in all the same) and `body`.
    #[arg(value_name = "IN.JSONL")]
    input: PathBuf,
    /// The results, a line for each request that succeeded. The lines are in any order.
    #[arg(short, long, value_name = "OUT.JSONL")]
    output: PathBuf,
    /// The time after which what has not run is given up; if it is left out, 24h, or that of the run that goes on.
    #[arg(long, value_name = "TIME", value_parser = window)]
    completion_window: Option<String>,
    #[command(flatten)]
    access: ApiAccess,
}

/// A window, as it was written.
fn window(text: &str) -> Result<String, String> {
    let wrong = || format!("expected {WINDOW_SHAPE}");
    read_window(text).map(|_| text.to_owned()).ok_or_else(wrong)
}

impl RunBatch {
    pub(super) async fn run(self) -> ExitCode {
        let places = RunPlaces::of(&self.output);
        match self.finish(&places).await {
            Ok(ended) => {
                // The reader of the output may want no more of it.
                let _ = writeln!(io::stdout(), "{}", result(&ended, &places));
                if ended.succeeded < ended.lines {
                    ExitCode::from(SOME_FAILED)
                } else {
                    ExitCode::SUCCESS
                }
            }
            Err(problem) => {
                write_line(&problem);
                ExitCode::FAILURE
            }
        }
    }

    async fn finish(&self, places: &RunPlaces) -> Result<EndedRun, String> {
        let client = self.access.client()?;
        let checked = input::check(&self.input)?;
        let mut saved = SavedRun::of(&places.state, &client.url.base, &checked.identity)?;
        if saved.steps.file_id.is_none() {
            self.check_free(places)?;
        }
        saved.check_window(self.completion_window.as_deref())?;
        if let Some(ended) = &saved.steps.ended
            && places.output.exists()
        {
            let anew = saved.how_to_begin_anew();
            write_line(&format!(
                "this run has ended before; {anew}, and the results"
            ));
            return Ok(ended.clone());
        }
        let mut signals = StopSignals::listen().map_err(|error| error.to_string())?;
        let ended = tokio::select! {
            ended = self.go_on(&client, places, &mut saved, &checked) => ended,
            _ = signals.next() => Err(AskError::passing("interrupted")),
        };
        ended.map_err(|error| saved.stopped(&error))
    }

    /// Refuses to begin where something is.
    fn check_free(&self, places: &RunPlaces) -> Result<(), String> {
        let mut places = places.of_new_run().into_iter();
        let Some(place) = places.find(|place| place.exists()) else {
            return Ok(());
        };
        let real = |place: &Path| std::fs::canonicalize(place).ok();
        let why = if real(&place) == real(&self.input) {
            "is the input; name another output"
        } else if !place.is_file() {
            "is no file; name another output"
        } else {
            "exists already; delete it, or name another output"
        };
        Err(format!("{} {why}", place.display()))
    }

    async fn go_on(
        &self,
        client: &ApiClient,
        places: &RunPlaces,
        saved: &mut SavedRun,
        checked: &CheckedInput,
    ) -> Result<EndedRun, AskError> {
        let file_id = match &saved.steps.file_id {
            Some(file_id) => file_id.clone(),
            None => {
                // Both show what is wrong before anything is uploaded: a place, an URL, a key.
                saved.record(|_| {})?;
                page_of_batches(client, None).await?;
                let file_id = self.upload(client, checked.identity.bytes).await?;
                saved.record(|steps| steps.file_id = Some(file_id.clone()))?;
                file_id
            }
        };
        let batch_id = match &saved.steps.batch_id {
            Some(batch_id) => batch_id.clone(),
            None => {
                let hidden = ProgressBar::hidden();
                let create = async || self.batch_of(client, &file_id, checked.endpoint).await;
                let (batch_id, window) = patiently(&hidden, create).await?;
                saved.record(|steps| {
                    steps.batch_id = Some(batch_id.clone());
                    steps.completion_window = window;
                })?;
                let is_own = saved.check_window(self.completion_window.as_deref());
                is_own.map_err(AskError::other_run)?;
                batch_id
            }
        };
        write_line(&format!("batch: {batch_id} at {}", client.url.base));
        let batch = wait(client, &batch_id).await?;
        if let Some(refusal) = batch.refusal() {
            saved.forget();
            return Err(AskError::local(refusal));
        }
        if let Some(file_id) = &batch.error_file_id {
            bring(client, Some(file_id), &places.errors).await?;
        }
        // Last, so that where this file is, the other is as well.
        bring(client, batch.output_file_id.as_deref(), &places.output).await?;
        let ended = EndedRun {
            status: batch.status,
            lines: checked.lines,
            succeeded: batch.request_counts.completed,
        };
        saved.record(|steps| steps.ended = Some(ended.clone()))?;
        Ok(ended)
    }

    /// The id of the input at the router.
    async fn upload(&self, client: &ApiClient, bytes: u64) -> Result<String, AskError> {
        #[derive(Deserialize)]
        struct UploadedFile {
            id: String,
        }
        let name = self.input.file_name().unwrap_or_default().to_string_lossy();
        let bar = bar("upload", BYTES, bytes);
        let upload = async || {
            let file = File::open(&self.input);
            let unread =
                |error: io::Error| AskError::local(format!("{}: {error}", self.input.display()));
            let file = file.map_err(unread)?;
            bar.set_position(0);
            let form = SentBody::form(file, bytes, &name, fastrand::u128(..), &bar);
            let uploaded = client.ask::<UploadedFile>(Method::POST, "/v1/files", form, &bar);
            uploaded.await
        };
        let id = patiently(&bar, upload).await?.id;
        say(&bar, &format!("upload: {}, {id}", HumanBytes(bytes)));
        Ok(id)
    }

    /// The id and the window of an input's batch: of the one that an earlier process has created without hearing of it,
    /// or else of a new one.
    async fn batch_of(
        &self,
        client: &ApiClient,
        file_id: &str,
        endpoint: &str,
    ) -> Result<(String, Option<String>), AskError> {
        let bar = ProgressBar::hidden();
        if let Some(batch) = batch_with_input(client, file_id).await? {
            return Ok((batch.id, batch.completion_window));
        }
        let window = self.completion_window.as_deref().unwrap_or(DEFAULT_WINDOW);
        let body = SentBody::json(&json!({
            "input_file_id": file_id,
            "endpoint": endpoint,
            "completion_window": window,
        }));
        let created = client.ask::<BatchAnswer>(Method::POST, "/v1/batches", body, &bar);
        Ok((created.await?.id, Some(window.to_owned())))
    }
}

/// What became of a run, and where it is.
fn result(ended: &EndedRun, places: &RunPlaces) -> String {
    let (succeeded, lines) = (HumanCount(ended.succeeded), HumanCount(ended.lines));
    let (status, output) = (&ended.status, places.output.display());
    let mut text = format!("{status}: {succeeded} of {lines} lines succeeded: {output}");
    if ended.succeeded < ended.lines {
        let failed = HumanCount(ended.lines - ended.succeeded);
        text += &format!("; {failed} did not: {}", places.errors.display());
    }
    text
}

/// The batch of this key that has the file as its input, if there is one.
async fn batch_with_input(
    client: &ApiClient,
    file_id: &str,
) -> Result<Option<BatchAnswer>, AskError> {
    let mut after: Option<String> = None;
    for _ in 0..MAX_PAGES {
        let BatchPage { data, has_more } = page_of_batches(client, after.as_deref()).await?;
        let last = data.last().filter(|_| has_more);
        after = last.map(|last| last.id.clone());
        let mut batches = data.into_iter();
        let found = batches.find(|batch| batch.input_file_id == file_id);
        if found.is_some() || after.is_none() {
            return Ok(found);
        }
    }
    Ok(None)
}

/// The batches of this key that follow the one with the id `after`, the newest first; for `None`, the newest of all.
async fn page_of_batches(client: &ApiClient, after: Option<&str>) -> Result<BatchPage, AskError> {
    let from = after.map_or_else(String::new, |id| format!("&after={id}"));
    let path = format!("/v1/batches?limit=100{from}");
    let hidden = ProgressBar::hidden();
    let page = client.ask::<BatchPage>(Method::GET, &path, SentBody::empty(), &hidden);
    page.await
}

/// The batch once it is over.
async fn wait(client: &ApiClient, batch_id: &str) -> Result<BatchAnswer, AskError> {
    let path = format!("/v1/batches/{batch_id}");
    let bar = bar("batch", LINES, 0);
    let hidden = ProgressBar::hidden();
    let [mut interval, longest] = INTERVALS;
    let (mut said, mut status) = (observe::now(), String::new());
    loop {
        let look = async || {
            let looked = client.ask::<BatchAnswer>(Method::GET, &path, SentBody::empty(), &hidden);
            looked.await
        };
        let batch = patiently(&bar, look).await?;
        let (now, text) = (observe::now(), batch.progress());
        bar.set_length(batch.request_counts.total);
        bar.set_position(batch.request_counts.finished());
        bar.set_message(text.clone());
        let is_due = now.saturating_duration_since(said) >= LINE_INTERVAL;
        if batch.status != status || (bar.is_hidden() && is_due) {
            say(&bar, &format!("batch: {text}"));
            (said, status) = (now, batch.status.clone());
        }
        if batch.is_over() {
            return Ok(batch);
        }
        tokio::time::sleep(interval).await;
        interval = interval.saturating_mul(2).min(longest);
    }
}

/// Fetches a file, from its beginning after each failure.
async fn bring(client: &ApiClient, file_id: Option<&str>, place: &Path) -> Result<(), AskError> {
    let bar = bar("fetch", BYTES, 0);
    patiently(&bar, async || fetch(client, file_id, place, &bar).await).await
}

/// Asks a router that may answer a little later until it does.
async fn patiently<T>(
    bar: &ProgressBar,
    ask: impl AsyncFn() -> Result<T, AskError>,
) -> Result<T, AskError> {
    let (mut patience, mut said) = (Patience::default(), String::new());
    loop {
        let error = match ask().await {
            Err(error) if error.kind == AskErrorKind::Passing => error,
            ended => return ended,
        };
        if !patience.lasts(observe::now(), bar.position()) {
            return Err(error);
        }
        let text = format!("asking again: {error}");
        if text != said {
            say(bar, &text);
            said = text;
        }
        tokio::time::sleep(RETRY_INTERVAL).await;
    }
}

/// Whether to ask again: until tries have failed for a while of which none came further than those before.
#[derive(Default)]
struct Patience {
    failing_since: Option<Instant>,
    furthest: u64,
}

impl Patience {
    /// Whether it lasts beyond a failure now. `position`: how far the exchange came.
    fn lasts(&mut self, now: Instant, position: u64) -> bool {
        if position > self.furthest {
            self.furthest = position;
            self.failing_since = None;
        }
        let since = *self.failing_since.get_or_insert(now);
        now.saturating_duration_since(since) < GIVE_UP_AFTER
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What becomes of failures, each at a second and with how far its exchange came.
    fn check(failures: &[(u64, u64)], expected: &[bool]) {
        let (mut patience, start) = (Patience::default(), observe::now());
        let lasts = failures.iter().map(|(second, position)| {
            patience.lasts(start + Duration::from_secs(*second), *position)
        });
        assert_eq!(lasts.collect::<Vec<_>>(), expected, "{failures:?}");
    }

    #[test]
    fn an_exchange_that_fails_after_a_long_time_is_tried_again() {
        check(&[(700, 5)], &[true]);
        check(&[(700, 0)], &[true]);
    }

    #[test]
    fn what_fails_for_ten_minutes_and_comes_no_further_is_given_up() {
        check(&[(0, 0), (599, 0), (600, 0)], &[true, true, false]);
        check(&[(700, 5), (1_299, 5), (1_300, 4)], &[true, true, false]);
    }

    #[test]
    fn a_try_that_comes_further_than_all_before_begins_the_ten_minutes_anew() {
        check(&[(700, 5), (1_400, 6), (1_999, 6)], &[true; 3]);
        check(&[(700, 5), (1_400, 6), (2_000, 5)], &[true, true, false]);
    }
}
