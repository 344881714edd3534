//! What becomes of a background task that panics: it begins again after a pause, or, where its state cannot be made again, the
//! process drains and ends, so that a service manager starts it anew. Without the task it would go on half dead.

use std::any::Any;
use std::future::{Future, poll_fn};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::sync::{Arc, OnceLock};
use std::task::Poll;
use std::time::Duration;

use prometheus::{IntCounter, IntCounterVec};
use tokio::sync::watch;
use tracing::error;

use crate::observe::metrics::Registry;

/// A task that panics at once each time must neither use up a core nor fill the log. Requests that wait in a queue wait for its
/// task meanwhile.
const RESTART_PAUSE: Duration = Duration::from_secs(1);

/// Sees the panics of all background tasks of a process. Clones are the same one.
#[derive(Clone, Debug)]
pub struct Supervisor {
    restart_pause: Duration,
    panics: Arc<OnceLock<IntCounterVec>>,
    /// The last task whose panic ends the process.
    failed: watch::Sender<Option<&'static str>>,
}

impl Default for Supervisor {
    fn default() -> Self {
        Self {
            restart_pause: RESTART_PAUSE,
            panics: Arc::default(),
            failed: watch::Sender::default(),
        }
    }
}

impl Supervisor {
    /// Counts the panics of tasks from now on.
    pub fn register(&self, registry: &Registry) {
        let panics = registry.counters(
            "warmroute_task_panics_total",
            "Panics of background tasks; the log has the message of each as an error. The task began again after a pause, or, \
             where it could not, the router drained and ended with exit code 1.",
            &["task"],
        );
        // A process has one registry.
        let _ = self.panics.set(panics);
    }

    /// The future to spawn for a task that begins again after a panic: `begin` makes it from a clone of `state`.
    pub fn restarts<S, F>(
        &self,
        name: &'static str,
        state: S,
        mut begin: impl FnMut(S) -> F + Send + 'static,
    ) -> impl Future<Output = ()> + Send + 'static
    where
        S: Clone + Send + 'static,
        F: Future<Output = ()> + Send + 'static,
    {
        self.show(name);
        let supervisor = self.clone();
        async move {
            loop {
                let begun = state.clone();
                let task = async { begin(begun).await };
                if supervisor.attempt(name, task).await.is_some() {
                    return;
                }
            }
        }
    }

    /// What a step of a task that keeps its state comes to. `None` if it panicked, after a pause.
    pub async fn attempt<T>(
        &self,
        name: &'static str,
        future: impl Future<Output = T>,
    ) -> Option<T> {
        self.show(name);
        match caught(future).await {
            Ok(output) => Some(output),
            Err(panic) => {
                self.on_panic(name);
                let pause = self.restart_pause;
                error!(
                    task = name,
                    panic,
                    ?pause,
                    "background task exited; restarting it after a pause"
                );
                tokio::time::sleep(pause).await;
                None
            }
        }
    }

    /// The future to spawn for a task that cannot begin again. After its panic [`Supervisor::failed`] resolves.
    pub fn essential(
        &self,
        name: &'static str,
        task: impl Future<Output = ()> + Send + 'static,
    ) -> impl Future<Output = ()> + Send + 'static {
        self.show(name);
        let supervisor = self.clone();
        async move {
            if let Err(panic) = caught(task).await {
                supervisor.on_panic(name);
                error!(
                    task = name,
                    panic, "background task exited and cannot be restarted; ending the process"
                );
                supervisor.failed.send_replace(Some(name));
            }
        }
    }

    /// Resolves with the name of a task without which the process must not go on.
    pub async fn failed(&self) -> &'static str {
        let mut failed = self.failed.subscribe();
        let name = failed.wait_for(Option::is_some).await;
        // The sender lives as long as this supervisor.
        name.ok().and_then(|name| *name).unwrap_or_default()
    }

    /// Counts a panic of a task that its owner starts again.
    pub(super) fn on_panic(&self, name: &str) {
        if let Some(panics) = self.panics_of(name) {
            panics.inc();
        }
    }

    /// Shows 0 until a task panics: an alert on an increase would miss a series that begins with 1.
    pub(super) fn show(&self, name: &str) {
        let _ = self.panics_of(name);
    }

    fn panics_of(&self, name: &str) -> Option<IntCounter> {
        let panics = self.panics.get();
        panics.map(|panics| panics.with_label_values(&[name]))
    }

    /// One whose tasks begin again at once.
    #[cfg(test)]
    pub(crate) fn without_pause() -> Self {
        Self {
            restart_pause: Duration::ZERO,
            ..Self::default()
        }
    }
}

