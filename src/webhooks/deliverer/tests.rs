//! What the store learns of an endpoint whose address changes, without a receiver.

use std::pin::pin;

use hyper::StatusCode;

use super::*;
use crate::ids::Tenant;
use crate::secret::Secret;
use crate::store::RetentionSettings;
use crate::store::memory::Memory;
use crate::store::outbox::{BatchKey, EndEvent, EventKey};
use crate::webhooks::settings::EndpointSettings;

const HOOK: &str = "hook";
const FIRST: &str = "http://127.0.0.1:9/first";
const SECOND: &str = "http://127.0.0.1:9/second";

fn settings(url: &str) -> Settings {
    let endpoint = EndpointSettings {
        name: HOOK.to_owned(),
        url: url.to_owned(),
        secrets: vec![Secret::new("a key of twenty-four bytes or more")],
        ..EndpointSettings::default()
    };
    Settings {
        endpoints: vec![endpoint],
        ..Settings::default()
    }
}

/// Nothing is delivered: no task runs.
fn start() -> (Arc<Memory>, Arc<Webhooks>) {
    let keep = RetentionSettings::default();
    let memory = Memory::new(&Default::default(), &keep, &Registry::default());
    let memory = Arc::new(memory);
    let webhooks = replica(&memory);
    (memory, webhooks)
}

/// One of the replicas that share a store.
fn replica(memory: &Arc<Memory>) -> Arc<Webhooks> {
    Webhooks::new(
        &settings(FIRST),
        memory.clone(),
        Arc::default(),
        Tasks::default(),
        &Registry::default(),
    )
}

fn current(webhooks: &Webhooks) -> Arc<Endpoint> {
    webhooks.table().endpoints[HOOK].clone()
}

async fn add_event(memory: &Memory) {
    let key = EventKey::Batch(BatchKey {
        tenant: Tenant::default(),
        number: 1,
    });
    let event = EndEvent::of(key, "completed", 7).unwrap();
    memory.add(event).await.unwrap();
}

async fn claim(memory: &Memory, fingerprint: &str) -> Vec<ClaimedEvent> {
    let claim = Claim {
        max: 1,
        lease: Duration::from_secs(3_600),
        fingerprint: fingerprint.to_owned(),
        is_new_address: false,
    };
    memory.claim(HOOK, claim).await.unwrap().events
}

#[tokio::test]
async fn an_endpoint_that_moves_is_looked_after_at_once() {
    let (_memory, webhooks) = start();
    let former = current(&webhooks);
    webhooks.replace(&settings(SECOND));
    // Its task waits for this.
    let woken = timeout(Duration::ZERO, former.state.wake.notified()).await;
    assert!(woken.is_ok());
}

#[tokio::test]
async fn an_endpoint_that_moves_back_drops_no_events_for_the_address_between() {
    let (memory, webhooks) = start();
    add_event(&memory).await;
    let first = current(&webhooks);
    assert_eq!(claim(&memory, &first.fingerprint).await.len(), 1);
    let [second, back] = [SECOND, FIRST].map(settings);
    webhooks.replace(&second);
    let second = current(&webhooks);
    webhooks.look(&webhooks.table(), &second).await;
    webhooks.replace(&back);
    let back = current(&webhooks);
    webhooks.look(&webhooks.table(), &back).await;
    // Only the first claim says so.
    assert!(!back.state.is_new_address.load(Relaxed));
    assert_eq!(memory.disable(HOOK, &second.fingerprint).await, Ok(0));
    assert_eq!(memory.disable(HOOK, &back.fingerprint).await, Ok(1));
}

#[tokio::test]
async fn an_endpoint_that_moves_while_its_event_waits_gets_it_at_the_new_address() {
    let (memory, webhooks) = start();
    add_event(&memory).await;
    let (table, former) = (webhooks.table(), current(&webhooks));
    let max = table.settings.advanced.max_concurrent;
    let others = table.permits.clone().acquire_many_owned(max).await;
    let mut look = pin!(webhooks.look(&table, &former));
    assert!(timeout(Duration::ZERO, look.as_mut()).await.is_err());
    webhooks.replace(&settings(SECOND));
    drop(others);
    assert_eq!(look.await, Duration::ZERO);
    let moved = current(&webhooks);
    assert_eq!(claim(&memory, &moved.fingerprint).await.len(), 1);
}

#[tokio::test]
async fn an_endpoint_that_is_gone_has_no_delivery() {
    let (_memory, webhooks) = start();
    let hook = current(&webhooks);
    for (status, has_delivery) in [(StatusCode::GONE, false), (StatusCode::NO_CONTENT, true)] {
        webhooks.on_result(&hook, &Attempt::Answered(status), observe::now());
        let delivered_at = hook.state.seen.lock().delivered_at;
        assert_eq!(delivered_at.is_some(), has_delivery, "{status}");
    }
}

/// Another replica has read a configuration in which the endpoint has another address.
#[tokio::test]
async fn an_event_that_a_former_address_did_not_want_is_due_for_the_newer_one() {
    let (memory, webhooks) = start();
    add_event(&memory).await;
    let former = current(&webhooks);
    let claimed = claim(&memory, &former.fingerprint).await[0];
    assert_eq!(claim(&memory, "newer").await, []);
    webhooks.disable(&former, &claimed).await;
    assert_eq!(claim(&memory, "newer").await.len(), 1);
}

#[tokio::test]
async fn a_410_that_one_replica_gets_disables_the_endpoint_at_all_until_one_of_them_enables_it() {
    let (memory, first) = start();
    let second = replica(&memory);
    add_event(&memory).await;
    let hook = current(&first);
    let claimed = claim(&memory, &hook.fingerprint).await[0];
    first.disable(&hook, &claimed).await;
    let is_disabled = |replica: &Webhooks| current(replica).state.seen.lock().is_disabled;
    assert!(is_disabled(&first) && !is_disabled(&second));
    // It learns so when it looks for events.
    second.look(&second.table(), &current(&second)).await;
    assert!(is_disabled(&second));
    assert_eq!(second.enable(HOOK).await, Some(Ok(true)));
    for replica in [&first, &second] {
        replica.look(&replica.table(), &current(replica)).await;
        assert!(!is_disabled(replica));
    }
    add_event(&memory).await;
    assert_eq!(claim(&memory, &hook.fingerprint).await.len(), 1);
}
