//! Turns a JSON value into canonical bytes: equal values give equal bytes, with any white space and escapes.
//!
//! Strings contribute their characters; containers and keys contribute delimiters. Different values can give the same
//! bytes, as with a hash collision. A request may then go to a worker without the prefix; nothing else goes wrong.

use std::fmt;

use serde::de::{self, DeserializeSeed, IgnoredAny, MapAccess, SeqAccess, Visitor};

use memchr::{memchr, memmem};

use super::blocks::BlockHasher;
use super::types::Section;
use crate::json_scan::{JsonString, Scan};

/// Follows every string. UTF-8 never contains this byte.
const STRING_END: u8 = 0xff;
/// Bytes of text that an image, a sound or a file counts as: about 800 tokens. The real number depends on the model
/// and the image size, and cannot be read from the length of a data URL.
const MEDIA_COUNTED_BYTES: u32 = 3_200;

/// Lists and objects inside each other that a parser takes below the body itself.
const NESTED_MAX: u32 = 126;

/// Feeds one JSON value to a hasher.
pub(super) struct Canonical<'c> {
    hasher: &'c mut BlockHasher,
    role: StringRole,
}

/// How a string at the current position of a value is treated. Inherited downwards through objects and lists.
#[derive(Clone, Copy)]
enum StringRole {
    /// Text, here and in everything below. Tools use it, since their parameters may have any name, also `image_url`.
    TextOnly,
    /// Documents: text, but for parts in the `content` of one that is to be ranked.
    Documents,
    /// Text. Objects below may contain media.
    Text,
    /// The whole conversation or prompt. Only a list at this level can be a prompt of token ids.
    Whole,
    /// A member of the list that is the conversation or prompt.
    Member,
    /// The URL or data of an image or sound, or an object that contains it together with options such as `detail`.
    Media,
    /// The URL or data itself, found by its key.
    Payload,
    /// Anthropic's `source` of an image: an object with the URL or data. A text of this name is text.
    Source,
    /// The `content` of a member of the conversation, or of what is to be ranked; a tool's `output`.
    Content,
    /// A part of such a content.
    Part,
    /// The name under which an engine keeps an image or a sound. vLLM makes a text of any value but `null`.
    MediaName,
    /// Neither the key nor its value is part of the prompt.
    Ignored,
}

impl StringRole {
    fn of_member(self, key: &str) -> Self {
        match (self, key) {
            // Clients move these marks from turn to turn.
            (_, "cache_control") => StringRole::Ignored,
            (StringRole::Documents, "content") => StringRole::Content,
            (StringRole::TextOnly | StringRole::Documents, _) => StringRole::TextOnly,
            (StringRole::Media | StringRole::Source, "url" | "data") => StringRole::Payload,
            (_, "source") => StringRole::Source,
            (_, "file_data" | "file_url") => StringRole::Payload,
            (_, "image_url" | "input_audio" | "audio_url" | "video_url") => StringRole::Media,
            (StringRole::Whole, "content") => StringRole::Content,
            (StringRole::Member, "content" | "output") => StringRole::Content,
            (StringRole::Part, "uuid") => StringRole::MediaName,
            _ => StringRole::Text,
        }
    }

    fn of_element(self) -> Self {
        match self {
            StringRole::Whole => StringRole::Member,
            StringRole::Member | StringRole::MediaName => StringRole::Text,
            StringRole::Content => StringRole::Part,
            role => role,
        }
    }
}

impl<'c> Canonical<'c> {
    pub(super) fn new(hasher: &'c mut BlockHasher, section: Section) -> Self {
        let role = match section {
            Section::Conversation => StringRole::Whole,
            Section::Template
            | Section::TemplateKwargs
            | Section::Instructions
            | Section::Tools
            | Section::Functions => StringRole::TextOnly,
            Section::Documents => StringRole::Documents,
        };
        Self { hasher, role }
    }
}

