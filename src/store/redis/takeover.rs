//! Which replica runs a background response: leases, lost ownerships, orphans, untracked responses, takeover and
//! release. `owners` has the lists of owners and of what they run, `notices` the notices.

use std::collections::HashSet;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use tracing::warn;

use super::client::Redis;
use super::keys::parse_member;
use super::link::SHARED;
use super::outbox::EventMark;
use super::reply::Reply;
use super::request::{Kind, Request};
use super::scripts::{Call, Name};
use super::values::fields_of;
use crate::store::meters::Op;
use crate::store::{
    Error, FencingToken, Notice, NoticeCursor, Orphan, Owner, Ownership, OwnershipLoss,
    ResponseKey, Status, StoreFuture, TakenOver, Takeover, WriteOutcome,
};

/// How long a dead owner without responses stays in the set of owners.
const DEAD_OWNER_KEPT_MS: u64 = 3_600_000;

/// A lease may end while its owner goes on, and what an owner creates has its entry before its record. So long after the
/// owner was seen the entry stays without one.
const MISSING_KEPT_MS: u64 = 60_000;

impl Ownership for Redis {
    fn heartbeat(&self, owner: Owner, name: &str, lease: Duration) -> StoreFuture<'_, ()> {
        let name = name.to_owned();
        self.meters.meter(Op::Heartbeat, move || async move {
            let lease_ms = lease.as_millis() as u64;
            self.lease_ms.store(lease_ms, Relaxed);
            self.probe_next_ranges();
            // A server that is out of memory does not refuse this one.
            let renew = Request::command("PEXPIRE", (self.keys.lease(owner), lease_ms));
            let renewed = self.execute(Kind::Write, renew).await?;
            if renewed != redis::Value::Int(1) {
                let set = Request::command("SET", (self.keys.lease(owner), name, "PX", lease_ms));
                self.execute(Kind::Write, set).await?;
            }
            let seen = Call::new(Name::SEEN)
                .key(self.keys.owners())
                .arg(owner.to_string());
            self.send_to_owners(Request::Script(seen)).await;
            // It may be changed while Redis runs.
            drop(self.check_eviction());
            Ok(())
        })
    }

    fn end_lease(&self, owner: Owner) -> StoreFuture<'_, ()> {
        self.meters.meter(Op::EndLease, move || async move {
            let left = Request::command("ZADD", (self.keys.owners(), "XX", 0, owner.to_string()));
            // If it fails, the owner counts as dead when its lease would have ended.
            drop(self.execute(Kind::Write, left).await);
            let delete = Request::command("DEL", self.keys.lease(owner));
            self.execute(Kind::Write, delete).await?;
            Ok(())
        })
    }

    fn check_ownership(
        &self,
        running: Vec<(ResponseKey, FencingToken)>,
    ) -> StoreFuture<'_, Vec<(ResponseKey, OwnershipLoss)>> {
        self.meters.meter(Op::CheckOwnership, move || async move {
            let states = running.iter().map(|(key, _)| *key);
            let states = self.states(states.collect()).await?;
            let mut lost = Vec::new();
            for ((key, fence), state) in running.into_iter().zip(states) {
                let reason = match state {
                    // Not decodable, or on a node that is down. The next write to it reports the error.
                    Err(_) => None,
                    Ok(None) => Some(OwnershipLoss::Gone),
                    Ok(Some(state)) => match state.owner {
                        RunOwner::Foreground => Some(OwnershipLoss::Terminal(state.status)),
                        RunOwner::Of(owner)
                            if owner != Some(fence.owner)
                                || state.fencing_number != fence.number =>
                        {
                            Some(OwnershipLoss::Fenced)
                        }
                        RunOwner::Of(_) => state
                            .status
                            .is_terminal()
                            .then_some(OwnershipLoss::Terminal(state.status)),
                    },
                };
                lost.extend(reason.map(|reason| (key, reason)));
            }
            Ok(lost)
        })
    }

    fn orphans(&self, max: usize) -> StoreFuture<'_, Vec<Orphan>> {
        self.meters.meter(Op::Orphans, move || async move {
            let listed = self.all_owners().await?;
            let listed = listed.into_iter().map(|(owner, seen)| (Some(owner), seen));
            let mut owners: Vec<_> = std::iter::once((None, None)).chain(listed).collect();
            // In no order: a replica that cannot take the first ones, as those of a tenant at its limit, finds others in time.
            fastrand::shuffle(&mut owners);
            let mut orphans = Vec::new();
            for (owner, seen) in owners {
                if orphans.len() >= max {
                    break;
                }
                let has_any = match self.orphans_of(owner, seen, max, &mut orphans).await {
                    Ok(has_any) => has_any,
                    // What lies on other nodes is taken over all the same.
                    Err(error) if self.is_cluster() && error.retry_after().is_some() => continue,
                    Err(error) => return Err(error),
                };
                if let Some(owner) = owner
                    && has_any == Some(false)
                    && seen.is_none_or(|seen| seen > DEAD_OWNER_KEPT_MS)
                {
                    let forget = Request::command("ZREM", (self.keys.owners(), owner.to_string()));
                    self.send_detached(forget);
                }
            }
            // A response that is being released may be in two sets.
            orphans.sort_by_key(|orphan| orphan.key);
            orphans.dedup();
            Ok(orphans)
        })
    }

    // Returns responses in the set of a live owner that the owner does not run.
    fn untracked(
        &self,
        owner: Owner,
        running: Vec<ResponseKey>,
        max: usize,
    ) -> StoreFuture<'_, Vec<(ResponseKey, FencingToken)>> {
        self.meters.meter(Op::Untracked, move || async move {
            let members = Request::command("SMEMBERS", self.keys.running(Some(owner)));
            let mut reply = Reply::new(self.execute(Kind::Read, members).await?)?;
            let running: HashSet<ResponseKey> = running.into_iter().collect();
            let mut keys = Vec::new();
            while !reply.is_empty() {
                keys.extend(parse_member(&reply.word()?).filter(|key| !running.contains(key)));
            }
            // A random choice: entries of responses that were never created stay in the set and must not hide others.
            let keys = fastrand::choose_multiple(keys, max);
            let states = self.states(keys.clone()).await?;
            let mut untracked = Vec::new();
            for (key, state) in keys.into_iter().zip(states) {
                match state {
                    Ok(Some(state)) if !state.is_unfinished() => {
                        let event = state.event.as_ref();
                        if self.queue_event(key, state.status, event).await {
                            self.unindex(Some(owner), key);
                        }
                    }
                    Ok(Some(RunState {
                        owner: RunOwner::Of(now),
                        fencing_number,
                        ..
                    })) => match now {
                        Some(now) if now == owner => untracked.push((
                            key,
                            FencingToken {
                                owner,
                                number: fencing_number,
                            },
                        )),
                        // It was released, but the reply was lost.
                        None => self.move_to_released(owner, key).await?,
                        Some(_) => {}
                    },
                    // It may be about to be created: the entry in the set is written first.
                    Ok(_) => {}
                    Err(error) if error.retry_after().is_some() => {}
                    Err(error) => {
                        warn!(
                            id = %key.id, %error,
                            "background response record cannot be decoded; it cannot be released"
                        );
                    }
                }
            }
            Ok(untracked)
        })
    }

    fn take_over(&self, orphan: Orphan, by: Owner) -> StoreFuture<'_, Takeover> {
        self.meters.meter(Op::TakeOver, move || async move {
            if let Some(owner) = orphan.owner
                && !self.is_dead_now(owner).await?
            {
                return Ok(Takeover::Raced);
            }
            let key = orphan.key;
            let fence = FencingToken {
                owner: by,
                number: orphan.fencing_number + 1,
            };
            self.index(fence, key).await?;
            let owner = orphan
                .owner
                .map_or(String::new(), |owner| owner.to_string());
            let call = Call::new(Name::ADOPT)
                .key(self.keys.record(key))
                .arg(owner)
                .number(orphan.fencing_number)
                .arg(by.to_string())
                .number(fence.number);
            let mut reply = self.call(Kind::Write, call).await?;
            let takeover = match reply.word()?.as_str() {
                "ok" => Takeover::Done(TakenOver {
                    fence,
                    status: reply.status()?,
                    attempts: reply.count()? as u32,
                    lost_owners: reply.count()? as u32,
                    streams: reply.word()? == "1",
                    last_event: reply.last_event()?,
                }),
                "raced" => Takeover::Raced,
                "terminal" => Takeover::Terminal(reply.status()?),
                "gone" => Takeover::Gone,
                other => return Err(reply.unexpected(other)),
            };
            // Otherwise a later scan removes the entry.
            if let Takeover::Done(_) = takeover {
                // A scan may have removed the first entry before the takeover.
                self.index(fence, key).await.map_err(after_a_write)?;
                if orphan.owner != Some(by) {
                    self.unindex(orphan.owner, key);
                }
            }
            Ok(takeover)
        })
    }

    fn release(&self, key: ResponseKey, fence: FencingToken) -> StoreFuture<'_, WriteOutcome> {
        self.meters.meter(Op::Release, move || async move {
            let call = self.fenced_call(Name::RELEASE, key, fence);
            let outcome = self.call(Kind::WriteOnce, call).await?.write_outcome()?;
            if outcome == WriteOutcome::Done {
                // If this fails, the owner finds it with `untracked`.
                let _ = self.move_to_released(fence.owner, key).await;
            }
            Ok(outcome)
        })
    }

    fn notices(
        &self,
        owner: Owner,
        after: NoticeCursor,
    ) -> StoreFuture<'_, (Vec<Notice>, NoticeCursor)> {
        self.meters
            .meter(Op::Notices, move || self.read_notices(owner, after))
    }
}

