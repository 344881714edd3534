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

/// Plain text, `${ENV}` or `file:/path` in the configuration; always the secret itself here.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct Secret(String);

impl Secret {
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// The secret in the clear. A call to this is the thing to look for in a review.
    pub fn expose(&self) -> &str {
        &self.0
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(HIDDEN)
    }
}

impl Serialize for Secret {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if self.0.is_empty() {
            return serializer.serialize_str("");
        }
        if SERIALIZES_DIGESTS.get() {
            let digest = Sha256::digest(&self.0);
            return serializer.collect_str(&format_args!("{HIDDEN}{digest:02x?}"));
        }
        serializer.serialize_str(HIDDEN)
    }
}

impl<'de> Deserialize<'de> for Secret {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer).map(Self)
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
