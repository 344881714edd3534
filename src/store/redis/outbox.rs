//! The outbox of webhooks in Redis.
//!
//! The script that ends a response writes `wh` into its record: for which endpoints its end is an event. The queue of an
//! endpoint lies in another slot, so the event is put there by a second script, and only then `wh` is removed and the
//! response taken out of its owner's set. A crash in between leaves the response in that set, and a scan, which removes
//! what has ended, finds `wh` and does what is left. The event of a batch is put there by the second script alone.

use std::sync::Arc;
use std::time::Duration;

use tracing::{debug, warn};

use super::client::Redis;
use super::keys::{event_member, parse_event_member};
use super::reply::Reply;
use super::request::{Kind, Request};
use super::scripts::{Call, Name};
use crate::observe;
use crate::store::meters::Op;
use crate::store::outbox::{
    Claim, Claimed, ClaimedEvent, EndEvent, EventKey, IN_USE, MAX_ADDRESSES, MAX_EXPIRED, Outbox,
    Settlement, Subscriptions,
};
use crate::store::{Error, ResponseKey, Status, StoreFuture};

/// How long it is kept that an endpoint takes no events, without a replica that looks for events of it.
const DISABLED_TTL: Duration = Duration::from_secs(30 * 24 * 3_600);
/// Queues are kept for longer than their events, which a claim drops.
const SPARE_TTL: Duration = Duration::from_secs(3_600);

/// What a record says of its event: when the response ended, and for which endpoints.
pub(super) struct EventMark(pub(super) String);

impl EventMark {
    fn new(created_at: i64, endpoints: &[&str]) -> Self {
        Self(format!("{created_at}:{}", endpoints.join(",")))
    }

    fn read(&self) -> Option<(i64, impl Iterator<Item = &str>)> {
        let (created_at, endpoints) = self.0.split_once(':')?;
        let endpoints = endpoints.split(',').filter(|name| !name.is_empty());
        Some((created_at.parse().ok()?, endpoints))
    }
}

impl Redis {
    /// What to write into a record with its end; `None` if no endpoint is to learn of it.
    pub(super) fn event_mark(&self, key: ResponseKey, status: Status) -> Option<EventMark> {
        if self.subscriptions.load().subscribers.is_empty() {
            return None;
        }
        let event = response_event(key, status, observe::unix_s())?;
        let subscriptions = self.subscriptions.load_full();
        let of = subscriptions.of(event);
        let names: Vec<&str> = of.map(|subscriber| &*subscriber.name).collect();
        (!names.is_empty()).then(|| EventMark::new(event.created_at, &names))
    }

    /// Puts the event of a response that has ended into the queues of its endpoints. False if that failed, and must be
    /// done later.
    pub(super) async fn queue_event(
        &self,
        key: ResponseKey,
        status: Status,
        mark: Option<&EventMark>,
    ) -> bool {
        let Some((created_at, endpoints)) = mark.and_then(EventMark::read) else {
            return true;
        };
        let Some(event) = response_event(key, status, created_at) else {
            return true;
        };
        let subscriptions = self.subscriptions.load_full();
        for endpoint in endpoints {
            if let Err(error) = self.add_event(endpoint, event, &subscriptions).await {
                debug!(response_id = %key.id, endpoint, %error, "webhook event not queued; the next scan queues it");
                return false;
            }
        }
        self.send_detached(Request::command("HDEL", (self.keys.record(key), "wh")));
        true
    }

    /// As [`Self::queue_event`], if that was not done before.
    pub(super) async fn queue_left_event(&self, key: ResponseKey, status: Status) -> bool {
        if self.subscriptions.load().subscribers.is_empty() {
            return true;
        }
        let read = Request::command("HGET", (self.keys.record(key), "wh"));
        let value = self.execute(Kind::Read, read).await;
        match value.and_then(super::reply::bytes) {
            Ok(None) => true,
            Ok(Some(text)) => {
                let mark = EventMark(String::from_utf8_lossy(&text).into_owned());
                self.queue_event(key, status, Some(&mark)).await
            }
            Err(_) => false,
        }
    }

