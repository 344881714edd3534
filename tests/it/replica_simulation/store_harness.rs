//! The simulated store: the memory store on a virtual clock, with its invariants checked after each write.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use bytes::Bytes;

use super::store_request::{StoreReply, StoreRequest};
use super::{NUMBERS, Scenario, TURNS, Violation, key, outbox, turns};
use warmroute::ids::ConversationId;
use warmroute::observe::metrics::Registry;
use warmroute::responses::background::log;
use warmroute::store::log::LogState;
use warmroute::store::memory::{self, Memory};
use warmroute::store::record::{InitialState, Retention};
use warmroute::store::{
    self, BackgroundResponses, CancelOutcome, Claim, ConversationKey, Conversations,
    IdempotencyToken, ItemsOutcome, LockOutcome, LoggedEvents, NewConversation, Owner, Ownership,
    Record, ResponseKey, Responses, RetentionSettings, Status, StoreFuture, WriteOutcome,
};

/// What earlier replies of the store imply about a response.
#[derive(Debug, Default)]
struct ExpectedRecord {
    status: Option<Status>,
    fence: Option<(Option<Owner>, u64)>,
    /// Whether it existed and was deleted or lost.
    is_gone: bool,
    was_emptied: bool,
    was_finalized: bool,
    was_cancelled: bool,
    /// Whether the output that readers had received was stored after the cancel.
    has_output: bool,
    /// Whether an engine has started it.
    was_started: bool,
    /// The fencing numbers under which an engine started it.
    starts: BTreeSet<u64>,
    was_deleted: bool,
    is_ephemeral: bool,
    ended_at: Option<Duration>,
}

impl ExpectedRecord {
    /// Whether it may be gone because it has ended a while ago.
    fn has_expired(&self, now: Duration, keep: &RetentionSettings) -> bool {
        let until = self.ended_at.map(|at| at + keep.ephemeral);
        self.is_ephemeral && until.is_some_and(|until| until <= now)
    }
}

/// The nodes of a store that has several.
pub(super) const NODES: u64 = 3;

fn node_of(key: ResponseKey) -> u64 {
    key.id.root().0 % NODES
}

pub(super) struct StoreHarness {
    started: Instant,
    clock: Arc<AtomicU64>,
    keep: RetentionSettings,
    memory: Memory,
    known: BTreeMap<ResponseKey, ExpectedRecord>,
    scenario: Scenario,
    /// The writes, where the store may lose some.
    writes: Vec<(Duration, StoreRequest)>,
    /// Nodes that are down, from when and until when.
    nodes_down: Vec<(u64, Duration, Duration)>,
    /// A fault of the store, which the simulation must find.
    pub(super) grants_lost_locks: bool,
    /// When each owner's lease ends in the store.
    leases: BTreeMap<Owner, Duration>,
}

/// Bytes per read of events: few, so that a log takes several reads.
const EVENTS_BYTES: u64 = 64;
const ORPHANS_MAX: usize = 64;

impl StoreHarness {
    pub(super) fn new(started: Instant, keep: RetentionSettings, scenario: Scenario) -> Self {
        let clock = Arc::new(AtomicU64::new(0));
        Self {
            started,
            memory: memory(started, &clock, &keep),
            clock,
            keep,
            known: BTreeMap::new(),
            leases: BTreeMap::new(),
            grants_lost_locks: false,
            scenario,
            writes: Vec::new(),
            nodes_down: Vec::new(),
        }
    }

    /// Restarts the store empty.
    pub(super) fn empty(&mut self) {
        self.memory = memory(self.started, &self.clock, &self.keep);
        self.leases.clear();
        for known in self.known.values_mut() {
            known.is_gone |= known.status.is_some();
            known.was_emptied = true;
        }
    }

    pub(super) fn is_gone(&self, key: ResponseKey) -> bool {
        let now = Duration::from_micros(self.clock.load(Ordering::Relaxed));
        let known = self.known.get(&key);
        known.is_some_and(|known| known.is_gone || known.has_expired(now, &self.keep))
    }

