//! One response in the memory store: its transitions and its size.

use std::mem::size_of;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;

use super::capacity::Cost;
use crate::ids::{ResponseId, Root};
use crate::store::log::{self, Append, LogState};
use crate::store::record::{Background, Content, InitialState, Retention, TakenOver};
use crate::store::settings::RetentionSettings;
use crate::store::{
    Cancellation, CancelledOutput, EventBatch, FencingToken, Finalization, IdempotencyToken,
    LoggedEvents, NewRecord, Orphan, Owner, OwnershipLoss, Record, RoutingHint, Status, Takeover,
    WriteOutcome,
};

/// Overhead of a record: map node (key, links), table entry (the table doubles when full), allocator.
/// `benches/store.rs` compares it with the growth of the process.
const OVERHEAD_BYTES: usize = size_of::<Response>() + 56 + 36 + 48;
/// Overhead of each short text: reference counts, allocator rounding.
const TEXT_BYTES: usize = 24;

/// Bytes of the values of a record.
pub(super) fn size(record: &NewRecord) -> usize {
    let request = match &record.initial {
        InitialState::Finished { .. } => 0,
        InitialState::Background { request, .. } => request.len(),
    };
    record.input.len() + content_size(&record.content) + request
}

pub(super) fn content_size(content: &Content) -> usize {
    content.response.len() + content.output.len()
}

#[derive(Debug)]
pub(super) struct Response {
    token: IdempotencyToken,
    /// Tick of the last use (see `Capacity::tick`).
    pub(super) used: u64,
    pub(super) expires: Option<Instant>,
    values: Values,
    hint: RoutingHint,
    past: Option<Link>,
    run: Option<Box<Run>>,
    status: Status,
}

/// The parent response. Its chain is in the same shard.
#[derive(Clone, Copy, Debug)]
pub(super) struct Link {
    previous: [u64; 2],
    /// Number of turns before this one.
    pub(super) depth: u32,
    pub(super) bytes: u64,
}

impl Link {
    pub(super) fn previous(&self, root: Root) -> ResponseId {
        let own = u128::from(self.previous[0]) << 64 | u128::from(self.previous[1]);
        ResponseId::new(root, own)
    }
}

/// Input, response and output in one allocation, so that no larger request buffer is kept alive.
#[derive(Clone, Debug)]
struct Values {
    bytes: Arc<[u8]>,
    input_end: u32,
    response_end: u32,
}

impl Values {
    fn new(input: &[u8], content: &Content) -> Self {
        let bytes = [input, &content.response, &content.output].concat();
        Self {
            bytes: bytes.into(),
            input_end: input.len() as u32,
            response_end: (input.len() + content.response.len()) as u32,
        }
    }

    fn all(&self) -> Bytes {
        Bytes::from_owner(self.bytes.clone())
    }

    fn input(&self) -> Bytes {
        self.all().slice(..self.input_end as usize)
    }

    fn response(&self) -> Bytes {
        let all = self.all();
        all.slice(self.input_end as usize..self.response_end as usize)
    }

    fn output(&self) -> Bytes {
        self.all().slice(self.response_end as usize..)
    }

    fn content(&self) -> Content {
        Content {
            response: self.response(),
            output: self.output(),
        }
    }

    fn replace(&mut self, content: &Content) {
        *self = Self::new(&self.bytes[..self.input_end as usize], content);
    }
}

/// The part that only background responses have.
#[derive(Debug)]
struct Run {
    owner: Option<Owner>,
    fencing_number: u64,
    attempts: u32,
    retention: Retention,
    streams: bool,
    request: Bytes,
    log: log::Log,
    /// When the log expires.
    log_until: Option<Instant>,
    cut: Bytes,
    final_token: Option<IdempotencyToken>,
    /// The status before the cancel.
    was: Option<Status>,
    has_partial_output: bool,
}

impl Response {
    pub(super) fn new(now: Instant, record: NewRecord, keep: &RetentionSettings) -> Self {
        let (status, run) = match record.initial {
            InitialState::Finished { status } => (status, None),
            InitialState::Background {
                fence,
                retention,
                streams,
                request,
            } => {
                let run = Run {
                    owner: Some(fence.owner),
                    fencing_number: fence.number,
                    attempts: 1,
                    retention,
                    streams,
                    request: Bytes::copy_from_slice(&request),
                    log: log::Log::default(),
                    log_until: None,
                    cut: Bytes::new(),
                    final_token: None,
                    was: None,
                    has_partial_output: false,
                };
                (Status::Queued, Some(Box::new(run)))
            }
        };
        let past = record.parent.and_then(|past| {
            let own = past.ids.last()?.own();
            Some(Link {
                previous: [(own >> 64) as u64, own as u64],
                depth: past.ids.len() as u32,
                bytes: past.bytes,
            })
        });
        let expires = match run {
            Some(_) => None,
            None => keep.of_responses().map(|ttl| now + ttl),
        };
        Self {
            token: record.token,
            used: 0,
            expires,
            values: Values::new(&record.input, &record.content),
            hint: record.hint,
            past,
            run,
            status,
        }
    }

    pub(super) fn status(&self) -> Status {
        self.status
    }