impl Redis {
    /// Reads status and ownership of each response, in one pipeline. A record that cannot be decoded does not
    /// affect the others, nor does one on a node of a cluster that is down.
    async fn states(&self, keys: Vec<ResponseKey>) -> Result<Vec<ReadState>, Error> {
        let mut requests = Vec::with_capacity(keys.len());
        for key in keys {
            let fields = ["v", "st", "bg", "own", "ep", "po", "wh"];
            let call = fields_of(self.keys.record(key), &fields);
            requests.push(self.spawn(SHARED, Kind::Read, Request::Script(call)));
        }
        let mut states = Vec::with_capacity(requests.len());
        let mut unavailable = 0;
        for request in requests {
            let state = request.await.and_then(RunState::read);
            if let Err(error) = &state
                && error.retry_after().is_some()
            {
                unavailable += 1;
                if !self.is_cluster() {
                    return Err(error.clone());
                }
            }
            states.push(state);
        }
        match states.pop() {
            Some(Err(error)) if unavailable == states.len() + 1 => Err(error),
            last => {
                states.extend(last);
                Ok(states)
            }
        }
    }

    /// Adds the orphans of a dead owner (or released ones) to `orphans`, and removes ended responses from its
    /// set. `seen`: milliseconds since the owner's last sign of life. False if the set is empty; `None` for an owner
    /// that lives.
    async fn orphans_of(
        &self,
        owner: Option<Owner>,
        seen: Option<u64>,
        max: usize,
        orphans: &mut Vec<Orphan>,
    ) -> Result<Option<bool>, Error> {
        if let Some(owner) = owner
            && !self.is_dead(owner, seen).await?
        {
            return Ok(None);
        }
        let left = max - orphans.len();
        let members = Request::command("SRANDMEMBER", (self.keys.running(owner), left));
        let mut reply = Reply::new(self.execute(Kind::Read, members).await?)?;
        let mut keys = Vec::new();
        while !reply.is_empty() {
            keys.extend(parse_member(&reply.word()?));
        }
        let has_any = !keys.is_empty();
        let may_come = owner.is_some() && seen.is_some_and(|seen| seen <= MISSING_KEPT_MS);
        let states = self.states(keys.clone()).await?;
        for (key, state) in keys.into_iter().zip(states) {
            let state = match state {
                Ok(state) => state,
                Err(error) if error.retry_after().is_some() => continue,
                Err(error) => {
                    warn!(id = %key.id, %error, "background response record cannot be decoded; leaving it to other replicas");
                    continue;
                }
            };
            if state.is_none() && may_come {
                continue;
            }
            // The replica that wrote its end may have been lost then.
            if let Some(state) = &state
                && !self
                    .queue_event(key, state.status, state.event.as_ref())
                    .await
            {
                continue;
            }
            let unfinished = state.filter(RunState::is_unfinished);
            match unfinished {
                // A released response may still be in the set of its former owner.
                Some(RunState {
                    owner: RunOwner::Of(now),
                    fencing_number,
                    ..
                }) if now == owner || now.is_none() => orphans.push(Orphan {
                    key,
                    owner: now,
                    fencing_number,
                }),
                _ => self.unindex(owner, key),
            }
        }
        Ok(Some(has_any))
    }
}

