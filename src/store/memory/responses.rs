//! The operations on the responses of a shard.

use std::collections::HashSet;
use std::time::Instant;

use super::response::Response;
use super::shard::Shard;
use crate::ids::ResponseId;
use crate::store::{
    CancelOutcome, Cancellation, CancelledOutput, Chain, CommitRefusal, DeleteOutcome, Error,
    EventBatch, FencingToken, Finalization, History, HistoryLimits, IdempotencyToken, NewRecord,
    Orphan, Owner, OwnershipLoss, ResponseKey, Turn, Turns, WriteOutcome,
};

impl Shard {
    /// Whether the response was created before with this token; an error if with another.
    pub(super) fn is_created(
        &mut self,
        now: Instant,
        key: ResponseKey,
        token: IdempotencyToken,
    ) -> Result<bool, Error> {
        match self.find(now, key) {
            None => Ok(false),
            Some(found) if found.token == token => Ok(true),
            Some(_) => Err(Error::Exists),
        }
    }

    pub(super) fn create(
        &mut self,
        now: Instant,
        key: ResponseKey,
        record: NewRecord,
    ) -> Result<(), Error> {
        let parent = record.parent.as_ref().and_then(|chain| chain.ids.last());
        let parent = parent.map(|id| ResponseKey { id: *id, ..key });
        if let Some(missing) = parent.and_then(|parent| self.keep_chain(now, parent)) {
            return Err(Error::BrokenChain(missing));
        }
        let mut response = Response::new(now, record, &self.keep);
        self.capacity.take(response.cost());
        if response.status.is_terminal() {
            response.used = self.capacity.tick();
            self.finished.insert(key, response);
            self.publish_oldest();
        } else {
            self.running.insert(key, response);
        }
        Ok(())
    }

    /// Extends the retention of a response and of all that it continues. Returns the newest that is missing.
    pub(super) fn keep_chain(&mut self, now: Instant, key: ResponseKey) -> Option<ResponseId> {
        let until = now + self.keep.responses;
        let mut next = Some(key.id);
        while let Some(id) = next {
            let Some(found) = self.find(now, ResponseKey { id, ..key }) else {
                return Some(id);
            };
            if !found.is_ephemeral()
                && let Some(at) = found.expires
            {
                found.expires = Some(at.max(until));
            }
            next = found.parent.map(|parent| parent.id(id.root()));
        }
        None
    }

    /// Whether it has not ended.
    pub(super) fn is_running(&mut self, now: Instant, key: ResponseKey) -> bool {
        self.find(now, key)
            .is_some_and(|found| !found.status.is_terminal())
    }

    pub(super) fn history(
        &mut self,
        now: Instant,
        key: ResponseKey,
        max: HistoryLimits,
    ) -> History {
        let Some(head) = self.touch(now, key).filter(|found| !found.is_ephemeral()) else {
            return History::Missing(key.id);
        };
        if !head.status.is_terminal() {
            return History::Running(head.status);
        }
        if !head.status.is_continuable() {
            return History::Ended(head.status);
        }
        let parent = head.parent;
        let count = 1 + parent.map_or(0, |parent| parent.depth as usize);
        let bytes = head.values.item_bytes() + parent.map_or(0, |parent| parent.bytes);
        if count > max.turns || bytes > max.bytes {
            return History::TooLarge {
                turns: count,
                bytes,
            };
        }
        let hint = head.hint.clone();
        let until = now + self.keep.responses;
        let (mut turns, mut chain) = (Vec::with_capacity(count), Vec::with_capacity(count));
        let mut next = Some(key.id);
        while let Some(id) = next {
            let Some(found) = self.touch(now, ResponseKey { id, ..key }) else {
                return History::Missing(id);
            };
            // It is about to be continued.
            if id != key.id
                && let Some(at) = found.expires
            {
                found.expires = Some(at.max(until));
            }
            turns.push(Turn {
                input: found.values.input(),
                output: found.values.output(),
            });
            chain.push(id);
            next = found.parent.map(|parent| parent.id(id.root()));
        }
        turns.reverse();
        chain.reverse();
        History::Found(Turns {
            turns,
            chain: Chain {
                ids: chain.into(),
                bytes,
            },
            hint,
        })
    }

    pub(super) fn delete(&mut self, now: Instant, key: ResponseKey) -> DeleteOutcome {
        let Some(found) = self.find(now, key) else {
            return DeleteOutcome::Gone;
        };
        let (was, owner) = (found.status, found.owner());
        if let Some(dropped) = self.running.remove(&key) {
            self.capacity.give_back(dropped.cost());
        }
        self.drop_finished(key);
        DeleteOutcome::Done { was, owner }
    }

