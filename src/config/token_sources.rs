//! Where each model's token ids come from. The check loads the tokenizers' files, and the start takes what the
//! check loaded.

use tracing::warn;

use super::model::ModelOverride;
use super::reader::Reader;
use super::settings::Config;
use super::tokenizer::{Format, From, Tokenizer};
use crate::prompt::folder::ModelFolder;
use crate::prompt::probes::{self, RefusedKind};
use crate::relay::prompt::tokens::Source;

/// What is wrong with the tokenizers of a configuration that was not checked.
#[derive(Debug, thiserror::Error)]
#[error("{}", .0.join("; "))]
pub struct Unreadable(Vec<String>);

impl Config {
    /// A line for each model whose tokenizer was loaded, and not taken by the start yet: which kinds of requests it
    /// tokenizes, and of the others why not.
    pub fn tokenizer_report(&self) -> Vec<String> {
        let loaded = self.loaded.folders.lock();
        let report = |(index, (_, folder)): (&usize, &(Tokenizer, ModelFolder))| {
            let name = self.models.get(*index).map(|model| model.name.as_str());
            let name = name.unwrap_or_default();
            let refused = probes::refused(&folder.renderer);
            let is_refused = |kind: &&str| refused.iter().any(|refusal| refusal.kind == *kind);
            let tokenized: Vec<&str> = probes::KINDS
                .into_iter()
                .filter(|kind| !is_refused(kind))
                .collect();
            let tokenized = if tokenized.is_empty() {
                "no chats".to_owned()
            } else {
                tokenized.join(", ")
            };
            let mut line = format!("model {name}: the router tokenizes {tokenized}");
            for RefusedKind { kind, why } in refused {
                line += &format!("; not {kind} ({why})");
            }
            line
        };
        loaded.iter().map(report).collect()
    }

    /// Where each model's token ids come from.
    pub fn token_sources(&self) -> Result<Vec<(String, Source)>, Unreadable> {
        let mut loaded = std::mem::take(&mut *self.loaded.folders.lock());
        let mut sources = Vec::new();
        let mut wrong = Vec::new();
        for (index, model) in self.models.iter().enumerate() {
            let Some(tokenizer) = &model.tokenizer else {
                continue;
            };
            let source = match tokenizer.from {
                From::Engine => Source::Engine,
                From::Folder if tokenizer.path.is_empty() => continue,
                From::Folder if self.loaded.is_running(&model.name) => Source::Kept,
                From::Folder => {
                    let known = loaded.remove(&index);
                    let known = known.filter(|(of, _)| of == tokenizer);
                    let folder = known.map_or_else(|| tokenizer.load(), |(_, folder)| Ok(folder));
                    match folder {
                        Ok(folder) => {
                            warn_of_refused(model, tokenizer, &folder);
                            Source::Folder(Box::new(folder))
                        }
                        Err(errors) => {
                            let errors = errors.iter().map(|error| (index, error));
                            wrong
                                .extend(errors.map(|(at, error)| format!("models[{at}]: {error}")));
                            continue;
                        }
                    }
                }
            };
            sources.push((model.name.clone(), source));
        }
        if wrong.is_empty() {
            Ok(sources)
        } else {
            Err(Unreadable(wrong))
        }
    }
}

fn warn_of_refused(model: &ModelOverride, tokenizer: &Tokenizer, folder: &ModelFolder) {
    if !folder.renderer.has_template() {
        warn!(
            model = model.name,
            folder = tokenizer.path,
            "the model has no usable chat template; its chat and Responses requests are routed by prediction"
        );
        return;
    }
    for RefusedKind { kind, why } in probes::refused(&folder.renderer) {
        // Many templates take no system message, and then neither does the engine; all take a user's.
        let is_usual = kind == "system";
        if !is_usual {
            warn!(
                model = model.name,
                kind,
                why,
                "requests of this kind cannot be tokenized; unless the engine refuses them, too, they are routed by prediction"
            );
        }
    }
}

/// Loads the tokenizers of all models, and reports those that cannot be loaded.
pub(super) fn check(config: &mut Config, reader: &mut Reader) {
    let Config { models, loaded, .. } = config;
    for (index, model) in models.iter().enumerate() {
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
                ("content_format", tokenizer.content_format != Format::Auto),
                (
                    "exclude_tools_when_tool_choice_none",
                    tokenizer.exclude_tools_when_tool_choice_none,
                ),
                (
                    "reasoning_effort_map",
                    !tokenizer.reasoning_effort_map.is_empty(),
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
        let checked = (tokenizer.clone(), tokenizer.files());
        let is_running = loaded.running.get(&model.name) == Some(&checked);
        loaded.checked.insert(model.name.clone(), checked);
        if is_running {
            continue;
        }
        match tokenizer.load() {
            Ok(folder) => {
                let kept = (tokenizer.clone(), folder);
                loaded.folders.lock().insert(index, kept);
            }
            Err(errors) => {
                for error in errors {
                    let key = if error.is_of_template_override() {
                        "chat_template"
                    } else {
                        "path"
                    };
                    reader.file_problem(&format!("{path}.{key}"), error.is_missing(), error);
                }
            }
        }
    }
}
