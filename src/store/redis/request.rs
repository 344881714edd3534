//! A request to Redis: a command or a script, how large it may be, and whether it may be repeated.

use std::time::Duration;

use redis::Cmd;

use super::scripts::Call;

/// A command or script for Redis.
#[derive(Debug)]
pub(super) enum Request {
    Command(Cmd),
    /// A command whose reply may have this many bytes.
    Bulk {
        command: Cmd,
        bytes: u64,
    },
    Script(Call),
}

impl Request {
    /// The first key, which determines the node of a cluster; empty for a command without one.
    pub(super) fn first_key(&self) -> &[u8] {
        match self {
            Self::Command(command) | Self::Bulk { command, .. } => {
                match command.args_iter().nth(1) {
                    Some(redis::Arg::Simple(key)) => key,
                    _ => &[],
                }
            }
            Self::Script(call) => call.first_key().as_bytes(),
        }
    }

    /// How long its reply is waited for at most, if that is shorter than the setting.
    pub(super) fn timeout(&self) -> Option<Duration> {
        match self {
            Self::Command(_) | Self::Bulk { .. } => None,
            Self::Script(call) => call.timeout(),
        }
    }

    pub(super) fn bytes(&self) -> u64 {
        match self {
            Self::Command(_) => 0,
            Self::Bulk { bytes, .. } => *bytes,
            Self::Script(call) => call.bytes(),
        }
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
