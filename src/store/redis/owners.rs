//! Owners: their leases, the set of responses that each of them runs, orphans, takeover and release.

use std::collections::HashSet;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use tracing::warn;

use super::ask::Kind;
use super::keys::{member, parse_member, parse_owner};
use super::reply::Reply;
use super::scripts::{Call, Name};
use super::{Redis, Request};
use crate::store::record::TakenOver;
use crate::store::{
    Error, FencingToken, Orphan, Owner, OwnershipLoss, ResponseKey, Status, Takeover, WriteOutcome,
};

/// How long a dead owner without responses stays in the set of owners.
const DEAD_OWNER_KEPT_S: u64 = 3_600;

impl Redis {
    /// The command that adds an owner to the set of owners, which is what scans go through.
    pub(super) fn owner_seen(&self, owner: Owner) -> redis::Cmd {
        let mut note = redis::cmd("ZADD");
        note.arg(self.keys.owners())
            .arg(unix_seconds())
            .arg(owner.to_string());
        note
    }

    pub(super) async fn beat_lease(
        &self,
        owner: Owner,
        name: String,
        lease: Duration,
    ) -> Result<(), Error> {
        let mut set = redis::cmd("SET");
        set.arg(self.keys.lease(owner))
            .arg(name)
            .arg("PX")
            .arg(lease.as_millis() as u64);
        self.ask(Kind::Write, Request::Command(set)).await?;
        let note = self.owner_seen(owner);
        self.ask(Kind::Write, Request::Command(note)).await?;
        Ok(())
    }

    pub(super) async fn end_lease(&self, owner: Owner) -> Result<(), Error> {
        let mut delete = redis::cmd("DEL");
        delete.arg(self.keys.lease(owner));
        self.ask(Kind::Write, Request::Command(delete)).await?;
        Ok(())
    }

    async fn is_alive(&self, owner: Owner) -> Result<bool, Error> {
        let mut exists = redis::cmd("EXISTS");
        exists.arg(self.keys.lease(owner));
        let value = self.ask(Kind::Read, Request::Command(exists)).await?;
        Ok(value == redis::Value::Int(1))
    }

    pub(super) async fn check_running(
        &self,
        running: Vec<(ResponseKey, FencingToken)>,
    ) -> Result<Vec<(ResponseKey, OwnershipLoss)>, Error> {
        let states = running.iter().map(|(key, _)| *key);
        let states = self.states(states.collect()).await?;
        let mut lost = Vec::new();
        for ((key, fence), state) in running.into_iter().zip(states) {
            let reason = match state {
                // Not decodable. The next write to it reports the error.
                Err(_) => None,
                Ok(None) => Some(OwnershipLoss::Gone),
                Ok(Some(state)) => match state.owner {
                    Run::Foreground => Some(OwnershipLoss::Terminal(state.status)),
                    Run::Of(owner)
                        if owner != Some(fence.owner) || state.fencing_number != fence.number =>
                    {
                        Some(OwnershipLoss::Fenced)
                    }
                    Run::Of(_) => state
                        .status
                        .is_terminal()
                        .then_some(OwnershipLoss::Terminal(state.status)),
                },
            };
            lost.extend(reason.map(|reason| (key, reason)));
        }
        Ok(lost)
    }

    /// Reads status and ownership of each response, in one pipeline. A record that cannot be decoded does not
    /// affect the others.
    async fn states(&self, keys: Vec<ResponseKey>) -> Result<Vec<Found>, Error> {
        let mut asked = Vec::with_capacity(keys.len());
        for key in keys {
            let mut command = redis::cmd("HMGET");
            command
                .arg(self.keys.record(key))
                .arg(&["v", "st", "bg", "own", "ep"]);
            asked.push(self.begin(Kind::Read, Request::Command(command)));
        }
        let mut states = Vec::with_capacity(asked.len());
        for asked in asked {
            match asked.answer().await.and_then(State::read) {
                Err(error) if error.retry_after().is_some() => return Err(error),
                found => states.push(found),
            }
        }
        Ok(states)
    }

