//! The route table of the API. Pure.

use hyper::Method;

use super::endpoints;
use crate::batches::{self, BatchEndpoint};
use crate::openai::RouteMatch;
use crate::prompt::Api;
use crate::responses::{self, Endpoint, Mode};

/// The endpoint of a path and method.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Route {
    Relay(Api),
    Responses(Endpoint),
    Batches(BatchEndpoint),
    Models,
    /// The tokens of a Messages request.
    CountTokens,
    /// `/v1/models/NAME`.
    Model,
    NotFound,
    WrongMethod {
        allow: &'static str,
    },
}

/// `further`: the paths that the configuration lists. `HEAD` is a `GET` of the pages that monitors and clients try first.
pub(super) fn route(method: &Method, path: &str, mode: Mode, further: &[String]) -> Route {
    if mode == Mode::Stateful {
        match responses::route(method, path) {
            RouteMatch::Endpoint(endpoint) => return Route::Responses(endpoint),
            RouteMatch::WrongMethod(allow) => return Route::WrongMethod { allow },
            RouteMatch::NotFound => {}
        }
    }
    match batches::route(method, path) {
        RouteMatch::Endpoint(endpoint) => return Route::Batches(endpoint),
        RouteMatch::WrongMethod(allow) => return Route::WrongMethod { allow },
        RouteMatch::NotFound => {}
    }
    let (found, allow) = match path {
        "/v1/chat/completions" => (Route::Relay(Api::Chat), "POST"),
        "/v1/completions" => (Route::Relay(Api::Completions), "POST"),
        "/v1/responses" => (Route::Relay(Api::Responses), "POST"),
        "/v1/messages" => (Route::Relay(Api::Messages), "POST"),
        "/inference/v1/generate" => (Route::Relay(Api::Generate), "POST"),
        "/v1/messages/count_tokens" => (Route::CountTokens, "POST"),
        "/v1/embeddings" => (Route::Relay(Api::Embeddings), "POST"),
        "/v1/rerank" | "/rerank" | "/v2/rerank" => (Route::Relay(Api::Rerank), "POST"),
        "/tokenize" => (Route::Relay(Api::Tokenize), "POST"),
        "/detokenize" => (Route::Relay(Api::Detokenize), "POST"),
        "/v1/models" => (Route::Models, "GET"),
        _ if path
            .strip_prefix("/v1/models/")
            .is_some_and(|name| !name.is_empty()) =>
        {
            (Route::Model, "GET")
        }
        // Whatever the list has, what changes an engine does not pass.
        _ if further.iter().any(|listed| listed == path)
            && endpoints::change_in(path).is_none() =>
        {
            (Route::Relay(Api::Other), "POST")
        }
        _ => return Route::NotFound,
    };
    let is_head = method == Method::HEAD && allow == "GET";
    if method.as_str() == allow || is_head {
        found
    } else {
        Route::WrongMethod { allow }
    }
}

/// The path of the API that a client probably meant: with `/v1` too often, not at all or behind something else, with
/// slashes too many, or with a letter or two wrong. For the text of an error.
pub(super) fn meant(path: &str, mode: Mode, further: &[String]) -> Option<String> {
    let is_known = |path: &str| {
        let found = route(&Method::POST, path, mode, further);
        found != Route::NotFound
    };
    if path.len() > PATH_BYTES_MAX {
        return None;
    }
    let parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty()).collect();
    if parts.len() > PARTS_MAX {
        return None;
    }
    let ends = (0..parts.len()).map(|start| parts[start..].join("/"));
    let mut candidates = ends.flat_map(|end| [format!("/{end}"), format!("/v1/{end}")]);
    candidates
        .find(|candidate| is_known(candidate))
        .or_else(|| {
            let slips = |known: &str| strsim::damerau_levenshtein(&path.to_lowercase(), known);
            let near = endpoints::OWN
                .into_iter()
                .map(|known| (slips(known), known));
            let near = near.filter(|(slips, known)| *slips <= SLIPS_MAX && is_known(known));
            near.min().map(|(_, known)| known.to_owned())
        })
}

/// A longer path was not meant to be one of ours, and costs the more to compare.
const PATH_BYTES_MAX: usize = 256;
/// A path with more parts was not meant to be one of ours.
const PARTS_MAX: usize = 8;
/// Letters of a path that may be wrong.
const SLIPS_MAX: usize = 2;

pub(super) const NO_API: &str = "none";

