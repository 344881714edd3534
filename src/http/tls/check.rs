//! Checks settings and the files that they name.

use std::collections::BTreeSet;
use std::time::SystemTime;

use super::contents::{Contents, Problem};
use super::settings::{ClientSettings, ServerSettings};

impl ServerSettings {
    /// Everything that is wrong with a listener's TLS, files included: keys with a message each.
    pub fn check(&self, now: SystemTime) -> Vec<(String, String)> {
        let contents = Contents::read(&self.files());
        self.build(&contents, &[], now).err().unwrap_or_default()
    }
}

impl ClientSettings {
    /// Everything that is wrong with the TLS of a worker, files included: keys with a message each.
    pub fn check(&self, now: SystemTime) -> Vec<(String, String)> {
        let contents = Contents::read(&self.files());
        self.build(&contents, now).err().unwrap_or_default()
    }
}

/// Checks each setting once: a thousand workers have the same.
#[derive(Debug, Default)]
pub struct Checked(BTreeSet<ClientSettings>);

impl Checked {
    /// What is wrong with settings that were not checked yet.
    pub fn check(&mut self, settings: &ClientSettings, now: SystemTime) -> Vec<Problem> {
        if self.0.insert(settings.clone()) {
            settings.check(now)
        } else {
            Vec::new()
        }
    }
}
