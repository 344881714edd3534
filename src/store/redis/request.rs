//! A request to Redis: a command or a script, how large it may be, and whether it may be repeated.

use redis::{Cmd, ToRedisArgs};

use super::scripts::Call;

/// A command or script for Redis.
#[derive(Debug)]
pub(super) enum Request {
    Command(Cmd),
    Script(Call),
}

impl Request {
    pub(super) fn command(name: &str, args: impl ToRedisArgs) -> Self {
        Self::Command(redis::cmd(name).arg(args).take())
    }

    /// The first key, which determines the node of a cluster; empty for a command without one.
    pub(super) fn first_key(&self) -> &[u8] {
        match self {
            Self::Command(command) => match command.args_iter().nth(1) {
                Some(redis::Arg::Simple(key)) => key,
                _ => &[],
            },
            Self::Script(call) => call.first_key().as_bytes(),
        }
    }

    pub(super) fn script(&self) -> Option<&Call> {
        match self {
            Self::Command(_) => None,
            Self::Script(call) => Some(call),
        }
    }

    /// The value of the reply; `None` if that is another request's. Of a command, only what it returns says so.
    pub(super) fn own_reply(&self, value: redis::Value) -> Option<redis::Value> {
        match self {
            Self::Command(_) => Some(value),
            Self::Script(call) => call.own_reply(value),
        }
    }

    /// About how large it is as it is sent, if it may be large.
    pub(super) fn bytes_sent(&self) -> u64 {
        self.script().map_or(0, Call::bytes_sent)
    }
}

/// Whether an operation may be repeated, and what a missing reply means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Changes nothing, may be repeated.
    Read,
    /// Idempotent write, may be repeated.
    Write,
    /// A write whose second application returns something else; never repeated.
    WriteOnce,
}
