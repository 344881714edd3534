//! Who does which work of a batch, and what becomes of it: the machine over a batch's record. Pure.
//!
//! A replica reads the record, has a method change it, and writes it back if nobody else has written since; otherwise
//! it reads again. So the methods see one order of events, and any replica may call any of them at any time: what is
//! said by a replica that no longer has the work is ignored, and returns false.
//!
//! A batch is inserted unconfirmed, so that no replica runs it, and confirmed last: a batch whose client got an error
//! never runs.
//!
//! ```text
//! validating ──▶ in_progress ──▶ finalizing ──▶ completed | expired | cancelled
//!  │      └──▶ cancelling ◀──┘     ▲
//!  ▼               └───────────────┘
//! failed
//! ```
//!
//! Claims keep two replicas from doing the same work at the same time. The results do not rely on that: they are right
//! also if a replica goes on after its claim has run out.

use super::batch::{
    Assembled, BatchRecord, BatchStatus, Claim, Ending, LATE_LIST_MS, LineCounts, PARTS_KEPT_MS,
    PARTS_RETRY_MS, Usage, WEBHOOK_GRACE_MS, Work,
};
use super::line::LineError;
use super::validation::Plan;

impl BatchRecord {
    /// The next work for `owner`, which has it from now on. `None` leaves the record as it is.
    ///
    /// A claim that has run out goes to another owner. Its own owner is not given the work again: it may still do it,
    /// and its next [`renew`](Self::renew) makes the claim good. An owner that has stopped a work says so with
    /// [`give_back`](Self::give_back).
    #[must_use]
    pub fn claim(&mut self, now_ms: u64, owner: u64, lease_ms: u64) -> Option<Work> {
        let work = self.next_work(now_ms, Some(owner))?;
        match work {
            Work::Validate => {}
            Work::Shard(shard) => {
                self.returned.retain(|returned| *returned != shard);
                self.next_shard = self.next_shard.max(shard.saturating_add(1));
            }
            Work::Finalize if self.status != BatchStatus::Finalizing => {
                self.begin_finalizing(now_ms);
            }
            Work::Finalize => {}
            Work::Delete => self.claims.clear(),
        }
        self.claims.retain(|claim| claim.work != work);
        self.claims.push(Claim {
            work,
            owner,
            until_ms: now_ms.saturating_add(lease_ms),
        });
        Some(work)
    }

    /// Makes all claims of the owner last for `lease_ms` from now. False if it has none.
    pub fn renew(&mut self, now_ms: u64, owner: u64, lease_ms: u64) -> bool {
        let until_ms = now_ms.saturating_add(lease_ms);
        let mut has_any = false;
        for claim in self.claims.iter_mut().filter(|claim| claim.owner == owner) {
            claim.until_ms = claim.until_ms.max(until_ms);
            has_any = true;
        }
        has_any
    }

    /// Whether the work is the owner's, so that what it says of it counts.
    pub fn owns(&self, owner: u64, work: Work) -> bool {
        self.claims
            .iter()
            .any(|claim| claim.owner == owner && claim.work == work)
    }

    /// Counts lines that were finished since the last call. What is counted twice or not at all is put right when the
    /// results are put together; until then no count is more than the total.
    pub fn progress(&mut self, owner: u64, work: Work, done: LineCounts, usage: Usage) -> bool {
        if !self.owns(owner, work) {
            return false;
        }
        let counts = &mut self.counts;
        let open = counts.total.saturating_sub(counts.failed);
        counts.completed = counts.completed.saturating_add(done.completed).min(open);
        let open = counts.total.saturating_sub(counts.completed);
        counts.failed = counts.failed.saturating_add(done.failed).min(open);
        self.usage += usage;
        true
    }

