//! Which API's errors a client expects. Pure.

const MESSAGES: &str = "/v1/messages";

/// The shape of the errors of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorShape {
    OpenAi,
    Anthropic,
}

impl ErrorShape {
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
}