/// What a future comes to. An error is the message of its panic.
async fn caught<T>(future: impl Future<Output = T>) -> Result<T, String> {
    let mut pinned = pin!(future);
    poll_fn(|cx| {
        // After a panic it is not polled again.
        match catch_unwind(AssertUnwindSafe(|| pinned.as_mut().poll(cx))) {
            Ok(polled) => polled.map(Ok),
            Err(panic) => Poll::Ready(Err(message_of(&*panic))),
        }
    })
    .await
}

fn message_of(panic: &(dyn Any + Send)) -> String {
    let literal = panic.downcast_ref::<&str>().copied();
    let message = literal.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    message.unwrap_or("no message").to_owned()
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use tokio::task::yield_now;

    use super::*;

    fn supervisor() -> (Supervisor, Registry) {
        let (supervisor, registry) = (Supervisor::without_pause(), Registry::default());
        supervisor.register(&registry);
        (supervisor, registry)
    }

    fn assert_counted(registry: &Registry, task: &str, panics: u32) {
        let line = format!("warmroute_task_panics_total{{task=\"{task}\"}} {panics}\n");
        let text = registry.text();
        assert!(text.contains(&line), "{text}");
    }

    async fn panicking() {
        yield_now().await;
        panic!("on purpose");
    }

    #[tokio::test]
    async fn a_task_that_panics_begins_again_until_it_ends_by_itself() {
        let (supervisor, registry) = supervisor();
        let begun = Arc::new(AtomicU32::new(0));
        let begin = |begun: Arc<AtomicU32>| {
            let before = begun.fetch_add(1, Ordering::Relaxed);
            assert_ne!(before, 0, "on purpose, before it is polled");
            async move {
                if before == 1 {
                    panicking().await;
                }
            }
        };
        let task = supervisor.restarts("test", begun.clone(), begin);
        assert_counted(&registry, "test", 0);
        task.await;
        assert_eq!(begun.load(Ordering::Relaxed), 3);
        assert_counted(&registry, "test", 2);
    }

    #[tokio::test]
    async fn a_step_that_panics_comes_to_nothing_and_the_next_one_has_its_result() {
        let (supervisor, registry) = supervisor();
        assert_eq!(supervisor.attempt("well", async { 7 }).await, Some(7));
        assert_counted(&registry, "well", 0);
        assert_eq!(supervisor.attempt("test", panicking()).await, None);
        assert_eq!(supervisor.attempt("test", async { 7 }).await, Some(7));
        assert_counted(&registry, "test", 1);
    }

    #[tokio::test]
    async fn the_panic_of_an_essential_task_is_counted_and_ends_the_process() {
        let (supervisor, registry) = supervisor();
        let ends = supervisor.essential("ends", async {});
        let panics = supervisor.clone().essential("panics", panicking());
        assert_counted(&registry, "panics", 0);
        ends.await;
        assert_eq!(*supervisor.failed.borrow(), None);
        panics.await;
        assert_eq!(supervisor.failed().await, "panics");
        assert_counted(&registry, "ends", 0);
        assert_counted(&registry, "panics", 1);
    }

    #[test]
    fn the_message_of_a_panic_is_its_text() {
        let text_of = |panic: Box<dyn Any + Send>| message_of(&*panic);
        assert_eq!(text_of(Box::new("a literal")), "a literal");
        assert_eq!(text_of(Box::new("a text".to_owned())), "a text");
        assert_eq!(text_of(Box::new(7)), "no message");
    }
}
