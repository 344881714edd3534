//! The Lua scripts, one per transition. They are called by the SHA-1 of their text; a server that does not have
//! a script cached (after a restart or a failover) is sent the text.
//!
//! Each call has a number, which its reply repeats. If anything between router and Redis loses a reply, all that follow
//! on that connection belong to other calls: their records are other responses, maybe of other tenants. A read that is a
//! command besides costs a third of its script as the command with an `ECHO` of the number.

use std::sync::{Arc, LazyLock};
use std::time::Duration;

use bytes::Bytes;
use redis::{Cmd, Pipeline, Script};
use serde_json::{Value, json};
use smallvec::SmallVec;

/// A script, as an index into [`ALL`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Name(usize);

/// Before and after each script: takes the number of the call off its arguments, and returns it with the reply.
macro_rules! numbered {
    ($($text:expr),*) => {
        concat!(
            "local call_number = table.remove(ARGV)\nlocal function run()\n",
            $($text,)*
            "end\nlocal reply = run()\nif reply.err then\n  return reply\nend\nreturn {call_number, reply}\n"
        )
    };
}

macro_rules! scripts {
    ({ $($name:ident = $index:literal, $file:literal;)* } { $($alone:ident = $place:literal, $own:literal;)* }) => {
        impl Name {
            $(pub(super) const $name: Self = Self($index);)*
            $(pub(super) const $alone: Self = Self($place);)*
        }

        static ALL: LazyLock<Vec<Loaded>> = LazyLock::new(|| vec![
            $(Loaded::new($file, numbered!(include_str!("common.lua"), include_str!($file))),)*
            // Without the functions on records.
            $(Loaded::new($own, numbered!(include_str!($own))),)*
        ]);
    };
}

scripts! {
    {
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
        SEEN = 17, "seen.lua";
        OWNERS = 18, "owners.lua";
        KEEP = 19, "keep.lua";
    }
    {
        CHARGE = 20, "charge.lua";
        RENEW_CHARGES = 21, "renew_charges.lua";
        OUTBOX_ADD = 22, "outbox_add.lua";
        OUTBOX_CLAIM = 23, "outbox_claim.lua";
        OUTBOX_SETTLE = 24, "outbox_settle.lua";
        OUTBOX_DISABLE = 25, "outbox_disable.lua";
        FIELDS = 26, "fields.lua";
        LACKING = 27, "lacking.lua";
        DOCUMENT = 28, "document.lua";
        DOCUMENTS = 29, "documents.lua";
        DOCUMENTS_DUE = 30, "documents_due.lua";
        CLOCK = 31, "clock.lua";
        OUTBOX_ENABLE = 32, "outbox_enable.lua";
    }
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
    /// Random, since a proxy may share a connection between routers.
    number: u64,
    keys: SmallVec<[Key; 4]>,
    args: Vec<Arg>,
    /// Expected size of the reply, if it may be large.
    reply_bytes: u64,
    /// A reply is not waited for longer than this, if it is shorter than the setting.
    pub(super) timeout: Option<Duration>,
}

/// A key of a script. A key that many calls have is made once, and shared.
#[derive(Clone, Debug)]
pub(super) enum Key {
    Own(String),
    Shared(Arc<str>),
}

impl std::ops::Deref for Key {
    type Target = str;

    fn deref(&self) -> &str {
        match self {
            Self::Own(key) => key,
            Self::Shared(key) => key,
        }
    }
}

/// An argument of a script.
#[derive(Clone, Debug)]
pub(super) enum Arg {
    Word(&'static str),
    Text(String),
    Number(u64),
    Bytes(Bytes),
}

/// Digits of the largest number.
const DIGITS_MAX: usize = 20;
/// Capacity for the arguments of a new foreground response.
const ARGS: usize = 20;

impl Arg {
    /// An upper bound of the encoded length.
    fn len(&self) -> usize {
        match self {
            Self::Word(text) => text.len(),
            Self::Text(text) => text.len(),
            Self::Number(_) => DIGITS_MAX,
            Self::Bytes(bytes) => bytes.len(),
        }
    }

