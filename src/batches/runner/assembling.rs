//! Puts the results of a batch together: reads its part objects, and writes the files that clients get.

use std::ops::Range;
use std::time::Duration;

use bytes::Bytes;
use tokio::task::yield_now;
use tracing::info;
use xxhash_rust::xxh3::xxh3_128;

use super::input_lines::custom_id;
use super::object_lines::ObjectLines;
use super::work_context::{Halt, WorkContext};
use crate::batches::batch::{Assembled, BatchRecord};
use crate::batches::file::{self, FilePurpose, FileRecord};
use crate::batches::line::{Flavor, LineError};
use crate::batches::metrics::WorkOutcome;
use crate::batches::output::{Assembler, ResultOf};
use crate::batches::paths;
use crate::batches::shards;
use crate::batches::storage::{Storage, StorageError, StorageWriter};
use crate::batches::works::StopWork;

/// The kinds of files of results, as their ids and names have them.
const OUTPUT: &str = "output";
const ERROR: &str = "error";

/// Lines after which requests on this thread have their turn.
const LINES_AT_A_TIME: u32 = 64;

pub(super) async fn run(work: &WorkContext) -> WorkOutcome {
    let Some(record) = work.own_record().await else {
        return WorkOutcome::Lost;
    };
    let assembled = async {
        match assemble(work, &record).await {
            Ok(assembled) => Ok::<_, Halt>(Ok(assembled)),
            Err(Halt::Storage(StorageError::TooLarge(max))) => {
                let error = too_large(max);
                let results = write_failed(work, &record, Some(&error)).await?;
                Ok(Err((error, results)))
            }
            Err(halt) => Err(halt),
        }
    };
    let assembled = match work.unless_stopped(assembled).await {
        Ok(assembled) => assembled,
        Err(halt) => return work.on_halt(halt).await,
    };
    let owner = work.batches.owner;
    let written = work.write_end(|record, now_ms| match &assembled {
        Ok(assembled) => record.end_assembly(owner, assembled.clone(), now_ms),
        Err((error, results)) => {
            let is_ended = record.fail_assembly(owner, error.clone(), now_ms);
            if is_ended {
                record.output_file_id.clone_from(results);
            }
            is_ended
        }
    });
    let Some(record) = written.await else {
        return WorkOutcome::Lost;
    };
    let error = assembled.err().map(|(error, _)| error.message);
    info!(
        batch = record.id,
        tenant = record.tenant_name,
        status = record.status.as_str(),
        lines = record.counts.total,
        completed = record.counts.completed,
        failed = record.counts.failed,
        not_run = record.counts.not_run,
        error,
        "batch ended"
    );
    work.batches.on_ended(&record);
    work.batches.settle_end(work.key(), &record).await;
    WorkOutcome::Done
}

/// Why a batch fails whose results the storage does not take.
fn too_large(max: u64) -> LineError {
    let message = format!(
        "The results of this batch are larger than {max} bytes, the maximum of the storage. Please divide its lines \
         among several batches."
    );
    LineError::new("results_too_large", message, None)
}

/// A file of results that is written.
struct ResultFile {
    /// Of a batch with files; else the name of the object.
    id: String,
    path: String,
    filename: String,
    /// None until it has a line.
    writer: Option<StorageWriter>,
    lines: u32,
}

impl ResultFile {
    fn new(id: String, path: String, filename: String) -> Self {
        Self {
            id,
            path,
            filename,
            writer: None,
            lines: 0,
        }
    }

    async fn write(&mut self, storage: &Storage, line: Bytes) -> Result<(), StorageError> {
        let writer = match &mut self.writer {
            Some(writer) => writer,
            none => none.insert(storage.writer(&self.path).await?),
        };
        writer.write(line).await?;
        writer.write(Bytes::from_static(b"\n")).await?;
        self.lines = self.lines.saturating_add(1);
        if self.lines.is_multiple_of(LINES_AT_A_TIME) {
            yield_now().await;
        }
        Ok(())
    }

    /// The id and the size of the file, if it has a line.
    async fn finish(&mut self) -> Result<Option<(String, u64)>, StorageError> {
        let Some(writer) = self.writer.take() else {
            return Ok(None);
        };
        let bytes = writer.finish().await?;
        Ok(Some((self.id.clone(), bytes)))
    }
}

struct ResultFiles<'a> {
    work: &'a WorkContext,
    record: &'a BatchRecord,
    output: ResultFile,
    /// `None`: a batch of Messages has all results in one.
    error: Option<ResultFile>,
}

