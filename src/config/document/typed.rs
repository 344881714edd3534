//! The tree -> a type, once: stops at the first value that does not fit and says which it was.
//!
//! A deserialiser of our own, since serde hands it the known fields of each struct: unknown keys
//! come out with names to compare them to, all in one pass. Keys below internally tagged, untagged
//! and flattened types pass through serde's buffer, where nobody hears of unknown ones.

use std::cell::RefCell;
use std::collections::BTreeMap;

use serde::de::value::{BorrowedStrDeserializer, StringDeserializer};
use serde::de::{Deserializer, Error, IntoDeserializer, Unexpected, Visitor};
use serde::forward_to_deserialize_any;

use super::access::{Children, Variant};
use super::mismatch::Mismatch;
use super::tree::{Data, Name, NodeId, Scalar, Tree};
use crate::secret::SECRET;

/// Keys that no struct asked for, with the names it would have known.
pub(super) type UnknownKeys = BTreeMap<NodeId, &'static [&'static str]>;

/// What stays the same for all values of one pass.
pub(super) struct Pass<'a> {
    pub(super) tree: &'a Tree,
    /// The text of a `file:` secret, or why there is none.
    pub(super) read_secret: &'a dyn Fn(&str) -> Result<String, String>,
    pub(super) unknown: RefCell<UnknownKeys>,
}

#[derive(Clone, Copy)]
pub(super) struct Value<'a> {
    pub(super) pass: &'a Pass<'a>,
    pub(super) node: NodeId,
}

impl<'a> Value<'a> {
    fn data(self) -> &'a Data {
        &self.pass.tree.node(self.node).data
    }

    pub(super) fn child(self, node: NodeId) -> Self {
        Self { node, ..self }
    }

    pub(super) fn key(self) -> &'a str {
        match &self.pass.tree.node(self.node).name {
            Name::Key(key) => key,
            Name::Root | Name::Index(_) => "",
        }
    }

    fn children(self) -> Children<'a> {
        Children {
            of: self,
            next: 0,
            fields: None,
        }
    }

    /// A variable that is set to nothing sets nothing.
    pub(super) fn is_null(self) -> bool {
        match self.data() {
            Data::Scalar(scalar) => *scalar == Scalar::Null,
            Data::Substituted { text, .. } => text.is_empty(),
            Data::List(_) | Data::Map(_) | Data::Removed => false,
        }
    }

    /// A section whose lines are all commented out is an empty section.
    fn is_blank(self) -> bool {
        matches!(self.data(), Data::Scalar(Scalar::Null))
    }

    fn text(self) -> Option<&'a str> {
        match self.data() {
            Data::Scalar(Scalar::Text(text)) | Data::Substituted { text, .. } => Some(text),
            Data::Scalar(_) | Data::List(_) | Data::Map(_) | Data::Removed => None,
        }
    }

    fn read_secret(self) -> Result<String, Mismatch> {
        let Some(text) = self.text() else {
            // Perhaps a secret of digits without quotes, so the value is not told.
            let message = "expected a string; put the secret in quotes".to_owned();
            return Err(Mismatch::secret(message).at(self.node));
        };
        match text.strip_prefix("file:") {
            Some(path) => {
                (self.pass.read_secret)(path).map_err(|why| Mismatch::secret(why).at(self.node))
            }
            None => Ok(text.to_owned()),
        }
    }
}

impl<'de> Deserializer<'de> for Value<'de> {
    type Error = Mismatch;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Mismatch> {
        let scalar = match self.data() {
            Data::Scalar(scalar) | Data::Substituted { scalar, .. } => scalar,
            Data::List(_) => return visitor.visit_seq(self.children()),
            Data::Map(_) => return visitor.visit_map(self.children()),
            // Never asked for: reading stops at a removed root, and skips removed children.
            Data::Removed => &Scalar::Null,
        };
        match scalar {
            Scalar::Null => visitor.visit_unit(),
            Scalar::Bool(value) => visitor.visit_bool(*value),
            Scalar::Int(value) => match u64::try_from(*value) {
                Ok(value) => visitor.visit_u64(value),
                Err(_) => visitor.visit_i64(*value),
            },
            Scalar::Uint(value) => visitor.visit_u64(*value),
            Scalar::Float(value) => visitor.visit_f64(*value),
            Scalar::Text(text) => visitor.visit_borrowed_str(text),
        }
    }

    fn deserialize_str<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Mismatch> {
        match self.text() {
            Some(text) => visitor.visit_borrowed_str(text),
            None => self.deserialize_any(visitor),
        }
    }

    fn deserialize_string<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Mismatch> {
        self.deserialize_str(visitor)
    }

    fn deserialize_char<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Mismatch> {
        self.deserialize_str(visitor)
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Mismatch> {
        if self.is_null() {
            visitor.visit_none()
        } else {
            visitor.visit_some(self)
        }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        visitor: V,
    ) -> Result<V::Value, Mismatch> {
        if name == SECRET {
            let secret: StringDeserializer<Mismatch> = self.read_secret()?.into_deserializer();
            return visitor.visit_newtype_struct(secret);
        }
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Mismatch> {
        if self.is_blank() {
            return visitor.visit_seq(self.children());
        }
        self.deserialize_any(visitor)
    }

    fn deserialize_map<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Mismatch> {
        if self.is_blank() {
            return visitor.visit_map(self.children());
        }
        self.deserialize_any(visitor)
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Mismatch> {
        match self.data() {
            Data::Map(_) => visitor.visit_map(Children {
                fields: Some(fields),
                ..self.children()
            }),
            // serde would take a list as the fields in order, which no reader of a file expects.
            Data::List(_) => Err(Error::invalid_type(Unexpected::Seq, &"a map")),
            Data::Scalar(_) | Data::Substituted { .. } | Data::Removed => {
                self.deserialize_map(visitor)
            }
        }
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _name: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Mismatch> {
        if let Some(text) = self.text() {
            return visitor.visit_enum(BorrowedStrDeserializer::new(text));
        }
        let kept = |child: &NodeId| !self.pass.tree.is_removed(*child);
        let mut children = self
            .pass
            .tree
            .children(self.node)
            .iter()
            .copied()
            .filter(kept);
        match (self.data(), children.next(), children.next()) {
            (Data::Map(_), Some(only), None) => visitor.visit_enum(Variant(self.child(only))),
            _ => Err(Error::custom(format_args!(
                "expected {}",
                super::mismatch::one_of(variants)
            ))),
        }
    }

    fn deserialize_ignored_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Mismatch> {
        visitor.visit_unit()
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 bytes byte_buf unit unit_struct
        identifier
    }

    fn deserialize_tuple<V: Visitor<'de>>(
        self,
        _length: usize,
        visitor: V,
    ) -> Result<V::Value, Mismatch> {
        self.deserialize_seq(visitor)
    }

    fn deserialize_tuple_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        _length: usize,
        visitor: V,
    ) -> Result<V::Value, Mismatch> {
        self.deserialize_seq(visitor)
    }
}
