//! `GET /config`: what runs, and `POST /reload`: reads the configuration's file again. Both are functions, since this
//! part does not know the configuration.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use hyper::StatusCode;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The status and the body of a reload's answer.
pub type ReloadAnswer = Pin<Box<dyn Future<Output = (StatusCode, Value)> + Send>>;

/// `GET /config`.
#[derive(Debug, Serialize, Deserialize)]
pub struct RunningConfig {
    pub file: Option<String>,
    pub hash: Option<String>,
    #[serde(default)]
    pub last_reload: Value,
    /// Without its secrets.
    pub config: Value,
}

/// What the operator's pages need of the configuration.
pub struct ConfigPage {
    running: Box<dyn Fn() -> RunningConfig + Send + Sync>,
    reload: Box<dyn Fn() -> ReloadAnswer + Send + Sync>,
}

impl fmt::Debug for ConfigPage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConfigPage").finish_non_exhaustive()
    }
}

impl ConfigPage {
    pub fn new(
        running: impl Fn() -> RunningConfig + Send + Sync + 'static,
        reload: impl Fn() -> ReloadAnswer + Send + Sync + 'static,
    ) -> Self {
        Self {
            running: Box::new(running),
            reload: Box::new(reload),
        }
    }

    pub(super) fn running(&self) -> RunningConfig {
        (self.running)()
    }

    pub(super) fn reload(&self) -> ReloadAnswer {
        (self.reload)()
    }
}

/// Whether the configuration's file is what runs, for `/readyz`. A replica whose file was refused stays ready: it serves
/// with the last good one.
#[derive(Clone, Debug, Default)]
pub struct ConfigStatus(Arc<Mutex<Option<String>>>);

impl ConfigStatus {
    /// `None`: the file is what runs.
    pub fn set_problem(&self, problem: Option<String>) {
        *self.0.lock() = problem;
    }

    pub fn problem(&self) -> Option<String> {
        self.0.lock().clone()
    }
}