    async fn add_event(
        &self,
        endpoint: &str,
        event: EndEvent,
        subscriptions: &Subscriptions,
    ) -> Result<(), Error> {
        let subscriber = subscriptions.find(endpoint);
        let ttl = subscriptions.bounds.max_age + SPARE_TTL;
        let fingerprint = subscriber.map_or("", |subscriber| &subscriber.fingerprint);
        let call = Call::new(Name::OUTBOX_ADD)
            .keys(self.keys.outbox(endpoint))
            .arg(event_member(event.key))
            .arg(event.event_type.status())
            .arg(event.created_at.to_string())
            .arg(fingerprint.to_owned())
            .number(subscriptions.bounds.max_events)
            .number(ttl.as_millis() as u64);
        // What says that it is left to do may lie on another node, and is removed next.
        let mut reply = self.call_replicated(Kind::Write, call).await?;
        let (word, dropped) = (reply.word()?, reply.count()?);
        let Some(subscriber) = subscriber else {
            return Ok(());
        };
        match word.as_str() {
            "ok" => {
                subscriber.counters.added.inc();
                subscriber.counters.dropped_full.inc_by(dropped);
                subscriber.added.notify_one();
            }
            "off" => subscriber.counters.dropped_disabled.inc(),
            _ => {}
        }
        Ok(())
    }

    /// An event that another release has added stays claimed, and keeps none of the others: a replica that knows it may
    /// claim it when that is over, else it is dropped because of its age. This claim counts as an attempt, too: beside
    /// many replicas that do not know it, one that does may have few attempts left, or only one.
    fn warn_of_unknown_event(&self, endpoint: &str, event: &str) {
        let reason = "this release does not know it";
        let is_new = self
            .left_in_outbox
            .lock()
            .should_log(observe::now(), reason);
        if is_new {
            warn!(
                endpoint,
                event, reason, "webhook event left to replicas of other releases"
            );
        }
    }
}

impl Outbox for Redis {
    fn subscribe(&self, subscriptions: Arc<Subscriptions>) {
        self.subscriptions.store(subscriptions);
    }

