//! The route of a path, for traces: names of parameters stand for what a client writes. Pure.

use super::endpoints::OWN;

/// Paths without parameters below those that the router serves.
const BELOW: [&str; 3] = [
    "/v1/responses/input_tokens",
    "/v1/messages/count_tokens",
    "/v1/messages/batches",
];

/// `None` for a path that is no route.
pub(super) fn of(path: &str) -> Option<&'static str> {
    let mut fixed = OWN.into_iter().chain(BELOW);
    if let Some(fixed) = fixed.find(|fixed| *fixed == path) {
        return Some(fixed);
    }
    let (collection, rest) = path.strip_prefix("/v1/")?.split_once('/')?;
    let parts: Vec<&str> = match collection {
        // A model's name may have slashes.
        "models" => vec![rest],
        _ => rest.splitn(4, '/').collect(),
    };
    if parts.iter().any(|part| part.is_empty()) {
        return None;
    }
    Some(match (collection, parts.as_slice()) {
        ("models", [_]) => "/v1/models/{model}",
        ("responses", [_]) => "/v1/responses/{response_id}",
        ("responses", [_, "cancel"]) => "/v1/responses/{response_id}/cancel",
        ("responses", [_, "input_items"]) => "/v1/responses/{response_id}/input_items",
        ("files", [_]) => "/v1/files/{file_id}",
        ("files", [_, "content"]) => "/v1/files/{file_id}/content",
        ("batches", [_]) => "/v1/batches/{batch_id}",
        ("batches", [_, "cancel"]) => "/v1/batches/{batch_id}/cancel",
        ("messages", ["batches", _]) => "/v1/messages/batches/{batch_id}",
        ("messages", ["batches", _, "cancel"]) => "/v1/messages/batches/{batch_id}/cancel",
        ("messages", ["batches", _, "results"]) => "/v1/messages/batches/{batch_id}/results",
        ("conversations", [_]) => "/v1/conversations/{conversation_id}",
        ("conversations", [_, "items"]) => "/v1/conversations/{conversation_id}/items",
        ("conversations", [_, "items", _]) => "/v1/conversations/{conversation_id}/items/{item_id}",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_and_names_are_no_part_of_a_route() {
        let check = |path: &str, expected: Option<&str>| assert_eq!(of(path), expected, "{path}");
        check("/v1/chat/completions", Some("/v1/chat/completions"));
        check(
            "/v1/responses/input_tokens",
            Some("/v1/responses/input_tokens"),
        );
        check("/inference/v1/generate", Some("/inference/v1/generate"));
        check("/v1/responses/resp_1", Some("/v1/responses/{response_id}"));
        check(
            "/v1/responses/resp_1/cancel",
            Some("/v1/responses/{response_id}/cancel"),
        );
        check("/v1/responses/resp_1/secret", None);
        check("/v1/responses/", None);
        check("/v1/models/org/name", Some("/v1/models/{model}"));
        check("/v1/models/", None);
        let item = "/v1/conversations/{conversation_id}/items/{item_id}";
        check("/v1/conversations/c/items/i", Some(item));
        check("/v1/conversations/c/items/i/j", None);
        check("/v1/files/f/content", Some("/v1/files/{file_id}/content"));
        check("/v1/batches/b", Some("/v1/batches/{batch_id}"));
        let results = "/v1/messages/batches/{batch_id}/results";
        check("/v1/messages/batches/b/results", Some(results));
        check("/v1/other/x", None);
        check("/secret", None);
    }
}