    fn write(&self, command: &mut Cmd) {
        let bytes = match self {
            Self::Word(text) => text.as_bytes(),
            Self::Text(text) => text.as_bytes(),
            Self::Bytes(bytes) => bytes,
            Self::Number(number) => {
                command.arg(*number);
                return;
            }
        };
        command.arg(bytes);
    }
}

impl From<&'static str> for Arg {
    fn from(text: &'static str) -> Self {
        Self::Word(text)
    }
}

impl From<String> for Arg {
    fn from(text: String) -> Self {
        Self::Text(text)
    }
}

impl From<Bytes> for Arg {
    fn from(bytes: Bytes) -> Self {
        Self::Bytes(bytes)
    }
}

impl From<Vec<u8>> for Arg {
    fn from(bytes: Vec<u8>) -> Self {
        Self::Bytes(bytes.into())
    }
}

impl From<u64> for Arg {
    fn from(number: u64) -> Self {
        Self::Number(number)
    }
}

/// Empty for `None`.
impl From<Option<u64>> for Arg {
    fn from(number: Option<u64>) -> Self {
        number.map_or(Self::Word(""), Self::Number)
    }
}

impl Call {
    pub(super) fn new(name: Name) -> Self {
        Self {
            name,
            number: fastrand::u64(..),
            keys: SmallVec::new(),
            args: Vec::with_capacity(ARGS),
            reply_bytes: 0,
            timeout: None,
        }
    }

    pub(super) fn expecting(mut self, bytes: u64) -> Self {
        self.reply_bytes = bytes;
        self
    }

