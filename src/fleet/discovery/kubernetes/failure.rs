//! What went wrong with the Kubernetes API, and what follows from it: what is said, and how long nothing is asked. Pure.

use std::time::Duration;

use kube::core::Status;
use kube::runtime::watcher;
use tokio::time::Instant;

use crate::observe::metrics::words;
use crate::observe::with_causes;

/// The messages of the API quote what was sent.
const MAX_MESSAGE_CHARS: usize = 400;

const NEEDED_ROLE: &str = "the service account needs a Role with the verbs get, list and watch for";

words! {
    /// What was asked of the API.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(super) enum Request {
        Connect = "connect",
        List = "list",
        Watch = "watch",
    }
}

#[derive(Debug, PartialEq)]
pub(super) struct Failure {
    pub(super) request: Request,
    /// A label of metrics.
    pub(super) reason: &'static str,
    pub(super) text: String,
    /// The credentials or the connection are at fault: credentials are read again, and everything is listed anew.
    pub(super) needs_connect: bool,
}

/// The objects that were asked for, for messages.
#[derive(Clone, Debug)]
pub(super) struct Target {
    pub(super) plural: &'static str,
    pub(super) group: &'static str,
    pub(super) namespace: String,
}

impl Failure {
    pub(super) fn connect(error: &(dyn std::error::Error + 'static)) -> Self {
        Self {
            request: Request::Connect,
            reason: "config",
            text: format!("cannot reach the Kubernetes API: {}", with_causes(error)),
            needs_connect: true,
        }
    }

    pub(super) fn timed_out(target: &Target, limit: Duration) -> Self {
        let limit = humantime::format_duration(limit);
        let error = format!("no complete list within {limit}");
        Self {
            needs_connect: true,
            ..target.failure(Request::List, "timeout", &error)
        }
    }

    pub(super) fn of_request(request: Request, target: &Target, error: &kube::Error) -> Self {
        let (reason, needs_connect) = match error {
            kube::Error::Api(status) => return Self::of_status(request, target, status),
            kube::Error::SerdeError(_) | kube::Error::FromUtf8(_) => ("malformed", false),
            kube::Error::Auth(_) => ("unauthorized", true),
            // A watch that breaks off is resumed where it was.
            kube::Error::ReadEvents(_) => ("connection", false),
            _ => ("connection", true),
        };
        Self {
            needs_connect,
            ..target.failure(request, reason, &with_causes(error))
        }
    }

    pub(super) fn of_watcher(target: &Target, error: &watcher::Error) -> Self {
        use watcher::Error;

        match error {
            Error::InitialListFailed(error) => Self::of_request(Request::List, target, error),
            Error::WatchStartFailed(error) => Self::of_request(Request::Watch, target, error),
            Error::WatchError(status) => Self::of_status(Request::Watch, target, status),
            Error::WatchFailed(error) => Self {
                needs_connect: false,
                ..Self::of_request(Request::Watch, target, error)
            },
            Error::NoResourceVersion => {
                let error = "an object has no resourceVersion";
                target.failure(Request::Watch, "malformed", error)
            }
        }
    }

    fn of_status(request: Request, target: &Target, status: &Status) -> Self {
        let Target { plural, group, .. } = target;
        let (reason, hint) = match status.code {
            401 => ("unauthorized", "the API does not accept the token; "),
            403 => ("forbidden", ""),
            404 if *plural == "inferencepools" => (
                "not_found",
                "the API does not have this kind of object; are the CRDs of inference.networking.k8s.io/v1 installed? ",
            ),
            404 if !group.is_empty() => {
                ("not_found", "the API does not have this kind of object; ")
            }
            404 => ("not_found", ""),
            410 => ("gone", ""),
            429 => ("throttled", ""),
            500.. => ("server_error", ""),
            _ => ("refused", ""),
        };
        let message = match &*status.message {
            "" => format!("status {}", status.code),
            message => message.chars().take(MAX_MESSAGE_CHARS).collect(),
        };
        let needed = match (status.code, *group) {
            (403, "") => format!("{NEEDED_ROLE} `{plural}`: "),
            (403, group) => format!("{NEEDED_ROLE} `{plural}` of the API group `{group}`: "),
            _ => String::new(),
        };
        Self {
            needs_connect: status.code == 401,
            ..target.failure(request, reason, &format!("{hint}{needed}{message}"))
        }
    }
}

impl Target {
    fn failure(&self, request: Request, reason: &'static str, error: &str) -> Failure {
        let (verb, plural, namespace) = (request.as_str(), self.plural, &self.namespace);
        Failure {
            request,
            reason,
            text: format!("cannot {verb} {plural} in the namespace `{namespace}`: {error}"),
            needs_connect: false,
        }
    }
}

/// Short: most failures are one broken connection.
const FIRST_RETRY_PAUSE: Duration = Duration::from_millis(200);
/// A failure after this much quiet is not one of a row.
const QUIET: Duration = Duration::from_secs(5);

/// Pauses that double from failure to failure, with jitter so that replicas do not ask all at once.
#[derive(Debug)]
pub(super) struct Pause {
    max: Duration,
    next: Duration,
    until: Option<Instant>,
}

impl Pause {
    pub(super) fn new(max: Duration) -> Self {
        Self {
            max,
            next: FIRST_RETRY_PAUSE.min(max),
            until: None,
        }
    }