    pub(super) async fn find_orphans(&self, max: usize) -> Result<Vec<Orphan>, Error> {
        let mut list = redis::cmd("ZRANGE");
        list.arg(self.keys.owners())
            .arg(0)
            .arg(-1)
            .arg("WITHSCORES");
        let mut list = Reply::new(self.ask(Kind::Read, Request::Command(list)).await?)?;
        let mut owners = vec![(None, unix_seconds())];
        while !list.is_empty() {
            let owner = list.word()?;
            let seen = list.word()?.parse::<f64>().unwrap_or(0.0) as u64;
            owners.extend(parse_owner(&owner).map(|owner| (Some(owner), seen)));
        }
        let mut orphans = Vec::new();
        for (owner, seen) in owners {
            if orphans.len() >= max {
                break;
            }
            if let Some(owner) = owner
                && self.is_alive(owner).await?
            {
                continue;
            }
            let left = max - orphans.len();
            let is_left = self.orphans_of(owner, left, &mut orphans).await?;
            if let Some(owner) = owner
                && !is_left
                && unix_seconds().saturating_sub(seen) > DEAD_OWNER_KEPT_S
            {
                let mut forget = redis::cmd("ZREM");
                forget.arg(self.keys.owners()).arg(owner.to_string());
                self.send_detached(Request::Command(forget));
            }
        }
        // A response that is being released may be in two sets.
        orphans.sort_by_key(|orphan| orphan.key);
        orphans.dedup();
        Ok(orphans)
    }