impl Canonical<'_> {
    /// Feeds the value that begins here, as `deserialize` does but faster. `None` if that fails: then the hasher was fed a part
    /// of it.
    pub(super) fn scan(self, scan: &mut Scan<'_, true>) -> Option<()> {
        self.scan_nested(scan, NESTED_MAX)
    }

    fn scan_nested(mut self, scan: &mut Scan<'_, true>, depth: u32) -> Option<()> {
        let role = self.role;
        match scan.first_byte()? {
            b'"' => {
                let (string, has_escapes) = scan.string()?;
                let text = string.get(1..string.len() - 1)?;
                let is_media = matches!(role, StringRole::Media | StringRole::Payload);
                if !has_escapes {
                    return self.visit_str::<serde_json::Error>(text).ok();
                }
                // Left to the parser: media, which are hashed as a whole, and `\u`, which may come in pairs.
                if is_media || memmem::find(text.as_bytes(), b"\\u").is_some() {
                    return self.parse(string);
                }
                feed_unescaped(self.hasher, text.as_bytes())?;
                self.hasher.feed(&[STRING_END]);
            }
            b'{' => {
                let depth = depth.checked_sub(1)?;
                self.hasher.feed(b"{");
                scan.each_member(|scan, name| {
                    let role = role.of_member(&name);
                    if let StringRole::Ignored = role {
                        return scan.value().map(drop);
                    }
                    self.hasher.feed(name.as_bytes());
                    self.hasher.feed(b":");
                    self.member(role).scan_nested(scan, depth)
                })?;
                self.hasher.feed(b"}");
            }
            b'[' => {
                let depth = depth.checked_sub(1)?;
                let mut members = 0;
                scan.each_element(|scan| {
                    members += 1;
                    self.below(role.of_element()).scan_nested(scan, depth)
                })?;
                if let StringRole::Whole = role {
                    self.hasher.end_token_ids(members);
                }
            }
            _ => {
                let value = scan.value()?;
                let is_short = value.len() <= 9 && value.bytes().all(|byte| byte.is_ascii_digit());
                return match value.parse() {
                    Ok(number) if is_short => self.visit_u64::<serde_json::Error>(number).ok(),
                    _ => self.parse(value),
                };
            }
        }
        Some(())
    }

    /// For a value inside this one.
    fn below(&mut self, role: StringRole) -> Canonical<'_> {
        Canonical {
            hasher: self.hasher,
            role,
        }
    }

    /// For the value of a member of this one.
    fn member(&mut self, role: StringRole) -> Canonical<'_> {
        // Taken back if it is `null`.
        self.hasher.media_names += u32::from(matches!(role, StringRole::MediaName));
        self.below(role)
    }

    fn parse(self, json: &str) -> Option<()> {
        self.deserialize(&mut serde_json::Deserializer::from_str(json))
            .ok()
    }
}

/// Feeds the characters of a string whose escapes are of one letter each.
fn feed_unescaped(hasher: &mut BlockHasher, mut text: &[u8]) -> Option<()> {
    while let Some(at) = memchr(b'\\', text) {
        let (plain, escape) = text.split_at(at);
        hasher.feed(plain);
        let char = match escape.get(1)? {
            b'n' => b'\n',
            b't' => b'\t',
            b'r' => b'\r',
            b'b' => 8,
            b'f' => 12,
            same @ (b'"' | b'\\' | b'/') => *same,
            _ => return None,
        };
        hasher.feed(&[char]);
        text = &escape[2..];
    }
    hasher.feed(text);
    Some(())
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
        match self.role {
            StringRole::Media | StringRole::Payload => {
                self.hasher.feed_media(text.as_bytes(), MEDIA_COUNTED_BYTES);
            }
            StringRole::Ignored => {}
            StringRole::Whole
            | StringRole::Member
            | StringRole::Text
            | StringRole::Source
            | StringRole::Content
            | StringRole::Part
            | StringRole::MediaName
            | StringRole::Documents
            | StringRole::TextOnly => {
                self.hasher.feed(text.as_bytes());
                self.hasher.feed(&[STRING_END]);
            }
        }
        Ok(())
    }

    fn visit_u64<E>(self, number: u64) -> Result<(), E> {
        // Four bytes for a token id, which is about the length of a token of text.
        match u32::try_from(number) {
            Ok(small) => {
                self.hasher.feed(&small.to_le_bytes());
                if let StringRole::Member = self.role {
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
        if let StringRole::MediaName = self.role {
            self.hasher.media_names -= 1;
        }
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut seq: A) -> Result<(), A::Error> {
        let role = self.role.of_element();
        let mut members = 0;
        while seq.next_element_seed(self.below(role))?.is_some() {
            members += 1;
        }
        if let StringRole::Whole = self.role {
            self.hasher.end_token_ids(members);
        }
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<(), A::Error> {
        self.hasher.feed(b"{");
        while let Some(JsonString(name)) = map.next_key()? {
            let role = self.role.of_member(&name);
            if let StringRole::Ignored = role {
                map.next_value::<IgnoredAny>()?;
                continue;
            }
            self.hasher.feed(name.as_bytes());
            self.hasher.feed(b":");
            map.next_value_seed(self.member(role))?;
        }
        self.hasher.feed(b"}");
        Ok(())
    }
}
