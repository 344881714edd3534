//! Decodes the responses of the render and `/tokenize` endpoints.

use serde::Deserialize;
use serde::de::IgnoredAny;

use super::error::Error;

#[derive(Deserialize)]
struct Rendered {
    token_ids: Vec<u32>,
    /// Present if the prompt has images or sounds. The hashes of their blocks are known to the engine only.
    features: Option<IgnoredAny>,
}

/// Chat and Responses return one prompt, completions a list.
#[derive(Deserialize)]
#[serde(untagged)]
enum RenderResponse {
    Single(Rendered),
    List(Vec<Rendered>),
}

/// Decodes a response of a render endpoint.
pub(super) fn read_rendered(response: &[u8]) -> Result<Vec<u32>, Error> {
    let rendered = match serde_json::from_slice(response).map_err(|_| Error::Failed)? {
        RenderResponse::Single(rendered) => rendered,
        RenderResponse::List(mut all) if all.len() == 1 => all.remove(0),
        RenderResponse::List(_) => return Err(Error::Unsupported),
    };
    match rendered.features {
        None => Ok(rendered.token_ids),
        Some(_) => Err(Error::Unsupported),
    }
}

/// Decodes a response of `/tokenize`.
pub(super) fn read_tokenized(response: &[u8]) -> Result<Vec<u32>, Error> {
    #[derive(Deserialize)]
    struct Tokenized {
        tokens: Vec<u32>,
    }
    let tokenized: Tokenized = serde_json::from_slice(response).map_err(|_| Error::Failed)?;
    Ok(tokenized.tokens)
}
