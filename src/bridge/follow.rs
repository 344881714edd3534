//! The task that follows one rank's events: source -> stream machine -> feed.
//!
//! Subscribers are served while it is known that the engine's process is the one that was told of. In
//! doubt their calls end, and they ask again where they were; when it is another process, or something
//! is missing, a new life begins, in which nobody can go on from the old one.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use tracing::{debug, error, info, warn};

use super::feed::Feed;
use crate::kv::event::{Batch, Event};
use crate::kv::source::{Frame, Said, Source};
use crate::kv::stream::{self, State, Step, Steps, Stream};
use crate::observe;

/// Inputs in a row after which others on the thread have their turn, and time is looked at, though more
/// are there.
const TURN_INPUTS: u32 = 64;
/// Blocks after which they do: about a tenth of a millisecond.
const TURN_BLOCKS: usize = 1_024;

/// Follows for ever.
pub async fn follow<S: Source>(mut source: S, settings: stream::Settings, feed: Arc<Feed>) {
    let mut follower = Follower {
        stream: Stream::new(settings, observe::now()),
        is_connected: false,
        is_refused: false,
        has_ended: false,
        inputs_in_turn: 0,
        blocks_in_turn: 0,
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
            // Before the clock: after a pause of ours, what was said meanwhile counts first.
            said = source.next() => follower.hear(said, source.can_replay()),
            () = timeout => follower.stream.on_timeout(observe::now()),
        };
        follower.take(steps, &mut source);
        if follower.is_turn_over() {
            tokio::task::yield_now().await;
            let steps = follower.stream.on_timeout(observe::now());
            follower.take(steps, &mut source);
        }
    }
}

struct Follower {
    stream: Stream<Batch>,
    feed: Arc<Feed>,
    is_connected: bool,
    /// The process's events cannot be translated.
    is_refused: bool,
    /// An answer of the engine's has just ended.
    has_ended: bool,
    inputs_in_turn: u32,
    blocks_in_turn: usize,
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
            Said::ReplayEnd => {
                self.has_ended = true;
                self.stream.on_replay_end(now)
            }
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

    fn take(&mut self, steps: Steps<Batch>, source: &mut impl Source) {
        for step in steps {
            self.step(step, source);
        }
        self.show();
        self.has_ended = false;
    }

    fn is_turn_over(&mut self) -> bool {
        self.inputs_in_turn += 1;
        let is_over = self.inputs_in_turn >= TURN_INPUTS || self.blocks_in_turn >= TURN_BLOCKS;
        if is_over {
            self.inputs_in_turn = 0;
            self.blocks_in_turn = 0;
        }
        is_over
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
        self.blocks_in_turn += batch.events.iter().map(blocks).sum::<usize>();
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
    fn show(&self) {
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
                // Only an answer from the first batch on that had none tells that there was none. What
                // came before an unreadable batch, or without an answer, is not known.
                let had_none = self.has_ended && self.stream.last().is_none();
                self.begin(u64::from(!had_none));
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

fn blocks(event: &Event) -> usize {
    match event {
        Event::Stored(event) => event.names.len(),
        Event::Removed(event) => event.names.len(),
        Event::Cleared { .. } | Event::Unknown { .. } => 0,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;
    use std::sync::atomic::Ordering::Relaxed;

    use super::*;
    use crate::bridge::life::Limits;
    use crate::bridge::metrics::Metrics;
    use crate::observe::metrics::Registry;

    /// Always has something to say, and never an answer.
    #[derive(Clone, Default)]
    struct Talker {
        said: Arc<AtomicU64>,
        asked: Arc<AtomicU64>,
    }

    const WORDS: u64 = 100_000;

    impl Source for Talker {
        async fn next(&mut self) -> Said {
            match self.said.fetch_add(1, Relaxed) {
                0 => Said::Connected { epoch: None },
                sequence if sequence < WORDS => Said::Live(Frame {
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
            self.asked.fetch_add(1, Relaxed);
        }

        fn can_replay(&self) -> bool {
            true
        }
    }

    #[tokio::test]
    async fn endless_batches_keep_neither_others_nor_the_time_from_their_turn() {
        let limits = Limits {
            history_batches: 10,
            history_bytes: 1 << 20,
            state_bytes: 1 << 20,
        };
        let feed = Arc::new(Feed::new(0, limits, Metrics::new(&Registry::default())));
        let source = Talker::default();
        let (said, asked) = (source.said.clone(), source.asked.clone());
        let settings = stream::Settings {
            replay_timeout_ms: 0,
            ..stream::Settings::default()
        };
        let others = async {
            for _ in 0..10 {
                tokio::task::yield_now().await;
            }
            (said.load(Relaxed), asked.load(Relaxed))
        };
        let (said, asked) = tokio::select! {
            biased;
            () = follow(source, settings, feed) => unreachable!("it follows for ever"),
            turns = others => turns,
        };
        assert!(said < 1_000, "{said}");
        assert_eq!(asked, 2, "the first answer did not come in time");
    }
}
