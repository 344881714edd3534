//! Where a model's tokenizer is, and loading it once: what a check has loaded, the start takes.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::sync::Arc;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use tracing::warn;

use super::document::Document;
use super::{Config, ModelOverride};
use crate::prompt::folder::{self, Folder};
use crate::prompt::render::Options;
use crate::prompt::template::ContentFormat;
use crate::relay::tokens::Source;

/// How a model's prompts become the token ids that its engines will compute.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Tokenizer {
    pub from: From,
    /// The model's own folder, as the engine is given it. Empty: prompts are not tokenised.
    pub path: String,
    /// A file, as `--chat-template` of the engine.
    pub chat_template: String,
    /// As `--default-chat-template-kwargs` of the engine.
    pub chat_template_kwargs: Map<String, Value>,
    /// As `--chat-template-content-format` of the engine.
    pub content_format: Format,
    /// As `--exclude-tools-when-tool-choice-none` of the engine.
    pub exclude_tools_when_tool_choice_none: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum From {
    /// The files at `path`.
    #[default]
    Folder,
    /// One of the model's engines, asked with each new prompt.
    Engine,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Format {
    #[default]
    Auto,
    String,
    Openai,
}

impl Tokenizer {
    fn is_folder(&self) -> bool {
        self.from == From::Folder && !self.path.is_empty()
    }

    fn load(&self) -> Result<Folder, Vec<folder::Error>> {
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
        Folder::read(Path::new(&self.path), template, options)
    }
}

/// By place in `models`. Says nothing of what was configured, so all are equal.
#[derive(Clone, Debug, Default)]
pub struct Loaded(Arc<Mutex<BTreeMap<usize, (Tokenizer, Folder)>>>);

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
        for (place, model) in self.models.iter().enumerate() {
            let Some(tokenizer) = &model.tokenizer else {
                continue;
            };
            let source = match tokenizer.from {
                From::Engine => Source::Engine,
                From::Folder if tokenizer.path.is_empty() => continue,
                From::Folder => {
                    let known = loaded.remove(&place);
                    let known = known.filter(|(of, _)| of == tokenizer);
                    let folder = known.map_or_else(|| tokenizer.load(), |(_, folder)| Ok(folder));
                    match folder {
                        Ok(folder) => {
                            warn_of_what_lacks(model, tokenizer, &folder);
                            Source::Folder(Box::new(folder))
                        }
                        Err(errors) => {
                            let errors = errors.iter().map(|error| (place, error));
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

fn warn_of_what_lacks(model: &ModelOverride, tokenizer: &Tokenizer, folder: &Folder) {
    if !folder.renderer.has_template() {
        warn!(
            model = model.name,
            folder = tokenizer.path,
            "no chat template that is known here; chats and responses are routed by prediction"
        );
    }
}

/// Loads what the models name, and tells what cannot be.
pub(super) fn check(config: &Config, document: &mut Document<'_>) {
    for (place, model) in config.models.iter().enumerate() {
        let Some(tokenizer) = &model.tokenizer else {
            continue;
        };
        let path = format!("models[{place}].tokenizer");
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
                document.problem(&format!("{path}.{key}"), message);
            }
        }
        if !tokenizer.is_folder() {
            continue;
        }
        match tokenizer.load() {
            Ok(folder) => {
                let kept = (tokenizer.clone(), folder);
                config.loaded.0.lock().insert(place, kept);
            }
            Err(errors) => {
                for error in errors {
                    let key = match error.is_of_given_template() {
                        true => "chat_template",
                        false => "path",
                    };
                    document.problem(&format!("{path}.{key}"), error);
                }
            }
        }
    }
}
