//! The end of a worker by a fault: its engine core dies, as vLLM's may, or the whole process ends at once.

use std::time::Duration;

use tokio_util::sync::CancellationToken;

/// How long a server whose engine core died reports itself unhealthy before it exits.
const EXIT_DELAY: Duration = Duration::from_secs(1);

#[derive(Debug, Default)]
pub(crate) struct Life {
    core_dead: CancellationToken,
    ended: CancellationToken,
}

impl Life {
    pub(crate) fn kill_core(&self) {
        self.core_dead.cancel();
    }

    /// Ends the process as a kill does: sockets close at once.
    pub(crate) fn end(&self) {
        self.ended.cancel();
        self.core_dead.cancel();
    }

    pub(crate) fn is_core_dead(&self) -> bool {
        self.core_dead.is_cancelled()
    }

    /// Waits for the end of the process.
    pub(crate) async fn ended(&self) {
        self.core_dead.cancelled().await;
        let _ = tokio::time::timeout(EXIT_DELAY, self.ended.cancelled()).await;
    }
}
