//! The end of a worker by a fault: its engine core dies, as vLLM's may, or the whole process ends at once.

use std::time::Duration;

use tokio::sync::watch;

/// How long a server whose engine core died reports itself unhealthy before it exits.
const EXIT_DELAY: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(crate) struct Life(watch::Sender<Stage>);

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Stage {
    Running,
    CoreDead,
    Ended,
}

impl Default for Life {
    fn default() -> Self {
        Self(watch::Sender::new(Stage::Running))
    }
}

impl Life {
    pub(crate) fn kill_core(&self) {
        self.reach(Stage::CoreDead);
    }

    /// Ends the process as a kill does: sockets close at once.
    pub(crate) fn end(&self) {
        self.reach(Stage::Ended);
    }

    pub(crate) fn is_core_dead(&self) -> bool {
        *self.0.borrow() >= Stage::CoreDead
    }

    /// Waits for the end of the process.
    pub(crate) async fn ended(&self) {
        let mut stage = self.0.subscribe();
        // `self` has the sender, so neither wait can fail.
        let _ = stage.wait_for(|stage| *stage >= Stage::CoreDead).await;
        let ended = stage.wait_for(|stage| *stage == Stage::Ended);
        let _ = tokio::time::timeout(EXIT_DELAY, ended).await;
    }

    fn reach(&self, stage: Stage) {
        self.0.send_if_modified(|now| {
            let is_later = stage > *now;
            *now = stage.max(*now);
            is_later
        });
    }
}
