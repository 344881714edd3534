//! Returns memory to the system after many clients' connections have gone, or have given their buffers back.
//!
//! glibc keeps what is freed between blocks that are still in use: after 5,000 connections had gone, 170 MB stayed
//! resident for good. When the number of connections with buffers has fallen by much, the heaps are searched for whole free pages.

use std::time::Duration;

use tracing::warn;

use super::process_setup;
use crate::http::io_threads::OffloadThread;
use crate::http::server;

const INTERVAL: Duration = Duration::from_secs(2);
/// Connections of less are not worth a search: 15 MB at most.
const WORTH: i64 = 500;

/// When memory is returned: after the connections fell by `WORTH`, and by no more than that since the last look, so
/// that a wave of closes is over. Pure.
#[derive(Debug, Default)]
struct Fall {
    /// The most connections since memory was returned.
    peak: i64,
    last: i64,
}

impl Fall {
    /// Whether memory is to be returned. `connections`: how many there are now; `most`: the most since the last look.
    fn is_over(&mut self, connections: i64, most: i64) -> bool {
        let is_falling = self.last.max(most) - connections >= WORTH;
        self.last = connections;
        self.peak = self.peak.max(connections).max(most);
        let is_over = self.peak - connections >= WORTH && !is_falling;
        if is_over {
            self.peak = connections;
        }
        is_over
    }
}

/// Looks at the number of connections now and then.
pub(super) async fn run(metrics: server::Metrics) {
    // A thread of its own, because the search takes milliseconds.
    let thread = match OffloadThread::start("memory") {
        Ok(thread) => thread,
        Err(error) => {
            warn!(%error, "no thread that returns memory; freed memory is kept");
            return;
        }
    };
    let (mut open, mut buffered) = (Fall::default(), Fall::default());
    loop {
        tokio::time::sleep(INTERVAL).await;
        let (connections, with_buffers) = (metrics.connections(), metrics.buffered());
        let is_open_over = open.is_over(connections, metrics.take_peak());
        let is_buffered_over = buffered.is_over(with_buffers, with_buffers);
        if is_open_over || is_buffered_over {
            let _ = thread.run(process_setup::return_free_memory).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_returned_once_after_many_connections_have_gone() {
        let mut fall = Fall::default();
        for (connections, expected) in [
            (0, false),
            (5_000, false),
            (4_900, false),
            // They are going.
            (2_000, false),
            (50, false),
            (40, true),
            (30, false),
            (0, false),
            (600, false),
            (300, false),
            (90, true),
            (0, false),
        ] {
            assert_eq!(
                fall.is_over(connections, connections),
                expected,
                "{connections}"
            );
        }
    }

    #[test]
    fn connections_that_came_and_went_between_two_looks_count() {
        let mut fall = Fall::default();
        assert!(!fall.is_over(10, 10));
        assert!(!fall.is_over(12, 3_000));
        assert!(fall.is_over(12, 12));
        assert!(!fall.is_over(12, 12));
    }
}
