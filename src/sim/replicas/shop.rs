//! The store of a simulated fleet: the one in memory, asked at a moment, by a clock that others move; and
//! what must be true of it after each write.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use super::Broken;
use crate::observe::metrics::Registry;
use crate::responses::background::log;
use crate::store::log::LogState;
use crate::store::memory::{self, Memory};
use crate::store::{
    self, CancelOutcome, Cancellation, CancelledOutput, DeleteOutcome, EventBatch, FencingToken,
    Finalization, Keep, LoggedEvents, NewRecord, Notice, NoticeCursor, Orphan, Owner,
    OwnershipLoss, Record, ResponseKey, ResponseStore, Status, StoreFuture, Takeover, WriteOutcome,
};

/// What a store is asked.
#[derive(Clone, Debug)]
pub(super) enum Ask {
    Beat(Owner, Duration),
    Retire(Owner),
    Create(ResponseKey, Box<NewRecord>),
    Start(ResponseKey, FencingToken),
    Append(ResponseKey, FencingToken, EventBatch),
    Finalize(ResponseKey, FencingToken, Box<Finalization>),
    Get(ResponseKey),
    Amend(ResponseKey, FencingToken, CancelledOutput),
    Release(ResponseKey, FencingToken),
    Events(ResponseKey, Option<u64>),
    Cancel(ResponseKey, Cancellation),
    Delete(ResponseKey),
    Notices(Owner, NoticeCursor),
    Check(Vec<(ResponseKey, FencingToken)>),
    Orphans,
    Strays(Owner, Vec<ResponseKey>),
    Adopt(Orphan, Owner),
}

/// What it says.
#[derive(Debug)]
pub(super) enum Said {
    Nothing(Result<(), store::Error>),
    Cas(Result<WriteOutcome, store::Error>),
    Record(Result<Option<Record>, store::Error>),
    Events(Result<Option<LoggedEvents>, store::Error>),
    Cancelled(Result<CancelOutcome, store::Error>),
    Deleted(Result<DeleteOutcome, store::Error>),
    Notices(Result<(Vec<Notice>, NoticeCursor), store::Error>),
    Lost(Result<Vec<(ResponseKey, OwnershipLoss)>, store::Error>),
    Orphans(Result<Vec<Orphan>, store::Error>),
    Strays(Result<Vec<(ResponseKey, FencingToken)>, store::Error>),
    Adopted(Result<Takeover, store::Error>),
}

impl Ask {
    /// What is said where the store could not be asked, or did not say what it did.
    pub(super) fn refused(&self, error: store::Error) -> Said {
        match self {
            Self::Beat(..) | Self::Retire(_) | Self::Create(..) => Said::Nothing(Err(error)),
            Self::Start(..)
            | Self::Append(..)
            | Self::Finalize(..)
            | Self::Amend(..)
            | Self::Release(..) => Said::Cas(Err(error)),
            Self::Get(_) => Said::Record(Err(error)),
            Self::Events(..) => Said::Events(Err(error)),
            Self::Cancel(..) => Said::Cancelled(Err(error)),
            Self::Delete(_) => Said::Deleted(Err(error)),
            Self::Notices(..) => Said::Notices(Err(error)),
            Self::Check(_) => Said::Lost(Err(error)),
            Self::Orphans => Said::Orphans(Err(error)),
            Self::Strays(..) => Said::Strays(Err(error)),
            Self::Adopt(..) => Said::Adopted(Err(error)),
        }
    }

    /// The response that it is about.
    fn key(&self) -> Option<ResponseKey> {
        match self {
            Self::Create(key, _)
            | Self::Start(key, _)
            | Self::Append(key, ..)
            | Self::Finalize(key, ..)
            | Self::Get(key)
            | Self::Amend(key, ..)
            | Self::Release(key, _)
            | Self::Events(key, _)
            | Self::Cancel(key, _)
            | Self::Delete(key) => Some(*key),
            Self::Adopt(orphan, _) => Some(orphan.key),
            Self::Beat(..)
            | Self::Retire(_)
            | Self::Notices(..)
            | Self::Check(_)
            | Self::Orphans
            | Self::Strays(..) => None,
        }
    }

    /// The right by which it writes.
    fn fence(&self) -> Option<FencingToken> {
        match self {
            Self::Start(_, fence)
            | Self::Append(_, fence, _)
            | Self::Finalize(_, fence, _)
            | Self::Amend(_, fence, _)
            | Self::Release(_, fence) => Some(*fence),
            _ => None,
        }
    }
}