    pub(super) fn within(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// Approximate bytes of request and reply.
    pub(super) fn bytes(&self) -> u64 {
        self.reply_bytes.saturating_add(self.bytes_sent())
    }

    pub(super) fn first_key(&self) -> &str {
        self.keys.first().map_or("", |key| key)
    }

    pub(super) fn key(mut self, key: impl Into<String>) -> Self {
        self.keys.push(Key::Own(key.into()));
        self
    }

    pub(super) fn keys(mut self, keys: impl IntoIterator<Item = String>) -> Self {
        self.keys.extend(keys.into_iter().map(Key::Own));
        self
    }

    pub(super) fn shared_keys(mut self, keys: &[Arc<str>]) -> Self {
        self.keys.extend(keys.iter().cloned().map(Key::Shared));
        self
    }

    pub(super) fn arg(mut self, arg: impl Into<Arg>) -> Self {
        self.args.push(arg.into());
        self
    }

    pub(super) fn number(self, number: u64) -> Self {
        self.arg(number)
    }

    /// Adds a field and its value, for scripts whose arguments end with fields.
    pub(super) fn field(self, name: &'static str, value: impl Into<Arg>) -> Self {
        self.arg(name).arg(value)
    }

    /// The call by the SHA-1 of the script.
    pub(super) fn by_hash(&self) -> Cmd {
        self.command("EVALSHA", &ALL[self.name.0].sha)
    }

    /// The call with the text of the script, which Redis caches then.
    pub(super) fn by_text(&self) -> Cmd {
        self.command("EVAL", ALL[self.name.0].text)
    }

    /// The call without its script, if it is no more than a command: the command, and an `ECHO` of the number.
    pub(super) fn as_commands(&self) -> Option<Pipeline> {
        if self.name != Name::FIELDS {
            return None;
        }
        let mut fields = Cmd::with_capacity(1 + self.keys.len() + self.args.len(), 0);
        fields.arg("HMGET").arg(self.first_key());
        for arg in &self.args {
            arg.write(&mut fields);
        }
        let mut commands = Pipeline::with_capacity(2);
        commands.add_command(fields).cmd("ECHO").arg(self.number);
        Some(commands)
    }

    fn command(&self, verb: &str, script: &str) -> Cmd {
        let keys: usize = self.keys.iter().map(|key| key.len()).sum();
        let args: usize = self.args.iter().map(Arg::len).sum();
        let bytes = verb.len() + script.len() + 2 * DIGITS_MAX + keys + args;
        let mut command = Cmd::with_capacity(4 + self.keys.len() + self.args.len(), bytes);
        command.arg(verb).arg(script).arg(self.keys.len());
        for key in &self.keys {
            command.arg(&**key);
        }
        for arg in &self.args {
            arg.write(&mut command);
        }
        command.arg(self.number);
        command
    }

    /// About how large it is as it is sent.
    pub(super) fn bytes_sent(&self) -> u64 {
        self.args.iter().map(Arg::len).sum::<usize>() as u64
    }

    /// The script's reply, if it is the reply to this call.
    pub(super) fn own_reply(&self, value: redis::Value) -> Option<redis::Value> {
        let redis::Value::Array(values) = value else {
            return None;
        };
        let [number, reply] = <[redis::Value; 2]>::try_from(values).ok()?;
        let redis::Value::BulkString(number) = number else {
            return None;
        };
        let number = std::str::from_utf8(&number).ok()?.parse::<u64>();
        (number == Ok(self.number)).then_some(reply)
    }
}

/// File names, sizes and hashes, for operators.
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
            (Name::KEEP, "keep.lua"),
            (Name::CHARGE, "charge.lua"),
            (Name::RENEW_CHARGES, "renew_charges.lua"),
            (Name::OUTBOX_DISABLE, "outbox_disable.lua"),
            (Name::FIELDS, "fields.lua"),
            (Name::LACKING, "lacking.lua"),
            (Name::DOCUMENT, "document.lua"),
            (Name::DOCUMENTS_DUE, "documents_due.lua"),
            (Name::CLOCK, "clock.lua"),
            (Name::OUTBOX_ENABLE, "outbox_enable.lua"),
        ];
        for (name, file) in places {
            assert_eq!(ALL[name.0].file, file);
        }
        assert_eq!(ALL.len(), 33);
    }

    #[test]
    fn arguments_are_sent_unchanged() {
        let call = Call::new(Name::CREATE).key("k").number(7);
        let call = call.field("a", "b".to_owned()).field("c", vec![0]);
        let call = call.field("d", Bytes::from_static(b"rx"));
        let call = call.field("e", "y");
        let command = call.by_hash();
        let sent: Vec<Vec<u8>> = command
            .args_iter()
            .filter_map(|arg| match arg {
                redis::Arg::Simple(bytes) => Some(bytes.to_vec()),
                _ => None,
            })
            .collect();
        let sha = ALL[0].sha.as_bytes();
        let number = call.number.to_string();
        let expected: [&[u8]; 14] = [
            b"EVALSHA",
            sha,
            b"1",
            b"k",
            b"7",
            b"a",
            b"b",
            b"c",
            &[0],
            b"d",
            b"rx",
            b"e",
            b"y",
            number.as_bytes(),
        ];
        assert_eq!(sent, expected);
    }

    #[test]
    fn a_reply_belongs_to_the_call_whose_number_it_repeats() {
        let call = Call::new(Name::FIELDS).key("k").arg("v");
        let text = |text: String| redis::Value::BulkString(text.into_bytes());
        let reply = |number: u64| {
            let reply = redis::Value::Array(vec![text("1".into())]);
            redis::Value::Array(vec![text(number.to_string()), reply])
        };
        let own = redis::Value::Array(vec![text("1".into())]);
        assert_eq!(call.own_reply(reply(call.number)), Some(own.clone()));
        assert_eq!(call.own_reply(reply(call.number ^ 1)), None);
        for foreign in [
            own,
            redis::Value::Okay,
            redis::Value::Nil,
            redis::Value::Int(1),
        ] {
            assert_eq!(call.own_reply(foreign), None);
        }
    }

    #[test]
    fn a_read_that_is_a_command_is_sent_without_its_script() {
        let call = Call::new(Name::FIELDS).key("k").arg("v").arg("ob");
        let sent = call.as_commands().unwrap().get_packed_pipeline();
        let sent = String::from_utf8(sent).unwrap();
        let number = call.number.to_string();
        let echo = format!("*2\r\n$4\r\nECHO\r\n${}\r\n{number}\r\n", number.len());
        let fields = "*4\r\n$5\r\nHMGET\r\n$1\r\nk\r\n$1\r\nv\r\n$2\r\nob\r\n";
        assert_eq!(sent, format!("{fields}{echo}"));
        assert!(Call::new(Name::VALUES).as_commands().is_none());
    }

    #[test]
    fn each_script_starts_with_a_comment() {
        for script in ALL.iter() {
            let common = include_str!("common.lua");
            let (_, text) = script.text.split_once("run()\n").unwrap();
            let own = text.strip_prefix(common).unwrap_or(text);
            assert!(own.starts_with("-- "), "{}", script.file);
        }
    }
}