struct RunState {
    status: Status,
    owner: RunOwner,
    fencing_number: u64,
    /// Whether it was cancelled and the output that readers received is still to be stored.
    has_output_pending: bool,
    /// Its event, if that is not queued.
    event: Option<EventMark>,
}

/// `None` if there is no such response.
type ReadState = Result<Option<RunState>, Error>;

impl RunState {
    fn read(reply: redis::Value) -> ReadState {
        let mut reply = Reply::new(reply)?;
        if reply.version()?.is_none() {
            return Ok(None);
        }
        let status = reply.status()?;
        let is_background = reply.text()?.is_some();
        let (owner, fencing_number) = (reply.owner()?, reply.count()?);
        let has_output_pending = reply.text()?.is_some();
        let event = reply.text()?.map(EventMark);
        let owner = if is_background {
            RunOwner::Of(owner)
        } else {
            RunOwner::Foreground
        };
        Ok(Some(Self {
            status,
            owner,
            fencing_number,
            has_output_pending,
            event,
        }))
    }

    /// Whether an owner has something left to do.
    fn is_unfinished(&self) -> bool {
        !self.status.is_terminal() || self.has_output_pending
    }
}

enum RunOwner {
    Foreground,
    /// `None` between a release and a takeover.
    Of(Option<Owner>),
}

/// Turns `Unavailable` into `Unknown`, for an error after a write that was applied.
pub(super) fn after_a_write(error: Error) -> Error {
    match error {
        Error::Unavailable {
            retry_after,
            reason,
        } => Error::Unknown {
            retry_after,
            reason,
        },
        other => other,
    }
}