/// What is known of a response from what the store said before.
#[derive(Debug, Default)]
struct Known {
    status: Option<Status>,
    fence: Option<(Option<Owner>, u64)>,
    /// Whether it was there and is not any more.
    is_gone: bool,
    was_emptied: bool,
    was_finalized: bool,
    was_cancelled: bool,
}

/// See the module.
pub(super) struct Shop {
    begun: Instant,
    clock: Arc<AtomicU64>,
    keep: Keep,
    memory: Memory,
    known: BTreeMap<ResponseKey, Known>,
    /// Until when each owner's lease is the store's to keep.
    leases: BTreeMap<Owner, Duration>,
}

/// Read at once: little, so that there are several reads.
const EVENTS_BYTES: u64 = 64;
const ORPHANS_MAX: usize = 64;

impl Shop {
    pub(super) fn new(begun: Instant, keep: Keep) -> Self {
        let clock = Arc::new(AtomicU64::new(0));
        Self {
            begun,
            memory: memory(begun, &clock, &keep),
            clock,
            keep,
            known: BTreeMap::new(),
            leases: BTreeMap::new(),
        }
    }

    /// All is forgotten.
    pub(super) fn empty(&mut self) {
        self.memory = memory(self.begun, &self.clock, &self.keep);
        self.leases.clear();
        for known in self.known.values_mut() {
            known.is_gone |= known.status.is_some();
            known.was_emptied = true;
        }
    }

    pub(super) fn is_gone(&self, key: ResponseKey) -> bool {
        self.known.get(&key).is_some_and(|known| known.is_gone)
    }

    /// Whether the store lets this owner hold what it runs.
    pub(super) fn has_lease(&self, now: Duration, owner: Owner) -> bool {
        self.leases.get(&owner).is_some_and(|until| now < *until)
    }

    pub(super) fn get(&mut self, now: Duration, key: ResponseKey) -> Option<Record> {
        self.at(now);
        done(self.memory.get(key)).ok()?
    }

    pub(super) fn events(
        &mut self,
        now: Duration,
        key: ResponseKey,
        after: Option<u64>,
    ) -> Option<LoggedEvents> {
        self.at(now);
        done(self.memory.events(key, after, EVENTS_BYTES)).ok()?
    }

    fn at(&self, now: Duration) {
        self.clock.store(now.as_micros() as u64, Ordering::Relaxed);
    }

    /// Does as it is asked, and looks whether that was right.
    pub(super) fn ask(&mut self, now: Duration, ask: &Ask) -> Result<Said, Broken> {
        self.at(now);
        let memory = &self.memory;
        let said = match ask.clone() {
            Ask::Beat(owner, lease) => {
                self.leases.insert(owner, now + lease);
                Said::Nothing(done(memory.heartbeat(owner, "", lease)))
            }
            Ask::Retire(owner) => {
                self.leases.remove(&owner);
                Said::Nothing(done(memory.end_lease(owner)))
            }
            Ask::Create(key, record) => Said::Nothing(done(memory.create(key, *record))),
            Ask::Start(key, fence) => Said::Cas(done(memory.start(key, fence))),
            Ask::Append(key, fence, batch) => Said::Cas(done(memory.append(key, fence, batch))),
            Ask::Finalize(key, fence, end) => Said::Cas(done(memory.finalize(key, fence, *end))),
            Ask::Get(key) => Said::Record(done(memory.get(key))),
            Ask::Amend(key, fence, amend) => {
                Said::Cas(done(memory.finalize_cancelled(key, fence, amend)))
            }
            Ask::Release(key, fence) => Said::Cas(done(memory.release(key, fence))),
            Ask::Events(key, after) => Said::Events(done(memory.events(key, after, EVENTS_BYTES))),
            Ask::Cancel(key, cancel) => Said::Cancelled(done(memory.cancel(key, cancel))),
            Ask::Delete(key) => Said::Deleted(done(memory.delete(key))),
            Ask::Notices(owner, after) => Said::Notices(done(memory.notices(owner, after))),
            Ask::Check(running) => Said::Lost(done(memory.check_ownership(running))),
            Ask::Orphans => Said::Orphans(done(memory.orphans(ORPHANS_MAX))),
            Ask::Strays(owner, running) => {
                Said::Strays(done(memory.untracked(owner, running, ORPHANS_MAX)))
            }
            Ask::Adopt(orphan, by) => Said::Adopted(done(memory.take_over(orphan, by))),
        };
        if let Some(key) = ask.key() {
            self.look(now, key, ask, &said)?;
        }
        Ok(said)
    }