    pub(super) fn may_have_expired(&self, now: Duration, key: ResponseKey) -> bool {
        let known = self.known.get(&key);
        known.is_some_and(|known| known.has_expired(now, &self.keep))
    }

    pub(super) fn ended_at(&self, key: ResponseKey) -> Option<Duration> {
        self.known.get(&key)?.ended_at
    }

    /// How often an engine started it.
    pub(super) fn starts(&self, key: ResponseKey) -> usize {
        self.known.get(&key).map_or(0, |known| known.starts.len())
    }

    /// The text of its log.
    pub(super) fn logged(&mut self, now: Duration, key: ResponseKey) -> Option<Vec<u8>> {
        self.at(now);
        logged_events(&self.memory, key)
    }

    /// Loses the last writes. Returns the responses that they were about.
    pub(super) fn fail_over(
        &mut self,
        now: Duration,
        lost: usize,
    ) -> Result<BTreeSet<ResponseKey>, Violation> {
        let mut writes = std::mem::take(&mut self.writes);
        let lost = writes.split_off(writes.len().saturating_sub(lost));
        self.memory = memory(self.started, &self.clock, &self.keep);
        self.leases.clear();
        let before = std::mem::take(&mut self.known);
        for (at, ask) in writes {
            let _ = self.ask(at, &ask)?;
        }
        self.at(now);
        for (key, was) in before {
            let known = self.known.entry(key).or_default();
            known.was_started |= was.was_started;
            if known.status.is_none() && was.status.is_some() {
                (known.is_gone, known.was_emptied) = (true, true);
            }
        }
        Ok(lost.iter().filter_map(|(_, ask)| ask.key()).collect())
    }

    pub(super) fn set_node_down(&mut self, node: u64, from: Duration, until: Duration) {
        self.nodes_down.push((node, from, until));
    }

    fn is_down(&self, now: Duration, node: u64) -> bool {
        let mut down = self.nodes_down.iter();
        down.any(|(down_node, from, until)| *down_node == node && (*from..*until).contains(&now))
    }

    /// Whether the request needs a node that is down.
    pub(super) fn is_node_down(&self, now: Duration, ask: &StoreRequest) -> bool {
        let mut nodes: Vec<u64> = ask.key().map(node_of).into_iter().collect();
        let owner = |owner: &Owner| owner.0 % NODES;
        match ask {
            StoreRequest::Heartbeat(by, _)
            | StoreRequest::EndLease(by)
            | StoreRequest::Notices(by, _)
            | StoreRequest::Untracked(by, _) => nodes.push(owner(by)),
            StoreRequest::Create(_, new) => {
                if let InitialState::Background { fence, .. } = &new.initial {
                    nodes.push(owner(&fence.owner));
                }
            }
            StoreRequest::TakeOver(orphan, by) => {
                nodes.push(owner(by));
                nodes.extend(orphan.owner.as_ref().map(owner));
            }
            StoreRequest::CheckOwnership(runs) => {
                let mut runs = runs.iter().map(|(key, _)| node_of(*key)).peekable();
                return runs.peek().is_some() && runs.all(|node| self.is_down(now, node));
            }
            _ => {}
        }
        nodes.into_iter().any(|node| self.is_down(now, node))
    }

    /// The reply without what lies on nodes that are down.
    fn reachable(&self, now: Duration, said: StoreReply) -> StoreReply {
        let is_up = |key: ResponseKey| !self.is_down(now, node_of(key));
        match said {
            StoreReply::Lost(Ok(mut lost)) => {
                lost.retain(|(key, _)| is_up(*key));
                StoreReply::Lost(Ok(lost))
            }
            StoreReply::Untracked(Ok(mut found)) => {
                found.retain(|(key, _)| is_up(*key));
                StoreReply::Untracked(Ok(found))
            }
            StoreReply::Orphans(Ok(mut orphans)) => {
                orphans.retain(|orphan| {
                    let owner = orphan.owner.map(|owner| owner.0 % NODES);
                    is_up(orphan.key) && owner.is_none_or(|node| !self.is_down(now, node))
                });
                StoreReply::Orphans(Ok(orphans))
            }
            said => said,
        }
    }

