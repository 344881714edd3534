//! What reloads did: the answer to who asked for one, `GET /config`, the metrics, and a note for `/readyz`.

use std::sync::Arc;
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use hyper::StatusCode;
use parking_lot::Mutex;
use serde_json::{Value, json};

use crate::admin::{ConfigStatus, RunningConfig};
use crate::config::diff::{Change, Comparable};
use crate::config::reader::Problems;
use crate::config::{Config, FileHash, Refused};
use crate::observe;
use crate::observe::metrics::metric_table;

/// Changes that one answer shows.
const MAX_SHOWN: usize = 100;

#[derive(Clone, Debug)]
pub(super) enum Outcome {
    Applied(Vec<Change>),
    Unchanged,
    Refused(Refused),
    /// The router was started without a file.
    NoFile,
    /// The router itself could not use it, for lack of a thread or memory.
    Failed(String),
}

impl Outcome {
    const RESULTS: [&str; 6] = [
        "applied",
        "unchanged",
        "invalid",
        "needs_restart",
        "no_file",
        "failed",
    ];

    fn result(&self) -> &'static str {
        match self {
            Self::Applied(_) => "applied",
            Self::Unchanged => "unchanged",
            Self::Refused(Refused::Invalid(_)) => "invalid",
            Self::Refused(Refused::NeedsRestart(_)) => "needs_restart",
            Self::NoFile => "no_file",
            Self::Failed(_) => "failed",
        }
    }

    pub(super) fn answer(&self) -> (StatusCode, Value) {
        let done = |changes: &[Change]| {
            let shown = changes.iter().take(MAX_SHOWN);
            let body = json!({
                "result": self.result(),
                "changes": shown.collect::<Vec<_>>(),
                "changes_total": changes.len(),
            });
            (StatusCode::OK, body)
        };
        match self {
            Self::Applied(changes) => done(changes),
            Self::Unchanged => done(&[]),
            Self::NoFile => {
                let error = "there is no file to read again: the router was started by flags alone, or from a pipe";
                (
                    StatusCode::BAD_REQUEST,
                    json!({"result": self.result(), "error": error}),
                )
            }
            Self::Failed(error) => {
                let body = json!({"result": self.result(), "error": error});
                (StatusCode::INTERNAL_SERVER_ERROR, body)
            }
            Self::Refused(refused) => {
                let (status, error) = match refused {
                    Refused::Invalid(_) => (
                        StatusCode::BAD_REQUEST,
                        "the file has problems; nothing of it is used",
                    ),
                    Refused::NeedsRestart(_) => (
                        StatusCode::UNPROCESSABLE_ENTITY,
                        "the file changes keys that need a restart; nothing of it is used",
                    ),
                };
                let body = json!({
                    "result": self.result(),
                    "error": error,
                    "file": refused.problems().file(),
                    "problems": list(refused.problems()),
                });
                (status, body)
            }
        }
    }
}

fn list(problems: &Problems) -> Vec<Value> {
    let entry = |problem: &crate::config::reader::Problem| {
        json!({
            "line": problem.at.map(|at| at.line),
            "column": problem.at.map(|at| at.column),
            "path": problem.path,
            "message": problem.message,
        })
    };
    problems.iter().map(entry).collect()
}

/// What runs, and how the last reload ended. Read by pages.
#[derive(Debug)]
pub(crate) struct Status {
    running: ArcSwap<Config>,
    /// What `GET /config` shows of the last reload.
    last: Mutex<Value>,
    refused_at: Mutex<Option<Instant>>,
    /// For `/readyz`.
    pub(crate) ready: ConfigStatus,
}

impl Status {
    pub(super) fn new(config: &Config) -> Self {
        Self {
            running: ArcSwap::from_pointee(config.clone()),
            last: Mutex::new(Value::Null),
            refused_at: Mutex::new(None),
            ready: ConfigStatus::default(),
        }
    }

    pub(crate) fn running(&self) -> Arc<Config> {
        self.running.load_full()
    }

    pub(super) fn set(&self, outcome: &Outcome, running: &Arc<Config>) {
        self.running.store(running.clone());
        let mut last = outcome.answer().1;
        last["at"] = observe::unix_s().into();
        *self.last.lock() = last;
        let problem = match outcome {
            Outcome::Refused(refused) => {
                let found = match refused.problems().iter().count() {
                    1 => "a problem".to_owned(),
                    count => format!("{count} problems"),
                };
                Some(format!(
                    "the configuration file is refused ({found}, see GET /config); the last good one is used"
                ))
            }
            Outcome::Failed(error) => Some(format!("the configuration file is not used: {error}")),
            Outcome::Applied(_) | Outcome::Unchanged | Outcome::NoFile => None,
        };
        *self.refused_at.lock() = problem.is_some().then(observe::now);
        self.ready.set_problem(problem);
    }

    /// Whether the last reload was refused at least this long ago.
    pub(super) fn is_retry_due(&self, after: Duration) -> bool {
        let refused_at = *self.refused_at.lock();
        refused_at.is_some_and(|at| observe::now().saturating_duration_since(at) >= after)
    }

    pub(crate) fn page(&self) -> RunningConfig {
        let running = self.running();
        let source = &running.source;
        RunningConfig {
            file: source.path().map(|path| path.display().to_string()),
            hash: source.path().map(|_| source.hash.hex()),
            last_reload: self.last.lock().clone(),
            config: Comparable::of(&running).shown(),
        }
    }
}

metric_table! {
    #[derive(Debug)]
    pub(super) struct Metrics {
        successful: gauge "warmroute_config_last_reload_successful"
            "1 if the configuration file is what runs; 0 if it was refused and the last good one runs.",
        success_at: gauge "warmroute_config_last_reload_success_timestamp_seconds"
            "When the configuration file was taken over last, or found unchanged; the start counts.",
        hash: gauge "warmroute_config_hash"
            "The first 48 bits of the SHA-256 of the configuration file that runs; 0 without a file. Differs between replicas \
             that run different files.",
        reloads: counters "warmroute_config_reloads_total" ["result"] "Reloads of the configuration, by result.",
    }
}

impl Metrics {
    pub(super) fn on_start(&self, hash: FileHash) {
        for result in Outcome::RESULTS {
            self.reloads.with_label_values(&[result]);
        }
        self.on_success(hash);
    }

    pub(super) fn on_outcome(&self, outcome: &Outcome, hash: FileHash) {
        self.reloads.with_label_values(&[outcome.result()]).inc();
        match outcome {
            Outcome::Applied(_) | Outcome::Unchanged => self.on_success(hash),
            Outcome::Refused(_) | Outcome::Failed(_) => self.successful.set(0),
            Outcome::NoFile => {}
        }
    }

    fn on_success(&self, hash: FileHash) {
        self.successful.set(1);
        self.success_at.set(observe::unix_s());
        self.hash.set(i64::try_from(hash.number()).unwrap_or(0));
    }
}