    fn look(
        &mut self,
        now: Duration,
        key: ResponseKey,
        ask: &Ask,
        said: &Said,
    ) -> Result<(), Broken> {
        let found = done(self.memory.get(key)).ok().flatten();
        let leases = &self.leases;
        let known = self.known.entry(key).or_default();
        let broken = |reason: String| Err(Broken::new(now, key, reason));
        let Some(record) = found else {
            known.is_gone |= known.status.is_some();
            return Ok(());
        };
        if matches!(ask, Ask::Create(..)) && known.was_emptied {
            // Its client was told nothing yet: it is the same creation, tried again.
            *known = Known::default();
        }
        if known.is_gone {
            return broken(format!("{ask:?} brought it back"));
        }
        if let Some(was) = known.status
            && was != record.status
            && !was.may_become(record.status)
        {
            return broken(format!("{was} became {} by {ask:?}", record.status));
        }
        let Some(run) = &record.background else {
            return broken("it is not in the background".to_owned());
        };
        // The right that it had before this write.
        let (owner, fencing_number) = known.fence.unwrap_or((run.owner, run.fencing_number));
        if let (Some(fence), Said::Cas(Ok(WriteOutcome::Done))) = (ask.fence(), said)
            && (owner, fencing_number) != (Some(fence.owner), fence.number)
        {
            return broken(format!(
                "{ask:?} was done, and it was {owner:?}'s at {fencing_number}"
            ));
        }
        if run.fencing_number < fencing_number {
            return broken(format!(
                "its fencing_number fell from {fencing_number} to {}",
                run.fencing_number
            ));
        }
        if let Ask::Adopt(_, by) = ask
            && (owner, fencing_number) != (run.owner, run.fencing_number)
        {
            if owner.is_some_and(|owner| leases.get(&owner).is_some_and(|until| now < *until)) {
                return broken(format!("{by} took it from {owner:?}, whose lease holds"));
            }
            if run.owner != Some(*by) || run.fencing_number != fencing_number + 1 {
                return broken(format!("{by} adopted it and {:?} has it", run.owner));
            }
        }
        if let (Ask::Amend(_, _, amend), Said::Cas(Ok(WriteOutcome::Done))) = (ask, said)
            && run.streams
            && let Some(told) = told(&self.memory, key)
            && log::decompressed(&amend.delta_table, told.len() + 1).as_ref() != Some(&told)
        {
            return broken("what was left of it is not what was told of it".to_owned());
        }
        match (ask, said) {
            (Ask::Finalize(..), Said::Cas(Ok(WriteOutcome::Done))) => known.was_finalized = true,
            (Ask::Cancel(..), Said::Cancelled(Ok(CancelOutcome::Done { .. }))) => {
                known.was_cancelled = true;
            }
            _ => {}
        }
        if known.was_finalized && known.was_cancelled {
            return broken("it was finalised, and cancelled".to_owned());
        }
        known.status = Some(record.status);
        known.fence = Some((run.owner, run.fencing_number));
        Ok(())
    }
}

/// All that was told of a cancelled response, while its log is there.
fn told(memory: &Memory, key: ResponseKey) -> Option<Vec<u8>> {
    let read = done(memory.events(key, None, u64::MAX)).ok()??;
    if read.log != LogState::Whole {
        return None;
    }
    let batches = read
        .batches
        .iter()
        .filter(|it| &*it.bytes != log::CANCELLED);
    Some(batches.flat_map(|it| it.bytes.to_vec()).collect())
}

fn memory(begun: Instant, clock: &Arc<AtomicU64>, keep: &Keep) -> Memory {
    let clock = clock.clone();
    let now = move || begun + Duration::from_micros(clock.load(Ordering::Relaxed));
    let settings = memory::Settings::default();
    Memory::with_clock(&settings, keep, &Registry::default(), Arc::new(now))
}

/// The store in memory waits for nothing.
fn done<T>(mut asked: StoreFuture<'_, T>) -> Result<T, store::Error> {
    match asked.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(said) => said,
        Poll::Pending => Err(store::Error::Unreadable("it waits".into())),
    }
}
