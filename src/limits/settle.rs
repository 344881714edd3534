//! Settles ended requests in Redis, renews the leases of those that run, and asks how many run elsewhere. Clients do not wait for either: what a
//! tenant has yet to settle goes along with its next charge, or is sent within milliseconds.

use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};
use tracing::{debug, warn};

use super::limiter::{Limiter, SharedUse};
use crate::http::drain::Tasks;
use crate::ids::Tenant;
use crate::observe;
use crate::observe::log_once::LogOnce;
use crate::store::redis::Redis;

/// Requests that end within this time are settled together.
const PAUSE: Duration = Duration::from_millis(10);
/// Time between two tries while Redis is away.
const RETRY: Duration = Duration::from_millis(250);
/// Settlements of one call, and leases that one call renews: less than a millisecond of Redis' time.
const BATCH: usize = 256;
/// Tenants whose calls are under way at the same time. One after the other, thousands of them would outlast a lease where a round
/// trip takes milliseconds.
const TENANTS_AT_ONCE: usize = 32;
/// How old the number of requests may be that run on other replicas. Operators look at it, and nothing else.
const RECOUNT: Duration = Duration::from_secs(2);
/// Settlements of the last requests are tried for this long when the router drains.
const LAST_TRIES: Duration = Duration::from_secs(2);

impl Limiter {
    /// Runs until the drain is over and everything is settled.
    pub async fn run(self: Arc<Self>, tasks: Tasks) {
        let Some(redis) = self.redis.clone() else {
            return;
        };
        self.note_again();
        tokio::select! {
            () = self.settle_until_drained(&redis, &tasks) => {}
            // A drain may take longer than a lease, and a request that has lost its lease is not settled.
            () = self.renew(&redis) => {}
            () = self.recount(&redis) => {}
        }
    }

    async fn settle_until_drained(self: &Arc<Self>, redis: &Arc<Redis>, tasks: &Tasks) {
        let stopped = tasks.stopped();
        tokio::pin!(stopped);
        loop {
            let is_stopping = tokio::select! {
                () = self.has_ended.notified() => false,
                () = &mut stopped => true,
            };
            if !is_stopping {
                // Most go along with a charge meanwhile.
                sleep(PAUSE).await;
            }
            let is_done = self.settle(redis, is_stopping).await;
            if is_stopping {
                break;
            }
            if !is_done {
                sleep(RETRY).await;
            }
        }
        // The next charge of another replica must see requests that end during the drain.
        let mut give_up_at = None;
        while !tasks.is_aborted() {
            let is_settled = self.settle(redis, true).await;
            let runs = !self.running().is_empty();
            let now = Instant::now();
            let is_over = now >= *give_up_at.get_or_insert(now + LAST_TRIES);
            match (runs, is_settled) {
                (true, _) => give_up_at = None,
                (false, true) => break,
                (false, false) if is_over => break,
                (false, false) => {}
            }
            tokio::select! {
                () = self.has_ended.notified(), if is_settled => {}
                () = sleep(RETRY) => {}
            }
        }
    }

    /// Sends what waits and does not go along with charges; the last time, everything. False if Redis did not take it.
    async fn settle(self: &Arc<Self>, redis: &Arc<Redis>, is_last: bool) -> bool {
        let ended = std::mem::take(&mut *self.ended.lock());
        let mut is_done = true;
        for some in ended.chunks(TENANTS_AT_ONCE) {
            let mut settling = JoinSet::new();
            for (tenant, usage) in some {
                let goes_along = usage.lock().goes_along(is_last);
                if goes_along {
                    self.note_ended(*tenant, usage);
                    continue;
                }
                let (limiter, redis) = (self.clone(), redis.clone());
                let (tenant, usage) = (*tenant, usage.clone());
                settling.spawn(async move { limiter.settle_tenant(&redis, tenant, &usage).await });
            }
            is_done &= !settling.join_all().await.contains(&false);
        }
        is_done
    }

    async fn settle_tenant(&self, redis: &Redis, tenant: Tenant, usage: &SharedUse) -> bool {
        loop {
            let settlements = usage.lock().take_unsettled(BATCH);
            if settlements.is_empty() {
                return true;
            }
            if let Err(error) = redis.settle_charges(tenant, &settlements).await {
                debug!(%tenant, %error, "ended requests not settled; trying again");
                self.on_store_failure("settle");
                self.on_no_reply(tenant, usage, settlements, None);
                return false;
            }
        }
    }

    /// Does not return.
    async fn renew(&self, redis: &Arc<Redis>) {
        let lease = self.advanced.lease;
        let interval = lease / 3;
        let mut log = LogOnce::default();
        loop {
            let next = Instant::now() + interval;
            for some in self.running().chunks(TENANTS_AT_ONCE) {
                let mut renewing = JoinSet::new();
                for (tenant, running) in some.iter().cloned() {
                    let redis = redis.clone();
                    renewing.spawn(async move {
                        for batch in running.chunks(BATCH) {
                            if let Err(error) = redis.renew_charges(tenant, lease, batch).await {
                                return Err((tenant, error));
                            }
                        }
                        Ok(())
                    });
                }
                for renewed in renewing.join_all().await {
                    let Err((tenant, error)) = renewed else {
                        log.reset();
                        continue;
                    };
                    self.on_store_failure("renew");
                    if log.should_log(observe::now(), &error.to_string()) {
                        warn!(%tenant, %error, "leases of running requests not renewed");
                    }
                }
            }
            tokio::time::sleep_until(next).await;
        }
    }

    /// Asks for what charges do not say: whether requests on other replicas have ended. Does not return.
    async fn recount(&self, redis: &Redis) {
        loop {
            sleep(RECOUNT).await;
            for (tenant, usage) in self.to_recount() {
                let asked = Instant::now();
                match redis.renew_charges(tenant, self.advanced.lease, &[]).await {
                    Ok(running) => {
                        usage.lock().on_recount(running);
                        // Without requests there is no charge that would find out.
                        self.on_answer(asked.elapsed());
                    }
                    Err(error) => {
                        debug!(%tenant, %error, "running requests not counted; trying again");
                        self.on_store_failure("renew");
                        break;
                    }
                }
            }
        }
    }
}
