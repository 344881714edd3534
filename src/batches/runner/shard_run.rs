//! Runs the lines of a shard that have no result yet, and writes the results of those that have into part objects.

use std::mem;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU32};
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};

use super::input_lines::InputLines;
use super::line_run::{self, FinishedLine, LineContext};
use super::object_lines::ObjectLines;
use super::part_buffer::PartBuffer;
use super::retry::FailedTries;
use super::work_context::{Halt, WorkContext};
use crate::batches::batch::BatchRecord;
use crate::batches::metrics::WorkOutcome;
use crate::batches::output::{Assembler, LineTries};
use crate::batches::paths;
use crate::batches::shards::Shard;
use crate::batches::storage::StorageError;
use crate::batches::works::{EndingShard, StopWork};
use crate::observe;

/// A shard of which no line has ended or failed for so long, and none is at an engine, is given back. Shards of other
/// batches come first then: their models may have workers, and their tenants tokens left.
const STALL: Duration = Duration::from_secs(60);

/// A shard of which no more lines than this can run, because all others wait for those of their conversations, gives
/// its place to a batch that has none here. More lines are worth a place.
const FEW_LINES: usize = 4;

/// With fewer lines that wait for those of their conversations, a shard ends soon enough by itself.
const MANY_HELD_UP: usize = 16;

/// Until it is looked again whether the last lines have ended of a shard that gives its place away.
const ENDING_INTERVAL: Duration = Duration::from_secs(1);

/// What a shard begins with.
#[derive(Debug, Default)]
struct LoadedShard {
    /// Its lines that have no result.
    rest: InputLines,
    /// Of these lines, in earlier runs.
    tries: FailedTries,
    /// For the input. It is given back when the shard ends.
    _room: Option<OwnedSemaphorePermit>,
}

struct ShardRun<'a> {
    work: &'a WorkContext,
    number: u32,
    lines: Arc<LineContext>,
    part: PartBuffer,
    /// Random: no other run of the shard, here or elsewhere, writes to its part objects.
    writer: u64,
    next_part: u32,
    /// While it ends to give its place away.
    ending: Option<EndingShard>,
}

pub(super) async fn run(work: &WorkContext, number: u32) -> WorkOutcome {
    let Some(record) = work.own_record().await else {
        return WorkOutcome::Lost;
    };
    let loaded = match work.unless_stopped(load(work, &record, number)).await {
        Ok(loaded) => loaded,
        Err(halt) => return work.on_halt(halt).await,
    };
    let mut run = ShardRun {
        work,
        number,
        lines: Arc::new(LineContext {
            sender: work.sender.clone(),
            gate: work.gate.clone(),
            memory: work.batches.memory.clone(),
            metrics: work.batches.metrics.clone(),
            flavor: record.flavor,
            endpoint: record.endpoint,
            tenant: record.tenant_name.as_str().into(),
            batch: record.id.as_str().into(),
            sending: AtomicU32::new(0),
            retries: AtomicU32::new(0),
            held_up: AtomicU32::new(0),
            is_ending: AtomicBool::new(false),
            turns: Mutex::default(),
            earlier_tries: loaded.tries,
            tries: Mutex::default(),
            looked_up: Mutex::default(),
            look_up_turn: Semaphore::new(1),
        }),
        part: PartBuffer::default(),
        writer: fastrand::u64(..),
        next_part: 0,
        ending: None,
    };
    let stopped = run.run(loaded.rest).await;
    run.end(stopped).await
}

/// Reads those of the shard's lines that have no result, once there is room for them.
async fn load(work: &WorkContext, record: &BatchRecord, number: u32) -> Result<LoadedShard, Halt> {
    let shards = match work.shards().await {
        // Somebody has deleted what says where the lines are.
        Err(StorageError::NotFound) => {
            work.check_storage().await?;
            return Ok(LoadedShard::default());
        }
        shards => shards?,
    };
    let shard = shards
        .get(number as usize)
        .copied()
        .ok_or_else(|| StorageError::Failed(format!("{} has no shard {number}", record.id)))?;
    let (done, tries) = finished_lines(work, &shard, number).await?;
    let room = work.batches.memory.input(shard.bytes).await;
    let rest = match work.shard_bytes(record, &shard).await {
        Ok(bytes) => InputLines::of(&bytes, &shard, record, |line| done.has(line)),
        // The client has deleted the input: nothing of it can be run any more.
        Err(StorageError::NotFound) => {
            work.check_storage().await?;
            InputLines::default()
        }
        Err(error) => return Err(error.into()),
    };
    Ok(LoadedShard {
        rest,
        tries,
        _room: room,
    })
}

