//! The steps of a run: upload, create, wait, fetch. What each has done is written down before the next begins.

use std::fmt::Display;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::atomic::Ordering;
use std::time::Duration;

use indicatif::{HumanBytes, HumanCount};
use serde_json::{Map, Value, json};

use super::api_client::{ApiClient, AskError};
use super::batch_answer::{BatchAnswer, BatchPage, CreatedObject};
use super::begun_run::{BegunRun, LineTally};
use super::fetch::{FetchError, fetch};
use super::file_form::FileForm;
use super::input::CheckedInput;
use super::line_rate::LineRate;
use super::patience::Patience;
use super::step_progress::{StepProgress, write_line};
use super::text;
use crate::observe;

/// Between two looks at what is sent.
const UPLOAD_TICK: Duration = Duration::from_millis(100);
/// An upload of which nothing is taken for so long is over. Storage of the router may take a while for the last part.
const UPLOAD_STALL: Duration = Duration::from_secs(120);
/// Batches in a page, and pages that are looked through for the batch of an input: as many as a tenant may have.
const PAGE_BATCHES: usize = 100;
const MAX_PAGES: usize = 10;

/// The steps of a run, each of which may be the first of this process.
pub(super) struct Steps<'a> {
    pub(super) client: ApiClient,
    /// Where it is written how far the run has come.
    pub(super) place: PathBuf,
    /// What the router is to call the input.
    pub(super) input_name: String,
    pub(super) output: &'a Path,
    pub(super) errors: &'a Path,
    pub(super) completion_window: &'a str,
    pub(super) metadata: &'a [(String, String)],
    /// Between two looks at the batch.
    pub(super) interval: Duration,
    pub(super) give_up_after: Duration,
}