    /// The shards are known, or the batch fails. A batch that is being cancelled is validated too, so that each of its
    /// lines gets a result.
    pub fn end_validation(
        &mut self,
        owner: u64,
        result: Result<Plan, Vec<LineError>>,
        now_ms: u64,
    ) -> bool {
        if !self.release(owner, Work::Validate) {
            return false;
        }
        match result {
            Ok(plan) => {
                self.is_validated = true;
                self.counts.total = plan.total;
                self.shard_count = u32::try_from(plan.shards.len()).unwrap_or(u32::MAX);
                self.model = plan.model;
                self.tokens = plan.tokens;
                if self.status != BatchStatus::Cancelling {
                    self.status = BatchStatus::InProgress;
                    self.in_progress_ms = Some(now_ms);
                }
            }
            Err(errors) => self.fail(errors, now_ms),
        }
        true
    }

    /// The lines of the shard run no more: all have a result, or the batch is stopping.
    pub fn end_shard(&mut self, owner: u64, shard: u32, now_ms: u64) -> bool {
        if !self.release(owner, Work::Shard(shard)) {
            return false;
        }
        if self.have_all_shards_ended() {
            self.begin_finalizing(now_ms);
        }
        true
    }

    /// Whether results were counted that are not among those `found`, and may be found soon. `listed_ms`: when it was begun
    /// to list them. All shards of a batch that completes have ended, so that each of its lines has a result if its input
    /// was there. A batch that was cancelled or has expired has lines without one, and may have counted others twice.
    pub fn awaits_results(&self, found: LineCounts, listed_ms: u64) -> bool {
        let found = found.completed.saturating_add(found.failed);
        let counted = self.counts.completed.saturating_add(self.counts.failed);
        let until_ms = self.finalizing_ms.unwrap_or(0).saturating_add(LATE_LIST_MS);
        self.ending == Ending::Completed && found < counted && listed_ms < until_ms
    }

    /// The results are put together, which ends the batch.
    pub fn end_assembly(&mut self, owner: u64, assembled: Assembled, now_ms: u64) -> bool {
        if !self.release(owner, Work::Finalize) {
            return false;
        }
        let counts = &mut self.counts;
        counts.completed = assembled.counts.completed.min(counts.total);
        let open = counts.total - counts.completed;
        counts.failed = assembled.counts.failed.min(open);
        counts.not_run = open - counts.failed;
        self.usage = assembled.usage;
        self.output_file_id = assembled.output.map(|(id, _)| id);
        self.error_file_id = assembled.error.map(|(id, _)| id);
        match self.ending {
            Ending::Cancelled => {
                self.status = BatchStatus::Cancelled;
                self.cancelled_ms = Some(now_ms);
            }
            Ending::Expired if self.counts.not_run > 0 => {
                self.status = BatchStatus::Expired;
                self.expired_ms = Some(now_ms);
            }
            // The last line was finished just in time.
            Ending::Expired | Ending::Completed => {
                // Lines whose results were lost.
                self.counts.failed += self.counts.not_run;
                self.counts.not_run = 0;
                self.status = BatchStatus::Completed;
                self.completed_ms = Some(now_ms);
            }
        }
        true
    }

    /// The results cannot be put together, now or later, which ends the batch without them.
    pub fn fail_assembly(&mut self, owner: u64, error: LineError, now_ms: u64) -> bool {
        if !self.release(owner, Work::Finalize) {
            return false;
        }
        self.fail(vec![error], now_ms);
        true
    }

    /// The owner stops a work that is not done, so that others can go on with it at once.
    pub fn give_back(&mut self, owner: u64, work: Work) -> bool {
        if !self.release(owner, work) {
            return false;
        }
        if let Work::Shard(shard) = work {
            self.returned.push(shard);
        }
        true
    }

    /// Makes a batch that was inserted unconfirmed the one that it is to be. False if it is that, or is being deleted.
    pub fn confirm(&mut self, new: &Self) -> bool {
        let may_run = self.is_unconfirmed && self.claims.is_empty();
        if may_run {
            *self = new.clone();
        }
        may_run
    }

