//! YAML events -> the tree. Never recursive over the text, so no file is deep enough to overflow
//! the stack; what a file may stretch (nesting, aliases, substitutions) has a limit here.
//!
//! Deliberately less than YAML: one document, string keys, no tags, no merge keys.

mod expand;

use std::collections::{HashMap, HashSet};

use granit_parser::{Event, Marker, Options, Parser, ScalarStyle, Span};

use super::problems::{Position, Problems};
use super::scalar::typed;
use super::tree::{Data, Name, Node, NodeId, Scalar, Tree};

/// Settings files are a few kilobytes; a megabyte is somebody's data.
pub(super) const TEXT_BYTES_MAX: usize = 1 << 20;

/// Far above any real file, and shallow enough for the recursive code that reads the tree.
pub(super) const DEPTH_MAX: usize = 64;

type Env<'a> = &'a dyn Fn(&str) -> Option<String>;

/// Reads the first document of `text`. An empty tree means that the rest of the file is unknown,
/// and a problem says why.
pub(super) fn parse(text: &str, env: Env<'_>, problems: &mut Problems) -> Tree {
    let mut builder = Builder {
        env,
        problems,
        tree: Tree::default(),
        open: Vec::new(),
        anchors: HashMap::new(),
        expanded_bytes: 0,
    };
    let mut options = Options::default();
    options.emit_unresolved_aliases = true;
    for event in Parser::new_from_str_with_options(text, options) {
        let step = match event {
            Ok((event, span)) => builder.on_event(event, span),
            Err(error) => {
                let at = error.marker();
                let before = at.byte_offset().and_then(|end| text.get(..end));
                let hint = if before.is_some_and(|before| before.ends_with('$')) {
                    // The brace of a variable opens a map there, to YAML.
                    " (`${…}` needs quotes between braces or brackets)"
                } else {
                    ""
                };
                let message = format!("{}{hint}", error.info());
                builder.problems.push(position(at), String::new, message);
                Err(Stop::Unreadable)
            }
        };
        match step {
            Ok(()) => {}
            Err(Stop::SecondDocument) => break,
            Err(Stop::Unreadable) => return Tree::default(),
        }
    }
    let mut tree = builder.tree;
    if tree.is_empty() {
        // Nothing but comments: a file that sets nothing.
        tree.push(Node {
            parent: Tree::ROOT,
            name: Name::Root,
            at: Position::START,
            key_at: Position::START,
            data: Data::Scalar(Scalar::Null),
            written: None,
        });
    }
    tree
}

enum Stop {
    /// The first one is complete; what follows is not looked at.
    SecondDocument,
    Unreadable,
}

struct Builder<'a> {
    env: Env<'a>,
    problems: &'a mut Problems,
    tree: Tree,
    open: Vec<Open>,
    /// Finished values only, so that no alias can lead into itself.
    anchors: HashMap<usize, NodeId>,
    expanded_bytes: usize,
}

/// A list or map whose end has not come yet.
struct Open {
    node: NodeId,
    anchor: usize,
    is_map: bool,
    key: Key,
    keys_seen: HashSet<String>,
}

/// What the map's next event is about.
enum Key {
    Expected,
    Known(String, Position),
    /// The key was refused; its value is read and then dropped.
    Refused,
}

