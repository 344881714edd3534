//! The document as a tree with positions. Nodes lie in one list and know their parent, so a number
//! names a value and its path is spelled only for a message.

use std::fmt::Write;

use super::problems::Position;

pub(super) type NodeId = usize;

#[derive(Debug, Clone, PartialEq)]
pub(super) enum Scalar {
    Null,
    Bool(bool),
    Int(i64),
    /// Only above `i64::MAX`.
    Uint(u64),
    Float(f64),
    Text(String),
}

#[derive(Debug, Clone)]
pub(super) enum Data {
    Scalar(Scalar),
    /// An unquoted `${NAME}`: typed again by what it stands for, yet still a string where a string
    /// is asked for, so that an API key which happens to be all digits remains one.
    Substituted {
        scalar: Scalar,
        text: String,
    },
    List(Vec<NodeId>),
    Map(Vec<NodeId>),
    /// A value that a problem was reported for. Readers see a file without it; its siblings keep
    /// their numbers.
    Removed,
}

#[derive(Debug, Clone)]
pub(super) enum Name {
    Root,
    Key(String),
    Index(usize),
}

#[derive(Debug, Clone)]
pub(super) struct Node {
    pub(super) parent: NodeId,
    pub(super) name: Name,
    /// Where the value begins, or its key if it has no text of its own.
    pub(super) at: Position,
    pub(super) key_at: Position,
    pub(super) data: Data,
    /// The text as written, where substitution changed it: messages show this and not the
    /// environment.
    pub(super) written: Option<String>,
}

#[derive(Debug, Default)]
pub(super) struct Tree {
    nodes: Vec<Node>,
}

/// How far a path leads into the tree.
pub(super) struct Found<'p> {
    pub(super) node: NodeId,
    /// What is left of the path below that node.
    pub(super) rest: &'p str,
    /// The path led through a value that was removed.
    pub(super) removed: bool,
}

impl Tree {
    pub(super) const ROOT: NodeId = 0;

    pub(super) fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }

    pub(super) fn node(&self, id: NodeId) -> &Node {
        &self.nodes[id]
    }

    pub(super) fn node_mut(&mut self, id: NodeId) -> &mut Node {
        &mut self.nodes[id]
    }

    pub(super) fn push(&mut self, node: Node) -> NodeId {
        self.nodes.push(node);
        self.nodes.len() - 1
    }

    pub(super) fn len(&self) -> usize {
        self.nodes.len()
    }

    /// Puts `child` last in the list or map `parent`.
    pub(super) fn link(&mut self, parent: NodeId, child: NodeId) {
        if let Data::List(children) | Data::Map(children) = &mut self.nodes[parent].data {
            children.push(child);
        }
    }

    pub(super) fn remove(&mut self, id: NodeId) {
        self.nodes[id].data = Data::Removed;
    }

    pub(super) fn is_removed(&self, id: NodeId) -> bool {
        matches!(self.nodes[id].data, Data::Removed)
    }

    pub(super) fn children(&self, id: NodeId) -> &[NodeId] {
        match &self.nodes[id].data {
            Data::List(children) | Data::Map(children) => children,
            Data::Scalar(_) | Data::Substituted { .. } | Data::Removed => &[],
        }
    }

    pub(super) fn has_removed_child(&self, id: NodeId) -> bool {
        self.children(id)
            .iter()
            .any(|child| self.is_removed(*child))
    }

    pub(super) fn child(&self, id: NodeId, name: &str) -> Option<NodeId> {
        let named =
            |child: &NodeId| matches!(&self.nodes[*child].name, Name::Key(key) if key == name);
        self.children(id).iter().copied().find(named)
    }

    /// `fleet.workers[2].url`; a key that would not read back is written `labels["a.b"]`.
    pub(super) fn path(&self, id: NodeId) -> String {
        let mut names = Vec::new();
        let mut next = id;
        while let Some(node) = self.nodes.get(next) {
            match &node.name {
                Name::Root => break,
                name => names.push(name),
            }
            next = node.parent;
        }
        let mut path = String::new();
        for name in names.iter().rev() {
            push_name(&mut path, name);
        }
        path
    }

    /// Follows a path as the *reader* of the tree counts: removed list items have no number.
    pub(super) fn find<'p>(&self, path: &'p str) -> Found<'p> {
        let mut node = Self::ROOT;
        let mut rest = path;
        while let Some((step, after)) = next_step(rest) {
            let child = match step {
                Step::Key(key) => self.child(node, &key),
                Step::Index(index) => {
                    let mut kept = self
                        .children(node)
                        .iter()
                        .copied()
                        .filter(|child| !self.is_removed(*child));
                    kept.nth(index)
                }
            };
            let Some(child) = child else { break };
            (node, rest) = (child, after);
            if self.is_removed(child) {
                return Found {
                    node,
                    rest,
                    removed: true,
                };
            }
        }
        Found {
            node,
            rest,
            removed: false,
        }
    }
}

enum Step {
    Key(String),
    Index(usize),
}

fn push_name(path: &mut String, name: &Name) {
    // Writing to a String cannot fail.
    let _ = match name {
        Name::Root => Ok(()),
        Name::Index(index) => write!(path, "[{index}]"),
        Name::Key(key) if is_simple(key) && path.is_empty() => write!(path, "{key}"),
        Name::Key(key) if is_simple(key) => write!(path, ".{key}"),
        Name::Key(key) => write!(path, "[{key:?}]"),
    };
}

fn is_simple(key: &str) -> bool {
    let simple = |letter: char| letter.is_alphanumeric() || matches!(letter, '_' | '-' | '/');
    !key.is_empty() && key.chars().all(simple)
}

/// The first step of a path and what follows it.
fn next_step(path: &str) -> Option<(Step, &str)> {
    let path = path.strip_prefix('.').unwrap_or(path);
    if let Some(quoted) = path.strip_prefix("[\"") {
        let mut escaped = false;
        for (at, letter) in quoted.char_indices() {
            match letter {
                '"' if !escaped => {
                    // The quoting is that of Rust's Debug; JSON reads the escapes that matter in
                    // keys.
                    let key = serde_json::from_str(&path[1..at + 3]).ok()?;
                    let after = quoted[at + 1..].strip_prefix(']')?;
                    return Some((Step::Key(key), after));
                }
                '\\' => escaped = !escaped,
                _ => escaped = false,
            }
        }
        return None;
    }
    if let Some(indexed) = path.strip_prefix('[') {
        let (index, after) = indexed.split_once(']')?;
        return Some((Step::Index(index.parse().ok()?), after));
    }
    let end = path.find(['.', '[']).unwrap_or(path.len());
    let (key, after) = path.split_at(end);
    (!key.is_empty()).then(|| (Step::Key(key.to_owned()), after))
}
