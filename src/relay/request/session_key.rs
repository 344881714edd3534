//! The key of a request's session: the first of the configured sources that the request has. Pure.

use std::str::FromStr;

use hyper::HeaderMap;
use hyper::header::HeaderName;

use crate::prompt::PeekedBody;
use crate::routing::rendezvous;

/// Where a request's session affinity key comes from.
#[derive(Clone, Debug, PartialEq)]
pub enum KeySource {
    Header(HeaderName),
    SessionId,
    PromptCacheKey,
    User,
}

impl FromStr for KeySource {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "session_id" => Ok(KeySource::SessionId),
            "prompt_cache_key" => Ok(KeySource::PromptCacheKey),
            "user" => Ok(KeySource::User),
            _ => match text.strip_prefix("header:").map(str::parse) {
                Some(Ok(name)) => Ok(KeySource::Header(name)),
                Some(Err(_)) => Err(format!("`{text}` does not name a header")),
                None => Err(format!(
                    "`{text}` is none of header:NAME, session_id, prompt_cache_key, user"
                )),
            },
        }
    }
}

/// The hash of the request's first key, in the order of `sources`.
pub(in crate::relay) fn session_key(
    sources: &[KeySource],
    headers: &HeaderMap,
    peek: &PeekedBody<'_>,
) -> Option<u64> {
    sources.iter().find_map(|source| {
        let text = match source {
            KeySource::Header(name) => headers.get(name).map(|value| value.as_bytes()),
            KeySource::SessionId => peek.session_id.as_deref().map(str::as_bytes),
            KeySource::PromptCacheKey => peek.prompt_cache_key.as_deref().map(str::as_bytes),
            KeySource::User => peek.user.as_deref().map(str::as_bytes),
        };
        text.filter(|text| !text.is_empty()).map(rendezvous::key)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_comes_from_a_header_or_a_field() {
        assert_eq!("user".parse(), Ok(KeySource::User));
        assert_eq!(
            "header:X-Team".parse(),
            Ok(KeySource::Header(HeaderName::from_static("x-team")))
        );
        assert!("header:a b".parse::<KeySource>().is_err());
        assert!("team".parse::<KeySource>().is_err());
    }
}