impl<'a> ResultFiles<'a> {
    fn new(work: &'a WorkContext, record: &'a BatchRecord) -> Result<Self, StorageError> {
        let (output, error) = match record.flavor {
            Flavor::OpenAi => (
                openai_file(work, record, OUTPUT)?,
                Some(openai_file(work, record, ERROR)?),
            ),
            Flavor::Messages => (own_file(record, paths::OWN_RESULTS), None),
        };
        Ok(Self {
            work,
            record,
            output,
            error,
        })
    }

    async fn write(&mut self, is_ok: bool, line: Bytes) -> Result<(), StorageError> {
        let storage = &self.work.batches.storage;
        let file = match &mut self.error {
            Some(error) if !is_ok => error,
            _ => &mut self.output,
        };
        file.write(storage, line).await
    }

    /// Writes results of those of the lines that have none, and are not known any more.
    async fn write_gone(
        &mut self,
        assembler: &Assembler,
        lines: Range<u32>,
    ) -> Result<(), StorageError> {
        for line in lines.filter(|line| !assembler.has(*line)) {
            let text = result_of(self.record, line, "").input_gone();
            self.write(false, text.into()).await?;
        }
        Ok(())
    }

    /// Completes the files, and registers those that clients find among theirs.
    async fn finish(self, assembler: &Assembler) -> Result<Assembled, Halt> {
        let Self {
            work,
            record,
            mut output,
            mut error,
        } = self;
        let of_output = output.finish().await?;
        let of_error = match &mut error {
            Some(error) => match error.finish().await {
                Err(too_large @ StorageError::TooLarge(_)) => {
                    // The batch fails, and no record will name the other file.
                    work.batches.storage.delete(&output.path).await?;
                    return Err(too_large.into());
                }
                finished => finished?,
            },
            None => None,
        };
        // Some time after the end of the batch its parts are deleted.
        work.check_storage().await?;
        if let Some(error) = error {
            register(work, record, output.filename, of_output.as_ref()).await?;
            register(work, record, error.filename, of_error.as_ref()).await?;
        }
        Ok(Assembled {
            output: of_output,
            error: of_error,
            counts: assembler.counts,
            usage: assembler.usage,
        })
    }
}

/// Has clients find a file, by the id and the size that were written, if it has a line.
async fn register(
    work: &WorkContext,
    record: &BatchRecord,
    filename: String,
    written: Option<&(String, u64)>,
) -> Result<(), Halt> {
    let Some((id, bytes)) = written else {
        return Ok(());
    };
    let retention = work.batches.settings.retention;
    let lasts = record.output_expires_after_s.map(Duration::from_secs);
    let lasts = lasts.unwrap_or(retention).min(retention);
    let created_at = work.batches.files.clock.now_s();
    let record = FileRecord {
        id: id.clone(),
        bytes: *bytes,
        created_at,
        expires_at: Some(created_at.saturating_add_unsigned(lasts.as_secs())),
        filename,
        purpose: FilePurpose::BatchOutput,
    };
    let registered = work.batches.files.register(work.key().tenant, record).await;
    registered.map_err(|error| {
        let message = format!("a file of results was not registered: {}", error.message);
        Halt::Storage(StorageError::Failed(message))
    })
}

/// The same file, whichever replica puts the results together, and however often.
fn openai_file(
    work: &WorkContext,
    record: &BatchRecord,
    kind: &str,
) -> Result<ResultFile, StorageError> {
    let id = file_id(&record.id, kind);
    let path = file::storage_path(work.key().tenant, &id).ok_or(StorageError::NotFound)?;
    let filename = format!("{}_{kind}.jsonl", record.id);
    Ok(ResultFile::new(id, path, filename))
}

/// An object of a batch of Messages, by the name that its record has.
fn own_file(record: &BatchRecord, name: &str) -> ResultFile {
    ResultFile::new(name.to_owned(), paths::own(&record.id, name), String::new())
}

/// The ids of the files of results that a batch may have.
pub(super) fn file_ids(batch: &str) -> [String; 2] {
    [OUTPUT, ERROR].map(|kind| file_id(batch, kind))
}

/// Only a client that has the batch's id could guess it.
fn file_id(batch: &str, kind: &str) -> String {
    file::new_file_id(xxh3_128(format!("{batch} {kind}").as_bytes()))
}

