//! Lines of batches on their way to a worker, and at one. From when a line was let in until it counts at a worker, no
//! load report shows it; so whoever lets lines in counts them here. Later it may be asked to give way.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};

use parking_lot::Mutex;
use rustc_hash::FxHashMap;
use tokio_util::sync::CancellationToken;

use crate::ids::WorkerId;

/// Lines that were let in and do not count at a worker yet.
#[derive(Debug, Default)]
pub struct EnteringLines {
    lines: AtomicU32,
    tokens: AtomicU64,
}

impl EnteringLines {
    /// Lets a line in whose prompt has about so many tokens. Once at a worker it is one of the `running` lines.
    pub fn enter(self: &Arc<Self>, tokens: u64, running: Arc<RunningLines>) -> EnteringLine {
        self.lines.fetch_add(1, Relaxed);
        self.tokens.fetch_add(tokens, Relaxed);
        EnteringLine {
            all: self.clone(),
            tokens,
            has_ended: AtomicBool::new(false),
            running,
            gives_way: CancellationToken::new(),
        }
    }

    pub fn lines(&self) -> u32 {
        self.lines.load(Relaxed)
    }

    /// The tokens of their prompts together.
    pub fn tokens(&self) -> u64 {
        self.tokens.load(Relaxed)
    }
}

/// The lines of this router that are at workers and may still be asked to give way.
#[derive(Debug, Default)]
pub struct RunningLines {
    by_worker: Mutex<FxHashMap<WorkerId, LinesAtWorker>>,
    next: AtomicU64,
}

/// So many lines at each worker that has some.
pub type LinesByWorker = FxHashMap<WorkerId, u32>;

/// By a number that grows: those that came last have the greatest.
type LinesAtWorker = BTreeMap<u64, CancellationToken>;

impl RunningLines {
    pub fn counts(&self) -> LinesByWorker {
        let by_worker = self.by_worker.lock();
        let counts = by_worker.iter();
        counts
            .map(|(worker, lines)| (*worker, lines.len() as u32))
            .collect()
    }

    /// Asks lines at a worker to give way: those that came last, of which the least is lost. Returns how many it has
    /// asked.
    pub fn ask(&self, worker: WorkerId, count: u32) -> u32 {
        let mut asked = Vec::new();
        let mut by_worker = self.by_worker.lock();
        if let Some(lines) = by_worker.get_mut(&worker) {
            let last = std::iter::from_fn(|| lines.pop_last());
            asked.extend(last.take(count as usize).map(|(_, gives_way)| gives_way));
            if lines.is_empty() {
                by_worker.remove(&worker);
            }
        }
        drop(by_worker);
        for gives_way in &asked {
            gives_way.cancel();
        }
        asked.len() as u32
    }

    fn add(&self, worker: WorkerId, gives_way: CancellationToken) -> u64 {
        let number = self.next.fetch_add(1, Relaxed);
        let mut by_worker = self.by_worker.lock();
        let lines = by_worker.entry(worker).or_default();
        lines.insert(number, gives_way);
        number
    }

    /// False if the line was asked before.
    fn remove(&self, worker: WorkerId, number: u64) -> bool {
        let mut by_worker = self.by_worker.lock();
        let Some(lines) = by_worker.get_mut(&worker) else {
            return false;
        };
        let was_there = lines.remove(&number).is_some();
        if lines.is_empty() {
            by_worker.remove(&worker);
        }
        was_there
    }
}

/// Counts a line as entering until it counts at a worker, or until this is dropped.
#[must_use = "dropping the guard ends the count"]
#[derive(Debug)]
pub struct EnteringLine {
    all: Arc<EnteringLines>,
    tokens: u64,
    has_ended: AtomicBool,
    running: Arc<RunningLines>,
    gives_way: CancellationToken,
}

impl EnteringLine {
    /// Cancelled once the line is to be given up, because requests of people want its place.
    pub fn gives_way(&self) -> CancellationToken {
        self.gives_way.clone()
    }

    fn end(&self) {
        if !self.has_ended.swap(true, Relaxed) {
            self.all.lines.fetch_sub(1, Relaxed);
            self.all.tokens.fetch_sub(self.tokens, Relaxed);
        }
    }
}

impl Drop for EnteringLine {
    fn drop(&mut self) {
        self.end();
    }
}

/// Ends once there is room.
pub type GrowFuture<'a> = Pin<Box<dyn Future<Output = ()> + Send + 'a>>;

/// Room in memory for the answer of one line, which no client takes piece by piece.
pub trait AnswerRoom: Send + Sync + Debug {
    /// Waits until the answer may have so many bytes in all.
    fn grow_to(&self, bytes: usize) -> GrowFuture<'_>;
}

#[derive(Debug)]
pub struct BatchLine {
    pub batch: Arc<str>,
    entering: EnteringLine,
    /// The worker at which it counts, and its number there.
    place: Mutex<Option<(WorkerId, u64)>>,
    /// `None`: its answer is not bounded.
    room: Option<Arc<dyn AnswerRoom>>,
}