    pub(super) fn token(&self) -> IdempotencyToken {
        self.token
    }

    pub(super) fn hint(&self) -> &RoutingHint {
        &self.hint
    }

    pub(super) fn past(&self) -> Option<Link> {
        self.past
    }

    pub(super) fn input(&self) -> Bytes {
        self.values.input()
    }

    pub(super) fn output(&self) -> Bytes {
        self.values.output()
    }

    /// Size of its own items, without the chain.
    pub(super) fn item_bytes(&self) -> u64 {
        let others = self.values.response_end - self.values.input_end;
        self.values.bytes.len() as u64 - u64::from(others)
    }

    pub(super) fn is_ephemeral(&self) -> bool {
        let retention = self.run.as_ref().map(|run| run.retention);
        retention == Some(Retention::Ephemeral)
    }

    pub(super) fn cost(&self) -> Cost {
        let texts = self.hint.model.len() + self.hint.worker.as_deref().map_or(0, str::len);
        let run = self.run.as_ref().map_or(0, |run| {
            size_of::<Run>() + run.request.len() + run.cut.len() + run.log.cost() as usize + 64
        });
        Cost {
            bytes: (OVERHEAD_BYTES + self.values.bytes.len() + texts + 2 * TEXT_BYTES + run) as u64,
            runs: !self.status.is_terminal(),
        }
    }

    pub(super) fn log_bytes(&self) -> u64 {
        self.run.as_ref().map_or(0, |run| run.log.bytes())
    }

    pub(super) fn log_until(&self) -> Option<Instant> {
        self.run.as_ref()?.log_until
    }

    pub(super) fn drop_log(&mut self) {
        if let Some(run) = &mut self.run {
            run.log.forget();
        }
    }

    pub(super) fn record(&self, root: Root) -> Record {
        Record {
            status: self.status,
            hint: self.hint.clone(),
            previous: self.past.map(|past| past.previous(root)),
            content: self.values.content(),
            background: self.run.as_ref().map(|run| Background {
                owner: run.owner,
                fencing_number: run.fencing_number,
                attempts: run.attempts,
                retention: run.retention,
                streams: run.streams,
                last_event: run.log.last(),
            }),
        }
    }

    /// Why a write with this token is refused, if it is.
    pub(super) fn refusal(&self, fence: FencingToken) -> Option<WriteOutcome> {
        let Some(run) = &self.run else {
            return Some(WriteOutcome::Terminal(self.status));
        };
        if run.owner != Some(fence.owner) || run.fencing_number != fence.number {
            return Some(WriteOutcome::Fenced);
        }
        self.status
            .is_terminal()
            .then_some(WriteOutcome::Terminal(self.status))
    }

    pub(super) fn lost(&self, fence: FencingToken) -> Option<OwnershipLoss> {
        match self.refusal(fence)? {
            WriteOutcome::Terminal(status) => Some(OwnershipLoss::Terminal(status)),
            _ => Some(OwnershipLoss::Fenced),
        }
    }

    pub(super) fn is_background(&self) -> bool {
        self.run.is_some()
    }

    /// The previous status and owner, if a cancel with this token ended it.
    pub(super) fn cancelled_by(&self, token: IdempotencyToken) -> Option<(Status, Option<Owner>)> {
        let run = self.run.as_ref()?;
        let was = run.was.filter(|_| run.final_token == Some(token))?;
        Some((was, run.owner))
    }

    pub(super) fn owner(&self) -> Option<Owner> {
        match self.status.is_terminal() {
            true => None,
            false => self.run.as_ref()?.owner,
        }
    }

    pub(super) fn start(&mut self, fence: FencingToken) -> WriteOutcome {
        if let Some(refused) = self.refusal(fence) {
            return refused;
        }
        self.status = Status::InProgress;
        WriteOutcome::Done
    }

    pub(super) fn append(
        &mut self,
        fence: FencingToken,
        batch: &EventBatch,
        bytes_max: u64,
    ) -> WriteOutcome {
        if let Some(refused) = self.refusal(fence) {
            return refused;
        }
        let Some(run) = &mut self.run else {
            return WriteOutcome::Gone;
        };
        match run.log.append(&owned(batch), bytes_max) {
            Append::Done => WriteOutcome::Done,
            Append::Duplicate { last } => WriteOutcome::Duplicate { last },
            Append::Gap { last } => WriteOutcome::Gap { last },
            Append::Overflow => WriteOutcome::Overflow,
        }
    }

    pub(super) fn finalize(
        &mut self,
        now: Instant,
        fence: FencingToken,
        end: Finalization,
        keep: &RetentionSettings,
    ) -> WriteOutcome {
        let Some(run) = &mut self.run else {
            return WriteOutcome::Terminal(self.status);
        };
        if self.status.is_terminal() && run.final_token == Some(end.token) {
            return WriteOutcome::Done;
        }
        if let Some(refused) = self.refusal(fence) {
            return refused;
        }
        debug_assert!(end.status.is_terminal() && end.status != Status::Cancelled);
        if let Some(batch) = &end.batch {
            // A full log takes no more events, but the response still ends.
            match self.append(fence, batch, keep.max_event_log) {
                WriteOutcome::Done | WriteOutcome::Overflow => {}
                refused => return refused,
            }
        }
        self.values.replace(&end.content);
        self.hint = end.hint;
        self.end(now, end.status, end.token, keep);
        if let Some(run) = &mut self.run {
            run.cut = Bytes::copy_from_slice(&end.delta_table);
        }
        WriteOutcome::Done
    }

