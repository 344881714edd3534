//! Charges of requests to the limits of their tenants: one script, one round trip.

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use rmp::encode::{self, ByteBuf};
use smallvec::SmallVec;

use super::client::Redis;
use super::reply::malformed;
use super::request::Kind;
use super::scripts::{Call, Name};
use crate::ids::Tenant;
use crate::store::Error;
use crate::store::charges::{Charge, ChargeId, ChargeReply, Settlement};

/// Bytes of a usual charge.
const ENCODED: usize = 256;
/// Bytes of an id.
const ID: usize = 64;

/// The keys of a tenant's charges.
#[derive(Clone, Debug)]
pub struct ChargeKeys([Arc<str>; 3]);

impl Redis {
    pub fn charge_keys(&self, tenant: Tenant) -> ChargeKeys {
        ChargeKeys(self.keys.limits(tenant).map(Arc::from))
    }

    /// Charges a request to all of its limits, or to none. A reply is not waited for longer than `timeout`.
    pub async fn charge(
        &self,
        keys: &ChargeKeys,
        charge: &Charge<'_>,
        timeout: Duration,
    ) -> Result<ChargeReply, Error> {
        let call = Call::new(Name::CHARGE).shared_keys(&keys.0);
        let call = call.arg(encode(charge.settlements, Some(charge)));
        // Charging twice under one id is charging once.
        let mut reply = self.call(Kind::Write, call.within(timeout)).await?;
        charge_reply(&reply.word()?, charge.limits.len())
            .ok_or_else(|| malformed("an unexpected outcome of a charge from Redis"))
    }

    /// Settles requests of a tenant that have ended.
    pub async fn settle_charges(
        &self,
        tenant: Tenant,
        settlements: &[Settlement],
    ) -> Result<(), Error> {
        let call = Call::new(Name::CHARGE).keys(self.keys.limits(tenant));
        let call = call.arg(encode(settlements, None));
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
}

/// What `charge.lua` reads, as one array of numbers and texts in MessagePack, since arguments of their own would cost more.
fn encode(settlements: &[Settlement], charge: Option<&Charge<'_>>) -> Vec<u8> {
    let mut out = ByteBuf::with_capacity(ENCODED);
    let mut id_text = String::with_capacity(ID);
    let corrections = settlements.iter().map(|it| 3 + 2 * it.corrections.len());
    let values = 1 + corrections.sum::<usize>() + charge.map_or(0, |it| 6 + 4 * it.limits.len());
    let Ok(_) = encode::write_array_len(&mut out, values as u32);
    encode_number(&mut out, settlements.len() as u64);
    for settlement in settlements {
        encode_id(&mut out, &mut id_text, settlement.id);
        encode_number(
            &mut out,
            match (settlement.id.is_once(), settlement.is_refund) {
                (false, _) => 0,
                (true, false) => 1,
                (true, true) => 2,
            },
        );
        encode_number(&mut out, settlement.corrections.len() as u64);
        for (limit, micros) in &settlement.corrections {
            encode_text(&mut out, limit);
            let Ok(_) = encode::write_sint(&mut out, *micros);
        }
    }
    if let Some(charge) = charge {
        encode_id(&mut out, &mut id_text, charge.id);
        encode_number(&mut out, u64::from(charge.id.is_once()));
        encode_number(&mut out, u64::from(charge.max_concurrent));
        encode_number(&mut out, micros(charge.lease));
        encode_number(&mut out, micros(charge.charge_once));
        encode_number(&mut out, u64::from(charge.was_apart));
        for limit in charge.limits {
            encode_text(&mut out, &limit.limit);
            encode_number(&mut out, limit.burst);
            encode_number(&mut out, limit.cost);
            encode_number(&mut out, limit.believed);
        }
    }
    out.into_vec()
}

fn encode_id(out: &mut ByteBuf, text: &mut String, id: ChargeId) {
    text.clear();
    let _ = write!(text, "{id}");
    encode_text(out, text);
}

// Writing to memory cannot fail.
fn encode_text(out: &mut ByteBuf, text: &str) {
    let Ok(()) = encode::write_str(out, text);
}

fn encode_number(out: &mut ByteBuf, number: u64) {
    let Ok(_) = encode::write_uint(out, number);
}

/// `granted` or `refused`, the running requests, and what is used of each limit.
fn charge_reply(text: &str, limits: usize) -> Option<ChargeReply> {
    let mut words = text.split(' ');
    let is_granted = match words.next()? {
        "granted" => true,
        "refused" => false,
        _ => return None,
    };
    let running = words.next()?.parse().ok()?;
    let used: Result<SmallVec<[u64; 4]>, _> = words.map(str::parse).collect();
    let used = used.ok().filter(|used| used.len() == limits)?;
    Some(ChargeReply {
        is_granted,
        running,
        used,
    })
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reply_has_an_outcome_and_as_many_numbers_as_limits() {
        let reply = charge_reply("granted 3 1500000 0", 2).unwrap();
        assert_eq!((reply.is_granted, reply.running), (true, 3));
        assert_eq!(reply.used[..], [1_500_000, 0]);
        let reply = charge_reply("refused 0", 0).unwrap();
        assert_eq!((reply.is_granted, reply.used.len()), (false, 0));
        for wrong in [
            "",
            "granted",
            "granted x",
            "other 1",
            "granted 1 2",
            "granted 1 2 3 4",
            "granted 1 -2 3",
        ] {
            assert_eq!(charge_reply(wrong, 2), None, "{wrong}");
        }
    }
}
