//! Any JSON value -> bytes that are equal when the values are, whatever their white space and escapes.
//!
//! Texts contribute their characters, containers and keys a few marks. Two values may share their
//! bytes in theory (a hash may collide too): that misroutes a request and does no other harm.

use std::fmt;

use serde::de;
use serde::de::DeserializeSeed;
use serde::de::MapAccess;
use serde::de::SeqAccess;
use serde::de::Visitor;

use super::blocks::Cutter;

/// Ends a text. No UTF-8 text has this byte.
const TEXT_END: u8 = 0xff;
/// What an image, a sound or a file stands for, in bytes of text: about 800 tokens. Engines differ by
/// model and size; a data URL's length says nothing of it.
const MEDIA_BYTES: u32 = 3_200;

/// Feeds one value to a cutter.
pub(super) struct Canonical<'c> {
    cutter: &'c mut Cutter,
    is_media: bool,
}

impl<'c> Canonical<'c> {
    pub(super) fn new(cutter: &'c mut Cutter) -> Self {
        Self {
            cutter,
            is_media: false,
        }
    }
}

impl<'de> DeserializeSeed<'de> for Canonical<'_> {
    type Value = ();

    fn deserialize<D: de::Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Canonical<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any value")
    }

    fn visit_str<E>(self, text: &str) -> Result<(), E> {
        if self.is_media {
            self.cutter.feed_media(text.as_bytes(), MEDIA_BYTES);
        } else {
            self.cutter.feed(text.as_bytes());
            self.cutter.feed(&[TEXT_END]);
        }
        Ok(())
    }

    fn visit_u64<E>(self, number: u64) -> Result<(), E> {
        // A token id takes four bytes, which is about what a token of text takes.
        match u32::try_from(number) {
            Ok(small) => self.cutter.feed(&small.to_le_bytes()),
            Err(_) => self.cutter.feed(&number.to_le_bytes()),
        }
        Ok(())
    }

    fn visit_i64<E>(self, number: i64) -> Result<(), E> {
        self.cutter.feed(&number.to_le_bytes());
        Ok(())
    }

    fn visit_f64<E>(self, number: f64) -> Result<(), E> {
        self.cutter.feed(&number.to_bits().to_le_bytes());
        Ok(())
    }

    fn visit_bool<E>(self, value: bool) -> Result<(), E> {
        self.cutter.feed(if value { b"t" } else { b"f" });
        Ok(())
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        while seq
            .next_element_seed(Canonical {
                cutter: self.cutter,
                is_media: self.is_media,
            })?
            .is_some()
        {}
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        self.cutter.feed(b"{");
        while let Some(is_media) = map.next_key_seed(KeyMark {
            cutter: self.cutter,
        })? {
            map.next_value_seed(Canonical {
                cutter: self.cutter,
                is_media: self.is_media || is_media,
            })?;
        }
        self.cutter.feed(b"}");
        Ok(())
    }
}

/// Feeds a key and tells whether what follows is media.
struct KeyMark<'c> {
    cutter: &'c mut Cutter,
}

impl<'de> DeserializeSeed<'de> for KeyMark<'_> {
    type Value = bool;

    fn deserialize<D: de::Deserializer<'de>>(self, deserializer: D) -> Result<bool, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Visitor<'_> for KeyMark<'_> {
    type Value = bool;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a key")
    }

    fn visit_str<E>(self, name: &str) -> Result<bool, E> {
        self.cutter.feed(name.as_bytes());
        self.cutter.feed(b":");
        Ok(matches!(
            name,
            "image_url"
                | "input_audio"
                | "audio_url"
                | "video_url"
                | "file"
                | "file_data"
                | "file_url"
        ))
    }
}
