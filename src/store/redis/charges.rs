//! Charges of requests to the limits of their tenants: one script, one round trip.

use std::time::Duration;

use super::client::Redis;
use super::reply::malformed;
use super::request::Kind;
use super::scripts::{Call, Name};
use crate::ids::Tenant;
use crate::store::Error;
use crate::store::charges::{Charge, ChargeId, ChargeReply, Settlement};

impl Redis {
    /// Charges a request to all of its limits, or to none.
    pub async fn charge(&self, charge: &Charge<'_>) -> Result<ChargeReply, Error> {
        let call = with_settlements(self.on_limits(charge.tenant), charge.settlements);
        let mut call = call
            .arg(charge.id.to_string())
            .arg(flag(charge.id.is_once()))
            .arg(u64::from(charge.max_concurrent))
            .arg(micros(charge.lease))
            .arg(micros(charge.charge_once))
            .arg(flag(charge.was_apart))
            .arg(charge.limits.len() as u64);
        for limit in charge.limits {
            call = call
                .arg(limit.limit.to_string())
                .arg(limit.burst)
                .arg(limit.cost)
                .arg(limit.believed);
        }
        // Charging twice under one id is charging once.
        let mut reply = self.call(Kind::Write, call).await?;
        let is_granted = match reply.word()?.as_str() {
            "granted" => true,
            "refused" => false,
            other => {
                return Err(malformed(format!(
                    "unexpected outcome `{other}` from Redis"
                )));
            }
        };
        let running = reply.count()?;
        let used: Result<Vec<u64>, Error> = charge.limits.iter().map(|_| reply.count()).collect();
        Ok(ChargeReply {
            is_granted,
            running,
            used: used?,
        })
    }

    /// Settles requests of a tenant that have ended.
    pub async fn settle_charges(
        &self,
        tenant: Tenant,
        settlements: &[Settlement],
    ) -> Result<(), Error> {
        let call = with_settlements(self.on_limits(tenant), settlements);
        self.call(Kind::Write, call).await.map(drop)
    }

    /// Renews the leases of a tenant's running requests.
    pub async fn renew_charges(
        &self,
        tenant: Tenant,
        lease: Duration,
        running: &[ChargeId],
    ) -> Result<(), Error> {
        let [_, key, _] = self.keys.limits(tenant);
        let mut call = Call::new(Name::RENEW_CHARGES).key(key).arg(micros(lease));
        for id in running {
            call = call.arg(id.to_string());
        }
        self.call(Kind::Write, call).await.map(drop)
    }

    fn on_limits(&self, tenant: Tenant) -> Call {
        Call::new(Name::CHARGE).keys(self.keys.limits(tenant))
    }
}

fn with_settlements(call: Call, settlements: &[Settlement]) -> Call {
    let mut call = call.arg(settlements.len() as u64);
    for settlement in settlements {
        call = call
            .arg(settlement.id.to_string())
            .arg(match (settlement.id.is_once(), settlement.is_refund) {
                (false, _) => "0",
                (true, false) => "1",
                (true, true) => "2",
            })
            .arg(settlement.corrections.len() as u64);
        for (limit, micros) in &settlement.corrections {
            call = call.arg(limit.to_string()).arg(micros.to_string());
        }
    }
    call
}

fn flag(is_set: bool) -> &'static str {
    if is_set { "1" } else { "0" }
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}
