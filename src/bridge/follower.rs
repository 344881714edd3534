//! The task that follows one rank's events: source -> stream machine -> feed.
//!
//! Subscribers are served while the engine's process is known to be the same. While that is in doubt,
//! their calls end, and they subscribe again from where they were. If the process is another one or
//! batches are missing, a new incarnation begins, which cannot be resumed from the previous one.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use tracing::{debug, info, warn};

use super::feed::Feed;
use crate::kv::event::{Batch, Event};
use crate::kv::protobuf::LeftOutReason;
use crate::kv::source::{Source, SourceBatch, SourceEvent};
use crate::kv::stream::{self, EventStream, State, Step, Steps};
use crate::observe;
use crate::observe::log_once::LogOnce;

/// Inputs taken in a row before the task yields its thread and checks its timer.
const INPUTS_PER_TURN: u32 = 64;
/// Blocks applied before the task yields: about a tenth of a millisecond of work.
const BLOCKS_PER_TURN: usize = 1_024;

/// Follows `source` for as long as the future is polled.
pub async fn follow<S: Source>(mut source: S, settings: stream::Settings, feed: Arc<Feed>) {
    let mut follower = Follower {
        stream: EventStream::new(settings, observe::now()),
        is_connected: false,
        disconnect_log: LogOnce::default(),
        is_said_lost: true,
        left_out_logged: Vec::new(),
        replay_ended: false,
        inputs_this_turn: 0,
        blocks_this_turn: 0,
        feed,
    };
    loop {
        let timeout = observe::sleep_until(follower.stream.next_timeout());
        let steps = tokio::select! {
            biased;
            // Before the timer: if this process was paused, events that arrived meanwhile come first.
            event = source.next() => follower.on_event(event, source.can_replay()),
            () = timeout => follower.stream.on_timeout(observe::now()),
        };
        follower.carry_out(steps, &mut source);
        if follower.is_turn_over() {
            tokio::task::yield_now().await;
            let steps = follower.stream.on_timeout(observe::now());
            follower.carry_out(steps, &mut source);
        }
    }
}

struct Follower {
    stream: EventStream<Batch>,
    feed: Arc<Feed>,
    is_connected: bool,
    disconnect_log: LogOnce,
    /// The log says that there is no connection.
    is_said_lost: bool,
    /// Why events were left out, as far as it was logged.
    left_out_logged: Vec<LeftOutReason>,
    /// The input just handled completed a replay.
    replay_ended: bool,
    inputs_this_turn: u32,
    blocks_this_turn: usize,
}

impl Follower {
    fn on_event(&mut self, event: SourceEvent, can_replay: bool) -> Steps<Batch> {
        let now = observe::now();
        let rank = self.feed.rank();
        match event {
            SourceEvent::Connected { incarnation } => {
                if std::mem::take(&mut self.is_said_lost) {
                    info!(rank, "connected to the engine's KV events");
                }
                self.disconnect_log.reset();
                self.is_connected = true;
                self.stream
                    .on_connected(now, incarnation.as_deref(), can_replay)
            }
            SourceEvent::Live(batch) => {
                self.log_decode_error(&batch);
                self.stream.on_live(now, batch)
            }
            SourceEvent::Replayed(batch) => {
                self.log_decode_error(&batch);
                self.stream.on_replayed(now, batch)
            }
            SourceEvent::ReplayEnd => {
                self.replay_ended = true;
                self.stream.on_replay_end(now)
            }
            SourceEvent::ReplayFailed { reason } => {
                warn!(rank, reason, "the engine's replay failed");
                self.stream.on_replay_failed(now)
            }
            SourceEvent::Disconnected { reason } => {
                // Failures repeat; one warning is enough.
                if self.disconnect_log.should_log(now, &reason) {
                    self.is_said_lost = true;
                    warn!(rank, reason, "engine disconnected; reconnecting");
                }
                self.is_connected = false;
                self.stream.on_disconnected(now)
            }
        }
    }

    fn carry_out(&mut self, steps: Steps<Batch>, source: &mut impl Source) {
        for step in steps {
            self.step(step, source);
        }
        self.update_serving();
        self.replay_ended = false;
    }

    fn is_turn_over(&mut self) -> bool {
        self.inputs_this_turn += 1;
        let is_over =
            self.inputs_this_turn >= INPUTS_PER_TURN || self.blocks_this_turn >= BLOCKS_PER_TURN;
        if is_over {
            self.inputs_this_turn = 0;
            self.blocks_this_turn = 0;
        }
        is_over
    }

    fn log_decode_error(&self, batch: &SourceBatch) {
        if let Err(reason) = &batch.batch {
            let rank = self.feed.rank();
            let sequence = batch.sequence;
            warn!(rank, sequence, %reason, "KV event batch cannot be decoded; starting over");
        }
    }

    fn step(&mut self, step: Step<Batch>, source: &mut impl Source) {
        let rank = self.feed.rank();
        match step {
            // A bridge has no replicas to ask.
            Step::RequestPeerTree | Step::TakePeerTree => {}
            Step::RequestReplay { first } => {
                debug!(rank, first, "requesting a replay");
                source.replay(first);
            }
            Step::Clear(reason) => {
                info!(rank, reason = reason.as_str(), "starting over");
                self.feed
                    .clear(&format!("starting over: {}", reason.as_str()));
            }
            Step::Apply {
                sequence, payload, ..
            } => self.apply(sequence, payload),
        }
    }

