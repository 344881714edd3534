//! Whether this replica's clock is that of the store. By its clock a replica sees that files and batches have expired,
//! and deletes them: with a wrong one it would delete those of all tenants.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use super::service::Batches;
use crate::store;

/// How far the clocks may be apart. Clocks that are set by NTP differ by less, and an upload that is not confirmed is
/// deleted after an hour.
const MAX_DIFFERENCE: Duration = Duration::from_secs(300);

impl Batches {
    /// Unix milliseconds, by the clock of this replica.
    pub(super) fn now_ms(&self) -> u64 {
        (self.wall_ms)()
    }

    /// The time, if this replica's clock is that of the store. `None`: it may begin and delete nothing.
    pub(super) async fn checked_ms(&self) -> Result<Option<u64>, store::Error> {
        let of_store_ms = self.store.clock_ms().await?;
        let now_ms = self.now_ms();
        let difference = Duration::from_millis(now_ms.abs_diff(of_store_ms));
        let is_right = difference <= MAX_DIFFERENCE;
        self.is_clock_right.store(is_right, Relaxed);
        if is_right {
            return Ok(Some(now_ms));
        }
        self.metrics.clock_refusals.inc();
        let minutes = difference.as_secs() / 60;
        let reason = format!("the clocks of this host and the store differ by {minutes} minutes");
        self.failed("batches are left to other replicas", &reason);
        Ok(None)
    }

    /// Whether the clock was right when it was compared last.
    pub(super) fn is_clock_right(&self) -> bool {
        self.is_clock_right.load(Relaxed)
    }
}
