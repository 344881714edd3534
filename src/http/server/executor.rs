//! Runs the streams of an HTTP/2 connection.

use std::sync::Arc;

use prometheus::IntCounter;

use super::activity::Activity;
use crate::http::drain::Tasks;

/// Runs HTTP/2 streams as tasks that the drain waits for.
#[derive(Clone)]
pub(super) struct Executor {
    pub(super) tasks: Tasks,
    pub(super) activity: Arc<Activity>,
    pub(super) reset: IntCounter,
}

impl<F> hyper::rt::Executor<F> for Executor
where
    F: Future<Output = ()> + Send + 'static,
{
    fn execute(&self, task: F) {
        let Some(watch) = self.activity.take_newest_stream() else {
            return self.tasks.spawn(task);
        };
        let reset = self.reset.clone();
        self.tasks.spawn(async move {
            if watch.run(task).await {
                reset.inc();
            }
        });
    }
}
