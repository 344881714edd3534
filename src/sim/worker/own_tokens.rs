//! Tokenization with a model's own tokenizer and chat template, if the engine was given the model's folder. Uses the
//! router's code, so tests compare everything around it.

use std::io;
use std::path::Path;
use std::sync::Arc;

use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::json;

use super::error::ApiError;
use super::request::{self, Api, Prompt};
use crate::observe;
use crate::observe::metrics::Registry;
use crate::prompt;
use crate::prompt::cache::{self, Cache};
use crate::prompt::folder::ModelFolder;
use crate::prompt::render::Options;
use crate::prompt::tokenizer::{self, Tokenizer};

#[derive(Debug)]
pub(crate) struct OwnTokens(Arc<Tokenizer>);

impl OwnTokens {
    pub(crate) fn read(folder: &Path) -> io::Result<Self> {
        let folder = ModelFolder::read(folder, None, Options::default()).map_err(|errors| {
            let errors: Vec<String> = errors.iter().map(ToString::to_string).collect();
            io::Error::other(errors.join("; "))
        })?;
        let registry = Registry::default();
        let cache = Cache::new(
            &cache::Settings::default(),
            0,
            cache::Metrics::new(&registry),
        );
        Ok(Self(Arc::new(Tokenizer::new(
            folder.renderer,
            folder.vocabulary,
            Arc::new(cache),
            tokenizer::Metrics::new(&registry),
        ))))
    }

    /// The tokens of a request's prompts; `None` if the request has tokens instead of text.
    pub(crate) fn prompts(&self, api: Api, body: &[u8]) -> Result<Option<Vec<Vec<u32>>>, ApiError> {
        #[derive(Deserialize)]
        struct Body {
            kv_transfer_params: Option<Transfer>,
            prompt: Option<Prompt>,
        }
        #[derive(Deserialize)]
        struct Transfer {
            prompt_token_ids: Option<Vec<u32>>,
        }
        let api = match api {
            Api::Chat => prompt::Api::Chat,
            Api::Completions => prompt::Api::Completions,
            Api::Responses => prompt::Api::Responses,
            Api::Messages => prompt::Api::Messages,
        };
        let request: Body = request::from_json(body)?;
        let given = request
            .kv_transfer_params
            .and_then(|params| params.prompt_token_ids);
        if given.is_some() && api != prompt::Api::Completions {
            return Ok(None);
        }
        match request.prompt {
            Some(Prompt::Tokens(_) | Prompt::TokenLists(_)) => Ok(None),
            Some(Prompt::Texts(texts)) => {
                let each = texts.iter().map(|text| {
                    let body = json!({ "prompt": text }).to_string();
                    self.tokens(api, body.as_bytes())
                });
                each.collect::<Result<_, _>>().map(Some)
            }
            Some(Prompt::Text(_)) | None => self.tokens(api, body).map(|ids| Some(vec![ids])),
        }
    }

    /// The number of tokens of a Messages request.
    pub(crate) fn count(&self, body: &[u8]) -> Result<usize, ApiError> {
        self.tokens(prompt::Api::CountTokens, body)
            .map(|ids| ids.len())
    }

    /// The tokens of a `/tokenize` request, whose body is that of a chat or of a completion.
    pub(crate) fn tokenized(&self, body: &[u8]) -> Result<Vec<u32>, ApiError> {
        #[derive(Deserialize)]
        struct Body {
            messages: Option<IgnoredAny>,
        }
        let request: Body = request::from_json(body)?;
        let api = match request.messages {
            Some(_) => prompt::Api::Chat,
            None => prompt::Api::Completions,
        };
        self.tokens(api, body)
    }

    fn tokens(&self, api: prompt::Api, body: &[u8]) -> Result<Vec<u32>, ApiError> {
        let tokens = self.0.tokens(api, body, observe::unix_s());
        let tokens = tokens.map_err(|error| ApiError::bad_request(error.to_string()))?;
        // The prompt ends before its first image: the simulated engine has no image tokens.
        Ok(tokens.ids)
    }
}