    /// Whether the output of a cancelled response is still to be stored: its log is there, and readers may have
    /// received more than its end.
    pub(super) fn lacks_output(&mut self, now: Duration, key: ResponseKey) -> bool {
        self.at(now);
        let known = self.known.get(&key);
        if known.is_none_or(|known| known.has_output || known.is_gone || known.was_emptied) {
            return false;
        }
        logged_events(&self.memory, key).is_some_and(|logged| !logged.is_empty())
    }

    pub(super) fn was_started(&self, key: ResponseKey) -> bool {
        self.known.get(&key).is_some_and(|known| known.was_started)
    }

    /// Whether this owner's lease is valid in the store.
    pub(super) fn has_lease(&self, now: Duration, owner: Owner) -> bool {
        self.leases.get(&owner).is_some_and(|until| now < *until)
    }

    pub(super) fn get(&mut self, now: Duration, key: ResponseKey) -> Option<Record> {
        self.at(now);
        done(self.memory.get(key)).ok()?
    }

    /// The items in the conversation of a response, as JSON.
    pub(super) fn conversation_items(&mut self, now: Duration, key: ResponseKey) -> Vec<Bytes> {
        self.at(now);
        let items = self.memory.all_items(conversation_of(key), u64::MAX);
        match done(items) {
            Ok(ItemsOutcome::Found { items, .. }) => {
                items.into_iter().map(|item| item.json).collect()
            }
            _ => Vec::new(),
        }
    }