    /// Adds the orphans of a dead owner (or released ones) to `orphans`, and removes ended responses from its
    /// set. False if the set is empty.
    async fn orphans_of(
        &self,
        owner: Option<Owner>,
        max: usize,
        orphans: &mut Vec<Orphan>,
    ) -> Result<bool, Error> {
        let mut members = redis::cmd("SRANDMEMBER");
        members.arg(self.keys.running(owner)).arg(max);
        let mut reply = Reply::new(self.ask(Kind::Read, Request::Command(members)).await?)?;
        let mut keys = Vec::new();
        while !reply.is_empty() {
            keys.extend(parse_member(&reply.word()?));
        }
        let is_any = !keys.is_empty();
        let states = self.states(keys.clone()).await?;
        for (key, state) in keys.into_iter().zip(states) {
            let state = match state {
                Ok(state) => state,
                Err(error) => {
                    warn!(id = %key.id, %error, "background response record cannot be decoded; leaving it to other replicas");
                    continue;
                }
            };
            let running = state.filter(|state| !state.status.is_terminal());
            match running {
                // A released response may still be in the set of its former owner.
                Some(State {
                    owner: Run::Of(now),
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
        Ok(is_any)
    }

    /// Returns responses in the set of a live owner that the owner does not run.
    pub(super) async fn find_strays(
        &self,
        owner: Owner,
        running: Vec<ResponseKey>,
        max: usize,
    ) -> Result<Vec<(ResponseKey, FencingToken)>, Error> {
        let mut members = redis::cmd("SMEMBERS");
        members.arg(self.keys.running(Some(owner)));
        let mut reply = Reply::new(self.ask(Kind::Read, Request::Command(members)).await?)?;
        let running: HashSet<ResponseKey> = running.into_iter().collect();
        let mut keys = Vec::new();
        while !reply.is_empty() {
            keys.extend(parse_member(&reply.word()?).filter(|key| !running.contains(key)));
        }
        // A random choice: entries of responses that were never created stay in the set and must not hide others.
        let keys = fastrand::choose_multiple(keys, max);
        let states = self.states(keys.clone()).await?;
        let mut strays = Vec::new();
        for (key, state) in keys.into_iter().zip(states) {
            match state {
                Ok(Some(state)) if state.status.is_terminal() => self.unindex(Some(owner), key),
                Ok(Some(State {
                    owner: Run::Of(now),
                    fencing_number,
                    ..
                })) => match now {
                    Some(now) if now == owner => strays.push((
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
                Err(error) => {
                    warn!(id = %key.id, %error, "background response record cannot be decoded; it cannot be released");
                }
            }
        }
        Ok(strays)
    }

    pub(super) async fn adopt_orphan(&self, orphan: Orphan, by: Owner) -> Result<Takeover, Error> {
        if let Some(owner) = orphan.owner
            && self.is_alive(owner).await?
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
        let adoption = match reply.word()?.as_str() {
            "ok" => Takeover::Done(TakenOver {
                fence,
                status: reply.status()?,
                attempts: reply.count()? as u32,
                streams: reply.word()? == "1",
                last_event: reply.last_event()?,
                request: match reply.bytes()?.filter(|request| !request.is_empty()) {
                    Some(request) => match self.unpack(request).await {
                        // It is taken over already; the new owner ends it as failed.
                        Err(Error::Unreadable(_)) => Bytes::new(),
                        request => request?,
                    },
                    None => Bytes::new(),
                },
            }),
            "raced" => Takeover::Raced,
            "terminal" => Takeover::Terminal(reply.status()?),
            "gone" => Takeover::Gone,
            other => return Err(reply.unexpected(other)),
        };
        // Otherwise a later scan removes the entry.
        if let Takeover::Done(_) = adoption {
            // A scan may have removed the first entry before the takeover.
            self.index(fence, key).await.map_err(after_a_write)?;
            if orphan.owner != Some(by) {
                self.unindex(orphan.owner, key);
            }
        }
        Ok(adoption)
    }

    pub(super) async fn release_record(
        &self,
        key: ResponseKey,
        fence: FencingToken,
    ) -> Result<WriteOutcome, Error> {
        let call = self.fenced_call(Name::RELEASE, key, fence);
        let cas = self.call(Kind::WriteOnce, call).await?.cas()?;
        if cas == WriteOutcome::Done {
            // If this fails, the owner finds it with `untracked`.
            let _ = self.move_to_released(fence.owner, key).await;
        }
        Ok(cas)
    }

    /// Moves a released response from the set of its owner to the set of released ones.
    async fn move_to_released(&self, owner: Owner, key: ResponseKey) -> Result<(), Error> {
        let mut note = redis::cmd("SADD");
        note.arg(self.keys.running(None)).arg(member(key));
        self.ask(Kind::Write, Request::Command(note)).await?;
        // Awaited, because this owner may take it over again.
        let mut forget = redis::cmd("SREM");
        forget.arg(self.keys.running(Some(owner))).arg(member(key));
        self.ask(Kind::Write, Request::Command(forget)).await?;
        Ok(())
    }

    /// Reports the owners with their names and number of runs, and the number of orphans. The set of a dead
    /// owner counts until a scan has gone through it.
    pub(super) async fn report_owners(&self) -> Result<(serde_json::Value, i64), Error> {
        let mut list = redis::cmd("ZRANGE");
        list.arg(self.keys.owners())
            .arg(0)
            .arg(-1)
            .arg("WITHSCORES");
        let mut released = redis::cmd("SCARD");
        released.arg(self.keys.running(None));
        let mut orphans = match self.ask(Kind::Read, Request::Command(released)).await? {
            redis::Value::Int(count) => count,
            _ => 0,
        };
        let mut list = Reply::new(self.ask(Kind::Read, Request::Command(list)).await?)?;
        let mut owners = Vec::new();
        while !list.is_empty() {
            let owner = list.word()?;
            let seen = list.word()?.parse::<f64>().unwrap_or(0.0) as u64;
            let Some(owner) = parse_owner(&owner) else {
                continue;
            };
            let mut name = redis::cmd("GET");
            name.arg(self.keys.lease(owner));
            let name = self.ask(Kind::Read, Request::Command(name)).await?;
            let mut running = redis::cmd("SCARD");
            running.arg(self.keys.running(Some(owner)));
            let running = self.ask(Kind::Read, Request::Command(running)).await?;
            let name =
                super::reply::bytes(name)?.map(|name| String::from_utf8_lossy(&name).into_owned());
            let running = match running {
                redis::Value::Int(count) => count,
                _ => 0,
            };
            if name.is_none() {
                orphans += running;
            }
            owners.push(serde_json::json!({
                "owner": owner.to_string(),
                "is_alive": name.is_some(),
                "seconds_since_heartbeat": unix_seconds().saturating_sub(seen),
                "name": name,
                "running": running,
            }));
        }
        Ok((owners.into(), orphans))
    }
}

struct State {
    status: Status,
    owner: Run,
    fencing_number: u64,
}

/// `None` if there is no such response.
type Found = Result<Option<State>, Error>;

impl State {
    fn read(reply: redis::Value) -> Found {
        let mut reply = Reply::new(reply)?;
        if reply.version()?.is_none() {
            return Ok(None);
        }
        let status = reply.status()?;
        let is_background = reply.text()?.is_some();
        let (owner, fencing_number) = (reply.owner()?, reply.count()?);
        let owner = match is_background {
            true => Run::Of(owner),
            false => Run::Foreground,
        };
        Ok(Some(Self {
            status,
            owner,
            fencing_number,
        }))
    }
}

enum Run {
    Foreground,
    Of(Option<Owner>),
}

/// Turns `Unavailable` into `Unknown`, for an error after a write that was applied.
fn after_a_write(error: Error) -> Error {
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

/// Unix time. Used only for the age of heartbeats.
fn unix_seconds() -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    now.map_or(0, |now| now.as_secs())
}
