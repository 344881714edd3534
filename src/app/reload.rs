//! Takes a changed configuration over while the router runs: when its file changes, on SIGHUP and on `POST /reload`.
//!
//! A file is read and checked as a whole on a thread of its own, compared with what runs, and then used at once. One with
//! a mistake, or with a change that needs a restart, changes nothing.

mod parts;
mod reading;
mod replace;
mod status;

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use hyper::StatusCode;
use serde_json::{Value, json};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, oneshot};
use tracing::{debug, error, info, warn};

pub(super) use self::parts::Parts;
use self::reading::read;
pub(super) use self::status::Status;
use self::status::{Metrics, Outcome};
use super::warnings;
use crate::config::diff::Change;
use crate::config::{Config, Refused, WatchedFiles, unreadable};
use crate::http::file_thread::FileThread;
use crate::http::io_threads::OffloadThread;
use crate::observe::metrics::Registry;

/// Requests for a reload that wait for one that runs; more are refused.
const MAX_WAITING: usize = 16;

/// A file is read once it was quiet for this long: an editor may write it in pieces, and the first piece of a list of
/// workers is a valid list.
const SETTLE: Duration = Duration::from_millis(100);

/// Changes that one log line shows.
const MAX_LOGGED: usize = 10;

/// A file that was refused is read again after this time even if it did not change: what it names, such as a tokenizer's
/// folder, may be there now.
const RETRY: Duration = Duration::from_secs(30);

#[derive(Clone, Debug)]
pub(super) struct Handle {
    requests: mpsc::Sender<Request>,
    pub(super) status: Arc<Status>,
}

/// The other end of a [`Handle`].
#[derive(Debug)]
pub(super) struct Requests(mpsc::Receiver<Request>);

#[derive(Debug)]
struct Request {
    /// Instead of what the file has.
    config: Option<Box<Config>>,
    outcome: oneshot::Sender<Outcome>,
}

pub(super) fn channel(config: &Config) -> (Handle, Requests) {
    let (requests, received) = mpsc::channel(MAX_WAITING);
    let status = Arc::new(Status::new(config));
    (Handle { requests, status }, Requests(received))
}

impl Handle {
    /// Asks for a reload. The status and the body of the answer to an operator.
    pub(super) async fn answer(&self) -> (StatusCode, Value) {
        let (sender, outcome) = oneshot::channel();
        let refused = |why: &str| (StatusCode::SERVICE_UNAVAILABLE, json!({"error": why}));
        let request = Request {
            config: None,
            outcome: sender,
        };
        match self.requests.try_send(request) {
            Ok(()) => {}
            Err(mpsc::error::TrySendError::Full(_)) => {
                return refused("too many reloads are waiting");
            }
            Err(mpsc::error::TrySendError::Closed(_)) => return refused("the router is draining"),
        }
        match outcome.await {
            Ok(outcome) => outcome.answer(),
            Err(_) => refused("the router is draining"),
        }
    }
}

/// Why a configuration is read again.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Trigger {
    FileChange,
    Retry,
    Signal,
    Request,
}

/// Owns what runs, and replaces it.
#[derive(Debug)]
pub(super) struct Reloader {
    running: Arc<Config>,
    parts: Parts,
    status: Arc<Status>,
    requests: Requests,
    metrics: Metrics,
    files: WatchedFiles,
    /// Looks at the files. A reload reads them on another thread: it may be one to other files than those that hang.
    looks: FileThread<(WatchedFiles, bool)>,
    /// Whether the last look has not ended.
    look_hangs: bool,
    thread: OffloadThread,
    /// What was logged last of a refused file. Each problem is logged once.
    logged: Option<String>,
}

impl Reloader {
    pub(super) fn new(
        config: &Config,
        parts: Parts,
        handle: &Handle,
        requests: Requests,
        registry: &Registry,
    ) -> io::Result<Self> {
        let metrics = Metrics::new(registry);
        metrics.on_start(config.source.hash);
        Ok(Self {
            files: config.source.files(),
            running: Arc::new(config.clone()),
            parts,
            status: handle.status.clone(),
            requests,
            metrics,
            looks: start_looks()?,
            look_hangs: false,
            thread: OffloadThread::start("config")?,
            logged: None,
        })
    }

