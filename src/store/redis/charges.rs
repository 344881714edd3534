//! Charges of requests to the limits of their tenants: one script, one round trip for those that come together.

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
use crate::store::charges::{Charge, ChargeId, ChargeReply, Charges, Settlement};

/// Bytes of a usual charge, or settlement.
const ENCODED: usize = 128;

#[derive(Clone, Debug)]
pub struct ChargeKeys([Arc<str>; 3]);

impl Redis {
    pub fn charge_keys(&self, tenant: Tenant) -> ChargeKeys {
        ChargeKeys(self.keys.limits(tenant).map(Arc::from))
    }

    /// Charges requests one after the other, each to all of its limits, or to none: a reply for each. It is not waited
    /// for longer than `timeout`.
    pub async fn charge(
        &self,
        keys: &ChargeKeys,
        charges: Charges<'_>,
        timeout: Duration,
    ) -> Result<Vec<ChargeReply>, Error> {
        let call = Call::new(Name::CHARGE).shared_keys(&keys.0);
        let call = call.arg(encode_settlements(charges.settlements));
        let call = call.arg(encode_charges(&charges)).within(timeout);
        // Charging twice under one id is charging once.
        let mut reply = self.call(Kind::Write, call).await?;
        charge_replies(&reply.whole("the outcome")?, charges.charges)
            .ok_or_else(|| malformed("an unexpected outcome of a charge from Redis"))
    }

    pub async fn settle_charges(
        &self,
        tenant: Tenant,
        settlements: &[Settlement],
    ) -> Result<(), Error> {
        let call = Call::new(Name::CHARGE).keys(self.keys.limits(tenant));
        let call = call.arg(encode_settlements(settlements));
        self.call(Kind::Write, call).await.map(drop)
    }

    /// Renews the leases of a tenant's running requests. Returns how many run, those of other replicas among them.
    pub async fn renew_charges(
        &self,
        tenant: Tenant,
        lease: Duration,
        running: &[ChargeId],
    ) -> Result<u64, Error> {
        let [_, key, _] = self.keys.limits(tenant);
        let mut call = Call::new(Name::RENEW_CHARGES).key(key).arg(micros(lease));
        for id in running {
            call = call.arg(id.to_string());
        }
        let mut reply = self.call(Kind::Write, call).await?;
        parse_number(&reply.whole("the outcome")?)
            .ok_or_else(|| malformed("an unexpected number of running requests from Redis"))
    }
}

/// Numbers and texts for `charge.lua`, as one array in MessagePack, since arguments of their own would cost more.
struct Values {
    bytes: ByteBuf,
    count: u32,
}

/// The head of an array with 32 bits for its length.
const ARRAY_HEAD: [u8; 5] = [0xdd, 0, 0, 0, 0];

// Writing to memory cannot fail.
impl Values {
    fn with_capacity(bytes: usize) -> Self {
        let mut vec = Vec::with_capacity(ARRAY_HEAD.len() + bytes);
        vec.extend_from_slice(&ARRAY_HEAD);
        Self {
            bytes: ByteBuf::from_vec(vec),
            count: 0,
        }
    }

    fn number(&mut self, number: u64) {
        self.count += 1;
        let Ok(_) = encode::write_uint(&mut self.bytes, number);
    }

    fn signed(&mut self, number: i64) {
        self.count += 1;
        let Ok(_) = encode::write_sint(&mut self.bytes, number);
    }

    fn text(&mut self, text: &str) {
        self.count += 1;
        let Ok(()) = encode::write_str(&mut self.bytes, text);
    }

    fn id(&mut self, id: ChargeId) {
        match id {
            ChargeId::Request(id) | ChargeId::Line(id) => self.text(id.as_str()),
            ChargeId::Response(id) => self.text(&id.to_string()),
        }
    }

    fn into_bytes(self) -> Vec<u8> {
        let mut bytes = self.bytes.into_vec();
        bytes[1..ARRAY_HEAD.len()].copy_from_slice(&self.count.to_be_bytes());
        bytes
    }
}

fn encode_settlements(settlements: &[Settlement]) -> Vec<u8> {
    let mut out = Values::with_capacity(ENCODED * settlements.len());
    for settlement in settlements {
        out.id(settlement.id);
        out.number(match (settlement.id, settlement.is_refund) {
            (ChargeId::Request(_), _) => 0,
            (ChargeId::Response(_), false) => 1,
            (ChargeId::Response(_), true) => 2,
            (ChargeId::Line(_), _) => 3,
        });
        out.number(settlement.corrections.len() as u64);
        for (limit, micros) in &settlement.corrections {
            out.text(limit);
            out.signed(*micros);
        }
    }
    out.into_bytes()
}

