//! Reads files of the configuration on a thread. A file system that hangs holds up this reload, and is logged.

use std::pin::pin;
use std::time::Duration;

use tokio::time::timeout;
use tracing::warn;

use crate::http::io_threads::OffloadThread;

/// A check of the file, or a read of what it names, that takes longer is logged. The check may load the tokenizers of
/// many models.
const PATIENCE: Duration = Duration::from_secs(60);

/// What `work` returns on the thread. If that takes longer than [`PATIENCE`], it is logged once.
pub(super) async fn read<T: Send + 'static>(
    thread: &OffloadThread,
    work: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    let mut working = pin!(thread.run(work));
    if let Ok(done) = timeout(PATIENCE, working.as_mut()).await {
        return done;
    }
    warn!(
        patience = ?PATIENCE,
        "files of the configuration are still being read; does their file system answer? No reload until they are"
    );
    working.await
}