    /// Call only for a running response.
    pub(super) fn cancel(&mut self, now: Instant, cancel: Cancellation, keep: &RetentionSettings) {
        let Some(run) = &mut self.run else {
            return;
        };
        run.was = Some(self.status);
        let number = run.log.last().map_or(0, |last| last + 1);
        let batch = EventBatch {
            first: number,
            last: number,
            bytes: Bytes::copy_from_slice(&cancel.event),
        };
        let _ = run.log.append(&batch, keep.max_event_log);
        let content = Content {
            response: cancel.response,
            output: self.values.output(),
        };
        self.values.replace(&content);
        self.end(now, Status::Cancelled, cancel.token, keep);
    }

    fn end(
        &mut self,
        now: Instant,
        status: Status,
        token: IdempotencyToken,
        keep: &RetentionSettings,
    ) {
        self.status = status;
        let Some(run) = &mut self.run else {
            return;
        };
        run.request = Bytes::new();
        run.final_token = Some(token);
        run.log_until = Some(now + keep.event_logs);
        self.expires = match run.retention {
            Retention::Stored => keep.of_responses().map(|ttl| now + ttl),
            Retention::Ephemeral => Some(now + keep.ephemeral),
        };
    }

    pub(super) fn finalize_cancelled(
        &mut self,
        fence: FencingToken,
        output: CancelledOutput,
    ) -> WriteOutcome {
        match self.refusal(fence) {
            // The caller was the owner, and the response was cancelled.
            Some(WriteOutcome::Terminal(Status::Cancelled)) => {}
            Some(refused) => return refused,
            None => return WriteOutcome::Fenced,
        }
        let Some(run) = &mut self.run else {
            return WriteOutcome::Gone;
        };
        if run.has_partial_output {
            return WriteOutcome::Terminal(Status::Cancelled);
        }
        run.has_partial_output = true;
        run.cut = Bytes::copy_from_slice(&output.delta_table);
        self.values.replace(&output.content);
        WriteOutcome::Done
    }

    pub(super) fn events(
        &self,
        now: Instant,
        after: Option<u64>,
        bytes_max: u64,
    ) -> Option<LoggedEvents> {
        let run = self.run.as_ref()?;
        let is_gone = run.log_until.is_some_and(|until| until <= now);
        let is_gone = is_gone && run.log.last().is_some();
        let kept = if run.log.has_overflowed() || (is_gone && run.cut.is_empty()) {
            LogState::Overflowed
        } else if is_gone {
            LogState::Expired(run.cut.clone())
        } else {
            LogState::Whole
        };
        let batches = match kept {
            LogState::Whole => run.log.read(after, bytes_max),
            LogState::Expired(_) | LogState::Overflowed => Vec::new(),
        };
        Some(LoggedEvents {
            status: self.status,
            batches,
            last: run.log.last(),
            log: kept,
        })
    }

    /// Owner and fencing number, if the response runs and its owner is not alive.
    pub(super) fn orphan(
        &self,
        is_alive: impl FnOnce(Owner) -> bool,
    ) -> Option<(Option<Owner>, u64)> {
        let run = self.run.as_ref()?;
        let runs = !self.status.is_terminal();
        (runs && !run.owner.is_some_and(is_alive)).then_some((run.owner, run.fencing_number))
    }

    pub(super) fn take_over(&mut self, orphan: Orphan, by: Owner, is_alive: bool) -> Takeover {
        let Some(run) = self.run.as_mut().filter(|_| !self.status.is_terminal()) else {
            return Takeover::Terminal(self.status);
        };
        // The reply to the first attempt was lost.
        let is_ours = run.owner == Some(by) && run.fencing_number == orphan.fencing_number + 1;
        if !is_ours {
            if run.owner != orphan.owner || run.fencing_number != orphan.fencing_number || is_alive
            {
                return Takeover::Raced;
            }
            run.owner = Some(by);
            run.fencing_number += 1;
            run.attempts += 1;
        }
        Takeover::Done(TakenOver {
            fence: FencingToken {
                owner: by,
                number: run.fencing_number,
            },
            status: self.status,
            attempts: run.attempts,
            streams: run.streams,
            last_event: run.log.last(),
            request: run.request.clone(),
        })
    }

    pub(super) fn release(&mut self, fence: FencingToken) -> WriteOutcome {
        if let Some(refused) = self.refusal(fence) {
            return refused;
        }
        if let Some(run) = &mut self.run {
            run.owner = None;
            run.fencing_number += 1;
        }
        WriteOutcome::Done
    }
}

fn owned(batch: &EventBatch) -> EventBatch {
    EventBatch {
        bytes: Bytes::copy_from_slice(&batch.bytes),
        ..*batch
    }
}
