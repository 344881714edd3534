//! Owners: their leases, and the sets of the responses that each of them runs.

use std::time::{Duration, SystemTime};

use super::client::Redis;
use super::keys::{member, parse_owner};
use super::reply::{Reply, bytes};
use super::request::{Kind, Request};
use crate::store::{Error, FencingToken, Owner, ResponseKey};

impl Redis {
    /// The command that adds an owner to the set of owners, which is what scans go through.
    pub(super) fn owner_seen(&self, owner: Owner) -> redis::Cmd {
        let mut note = redis::cmd("ZADD");
        note.arg(self.keys.owners())
            .arg(unix_seconds())
            .arg(owner.to_string());
        note
    }

    pub(super) async fn renew_lease(
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
        self.execute(Kind::Write, Request::Command(set)).await?;
        let note = self.owner_seen(owner);
        self.execute(Kind::Write, Request::Command(note)).await?;
        Ok(())
    }

    pub(super) async fn drop_lease(&self, owner: Owner) -> Result<(), Error> {
        let mut delete = redis::cmd("DEL");
        delete.arg(self.keys.lease(owner));
        self.execute(Kind::Write, Request::Command(delete)).await?;
        Ok(())
    }

    /// Whether the lease of the owner is valid.
    pub(super) async fn is_alive(&self, owner: Owner) -> Result<bool, Error> {
        let mut exists = redis::cmd("EXISTS");
        exists.arg(self.keys.lease(owner));
        let value = self.execute(Kind::Read, Request::Command(exists)).await?;
        Ok(value == redis::Value::Int(1))
    }

    /// Moves a released response from the set of its owner to the set of released ones.
    pub(super) async fn move_to_released(
        &self,
        owner: Owner,
        key: ResponseKey,
    ) -> Result<(), Error> {
        let mut note = redis::cmd("SADD");
        note.arg(self.keys.running(None)).arg(member(key));
        self.execute(Kind::Write, Request::Command(note)).await?;
        // Awaited, because this owner may take it over again.
        let mut forget = redis::cmd("SREM");
        forget.arg(self.keys.running(Some(owner))).arg(member(key));
        self.execute(Kind::Write, Request::Command(forget)).await?;
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
        let mut orphans = match self.execute(Kind::Read, Request::Command(released)).await? {
            redis::Value::Int(count) => count,
            _ => 0,
        };
        let mut list = Reply::new(self.execute(Kind::Read, Request::Command(list)).await?)?;
        let mut owners = Vec::new();
        while !list.is_empty() {
            let owner = list.word()?;
            let seen = list.word()?.parse::<f64>().unwrap_or(0.0) as u64;
            let Some(owner) = parse_owner(&owner) else {
                continue;
            };
            let mut name = redis::cmd("GET");
            name.arg(self.keys.lease(owner));
            let name = self.execute(Kind::Read, Request::Command(name)).await?;
            let mut running = redis::cmd("SCARD");
            running.arg(self.keys.running(Some(owner)));
            let running = self.execute(Kind::Read, Request::Command(running)).await?;
            let name = bytes(name)?.map(|name| String::from_utf8_lossy(&name).into_owned());
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

    /// Adds the response to the set of its owner.
    pub(super) async fn index(&self, fence: FencingToken, key: ResponseKey) -> Result<(), Error> {
        let mut note = redis::cmd("SADD");
        note.arg(self.keys.running(Some(fence.owner)))
            .arg(member(key));
        self.execute(Kind::Write, Request::Command(note)).await?;
        let note = self.owner_seen(fence.owner);
        self.execute(Kind::Write, Request::Command(note)).await?;
        Ok(())
    }

    /// Removes the response from the set of its owner. If this fails, a later scan removes it.
    pub(super) fn unindex(&self, owner: Option<Owner>, key: ResponseKey) {
        let mut command = redis::cmd("SREM");
        command.arg(self.keys.running(owner)).arg(member(key));
        self.send_detached(Request::Command(command));
    }
}

/// Unix time. Used only for the age of heartbeats.
pub(super) fn unix_seconds() -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    now.map_or(0, |now| now.as_secs())
}
