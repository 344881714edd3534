//! How serde walks through the tree's lists, maps and enums: past what is removed, and noting the
//! keys that nobody knows.

use serde::de::{
    DeserializeSeed, Deserializer, EnumAccess, Error, MapAccess, SeqAccess, VariantAccess, Visitor,
};

use super::key::KeyDeserializer;
use super::mismatch::Mismatch;
use super::typed::Value;

/// The values of a list or map that are not removed.
pub(super) struct Children<'a> {
    pub(super) of: Value<'a>,
    pub(super) next: usize,
    /// What the struct that reads this map knows; `None` where every key is welcome.
    pub(super) fields: Option<&'static [&'static str]>,
}

impl<'a> Children<'a> {
    fn peek(&mut self) -> Option<Value<'a>> {
        let pass = self.of.pass;
        loop {
            let child = self
                .of
                .child(*pass.tree.children(self.of.node).get(self.next)?);
            let is_unknown = self
                .fields
                .is_some_and(|fields| !fields.contains(&child.key()));
            if is_unknown {
                pass.unknown
                    .borrow_mut()
                    .insert(child.node, self.fields.unwrap_or_default());
            }
            if !is_unknown && !pass.tree.is_removed(child.node) {
                return Some(child);
            }
            self.next += 1;
        }
    }
}

impl<'de> SeqAccess<'de> for Children<'de> {
    type Error = Mismatch;

    fn next_element_seed<T: DeserializeSeed<'de>>(
        &mut self,
        seed: T,
    ) -> Result<Option<T::Value>, Mismatch> {
        let Some(child) = self.peek() else {
            return Ok(None);
        };
        self.next += 1;
        seed.deserialize(child)
            .map(Some)
            .map_err(|error| error.at(child.node))
    }
}

impl<'de> MapAccess<'de> for Children<'de> {
    type Error = Mismatch;

    fn next_key_seed<K: DeserializeSeed<'de>>(
        &mut self,
        seed: K,
    ) -> Result<Option<K::Value>, Mismatch> {
        let Some(child) = self.peek() else {
            return Ok(None);
        };
        let key = KeyDeserializer(child.key());
        seed.deserialize(key)
            .map(Some)
            .map_err(|error| error.at(child.node))
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, Mismatch> {
        let Some(child) = self.peek() else {
            return Err(Error::custom("a value was asked for after the last key"));
        };
        self.next += 1;
        seed.deserialize(child)
            .map_err(|error| error.at(child.node))
    }
}

/// `variant: content`, the one entry of a map.
pub(super) struct Variant<'a>(pub(super) Value<'a>);

impl<'de> EnumAccess<'de> for Variant<'de> {
    type Error = Mismatch;
    type Variant = Self;

    fn variant_seed<V: DeserializeSeed<'de>>(self, seed: V) -> Result<(V::Value, Self), Mismatch> {
        let name = seed.deserialize(KeyDeserializer(self.0.key()));
        name.map(|name| (name, Self(self.0)))
            .map_err(|error| error.at(self.0.node))
    }
}

impl<'de> VariantAccess<'de> for Variant<'de> {
    type Error = Mismatch;

    fn unit_variant(self) -> Result<(), Mismatch> {
        if self.0.is_null() {
            return Ok(());
        }
        let message = format_args!("`{}` takes no settings", self.0.key());
        Err(Mismatch::custom(message).at(self.0.node))
    }

    fn newtype_variant_seed<T: DeserializeSeed<'de>>(self, seed: T) -> Result<T::Value, Mismatch> {
        seed.deserialize(self.0)
            .map_err(|error| error.at(self.0.node))
    }

    fn tuple_variant<V: Visitor<'de>>(
        self,
        _length: usize,
        visitor: V,
    ) -> Result<V::Value, Mismatch> {
        self.0
            .deserialize_seq(visitor)
            .map_err(|error| error.at(self.0.node))
    }

    fn struct_variant<V: Visitor<'de>>(
        self,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Mismatch> {
        let read = self.0.deserialize_struct("", fields, visitor);
        read.map_err(|error| error.at(self.0.node))
    }
}
