//! One line on a configuration that is valid: what it lists, and what is on.

use super::discovery::DiscoveryEntry;
use super::settings::Config;
use crate::responses::Mode;

impl Config {
    /// The verdict of `check`.
    pub fn summary(&self) -> String {
        let file = match self.source.path() {
            Some(path) => path.display().to_string(),
            None => "the configuration".to_owned(),
        };
        let missing = match self.source.missing_files.len() {
            0 => String::new(),
            files => format!(" but for missing files ({files})"),
        };
        let is_other = |entry: &&DiscoveryEntry| !matches!(entry, DiscoveryEntry::Static(_));
        let sources = self.discovery.iter().filter(is_other).count();
        let responses = match (self.responses.mode, &self.responses.store.redis) {
            (Mode::PassThrough, _) => "passed through",
            (Mode::Stateful, Some(_)) => "in Redis",
            (Mode::Stateful, None) => "in memory",
        };
        let batches = if self.batches.s3.is_some() {
            "in S3"
        } else if self.batches.is_on() {
            "in a folder"
        } else {
            "off"
        };
        let on = |is_on: bool| if is_on { "on" } else { "off" };
        format!(
            "{file} is valid{missing}: workers {}, other sources of workers {sources}, models {}, tenants {}, queue {}, \
             responses {responses}, batches {batches}, peers {}",
            self.members().len(),
            self.models.len(),
            self.tenants.len(),
            on(self.queue.settings().is_some()),
            on(self.peers.is_on()),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, expected: &str) {
        let summary = Config::parse("c.yaml", text).unwrap().summary();
        assert_eq!(summary, format!("the configuration is valid: {expected}"));
    }

    #[test]
    fn what_is_on_and_what_is_off_is_named() {
        check(
            "workers: ['http://a:1', 'http://b:1']\n",
            "workers 2, other sources of workers 0, models 0, tenants 0, queue on, responses in memory, batches off, \
             peers off",
        );
        check(
            "workers: ['http://a:1']\ndiscovery: [{dns: {name: b}}, {static: {workers: ['http://c:1']}}]\n\
             models: [{name: m}]\ntenants: [{name: a, keys: [0123456789abcdef]}]\nqueue: off\n\
             batches: {folder: /f}\npeers: {listen: '127.0.0.1:9701'}\n\
             responses: {mode: pass_through, store: {redis: 'redis://r:6379'}}\n",
            "workers 2, other sources of workers 1, models 1, tenants 1, queue off, responses passed through, \
             batches in a folder, peers on",
        );
    }
}
