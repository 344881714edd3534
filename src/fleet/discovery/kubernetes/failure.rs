//! What went wrong with the Kubernetes API, and what follows from it. Pure.

use kube::core::Status;
use kube::runtime::watcher;

/// The messages of the API quote what was sent.
const MAX_MESSAGE_CHARS: usize = 400;

/// What was asked of the API.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Request {
    Connect,
    List,
    Watch,
}

impl Request {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Connect => "connect",
            Self::List => "list",
            Self::Watch => "watch",
        }
    }
}

/// One failed request.
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
    pub(super) plural: String,
    pub(super) group: String,
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

    pub(super) fn timed_out(target: &Target, limit: std::time::Duration) -> Self {
        let limit = humantime::format_duration(limit);
        Self {
            request: Request::List,
            reason: "timeout",
            text: target.message(Request::List, &format!("no complete list within {limit}")),
            needs_connect: true,
        }
    }

    pub(super) fn of_request(request: Request, target: &Target, error: &kube::Error) -> Self {
        if let kube::Error::Api(status) = error {
            return Self::of_status(request, target, status);
        }
        let (reason, needs_connect) = match error {
            kube::Error::SerdeError(_) | kube::Error::FromUtf8(_) => ("malformed", false),
            kube::Error::Auth(_) => ("unauthorized", true),
            // A watch that breaks off is resumed where it was.
            kube::Error::ReadEvents(_) => ("connection", false),
            _ => ("connection", true),
        };
        Self {
            request,
            reason,
            text: target.message(request, &with_causes(error)),
            needs_connect,
        }
    }

    pub(super) fn of_watcher(target: &Target, error: &watcher::Error) -> Self {
        match error {
            watcher::Error::InitialListFailed(error) => {
                Self::of_request(Request::List, target, error)
            }
            watcher::Error::WatchStartFailed(error) => {
                Self::of_request(Request::Watch, target, error)
            }
            watcher::Error::WatchError(status) => Self::of_status(Request::Watch, target, status),
            watcher::Error::WatchFailed(error) => Self {
                needs_connect: false,
                ..Self::of_request(Request::Watch, target, error)
            },
            watcher::Error::NoResourceVersion => Self {
                request: Request::Watch,
                reason: "malformed",
                text: target.message(Request::Watch, "an object has no resourceVersion"),
                needs_connect: false,
            },
        }
    }

    fn of_status(request: Request, target: &Target, status: &Status) -> Self {
        let (reason, hint) = match status.code {
            401 => ("unauthorized", "the API does not accept the token; "),
            403 => ("forbidden", ""),
            404 if !target.group.is_empty() => {
                ("not_found", "the API does not have this kind of object; ")
            }
            404 => ("not_found", ""),
            410 => ("gone", ""),
            429 => ("throttled", ""),
            500.. => ("server_error", ""),
            _ => ("refused", ""),
        };
        let message: String = status.message.chars().take(MAX_MESSAGE_CHARS).collect();
        let message = if message.is_empty() {
            format!("status {}", status.code)
        } else {
            message
        };
        let needed = match status.code {
            403 => format!(
                "the service account needs a Role with the verbs get, list and watch for `{}`{}: ",
                target.plural,
                target.of_group()
            ),
            404 if target.plural == "inferencepools" => {
                "are the CRDs of inference.networking.k8s.io/v1 installed? ".to_owned()
            }
            _ => String::new(),
        };
        Self {
            request,
            reason,
            text: target.message(request, &format!("{hint}{needed}{message}")),
            needs_connect: status.code == 401,
        }
    }
}

impl Target {
    fn of_group(&self) -> String {
        match &*self.group {
            "" => String::new(),
            group => format!(" of the API group `{group}`"),
        }
    }

    fn message(&self, request: Request, error: &str) -> String {
        let (request, plural, namespace) = (request.name(), &self.plural, &self.namespace);
        format!("cannot {request} {plural} in the namespace `{namespace}`: {error}")
    }
}

/// The error and all that caused it: the first alone says nothing but that a request failed.
fn with_causes(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let next = error.to_string();
        // Many repeat what is under them.
        if !text.ends_with(&next) {
            text = format!("{text}: {next}");
        }
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target() -> Target {
        Target {
            plural: "pods".to_owned(),
            group: String::new(),
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
}