/// Which API a path is of, in metrics.
pub(super) fn api_of(path: &str, further: &[String]) -> &'static str {
    match route(&Method::POST, path, Mode::PassThrough, further) {
        Route::Relay(api) => api.as_str(),
        Route::CountTokens => Api::CountTokens.as_str(),
        _ if path.starts_with("/v1/responses") || path.starts_with("/v1/conversations") => {
            Api::Responses.as_str()
        }
        _ if batches::route(&Method::GET, path) != RouteMatch::NotFound => "batches",
        _ => NO_API,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_endpoint_has_one_method_and_the_rest_is_refused() {
        let check = |method: &Method, path: &str, expected| {
            let found = route(method, path, Mode::Stateful, &[]);
            assert_eq!(found, expected, "{method} {path}")
        };
        check(
            &Method::POST,
            "/v1/chat/completions",
            Route::Relay(Api::Chat),
        );
        check(
            &Method::GET,
            "/v1/chat/completions",
            Route::WrongMethod { allow: "POST" },
        );
        check(
            &Method::POST,
            "/v1/models",
            Route::WrongMethod { allow: "GET" },
        );
        check(&Method::POST, "/v1/messages", Route::Relay(Api::Messages));
        check(
            &Method::POST,
            "/v1/messages/count_tokens",
            Route::CountTokens,
        );
        check(&Method::GET, "/v1/models", Route::Models);
        check(&Method::GET, "/v1/models/org/name", Route::Model);
        check(&Method::GET, "/v1/models/", Route::NotFound);
        check(&Method::GET, "/", Route::NotFound);
        check(&Method::POST, "/v1/chat/completions/", Route::NotFound);
        check(
            &Method::POST,
            "/v1/responses",
            Route::Responses(Endpoint::Create),
        );
        check(
            &Method::GET,
            "/v1/responses",
            Route::WrongMethod { allow: "POST" },
        );
    }

    #[test]
    fn listed_endpoints_are_passed_on_unless_they_change_an_engine() {
        let listed = ["/score", "/sleep", "/v1/audio/transcriptions"].map(str::to_owned);
        let check = |method: &Method, path: &str, expected| {
            let found = route(method, path, Mode::Stateful, &listed);
            assert_eq!(found, expected, "{method} {path}");
        };
        check(&Method::POST, "/score", Route::Relay(Api::Other));
        check(
            &Method::POST,
            "/v1/audio/transcriptions",
            Route::Relay(Api::Other),
        );
        check(&Method::GET, "/score", Route::WrongMethod { allow: "POST" });
        check(&Method::POST, "/sleep", Route::NotFound);
        check(&Method::POST, "/score/", Route::NotFound);
        check(&Method::POST, "/%73core", Route::NotFound);
        check(&Method::POST, "/classify", Route::NotFound);
    }

    #[test]
    fn a_path_that_is_nearly_one_of_ours_names_it() {
        let check = |path: &str, expected: Option<&str>| {
            let found = meant(path, Mode::Stateful, &["/score".to_owned()]);
            assert_eq!(found.as_deref(), expected, "{path}");
        };
        check("/chat/completions", Some("/v1/chat/completions"));
        check("/v1/v1/chat/completions", Some("/v1/chat/completions"));
        check("/v1/chat/completions/", Some("/v1/chat/completions"));
        check("//v1//chat/completions", Some("/v1/chat/completions"));
        check("/openai/v1/responses", Some("/v1/responses"));
        check("/api/models", Some("/v1/models"));
        check("/v1/chat/completion", Some("/v1/chat/completions"));
        check("/v1/Chat/Completions", Some("/v1/chat/completions"));
        check("/v1/score", Some("/score"));
        check("/v1/responses/resp_1/", Some("/v1/responses/resp_1"));
        check("/v1/chat", None);
        check("/favicon.ico", None);
        check("/", None);
        check(&"/v1".repeat(50), None);
        check(&format!("/v1/models/{}/", "x".repeat(300)), None);
    }

    #[test]
    fn files_and_batches_have_routes_in_either_mode() {
        for mode in [Mode::Stateful, Mode::PassThrough] {
            let found = |path: &str| route(&Method::POST, path, mode, &[]);
            let create = Route::Batches(BatchEndpoint::Create);
            assert_eq!(found("/v1/batches"), create);
            let file = Route::Batches(BatchEndpoint::CreateFile);
            assert_eq!(found("/v1/files"), file);
            let messages = Route::Batches(BatchEndpoint::CreateOfMessages);
            assert_eq!(found("/v1/messages/batches"), messages);
            let wrong = Route::WrongMethod { allow: "GET" };
            assert_eq!(found("/v1/batches/batch_1"), wrong);
        }
        assert_eq!(api_of("/v1/files/file-1/content", &[]), "batches");
        assert_eq!(api_of("/v1/messages/batches", &[]), "batches");
        assert_eq!(api_of("/v1/messages", &[]), "messages");
    }

    #[test]
    fn head_is_a_get_of_pages_and_of_nothing_else() {
        let head = |path: &str| route(&Method::HEAD, path, Mode::Stateful, &[]);
        assert_eq!(head("/v1/models"), Route::Models);
        assert_eq!(head("/v1/models/m"), Route::Model);
        let post = Route::WrongMethod { allow: "POST" };
        assert_eq!(head("/v1/chat/completions"), post);
        assert_eq!(head("/v1/responses"), post);
    }

    #[test]
    fn with_pass_through_the_router_stores_no_responses() {
        let found = |method: &Method, path: &str| route(method, path, Mode::PassThrough, &[]);
        assert_eq!(
            found(&Method::POST, "/v1/responses"),
            Route::Relay(Api::Responses)
        );
        assert_eq!(found(&Method::GET, "/v1/responses/x"), Route::NotFound);
        assert_eq!(found(&Method::POST, "/v1/conversations"), Route::NotFound);
    }
}
