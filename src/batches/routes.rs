//! Routes of files and batches: `/v1/files`, `/v1/batches` and `/v1/messages/batches`. Pure.

use hyper::Method;

use crate::openai::{RouteMatch, decoded};

/// An endpoint, with the decoded id in its path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BatchEndpoint {
    CreateFile,
    ListFiles,
    File(String),
    DeleteFile(String),
    FileContent(String),
    Create,
    List,
    Batch(String),
    Cancel(String),
    /// Of Anthropic's Message Batches, as those that follow.
    CreateOfMessages,
    ListOfMessages,
    BatchOfMessages(String),
    DeleteOfMessages(String),
    CancelOfMessages(String),
    ResultsOfMessages(String),
}

impl BatchEndpoint {
    /// Whether the body is streamed into the storage, and not read as a whole.
    pub fn is_upload(&self) -> bool {
        matches!(self, Self::CreateFile | Self::CreateOfMessages)
    }
}

/// The paths of one collection below `/v1/`.
#[derive(Clone, Copy, PartialEq, Eq)]
enum BatchCollection {
    Files,
    Batches,
    OfMessages,
}

pub fn route(method: &Method, path: &str) -> RouteMatch<BatchEndpoint> {
    use BatchCollection::{Batches, Files, OfMessages};
    let Some(path) = path.strip_prefix("/v1/") else {
        return RouteMatch::NotFound;
    };
    let collections = [
        ("files", Files),
        ("batches", Batches),
        ("messages/batches", OfMessages),
    ];
    let found = collections.into_iter().find_map(|(name, collection)| {
        let rest = path.strip_prefix(name)?;
        let is_whole = rest.is_empty() || rest.starts_with('/');
        is_whole.then_some((collection, rest))
    });
    let Some((collection, rest)) = found else {
        return RouteMatch::NotFound;
    };
    let parts: Vec<&str> = rest.split('/').skip(1).collect();
    if parts.iter().any(|part| part.is_empty()) {
        return RouteMatch::NotFound;
    }
    let endpoint = match (collection, parts.as_slice(), method.as_str()) {
        (Files, [], "POST") => BatchEndpoint::CreateFile,
        (Files, [], "GET") => BatchEndpoint::ListFiles,
        (Files, [id], "GET") => BatchEndpoint::File(decoded(id)),
        (Files, [id], "DELETE") => BatchEndpoint::DeleteFile(decoded(id)),
        (Files, [id, "content"], "GET") => BatchEndpoint::FileContent(decoded(id)),
        (Files, [_, "content"], _) => return RouteMatch::WrongMethod("GET"),
        (Batches, [], "POST") => BatchEndpoint::Create,
        (Batches, [], "GET") => BatchEndpoint::List,
        (Batches, [id], "GET") => BatchEndpoint::Batch(decoded(id)),
        (Batches, [_], _) => return RouteMatch::WrongMethod("GET"),
        (Batches, [id, "cancel"], "POST") => BatchEndpoint::Cancel(decoded(id)),
        (OfMessages, [], "POST") => BatchEndpoint::CreateOfMessages,
        (OfMessages, [], "GET") => BatchEndpoint::ListOfMessages,
        (OfMessages, [id], "GET") => BatchEndpoint::BatchOfMessages(decoded(id)),
        (OfMessages, [id], "DELETE") => BatchEndpoint::DeleteOfMessages(decoded(id)),
        (OfMessages, [id, "cancel"], "POST") => BatchEndpoint::CancelOfMessages(decoded(id)),
        (OfMessages, [id, "results"], "GET") => BatchEndpoint::ResultsOfMessages(decoded(id)),
        (OfMessages, [_, "results"], _) => return RouteMatch::WrongMethod("GET"),
        (_, [], _) => return RouteMatch::WrongMethod("GET, POST"),
        (Files | OfMessages, [_], _) => return RouteMatch::WrongMethod("GET, DELETE"),
        (Batches | OfMessages, [_, "cancel"], _) => return RouteMatch::WrongMethod("POST"),
        _ => return RouteMatch::NotFound,
    };
    RouteMatch::Endpoint(endpoint)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_endpoint_has_its_methods_and_other_paths_are_not_found() {
        let check = |method: &Method, path: &str, expected: RouteMatch<BatchEndpoint>| {
            assert_eq!(route(method, path), expected, "{method} {path}");
        };
        let (get, post, delete) = (&Method::GET, &Method::POST, &Method::DELETE);
        let to = RouteMatch::Endpoint;
        let not = RouteMatch::WrongMethod;
        let a = || "a".to_owned();
        check(post, "/v1/files", to(BatchEndpoint::CreateFile));
        check(get, "/v1/files", to(BatchEndpoint::ListFiles));
        check(delete, "/v1/files", not("GET, POST"));
        check(get, "/v1/files/%61", to(BatchEndpoint::File(a())));
        check(delete, "/v1/files/a", to(BatchEndpoint::DeleteFile(a())));
        check(post, "/v1/files/a", not("GET, DELETE"));
        let content = "/v1/files/a/content";
        check(get, content, to(BatchEndpoint::FileContent(a())));
        check(post, content, not("GET"));
        check(post, "/v1/batches", to(BatchEndpoint::Create));
        check(get, "/v1/batches", to(BatchEndpoint::List));
        check(get, "/v1/batches/a", to(BatchEndpoint::Batch(a())));
        check(delete, "/v1/batches/a", not("GET"));
        let cancel = "/v1/batches/a/cancel";
        check(post, cancel, to(BatchEndpoint::Cancel(a())));
        check(get, cancel, not("POST"));
        let messages = "/v1/messages/batches";
        check(post, messages, to(BatchEndpoint::CreateOfMessages));
        check(get, messages, to(BatchEndpoint::ListOfMessages));
        let one = "/v1/messages/batches/a";
        check(get, one, to(BatchEndpoint::BatchOfMessages(a())));
        check(delete, one, to(BatchEndpoint::DeleteOfMessages(a())));
        check(post, one, not("GET, DELETE"));
        let cancel = "/v1/messages/batches/a/cancel";
        check(post, cancel, to(BatchEndpoint::CancelOfMessages(a())));
        let results = "/v1/messages/batches/a/results";
        check(get, results, to(BatchEndpoint::ResultsOfMessages(a())));
        check(post, results, not("GET"));
        for path in [
            "/v1/files/",
            "/v1/filesx",
            "/v1/files/a/b",
            "/v1/batches//cancel",
            "/v1/batches/a/results",
            "/v1/messages",
            "/v1/messages/count_tokens",
            "/files",
            "/",
        ] {
            check(get, path, RouteMatch::NotFound);
        }
    }
}
