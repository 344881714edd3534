//! Values that become more than what is written: variables and aliases, within one limit.

use super::{Builder, DEPTH_MAX, Stop};
use crate::config::document::problems::Position;
use crate::config::document::scalar::{substitute, typed};
use crate::config::document::tree::{Data, Name, Node, NodeId, Scalar};

/// What aliases and substitutions may add to the text in all; a short file can ask for gigabytes.
const EXPANSION_BYTES_MAX: usize = 1 << 20;

/// What a copied node counts for besides its text.
const NODE_BYTES: usize = 32;

impl Builder<'_> {
    pub(super) fn fill_scalar(
        &mut self,
        node: NodeId,
        text: &str,
        is_plain: bool,
    ) -> Result<(), Stop> {
        let done = match substitute(text, self.env) {
            Ok(done) => done,
            Err(messages) => {
                for message in messages {
                    self.refuse(node, message);
                }
                return Ok(());
            }
        };
        if done.changed {
            self.expand(node, done.text.len())?;
        }
        // Part of a text stays text: `port-${N}` cannot become a number by what N is.
        let is_typed = is_plain && (done.alone || !done.changed);
        let scalar = match typed(&done.text) {
            Ok(scalar) if is_typed => scalar,
            // Of a substituted value only the name is told.
            Err(_) if is_typed && done.changed => {
                self.refuse(node, format!("`{text}` stands for no number in range"));
                return Ok(());
            }
            Err(message) if is_typed => {
                self.refuse(node, message);
                return Ok(());
            }
            _ => Scalar::Text(done.text.clone()),
        };
        let entry = self.tree.node_mut(node);
        entry.written = done.changed.then(|| text.to_owned());
        entry.data = match scalar {
            Scalar::Text(text) => Data::Scalar(Scalar::Text(text)),
            scalar if done.changed => Data::Substituted {
                scalar,
                text: done.text,
            },
            scalar => Data::Scalar(scalar),
        };
        Ok(())
    }

    fn expand(&mut self, node: NodeId, bytes: usize) -> Result<(), Stop> {
        self.expanded_bytes = self.expanded_bytes.saturating_add(bytes);
        if self.expanded_bytes > EXPANSION_BYTES_MAX {
            let message = "aliases and substitutions make the file too large";
            self.refuse(
                node,
                format!("{message} (over {EXPANSION_BYTES_MAX} bytes)"),
            );
            return Err(Stop::Unreadable);
        }
        Ok(())
    }

    pub(super) fn on_alias(&mut self, anchor: usize, at: Position) -> Result<(), Stop> {
        let node = self.attach(at);
        let Some(&original) = self.anchors.get(&anchor) else {
            self.refuse(node, "this alias stands inside the value that it refers to");
            return Ok(());
        };
        let depth = self.open.len();
        self.copy(original, node, depth)
    }

    /// Fills `node` with what `original` holds. Its children keep their own positions: that is
    /// where a wrong value has to be put right.
    fn copy(&mut self, original: NodeId, node: NodeId, depth: usize) -> Result<(), Stop> {
        let Node { data, written, .. } = self.tree.node(original).clone();
        let mut bytes = NODE_BYTES + written.as_ref().map_or(0, String::len);
        bytes += match &data {
            Data::Scalar(Scalar::Text(text)) | Data::Substituted { text, .. } => text.len(),
            _ => 0,
        };
        self.expand(node, bytes)?;
        let (children, is_map) = match data {
            Data::List(children) => (children, false),
            Data::Map(children) => (children, true),
            data => {
                let entry = self.tree.node_mut(node);
                (entry.data, entry.written) = (data, written);
                return Ok(());
            }
        };
        if depth == DEPTH_MAX {
            self.refuse(node, format!("nested more than {DEPTH_MAX} levels deep"));
            return Err(Stop::Unreadable);
        }
        self.tree.node_mut(node).data = if is_map {
            Data::Map(Vec::new())
        } else {
            Data::List(Vec::new())
        };
        for child in children {
            let Node {
                name, at, key_at, ..
            } = self.tree.node(child).clone();
            if let Name::Key(key) = &name {
                self.expand(node, key.len())?;
            }
            let data = Data::Removed;
            let copied = self.tree.push(Node {
                parent: node,
                name,
                at,
                key_at,
                data,
                written: None,
            });
            self.tree.link(node, copied);
            self.copy(child, copied, depth + 1)?;
        }
        Ok(())
    }
}
