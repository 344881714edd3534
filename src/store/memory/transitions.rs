//! The writes to one response: start, append, finalize, cancel, takeover and release. Each is refused if its fencing
//! token is outdated or the response has ended.

use std::time::Instant;

use bytes::Bytes;

use super::response::{Response, Run};
use crate::store::record::{Content, Retention};
use crate::store::{
    Cancellation, CancelledOutput, EventBatch, FencingToken, Finalization, IdempotencyToken,
    Orphan, Owner, OwnershipLoss, RetentionSettings, Status, TakenOver, Takeover, WriteOutcome,
};

impl Response {
    /// Why a write with this token is refused, if it is.
    fn refusal(&self, fence: FencingToken) -> Option<WriteOutcome> {
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

    /// Why `fence` no longer owns the response; `None` if it does.
    pub(super) fn ownership_loss(&self, fence: FencingToken) -> Option<OwnershipLoss> {
        match self.refusal(fence)? {
            WriteOutcome::Terminal(status) => Some(OwnershipLoss::Terminal(status)),
            _ => Some(OwnershipLoss::Fenced),
        }
    }

    pub(super) fn start(&mut self, fence: FencingToken) -> WriteOutcome {
        if let Some(refused) = self.refusal(fence) {
            return refused;
        }
        self.status = Status::InProgress;
        if let Some(run) = &mut self.run {
            run.started = Some(fence.number);
        }
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
        run.log.append(&owned(batch), bytes_max)
    }

    /// The outcome of a finalize that changes nothing: it is refused, or was applied before. `None` if it ends the
    /// response.
    pub(super) fn without_end(
        &self,
        fence: FencingToken,
        end: &Finalization,
    ) -> Option<WriteOutcome> {
        let Some(run) = &self.run else {
            return Some(WriteOutcome::Terminal(self.status));
        };
        if self.status.is_terminal() && run.end_token == Some(end.token) {
            return Some(WriteOutcome::Done);
        }
        if let Some(refused) = self.refusal(fence) {
            return Some(refused);
        }
        run.log.mismatch(end.batch.as_ref()?)
    }

    /// Call only if [`Self::without_end`] is `None`.
    pub(super) fn finalize(
        &mut self,
        now: Instant,
        fence: FencingToken,
        end: Finalization,
        keep: &RetentionSettings,
    ) -> WriteOutcome {
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
        if let Some(run) = &mut self.run
            && end.retention == Retention::Ephemeral
        {
            run.retention = Retention::Ephemeral;
        }
        self.end(now, end.status, end.token, keep);
        if let Some(run) = &mut self.run {
            run.delta_table = Bytes::copy_from_slice(&end.delta_table);
        }
        WriteOutcome::Done
    }

    /// Call only for a running response.
    pub(super) fn cancel(&mut self, now: Instant, cancel: Cancellation, keep: &RetentionSettings) {
        let Some(run) = &mut self.run else {
            return;
        };
        run.status_before_cancel = Some(self.status);
        let number = run.log.last.map_or(0, |last| last + 1);
        let has_output = run.streams && number > 0;
        let batch = EventBatch::new(number, number, Bytes::copy_from_slice(&cancel.event));
        let _ = run.log.append(&batch, keep.max_event_log);
        let content = Content {
            response: cancel.response,
            output: self.values.output(),
        };
        self.values.replace(&content);
        let request = self.run.as_ref().map(|run| run.request.clone());
        self.end(now, Status::Cancelled, cancel.token, keep);
        if let (Some(run), Some(request)) = (&mut self.run, request)
            && has_output
            && !run.log.overflowed
        {
            run.has_output_pending = true;
            run.request = request;
        }
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
        run.end_token = Some(token);
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
        run.has_output_pending = false;
        run.request = Bytes::new();
        run.delta_table = Bytes::copy_from_slice(&output.delta_table);
        self.values.replace(&output.content);
        WriteOutcome::Done
    }

    pub(super) fn take_over(&mut self, orphan: Orphan, by: Owner, is_alive: bool) -> Takeover {
        let runs = !self.status.is_terminal();
        let unfinished = |run: &&mut Box<Run>| runs || run.has_output_pending;
        let Some(run) = self.run.as_mut().filter(unfinished) else {
            return Takeover::Terminal(self.status);
        };
        // The reply to the first attempt was lost.
        let is_ours = run.owner == Some(by) && run.fencing_number == orphan.fencing_number + 1;
        if !is_ours {
            if run.owner != orphan.owner || run.fencing_number != orphan.fencing_number || is_alive
            {
                return Takeover::Raced;
            }
            if runs {
                run.attempts += u32::from(run.started == Some(run.fencing_number));
                run.lost_owners += u32::from(run.owner.is_some());
            }
            run.owner = Some(by);
            run.fencing_number += 1;
        }
        Takeover::Done(TakenOver {
            fence: FencingToken {
                owner: by,
                number: run.fencing_number,
            },
            status: self.status,
            attempts: run.attempts,
            lost_owners: run.lost_owners,
            streams: run.streams,
            last_event: run.log.last,
        })
    }

    pub(super) fn release(&mut self, fence: FencingToken) -> WriteOutcome {
        match self.refusal(fence) {
            Some(WriteOutcome::Terminal(_)) if self.has_output_pending() => {}
            Some(refused) => return refused,
            None => {}
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
        tokens: Bytes::copy_from_slice(&batch.tokens),
        ..*batch
    }
}
