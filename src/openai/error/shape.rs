//! Which API's errors a client expects. Pure.

use hyper::HeaderMap;
use hyper::header::HeaderName;

const MESSAGES: &str = "/v1/messages";

/// The shape of the errors of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorShape {
    OpenAi,
    Anthropic,
}

/// All of Anthropic's clients send it.
static ANTHROPIC_VERSION: HeaderName = HeaderName::from_static("anthropic-version");

impl ErrorShape {
    /// The path may be none of the API's: a client of Anthropic's is known by a header.
    pub fn of_request(path: &str, headers: &HeaderMap) -> Self {
        if headers.contains_key(&ANTHROPIC_VERSION) {
            return Self::Anthropic;
        }
        Self::of_path(path)
    }

    pub fn of_path(path: &str) -> Self {
        match path.strip_prefix(MESSAGES) {
            Some(rest) if rest.is_empty() || rest.starts_with('/') => Self::Anthropic,
            _ => Self::OpenAi,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_paths_of_messages_have_that_shape() {
        let check =
            |path: &str, expected| assert_eq!(ErrorShape::of_path(path), expected, "{path}");
        check("/v1/messages", ErrorShape::Anthropic);
        check("/v1/messages/count_tokens", ErrorShape::Anthropic);
        check("/v1/messages/batches", ErrorShape::Anthropic);
        check("/v1/messagesx", ErrorShape::OpenAi);
        check("/v1/chat/completions", ErrorShape::OpenAi);
    }

    #[test]
    fn a_client_of_anthropics_has_it_wherever_it_asks() {
        let mut headers = HeaderMap::new();
        let path = "/v1/v1/messages";
        assert_eq!(ErrorShape::of_request(path, &headers), ErrorShape::OpenAi);
        headers.insert(&ANTHROPIC_VERSION, "2023-06-01".parse().unwrap());
        assert_eq!(
            ErrorShape::of_request(path, &headers),
            ErrorShape::Anthropic
        );
    }
}
