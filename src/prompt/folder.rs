//! Loads the tokenizer and the chat templates of a model from its folder, as published on a model hub.
//!
//! Read once, at start. The precedence of files follows `transformers` 5 and vLLM 0.32: `tokenizer.json` for the
//! vocabulary and BOS/EOS, `chat_template.jinja` before `tokenizer_config.json` for the template,
//! `special_tokens_map.json` only if the configuration lists no added tokens.

mod llama;

use std::path::{Path, PathBuf};
use std::{fs, io};

use serde_json::{Map, Value};

use super::render::{Options, Renderer, Templates};
use super::template::{self, Template};
use super::vocabulary::Vocabulary;

const SPECIAL_TOKENS: &[&str] = &[
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
];
/// Model types and architectures whose chats vLLM renders in code, even if the folder has a template.
const RENDERED_IN_CODE: &[&str] = &[
    "gpt_oss",
    "deepseek_v32",
    "deepseek_v4",
    "deepseek_v41",
    "kimi_k3",
    "inkling",
    "DeepseekV32ForCausalLM",
    "DeepseekV4ForCausalLM",
    "DeepseekV4ForConditionalGeneration",
    "DeepseekV41ForCausalLM",
    "KimiK3ForConditionalGeneration",
    "InklingForCausalLM",
    "InklingForConditionalGeneration",
];

/// Architectures that vLLM tokenizes with code of its own, whatever files the folder has.
const TOKENIZED_IN_CODE: &[&str] = &["MoonshotKimiaForCausalLM", "Alpamayo2Super"];

/// What renders and tokenizes the prompts of a model.
#[derive(Debug)]
pub struct ModelFolder {
    pub renderer: Renderer,
    pub vocabulary: Vocabulary,
}

/// Why a folder cannot be loaded. Each variant names the file.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(
        "{0}: folder not found; give the model folder that the engine uses (its path, or the snapshot in the download cache)"
    )]
    NoFolder(PathBuf),
    #[error("{0}: file not found; give the file that the engine uses as --chat-template")]
    NoTemplate(PathBuf),
    #[error("{0}: cannot be read: {1}")]
    Read(PathBuf, io::Error),
    #[error("{0}: not JSON: {1}")]
    Json(PathBuf, serde_json::Error),
    #[error(
        "{0}: no tokenizer.json; the engine builds its tokenizer from other files, so save one with transformers: \
         `AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)`"
    )]
    NoTokenizer(PathBuf),
    #[error(
        "{0}: the engine tokenizes this model with mistral_common, which is not supported; use `from: engine`, or no tokenizer"
    )]
    Mistral(PathBuf),
    /// With the architecture.
    #[error(
        "{0}: the engine tokenizes {1} with code of its own, which is not supported; use `from: engine`, or no tokenizer"
    )]
    OwnCode(PathBuf, String),
    #[error(
        "{0}: this kind of tokenizer is not supported ({1}); use `from: engine`, or no tokenizer"
    )]
    Tokenizer(PathBuf, String),
    #[error("{0}: the chat template: {1}")]
    Template(PathBuf, template::Error),
    /// The template given with `--chat-template` is invalid.
    #[error("{0}: the chat template: {1}")]
    TemplateOverride(PathBuf, template::Error),
}

impl Error {
    /// Whether the file given with `--chat-template` is wrong, not the folder.
    pub fn is_of_template_override(&self) -> bool {
        matches!(self, Error::NoTemplate(_) | Error::TemplateOverride(..))
    }

    /// Whether the folder or the template is not there at all.
    pub fn is_missing(&self) -> bool {
        match self {
            // It may be a file, or below a folder that cannot be read.
            Error::NoFolder(path) => path.try_exists().is_ok_and(|exists| !exists),
            Error::NoTemplate(_) => true,
            _ => false,
        }
    }
}

impl ModelFolder {
    /// `template` is the file that the engine was given with `--chat-template`. Returns all errors together.
    pub fn read(
        folder: &Path,
        template: Option<&Path>,
        options: Options,
    ) -> Result<Self, Vec<Error>> {
        if !folder.is_dir() {
            return Err(vec![Error::NoFolder(folder.to_owned())]);
        }
        let mut errors = Errors::default();
        let config = errors.collect(json(&folder.join("tokenizer_config.json")));
        let config = object(config.flatten());
        let special_tokens = errors.collect(special_tokens(folder, &config));
        let special_tokens = special_tokens.unwrap_or_default();
        let kinds = errors.collect(model_kinds(folder)).unwrap_or_default();
        let is_any = |of: &[&str]| kinds.iter().find(|kind| of.contains(&kind.as_str()));
        let templates = errors.collect(match is_any(RENDERED_IN_CODE) {
            Some(_) => Ok(Templates::default()),
            None => templates(folder, template, &config),
        });
        if let Some(kind) = is_any(TOKENIZED_IN_CODE) {
            errors
                .0
                .push(Error::OwnCode(folder.to_owned(), kind.clone()));
            return Err(errors.0);
        }
        let model_type = kinds.first().map_or("", String::as_str);
        let vocabulary = errors.collect(vocabulary(folder, &config, &special_tokens, model_type));
        match (templates, vocabulary) {
            (Some(templates), Some(vocabulary)) if errors.0.is_empty() => Ok(Self {
                renderer: Renderer::new(templates, special_tokens, options),
                vocabulary,
            }),
            _ => Err(errors.0),
        }
    }
}