fn encode_charges(charges: &Charges<'_>) -> Vec<u8> {
    let mut out = Values::with_capacity(ENCODED * (1 + charges.charges.len()));
    out.number(micros(charges.lease));
    out.number(micros(charges.charge_once));
    for charge in charges.charges {
        out.id(charge.id);
        out.number(match charge.id {
            ChargeId::Request(_) => 0,
            ChargeId::Response(_) => 1,
            ChargeId::Line(_) => 2,
        });
        out.number(u64::from(charge.max_concurrent));
        out.number(u64::from(charges.was_apart));
        out.number(charge.limits.len() as u64);
        for limit in &charge.limits {
            out.text(&limit.limit);
            out.number(limit.burst);
            out.number(limit.cost);
            out.number(limit.believed);
        }
    }
    out.into_bytes()
}

/// A reply for each charge, separated by commas.
fn charge_replies(text: &[u8], charges: &[Charge]) -> Option<Vec<ChargeReply>> {
    let mut replies = Vec::with_capacity(charges.len());
    let mut rest = text;
    for charge in charges {
        let end = memchr::memchr(b',', rest).unwrap_or(rest.len());
        replies.push(charge_reply(&rest[..end], charge.limits.len())?);
        rest = &rest[(end + 1).min(rest.len())..];
    }
    rest.is_empty().then_some(replies)
}

/// `granted` or `refused`, the running requests, and what is used of each limit.
fn charge_reply(text: &[u8], limits: usize) -> Option<ChargeReply> {
    let (word, numbers) = text.split_at_checked(GRANTED.len())?;
    let is_granted = match word {
        GRANTED => true,
        REFUSED => false,
        _ => return None,
    };
    let mut numbers = numbers.split(|byte| *byte == b' ').map(parse_number);
    // Before the first space.
    if numbers.next() != Some(None) {
        return None;
    }
    let running = numbers.next()??;
    let mut used = SmallVec::new();
    for _ in 0..limits {
        used.push(numbers.next()??);
    }
    numbers.next().is_none().then_some(ChargeReply {
        is_granted,
        running,
        used,
    })
}

const GRANTED: &[u8] = b"granted";
const REFUSED: &[u8] = b"refused";

/// `None` for what is no number, or too large.
fn parse_number(digits: &[u8]) -> Option<u64> {
    str::from_utf8(digits).ok()?.parse().ok()
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::RequestId;
    use crate::store::charges::LimitCharge;

    #[test]
    fn a_reply_has_an_outcome_and_as_many_numbers_as_limits() {
        let reply = charge_reply(b"granted 3 1500000 0", 2).unwrap();
        assert_eq!((reply.is_granted, reply.running), (true, 3));
        assert_eq!(reply.used[..], [1_500_000, 0]);
        let reply = charge_reply(b"refused 0", 0).unwrap();
        assert_eq!((reply.is_granted, reply.used.len()), (false, 0));
        for wrong in [
            "",
            "granted",
            "granted x",
            "granted1 2 3 4",
            "other 1",
            "granted 1 2",
            "granted 1 2 3 4",
            "granted 1 -2 3",
            "granted  1 2 3",
            "granted 1 2 18446744073709551616",
        ] {
            assert_eq!(charge_reply(wrong.as_bytes(), 2), None, "{wrong}");
        }
    }

    #[test]
    fn there_is_a_reply_for_each_charge() {
        let charges = [0, 1].map(|limits| Charge {
            id: ChargeId::Request(RequestId::new(1)),
            limits: (0..limits)
                .map(|_| LimitCharge {
                    limit: "r".into(),
                    burst: 1,
                    cost: 1,
                    believed: 0,
                })
                .collect(),
            max_concurrent: 0,
        });
        let replies = charge_replies(b"granted 1,refused 2 33", &charges).unwrap();
        let granted: Vec<bool> = replies.iter().map(|reply| reply.is_granted).collect();
        assert_eq!(granted, [true, false]);
        assert_eq!(replies[1].used[..], [33]);
        for wrong in [
            "granted 1",
            "granted 1,",
            "granted 1,refused 2 33,granted 1",
            ",",
            "",
        ] {
            let replies = charge_replies(wrong.as_bytes(), &charges);
            assert_eq!(replies, None, "{wrong}");
        }
    }
}