    /// Takes a creation back whose client got an error. What runs of it is lost. False if that was done before.
    pub fn take_back(&mut self, now_ms: u64) -> bool {
        if self.is_unconfirmed && self.delete_ms <= now_ms {
            return false;
        }
        self.is_unconfirmed = true;
        self.delete_ms = now_ms;
        self.claims.clear();
        true
    }

    /// Begins to cancel the batch. True also if that was done before; false if it is too late, because all its lines
    /// have ended.
    pub fn cancel(&mut self, now_ms: u64) -> bool {
        match self.status {
            BatchStatus::Validating | BatchStatus::InProgress => {
                self.status = BatchStatus::Cancelling;
                self.cancelling_ms = Some(now_ms);
                true
            }
            BatchStatus::Cancelling => true,
            BatchStatus::Finalizing => self.ending == Ending::Cancelled,
            BatchStatus::Failed
            | BatchStatus::Completed
            | BatchStatus::Expired
            | BatchStatus::Cancelled => false,
        }
    }

    /// Whether no more lines may run: those that do are stopped, and their shards ended. Validation and assembly go on.
    pub fn is_stopping(&self, now_ms: u64) -> bool {
        match self.status {
            BatchStatus::Cancelling => self.is_validated,
            BatchStatus::InProgress => self.expires_ms <= now_ms,
            BatchStatus::Validating
            | BatchStatus::Finalizing
            | BatchStatus::Failed
            | BatchStatus::Completed
            | BatchStatus::Expired
            | BatchStatus::Cancelled => false,
        }
    }

    /// Whether the end of the batch should have been settled by now, and was not: whoever sees this settles it.
    pub fn is_webhook_due(&self, now_ms: u64) -> bool {
        let due_ms = self.webhook_due_ms();
        due_ms.is_some_and(|due_ms| due_ms <= now_ms)
    }

    /// Whether the parts of the results are no longer needed and still there: whoever sees this deletes them.
    pub fn are_parts_due(&self, now_ms: u64) -> bool {
        self.parts_due_ms().is_some_and(|due_ms| due_ms <= now_ms)
    }

    /// The parts that were due are deleted; or not all of them, which is tried again later. False if none are due.
    pub fn end_parts_deletion(&mut self, now_ms: u64, is_done: bool) -> bool {
        if !self.are_parts_due(now_ms) {
            return false;
        }
        if is_done {
            self.parts_deleted = true;
        } else {
            self.parts_retry_ms = Some(now_ms.saturating_add(PARTS_RETRY_MS));
        }
        true
    }

    /// When a replica must look at the batch again, if nobody changes it before. Now or earlier if there is work for
    /// another owner than those of its claims.
    pub fn due_ms(&self, now_ms: u64) -> Option<u64> {
        match self.next_work(now_ms, None) {
            Some(Work::Shard(_)) => return Some(now_ms),
            // Before all batches that wait for a shard's turn, of which there may be more than one look finds: half the
            // time of the creation is earlier than any of theirs. Who was created first is validated first, so that
            // many new batches of one tenant hold up neither older ones of others nor any end.
            Some(Work::Validate) => return Some(self.created_ms / 2),
            Some(Work::Finalize | Work::Delete) => return Some(0),
            None => {}
        }
        let ends = self.claims.iter().map(|claim| claim.until_ms);
        let next_end = ends.filter(|until_ms| now_ms < *until_ms).min();
        let is_running = self.status == BatchStatus::InProgress && now_ms < self.expires_ms;
        let expiry = is_running.then_some(self.expires_ms);
        let deletion = (now_ms < self.delete_ms).then_some(self.delete_ms);
        let times = [
            next_end,
            expiry,
            deletion,
            self.webhook_due_ms(),
            self.parts_due_ms(),
        ];
        times.into_iter().flatten().min()
    }

