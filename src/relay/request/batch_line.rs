//! Lines of batches on their way to a worker. From when a line was let in until it counts at a worker, no load report
//! shows it; so whoever lets lines in counts them here. Pure but for atomics.

use std::fmt::Debug;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};

/// Lines that were let in and do not count at a worker yet.
#[derive(Debug, Default)]
pub struct EnteringLines {
    lines: AtomicU32,
    tokens: AtomicU64,
}

impl EnteringLines {
    /// Lets a line in whose prompt has about so many tokens.
    pub fn enter(self: &Arc<Self>, tokens: u64) -> EnteringLine {
        self.lines.fetch_add(1, Relaxed);
        self.tokens.fetch_add(tokens, Relaxed);
        EnteringLine {
            all: self.clone(),
            tokens,
            has_ended: AtomicBool::new(false),
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

/// Counts a line as entering until it counts at a worker, or until this is dropped.
#[must_use = "dropping the guard ends the count"]
#[derive(Debug)]
pub struct EnteringLine {
    all: Arc<EnteringLines>,
    tokens: u64,
    has_ended: AtomicBool,
}

impl EnteringLine {
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

/// A line of a batch.
#[derive(Debug)]
pub struct BatchLine {
    /// The id of the batch.
    pub batch: Arc<str>,
    entering: EnteringLine,
    room: Arc<dyn AnswerRoom>,
}

impl BatchLine {
    pub fn new(batch: Arc<str>, entering: EnteringLine, room: Arc<dyn AnswerRoom>) -> Self {
        Self {
            batch,
            entering,
            room,
        }
    }

    /// Whoever keeps what has come of the line's answer waits here as it grows.
    pub async fn grow_to(&self, bytes: usize) {
        self.room.grow_to(bytes).await;
    }

    /// The line counts at its worker from now on.
    pub(in crate::relay) fn on_counted(&self) {
        self.entering.end();
    }
}

#[cfg(test)]
mod tests {
    use std::future::ready;

    use super::*;

    #[derive(Debug)]
    struct Unbounded;

    impl AnswerRoom for Unbounded {
        fn grow_to(&self, _: usize) -> GrowFuture<'_> {
            Box::pin(ready(()))
        }
    }

    #[test]
    fn a_line_is_entering_until_it_counts_at_a_worker_or_is_dropped() {
        let all = Arc::<EnteringLines>::default();
        let [first, second] = [7, 5].map(|tokens| {
            BatchLine::new("batch_1".into(), all.enter(tokens), Arc::new(Unbounded))
        });
        assert_eq!((all.lines(), all.tokens()), (2, 12));
        first.on_counted();
        first.on_counted();
        assert_eq!((all.lines(), all.tokens()), (1, 5));
        drop((first, second));
        assert_eq!((all.lines(), all.tokens()), (0, 0));
    }
}
