//! What a configuration may read besides its own text.

use std::{fmt, io};

/// Where a document may look outside its text.
#[derive(Clone, Copy)]
pub struct Outside<'a> {
    /// An environment variable's value, for `${NAME}`.
    pub env: &'a dyn Fn(&str) -> Option<String>,
    /// A file's content, for secrets given as `file:/path`.
    pub read_file: &'a dyn Fn(&str) -> io::Result<String>,
    /// Whether files may be missing: a value that names such a file is noted, and is no problem.
    pub may_lack_files: bool,
}

impl fmt::Debug for Outside<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Outside")
    }
}

impl Outside<'static> {
    /// This process' environment and this machine's files.
    pub fn of_process() -> Self {
        Self {
            env: &|name| std::env::var(name).ok(),
            read_file: &|path| std::fs::read_to_string(path),
            may_lack_files: false,
        }
    }
}
