//! Looks at the files of passwords, on a thread of their own: a file system that hangs must not stop an I/O thread that
//! opens a connection.

use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{AcqRel, Relaxed, Release};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::timeout;
use tracing::{info, warn};

use crate::http::io_threads::OffloadThread;

pub(super) struct PasswordFiles {
    thread: OffloadThread,
    look: Arc<Look>,
    /// How long a look is waited for.
    patience: Duration,
    /// Whether the last look was not waited for to its end. For the log.
    hangs: AtomicBool,
}

struct Look {
    is_running: AtomicBool,
    /// Whether the look that runs was not waited for to its end. Nobody waits for that one then.
    is_given_up: AtomicBool,
    ended: watch::Sender<()>,
}

/// A look that runs. It ends with this.
struct Running(Arc<Look>);

impl Drop for Running {
    fn drop(&mut self) {
        // First: who comes between the two begins another look, and hears of its end.
        self.0.is_running.store(false, Release);
        self.0.ended.send_replace(());
    }
}

impl PasswordFiles {
    pub(super) fn new(patience: Duration) -> io::Result<Self> {
        Ok(Self {
            thread: OffloadThread::start("redis-passwords")?,
            look: Arc::new(Look {
                is_running: AtomicBool::new(false),
                is_given_up: AtomicBool::new(false),
                ended: watch::Sender::new(()),
            }),
            patience,
            hangs: AtomicBool::new(false),
        })
    }

    /// Calls `look` on the thread, and waits for its end for a while. If one runs already, that one is waited for
    /// instead: a file system that hangs is not asked again. One that hangs is waited for once: who opens a connection
    /// has little time, and the passwords are not known any sooner.
    pub(super) async fn look(&self, look: impl FnOnce() + Send + 'static) {
        let mut ended = self.look.ended.subscribe();
        if !self.look.is_running.swap(true, AcqRel) {
            self.look.is_given_up.store(false, Relaxed);
            let running = Running(self.look.clone());
            drop(self.thread.runtime().spawn(async move {
                let _running = running;
                look();
            }));
        } else if self.look.is_given_up.load(Relaxed) {
            return;
        }
        if timeout(self.patience, ended.changed()).await.is_ok() {
            if self.hangs.swap(false, Relaxed) {
                info!("files of passwords of Redis can be read again");
            }
            return;
        }
        self.look.is_given_up.store(true, Relaxed);
        if !self.hangs.swap(true, Relaxed) {
            warn!(
                "files of passwords of Redis cannot be read: their file system does not answer; the last ones are used"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::sync::atomic::AtomicUsize;
    use std::sync::mpsc;
    use std::task::{Context, Waker};

    use super::*;

    #[tokio::test]
    async fn a_look_that_hangs_is_waited_for_once_and_not_begun_again() {
        let files = PasswordFiles::new(Duration::from_millis(1)).unwrap();
        let (answers, answer) = mpsc::channel::<()>();
        files.look(move || answer.recv().unwrap()).await;
        let looks = Arc::new(AtomicUsize::new(0));
        let counted = || {
            let looks = looks.clone();
            move || {
                looks.fetch_add(1, Relaxed);
            }
        };
        let files = PasswordFiles {
            patience: Duration::from_secs(60),
            ..files
        };
        let again = pin!(files.look(counted()));
        let cx = &mut Context::from_waker(Waker::noop());
        assert!(again.poll(cx).is_ready());
        let mut ended = files.look.ended.subscribe();
        answers.send(()).unwrap();
        ended.changed().await.unwrap();
        assert_eq!(looks.load(Relaxed), 0);
        files.look(counted()).await;
        assert_eq!(looks.load(Relaxed), 1);
    }
}
