//! Where a configuration came from: its file, its flags, the files of its secrets.

use std::path::{Path, PathBuf};

use super::flags::Flags;
use super::watched::{FileHash, WatchedFiles};

/// Where a configuration came from. It is no part of what was configured, so all are equal.
#[derive(Clone, Debug, Default)]
pub struct Source {
    pub(super) path: Option<PathBuf>,
    pub(super) flags: Flags,
    pub hash: FileHash,
    /// The files that secrets were read from.
    pub(super) secret_files: Vec<(PathBuf, FileHash)>,
    /// Keys that the file has and that are not used any more: one line each, with file, line and path.
    pub warnings: Vec<String>,
    /// Files that the file names and that are missing, where that is allowed: one line each, with file, line and path.
    pub missing_files: Vec<String>,
}

impl PartialEq for Source {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Source {
    /// `None` if there is no file, or a pipe, so that nothing can be read again.
    pub fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// The file and those that its secrets name.
    pub fn files(&self) -> WatchedFiles {
        let own = self.path.iter().map(|path| (path.clone(), self.hash));
        WatchedFiles::new(own.chain(self.secret_files.iter().cloned()))
    }
}