    /// What `owner` could do; for `None`, what an owner could do that has no claim.
    pub fn next_work(&self, now_ms: u64, owner: Option<u64>) -> Option<Work> {
        // A claim of another owner that has run out holds nobody up.
        let holds = |claim: &Claim| now_ms < claim.until_ms || Some(claim.owner) == owner;
        let is_free = |work: Work| {
            let mut claims = self.claims.iter();
            !claims.any(|claim| claim.work == work && holds(claim))
        };
        let are_all_free = !self.claims.iter().any(holds);
        if self.delete_ms <= now_ms {
            return are_all_free.then_some(Work::Delete);
        }
        if self.is_unconfirmed {
            return None;
        }
        match self.status {
            BatchStatus::Validating => is_free(Work::Validate).then_some(Work::Validate),
            BatchStatus::Cancelling if !self.is_validated => {
                is_free(Work::Validate).then_some(Work::Validate)
            }
            BatchStatus::Finalizing => is_free(Work::Finalize).then_some(Work::Finalize),
            BatchStatus::InProgress | BatchStatus::Cancelling => {
                if self.is_stopping(now_ms) || self.have_all_shards_ended() {
                    return are_all_free.then_some(Work::Finalize);
                }
                let run_out = || {
                    let mut claims = self.claims.iter().filter(|claim| !holds(claim));
                    claims.find_map(|claim| match claim.work {
                        Work::Shard(shard) => Some(shard),
                        Work::Validate | Work::Finalize | Work::Delete => None,
                    })
                };
                let new = (self.next_shard < self.shard_count).then_some(self.next_shard);
                // Last, and one after the other: a shard whose model has no workers keeps no other from its turn.
                let returned = self.returned.first().copied();
                run_out().or(new).or(returned).map(Work::Shard)
            }
            BatchStatus::Failed
            | BatchStatus::Completed
            | BatchStatus::Expired
            | BatchStatus::Cancelled => None,
        }
    }

    /// Ends the batch without results. One that was cancelled is cancelled all the same.
    fn fail(&mut self, errors: Vec<LineError>, now_ms: u64) {
        self.errors = errors;
        if self.shown_status() == BatchStatus::Cancelling {
            self.status = BatchStatus::Cancelled;
            self.cancelled_ms = Some(now_ms);
        } else {
            self.status = BatchStatus::Failed;
            self.failed_ms = Some(now_ms);
        }
    }

    fn have_all_shards_ended(&self) -> bool {
        let is_shard = |claim: &Claim| matches!(claim.work, Work::Shard(_));
        self.shard_count <= self.next_shard
            && self.returned.is_empty()
            && !self.claims.iter().any(is_shard)
    }

    fn begin_finalizing(&mut self, now_ms: u64) {
        self.ending = match self.status {
            BatchStatus::Cancelling => Ending::Cancelled,
            _ if self.expires_ms <= now_ms => Ending::Expired,
            _ => Ending::Completed,
        };
        self.status = BatchStatus::Finalizing;
        self.finalizing_ms = Some(now_ms);
        // Shards that did not end are over.
        self.claims.clear();
        self.returned.clear();
    }

    /// Takes the claim away from its owner. False if it has none.
    fn release(&mut self, owner: u64, work: Work) -> bool {
        let before = self.claims.len();
        self.claims
            .retain(|claim| claim.owner != owner || claim.work != work);
        self.claims.len() < before
    }

    fn webhook_due_ms(&self) -> Option<u64> {
        let ended_ms = self.ended_ms().filter(|_| !self.webhooks_sent)?;
        Some(ended_ms.saturating_add(WEBHOOK_GRACE_MS))
    }

    /// After the end was reported. A batch without shards has no parts.
    fn parts_due_ms(&self) -> Option<u64> {
        let has_parts = self.shard_count > 0 && self.webhooks_sent && !self.parts_deleted;
        let ended_ms = self.ended_ms().filter(|_| has_parts)?;
        let due_ms = ended_ms.saturating_add(PARTS_KEPT_MS);
        Some(due_ms.max(self.parts_retry_ms.unwrap_or(0)))
    }
}

#[cfg(test)]
mod tests;
