//! The tokenizer of a model. The check loads its files, and the start takes what the check loaded.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::sync::Arc;

use parking_lot::Mutex;
use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};
use tracing::warn;

use super::reader::Reader;
use super::{Config, ModelOverride};
use crate::prompt::folder::{self, ModelFolder};
use crate::prompt::render::Options;
use crate::prompt::template::ContentFormat;
use crate::relay::tokens::Source;

/// How a model's prompts become the token ids that its engines compute.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Tokenizer {
    /// Who tokenises.
    pub from: From,
    /// The folder that the engine is given as its model or `--tokenizer`, on this machine, such as the one that
    /// `hf download ORG/MODEL --include "*.json" "*.jinja"` prints. `tokenizer.json` is needed;
    /// `tokenizer_config.json`, `chat_template.jinja` and the like are read if they exist, weights never.
    pub path: String,
    /// A file, as the engine's `--chat-template`. Empty: the folder's own template.
    pub chat_template: String,
    /// As the engine's `--default-chat-template-kwargs`.
    pub chat_template_kwargs: Map<String, Value>,
    /// As the engine's `--chat-template-content-format`.
    pub content_format: Format,
    /// As the engine's `--exclude-tools-when-tool-choice-none`.
    pub exclude_tools_when_tool_choice_none: bool,
}

/// Who tokenises a model's prompts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum From {
    /// The router, with the files at `path`.
    #[default]
    Folder,
    /// An engine of the model, which is asked with each new prompt (vLLM's render endpoints with
    /// `--enable-scale-out`, else `/tokenize`). Each such request waits up to
    /// `tokenization.advanced.engine.timeout`.
    Engine,
}

/// How the content of messages is given to the chat template.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Format {
    /// As the template looks like.
    #[default]
    Auto,
    /// As one text.
    String,
    /// As a list of parts.
    Openai,
}

/// The forms in which a tokenizer is written: the path of a folder, or a map.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(untagged)]
pub(super) enum PathOrMap {
    Path(String),
    Map(Box<Tokenizer>),
}

/// Reads a tokenizer from any of its forms.
pub(super) fn path_or_map<'de, D>(deserializer: D) -> Result<Option<Tokenizer>, D::Error>
where
    D: Deserializer<'de>,
{
    let form = Option::<PathOrMap>::deserialize(deserializer)?;
    Ok(form.map(|form| match form {
        PathOrMap::Path(path) => Tokenizer {
            path,
            ..Tokenizer::default()
        },
        PathOrMap::Map(tokenizer) => *tokenizer,
    }))
}

impl Tokenizer {
    /// Whether there is one at all.
    pub(super) fn is_set(&self) -> bool {
        self.from == From::Engine || !self.path.is_empty()
    }

    fn is_folder(&self) -> bool {
        self.from == From::Folder && !self.path.is_empty()
    }

    fn load(&self) -> Result<ModelFolder, Vec<folder::Error>> {
        let options = Options {
            chat_template_kwargs: self.chat_template_kwargs.clone(),
            content_format: match self.content_format {
                Format::Auto => None,
                Format::String => Some(ContentFormat::String),
                Format::Openai => Some(ContentFormat::Openai),
            },
            exclude_tools_when_tool_choice_none: self.exclude_tools_when_tool_choice_none,
        };
        let template = Some(Path::new(&self.chat_template));
        let template = template.filter(|path| !path.as_os_str().is_empty());
        ModelFolder::read(Path::new(&self.path), template, options)
    }
}

/// Loaded tokenizers, by index in `models`. They are no part of what was configured, so all are equal.
#[derive(Clone, Debug, Default)]
pub struct Loaded(Arc<Mutex<BTreeMap<usize, (Tokenizer, ModelFolder)>>>);

impl PartialEq for Loaded {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

/// What is wrong with the tokenizers of a configuration that was not checked.
#[derive(Debug)]
pub struct Unreadable(Vec<String>);

impl fmt::Display for Unreadable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.join("; "))
    }
}

impl std::error::Error for Unreadable {}

impl Config {
    /// Where each model's token ids come from.
    pub fn token_sources(&self) -> Result<Vec<(String, Source)>, Unreadable> {
        let mut loaded = std::mem::take(&mut *self.loaded.0.lock());
        let mut sources = Vec::new();
        let mut wrong = Vec::new();
        for (index, model) in self.models.iter().enumerate() {
            let Some(tokenizer) = &model.tokenizer else {
                continue;
            };
            let source = match tokenizer.from {
                From::Engine => Source::Engine,
                From::Folder if tokenizer.path.is_empty() => continue,
                From::Folder => {
                    let known = loaded.remove(&index);
                    let known = known.filter(|(of, _)| of == tokenizer);
                    let folder = known.map_or_else(|| tokenizer.load(), |(_, folder)| Ok(folder));
                    match folder {
                        Ok(folder) => {
                            warn_without_template(model, tokenizer, &folder);
                            Source::Folder(Box::new(folder))
                        }
                        Err(errors) => {
                            let errors = errors.iter().map(|error| (index, error));
                            wrong.extend(errors.map(|(at, it)| format!("models[{at}]: {it}")));
                            continue;
                        }
                    }
                }
            };
            sources.push((model.name.clone(), source));
        }
        match wrong.is_empty() {
            true => Ok(sources),
            false => Err(Unreadable(wrong)),
        }
    }
}

fn warn_without_template(model: &ModelOverride, tokenizer: &Tokenizer, folder: &ModelFolder) {
    if !folder.renderer.has_template() {
        warn!(
            model = model.name,
            folder = tokenizer.path,
            "the model has no usable chat template; its chat and Responses requests are routed by prediction"
        );
    }
}

/// Loads the tokenizers of all models, and reports those that cannot be loaded.
pub(super) fn check(config: &Config, reader: &mut Reader) {
    for (index, model) in config.models.iter().enumerate() {
        let Some(tokenizer) = &model.tokenizer else {
            continue;
        };
        let path = format!("models[{index}].tokenizer");
        if tokenizer.from == From::Engine {
            let unused = [
                ("path", !tokenizer.path.is_empty()),
                ("chat_template", !tokenizer.chat_template.is_empty()),
                (
                    "chat_template_kwargs",
                    !tokenizer.chat_template_kwargs.is_empty(),
                ),
            ];
            for (key, _) in unused.into_iter().filter(|(_, is_set)| *is_set) {
                let message =
                    "is not used where the engine is asked; take it out, or `from: engine`";
                reader.problem(&format!("{path}.{key}"), message);
            }
        }
        if !tokenizer.is_folder() {
            continue;
        }
        match tokenizer.load() {
            Ok(folder) => {
                let kept = (tokenizer.clone(), folder);
                config.loaded.0.lock().insert(index, kept);
            }
            Err(errors) => {
                for error in errors {
                    let key = match error.is_of_template_override() {
                        true => "chat_template",
                        false => "path",
                    };
                    reader.problem(&format!("{path}.{key}"), error);
                }
            }
        }
    }
}