impl Steps<'_> {
    pub(super) async fn go_on(
        &self,
        mut begun: BegunRun,
        is_new: bool,
        input: File,
        checked: &CheckedInput,
    ) -> Result<LineTally, String> {
        let file_id = match &begun.file_id {
            Some(file_id) => file_id.clone(),
            None => {
                // Shows now that the place can be written.
                begun.write(&self.place)?;
                let uploaded = self.upload(input, checked).await;
                let file_id = uploaded.inspect_err(|_| {
                    let _ = std::fs::remove_file(&self.place);
                })?;
                begun.file_id = Some(file_id.clone());
                begun.write(&self.place)?;
                file_id
            }
        };
        let batch_id = match &begun.batch_id {
            Some(batch_id) => batch_id.clone(),
            None => {
                let batch_id = self.batch_of(&file_id, is_new, checked.endpoint).await?;
                begun.batch_id = Some(batch_id.clone());
                begun.write(&self.place)?;
                batch_id
            }
        };
        write_line(&format!("batch: {batch_id} at {}", self.client.base));
        let ended = self.wait_and_fetch(&batch_id, checked.lines).await?;
        begun.ended = Some(ended.clone());
        begun.write(&self.place)?;
        Ok(ended)
    }

    async fn upload(&self, input: File, checked: &CheckedInput) -> Result<String, String> {
        let bytes = checked.identity.bytes;
        let form = FileForm::new(input, bytes, &self.input_name, fastrand::u128(..));
        let sent = form.sent();
        let mut progress = StepProgress::start(observe::now(), "upload");
        let mut uploading = pin!(self.client.upload::<CreatedObject>("/v1/files", form));
        let (mut moved_at, mut moved) = (observe::now(), 0);
        let created = loop {
            tokio::select! {
                created = &mut uploading => break created.map_err(|error| error.to_string())?,
                () = tokio::time::sleep(UPLOAD_TICK) => {}
            }
            let (now, done) = (observe::now(), sent.load(Ordering::Relaxed));
            progress.show(now, (done, bytes), || text::bytes(done, bytes));
            if done > moved {
                (moved_at, moved) = (now, done);
            } else if now.saturating_duration_since(moved_at) > UPLOAD_STALL {
                let base = &self.client.base;
                return Err(format!("POST {base}/v1/files: nothing was taken for 120 s"));
            }
        };
        progress.end(&format!("{}, {}", HumanBytes(bytes), created.id));
        Ok(created.id)
    }

    /// The batch of an input: the one that an earlier process has created without hearing of it, or else a new one.
    async fn batch_of(
        &self,
        file_id: &str,
        is_new: bool,
        endpoint: &str,
    ) -> Result<String, String> {
        if !is_new && let Some(batch_id) = self.find(file_id).await? {
            return Ok(batch_id);
        }
        let mut body = json!({
            "input_file_id": file_id,
            "endpoint": endpoint,
            "completion_window": self.completion_window,
        });
        if !self.metadata.is_empty() {
            let pairs = self.metadata.iter();
            let pairs = pairs.map(|(key, value)| (key.clone(), Value::from(value.as_str())));
            body["metadata"] = Value::Object(pairs.collect::<Map<String, Value>>());
        }
        let created = self
            .client
            .post::<CreatedObject>("/v1/batches", body.to_string().into());
        let created = created.await.map_err(|error| match error {
            AskError::Refused { .. } if !error.may_pass() => self.with_hint(&error),
            error => format!("{error}; the input is uploaded: the same command again goes on"),
        })?;
        Ok(created.id)
    }

    async fn find(&self, file_id: &str) -> Result<Option<String>, String> {
        let mut after = String::new();
        for _ in 0..MAX_PAGES {
            let path = format!("/v1/batches?limit={PAGE_BATCHES}{after}");
            let page = self.client.get::<BatchPage>(&path).await;
            let page = page.map_err(|error| error.to_string())?;
            let mut found = page
                .data
                .iter()
                .filter(|batch| batch.input_file_id == file_id);
            if let Some(batch) = found.next() {
                return Ok(Some(batch.id.clone()));
            }
            match page.data.last() {
                Some(last) if page.has_more => after = format!("&after={}", last.id),
                _ => break,
            }
        }
        Ok(None)
    }

    async fn wait_and_fetch(&self, batch_id: &str, lines: u64) -> Result<LineTally, String> {
        let batch = self.wait(batch_id).await?;
        if batch.is_refused() {
            // Nothing is to be had of the batch any more, and the input has to change.
            let _ = std::fs::remove_file(&self.place);
            let problems = text::problems(batch.problems());
            return Err(format!(
                "{batch_id}: the router refused the input\n{problems}"
            ));
        }
        let failed = match &batch.error_file_id {
            Some(file_id) => self.fetch(Some(file_id), self.errors, "errors").await?,
            None => 0,
        };
        // Last, so that where this file is, the other is as well.
        let file_id = batch.output_file_id.as_deref();
        let succeeded = self.fetch(file_id, self.output, "output").await?;
        Ok(LineTally {
            status: batch.status,
            lines,
            succeeded,
            failed,
        })
    }

    /// The batch once it is over.
    async fn wait(&self, batch_id: &str) -> Result<BatchAnswer, String> {
        let path = format!("/v1/batches/{batch_id}");
        let mut patience = Patience::new(self.give_up_after);
        let (mut rate, mut last): (LineRate, Option<BatchAnswer>) = (LineRate::default(), None);
        let mut progress = StepProgress::start(observe::now(), "batch");
        loop {
            let asked = self.client.get::<BatchAnswer>(&path).await;
            let now = observe::now();
            match asked {
                Ok(batch) => {
                    patience.on_success();
                    let counts = batch.counts();
                    rate.add(now, counts.finished());
                    if last.as_ref().is_none_or(|last| last.status != batch.status) {
                        progress.has_news(now);
                    }
                    if batch.is_over() {
                        progress.end(&text::progress(&batch, &rate));
                        return Ok(batch);
                    }
                    progress.show(now, (counts.finished(), counts.total), || {
                        text::progress(&batch, &rate)
                    });
                    last = Some(batch);
                }
                Err(error) if error.is_not_found() => return Err(self.with_hint(&error)),
                // Before its first answer, a router that cannot be asked is a mistake of the command.
                Err(error) if last.is_some() && error.may_pass() && patience.on_failure(now) => {
                    let done = last.as_ref().map(BatchAnswer::counts).unwrap_or_default();
                    progress.show(now, (done.finished(), done.total), || {
                        format!("asking again: {error}")
                    });
                }
                Err(error) => {
                    let hint = text::how_to_go_on(batch_id, &self.client.base);
                    return Err(format!("{error}; {hint}"));
                }
            }
            tokio::time::sleep(self.interval).await;
        }
    }

    async fn fetch(
        &self,
        file_id: Option<&str>,
        place: &Path,
        name: &'static str,
    ) -> Result<u64, String> {
        let mut patience = Patience::new(self.give_up_after);
        loop {
            let mut progress = StepProgress::start(observe::now(), name);
            match fetch(&self.client, file_id, place, &mut progress).await {
                Ok(lines) => {
                    progress.end(&format!("{} lines, {}", HumanCount(lines), place.display()));
                    return Ok(lines);
                }
                Err(FetchError::Ask(error))
                    if error.may_pass() && patience.on_failure(observe::now()) =>
                {
                    drop(progress);
                    write_line(&format!("asking again: {error}"));
                }
                Err(FetchError::Ask(error)) if error.is_not_found() => {
                    return Err(self.with_hint(&error));
                }
                Err(error) => {
                    return Err(format!(
                        "{error}; the same command again fetches the results"
                    ));
                }
            }
            tokio::time::sleep(self.interval).await;
        }
    }

    /// An error after which this run cannot go on.
    fn with_hint(&self, error: &dyn Display) -> String {
        format!("{error}; {}", BegunRun::begin_anew(&self.place))
    }

    /// What a run that is stopped by Ctrl-C leaves.
    pub(super) fn interrupted(&self) -> String {
        let begun = BegunRun::read(&self.place).ok().flatten();
        let ids = begun.map(|begun| (begun.file_id, begun.batch_id));
        match ids {
            Some((_, Some(batch_id))) => {
                let hint = text::how_to_go_on(&batch_id, &self.client.base);
                format!("interrupted: {hint}")
            }
            Some((Some(_), None)) => {
                "interrupted: the input is uploaded, and the same command again creates its batch"
                    .to_owned()
            }
            Some((None, None)) | None => {
                // Nothing of the run is at the router as a whole.
                let _ = std::fs::remove_file(&self.place);
                "interrupted: nothing runs".to_owned()
            }
        }
    }
}
