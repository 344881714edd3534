//! The task for one worker's rank: what its source says goes through the stream machine, and what that
//! lets through goes into the tree. It decides nothing itself.
//!
//! It ends when its future is dropped, and the tree, its place on the board and its metrics go with it.

mod board;
mod ground;
mod metrics;
mod rate;

use std::sync::Arc;
use std::time::Duration;
use std::time::Instant;
use std::time::SystemTime;
use std::time::UNIX_EPOCH;

use tokio::sync::watch;
use tracing::debug;
use tracing::info;

use super::admit::Harm;
use super::event::Batch;
use super::event::Tier;
use super::forest::Forest;
use super::source::Frame;
use super::source::Said;
use super::source::Source;
use super::stream;
use super::stream::Numbered;
use super::stream::State;
use super::stream::Step;
use super::stream::Steps;
use super::stream::Stream;
use crate::ids::Model;
use crate::ids::WorkerId;
use crate::observe;
pub use board::Board;
use board::Seat;
pub use board::Status;
use ground::Ground;
use ground::Tally;
use metrics::Meters;
pub use metrics::Metrics;

/// Blocks that are applied before others on the thread have their turn: about a tenth of a millisecond.
const TURN_BLOCKS: u64 = 1_024;
/// Inputs in a row after which time is looked at, though more are there.
const TURN_INPUTS: u32 = 64;
/// How old the figures on the board may be.
const TELL: Duration = Duration::from_millis(250);

/// Whose events.
#[derive(Clone, Debug)]
pub struct Subject {
    pub worker: WorkerId,
    /// For logs and metrics.
    pub name: Arc<str>,
    pub rank: u32,
    pub model: Model,
}

/// What all subscribers share.
#[derive(Clone)]
pub struct Shared {
    pub forest: Arc<Forest>,
    pub board: Arc<Board>,
    pub metrics: Metrics,
    pub settings: stream::Settings,
    pub on_loss: OnLoss,
}

/// Called when a worker lost its cache, or may have: its process is another one, or it cleared all.
pub type OnLoss = Arc<dyn Fn(WorkerId) + Send + Sync>;

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").finish_non_exhaustive()
    }
}