    pub(super) async fn run(mut self) {
        // From here on the signal does not end the process.
        let mut hangup = match signal(SignalKind::hangup()) {
            Ok(hangup) => Some(hangup),
            Err(error) => {
                warn!(%error, "SIGHUP cannot be received; reload with POST /reload");
                None
            }
        };
        loop {
            let interval = self.interval();
            let hung_up = async {
                match &mut hangup {
                    Some(hangup) => hangup.recv().await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                Some(request) = self.requests.0.recv() => {
                    let outcome = match request.config {
                        Some(config) => self.replace(*config).await,
                        None => self.reload(Trigger::Request).await,
                    };
                    let _ = request.outcome.send(outcome);
                }
                _ = hung_up => {
                    self.reload(Trigger::Signal).await;
                }
                () = tokio::time::sleep(interval.unwrap_or_default()), if interval.is_some() => {
                    if self.has_changed().await {
                        self.reload(Trigger::FileChange).await;
                    } else if !self.look_hangs && self.status.is_retry_due(RETRY) {
                        self.reload(Trigger::Retry).await;
                    }
                }
            }
        }
    }

    /// Time between two looks at the file, if it is watched.
    fn interval(&self) -> Option<Duration> {
        let interval = self.running.reload.watch_interval;
        self.running.source.path()?;
        (!interval.is_zero()).then_some(interval)
    }

    /// Whether the files have changed and are quiet now.
    async fn has_changed(&mut self) -> bool {
        if !self.look().await {
            return false;
        }
        loop {
            tokio::time::sleep(SETTLE).await;
            if !self.look().await {
                return true;
            }
        }
    }

    async fn look(&mut self) -> bool {
        let mut files = std::mem::take(&mut self.files);
        let look = move || {
            let has_changed = files.have_changed();
            (files, has_changed)
        };
        match self.looks.look(look).await {
            Ok((files, has_changed)) => {
                self.files = files;
                self.look_hangs = false;
                has_changed
            }
            Err(error) => {
                if !std::mem::replace(&mut self.look_hangs, true) {
                    warn!(
                        %error,
                        "a configuration file cannot be looked at; meanwhile only SIGHUP and POST /reload take changes over"
                    );
                }
                false
            }
        }
    }

    async fn reload(&mut self, trigger: Trigger) -> Outcome {
        let outcome = match self.running.source.path().map(ToOwned::to_owned) {
            None => Outcome::NoFile,
            Some(path) => self.reload_file(path).await,
        };
        self.note(trigger, &outcome);
        outcome
    }

    fn note(&mut self, trigger: Trigger, outcome: &Outcome) {
        self.log(trigger, outcome);
        self.metrics.on_outcome(outcome, self.running.source.hash);
        self.status.set(outcome, &self.running);
    }

    async fn reload_file(&mut self, path: PathBuf) -> Outcome {
        let running = self.running.clone();
        let check = move || {
            let name = path.display().to_string();
            let text = std::fs::read(&path)
                .map_err(|error| Refused::Invalid(unreadable(&name, &error)))?;
            running.successor(&text)
        };
        let (config, changes) = match read(&self.thread, check).await {
            Some(Ok(prepared)) => prepared,
            Some(Err(refused)) => return Outcome::Refused(refused),
            None => {
                return Outcome::Failed("the check of the file ended without a result".to_owned());
            }
        };
        let config = Arc::new(config);
        if self.look_hangs {
            // What that look returns one day is of other files.
            self.looks = match start_looks() {
                Ok(looks) => looks,
                Err(error) => return Outcome::Failed(error.to_string()),
            };
            self.look_hangs = false;
        }
        // Secrets may be read from other files now.
        self.files = config.source.files();
        self.apply(config, changes).await
    }

    async fn apply(&mut self, config: Arc<Config>, changes: Vec<Change>) -> Outcome {
        if changes.is_empty() {
            self.running = config;
            return Outcome::Unchanged;
        }
        if let Err(error) = self.parts.apply(&config, &self.thread).await {
            return Outcome::Failed(error.to_string());
        }
        self.running = config;
        Outcome::Applied(changes)
    }

    fn log(&mut self, trigger: Trigger, outcome: &Outcome) {
        match outcome {
            Outcome::Applied(changes) => {
                for warning in warnings::of_running(&self.running) {
                    warn!("configuration: {warning}");
                }
                info!(
                    ?trigger,
                    hash = self.running.source.hash.hex(),
                    changes = changes.len(),
                    what = %summary(changes),
                    "configuration changed; requests that start now use it"
                );
            }
            Outcome::Unchanged => info!(?trigger, "configuration read again; it changes nothing"),
            Outcome::NoFile => {
                warn!(
                    ?trigger,
                    "there is no configuration file to read again: the router was started by flags alone, or from a pipe"
                );
            }
            Outcome::Failed(error) => {
                error!(
                    ?trigger,
                    error, "configuration not taken over; the router goes on with the last one"
                );
            }
            Outcome::Refused(refused) => {
                let problems = refused.problems().to_string();
                if self.logged.as_ref() == Some(&problems) {
                    debug!(?trigger, "the configuration file is still refused");
                    return;
                }
                warn!(
                    ?trigger,
                    problems,
                    "configuration file refused as a whole; the router goes on with the last good one"
                );
                self.logged = Some(problems);
                return;
            }
        }
        self.logged = None;
    }
}

fn start_looks() -> io::Result<FileThread<(WatchedFiles, bool)>> {
    FileThread::start("config-files")
}

/// The first changes, in one line.
fn summary(changes: &[Change]) -> String {
    let mut shown: Vec<String> = changes
        .iter()
        .take(MAX_LOGGED)
        .map(Change::to_string)
        .collect();
    if changes.len() > shown.len() {
        shown.push(format!("and {} more", changes.len() - shown.len()));
    }
    shown.join("; ")
}
