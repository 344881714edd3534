//! What is wrong with a configuration: each problem is one line with file, line, column and path.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;

/// Problems listed; the rest is counted.
const MAX_PROBLEMS: usize = 100;

/// A longer message contains a value that was pasted; its start is enough.
const MAX_MESSAGE_CHARS: usize = 400;

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
    /// `None` for what is not in the file: a command line flag, or the file as a whole.
    pub at: Option<Position>,
    /// Such as `workers[2].url`; empty for the whole document.
    pub path: String,
    pub message: String,
}

/// All problems of one file. Printed for the operator as it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problems {
    file: String,
    list: Vec<Problem>,
    /// How many problems there are beyond `MAX_PROBLEMS`; they are only counted.
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

    /// A problem of the file as a whole.
    pub fn one(file: &str, message: &str) -> Self {
        let mut problems = Self::new(file);
        problems.push(None, "", message);
        problems
    }

    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Whether the next problem is only counted.
    pub(super) fn is_full(&self) -> bool {
        self.list.len() == MAX_PROBLEMS
    }

    pub fn file(&self) -> &str {
        &self.file
    }

    /// In the order of their positions once the document is finished.
    pub fn iter(&self) -> impl Iterator<Item = &Problem> {
        self.list.iter()
    }

    pub(super) fn push(
        &mut self,
        at: impl Into<Option<Position>>,
        path: &str,
        message: impl fmt::Display,
    ) {
        if self.is_full() {
            self.more += 1;
            return;
        }
        let path = one_line(path);
        let message = one_line(&message.to_string());
        let at = at.into();
        self.list.push(Problem { at, path, message });
    }

    /// Stable, so that two problems of one place keep the order in which they were found.
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
            // Without a file there are flags only, which `path` names.
            match problem.at {
                _ if self.file.is_empty() => {}
                Some(Position { line, column }) => write!(f, "{}:{line}:{column}: ", self.file)?,
                None if problem.path.is_empty() => write!(f, "{}: ", self.file)?,
                None => {}
            }
            if !problem.path.is_empty() {
                write!(f, "{}: ", problem.path)?;
            }
            f.write_str(&problem.message)?;
        }
        if self.more > 0 {
            let separator = if self.file.is_empty() { "" } else { ": " };
            let plural = if self.more == 1 { "" } else { "s" };
            write!(
                f,
                "\n{}{separator}{} more problem{plural}",
                self.file, self.more
            )?;
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
        if count == MAX_MESSAGE_CHARS {
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

/// Where each value of a file is, and which of them were refused.
#[derive(Debug, Default)]
pub(super) struct Places {
    positions: HashMap<String, Position>,
    failed: HashSet<String>,
    /// For each list the indices in the file of the items that were not refused.
    kept: HashMap<String, Vec<usize>>,
    /// Keys that are read and not used.
    warnings: Vec<(Position, String)>,
    /// Values whose files are missing and may be, by path: nothing more is reported of them.
    absent: BTreeMap<String, (Position, String)>,
}

impl Places {
    pub(super) fn add(&mut self, path: &str, at: Position) {
        self.positions.insert(path.to_owned(), at);
    }

    /// Whether the file has a value at this path.
    pub(super) fn has(&self, path: &str) -> bool {
        self.positions.contains_key(path)
    }

    pub(super) fn warn(&mut self, at: Position, path: &str, message: impl fmt::Display) {
        if self.warnings.len() < MAX_PROBLEMS {
            self.warnings.push((at, format!("{path}: {message}")));
        }
    }

    /// One line each, in the order of the file.
    pub(super) fn warnings(&self, file: &str) -> Vec<String> {
        lines(file, self.warnings.iter())
    }

    /// The value at `path` names a file that is missing.
    pub(super) fn absent(&mut self, at: Position, path: &str, message: impl fmt::Display) {
        let text = one_line(&format!("{path}: {message}"));
        self.absent.insert(path.to_owned(), (at, text));
    }

    /// One line for each missing file, in the order of the configuration.
    pub(super) fn missing_files(&self, file: &str) -> Vec<String> {
        let mut missing: Vec<_> = self.absent.values().collect();
        missing.sort_by_key(|(at, _)| *at);
        lines(file, missing.into_iter())
    }

    pub(super) fn fail(&mut self, path: &str) {
        self.failed.insert(path.to_owned());
    }

    pub(super) fn keep(&mut self, list: &str, kept: Vec<usize>) {
        self.kept.insert(list.to_owned(), kept);
    }

    /// A path of the checked value, whose lists lack refused items, as a path of the file.
    pub(super) fn in_file(&self, path: &str) -> String {
        let mut found = String::new();
        for (number, part) in path.split('[').enumerate() {
            if number == 0 {
                found.push_str(part);
                continue;
            }
            let (index, rest) = part.split_once(']').unwrap_or((part, ""));
            let kept = self.kept.get(&found);
            let at = index.parse().ok().and_then(|index: usize| kept?.get(index));
            match at {
                Some(at) => found += &format!("[{at}]{rest}"),
                None => found += &format!("[{index}]{rest}"),
            }
        }
        found
    }

    /// The position of a path, or of the innermost part of it that the file has. `None` if the value, a
    /// part of it or a value around it was refused, or the file that it names is missing.
    pub(super) fn find(&self, path: &str) -> Option<Position> {
        let within = |inner: &str, outer: &str| match inner.strip_prefix(outer) {
            Some(rest) => rest.is_empty() || outer.is_empty() || rest.starts_with(['.', '[']),
            None => false,
        };
        let is_refused = |failed: &String| within(path, failed) || within(failed, path);
        let is_absent = self.absent.keys().any(|absent| within(path, absent));
        if is_absent || self.failed.iter().any(is_refused) {
            return None;
        }
        let mut known = path;
        while !known.is_empty() {
            if let Some(at) = self.positions.get(known) {
                return Some(*at);
            }
            known = &known[..known.rfind(['.', '[']).unwrap_or(0)];
        }
        Some(Position::START)
    }
}

fn lines<'t>(file: &str, texts: impl Iterator<Item = &'t (Position, String)>) -> Vec<String> {
    texts
        .map(|(Position { line, column }, text)| format!("{file}:{line}:{column}: {text}"))
        .collect()
}
