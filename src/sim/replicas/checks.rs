//! What must be true at each step, and at the end.

use super::{Broken, Fleet};
use crate::store::{ResponseKey, Status};

impl Fleet {
    pub(super) fn is_settled(&mut self) -> bool {
        let now = self.now();
        let keys: Vec<ResponseKey> = self.streams.keys().copied().collect();
        self.replicas
            .iter()
            .all(|it| it.is_up && it.table.is_empty())
            && self
                .readers
                .iter()
                .all(|it| it.is_over || !self.acknowledged.contains(&it.key))
            && keys.into_iter().all(|key| {
                let found = self.shop.get(now, key);
                found.is_none_or(|found| found.status.is_terminal())
            })
    }

    /// The faults are over, and time enough has passed.
    pub(super) fn settled(&mut self) -> Result<(), Broken> {
        let now = self.now();
        for key in self.streams.keys().copied().collect::<Vec<_>>() {
            let is_acknowledged = self.acknowledged.contains(&key);
            let Some(record) = self.shop.get(now, key) else {
                if is_acknowledged && !self.shop.is_gone(key) {
                    return Err(Broken::new(
                        now,
                        key,
                        "it was acknowledged and is not there",
                    ));
                }
                self.met.gone += 1;
                continue;
            };
            match record.status {
                Status::Completed | Status::Incomplete => self.met.completed += 1,
                Status::Failed => self.met.failed += 1,
                Status::Cancelled => self.met.cancelled += 1,
                running => {
                    let reason = format!("it is {running} at the end, {:?}", record.background);
                    return Err(Broken::new(now, key, reason));
                }
            }
            if record.background.is_some_and(|it| it.streams) {
                self.read_whole(key)?;
            }
        }
        for replica in &self.replicas {
            if let Some(key) = replica.table.keys().first() {
                return Err(Broken::new(now, *key, "it has ended, and runs"));
            }
        }
        for reader in &self.readers {
            if !reader.is_over && self.acknowledged.contains(&reader.key) {
                return Err(Broken::new(now, reader.key, "a reader hangs"));
            }
        }
        Ok(())
    }

    /// No two replicas run a response at the same time under leases that hold, and what holds for an owner
    /// holds for the store.
    pub(super) fn look(&self, key: ResponseKey) -> Result<(), Broken> {
        if self.faults.was_emptied() {
            // Leases as well are forgotten, until the next beat.
            return Ok(());
        }
        let now = self.instant();
        let mut holders = 0;
        for replica in self
            .replicas
            .iter()
            .filter(|it| it.is_up && it.table.holds_lease(now))
        {
            if replica.is_draining && replica.table.is_empty() {
                // It has given its lease back.
                continue;
            }
            let owner = replica.table.owner();
            if !self.shop.has_lease(self.now(), owner) {
                let reason = format!("{owner} holds a lease that the store does not");
                return Err(Broken::new(self.now(), key, reason));
            }
            let found = replica.table.find(key);
            holders += u32::from(found.is_some_and(|run| run.state.is_generating()));
        }
        match holders {
            0 | 1 => Ok(()),
            _ => Err(Broken::new(self.now(), key, "two replicas run it")),
        }
    }
}