    fn add(&self, event: EndEvent) -> StoreFuture<'_, ()> {
        self.meters.meter(Op::AddEvent, move || async move {
            let subscriptions = self.subscriptions.load_full();
            let of = subscriptions.of(event);
            let names: Vec<Arc<str>> = of.map(|subscriber| subscriber.name.clone()).collect();
            for name in names {
                self.add_event(&name, event, &subscriptions).await?;
            }
            Ok(())
        })
    }

    fn claim(&self, endpoint: &str, claim: Claim) -> StoreFuture<'_, Claimed> {
        let endpoint = endpoint.to_owned();
        self.meters.meter(Op::ClaimEvents, move || async move {
            let bounds = self.subscriptions.load().bounds;
            let call = Call::new(Name::OUTBOX_CLAIM)
                .keys(self.keys.outbox(&endpoint))
                .number(claim.max as u64)
                .number(claim.lease.as_millis() as u64)
                .number(bounds.max_age.as_millis() as u64)
                .number(MAX_EXPIRED as u64)
                .arg(claim.fingerprint)
                .number(DISABLED_TTL.as_millis() as u64)
                .number(IN_USE.as_millis() as u64)
                .number(MAX_ADDRESSES as u64)
                .number(claim.is_new_address.into());
            // A claim whose reply is lost ends with its lease.
            let mut reply = self.call(Kind::WriteOnce, call).await?;
            let is_disabled = reply.word()? == "off";
            let mut claimed = Claimed {
                is_disabled,
                waiting: reply.count()?,
                next_due: milliseconds(&mut reply)?,
                oldest: milliseconds(&mut reply)?,
                ..Claimed::default()
            };
            let dropped = reply.count()?;
            if is_disabled {
                claimed.dropped_disabled = dropped;
            } else {
                claimed.expired = dropped;
            }
            while !reply.is_empty() {
                let (member, entry) = (reply.word()?, reply.word()?);
                let age = milliseconds(&mut reply)?.unwrap_or_default();
                let read = parse_event_member(&member).and_then(|key| parse_entry(key, &entry));
                let Some((event, attempt)) = read else {
                    self.warn_of_unknown_event(&endpoint, &member);
                    continue;
                };
                claimed.events.push(ClaimedEvent {
                    event,
                    attempt,
                    age,
                });
            }
            Ok(claimed)
        })
    }

    fn settle(&self, endpoint: &str, settlement: Settlement) -> StoreFuture<'_, bool> {
        let endpoint = endpoint.to_owned();
        self.meters.meter(Op::SettleEvent, move || async move {
            let [due, added, entries, ..] = self.keys.outbox(&endpoint);
            let retry_in = settlement.retry_in;
            let call = Call::new(Name::OUTBOX_SETTLE)
                .keys([due, added, entries])
                .arg(event_member(settlement.key))
                .number(settlement.attempt.into())
                .arg(retry_in.map(|pause| pause.as_millis() as u64));
            let mut reply = self.call(Kind::Write, call).await?;
            Ok(reply.word()? == "ok")
        })
    }

    fn disable(&self, endpoint: &str, fingerprint: &str) -> StoreFuture<'_, u64> {
        let (endpoint, fingerprint) = (endpoint.to_owned(), fingerprint.to_owned());
        self.meters.meter(Op::DisableEndpoint, move || async move {
            let call = Call::new(Name::OUTBOX_DISABLE)
                .keys(self.keys.outbox(&endpoint))
                .arg(fingerprint)
                .number(DISABLED_TTL.as_millis() as u64);
            self.call(Kind::Write, call).await?.count()
        })
    }

    fn enable(&self, endpoint: &str) -> StoreFuture<'_, bool> {
        let endpoint = endpoint.to_owned();
        self.meters.meter(Op::EnableEndpoint, move || async move {
            let [.., disabled, addresses] = self.keys.outbox(&endpoint);
            let call = Call::new(Name::OUTBOX_ENABLE).keys([disabled, addresses]);
            Ok(self.call(Kind::Write, call).await?.count()? == 1)
        })
    }
}

/// -1 for none.
fn milliseconds(reply: &mut Reply) -> Result<Option<Duration>, Error> {
    let number = reply.number()?.unwrap_or(-1);
    Ok(u64::try_from(number).ok().map(Duration::from_millis))
}

fn response_event(key: ResponseKey, status: Status, created_at: i64) -> Option<EndEvent> {
    EndEvent::of(EventKey::Response(key), status.as_str(), created_at)
}

/// The event, and how often it was claimed.
fn parse_entry(key: EventKey, text: &str) -> Option<(EndEvent, u32)> {
    let mut words = text.split(' ');
    let (status, created_at, attempt) = (words.next()?, words.next()?, words.next()?);
    let event = EndEvent::of(key, status, created_at.parse().ok()?)?;
    Some((event, attempt.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::Tenant;
    use crate::store::outbox::{BatchKey, EventType};

    #[test]
    fn a_mark_is_read_as_it_was_written() {
        let mark = EventMark::new(17, &["a", "b.c"]);
        let (created_at, endpoints) = mark.read().unwrap();
        assert_eq!(
            (created_at, endpoints.collect::<Vec<_>>()),
            (17, vec!["a", "b.c"])
        );
        for wrong in ["", "17", "x:a"] {
            assert!(EventMark(wrong.to_owned()).read().is_none(), "{wrong}");
        }
    }

    #[test]
    fn an_entry_is_read_as_the_end_of_its_key() {
        let key = EventKey::Batch(BatchKey {
            tenant: Tenant::tagged(1),
            number: 2,
        });
        let event = EndEvent {
            key,
            event_type: EventType::BatchFailed,
            created_at: 5,
        };
        assert_eq!(parse_entry(key, "failed 5 2"), Some((event, 2)));
        for wrong in ["failed 5", "incomplete 5 2", "failed x 2"] {
            assert_eq!(parse_entry(key, wrong), None, "{wrong}");
        }
    }
}