/// Collects errors, so that all are reported together.
#[derive(Default)]
struct Errors(Vec<Error>);

impl Errors {
    fn collect<T>(&mut self, read: Result<T, Error>) -> Option<T> {
        read.map_err(|error| self.0.push(error)).ok()
    }
}

fn vocabulary(
    folder: &Path,
    config: &Map<String, Value>,
    special_tokens: &Map<String, Value>,
    model_type: &str,
) -> Result<Vocabulary, Error> {
    if is_mistral(folder)? {
        return Err(Error::Mistral(folder.to_owned()));
    }
    let path = folder.join("tokenizer.json");
    let tokenizer = json(&path)?.ok_or_else(|| Error::NoTokenizer(folder.to_owned()))?;
    let tokenizer = with_added_tokens(tokenizer, config, special_tokens);
    let llama::Rebuilt {
        tokenizer,
        begins_with_space,
    } = llama::rebuilt(tokenizer, config, model_type);
    let vocabulary = Vocabulary::new(tokenizer).map_err(|why| Error::Tokenizer(path, why))?;
    Ok(vocabulary.with_first_space(begins_with_space))
}

fn text(path: &Path) -> Result<Option<String>, Error> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(Error::Read(path.to_owned(), error)),
    }
}

fn json(path: &Path) -> Result<Option<Value>, Error> {
    text(path)?
        .map(|text| serde_json::from_str(&text))
        .transpose()
        .map_err(|error| Error::Json(path.to_owned(), error))
}

fn object(value: Option<Value>) -> Map<String, Value> {
    match value {
        Some(Value::Object(map)) => map,
        _ => Map::new(),
    }
}

/// The model's type and its architectures, by which the engine chooses how to render and tokenize.
fn model_kinds(folder: &Path) -> Result<Vec<String>, Error> {
    let config = object(json(&folder.join("config.json"))?);
    let architectures = config.get("architectures").and_then(Value::as_array);
    // The type comes first.
    let model_type = config.get("model_type").unwrap_or(&Value::Null);
    let kinds = std::iter::once(model_type).chain(architectures.into_iter().flatten());
    let kinds = kinds.map(|kind| kind.as_str().unwrap_or_default().to_owned());
    Ok(kinds.collect())
}

/// Whether the weights and the tokenizer are in Mistral's own format. A folder that was downloaded without weights shows the
/// format by the files beside them: `params.json` has their shape, and the index of several files is JSON, too.
fn is_mistral(folder: &Path) -> Result<bool, Error> {
    let read = |error| Error::Read(folder.to_owned(), error);
    let (mut has_own_weights, mut has_weights) = (false, false);
    let (mut has_tokenizer, mut has_index) = (false, false);
    for entry in fs::read_dir(folder).map_err(read)? {
        let name = entry.map_err(read)?.file_name();
        let name = name.to_string_lossy();
        let is_weights = name.ends_with(".safetensors");
        has_weights |= is_weights;
        has_own_weights |= is_weights && name.starts_with("consolidated");
        has_index |= name == "consolidated.safetensors.index.json";
        has_tokenizer |= name == "tekken.json" || name.starts_with("tokenizer.model.v");
    }
    if has_weights {
        return Ok(has_own_weights && has_tokenizer);
    }
    // The older tokenizer files are not JSON, so they are missing where only JSON was downloaded.
    let params = object(json(&folder.join("params.json"))?);
    let is_own_shape = params.contains_key("dim") && params.contains_key("n_layers");
    let has_params = !params.is_empty() && has_tokenizer || is_own_shape;
    Ok(has_params || has_index)
}