    /// `random` is from 0 to 1.
    pub(super) fn on_failure(&mut self, now: Instant, random: f64) {
        let is_in_row = self
            .until
            .is_some_and(|until| now < until + (2 * self.next).max(QUIET));
        if !is_in_row {
            self.next = FIRST_RETRY_PAUSE.min(self.max);
        }
        self.until = Some(now + self.next.mul_f64(0.75 + 0.25 * random));
        self.next = (2 * self.next).min(self.max);
    }

    /// When the pause ends, if it is not over.
    pub(super) fn until(&self, now: Instant) -> Option<Instant> {
        self.until.filter(|until| now < *until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target() -> Target {
        Target {
            plural: "pods",
            group: "",
            namespace: "llm".to_owned(),
        }
    }

    fn status(code: u16, message: &str) -> Box<Status> {
        Status::failure(message, "").with_code(code).boxed()
    }

    #[test]
    fn a_missing_permission_is_named_with_verb_and_resource() {
        let error = kube::Error::Api(status(
            403,
            "pods is forbidden: User \"x\" cannot list resource",
        ));
        let failure = Failure::of_request(Request::List, &target(), &error);
        assert_eq!(failure.reason, "forbidden");
        assert!(!failure.needs_connect);
        assert_eq!(
            failure.text,
            "cannot list pods in the namespace `llm`: the service account needs a Role with the verbs get, list and \
             watch for `pods`: pods is forbidden: User \"x\" cannot list resource"
        );
    }

    #[test]
    fn only_credentials_and_connections_that_cannot_be_made_need_a_new_connection() {
        for (error, reason, needs_connect) in [
            (
                watcher::Error::WatchStartFailed(kube::Error::Api(status(401, ""))),
                "unauthorized",
                true,
            ),
            (
                watcher::Error::InitialListFailed(kube::Error::Api(status(503, ""))),
                "server_error",
                false,
            ),
            (
                watcher::Error::WatchError(status(410, "too old")),
                "gone",
                false,
            ),
            (
                watcher::Error::WatchError(status(429, "")),
                "throttled",
                false,
            ),
            (
                watcher::Error::WatchFailed(kube::Error::ReadEvents(std::io::Error::other(
                    "reset",
                ))),
                "connection",
                false,
            ),
            (
                watcher::Error::WatchStartFailed(kube::Error::Service("refused".into())),
                "connection",
                true,
            ),
            (watcher::Error::NoResourceVersion, "malformed", false),
        ] {
            let failure = Failure::of_watcher(&target(), &error);
            assert_eq!(
                (failure.reason, failure.needs_connect),
                (reason, needs_connect),
                "{error}"
            );
        }
    }

    #[test]
    fn an_error_comes_with_its_causes_and_without_repetitions() {
        let cause = std::io::Error::other("connection refused");
        let error = kube::Error::ReadEvents(cause);
        assert_eq!(
            with_causes(&error),
            "Error reading events stream: connection refused"
        );
    }

    #[test]
    fn pauses_double_up_to_the_longest_and_begin_anew_after_quiet() {
        let mut pause = Pause::new(Duration::from_secs(1));
        let mut now = Instant::now();
        let mut length = |now: &mut Instant, quiet| {
            *now += quiet;
            pause.on_failure(*now, 1.0);
            let until = pause.until(*now).unwrap();
            let length = until - *now;
            *now = until;
            assert_eq!(pause.until(*now), None);
            length.as_millis()
        };
        let lengths = [(); 5].map(|()| length(&mut now, Duration::ZERO));
        assert_eq!(lengths, [200, 400, 800, 1_000, 1_000]);
        assert_eq!(length(&mut now, QUIET * 2), 200);
    }
}
