//! Owners: which there are, whether they live, and the sets of the responses that each of them runs.

use std::sync::atomic::Ordering::Relaxed;

use super::client::Redis;
use super::keys::{member, parse_owner};
use super::reply::bytes;
use super::request::{Kind, Request};
use super::scripts::{Call, Name};
use crate::store::{Error, FencingToken, Owner, ResponseKey};

impl Redis {
    /// Changes the list of owners, which is what scans go through. A failure is ignored: in a cluster this key may lie
    /// on a node that is down while the owner's lease does not, and a server that is full refuses it although the
    /// owner is listed already. The next heartbeat repeats it.
    pub(super) async fn send_to_owners(&self, request: Request) {
        if self.is_cluster() {
            self.send_detached(request);
        } else {
            drop(self.execute(Kind::Write, request).await);
        }
    }

    /// All owners, and how long ago in ms each was seen alive; `None` for one that has left.
    pub(super) async fn all_owners(&self) -> Result<Vec<(Owner, Option<u64>)>, Error> {
        self.owners_seen("".to_owned()).await
    }

    async fn owners_seen(&self, one: String) -> Result<Vec<(Owner, Option<u64>)>, Error> {
        let call = Call::new(Name::OWNERS).key(self.keys.owners()).arg(one);
        let mut list = self.call(Kind::Read, call).await?;
        let mut owners = Vec::new();
        while !list.is_empty() {
            let owner = list.word()?;
            let seen = list.word()?.parse().ok();
            owners.extend(parse_owner(&owner).map(|owner| (owner, seen)));
        }
        Ok(owners)
    }

    /// Whether an owner that was seen alive so long ago has lost its runs: its lease has ended, and no heartbeat came
    /// for as long. A server that evicts keys may have dropped the lease alone.
    pub(super) async fn is_dead(&self, owner: Owner, seen_ms: Option<u64>) -> Result<bool, Error> {
        if seen_ms.is_some_and(|seen| seen < self.lease_ms.load(Relaxed)) {
            return Ok(false);
        }
        let exists = Request::command("EXISTS", self.keys.lease(owner));
        let value = self.execute(Kind::Read, exists).await?;
        Ok(value != redis::Value::Int(1))
    }

    /// As [`Redis::is_dead`], now.
    pub(super) async fn is_dead_now(&self, owner: Owner) -> Result<bool, Error> {
        let seen = self.owners_seen(owner.to_string()).await?;
        let seen = seen.first().and_then(|(_, seen)| *seen);
        self.is_dead(owner, seen).await
    }

    /// Moves a released response from the set of its owner to the set of released ones.
    pub(super) async fn move_to_released(
        &self,
        owner: Owner,
        key: ResponseKey,
    ) -> Result<(), Error> {
        let note = Request::command("SADD", (self.keys.running(None), member(key)));
        self.execute(Kind::Write, note).await?;
        // Awaited, because this owner may take it over again.
        let forget = Request::command("SREM", (self.keys.running(Some(owner)), member(key)));
        self.execute(Kind::Write, forget).await?;
        Ok(())
    }

    /// Reports the owners with their names and number of runs, and the number of orphans. The set of a dead
    /// owner counts until a scan has gone through it.
    pub(super) async fn report_owners(&self) -> Result<(serde_json::Value, i64), Error> {
        let released = Request::command("SCARD", self.keys.running(None));
        let mut orphans = match self.execute(Kind::Read, released).await? {
            redis::Value::Int(count) => count,
            _ => 0,
        };
        let mut owners = Vec::new();
        for (owner, seen_ms) in self.all_owners().await? {
            let name = Request::command("GET", self.keys.lease(owner));
            let name = self.execute(Kind::Read, name).await?;
            let running = Request::command("SCARD", self.keys.running(Some(owner)));
            let running = self.execute(Kind::Read, running).await?;
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
                "seconds_since_heartbeat": seen_ms.map(|ms| ms / 1_000),
                "name": name,
                "running": running,
            }));
        }
        Ok((owners.into(), orphans))
    }

    /// Adds the response to the set of its owner.
    pub(super) async fn index(&self, fence: FencingToken, key: ResponseKey) -> Result<(), Error> {
        let note = Request::command("SADD", (self.keys.running(Some(fence.owner)), member(key)));
        self.execute(Kind::Write, note).await?;
        // Scans must find this owner, whether a heartbeat of it came or not.
        let entry = (self.keys.owners(), "NX", 0, fence.owner.to_string());
        self.send_to_owners(Request::command("ZADD", entry)).await;
        Ok(())
    }

    /// Removes the response from the set of its owner. If this fails, a later scan removes it.
    pub(super) fn unindex(&self, owner: Option<Owner>, key: ResponseKey) {
        let entry = (self.keys.running(owner), member(key));
        self.send_detached(Request::command("SREM", entry));
    }
}
