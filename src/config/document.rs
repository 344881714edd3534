//! A YAML file -> a typed value, or every problem in it at once, each with path, line and column.
//!
//! Reading goes on after a problem: a value that does not fit is taken out, the default stands in
//! for it, and the rest is read again. It knows nothing of what the settings mean; whoever checks
//! that adds what it finds with [`Document::problem`]. Neither environment nor disk is touched
//! here, both come in as functions.

mod access;
mod emit;
mod key;
mod mismatch;
mod problems;
mod scalar;
mod tree;
mod typed;
mod yaml;

use std::cell::RefCell;
use std::{fmt, io};

use serde::de::DeserializeOwned;

pub use self::emit::to_yaml;
pub use self::problems::{Position, Problem, Problems};

use self::mismatch::{Kind, Mismatch, nearest};
use self::tree::Tree;
use self::typed::{Pass, UnknownKeys, Value};

/// Rounds of reading, one for each value taken out. Each removes a value of a finite tree, so
/// reading ends anyway; this keeps the end near.
const ROUNDS_MAX: usize = 4 * problems::PROBLEMS_MAX;

/// Where a document may look outside its text.
#[derive(Clone, Copy)]
pub struct Outside<'a> {
    /// An environment variable's value, for `${NAME}`.
    pub env: &'a dyn Fn(&str) -> Option<String>,
    /// A file's content, for secrets given as `file:/path`.
    pub read_file: &'a dyn Fn(&str) -> io::Result<String>,
}

impl fmt::Debug for Outside<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Outside")
    }
}

/// One configuration file on its way to becoming a value.
pub struct Document<'a> {
    outside: Outside<'a>,
    tree: Tree,
    problems: Problems,
}

/// Without the content, which may hold secrets.
impl fmt::Debug for Document<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Document")
            .field("problems", &self.problems)
            .finish_non_exhaustive()
    }
}

impl<'a> Document<'a> {
    /// Never fails: what is wrong with the text is kept with the problems found later.
    /// `file` is the name that messages begin with.
    pub fn parse(file: &str, text: &[u8], outside: Outside<'a>) -> Self {
        let mut problems = Problems::new(file);
        let tree = match decode(text) {
            Ok(text) => yaml::parse(text, outside.env, &mut problems),
            Err((at, message)) => {
                problems.push(at, String::new, message);
                Tree::default()
            }
        };
        Self {
            outside,
            tree,
            problems,
        }
    }

    /// Reads the document as a `T`. `None` when not even the defaults make one, or the text could
    /// not be parsed; a problem then says so. `Some` may be the result of values left out, and is
    /// good for looking for more problems; only [`Document::finish`] gives it free.
    ///
    /// Structs should carry `#[serde(default)]`, and not `deny_unknown_fields`.
    pub fn read<T: DeserializeOwned>(&mut self) -> Option<T> {
        let mut unknown = UnknownKeys::new();
        let value = self.read_in_rounds(&mut unknown);
        for (node, known) in unknown {
            let entry = self.tree.node(node);
            let name = match &entry.name {
                tree::Name::Key(key) => key.as_str(),
                tree::Name::Root | tree::Name::Index(_) => "",
            };
            let hint = nearest(name, known)
                .map_or_else(String::new, |near| format!("; did you mean `{near}`?"));
            let message = format!("unknown key `{name}`{hint}");
            self.problems
                .push(entry.key_at, || self.tree.path(node), message);
        }
        value
    }

    fn read_in_rounds<T: DeserializeOwned>(&mut self, unknown: &mut UnknownKeys) -> Option<T> {
        let read_file = self.outside.read_file;
        for _ in 0..ROUNDS_MAX {
            if self.tree.is_empty() || self.tree.is_removed(Tree::ROOT) {
                return None;
            }
            let pass = Pass {
                tree: &self.tree,
                read_secret: &|path| read_secret(path, read_file),
                unknown: RefCell::new(std::mem::take(unknown)),
            };
            let read = T::deserialize(Value {
                pass: &pass,
                node: Tree::ROOT,
            });
            *unknown = pass.unknown.into_inner();
            match read {
                Ok(value) => return Some(value),
                Err(mismatch) => self.take_out(&mismatch)?,
            }
        }
        None
    }

