//! What is wrong with a configuration: every complaint with its file, line, column and path, one a
//! line.

use std::fmt;

/// More would not be read, and each round of reading costs a pass over the file.
pub(super) const PROBLEMS_MAX: usize = 100;

/// A message longer than this holds a value that somebody pasted; the head of it says enough.
const MESSAGE_CHARS_MAX: usize = 400;

/// Line and column, both from one, the column in characters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Position {
    pub line: usize,
    pub column: usize,
}

impl Position {
    pub(super) const START: Self = Self { line: 1, column: 1 };
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    pub at: Position,
    /// Such as `fleet.workers[2].url`; empty for the whole document.
    pub path: String,
    pub message: String,
}

/// All problems of one file. Its Display is meant for the operator as it stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problems {
    file: String,
    list: Vec<Problem>,
    /// Those beyond `PROBLEMS_MAX`, counted only.
    more: usize,
}

impl Problems {
    pub(super) fn new(file: &str) -> Self {
        Self {
            file: file.to_owned(),
            list: Vec::new(),
            more: 0,
        }
    }

    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    pub fn file(&self) -> &str {
        &self.file
    }

    /// In the order of their positions once the document is finished.
    pub fn iter(&self) -> impl Iterator<Item = &Problem> {
        self.list.iter()
    }

    pub(super) fn is_full(&self) -> bool {
        self.list.len() >= PROBLEMS_MAX
    }

    /// The path is asked for only if there is room: a hostile file has many problems at long paths.
    pub(super) fn push(
        &mut self,
        at: Position,
        path: impl FnOnce() -> String,
        message: impl fmt::Display,
    ) {
        if self.is_full() {
            self.more += 1;
            return;
        }
        let path = one_line(&path());
        let message = one_line(&message.to_string());
        self.list.push(Problem { at, path, message });
    }

    /// Stable, so two complaints about one place keep the order in which they were found.
    pub(super) fn sort(&mut self) {
        self.list.sort_by_key(|problem| problem.at);
    }
}

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, problem) in self.list.iter().enumerate() {
            if index > 0 {
                f.write_str("\n")?;
            }
            let Position { line, column } = problem.at;
            write!(f, "{}:{line}:{column}: ", self.file)?;
            if !problem.path.is_empty() {
                write!(f, "{}: ", problem.path)?;
            }
            f.write_str(&problem.message)?;
        }
        if self.more > 0 {
            write!(f, "\n{}: {} more problems", self.file, self.more)?;
        }
        Ok(())
    }
}

impl std::error::Error for Problems {}

/// Keys and values come from the file: a line break in one of them must not look like a second
/// problem.
fn one_line(text: &str) -> String {
    let mut line = String::new();
    for (count, letter) in text.chars().enumerate() {
        if count == MESSAGE_CHARS_MAX {
            line.push('…');
            break;
        }
        match letter {
            letter if letter.is_control() => line.extend(letter.escape_default()),
            letter => line.push(letter),
        }
    }
    line
}