/// Nothing stays of files that are not finished: their writers are dropped.
async fn assemble(work: &WorkContext, record: &BatchRecord) -> Result<Assembled, Halt> {
    let _room = work.batches.memory.whole_file().await;
    let storage = &work.batches.storage;
    let mut files = ResultFiles::new(work, record)?;
    let mut assembler = Assembler::new(record.counts.total);
    // Many results take longer to read than a list may be late, so that the time after them says nothing of the lists.
    let listed_ms = work.batches.now_ms();
    for shard in 0..record.shard_count {
        let parts = paths::shard_parts(&record.id, shard);
        for path in storage.list(&parts).await? {
            let mut lines = ObjectLines::open(storage, &path).await?;
            while let Some((result, text)) = lines.next_result().await? {
                if assembler.push(result) {
                    files.write(result.is_ok, text).await?;
                }
            }
        }
    }
    if record.awaits_results(assembler.counts, listed_ms) {
        let message = "the storage does not list all results that were written";
        return Err(StorageError::Failed(message.to_owned()).into());
    }
    write_missing(work, record, &assembler, &mut files).await?;
    // Another replica may have put them together meanwhile, and deleted the parts.
    if work.own_record().await.is_none() {
        return Err(Halt::Stopped(StopWork::Lost));
    }
    // By a wrong clock, the files would be kept for too long or too short a time.
    let checked = work.batches.checked_ms().await;
    let now_ms = checked.map_err(|error| StorageError::Failed(error.to_string()))?;
    if now_ms.is_none() {
        let message = "the clock of this replica is wrong";
        return Err(StorageError::Failed(message.to_owned()).into());
    }
    files.finish(&assembler).await
}

/// Lines without a result get one that says why.
async fn write_missing(
    work: &WorkContext,
    record: &BatchRecord,
    assembler: &Assembler,
    files: &mut ResultFiles<'_>,
) -> Result<(), Halt> {
    if assembler.missing().next().is_none() {
        return Ok(());
    }
    work.check_storage().await?;
    let shards = match work.shards().await {
        // Where the lines are is not known any more.
        Err(StorageError::NotFound) => {
            return Ok(files.write_gone(assembler, 0..record.counts.total).await?);
        }
        shards => shards?,
    };
    for shard in shards {
        let numbers = shard.first_line..shard.first_line.saturating_add(shard.lines);
        if numbers.clone().all(|line| assembler.has(line)) {
            continue;
        }
        let bytes = match work.shard_bytes(record, &shard).await {
            // The client has deleted the input, or it has expired.
            Err(StorageError::NotFound) => {
                files.write_gone(assembler, numbers).await?;
                continue;
            }
            bytes => bytes?,
        };
        for (number, line) in shards::lines(&bytes, shard.first_line) {
            if assembler.has(number) {
                continue;
            }
            let custom_id = custom_id(line);
            let text = result_of(record, number, &custom_id).not_run(record.ending);
            files.write(false, text.into()).await?;
        }
    }
    Ok(())
}

/// Gives each request of a batch of Messages that fails as a whole the reason as its result, because the object of such
/// a batch has no place for it. Returns what the record names as the results. `None`: there are none, because the batch
/// has files, has no error, or has lost its requests.
pub(super) async fn write_failed(
    work: &WorkContext,
    record: &BatchRecord,
    error: Option<&LineError>,
) -> Result<Option<String>, Halt> {
    let Some(error) = error.filter(|_| record.flavor == Flavor::Messages) else {
        return Ok(None);
    };
    let _room = work.batches.memory.whole_file().await;
    let storage = &work.batches.storage;
    let mut file = own_file(record, paths::OWN_ERRORS);
    match ObjectLines::open(storage, &paths::own(&record.id, paths::OWN_INPUT)).await {
        Ok(mut lines) => {
            while let Some(line) = lines.next().await? {
                let custom_id = custom_id(&line);
                let text = result_of(record, file.lines, &custom_id).batch_failed(error);
                file.write(storage, text.into()).await?;
            }
        }
        Err(StorageError::NotFound) => {}
        Err(error) => return Err(error.into()),
    }
    // Nothing would delete it any more.
    if work.own_record().await.is_none() {
        return Err(Halt::Stopped(StopWork::Lost));
    }
    let written = file.finish().await?;
    work.check_storage().await?;
    Ok(written.map(|(id, _)| id))
}

fn result_of<'a>(record: &'a BatchRecord, line: u32, custom_id: &'a str) -> ResultOf<'a> {
    ResultOf {
        flavor: record.flavor,
        batch: &record.id,
        line,
        custom_id,
    }
}