impl Builder<'_> {
    fn on_event(&mut self, event: Event<'_>, span: Span) -> Result<(), Stop> {
        let at = position(&span.start);
        if event.tag().is_some() {
            let message = "tags (`!...`) are not supported; quotes make a string";
            self.complain(at, message);
        }
        match event {
            Event::DocumentStart(..) if !self.tree.is_empty() => {
                let message = "a second document starts here; there can be only one";
                self.problems.push(at, String::new, message);
                return Err(Stop::SecondDocument);
            }
            Event::Scalar(text, style, anchor, _) => {
                let is_plain = style == ScalarStyle::Plain;
                if self.expects_key() {
                    self.on_key(&text, is_plain, at);
                } else {
                    // Where a value is left out, the parser's position is that of the next token.
                    let is_absent = span.start.index() == span.end.index();
                    let at = if is_absent { self.key_at(at) } else { at };
                    let node = self.attach(at);
                    self.fill_scalar(node, &text, is_plain)?;
                    self.finish(node, anchor);
                }
            }
            Event::SequenceStart(_, anchor, _) => self.open(at, anchor, false)?,
            Event::MappingStart(_, anchor, _) => self.open(at, anchor, true)?,
            Event::SequenceEnd | Event::MappingEnd => {
                if let Some(open) = self.open.pop() {
                    self.finish(open.node, open.anchor);
                }
            }
            Event::Alias(anchor) => self.on_alias(anchor, at)?,
            Event::UnresolvedAlias(name) => {
                let node = self.attach(at);
                self.refuse(node, format!("no anchor `&{name}` comes before this alias"));
                self.finish(node, 0);
            }
            // Starts and ends of stream and document.
            _ => {}
        }
        Ok(())
    }

    fn expects_key(&self) -> bool {
        self.open
            .last()
            .is_some_and(|open| open.is_map && matches!(open.key, Key::Expected))
    }

    fn on_key(&mut self, text: &str, is_plain: bool, at: Position) {
        let Some(open) = self.open.last_mut() else {
            return;
        };
        let is_text = !is_plain || matches!(typed(text), Ok(Scalar::Text(_)));
        let message = if !is_text {
            format!("key `{text}` is not a string; put it in quotes")
        } else if is_plain && text == "<<" {
            "merge keys (`<<`) are not supported".to_owned()
        } else if open.keys_seen.insert(text.to_owned()) {
            open.key = Key::Known(text.to_owned(), at);
            return;
        } else {
            format!("key `{text}` is given twice")
        };
        open.key = Key::Refused;
        self.complain(at, message);
    }

    /// A problem with what is being read inside the innermost open list or map.
    fn complain(&mut self, at: Position, message: impl std::fmt::Display) {
        let node = self.open.last().map_or(Tree::ROOT, |open| open.node);
        let tree = &self.tree;
        self.problems.push(at, || tree.path(node), message);
    }

    fn refuse(&mut self, node: NodeId, message: impl std::fmt::Display) {
        let tree = &self.tree;
        self.problems
            .push(tree.node(node).at, || tree.path(node), message);
        self.tree.remove(node);
    }

    fn key_at(&self, at: Position) -> Position {
        match self.open.last() {
            Some(Open {
                key: Key::Known(_, key_at),
                ..
            }) => *key_at,
            _ => at,
        }
    }

    /// Makes a node for the value that begins at `at`; until it is filled it counts as removed.
    fn attach(&mut self, at: Position) -> NodeId {
        let id = self.tree.len();
        let key_at = self.key_at(at);
        let (parent, name, linked) = match self.open.last_mut() {
            None => (Tree::ROOT, Name::Root, true),
            Some(open) if !open.is_map => (
                open.node,
                Name::Index(self.tree.children(open.node).len()),
                true,
            ),
            Some(open) => match std::mem::replace(&mut open.key, Key::Expected) {
                Key::Known(key, _) => (open.node, Name::Key(key), true),
                Key::Refused => (open.node, Name::Key("?".to_owned()), false),
                Key::Expected => {
                    open.key = Key::Refused;
                    let node = open.node;
                    self.complain(at, "keys must be strings");
                    (node, Name::Key("?".to_owned()), false)
                }
            },
        };
        let is_root = matches!(name, Name::Root);
        self.tree.push(Node {
            parent,
            name,
            at,
            key_at,
            data: Data::Removed,
            written: None,
        });
        if linked && !is_root {
            self.tree.link(parent, id);
        }
        id
    }

    fn open(&mut self, at: Position, anchor: usize, is_map: bool) -> Result<(), Stop> {
        if self.open.len() == DEPTH_MAX {
            self.complain(at, format!("nested more than {DEPTH_MAX} levels deep"));
            return Err(Stop::Unreadable);
        }
        let node = self.attach(at);
        self.tree.node_mut(node).data = if is_map {
            Data::Map(Vec::new())
        } else {
            Data::List(Vec::new())
        };
        let keys_seen = HashSet::new();
        self.open.push(Open {
            node,
            anchor,
            is_map,
            key: Key::Expected,
            keys_seen,
        });
        Ok(())
    }

    fn finish(&mut self, node: NodeId, anchor: usize) {
        if anchor != 0 {
            self.anchors.insert(anchor, node);
        }
    }
}

/// The parser counts columns from zero.
fn position(marker: &Marker) -> Position {
    Position {
        line: marker.line(),
        column: marker.col() + 1,
    }
}
