//! The tasks of an HTTP/2 connection that this process opened.

use std::sync::Arc;

use parking_lot::Mutex;
use tokio::task::JoinSet;

/// The tasks that hyper runs for one connection. Dropping this closes the connection. (The tasks hold their own
/// executor, so dropping that would not be enough.)
#[derive(Debug, Default)]
pub struct ConnectionTasks(ConnectionExecutor);

impl ConnectionTasks {
    /// Runs tasks that end with the connection.
    pub fn executor(&self) -> ConnectionExecutor {
        self.0.clone()
    }
}

impl Drop for ConnectionTasks {
    fn drop(&mut self) {
        self.0.0.lock().abort_all();
    }
}

/// What hyper starts a connection's tasks with.
#[derive(Clone, Debug, Default)]
pub struct ConnectionExecutor(Arc<Mutex<JoinSet<()>>>);

impl<F: Future<Output = ()> + Send + 'static> hyper::rt::Executor<F> for ConnectionExecutor {
    fn execute(&self, task: F) {
        let mut tasks = self.0.lock();
        while tasks.try_join_next().is_some() {}
        tasks.spawn(task);
    }
}
