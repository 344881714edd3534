//! The task that follows one rank's events: source -> stream machine -> feed.
//!
//! Subscribers are served while it is known that the engine's process is the one that was told of. In
//! doubt their calls end, and they ask again where they were; when it is another process, or something
//! is missing, a new life begins, in which nobody can go on from the old one.

use std::sync::Arc;
use std::time::SystemTime;
use std::time::UNIX_EPOCH;

use tracing::debug;
use tracing::error;
use tracing::info;
use tracing::warn;

use super::feed::Feed;
use crate::kv::event::Batch;
use crate::kv::source::Frame;
use crate::kv::source::Said;
use crate::kv::source::Source;
use crate::kv::stream;
use crate::kv::stream::State;
use crate::kv::stream::Step;
use crate::kv::stream::Steps;
use crate::kv::stream::Stream;
use crate::observe;

/// Follows for ever.
pub async fn follow<S: Source>(mut source: S, settings: stream::Settings, feed: Arc<Feed>) {
    let mut follower = Follower {
        stream: Stream::new(settings, observe::now()),
        is_connected: false,
        is_refused: false,
        feed,
    };
    loop {
        let deadline = follower.stream.next_timeout();
        let timeout = async {
            match deadline {
                Some(at) => tokio::time::sleep_until(at.into()).await,
                None => std::future::pending().await,
            }
        };
        let steps = tokio::select! {
            biased;
            said = source.next() => follower.hear(said, source.can_replay()),
            () = timeout => follower.stream.on_timeout(observe::now()),
        };
        for step in steps {
            follower.step(step, &mut source);
        }
        follower.show(source.can_replay());
    }
}

struct Follower {
    stream: Stream<Batch>,
    feed: Arc<Feed>,
    is_connected: bool,
    /// The process's events cannot be translated.
    is_refused: bool,
}

impl Follower {
    fn hear(&mut self, said: Said, can_replay: bool) -> Steps<Batch> {
        let now = observe::now();
        let rank = self.feed.rank();
        match said {
            Said::Connected { epoch } => {
                info!(rank, "connected to the engine");
                self.is_connected = true;
                self.stream.on_connected(now, epoch.as_deref(), can_replay)
            }
            Said::Live(frame) => {
                self.look_at(&frame);
                self.stream.on_live(now, frame.into())
            }
            Said::Replayed(frame) => {
                self.look_at(&frame);
                self.stream.on_replayed(now, frame.into())
            }
            Said::ReplayEnd => self.stream.on_replay_end(now),
            Said::ReplayFailed { why } => {
                warn!(rank, why, "the engine's replay failed");
                self.stream.on_replay_failed(now)
            }
            Said::Lost { why } => {
                // Tries to connect fail again and again; once is enough to know.
                if self.is_connected {
                    warn!(rank, why, "lost the engine");
                } else {
                    debug!(rank, why, "cannot connect to the engine");
                }
                self.is_connected = false;
                self.stream.on_lost(now)
            }
        }
    }

    fn look_at(&self, frame: &Frame) {
        if let Err(why) = &frame.batch {
            warn!(rank = self.feed.rank(), sequence = frame.sequence, %why, "a batch cannot be read");
        }
    }

    fn step(&mut self, step: Step<Batch>, source: &mut impl Source) {
        let rank = self.feed.rank();
        match step {
            Step::AskReplay { first } => {
                debug!(rank, first, "asking for a replay");
                source.replay(first);
            }
            Step::Clear(reset) => {
                info!(rank, reason = reset.as_str(), "starting over");
                self.is_refused = false;
                self.feed
                    .forget(&format!("starting over: {}", reset.as_str()));
            }
            Step::Apply {
                sequence, carried, ..
            } => self.apply(sequence, carried),
        }
    }

    fn apply(&mut self, sequence: u64, batch: Batch) {
        if self.is_refused {
            return;
        }
        let rank = self.feed.rank();
        // A life that began before any batch, and whose first ones were missed.
        let is_late = sequence > 0 && self.feed.is_blank();
        if is_late || !self.feed.has_life() {
            self.begin(sequence);
        }
        if let Err(why) = self.feed.push(batch) {
            error!(rank, sequence, why, "nothing is served any more");
            self.is_refused = true;
        }
    }

    /// A life whose first known batch has that number.
    fn begin(&self, unknown_before: u64) {
        let epoch = format!("{:016x}", fastrand::u64(..));
        info!(
            rank = self.feed.rank(),
            epoch, unknown_before, "a new life of the engine"
        );
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        let number = since.map_or(1, |since| since.as_micros() as u64);
        self.feed.begin(epoch, number, unknown_before);
    }

    /// Opens or closes the feed by what is known now.
    fn show(&self, can_replay: bool) {
        if self.is_refused {
            return;
        }
        let state = self.stream.state();
        let is_known = self.is_connected
            && match state {
                State::Live | State::Partial => true,
                State::Stale { .. } => false,
                // Nothing was told so far; asking again changes nothing of that.
                State::Cold => {
                    !self.stream.is_joining() || self.feed.is_blank() && self.feed.is_open()
                }
            };
        let rank = self.feed.rank();
        if is_known {
            if !self.feed.has_life() {
                // Without a replay nothing is known of what came before.
                self.begin(u64::from(!can_replay));
            }
            if self.feed.open() {
                info!(rank, state = state.as_str(), "serving");
            }
        } else {
            let why = match self.is_connected {
                true => "it is not known yet whether the engine is the same",
                false => "the engine's events are not followed",
            };
            if self.feed.close(why) {
                warn!(rank, why, "not serving");
            }
        }
    }
}
