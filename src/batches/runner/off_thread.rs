//! Work on long texts, away from the I/O threads.

use std::future::pending;
use std::panic::resume_unwind;

use tokio::task::{JoinError, spawn_blocking};

/// Requests of the same thread would wait for work on more bytes. Most answers are far smaller, and need no other thread.
const MAX_BYTES_INLINE: usize = 256 << 10;

/// Does work on so many bytes, elsewhere if they are many.
pub(super) async fn off_thread<T: Send + 'static>(
    bytes: usize,
    work: impl FnOnce() -> T + Send + 'static,
) -> T {
    if bytes <= MAX_BYTES_INLINE {
        return work();
    }
    let done = spawn_blocking(work).await;
    match done.map_err(JoinError::try_into_panic) {
        Ok(done) => done,
        Err(Ok(panic)) => resume_unwind(panic),
        // The runtime ends, and with it this task.
        Err(Err(_)) => pending().await,
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[tokio::test]
    async fn only_work_on_many_bytes_is_done_on_another_thread() {
        let here = thread::current().id();
        let thread_of = |bytes| off_thread(bytes, || thread::current().id());
        assert_eq!(thread_of(MAX_BYTES_INLINE).await, here);
        assert_ne!(thread_of(MAX_BYTES_INLINE + 1).await, here);
    }
}