/// The lines of a shard with a result, and how often lines were tried.
async fn finished_lines(
    work: &WorkContext,
    shard: &Shard,
    number: u32,
) -> Result<(Assembler, FailedTries), StorageError> {
    let storage = &work.batches.storage;
    let mut done = Assembler::new(shard.first_line.saturating_add(shard.lines));
    let mut tries = FailedTries::new();
    let folder = paths::shard_parts(&work.key().id, number);
    let parts = storage.list(&folder).await?;
    if parts.is_empty() {
        return Ok((done, tries));
    }
    // A result line may be as long as an answer.
    let _room = work.batches.memory.whole_file().await;
    for path in parts {
        let mut lines = ObjectLines::open(storage, &path).await?;
        while let Some((result, _)) = lines.next_result().await? {
            done.push(result);
        }
        // The parts come in no order of time, and a count only grows.
        for (line, count) in lines.tries {
            let known = tries.entry(line).or_default();
            *known = count.max(*known);
        }
    }
    Ok((done, tries))
}

impl ShardRun<'_> {
    /// Runs until all lines have results that are written, or until the work is stopped.
    async fn run(&mut self, rest: InputLines) -> Option<StopWork> {
        for invalid in &rest.invalid {
            let (number, custom_id) = (invalid.number, &invalid.custom_id);
            let finished = self.lines.unsent(number, custom_id, &invalid.error);
            self.on_finished(finished);
        }
        // Dropped, it gives up what runs.
        let mut running = JoinSet::new();
        for line in rest.lines {
            running.spawn(line_run::run(self.lines.clone(), line));
        }
        let work = self.work;
        let mut stopped = pin!(work.stopped());
        let mut moved = Instant::now();
        let mut looked = moved;
        let reason = loop {
            if running.is_empty() && self.part.bytes.is_empty() {
                return None;
            }
            let waiting = self.lines.held_up.load(Relaxed) as usize;
            let is_ending = self.ending.is_some();
            if is_ending && !running.is_empty() && running.len() <= waiting {
                break StopWork::GivesPlace;
            }
            let interval = if is_ending { ENDING_INTERVAL } else { STALL };
            let due = self.part.due(Instant::now(), running.is_empty());
            tokio::select! {
                biased;
                reason = &mut stopped => break reason,
                () = sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => {
                    // Also while the storage or the store does not answer, a cancel stops the lines at once.
                    tokio::select! {
                        biased;
                        reason = &mut stopped => break reason,
                        () = self.write_out() => {}
                    }
                }
                Some(finished) = running.join_next(), if self.part.has_room() => match finished {
                    Ok(finished) => {
                        moved = Instant::now();
                        self.on_finished(finished);
                    }
                    Err(error) => self.work.batches.failed("a line of a batch has no result", &error),
                },
                () = sleep_until(moved + STALL), if !running.is_empty() => {
                    let retried = self.lines.retries.swap(0, Relaxed) > 0;
                    if !retried && self.lines.sending.load(Relaxed) == 0 {
                        break StopWork::Stalled;
                    }
                    moved = Instant::now();
                }
                () = sleep_until(looked + interval), if !running.is_empty() => {
                    looked = Instant::now();
                    let waiting = self.lines.held_up.load(Relaxed) as usize;
                    if !is_ending && is_held_up(running.len(), waiting) {
                        // Lines that run go on to their ends: what they have computed is not lost.
                        self.ending = work.batches.works.end_for_another(observe::now());
                        self.lines.is_ending.store(self.ending.is_some(), Relaxed);
                    }
                }
            }
        };
        while let Some(finished) = running.try_join_next() {
            if let Ok(finished) = finished {
                self.on_finished(finished);
            }
        }
        // What is not answered yet is closed before anybody else may send it.
        running.shutdown().await;
        Some(reason)
    }

    /// Only here a line has a result: until then it is given up when the work is stopped, and sent again.
    fn on_finished(&mut self, finished: FinishedLine) {
        let FinishedLine { line, text, held } = finished;
        self.lines.tries.lock().remove(&line.line);
        self.part.push(Instant::now(), line, &text, held);
    }

    async fn write_out(&mut self) {
        self.write_part().await;
        self.write_progress().await;
    }

    /// Writes what has come into a part object. What fails, or is given up half-way, is written again later.
    async fn write_part(&mut self) {
        if self.part.bytes.is_empty() {
            return;
        }
        let work = self.work;
        let batches = &work.batches;
        let path = paths::part(&work.key().id, self.number, self.writer, self.next_part);
        // Each write has an object of its own: one that is given up may be done after the next, which has more lines.
        self.next_part = self.next_part.saturating_add(1);
        let bytes = Bytes::copy_from_slice(&self.part.bytes);
        let has_failed = self.part.has_failed();
        let written = async {
            if has_failed {
                // Else each try would leave an object in the mount point of a lost mount, until its disk is full.
                work.check_storage().await?;
            }
            batches.storage.put(&path, bytes).await?;
            work.check_storage().await
        };
        match written.await {
            // If the shard was lost before, its lines are run again elsewhere, and count there.
            Ok(()) => {
                for outcome in self.part.on_written() {
                    let lines = &batches.metrics.lines;
                    lines.with_label_values(&[outcome]).inc();
                }
            }
            Err(error) => {
                batches.failed("results of a batch not written", &error);
                self.part.on_failed(Instant::now());
            }
        }
    }

    /// Counts what was written. What fails is counted with the next part; at the end of the batch all is counted anew.
    async fn write_progress(&mut self) {
        if !self.part.bytes.is_empty() {
            return;
        }
        let (owner, work) = (self.work.batches.owner, self.work.work());
        let (counts, usage) = self.part.progress();
        let batches = &self.work.batches;
        let written = batches.records.change(self.work.key(), |record, _| {
            record.progress(owner, work, counts, usage)
        });
        match written.await {
            Ok(_) => self.part.on_progress(),
            Err(error) => batches.failed("progress of a batch not written", &error),
        }
    }

    async fn end(mut self, stopped: Option<StopWork>) -> WorkOutcome {
        if stopped == Some(StopWork::Lost) {
            return WorkOutcome::Lost;
        }
        let work = self.work;
        let is_given_back = matches!(
            stopped,
            Some(StopWork::Draining | StopWork::Stalled | StopWork::GivesPlace)
        );
        if is_given_back {
            let failed = mem::take(&mut *self.lines.tries.lock());
            for (line, tries) in failed {
                self.part.push_tries(LineTries { tries, line });
            }
        }
        let works = &work.batches.works;
        if stopped == Some(StopWork::Stalled) {
            works.on_stall(observe::now(), work.key());
        }
        loop {
            tokio::select! {
                biased;
                // A storage that hangs does not keep the place of another shard.
                () = work.guard.lost() => return WorkOutcome::Lost,
                () = self.write_part() => {}
            }
            // Without the storage the batch cannot end either, so that what is done need not be lost.
            match self.part.due(Instant::now(), true) {
                Some(due) if !self.work.is_given_up() => sleep_until(due).await,
                _ => break,
            }
        }
        if stopped == Some(StopWork::GivesPlace) {
            // The batch goes on at its other places, and has not stalled. Others come first once the place is free.
            works.on_place_given(observe::now(), work.key());
        }
        let (owner, work, number) = (self.work.batches.owner, self.work.work(), self.number);
        let (counts, usage) = self.part.progress();
        // Without its results the shard has not ended, though its batch was cancelled or has expired.
        let is_written = self.part.bytes.is_empty();
        let is_returned = is_given_back || !is_written;
        let written = self.work.write_end(|record, now_ms| {
            if is_written {
                record.progress(owner, work, counts, usage);
            }
            if is_returned {
                record.give_back(owner, work)
            } else {
                record.end_shard(owner, number, now_ms)
            }
        });
        if written.await.is_none() {
            return WorkOutcome::Lost;
        }
        stopped.map_or(WorkOutcome::Done, WorkOutcome::from)
    }
}

/// Whether hardly any of a shard's lines can run, and it would keep its place for long. `waiting`: how many of the
/// `running` ones wait for others of their conversations.
fn is_held_up(running: usize, waiting: usize) -> bool {
    waiting >= MANY_HELD_UP && running <= waiting + FEW_LINES
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shard_is_held_up_by_conversations_and_not_at_its_end() {
        for (running, waiting, expected) in [
            (256, 255, true),
            (256, 252, true),
            (256, 251, false),
            (256, 0, false),
            (17, 16, true),
            // One line runs, four of its conversation wait, and one other runs.
            (6, 4, false),
            (1, 0, false),
        ] {
            assert_eq!(
                is_held_up(running, waiting),
                expected,
                "{running}, {waiting}"
            );
        }
    }
}
