//! What an error of Redis means for an operation: whether it may have been applied, whether to retry, and whether the
//! circuit breaker counts it.

use std::time::Duration;

use redis::{ErrorKind, RedisError, ServerErrorKind};

use super::link::error_text;
use crate::store::Error;

/// When clients should retry after Redis was busy or refused.
pub(super) const BUSY_RETRY: Duration = Duration::from_secs(1);

/// A failed operation.
pub(super) struct Failure {
    pub(super) error: Error,
    /// Whether the circuit breaker counts it: the server failed, not just one key.
    pub(super) is_server_failure: bool,
}

pub(super) fn unavailable(retry_after: Duration, reason: &str) -> Error {
    Error::Unavailable {
        retry_after,
        reason: reason.into(),
    }
}

pub(super) fn unknown(reason: &str) -> Error {
    Error::Unknown {
        retry_after: BUSY_RETRY,
        reason: reason.into(),
    }
}

pub(super) fn server_failure(error: Error) -> Failure {
    Failure {
        error,
        is_server_failure: true,
    }
}

pub(super) fn is_script_missing(error: &RedisError) -> bool {
    error.kind() == ErrorKind::Server(ServerErrorKind::NoScript)
}

/// Whether the server works and one key is damaged: it has the wrong type, or a script failed on its content.
/// Older servers report the failure of a command inside a script as the script's own error.
fn is_key_damaged(error: &RedisError) -> bool {
    const SERVER_ERRORS: [&str; 6] = [
        "OOM",
        "MISCONF",
        "NOREPLICAS",
        "READONLY",
        "LOADING",
        "NOPERM",
    ];
    let detail = error.detail().unwrap_or_default();
    match error.code() {
        Some("WRONGTYPE") => true,
        Some("ERR") => {
            detail.contains("user_script")
                && !SERVER_ERRORS.iter().any(|code| detail.contains(code))
        }
        _ => false,
    }
}

/// The command that Redis refuses as a whole, by an error's text: the user may not use it, or it has another name there.
pub(super) fn refused_command(reason: &str) -> Option<String> {
    let unknown = reason.split_once("unknown command ").map(|(_, rest)| rest);
    let forbidden = reason.split_once("permissions to run the ");
    let named = unknown.or(forbidden.map(|(_, rest)| rest))?;
    // Older servers quote otherwise.
    let quote = |char| matches!(char, '\'' | '`');
    let name = named.strip_prefix(quote)?.split(quote).next()?;
    Some(name.to_uppercase())
}

/// Translates an error of the Redis library.
pub(super) fn classify(error: &RedisError) -> Failure {
    let reason = error_text(error);
    let code = match error.code() {
        // Older servers report it as an error of the script.
        Some("ERR")
            if error
                .detail()
                .is_some_and(|detail| detail.contains("-OOM ")) =>
        {
            Some("OOM")
        }
        code => code,
    };
    let of_one_key = |error| Failure {
        error,
        is_server_failure: false,
    };
    let refused = || server_failure(unavailable(BUSY_RETRY, &reason));
    match code {
        Some("OOM") => {
            let retry_after = BUSY_RETRY;
            return of_one_key(Error::Full { retry_after });
        }
        Some("NEWER") => {
            let reason = format!("written by a newer release: {reason}");
            return of_one_key(Error::Unreadable(reason.into()));
        }
        // Blocked by a script, missing replicas, a full disk, wrong credentials.
        Some("BUSY" | "NOREPLICAS" | "MISCONF" | "UNKILLABLE" | "NOAUTH" | "WRONGPASS") => {
            return refused();
        }
        _ => {}
    }
    match error.kind() {
        // Redis refused before it executed anything.
        ErrorKind::Server(
            ServerErrorKind::BusyLoading
            | ServerErrorKind::ClusterDown
            | ServerErrorKind::MasterDown
            | ServerErrorKind::ReadOnly
            | ServerErrorKind::TryAgain
            | ServerErrorKind::Moved
            | ServerErrorKind::Ask
            | ServerErrorKind::NoScript
            | ServerErrorKind::NoPerm
            | ServerErrorKind::CrossSlot,
        ) => refused(),
        // The request was never sent.
        ErrorKind::ClusterConnectionNotFound
        | ErrorKind::AuthenticationFailed
        | ErrorKind::InvalidClientConfig
        | ErrorKind::MasterNameNotFoundBySentinel
        | ErrorKind::NoValidReplicasFoundBySentinel
        | ErrorKind::EmptySentinelList => refused(),
        ErrorKind::Io if error.is_connection_refusal() => refused(),
        // A command that the server does not have was not executed.
        _ if refused_command(&reason).is_some() => refused(),
        _ if is_key_damaged(error) => of_one_key(Error::Unreadable(reason.into())),
        _ => server_failure(unknown(&reason)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failure_of(line: &str) -> Failure {
        let error = redis::parse_redis_value(format!("-{line}\r\n").as_bytes())
            .and_then(|value| value.extract_error())
            .unwrap_err();
        classify(&error)
    }

    #[test]
    fn a_server_out_of_memory_is_full_and_not_down() {
        for line in [
            "OOM command not allowed when used memory > 'maxmemory'.",
            "ERR Error running script (call to f_1f): @user_script:9: -OOM command not allowed when used memory",
        ] {
            let failure = failure_of(line);
            assert!(!failure.is_server_failure, "{line}");
            assert!(matches!(failure.error, Error::Full { .. }), "{line}");
        }
    }

    #[test]
    fn a_command_that_is_refused_as_a_whole_is_named_and_was_not_executed() {
        for (line, name) in [
            (
                "ERR unknown command 'EVALSHA', with args beginning with: 'a' '1' ",
                "EVALSHA",
            ),
            (
                "ERR unknown command `EVAL`, with args beginning with: `a`, ",
                "EVAL",
            ),
            (
                "NOPERM User wr has no permissions to run the 'evalsha' command",
                "EVALSHA",
            ),
            (
                "NOPERM this user has no permissions to run the 'zadd' command or its subcommand",
                "ZADD",
            ),
        ] {
            let Error::Unavailable { reason, .. } = failure_of(line).error else {
                panic!("{line}");
            };
            assert_eq!(refused_command(&reason).as_deref(), Some(name), "{reason}");
        }
        assert_eq!(refused_command("ERR max number of clients reached"), None);
    }

    #[test]
    fn a_damaged_key_does_not_count_as_a_server_failure() {
        for line in [
            "WRONGTYPE Operation against a key holding the wrong kind of value",
            "ERR user_script:9: attempt to compare number with nil script: 1f, on @user_script:9.",
            "ERR Error running script (call to f_1f): @user_script:9: WRONGTYPE Operation against a key",
        ] {
            let failure = failure_of(line);
            assert!(!failure.is_server_failure, "{line}");
            assert!(matches!(failure.error, Error::Unreadable(_)), "{line}");
        }
        for line in [
            "ERR max number of clients reached",
            "ERR Error running script (call to f_1f): @user_script:9: -MISCONF Redis is configured to save",
            "MISCONF Redis is configured to save",
            "LOADING Redis is loading the dataset in memory",
            "STRANGE error of the future",
        ] {
            assert!(failure_of(line).is_server_failure, "{line}");
        }
    }
}