impl BatchLine {
    pub fn new(batch: Arc<str>, entering: EnteringLine) -> Self {
        Self {
            batch,
            entering,
            place: Mutex::new(None),
            room: None,
        }
    }

    #[must_use]
    pub fn with_room(mut self, room: Arc<dyn AnswerRoom>) -> Self {
        self.room = Some(room);
        self
    }

    /// The lines of this router that run at each worker.
    pub fn running(&self) -> LinesByWorker {
        self.entering.running.counts()
    }

    /// Waits until what is kept of the line's answer may have so many bytes in all.
    pub async fn grow_to(&self, bytes: usize) {
        if let Some(room) = &self.room {
            room.grow_to(bytes).await;
        }
    }

    /// An attempt at a worker counts the line from now on.
    pub fn count_at(&self, worker: WorkerId) {
        let EnteringLine {
            running, gives_way, ..
        } = &self.entering;
        let mut place = self.place.lock();
        if let Some((before, number)) = place.take() {
            running.remove(before, number);
        }
        *place = Some((worker, running.add(worker, gives_way.clone())));
        drop(place);
        // Last, so that it always counts as one or the other.
        self.entering.end();
    }

    /// The engine has answered, and what follows must not be given up half-way: from now on the line does not give way.
    /// Waits for ever if it was asked before, because it is being given up.
    pub async fn stay(&self) {
        let place = self.place.lock().take();
        if let Some((worker, number)) = place
            && !self.entering.running.remove(worker, number)
        {
            std::future::pending::<()>().await;
        }
    }
}

impl Drop for BatchLine {
    fn drop(&mut self) {
        if let Some((worker, number)) = self.place.get_mut().take() {
            self.entering.running.remove(worker, number);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::task::{Context, Waker};

    use super::*;

    const HERE: WorkerId = WorkerId(1);
    const THERE: WorkerId = WorkerId(2);

    /// A fleet's lines.
    #[derive(Default)]
    struct Lines {
        entering: Arc<EnteringLines>,
        running: Arc<RunningLines>,
    }

    impl Lines {
        fn line(&self, tokens: u64) -> (BatchLine, CancellationToken) {
            let entering = self.entering.enter(tokens, self.running.clone());
            let gives_way = entering.gives_way();
            (BatchLine::new("batch_1".into(), entering), gives_way)
        }

        fn counts(&self) -> (u32, u64) {
            (self.entering.lines(), self.entering.tokens())
        }
    }

    #[test]
    fn a_line_is_entering_until_it_counts_at_a_worker_or_is_dropped() {
        let lines = Lines::default();
        let (first, _) = lines.line(7);
        let (second, _) = lines.line(5);
        assert_eq!(lines.counts(), (2, 12));
        first.count_at(HERE);
        first.count_at(HERE);
        assert_eq!(lines.counts(), (1, 5));
        drop((first, second));
        assert_eq!(lines.counts(), (0, 0));
    }

    #[test]
    fn those_that_came_last_give_way() {
        let lines = Lines::default();
        let all: Vec<_> = (0..3).map(|_| lines.line(1)).collect();
        for (line, _) in &all {
            line.count_at(HERE);
        }
        assert_eq!(lines.running.ask(THERE, 2), 0);
        assert_eq!(lines.running.ask(HERE, 2), 2);
        let asked = all.iter().map(|(_, gives_way)| gives_way.is_cancelled());
        assert!(asked.eq([false, true, true]));
        // No line is asked twice.
        assert_eq!(lines.running.counts().get(&HERE), Some(&1));
        assert_eq!(lines.running.ask(HERE, 2), 1);
        assert!(lines.running.counts().is_empty());
        drop(all);
        assert!(lines.running.counts().is_empty());
    }

    #[test]
    fn a_line_that_stays_is_not_asked_any_more_and_one_that_was_asked_does_not_stay() {
        let lines = Lines::default();
        let (first, first_gives_way) = lines.line(1);
        let (second, second_gives_way) = lines.line(1);
        first.count_at(HERE);
        second.count_at(HERE);
        let mut context = Context::from_waker(Waker::noop());
        assert_eq!(lines.running.ask(HERE, 1), 1);
        assert!(pin!(second.stay()).poll(&mut context).is_pending());
        assert!(pin!(first.stay()).poll(&mut context).is_ready());
        assert_eq!(lines.running.ask(HERE, 1), 0);
        assert!(second_gives_way.is_cancelled() && !first_gives_way.is_cancelled());
    }

    #[test]
    fn a_line_that_is_tried_at_another_worker_counts_there_only() {
        let lines = Lines::default();
        let (line, _) = lines.line(1);
        line.count_at(HERE);
        line.count_at(THERE);
        let counts = lines.running.counts();
        assert_eq!((counts.get(&HERE), counts.get(&THERE)), (None, Some(&1)));
        drop(line);
        assert!(lines.running.counts().is_empty());
    }
}
