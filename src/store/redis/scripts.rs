//! The scripts, one for each transition. Redis knows them by the SHA-1 of their text; one that forgot
//! them (it was restarted, or is another) is sent the text.

use std::sync::LazyLock;

use redis::Cmd;
use redis::Script;
use serde_json::Value;
use serde_json::json;

/// A script by its place in [`ALL`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Name(usize);

macro_rules! scripts {
    ($($name:ident = $place:literal, $file:literal;)*) => {
        impl Name {
            $(pub(super) const $name: Self = Self($place);)*
        }

        static ALL: LazyLock<Vec<Loaded>> = LazyLock::new(|| vec![
            $(Loaded::new($file, concat!(include_str!("common.lua"), include_str!($file)))),*
        ]);
    };
}

scripts! {
    CREATE = 0, "create.lua";
    CHUNK = 1, "chunk.lua";
    VALUES = 2, "values.lua";
    START = 3, "start.lua";
    APPEND = 4, "append.lua";
    FINALIZE = 5, "finalize.lua";
    CANCEL = 6, "cancel.lua";
    AMEND = 7, "amend.lua";
    ADOPT = 8, "adopt.lua";
    RELEASE = 9, "release.lua";
    DELETE = 10, "delete.lua";
    EVENTS = 11, "events.lua";
    PUT_ITEMS = 12, "put_items.lua";
    ITEMS = 13, "items.lua";
    DELETE_ITEM = 14, "delete_item.lua";
    CONVERSATION = 15, "conversation.lua";
    ITEM_CHUNK = 16, "item_chunk.lua";
}

struct Loaded {
    file: &'static str,
    text: &'static str,
    sha: String,
}

impl Loaded {
    fn new(file: &'static str, text: &'static str) -> Self {
        Self {
            file,
            text,
            sha: Script::new(text).get_hash().to_owned(),
        }
    }
}

/// A script with its keys and arguments.
#[derive(Clone, Debug)]
pub(super) struct Call {
    name: Name,
    keys: Vec<String>,
    args: Vec<bytes::Bytes>,
    /// Bytes of its answer, where that may be large.
    answer: u64,
}

impl Call {
    pub(super) fn new(name: Name) -> Self {
        Self {
            name,
            keys: Vec::new(),
            args: Vec::new(),
            answer: 0,
        }
    }

    pub(super) fn expecting(mut self, bytes: u64) -> Self {
        self.answer = bytes;
        self
    }

    /// What goes over the connection for it, either way, about.
    pub(super) fn bytes(&self) -> u64 {
        let args: usize = self.args.iter().map(bytes::Bytes::len).sum();
        self.answer.saturating_add(args as u64)
    }

    pub(super) fn key(mut self, key: impl Into<String>) -> Self {
        self.keys.push(key.into());
        self
    }

    pub(super) fn keys(mut self, keys: impl IntoIterator<Item = String>) -> Self {
        self.keys.extend(keys);
        self
    }

    pub(super) fn arg(mut self, arg: impl Into<bytes::Bytes>) -> Self {
        self.args.push(arg.into());
        self
    }

    pub(super) fn number(self, number: u64) -> Self {
        self.arg(number.to_string())
    }

    /// A field and its value, for scripts that end with those.
    pub(super) fn field(self, name: &'static str, value: impl Into<bytes::Bytes>) -> Self {
        self.arg(name).arg(value)
    }

    /// By its SHA-1.
    pub(super) fn by_hash(&self) -> Cmd {
        self.command("EVALSHA", &ALL[self.name.0].sha)
    }

    /// With its text, after which Redis knows it.
    pub(super) fn by_text(&self) -> Cmd {
        self.command("EVAL", ALL[self.name.0].text)
    }

    fn command(&self, verb: &str, script: &str) -> Cmd {
        let mut command = redis::cmd(verb);
        command.arg(script).arg(self.keys.len());
        for key in &self.keys {
            command.arg(key);
        }
        for arg in &self.args {
            command.arg(&arg[..]);
        }
        command
    }
}

/// Names, sizes and hashes, for operators.
pub(super) fn report() -> Value {
    ALL.iter()
        .map(|script| json!({"file": script.file, "bytes": script.text.len(), "sha1": script.sha}))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_name_has_its_own_file() {
        let places = [
            (Name::CREATE, "create.lua"),
            (Name::EVENTS, "events.lua"),
            (Name::ITEM_CHUNK, "item_chunk.lua"),
        ];
        for (name, file) in places {
            assert_eq!(ALL[name.0].file, file);
        }
        assert_eq!(ALL.len(), 17);
    }

    #[test]
    fn each_script_says_in_its_first_line_what_it_does() {
        for script in ALL.iter() {
            let own = script
                .text
                .strip_prefix(include_str!("common.lua"))
                .unwrap();
            assert!(own.starts_with("-- "), "{}", script.file);
        }
    }
}
