//! Finds other replicas by the addresses that the configuration lists or a DNS name has, and keeps a stream to each.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use prometheus::IntCounter;
use tokio::sync::{mpsc, oneshot};
use tracing::{debug, info, warn};

use super::addresses::AddressState;
use super::client;
use super::handshake::Refusal;
use super::link::{Failure, Link};
use super::said::Level;
use super::session;
use super::settings::{DnsPeers, PeerDiscovery};
use super::state::State;
use super::wire;
use crate::http::drain::Tasks;
use crate::http::keyed_tasks::KeyedTasks;
use crate::observe;
use crate::observe::log_once::LogOnce;

/// A first failure is often a replica that is just starting.
const FIRST_BACKOFF: Duration = Duration::from_millis(50);
/// An address that is this replica's own, or whose replica refuses this one, is tried again this often: another process
/// may have it by then.
const REFUSED_BACKOFF: Duration = Duration::from_secs(5);
/// Time between two lookups of a name. An answer of CoreDNS for a Service of Kubernetes is valid for 5 s by default.
const LOOKUP_INTERVAL: Duration = Duration::from_secs(5);

pub(super) async fn follow(state: Arc<State>, entries: Vec<PeerDiscovery>, tasks: Tasks) {
    let (sender, mut found) = mpsc::channel(16);
    let mut by_entry: BTreeMap<usize, BTreeSet<Arc<str>>> = BTreeMap::new();
    for (index, entry) in entries.into_iter().enumerate() {
        match entry {
            PeerDiscovery::Static(addresses) => {
                let addresses = addresses.iter().map(|address| address.as_str().into());
                by_entry.insert(index, addresses.collect());
            }
            PeerDiscovery::Dns(dns) => {
                let failures = state.metrics.lookup_failures.clone();
                let lookup = (index, dns, failures, sender.clone());
                let begin = |(index, dns, failures, found)| resolve(index, dns, failures, found);
                let resolving = tasks.supervisor().restarts("peer_lookup", lookup, begin);
                tasks.spawn_until_stopped(resolving);
            }
        }
    }
    // A name may stand for the wrong addresses; this replica's own may be among them.
    let addresses_max = state.settings.max_peers as usize * 2 + 1;
    let mut streams = KeyedTasks::new("peer_connection", tasks.clone());
    loop {
        let mut listed: BTreeSet<Arc<str>> = by_entry.values().flatten().cloned().collect();
        if listed.len() > addresses_max {
            warn!(
                listed = listed.len(),
                addresses_max,
                "more replicas are listed than are connected with; ignoring the last ones"
            );
            listed = listed.into_iter().take(addresses_max).collect();
        }
        state.set_addresses(observe::now(), |address| listed.contains(address));
        streams.set_keys(&listed, |address| {
            keep_connected(state.clone(), address.clone(), tasks.clone())
        });
        tokio::select! {
            Some((index, addresses)) = found.recv() => {
                by_entry.insert(index, addresses);
            }
            () = streams.restart_due() => {}
        }
    }
}

/// Looks a name up again and again. While it fails the last addresses stay.
async fn resolve(
    index: usize,
    dns: DnsPeers,
    failures: IntCounter,
    found: mpsc::Sender<(usize, BTreeSet<Arc<str>>)>,
) {
    let mut log = LogOnce::default();
    loop {
        match tokio::net::lookup_host((dns.name.as_str(), dns.port)).await {
            Ok(addresses) => {
                log.reset();
                let addresses = addresses.map(|address| address.to_string().into());
                if found.send((index, addresses.collect())).await.is_err() {
                    return;
                }
            }
            Err(error) => {
                let error = error.to_string();
                failures.inc();
                if log.should_log(observe::now(), &error) {
                    warn!(name = %dns.name, %error, "cannot resolve the replicas' name; keeping the addresses known");
                }
            }
        }
        tokio::time::sleep(LOOKUP_INTERVAL).await;
    }
}

/// Connects to an address whenever its replica is not connected.
async fn keep_connected(state: Arc<State>, address: Arc<str>, tasks: Tasks) {
    let mut backoff = FIRST_BACKOFF;
    state.set_address(observe::now(), &address, AddressState::Connecting);
    loop {
        let started = observe::now();
        let connecting = client::connect(
            &address,
            wire::SYNC,
            &state.identity,
            state.tls.as_deref(),
            &state.settings,
        );
        let wait = match connecting.await {
            Ok(link) => {
                let peer = link.peer.id;
                state.set_address(observe::now(), &address, AddressState::Connected(peer));
                state.says_address(observe::now(), &address, Level::Well);
                run_session(&state, link, &address, &tasks).await;
                // The replica may be connected by a stream that it opened itself.
                let mut changes = state.changes();
                while state.is_connected(peer) {
                    if changes.changed().await.is_err() {
                        return;
                    }
                }
                state.set_address(observe::now(), &address, AddressState::Connecting);
                let lasted = observe::now().saturating_duration_since(started);
                if lasted > Duration::from_secs(1) {
                    backoff = FIRST_BACKOFF;
                }
                backoff
            }
            Err(failure) => on_failure(&state, &address, &failure).unwrap_or(backoff),
        };
        backoff = backoff.saturating_mul(2).min(state.settings.max_backoff);
        // With jitter, so that replicas that lost each other do not meet in the same moment again and again.
        let wait = wait.mul_f64(0.5 + fastrand::f64() / 2.0);
        tokio::time::sleep(wait).await;
    }
}

/// The stream outlives this task: an address may be removed while its replica drains.
async fn run_session(state: &Arc<State>, link: Link, address: &Arc<str>, tasks: &Tasks) {
    let (ended, on_end) = oneshot::channel::<()>();
    let session = session::run(state.clone(), link, Some(address.clone()), tasks.clone());
    tasks.spawn(async move {
        session.await;
        drop(ended);
    });
    let _ = on_end.await;
}

/// Notes and counts a failure, and logs it once. Returns how long to wait, if that is longer than usual.
fn on_failure(state: &State, address: &Arc<str>, failure: &Failure) -> Option<Duration> {
    let (next, wait) = match failure {
        Failure::Refused(Refusal::Itself) => (AddressState::Itself, Some(REFUSED_BACKOFF)),
        Failure::NotListening => (AddressState::NotListening, None),
        Failure::Refused(_) | Failure::RefusedByPeer(_) | Failure::NotAllowed(_) => {
            let reason = failure.to_string();
            (AddressState::Refused(reason), Some(REFUSED_BACKOFF))
        }
        Failure::Lost(_) | Failure::Malformed(_) => (AddressState::Lost(failure.to_string()), None),
    };
    if next != AddressState::Itself {
        state.metrics.connect_failures.inc();
    }
    let now = observe::now();
    state.set_address(now, address, next.clone());
    let level = match next {
        AddressState::Refused(_) => Level::Lost,
        _ => Level::Poor,
    };
    if !state.says_address(now, address, level) {
        return wait;
    }
    match next {
        AddressState::Itself => debug!(%address, "this address is this replica's own"),
        AddressState::Refused(_) => {
            warn!(%address, reason = %failure, "replica not used");
        }
        _ => info!(%address, reason = %failure, "replica not reached; trying again"),
    }
    wait
}
