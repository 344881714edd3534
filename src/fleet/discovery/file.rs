//! Discovery by a file that lists workers.
//!
//! The file is polled, not watched with inotify: polling also notices the symlink swap by which Kubernetes updates a
//! mounted ConfigMap, and works on every file system.

use std::path::PathBuf;
use std::time::Duration;

use super::Discovery;
use crate::fleet::Member;

/// Parses the file. The format belongs to the configuration.
pub type Parse = Box<dyn Fn(&str) -> Result<Vec<Member>, String> + Send + Sync>;

pub struct File {
    /// `file:PATH`, unique among the discoveries in use.
    name: String,
    path: PathBuf,
    interval: Duration,
    parse: Parse,
    last: Option<Result<String, String>>,
}

impl std::fmt::Debug for File {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("File")
            .field("path", &self.path)
            .finish_non_exhaustive()
    }
}

impl File {
    pub fn new(path: PathBuf, interval: Duration, parse: Parse) -> Self {
        Self {
            name: format!("file:{}", path.display()),
            path,
            interval,
            parse,
            last: None,
        }
    }
}

impl Discovery for File {
    fn name(&self) -> &str {
        &self.name
    }

    async fn next(&mut self) -> Result<Vec<Member>, String> {
        loop {
            if self.last.is_some() {
                tokio::time::sleep(self.interval).await;
            }
            // A few kilobytes every few seconds: a blocking read is cheaper than another thread.
            let read = std::fs::read_to_string(&self.path)
                .map_err(|error| format!("cannot read {}: {error}", self.path.display()));
            if self.last.as_ref() == Some(&read) {
                continue;
            }
            self.last = Some(read.clone());
            return read.and_then(|text| (self.parse)(&text));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::registry::tests::member;

    #[tokio::test]
    async fn a_changed_file_gives_a_new_list_and_an_invalid_one_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("workers");
        let parse: Parse = Box::new(|text| match text {
            "bad" => Err("bad list".to_owned()),
            names => Ok(names.split_whitespace().map(member).collect()),
        });
        let mut file = File::new(path.clone(), Duration::from_millis(5), parse);
        assert!(file.next().await.unwrap_err().contains("cannot read"));
        std::fs::write(&path, "a b").unwrap();
        assert_eq!(file.next().await.unwrap(), [member("a"), member("b")]);
        std::fs::write(&path, "bad").unwrap();
        assert_eq!(file.next().await.unwrap_err(), "bad list");
        std::fs::write(&path, "b").unwrap();
        assert_eq!(file.next().await.unwrap(), [member("b")]);
    }
}