    fn apply(&mut self, sequence: u64, batch: Batch) {
        // The incarnation claimed that no batch came before it, and its first ones were missed.
        let missed_first = sequence > 0 && self.feed.is_blank();
        if missed_first || !self.feed.has_incarnation() {
            self.begin(sequence);
        }
        self.blocks_this_turn += batch.events.iter().map(blocks).sum::<usize>();
        let rank = self.feed.rank();
        match self.feed.push(batch) {
            Ok(left_out) => {
                for event in left_out {
                    if !self.left_out_logged.contains(&event.reason) {
                        self.left_out_logged.push(event.reason);
                        warn!(
                            rank,
                            sequence,
                            reason = event.reason.as_str(),
                            event = event.detail,
                            "KV events that have no gRPC message are left out; later ones are only counted"
                        );
                    }
                }
            }
            Err(reason) => warn!(rank, sequence, reason, "starting over"),
        }
    }

    /// Begins an incarnation that misses `unknown_before` batches at its start.
    fn begin(&self, unknown_before: u64) {
        let id = format!("{:016x}", fastrand::u64(..));
        info!(
            rank = self.feed.rank(),
            incarnation = id,
            unknown_before,
            "new engine incarnation"
        );
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        let number = since.map_or(1, |since| since.as_micros() as u64);
        self.feed.begin(id, number, unknown_before);
    }

    /// Opens or closes the feed depending on the stream's state.
    fn update_serving(&self) {
        let state = self.stream.state();
        let is_known = self.is_connected
            && match state {
                State::Live | State::Partial => true,
                State::Stale { .. } => false,
                // No batch was published yet; a repeated replay does not change that.
                State::Cold => {
                    !self.stream.is_initial_replay() || self.feed.is_blank() && self.feed.is_open()
                }
            };
        let rank = self.feed.rank();
        if is_known {
            if !self.feed.has_incarnation() {
                // Only a completed replay without batches shows that none was published. Batches before an
                // undecodable one, or without a replay, are unknown.
                let none_published = self.replay_ended && self.stream.last_sequence().is_none();
                self.begin(u64::from(!none_published));
            }
            if self.feed.open() {
                info!(rank, state = state.as_str(), "serving");
            }
        } else {
            let reason = if self.is_connected {
                "verifying whether the engine's process is still the same"
            } else {
                "the engine is not connected"
            };
            if self.feed.close(reason) {
                warn!(rank, reason, "not serving");
            }
        }
    }
}

fn blocks(event: &Event) -> usize {
    match event {
        Event::Stored(event) => event.hashes.len(),
        Event::Removed(event) => event.hashes.len(),
        Event::Cleared { .. } | Event::Unknown { .. } => 0,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;
    use std::sync::atomic::Ordering::Relaxed;

    use super::*;
    use crate::bridge::incarnation::Limits;
    use crate::bridge::metrics::Metrics;
    use crate::observe::metrics::Registry;

    /// Always has a batch ready, and never answers a replay request.
    #[derive(Clone, Default)]
    struct BusySource {
        sent: Arc<AtomicU64>,
        requests: Arc<AtomicU64>,
    }

    const BATCHES: u64 = 100_000;

    impl Source for BusySource {
        async fn next(&mut self) -> SourceEvent {
            match self.sent.fetch_add(1, Relaxed) {
                0 => SourceEvent::Connected { incarnation: None },
                sequence if sequence < BATCHES => SourceEvent::Live(SourceBatch {
                    sequence,
                    digest: u128::from(sequence),
                    bytes: 10,
                    batch: Ok(Batch::default()),
                    snapshot: None,
                }),
                _ => std::future::pending().await,
            }
        }

        fn replay(&mut self, _: u64) {
            self.requests.fetch_add(1, Relaxed);
        }

        fn can_replay(&self) -> bool {
            true
        }
    }

    #[tokio::test]
    async fn endless_batches_starve_neither_other_tasks_nor_the_timer() {
        let limits = Limits {
            history_batches: 10,
            history_bytes: 1 << 20,
            state_bytes: 1 << 20,
        };
        let feed = Arc::new(Feed::new(0, limits, Metrics::new(&Registry::default())));
        let source = BusySource::default();
        let (sent, requests) = (source.sent.clone(), source.requests.clone());
        let settings = stream::Settings {
            replay_timeout: std::time::Duration::ZERO,
            ..stream::Settings::default()
        };
        let others = async {
            for _ in 0..10 {
                tokio::task::yield_now().await;
            }
            (sent.load(Relaxed), requests.load(Relaxed))
        };
        let (sent, requests) = tokio::select! {
            biased;
            () = follow(source, settings, feed) => unreachable!("it follows for ever"),
            turns = others => turns,
        };
        assert!(sent < 1_000, "{sent}");
        assert_eq!(requests, 2, "the first replay request timed out");
    }
}