    /// The items of the shared conversation.
    pub(super) fn turns(&self) -> Vec<Bytes> {
        match done(self.memory.all_items(turns::conversation(), u64::MAX)) {
            Ok(ItemsOutcome::Found { items, .. }) => {
                items.into_iter().map(|item| item.json).collect()
            }
            _ => Vec::new(),
        }
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

    pub(super) fn outbox_events(&self) -> BTreeMap<ResponseKey, Status> {
        outbox::events(&self.memory)
    }

    /// Executes a request and checks the invariants of writes.
    pub(super) fn ask(
        &mut self,
        now: Duration,
        ask: &StoreRequest,
    ) -> Result<StoreReply, Violation> {
        self.at(now);
        if self.scenario == Scenario::Failover && ask.is_write() {
            self.writes.push((now, ask.clone()));
        }
        let memory = &self.memory;
        let said = match ask.clone() {
            StoreRequest::Heartbeat(owner, lease) => {
                self.leases.insert(owner, now + lease);
                StoreReply::Nothing(done(memory.heartbeat(owner, "", lease)))
            }
            StoreRequest::EndLease(owner) => {
                self.leases.remove(&owner);
                StoreReply::Nothing(done(memory.end_lease(owner)))
            }
            StoreRequest::Create(key, record) => {
                StoreReply::Nothing(done(memory.create(key, *record)))
            }
            StoreRequest::Start(key, fence) => StoreReply::Write(done(memory.start(key, fence))),
            StoreRequest::Append(key, fence, batch) => {
                StoreReply::Write(done(memory.append(key, fence, batch)))
            }
            StoreRequest::Finalize(key, fence, end) => {
                StoreReply::Write(done(memory.finalize(key, fence, *end)))
            }
            StoreRequest::Get(key) => StoreReply::Record(done(memory.get(key))),
            StoreRequest::FinalizeCancelled(key, fence, amend) => {
                StoreReply::Write(done(memory.finalize_cancelled(key, fence, amend)))
            }
            StoreRequest::Release(key, fence) => {
                StoreReply::Write(done(memory.release(key, fence)))
            }
            StoreRequest::Events(key, after) => {
                StoreReply::Events(done(memory.events_with_tokens(key, after, EVENTS_BYTES)))
            }
            StoreRequest::Cancel(key, cancel) => {
                StoreReply::Cancelled(done(memory.cancel(key, cancel)))
            }
            StoreRequest::Delete(key) => StoreReply::Deleted(done(memory.delete(key))),
            StoreRequest::Notices(owner, after) => {
                StoreReply::Notices(done(memory.notices(owner, after)))
            }
            StoreRequest::CheckOwnership(running) => {
                StoreReply::Lost(done(memory.check_ownership(running)))
            }
            StoreRequest::Orphans => StoreReply::Orphans(done(memory.orphans(ORPHANS_MAX))),
            StoreRequest::Untracked(owner, running) => {
                StoreReply::Untracked(done(memory.untracked(owner, running, ORPHANS_MAX)))
            }
            StoreRequest::TakeOver(orphan, by) => {
                StoreReply::TakenOver(done(memory.take_over(orphan, by)))
            }
            StoreRequest::Request(key, _) => StoreReply::Request(done(memory.request(key))),
            StoreRequest::Lock(claim) => {
                StoreReply::Lock(done(memory.lock(turns::conversation(), claim)))
            }
            StoreRequest::RenewLock(claim) if self.grants_lost_locks => {
                StoreReply::Lock(done(memory.lock(turns::conversation(), claim)))
            }
            StoreRequest::RenewLock(claim) => {
                StoreReply::Lock(done(memory.renew_lock(turns::conversation(), claim)))
            }
            StoreRequest::Unlock(token) => {
                StoreReply::Nothing(done(memory.unlock(turns::conversation(), token)))
            }
            StoreRequest::History => StoreReply::History(Ok(turns::ids(&self.turns()))),
            StoreRequest::Commit(commit) => StoreReply::Put(done(memory.commit(commit))),
        };
        if self.scenario == Scenario::Turns && ask.is_write() {
            turns::check_order(now, &self.turns())?;
        }
        if let Some(key) = ask.key() {
            self.look(now, key, ask, &said)?;
        }
        Ok(self.reachable(now, said))
    }

    fn look(
        &mut self,
        now: Duration,
        key: ResponseKey,
        ask: &StoreRequest,
        said: &StoreReply,
    ) -> Result<(), Violation> {
        let found = done(self.memory.get(key)).ok().flatten();
        let leases = &self.leases;
        let known = self.known.entry(key).or_default();
        let broken = |reason: String| Err(Violation::new(now, key, reason));
        let Some(record) = found else {
            known.was_deleted |= matches!(ask, StoreRequest::Delete(_));
            let is_early = known.status.is_some()
                && !known.is_gone
                && !known.was_deleted
                && !known.has_expired(now, &self.keep);
            known.is_gone |= known.status.is_some();
            return if is_early {
                broken(format!("{ask:?} found it gone"))
            } else {
                Ok(())
            };
        };
        if matches!(ask, StoreRequest::Create(..)) && known.was_emptied {
            // Its client has no answer yet: it is the same creation, tried again.
            *known = ExpectedRecord::default();
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
        if let (Some(fence), StoreReply::Write(Ok(WriteOutcome::Done))) = (ask.fence(), said)
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
        if let StoreRequest::TakeOver(_, by) = ask
            && (owner, fencing_number) != (run.owner, run.fencing_number)
        {
            if owner.is_some_and(|owner| leases.get(&owner).is_some_and(|until| now < *until)) {
                return broken(format!("{by} took it from {owner:?}, whose lease holds"));
            }
            if run.owner != Some(*by) || run.fencing_number != fencing_number + 1 {
                return broken(format!("{by} adopted it and {:?} has it", run.owner));
            }
        }
        if let (
            StoreRequest::FinalizeCancelled(_, _, amend),
            StoreReply::Write(Ok(WriteOutcome::Done)),
        ) = (ask, said)
            && run.streams
            && let Some(logged) = logged_events(&self.memory, key)
            && log::decompressed(&amend.delta_table, logged.len() + 1).as_ref() != Some(&logged)
        {
            return broken("what was kept of it is not what readers received of it".to_owned());
        }
        match (ask, said) {
            (StoreRequest::Finalize(..), StoreReply::Write(Ok(WriteOutcome::Done))) => {
                known.was_finalized = true
            }
            (StoreRequest::Cancel(..), StoreReply::Cancelled(Ok(CancelOutcome::Done { .. }))) => {
                known.was_cancelled = true;
            }
            (StoreRequest::Start(..), StoreReply::Write(Ok(WriteOutcome::Done))) => {
                known.was_started = true;
                known.starts.insert(run.fencing_number);
            }
            (StoreRequest::FinalizeCancelled(..), StoreReply::Write(Ok(WriteOutcome::Done))) => {
                known.has_output = true;
            }
            _ => {}
        }
        if known.was_finalized && known.was_cancelled {
            return broken("it was finalised, and cancelled".to_owned());
        }
        known.is_ephemeral = run.retention == Retention::Ephemeral;
        if record.status.is_terminal() {
            known.ended_at.get_or_insert(now);
        }
        known.status = Some(record.status);
        known.fence = Some((run.owner, run.fencing_number));
        Ok(())
    }
}

/// All that readers may have received of a cancelled response, while its log is there.
fn logged_events(memory: &Memory, key: ResponseKey) -> Option<Vec<u8>> {
    let read = done(memory.events(key, None, u64::MAX)).ok()??;
    if read.log != LogState::Whole {
        return None;
    }
    let batches = read
        .batches
        .iter()
        .filter(|batch| &*batch.bytes != log::CANCELLED);
    Some(batches.flat_map(|batch| batch.bytes.to_vec()).collect())
}

fn memory(started: Instant, clock: &Arc<AtomicU64>, keep: &RetentionSettings) -> Memory {
    let clock = clock.clone();
    let now = move || started + Duration::from_micros(clock.load(Ordering::Relaxed));
    let settings = memory::Settings::default();
    let memory = Memory::with_clock(&settings, keep, &Registry::default(), Arc::new(now));
    outbox::subscribe(&memory);
    for number in 1..=NUMBERS {
        let (key, token) = (
            conversation_of(key(number)),
            conversation_token(key(number)),
        );
        let new = NewConversation {
            token,
            object: Bytes::new(),
            items: Vec::new(),
        };
        let lease = CONVERSATION_LEASE;
        let is_ready = done(memory.create_conversation(key, new)).is_ok()
            && done(memory.lock(key, Claim { token, lease })) == Ok(LockOutcome::Locked);
        assert!(is_ready, "a new store refuses a conversation");
    }
    let shared = NewConversation {
        token: IdempotencyToken(TURNS as u64),
        object: Bytes::new(),
        items: Vec::new(),
    };
    let created = done(memory.create_conversation(turns::conversation(), shared));
    assert_eq!(created, Ok(()), "a new store refuses a conversation");
    memory
}

/// Each response continues a conversation of its own, which it has locked from the start.
pub(super) fn conversation_of(key: ResponseKey) -> ConversationKey {
    ConversationKey {
        tenant: key.tenant,
        id: ConversationId::new(key.id.root(), key.id.own()),
    }
}

pub(super) fn conversation_token(key: ResponseKey) -> IdempotencyToken {
    IdempotencyToken(key.id.root().0)
}

/// Longer than a simulation.
const CONVERSATION_LEASE: Duration = Duration::from_secs(1_000);

/// The store in memory waits for nothing.
pub(super) fn done<T>(mut asked: StoreFuture<'_, T>) -> Result<T, store::Error> {
    match asked.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(said) => said,
        Poll::Pending => Err(store::Error::Unreadable("it waits".into())),
    }
}
