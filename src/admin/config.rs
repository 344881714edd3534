//! `GET /config`: what runs, and how the last reload ended.

use std::sync::Arc;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use serde_json::Value;

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
