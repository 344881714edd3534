//! The tokenizer of a model, as it is configured, and its files once they are loaded.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;
use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};

use super::watched::{Signature, signature};
use crate::prompt::folder::{self, ModelFolder};
use crate::prompt::render::Options;
use crate::prompt::template::ContentFormat;

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
    /// As the engine's `--reasoning-effort-map` (vLLM 0.33), such as `{xhigh: high}`: what the chat template gets for the
    /// `reasoning_effort` of a request.
    pub reasoning_effort_map: BTreeMap<String, String>,
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

    pub(super) fn is_folder(&self) -> bool {
        self.from == From::Folder && !self.path.is_empty()
    }

    /// The files that the tokenizer is made of, as they are now. Those that it does not read do not matter.
    pub(super) fn files(&self) -> FolderFiles {
        let entries = std::fs::read_dir(&self.path).into_iter().flatten();
        let paths = entries.flatten().map(|entry| entry.path());
        let is_read = |path: &PathBuf| {
            let extension = path.extension().and_then(|extension| extension.to_str());
            extension.is_some_and(|extension| ["json", "jinja"].contains(&extension))
        };
        let mut paths: Vec<PathBuf> = paths.filter(is_read).collect();
        if !self.chat_template.is_empty() {
            paths.push(PathBuf::from(&self.chat_template));
        }
        paths.sort_unstable();
        let seen = |path: PathBuf| {
            let signature = signature(&path);
            (path, signature)
        };
        paths.into_iter().map(seen).collect()
    }

    pub(super) fn load(&self) -> Result<ModelFolder, Vec<folder::Error>> {
        let options = Options {
            chat_template_kwargs: self.chat_template_kwargs.clone(),
            content_format: match self.content_format {
                Format::Auto => None,
                Format::String => Some(ContentFormat::String),
                Format::Openai => Some(ContentFormat::Openai),
            },
            exclude_tools_when_tool_choice_none: self.exclude_tools_when_tool_choice_none,
            reasoning_effort_map: self.reasoning_effort_map.clone(),
        };
        let template = Some(Path::new(&self.chat_template));
        let template = template.filter(|path| !path.as_os_str().is_empty());
        ModelFolder::read(Path::new(&self.path), template, options)
    }
}

/// Loaded tokenizers. They are no part of what was configured, so all are equal.
#[derive(Clone, Debug, Default)]
pub struct Loaded {
    /// By index in `models`, until the start takes them.
    pub(super) folders: Arc<Mutex<BTreeMap<usize, (Tokenizer, ModelFolder)>>>,
    /// The tokenizers that run already, with the files that they were made of: by the name of the model.
    pub(super) running: BTreeMap<String, (Tokenizer, FolderFiles)>,
    /// The tokenizers that this configuration runs with, once it does: by the name of the model.
    pub(super) checked: BTreeMap<String, (Tokenizer, FolderFiles)>,
}

/// The files that a tokenizer was made of, without their content.
pub(super) type FolderFiles = Vec<(PathBuf, Signature)>;

impl Loaded {
    /// For a configuration that may replace the one of `self`: tokenizers whose files are as they were stay.
    pub(super) fn successor(&self) -> Self {
        Self {
            running: self.checked.clone(),
            ..Self::default()
        }
    }

    /// The models whose tokenizer is as it was configured, but made of other files.
    pub(super) fn changed_files(&self) -> impl Iterator<Item = (&String, &Tokenizer)> {
        let checked = self.checked.iter();
        checked.filter_map(|(model, (tokenizer, files))| {
            let (before, files_before) = self.running.get(model)?;
            let is_changed = before == tokenizer && files_before != files;
            is_changed.then_some((model, tokenizer))
        })
    }

    /// Whether a model's tokenizer runs already.
    pub(super) fn is_running(&self, model: &str) -> bool {
        let checked = self.checked.get(model);
        checked.is_some() && checked == self.running.get(model)
    }
}

impl PartialEq for Loaded {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}
