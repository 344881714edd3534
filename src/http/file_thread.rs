//! Looks at files whose file system may hang: one on a network whose server is gone answers neither a read nor a
//! `stat`, for minutes or for ever, and who asks it waits for as long.

use std::io;
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::io_threads::OffloadThread;

/// A look that takes longer is said to hang. A file system that works takes milliseconds; one whose server starts again
/// hangs for a while, and what is in use serves meanwhile.
const PATIENCE: Duration = Duration::from_secs(5);

/// A thread that looks at files, one look at a time, so that only the thread hangs with them. Who drops this waits for
/// nothing: the thread ends when its last look does, or with the process.
#[derive(Debug)]
pub struct FileThread<T> {
    thread: OffloadThread,
    patience: Duration,
    /// The look that has not ended, as far as is known.
    running: Option<JoinHandle<T>>,
}

/// Why there is no result of a look.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LookError {
    #[error("its file system has not answered for {0:?}")]
    Hangs(Duration),
    #[error("the look at it has ended without a result")]
    Ended,
}

impl<T: Send + 'static> FileThread<T> {
    pub fn start(name: &str) -> io::Result<Self> {
        Ok(Self {
            thread: OffloadThread::start(name)?,
            patience: PATIENCE,
            running: None,
        })
    }

    /// With another time after which a look is said to hang.
    #[cfg(test)]
    pub(crate) fn with_patience(self, patience: Duration) -> Self {
        Self { patience, ..self }
    }

    /// What `look` returns on the thread. While the look before has not ended, that one is waited for instead, and its
    /// result returned: a file system that hangs is not asked again.
    pub async fn look(
        &mut self,
        look: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, LookError> {
        let runtime = self.thread.runtime();
        let running = self
            .running
            .get_or_insert_with(|| runtime.spawn(async move { look() }));
        let Ok(ended) = timeout(self.patience, running).await else {
            return Err(LookError::Hangs(self.patience));
        };
        self.running = None;
        ended.map_err(|_| LookError::Ended)
    }

    /// Whether a look has not ended.
    pub fn is_looking(&self) -> bool {
        let running = self.running.as_ref();
        running.is_some_and(|running| !running.is_finished())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[tokio::test]
    async fn a_look_that_hangs_is_waited_for_and_not_begun_again() {
        let mut thread = FileThread::start("files").unwrap();
        thread.patience = Duration::from_millis(1);
        let (answers, answer) = mpsc::channel::<()>();
        let hangs = move || {
            answer.recv().unwrap();
            1
        };
        let expected = Err(LookError::Hangs(Duration::from_millis(1)));
        assert_eq!(thread.look(hangs).await, expected);
        assert_eq!(thread.look(|| 2).await, expected);
        assert!(thread.is_looking());
        answers.send(()).unwrap();
        thread.patience = PATIENCE;
        assert_eq!(thread.look(|| 3).await, Ok(1));
        assert!(!thread.is_looking());
        assert_eq!(thread.look(|| 4).await, Ok(4));
    }

    #[tokio::test]
    async fn a_look_that_panics_has_no_result_and_the_next_one_has() {
        let mut thread = FileThread::start("files").unwrap();
        let panics = || -> u8 { panic!("a test's own") };
        assert_eq!(thread.look(panics).await, Err(LookError::Ended));
        assert_eq!(thread.look(|| 2).await, Ok(2));
    }
}
