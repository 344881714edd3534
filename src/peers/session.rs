//! Runs one stream between two replicas, and the reports to all of them.

use std::sync::Arc;
use std::time::Duration;

use tonic::Status;
use tracing::warn;

use super::handshake::InstanceId;
use super::link::Link;
use super::pace::{self, Pace};
use super::roster::StreamId;
use super::state::State;
use super::streams::RETIRE_AFTER;
use crate::http::drain::Tasks;
use crate::observe;

/// Time for the last report to arrive when this replica ends its streams.
const CLOSE_TIMEOUT: Duration = Duration::from_millis(300);

/// Runs a stream until it ends. `address` is where the other side accepts streams.
pub(super) async fn run(state: Arc<State>, link: Link, address: Option<Arc<str>>, tasks: Tasks) {
    let (peer, side) = (link.peer.clone(), link.side);
    let (outgoing, mut receiving) = link.split();
    let opened = state.open(observe::now(), &peer, side, address, &outgoing);
    let (stream, end) = match opened {
        Ok(opened) => opened,
        Err(reason) => {
            // The other side may take this stream for the replica's until it has seen the other one.
            tokio::select! {
                () = tokio::time::sleep(RETIRE_AFTER) => {}
                () = tasks.stopped() => {}
            }
            let _ = outgoing.send(Err(Status::aborted(reason))).await;
            return;
        }
    };
    // From here on the state alone keeps the stream open.
    drop(outgoing);
    let mut ending = Ending {
        state: state.clone(),
        peer: peer.id,
        release: peer.release.clone(),
        stream,
        reason: "this side ended it".to_owned(),
    };
    let mut end = std::pin::pin!(end.cancelled());
    let mut stopped = std::pin::pin!(tasks.stopped());
    let mut has_warned = false;
    loop {
        let received = tokio::select! {
            received = receiving.receive() => received,
            () = &mut end => {
                ending.reason = "silent, or connected by another stream".to_owned();
                return;
            }
            () = &mut stopped => {
                state.tick(observe::now());
                state.end_sending(ending.stream);
                let last = async { while let Ok(Some(_)) = receiving.receive().await {} };
                let _ = tokio::time::timeout(CLOSE_TIMEOUT, last).await;
                return;
            }
        };
        match received {
            Ok(Some((kind, bytes))) => {
                if kind.is_none() && !std::mem::replace(&mut has_warned, true) {
                    let release = &*ending.release;
                    warn!(peer = %ending.peer, release, "a replica sends messages that this release does not know; they are ignored");
                }
                state.on_message(observe::now(), ending.peer, ending.stream, kind, bytes);
            }
            Ok(None) => {
                ending.reason = "it has closed the stream".to_owned();
                return;
            }
            Err(failure) => {
                ending.reason = failure.to_string();
                return;
            }
        }
    }
}

/// Takes the replica's load out of the sums, however its stream ends.
struct Ending {
    state: Arc<State>,
    peer: InstanceId,
    release: Arc<str>,
    stream: StreamId,
    reason: String,
}

impl Drop for Ending {
    fn drop(&mut self) {
        let now = observe::now();
        self.state.close(now, self.peer, self.stream, &self.reason);
    }
}

/// Reports to the other replicas while there are any.
pub(super) async fn report(state: Arc<State>) {
    let mut changes = state.changes();
    let least = state.settings.report_interval;
    let mut pace = Pace::new(observe::now(), least);
    let mut looks = tokio::time::interval(pace.look_interval());
    looks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        let mut streams = state.streams();
        while streams == 0 {
            if changes.changed().await.is_err() {
                return;
            }
            streams = state.streams();
        }
        looks.tick().await;
        let now = observe::now();
        pace.set_interval(pace::interval(least, streams));
        if pace.is_due(now, state.has_routed()) {
            let is_sent = state.tick(now);
            pace.on_report(now, is_sent);
        }
    }
}