    pub(super) fn append(
        &mut self,
        now: Instant,
        key: ResponseKey,
        fence: FencingToken,
        batch: &EventBatch,
    ) -> WriteOutcome {
        // If running responses use their half of the capacity, events are no longer kept.
        let bytes_max = if self.capacity.is_full_of_running(batch.size()) {
            0
        } else {
            self.keep.max_event_log
        };
        let appended = self.change(now, key, |found| found.append(fence, batch, bytes_max));
        appended.unwrap_or(WriteOutcome::Gone)
    }

    pub(super) fn finalize(
        &mut self,
        now: Instant,
        key: ResponseKey,
        fence: FencingToken,
        mut end: Finalization,
    ) -> Result<WriteOutcome, Error> {
        let keep = self.keep.clone();
        let Some(found) = self.find(now, key) else {
            return Ok(WriteOutcome::Gone);
        };
        if let Some(outcome) = found.without_end(fence, &end) {
            return Ok(outcome);
        }
        if let Some(commit) = end.commit.take() {
            let refusal = match self.commit(now, commit, keep.max_record) {
                Err(Error::TooLarge { .. }) => Some(CommitRefusal::TooLarge),
                put => put?.refusal(),
            };
            if let Some(refusal) = refusal {
                return Ok(WriteOutcome::NotAdded(refusal));
            }
        }
        let ended = self.change(now, key, |found| found.finalize(now, fence, end, &keep));
        Ok(ended.unwrap_or(WriteOutcome::Gone))
    }

    pub(super) fn cancel(
        &mut self,
        now: Instant,
        key: ResponseKey,
        cancel: Cancellation,
    ) -> CancelOutcome {
        let Some(found) = self.find(now, key) else {
            return CancelOutcome::Gone;
        };
        if found.run.is_none() {
            return CancelOutcome::NotBackground;
        }
        if let Some((was, owner)) = found.cancelled_by(cancel.token) {
            return CancelOutcome::Done { was, owner };
        }
        let (was, owner) = (found.status, found.owner());
        if was.is_terminal() {
            return CancelOutcome::Terminal(was);
        }
        let keep = self.keep.clone();
        self.change(now, key, |found| found.cancel(now, cancel, &keep));
        if self
            .find(now, key)
            .is_some_and(|found| found.has_output_pending())
        {
            self.cancelled.insert(key);
        }
        CancelOutcome::Done { was, owner }
    }

    pub(super) fn finalize_cancelled(
        &mut self,
        now: Instant,
        key: ResponseKey,
        fence: FencingToken,
        output: CancelledOutput,
    ) -> WriteOutcome {
        let stored = self.change(now, key, |found| found.finalize_cancelled(fence, output));
        if stored != Some(WriteOutcome::Fenced) {
            self.cancelled.remove(&key);
        }
        stored.unwrap_or(WriteOutcome::Gone)
    }

    /// Why `fence` no longer owns the response; `None` if it does.
    pub(super) fn ownership_loss(
        &mut self,
        now: Instant,
        key: ResponseKey,
        fence: FencingToken,
    ) -> Option<OwnershipLoss> {
        match self.find(now, key) {
            None => Some(OwnershipLoss::Gone),
            Some(found) => found.ownership_loss(fence),
        }
    }

    pub(super) fn orphans(&self, alive: &HashSet<Owner>) -> Vec<Orphan> {
        let orphan = |(key, found): (&ResponseKey, &Response)| {
            let (owner, fencing_number) = found.orphan(|owner| alive.contains(&owner))?;
            Some(Orphan {
                key: *key,
                owner,
                fencing_number,
            })
        };
        self.unfinished().filter_map(orphan).collect()
    }

    /// The responses that an owner has something left to do for.
    fn unfinished(&self) -> impl Iterator<Item = (&ResponseKey, &Response)> {
        let cancelled = self.cancelled.iter();
        let cancelled = cancelled.filter_map(|key| Some((key, self.finished.get(key)?)));
        self.running.iter().chain(cancelled)
    }

    pub(super) fn untracked(
        &self,
        owner: Owner,
        running: &[ResponseKey],
        max: usize,
    ) -> Vec<(ResponseKey, FencingToken)> {
        let own = self.unfinished().filter_map(|(key, found)| {
            let (of, fencing_number) = found.orphan(|other| other != owner)?;
            Some((
                *key,
                FencingToken {
                    owner: of?,
                    number: fencing_number,
                },
            ))
        });
        own.filter(|(key, _)| !running.contains(key))
            .take(max)
            .collect()
    }
}