fn templates(
    folder: &Path,
    template_override: Option<&Path>,
    config: &Map<String, Value>,
) -> Result<Templates, Error> {
    let compile = |path: &Path, source: &str| {
        Template::new(source).map_err(|error| Error::Template(path.to_owned(), error))
    };
    if let Some(path) = template_override {
        let source = text(path)?.ok_or_else(|| Error::NoTemplate(path.to_owned()))?;
        let template = Template::new(&source);
        return Ok(Templates {
            plain: Some(template.map_err(|error| Error::TemplateOverride(path.to_owned(), error))?),
            with_tools: None,
        });
    }
    let config_path = folder.join("tokenizer_config.json");
    let mut named: Vec<(String, PathBuf, String)> = Vec::new();
    let path = folder.join("chat_template.jinja");
    if let Some(source) = text(&path)? {
        named.push(("default".to_owned(), path, source));
        let path = folder.join("additional_chat_templates/tool_use.jinja");
        if let Some(source) = text(&path)? {
            named.push(("tool_use".to_owned(), path, source));
        }
    } else {
        match config.get("chat_template") {
            Some(Value::String(source)) => {
                named.push(("default".to_owned(), config_path, source.clone()));
            }
            Some(Value::Array(list)) => {
                for entry in list {
                    if let (Some(name), Some(source)) =
                        (entry["name"].as_str(), entry["template"].as_str())
                    {
                        named.push((name.to_owned(), config_path.clone(), source.to_owned()));
                    }
                }
            }
            _ => {}
        }
    }
    let find = |name: &str| named.iter().find(|(known, ..)| known == name);
    let mut templates = Templates::default();
    if let Some((_, path, source)) = find("default") {
        templates.plain = Some(compile(path, source)?);
    }
    if let Some((_, path, source)) = find("tool_use") {
        templates.with_tools = Some(compile(path, source)?);
    }
    // The processor of a multimodal model has its own template, which is used for requests without tools.
    let path = folder.join("chat_template.json");
    if let Some(Value::String(source)) = object(json(&path)?).get("chat_template") {
        let tokenizer_template = templates.plain.replace(compile(&path, source)?);
        templates.with_tools = templates.with_tools.or(tokenizer_template);
    }
    Ok(templates)
}

fn special_tokens(folder: &Path, config: &Map<String, Value>) -> Result<Map<String, Value>, Error> {
    let mut map = config.clone();
    if !config.contains_key("added_tokens_decoder") {
        map.extend(object(json(&folder.join("special_tokens_map.json"))?));
    }
    let content = |value: &Value| match value {
        Value::Object(token) => token.get("content").cloned(),
        Value::String(_) => Some(value.clone()),
        _ => None,
    };
    let mut special = Map::new();
    for name in SPECIAL_TOKENS {
        if let Some(token) = map.get(*name).and_then(content) {
            special.insert((*name).to_owned(), token);
        }
    }
    // Models may define more special tokens: every `..._token` of the configuration.
    for (name, value) in map.iter().filter(|(name, _)| name.ends_with("_token")) {
        if let (false, Some(token)) = (special.contains_key(name), content(value)) {
            special.insert(name.clone(), token);
        }
    }
    Ok(special)
}

/// Adds the tokens that only the configuration lists, as the engine does when it loads the tokenizer.
fn with_added_tokens(
    mut tokenizer: Value,
    config: &Map<String, Value>,
    special: &Map<String, Value>,
) -> Value {
    let has_token = |tokenizer: &Value, content: &str| {
        tokenizer["added_tokens"]
            .as_array()
            .is_some_and(|all| all.iter().any(|token| token["content"] == content))
    };
    let mut missing = Vec::new();
    let decoder = config
        .get("added_tokens_decoder")
        .and_then(Value::as_object);
    for (id, token) in decoder.into_iter().flatten() {
        if let (Ok(id), Some(content)) = (id.parse::<u32>(), token["content"].as_str())
            && !has_token(&tokenizer, content)
        {
            let mut token = token.clone();
            token["id"] = id.into();
            missing.push((id, token));
        }
    }
    missing.sort_by_key(|(id, _)| *id);
    for (_, content) in special {
        let Some(content) = content.as_str() else {
            continue;
        };
        let is_missing = missing.iter().any(|(_, token)| token["content"] == content);
        // A special token that is in the vocabulary keeps its id. Others would get an id that the model was not
        // trained with, so they are left out.
        if let (Some(id), false, false) = (
            tokenizer["model"]["vocab"][content].as_u64(),
            is_missing,
            has_token(&tokenizer, content),
        ) {
            let token = serde_json::json!({
                "id": id, "content": content, "single_word": false, "lstrip": false,
                "rstrip": false, "normalized": false, "special": true,
            });
            missing.push((id as u32, token));
        }
    }
    if let Some(added) = tokenizer["added_tokens"].as_array_mut() {
        added.extend(missing.into_iter().map(|(_, token)| token));
    } else {
        let tokens = missing.into_iter().map(|(_, token)| token).collect();
        tokenizer["added_tokens"] = Value::Array(tokens);
    }
    tokenizer
}

#[cfg(test)]
mod tests;
