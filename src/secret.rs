//! A text that must not be shown, such as an API key or a password: it prints as `***` everywhere.

use std::borrow::Cow;
use std::cell::Cell;
use std::fmt;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use sha2::{Digest, Sha256};

/// The schema's `format` of a secret, by which the configuration's reader follows `file:` and keeps the text
/// out of its messages.
pub(crate) const SECRET: &str = "password";

/// How every secret that is not empty prints, and how a serialized digest begins.
pub(crate) const HIDDEN: &str = "***";

thread_local! {
    static SERIALIZES_DIGESTS: Cell<bool> = const { Cell::new(false) };
}

/// Runs `serialize` with secrets serialized as [`HIDDEN`] and their digest, so that two values can be compared. What
/// it returns must not be shown.
pub(crate) fn with_digests<T>(serialize: impl FnOnce() -> T) -> T {
    struct Restore(bool);
    impl Drop for Restore {
        fn drop(&mut self) {
            SERIALIZES_DIGESTS.set(self.0);
        }
    }
    let _restore = Restore(SERIALIZES_DIGESTS.replace(true));
    serialize()
}

/// Between the path and the secret in what the configuration's reader makes of `file:/path`. In no text of a file.
const FROM_FILE: char = '\0';

/// Plain text, `${ENV}` or `file:/path` in the configuration; always the secret itself here.
#[derive(Clone, Default)]
pub struct Secret {
    text: String,
    /// The file that it was read from; empty for none.
    file: String,
}

impl PartialEq for Secret {
    /// Wherever they are from.
    fn eq(&self, other: &Self) -> bool {
        self.text == other.text
    }
}

impl Eq for Secret {}

impl Secret {
    pub fn new(text: impl Into<String>) -> Self {
        Self {
            text: text.into(),
            file: String::new(),
        }
    }

    /// The secret in the clear. A call to this is the thing to look for in a review.
    pub fn expose(&self) -> &str {
        &self.text
    }

    pub fn is_empty(&self) -> bool {
        self.text.is_empty()
    }

    /// Whether it was read from a file.
    pub(crate) fn is_of_file(&self) -> bool {
        !self.file.is_empty()
    }

    /// The secret that its file has now. The same one if that cannot be read.
    pub(crate) fn read_again(&self) -> Self {
        let content = match self.file.as_str() {
            "" => return self.clone(),
            path => std::fs::read_to_string(path),
        };
        let text = content.as_deref().map(of_file).unwrap_or_default();
        if text.is_empty() {
            self.clone()
        } else {
            Self {
                text: text.to_owned(),
                file: self.file.clone(),
            }
        }
    }
}

/// The secret in a file. Editors and `echo` end a file with a line break that is no part of it.
pub(crate) fn of_file(content: &str) -> &str {
    let secret = content.strip_suffix('\n').unwrap_or(content);
    secret.strip_suffix('\r').unwrap_or(secret)
}

/// What a secret is deserialized from so that it knows its file.
pub(crate) fn with_file(path: &str, secret: &str) -> String {
    [path, secret].join(&FROM_FILE.to_string())
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(HIDDEN)
    }
}

impl Serialize for Secret {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if self.text.is_empty() {
            return serializer.serialize_str("");
        }
        if SERIALIZES_DIGESTS.get() {
            let digest = Sha256::digest(&self.text);
            return serializer.collect_str(&format_args!("{HIDDEN}{digest:02x?}"));
        }
        serializer.serialize_str(HIDDEN)
    }
}

impl<'de> Deserialize<'de> for Secret {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        Ok(match text.split_once(FROM_FILE) {
            Some((file, text)) => Self {
                text: text.to_owned(),
                file: file.to_owned(),
            },
            None => Self::new(text),
        })
    }
}

impl JsonSchema for Secret {
    fn schema_name() -> Cow<'static, str> {
        "Secret".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({"type": "string", "format": SECRET})
    }

    fn inline_schema() -> bool {
        true
    }
}
