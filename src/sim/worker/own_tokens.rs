//! A model's own tokens, where the pretend engine was given its folder: made by the very code that the
//! router makes them by, so what tests compare is everything around it.

use std::io;
use std::path::Path;
use std::sync::Arc;

use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::json;

use super::ask::{Api, Prompt, Tokenize};
use super::problem::Problem;
use crate::observe;
use crate::observe::metrics::Registry;
use crate::prompt;
use crate::prompt::cache::{self, Cache};
use crate::prompt::folder::Folder;
use crate::prompt::render::Options;
use crate::prompt::tokenizer::{self, Tokenizer};

#[derive(Debug)]
pub(crate) struct OwnTokens(Arc<Tokenizer>);

impl OwnTokens {
    pub(crate) fn read(folder: &Path) -> io::Result<Self> {
        let folder = Folder::read(folder, None, Options::default()).map_err(|errors| {
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
            tokenizer::Settings::default(),
            tokenizer::Metrics::new(&registry),
        ))))
    }

    /// A request's prompts; none where it brings its tokens along.
    pub(crate) fn prompts(&self, api: Api, body: &[u8]) -> Result<Option<Vec<Vec<u32>>>, Problem> {
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
        };
        let request: Body = super::ask::from_json(body)?;
        let given = request
            .kv_transfer_params
            .and_then(|it| it.prompt_token_ids);
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

    /// For `/tokenize`, whose body is a chat's or a completion's.
    pub(crate) fn tokenized(&self, body: &[u8]) -> Result<Tokenize, Problem> {
        #[derive(Deserialize)]
        struct Body {
            messages: Option<IgnoredAny>,
        }
        let request: Body = super::ask::from_json(body)?;
        let api = match request.messages {
            Some(_) => prompt::Api::Chat,
            None => prompt::Api::Completions,
        };
        let tokens = self.tokens(api, body)?;
        let pieces = None;
        Ok(Tokenize { tokens, pieces })
    }

    fn tokens(&self, api: prompt::Api, body: &[u8]) -> Result<Vec<u32>, Problem> {
        let tokens = self.0.tokens(api, body, observe::unix_s());
        let tokens = tokens.map_err(|unknown| Problem::bad_request(unknown.to_string()))?;
        // An engine has tokens of its own for an image; here the prompt ends before it.
        Ok(tokens.ids)
    }
}
