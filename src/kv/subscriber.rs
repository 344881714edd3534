//! The task for one worker's rank: what its source says goes through the stream machine, and what that
//! lets through goes into the tree. It decides nothing itself.
//!
//! It ends when its future is dropped, and the tree, its place on the board and its metrics go with it.

mod board;
mod ground;
mod metrics;
mod rate;
mod tell;
mod trouble;

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::watch;
use tracing::debug;

use super::admit::Harm;
use super::event::Batch;
use super::indexes::PrefixIndexes;
use super::source::{Said, Source};
use super::stream::{self, Numbered, State, Step, Steps, Stream};
use crate::ids::{Model, WorkerId};
use crate::observe;
use board::Seat;
pub use board::{Asking, Board, Seats, Standing, Status, TreeState};
use ground::{Ground, Tally};
use metrics::Meters;
pub use metrics::Metrics;
use trouble::Trouble;

/// Blocks that are applied before others on the thread have their turn: about a tenth of a millisecond.
const TURN_BLOCKS: u64 = 1_024;
/// Inputs in a row after which time is looked at, though more are there.
const TURN_INPUTS: u32 = 64;
/// How old the figures on the board may be.
const TELL: Duration = Duration::from_millis(250);
/// How long a tree may count as whole after the memory bound took some of it. Others' stores do that,
/// and tell nobody.
const LOOK: Duration = Duration::from_secs(1);

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
    pub indexes: Arc<PrefixIndexes>,
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
            task.take(observe::now(), input, &mut source).await;
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
    /// When it was last asked whether the tree was cut.
    looked_at: Instant,
    replay_trouble: Trouble,
    reading_trouble: Trouble,
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
            ground: Ground::new(shared.indexes, model, worker, rank),
            seat,
            meters,
            on_loss: shared.on_loss,
            state: State::Cold,
            state_since: now,
            untold_since: None,
            looked_at: now,
            replay_trouble: Trouble::default(),
            reading_trouble: Trouble::default(),
            blocks_in_turn: 0,
            inputs_in_turn: 0,
        };
        task.meters.state(task.state.as_str());
        task.meters.last_number(None);
        task
    }

    fn next_wake(&self) -> Option<Instant> {
        let tell = self.untold_since.map(|since| since + TELL);
        let look = (self.state == State::Live).then(|| self.looked_at + LOOK);
        [self.stream.next_timeout(), tell, look]
            .into_iter()
            .flatten()
            .min()
    }

    async fn take(&mut self, now: Instant, input: Input, source: &mut impl Source) {
        let is_news = !matches!(input, Input::Time);
        let steps = match input {
            Input::Said(Said::Connected { epoch }) => {
                debug!(worker = %self.subject.name, rank = self.subject.rank, epoch, "connected to cache events");
                self.seat.set_heard();
                self.seat.tell(|told| told.status.is_connected = true);
                self.meters.connected.set(1);
                self.stream
                    .on_connected(now, epoch.as_deref(), source.can_replay())
            }
            Input::Said(Said::Live(frame)) => {
                self.note_unreadable(now, &frame);
                self.stream.on_live(now, frame.into())
            }
            Input::Said(Said::Replayed(frame)) => {
                self.note_unreadable(now, &frame);
                self.stream.on_replayed(now, Numbered::from(frame))
            }
            Input::Said(Said::ReplayEnd) => {
                self.note_replay(now, None);
                self.stream.on_replay_end(now)
            }
            Input::Said(Said::ReplayFailed { why }) => {
                self.note_replay(now, Some(why));
                self.stream.on_replay_failed(now)
            }
            Input::Said(Said::Lost { why }) => {
                debug!(worker = %self.subject.name, rank = self.subject.rank, why, "lost cache events");
                self.seat.tell(|told| {
                    told.status.is_connected = false;
                    told.status.lost = Some(why);
                });
                self.meters.connected.set(0);
                self.stream.on_lost(now)
            }
            Input::Witness => self.stream.on_witness(now),
            Input::Time => {
                self.look(now);
                self.stream.on_timeout(now)
            }
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
        self.take(observe::now(), Input::Time, source).await;
    }

    fn look(&mut self, now: Instant) {
        if self.looked_at + LOOK <= now {
            self.looked_at = now;
            if self.ground.was_cut() {
                self.stream.on_incomplete();
                self.untold_since.get_or_insert(now);
            }
        }
    }

    async fn carry_out(&mut self, steps: Steps<Batch>, source: &mut impl Source) {
        // Nothing may count while what made it stop counting is carried out.
        let state = self.stream.state();
        if !state.scores() {
            self.set_state(state);
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
        self.set_state(self.stream.state());
    }

    async fn apply(&mut self, batch: &Batch, is_live: bool) {
        let mut tally = Tally::default();
        self.seat.hear(batch);
        let copies = self.seat.copies(observe::now(), is_live);
        self.ground.apply(batch, copies, &mut tally);
        self.count(batch, is_live, &tally);
        // What was cleared in the past is no news of the cache as it is, and lists begin with a clear.
        if tally.cleared {
            self.seat.lost();
        }
        if tally.cleared && is_live {
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
        self.seat.lost();
        self.meters.reset(reset);
        if reset.is_of_the_process() {
            (self.on_loss)(self.subject.worker);
        }
        self.seat
            .tell(|told| *told.status.resets.entry(reset.as_str()).or_default() += 1);
    }

    fn set_state(&mut self, state: State) {
        self.ground.set_scoring(state.scores());
        self.seat.set_state(state);
    }
}

#[cfg(test)]
mod tests;
