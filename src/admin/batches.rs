//! What the dashboard shows of batches.

use std::fmt;

use serde_json::Value;

/// Reads what runs here. A function, because these two parts do not import each other.
pub struct BatchesPanel(Box<dyn Fn() -> Value + Send + Sync>);

impl BatchesPanel {
    pub fn new(running: impl Fn() -> Value + Send + Sync + 'static) -> Self {
        Self(Box::new(running))
    }

    pub(super) fn running(&self) -> Value {
        (self.0)()
    }
}

impl fmt::Debug for BatchesPanel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BatchesPanel").finish_non_exhaustive()
    }
}
