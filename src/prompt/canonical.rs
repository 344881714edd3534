//! Turns any JSON value into bytes that are equal when the values are, whatever their white space and escapes.
//!
//! Strings contribute their characters; containers and keys contribute delimiters. Two values may have the same
//! bytes in theory, like a hash collision: that misroutes a request and does no other harm.

use std::fmt;

use serde::de::{self, DeserializeSeed, MapAccess, SeqAccess, Visitor};

use super::Section;
use super::blocks::BlockHasher;

/// Ends a text. No UTF-8 text has this byte.
const TEXT_END: u8 = 0xff;
/// What an image, a sound or a file stands for, in bytes of text: about 800 tokens. Engines differ by
/// model and size; a data URL's length says nothing of it.
const MEDIA_BYTES: u32 = 3_200;

/// Feeds one value to a hasher.
pub(super) struct Canonical<'c> {
    hasher: &'c mut BlockHasher,
    place: Place,
}

/// What a string at some place of a value is.
#[derive(Clone, Copy)]
enum Place {
    /// Text, and so is all that is below: a tool may call its parameters as it likes.
    TextOnly,
    /// Text, though media may be below.
    Text,
    /// A whole conversation, or a prompt: the only one that may be token ids.
    Whole,
    /// A member of the list that a conversation or a prompt is.
    Member,
    /// An image's or sound's URL or data, or an object that has it beside what describes it.
    Media,
    /// A payload, by its key.
    Payload,
}

impl Place {
    fn below(self, key: &str) -> Self {
        match (self, key) {
            (Place::TextOnly, _) => Place::TextOnly,
            (Place::Media, "url" | "data") => Place::Payload,
            (_, "file_data" | "file_url") => Place::Payload,
            (_, "image_url" | "input_audio" | "audio_url" | "video_url") => Place::Media,
            _ => Place::Text,
        }
    }
}

impl<'c> Canonical<'c> {
    pub(super) fn new(hasher: &'c mut BlockHasher, section: Section) -> Self {
        let place = match section {
            Section::Conversation => Place::Whole,
            Section::Template | Section::Instructions | Section::Tools => Place::TextOnly,
        };
        Self { hasher, place }
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
        match self.place {
            Place::Media | Place::Payload => {
                self.hasher.feed_media(text.as_bytes(), MEDIA_BYTES);
            }
            Place::Whole | Place::Member | Place::Text | Place::TextOnly => {
                self.hasher.feed(text.as_bytes());
                self.hasher.feed(&[TEXT_END]);
            }
        }
        Ok(())
    }

    fn visit_u64<E>(self, number: u64) -> Result<(), E> {
        // A token id takes four bytes, which is about what a token of text takes.
        match u32::try_from(number) {
            Ok(small) => {
                self.hasher.feed(&small.to_le_bytes());
                if let Place::Member = self.place {
                    self.hasher.push_token_id(small);
                }
            }
            Err(_) => self.hasher.feed(&number.to_le_bytes()),
        }
        Ok(())
    }

    fn visit_i64<E>(self, number: i64) -> Result<(), E> {
        self.hasher.feed(&number.to_le_bytes());
        Ok(())
    }

    fn visit_f64<E>(self, number: f64) -> Result<(), E> {
        self.hasher.feed(&number.to_bits().to_le_bytes());
        Ok(())
    }

    fn visit_bool<E>(self, value: bool) -> Result<(), E> {
        self.hasher.feed(if value { b"t" } else { b"f" });
        Ok(())
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        let place = match self.place {
            Place::Whole => Place::Member,
            Place::Member => Place::Text,
            below => below,
        };
        let mut members = 0;
        while seq
            .next_element_seed(Canonical {
                hasher: self.hasher,
                place,
            })?
            .is_some()
        {
            members += 1;
        }
        if let Place::Whole = self.place {
            self.hasher.end_token_ids(members);
        }
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        self.hasher.feed(b"{");
        while let Some(place) = map.next_key_seed(KeyMark {
            hasher: self.hasher,
            above: self.place,
        })? {
            map.next_value_seed(Canonical {
                hasher: self.hasher,
                place,
            })?;
        }
        self.hasher.feed(b"}");
        Ok(())
    }
}

/// Feeds a key and tells what follows.
struct KeyMark<'c> {
    hasher: &'c mut BlockHasher,
    above: Place,
}

impl<'de> DeserializeSeed<'de> for KeyMark<'_> {
    type Value = Place;

    fn deserialize<D: de::Deserializer<'de>>(self, deserializer: D) -> Result<Place, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Visitor<'_> for KeyMark<'_> {
    type Value = Place;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a key")
    }

    fn visit_str<E>(self, name: &str) -> Result<Place, E> {
        self.hasher.feed(name.as_bytes());
        self.hasher.feed(b":");
        Ok(self.above.below(name))
    }
}
