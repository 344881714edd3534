//! Routes of `/v1/responses` and `/v1/conversations`. Pure.

use hyper::Method;

use crate::openai::{RouteMatch, decoded};

/// An endpoint, with the decoded ids in its path.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Endpoint {
    Create,
    InputTokens,
    Compact,
    Retrieve(String),
    Delete(String),
    Cancel(String),
    InputItems(String),
    CreateConversation,
    Conversation(String),
    UpdateConversation(String),
    DeleteConversation(String),
    AddItems(String),
    Items(String),
    Item(String, String),
    DeleteItem(String, String),
}

pub(crate) fn route(method: &Method, path: &str) -> RouteMatch<Endpoint> {
    let Some(path) = path.strip_prefix("/v1/") else {
        return RouteMatch::NotFound;
    };
    let mut parts = path.split('/');
    let is_conversation = match parts.next() {
        Some("responses") => false,
        Some("conversations") => true,
        Some(_) | None => return RouteMatch::NotFound,
    };
    let rest: Vec<String> = parts.map(decoded).collect();
    if rest.iter().any(String::is_empty) {
        return RouteMatch::NotFound;
    }
    let rest: Vec<&str> = rest.iter().map(String::as_str).collect();
    let own = |id: &str| id.to_owned();
    let endpoint = match (is_conversation, rest.as_slice(), method.as_str()) {
        (false, [], "POST") => Endpoint::Create,
        (false, ["input_tokens"], "POST") => Endpoint::InputTokens,
        (false, ["compact"], "POST") => Endpoint::Compact,
        (false, [] | ["input_tokens" | "compact"], _) => return RouteMatch::WrongMethod("POST"),
        (false, [id], "GET") => Endpoint::Retrieve(own(id)),
        (false, [id], "DELETE") => Endpoint::Delete(own(id)),
        (false, [_], _) => return RouteMatch::WrongMethod("GET, DELETE"),
        (false, [id, "cancel"], "POST") => Endpoint::Cancel(own(id)),
        (false, [_, "cancel"], _) => return RouteMatch::WrongMethod("POST"),
        (false, [id, "input_items"], "GET") => Endpoint::InputItems(own(id)),
        (false, [_, "input_items"], _) => return RouteMatch::WrongMethod("GET"),
        (true, [], "POST") => Endpoint::CreateConversation,
        (true, [], _) => return RouteMatch::WrongMethod("POST"),
        (true, [id], "GET") => Endpoint::Conversation(own(id)),
        (true, [id], "POST") => Endpoint::UpdateConversation(own(id)),
        (true, [id], "DELETE") => Endpoint::DeleteConversation(own(id)),
        (true, [_], _) => return RouteMatch::WrongMethod("GET, POST, DELETE"),
        (true, [id, "items"], "POST") => Endpoint::AddItems(own(id)),
        (true, [id, "items"], "GET") => Endpoint::Items(own(id)),
        (true, [_, "items"], _) => return RouteMatch::WrongMethod("GET, POST"),
        (true, [id, "items", item], "GET") => Endpoint::Item(own(id), own(item)),
        (true, [id, "items", item], "DELETE") => Endpoint::DeleteItem(own(id), own(item)),
        (true, [_, "items", _], _) => return RouteMatch::WrongMethod("GET, DELETE"),
        _ => return RouteMatch::NotFound,
    };
    RouteMatch::Endpoint(endpoint)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_endpoint_has_its_methods_and_other_paths_are_not_found() {
        let check = |method: &Method, path: &str, expected: RouteMatch<Endpoint>| {
            assert_eq!(route(method, path), expected, "{method} {path}");
        };
        let to = |endpoint| RouteMatch::Endpoint(endpoint);
        let (a, b) = ("a".to_owned(), "b".to_owned());
        let (get, post, delete) = (&Method::GET, &Method::POST, &Method::DELETE);
        check(post, "/v1/responses", to(Endpoint::Create));
        check(get, "/v1/responses", RouteMatch::WrongMethod("POST"));
        check(
            post,
            "/v1/responses/input_tokens",
            to(Endpoint::InputTokens),
        );
        check(post, "/v1/responses/compact", to(Endpoint::Compact));
        check(
            get,
            "/v1/responses/compact",
            RouteMatch::WrongMethod("POST"),
        );
        check(get, "/v1/responses/a", to(Endpoint::Retrieve(a.clone())));
        check(get, "/v1/responses/%61", to(Endpoint::Retrieve(a.clone())));
        check(delete, "/v1/responses/a", to(Endpoint::Delete(a.clone())));
        check(
            post,
            "/v1/responses/a",
            RouteMatch::WrongMethod("GET, DELETE"),
        );
        check(
            post,
            "/v1/responses/a/cancel",
            to(Endpoint::Cancel(a.clone())),
        );
        check(
            get,
            "/v1/responses/a/input_items",
            to(Endpoint::InputItems(a.clone())),
        );
        check(get, "/v1/responses/a/other", RouteMatch::NotFound);
        check(get, "/v1/responses/", RouteMatch::NotFound);
        check(get, "/v1/chat/completions", RouteMatch::NotFound);
        check(get, "/responses/a", RouteMatch::NotFound);
        check(post, "/v1/conversations", to(Endpoint::CreateConversation));
        check(
            delete,
            "/v1/conversations/a",
            to(Endpoint::DeleteConversation(a.clone())),
        );
        check(
            get,
            "/v1/conversations/a/items",
            to(Endpoint::Items(a.clone())),
        );
        check(
            delete,
            "/v1/conversations/a/items/b",
            to(Endpoint::DeleteItem(a.clone(), b.clone())),
        );
        check(
            post,
            "/v1/conversations/a/items/b",
            RouteMatch::WrongMethod("GET, DELETE"),
        );
        check(get, "/v1/conversations/a/items/b/c", RouteMatch::NotFound);
    }
}
