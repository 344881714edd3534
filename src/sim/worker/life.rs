//! How a worker ends from within: its engine dies, as vLLM's does, or the whole process at once.

use std::time::Duration;

use tokio::sync::watch;

/// A server whose engine is dead tells so for about this long, then it exits.
const AFTER_CORE: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(crate) struct Life(watch::Sender<Stage>);

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Stage {
    Lives,
    CoreDead,
    Over,
}

impl Default for Life {
    fn default() -> Self {
        Self(watch::Sender::new(Stage::Lives))
    }
}

impl Life {
    pub(crate) fn core_dies(&self) {
        self.reach(Stage::CoreDead);
    }

    /// As if it were killed: sockets close without another word.
    pub(crate) fn end(&self) {
        self.reach(Stage::Over);
    }

    pub(crate) fn is_core_dead(&self) -> bool {
        *self.0.borrow() >= Stage::CoreDead
    }

    /// Until it is over.
    pub(crate) async fn over(&self) {
        let mut stage = self.0.subscribe();
        // The sender is ours, so neither wait can fail.
        let _ = stage.wait_for(|stage| *stage >= Stage::CoreDead).await;
        let over = stage.wait_for(|stage| *stage == Stage::Over);
        let _ = tokio::time::timeout(AFTER_CORE, over).await;
    }

    fn reach(&self, stage: Stage) {
        self.0.send_if_modified(|now| {
            let is_later = stage > *now;
            *now = stage.max(*now);
            is_later
        });
    }
}