/// Follows a rank's events for as long as it is polled. `life` grows when the worker was down, or when
/// its process is seen to be new.
pub async fn run(
    mut source: impl Source,
    subject: Subject,
    shared: Shared,
    mut life: watch::Receiver<u64>,
) {
    let mut task = Task::new(observe::now(), subject, shared);
    let mut is_watched = true;
    life.mark_unchanged();
    loop {
        let wake = task.next_wake().map(tokio::time::Instant::from_std);
        let sleep = async {
            match wake {
                Some(at) => tokio::time::sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        let input = tokio::select! {
            biased;
            changed = life.changed(), if is_watched => {
                is_watched = changed.is_ok();
                is_watched.then_some(Input::Witness)
            }
            // Before the clock: after a pause of ours, what was said meanwhile counts first.
            said = source.next() => Some(Input::Said(said)),
            () = sleep => Some(Input::Time),
        };
        if let Some(input) = input {
            task.take(input, &mut source).await;
        }
        task.turn(&mut source).await;
    }
}

enum Input {
    Said(Said),
    Witness,
    Time,
}

struct Task {
    subject: Subject,
    stream: Stream<Batch>,
    ground: Ground,
    seat: Seat,
    meters: Meters,
    on_loss: OnLoss,
    state: State,
    state_since: Instant,
    /// Since when the board does not say what is.
    untold_since: Option<Instant>,
    blocks_in_turn: u64,
    inputs_in_turn: u32,
}

impl Task {
    fn new(now: Instant, subject: Subject, shared: Shared) -> Self {
        let Subject {
            worker,
            name,
            rank,
            model,
        } = subject.clone();
        let meters = shared.metrics.of(&name, rank);
        let seat = shared.board.sit(now, worker, &name, rank, &model);
        let task = Self {
            subject,
            stream: Stream::new(shared.settings, now),
            ground: Ground::new(shared.forest, model, worker, rank),
            seat,
            meters,
            on_loss: shared.on_loss,
            state: State::Cold,
            state_since: now,
            untold_since: None,
            blocks_in_turn: 0,
            inputs_in_turn: 0,
        };
        task.meters.state(task.state.as_str());
        task
    }

    fn next_wake(&self) -> Option<Instant> {
        let tell = self.untold_since.map(|since| since + TELL);
        [self.stream.next_timeout(), tell]
            .into_iter()
            .flatten()
            .min()
    }

    async fn take(&mut self, input: Input, source: &mut impl Source) {
        let now = observe::now();
        let is_news = !matches!(input, Input::Time);
        let steps = match input {
            Input::Said(Said::Connected { epoch }) => {
                debug!(worker = %self.subject.name, rank = self.subject.rank, epoch, "connected to cache events");
                self.seat.tell(|told| told.status.is_connected = true);
                self.stream
                    .on_connected(now, epoch.as_deref(), source.can_replay())
            }
            Input::Said(Said::Live(frame)) => {
                self.note_unreadable(&frame);
                self.stream.on_live(now, frame.into())
            }
            Input::Said(Said::Replayed(frame)) => {
                self.note_unreadable(&frame);
                self.stream.on_replayed(now, Numbered::from(frame))
            }
            Input::Said(Said::ReplayEnd) => self.stream.on_replay_end(now),
            Input::Said(Said::ReplayFailed { why }) => {
                debug!(worker = %self.subject.name, rank = self.subject.rank, why, "no replay of cache events");
                self.stream.on_replay_failed(now)
            }
            Input::Said(Said::Lost { why }) => {
                debug!(worker = %self.subject.name, rank = self.subject.rank, why, "lost cache events");
                self.seat.tell(|told| {
                    told.status.is_connected = false;
                    told.status.lost = Some(why);
                });
                self.stream.on_lost(now)
            }
            Input::Witness => self.stream.on_witness(now),
            Input::Time => self.stream.on_timeout(now),
        };
        if is_news || !steps.is_empty() {
            self.untold_since.get_or_insert(now);
        }
        self.carry_out(steps, source).await;
        self.show(now);
    }

    /// Lets others have theirs, and looks at the time, which endless batches would keep from it.
    async fn turn(&mut self, source: &mut impl Source) {
        self.inputs_in_turn += 1;
        if self.inputs_in_turn < TURN_INPUTS && self.blocks_in_turn < TURN_BLOCKS {
            return;
        }
        self.inputs_in_turn = 0;
        self.blocks_in_turn = 0;
        tokio::task::yield_now().await;
        self.take(Input::Time, source).await;
    }

    async fn carry_out(&mut self, steps: Steps<Batch>, source: &mut impl Source) {
        // Nothing may count while what made it stop counting is carried out.
        if !self.stream.state().scores() {
            self.set_scoring(false);
        }
        for step in steps {
            match step {
                Step::Apply {
                    carried, is_live, ..
                } => self.apply(&carried, is_live).await,
                Step::Clear(reset) => self.clear(reset),
                Step::AskReplay { first } => source.replay(first),
            }
        }
        // And what begins to count does so when all of it is carried out.
        self.set_scoring(self.stream.state().scores());
    }

    async fn apply(&mut self, batch: &Batch, is_live: bool) {
        let mut tally = Tally::default();
        self.ground.apply(batch, &mut tally);
        self.count(batch, is_live, &tally);
        if tally.cleared {
            (self.on_loss)(self.subject.worker);
        }
        match tally.harm {
            Harm::None => {}
            Harm::Incomplete => self.stream.on_incomplete(),
            Harm::Opaque => {
                for step in self.stream.on_unknown_removal() {
                    if let Step::Clear(reset) = step {
                        self.clear(reset);
                    }
                }
            }
        }
        self.blocks_in_turn += tally.stored + tally.removed;
        if self.blocks_in_turn >= TURN_BLOCKS {
            self.blocks_in_turn = 0;
            tokio::task::yield_now().await;
        }
    }

    fn clear(&mut self, reset: stream::Reset) {
        self.ground.clear();
        self.meters.reset(reset);
        if reset.is_of_the_process() {
            (self.on_loss)(self.subject.worker);
        }
        self.seat
            .tell(|told| *told.status.resets.entry(reset.as_str()).or_default() += 1);
    }

    fn set_scoring(&mut self, scores: bool) {
        self.ground.set_scoring(scores);
        self.seat.set_scoring(scores);
    }

    fn count(&mut self, batch: &Batch, is_live: bool, tally: &Tally) {
        let now = observe::now();
        let meters = &mut self.meters;
        meters.batches.inc();
        meters.events.inc_by(tally.events);
        meters.stored.inc_by(tally.stored);
        meters.removed.inc_by(tally.removed);
        meters.unknown.inc_by(tally.unknown);
        for why in &tally.filtered {
            meters.filtered(*why);
        }
        let lag_s = is_live.then(|| unix_seconds() - batch.timestamp);
        if let Some(lag_s) = lag_s.filter(|lag_s| lag_s.is_finite()) {
            meters.lag.observe(lag_s.max(0.0));
        }
        self.seat.tell(|told| {
            told.events.add(now, tally.events);
            let status = &mut told.status;
            status.batches += 1;
            status.events += tally.events;
            status.stored_blocks += tally.stored;
            status.removed_blocks += tally.removed;
            status.unknown_removals += tally.unknown;
            for why in &tally.filtered {
                *status.filtered.entry(why.as_str()).or_default() += 1;
            }
            if let Some(lag_s) = lag_s.filter(|lag_s| lag_s.is_finite()) {
                status.lag_ms = Some(lag_s * 1e3);
            }
        });
    }

    /// Shows a new state at once, and figures now and then.
    fn show(&mut self, now: Instant) {
        let (state, reason) = (self.stream.state(), self.stream.reason());
        let is_new = state.as_str() != self.state.as_str();
        if is_new {
            self.state_since = now;
            self.meters.state(state.as_str());
            info!(
                worker = %self.subject.name,
                rank = self.subject.rank,
                from = self.state.as_str(),
                to = state.as_str(),
                reason = reason.as_str(),
                number = self.stream.last(),
                blocks = self.ground.tree().map(|(_, tree)| tree.len()),
                "what is known of a cache changed"
            );
        }
        self.state = state;
        let is_due = self.untold_since.is_some_and(|since| since + TELL <= now);
        if !is_new && !is_due {
            return;
        }
        self.untold_since = None;
        self.meters.counts(self.stream.counts());
        let tree = self.ground.tree();
        let blocks = tree.map_or([0; Tier::COUNT], |(_, tree)| tree.blocks());
        for (gauge, blocks) in self.meters.blocks.iter().zip(blocks) {
            gauge.set(i64::try_from(blocks).unwrap_or(i64::MAX));
        }
        let (held_batches, held_bytes) = self.stream.held();
        self.seat.tell(|told| {
            told.state_since = self.state_since;
            let status = &mut told.status;
            status.state = state.as_str();
            status.reason = reason.as_str();
            status.epoch = self.stream.epoch().map(str::to_owned);
            status.block_size = tree.map(|(size, _)| size.get());
            status.blocks = Tier::ALL
                .iter()
                .map(|tier| tier.as_str())
                .zip(blocks)
                .collect();
            status.memory_bytes = tree.map_or(0, |(_, tree)| tree.memory_bytes());
            status.last_number = self.stream.last();
            status.held_batches = held_batches;
            status.held_bytes = held_bytes;
            status.counts = self.stream.counts();
        });
    }

    fn note_unreadable(&self, frame: &Frame) {
        if let Err(error) = &frame.batch {
            debug!(
                worker = %self.subject.name,
                rank = self.subject.rank,
                number = frame.sequence,
                %error,
                "a batch of cache events cannot be read"
            );
        }
    }
}

/// By this host's clock, which is not the engine's.
fn unix_seconds() -> f64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0.0, |since| since.as_secs_f64())
}

#[cfg(test)]
mod tests;