    /// Reports the value that does not fit and removes it. `None` when enough was reported.
    fn take_out(&mut self, mismatch: &Mismatch) -> Option<()> {
        let node = mismatch.node.unwrap_or(Tree::ROOT);
        if !self.follows(mismatch) {
            let entry = self.tree.node(node);
            let message = mismatch.message(entry.written.as_deref());
            self.problems
                .push(entry.at, || self.tree.path(node), message);
        }
        self.tree.remove(node);
        (!self.problems.is_full()).then_some(())
    }

    /// Whether the mismatch only says again that something inside the value was removed.
    fn follows(&self, mismatch: &Mismatch) -> bool {
        let node = mismatch.node.unwrap_or(Tree::ROOT);
        match &mismatch.kind {
            Kind::Missing(field) => self
                .tree
                .child(node, field)
                .is_some_and(|child| self.tree.is_removed(child)),
            Kind::Length(_) | Kind::Custom(_) => self.tree.has_removed_child(node),
            Kind::Expected { .. } | Kind::Variant { .. } | Kind::Secret(_) => false,
        }
    }

    /// Adds what a check of the value from [`Document::read`] found, at the nearest place that the
    /// file has for `path`: the value itself, or else the innermost part that is there.
    ///
    /// Indices are those of the value read, in which list items with problems are left out. Nothing
    /// is added where a value was left out, as the check saw a default that the file does not ask
    /// for.
    pub fn problem(&mut self, path: &str, message: impl fmt::Display) {
        if self.tree.is_empty() {
            self.problems
                .push(Position::START, || path.to_owned(), message);
            return;
        }
        let found = self.tree.find(path);
        if found.removed || (found.rest.is_empty() && self.tree.has_removed_child(found.node)) {
            return;
        }
        let spell = || {
            let known = self.tree.path(found.node);
            match (known.is_empty(), found.rest.strip_prefix('.')) {
                (true, Some(rest)) => rest.to_owned(),
                (_, _) if found.rest.is_empty() => known,
                (false, None) if !found.rest.starts_with('[') => format!("{known}.{}", found.rest),
                _ => known + found.rest,
            }
        };
        self.problems
            .push(self.tree.node(found.node).at, spell, message);
    }

    /// The value, if there is nothing to complain of.
    pub fn finish<T>(mut self, value: Option<T>) -> Result<T, Problems> {
        match value {
            Some(value) if self.problems.is_empty() => Ok(value),
            _ => {
                self.problems.sort();
                Err(self.problems)
            }
        }
    }
}

fn decode(text: &[u8]) -> Result<&str, (Position, String)> {
    if text.len() > yaml::TEXT_BYTES_MAX {
        let message = format!("file is larger than {} bytes", yaml::TEXT_BYTES_MAX);
        return Err((Position::START, message));
    }
    std::str::from_utf8(text).map_err(|error| {
        let valid = String::from_utf8_lossy(&text[..error.valid_up_to()]);
        let last_line = valid.rsplit('\n').next().unwrap_or_default();
        let line = 1 + valid.matches('\n').count();
        let column = 1 + last_line.chars().count();
        (Position { line, column }, "file is not UTF-8".to_owned())
    })
}

fn read_secret(
    path: &str,
    read_file: &dyn Fn(&str) -> io::Result<String>,
) -> Result<String, String> {
    let content = read_file(path).map_err(|error| format!("cannot read `{path}`: {error}"))?;
    // Editors and `echo` end a file with a line break that is no part of the secret.
    let secret = content.strip_suffix('\n').unwrap_or(&content);
    let secret = secret.strip_suffix('\r').unwrap_or(secret);
    if secret.is_empty() {
        return Err(format!("`{path}` is empty"));
    }
    Ok(secret.to_owned())
}

#[cfg(test)]
mod tests;
