//! The tasks of a connection that this replica opened.

use std::sync::Arc;

use parking_lot::Mutex;
use tokio::task::JoinSet;

/// The tasks that hyper runs for one connection. Dropping this closes the connection. (The tasks hold their own
/// executor, so dropping that would not be enough.)
#[derive(Debug, Default)]
pub(super) struct Running(Executor);

impl Running {
    /// Runs tasks that end with the connection.
    pub(super) fn executor(&self) -> Executor {
        self.0.clone()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.0.0.lock().abort_all();
    }
}

#[derive(Clone, Debug, Default)]
pub(super) struct Executor(Arc<Mutex<JoinSet<()>>>);

impl<F: Future<Output = ()> + Send + 'static> hyper::rt::Executor<F> for Executor {
    fn execute(&self, task: F) {
        let mut tasks = self.0.lock();
        while tasks.try_join_next().is_some() {}
        tasks.spawn(task);
    }
}
