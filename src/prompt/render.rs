//! Renders a request body into the text that its engine will tokenize, or into the token ids that it contains.
//!
//! Follows vLLM 0.32 between body and tokenizer, read from its source and compared with a running one: by API
//! (`chat`, `responses`, `completions`) and by message (`message`). If an engine would refuse the request, or does
//! what only the engine can know, the result is the reason (`Unknown`). Pure.

mod chat;
mod completions;
mod continued;
mod message;
mod responses;

use std::fmt;

use serde_json::{Map, Value};

use self::message::StandIn;
use super::Api;
use super::template::{self, ContentFormat, Template};

/// Arguments that `apply_chat_template` keeps for itself: a template never sees them.
const NOT_FOR_TEMPLATES: &[&str] = &[
    "continue_final_message",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
];

/// How the engines of a model were started, as far as it changes what they render.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// `--default-chat-template-kwargs`.
    pub chat_template_kwargs: Map<String, Value>,
    /// `--chat-template-content-format`, where it is not `auto`.
    pub content_format: Option<ContentFormat>,
    /// `--exclude-tools-when-tool-choice-none`.
    pub exclude_tools_when_tool_choice_none: bool,
}

/// Why a request's tokens cannot be known here, so that the predicted index must do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unknown {
    /// An API that computes no prompt, or one that this model's engine renders in code of its own.
    Api,
    /// Not a body that this API takes.
    Body(String),
    /// A body that the engine refuses, and what it says.
    Refused(String),
    /// A field that only the engine can answer for.
    Field(&'static str),
    /// The tokenizer itself failed.
    Tokenizer(String),
    /// The text is longer than the setting allows.
    TooLong { bytes: usize },
}

impl Unknown {
    pub const REASONS: [&'static str; 6] =
        ["api", "body", "refused", "field", "tokenizer", "too_long"];

    /// For a metric's label: one of `REASONS`.
    pub fn reason(&self) -> &'static str {
        match self {
            Unknown::Api => "api",
            Unknown::Body(_) => "body",
            Unknown::Refused(_) => "refused",
            Unknown::Field(_) => "field",
            Unknown::Tokenizer(_) => "tokenizer",
            Unknown::TooLong { .. } => "too_long",
        }
    }
}

impl fmt::Display for Unknown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Unknown::Api => f.write_str("the engine renders it in its own way"),
            Unknown::Body(why) => write!(f, "not a body of this API: {why}"),
            Unknown::Refused(why) => write!(f, "the engine will refuse it: {why}"),
            Unknown::Field(name) => write!(f, "only the engine knows what `{name}` does"),
            Unknown::Tokenizer(why) => write!(f, "the tokenizer failed: {why}"),
            Unknown::TooLong { bytes } => write!(f, "{bytes} bytes of text are too many"),
        }
    }
}

/// What the engine tokenises.
#[derive(Debug, PartialEq)]
pub enum Prompt {
    Text(Text),
    /// Given by the client; taken as they are.
    Ids(Vec<u32>),
}

#[derive(Debug, Default, PartialEq)]
pub struct Text {
    pub text: String,
    /// Whether BOS and EOS are added.
    pub add_special_tokens: bool,
    /// How many of its first bytes are known. All, but where an image follows.
    pub known_bytes: usize,
}

impl Text {
    fn whole(text: String, add_special_tokens: bool) -> Self {
        let known_bytes = text.len();
        Self {
            text,
            add_special_tokens,
            known_bytes,
        }
    }
}

/// Renders the requests of one model.
#[derive(Debug)]
pub struct Renderer {
    templates: Templates,
    special_tokens: Map<String, Value>,
    options: Options,
}

/// A model may have a template of its own for requests with tools.
#[derive(Debug, Default)]
pub struct Templates {
    pub plain: Option<Template>,
    pub with_tools: Option<Template>,
}

/// A chat or Responses request, in the words of a template.
struct Chat {
    messages: Vec<Map<String, Value>>,
    tools: Option<Vec<Value>>,
    /// The request's `chat_template_kwargs`, with the fields that overrule them.
    kwargs: Map<String, Value>,
    add_special_tokens: bool,
}

impl Renderer {
    /// `special_tokens` are `bos_token` and its kin, which templates may say.
    pub fn new(templates: Templates, special_tokens: Map<String, Value>, options: Options) -> Self {
        Self {
            templates,
            special_tokens,
            options,
        }
    }

    /// Whether chats can be rendered at all.
    pub fn has_template(&self) -> bool {
        self.templates.plain.is_some() || self.templates.with_tools.is_some()
    }

    /// `now_s` is the time in seconds since 1970, for templates that tell the model the date.
    pub fn render(&self, api: Api, body: &[u8], now_s: i64) -> Result<Prompt, Unknown> {
        let chat = match api {
            Api::Completions => return completions::read(body),
            Api::Chat => chat::read(body, &self.options)?,
            Api::Responses => responses::read(body, &self.options)?,
            Api::Embeddings | Api::Rerank | Api::Tokenize | Api::Detokenize => {
                return Err(Unknown::Api);
            }
        };
        self.render_chat(chat, now_s).map(Prompt::Text)
    }

    fn render_chat(&self, chat: Chat, now_s: i64) -> Result<Text, Unknown> {
        let mut kwargs = self.options.chat_template_kwargs.clone();
        if let Some(tools) = chat.tools {
            kwargs.insert("tools".to_owned(), Value::Array(tools));
        }
        for (key, value) in chat.kwargs {
            // Both mean "not said", also inside `chat_template_kwargs`.
            if !value.is_null() && value != "auto" {
                kwargs.insert(key, value);
            }
        }
        for key in ["chat_template", "tokenize"] {
            if kwargs.contains_key(key) {
                let why = format!("`{key}` in chat_template_kwargs");
                return Err(Unknown::Refused(why));
            }
        }
        let template = match kwargs.contains_key("tools") {
            true => self.templates.with_tools.as_ref(),
            false => None,
        };
        let template = template
            .or(self.templates.plain.as_ref())
            .ok_or(Unknown::Api)?;
        let continues = kwargs.get("continue_final_message") == Some(&Value::Bool(true));
        for key in NOT_FOR_TEMPLATES {
            kwargs.shift_remove(*key);
        }
        if chat.messages.is_empty() {
            return Err(Unknown::Refused("no messages".to_owned()));
        }
        if continues && kwargs.get("add_generation_prompt") == Some(&Value::Bool(true)) {
            let why = "continue_final_message with add_generation_prompt";
            return Err(Unknown::Refused(why.to_owned()));
        }
        let format = self.options.content_format.unwrap_or(template.format());
        let apply = |messages, stand_in| {
            let messages = message::converted(messages, format, stand_in)?;
            let messages = match template.knows_developer() {
                true => messages,
                false => message::developers_as_system(messages),
            };
            self.apply(template, messages, &kwargs, continues, now_s)
        };
        if !message::have_media(&chat.messages) {
            let text = apply(chat.messages, StandIn::Media)?;
            return Ok(Text::whole(text, chat.add_special_tokens));
        }
        // Whatever stands for the image, the two differ from there on at the latest.
        let text = apply(chat.messages.clone(), StandIn::Media)?;
        let other = apply(chat.messages, StandIn::Text)?;
        Ok(Text {
            known_bytes: common_start(&text, &other),
            text,
            add_special_tokens: chat.add_special_tokens,
        })
    }

    /// What `apply_chat_template` does.
    fn apply(
        &self,
        template: &Template,
        mut messages: Vec<Map<String, Value>>,
        kwargs: &Map<String, Value>,
        continues: bool,
        now_s: i64,
    ) -> Result<String, Unknown> {
        let last = match continues {
            true => Some(continued::mark_end(&mut messages, template.source())?),
            false => None,
        };
        let context = self.context(messages, kwargs, now_s);
        let text = template
            .render(context)
            .map_err(|error| Unknown::Refused(error.0))?;
        match last {
            Some(last) => continued::cut_at_mark(text, &last),
            None => Ok(text),
        }
    }

    fn context(
        &self,
        messages: Vec<Map<String, Value>>,
        kwargs: &Map<String, Value>,
        now_s: i64,
    ) -> minijinja::Value {
        let mut context: Vec<(String, minijinja::Value)> = Vec::with_capacity(16);
        let mut put = |key: &str, value: minijinja::Value| context.push((key.to_owned(), value));
        put("tools", minijinja::Value::from(()));
        put("documents", minijinja::Value::from(()));
        put("add_generation_prompt", minijinja::Value::from(false));
        for (key, value) in self.special_tokens.iter().chain(kwargs) {
            put(key, into_jinja(value.clone()));
        }
        let messages: Vec<minijinja::Value> = messages
            .into_iter()
            .map(|message| into_jinja(Value::Object(message)))
            .collect();
        put("messages", minijinja::Value::from(messages));
        put(template::now_key(), minijinja::Value::from(now_s));
        minijinja::Value::from_pairs(context)
    }
}

/// Fields of the body win over `chat_template_kwargs`, where they are given.
fn overrule<const N: usize>(kwargs: &mut Map<String, Value>, fields: [(&str, Value); N]) {
    for (key, value) in fields {
        if !value.is_null() && value != "auto" {
            kwargs.insert(key.to_owned(), value);
        }
    }
}

/// Asking for an effort turns thinking on, for templates where that is a switch of its own.
fn overrule_effort(kwargs: &mut Map<String, Value>, effort: Option<Value>) {
    let Some(effort) = effort.filter(|effort| !effort.is_null()) else {
        return;
    };
    let thinks = effort != "none";
    let is_said = kwargs.contains_key("enable_thinking");
    overrule(kwargs, [("reasoning_effort", effort)]);
    if !is_said {
        kwargs.insert("enable_thinking".to_owned(), thinks.into());
    }
}

/// A function as templates are shown it: these keys in this order, whatever else the body has.
fn function_tool(mut function: Map<String, Value>) -> Option<Map<String, Value>> {
    let mut shown = Map::with_capacity(4);
    let name = function.shift_remove("name").filter(Value::is_string)?;
    shown.insert("name".to_owned(), name);
    for key in ["description", "parameters"] {
        let value = function.shift_remove(key).unwrap_or(Value::Null);
        shown.insert(key.to_owned(), value);
    }
    for key in ["strict", "defer_loading"] {
        if let Some(value) = function.shift_remove(key).filter(|it| !it.is_null()) {
            shown.insert(key.to_owned(), value);
        }
    }
    let mut tool = Map::with_capacity(2);
    tool.insert("type".to_owned(), "function".into());
    tool.insert("function".to_owned(), Value::Object(shown));
    Some(tool)
}

fn into_jinja(value: Value) -> minijinja::Value {
    match value {
        Value::String(text) => minijinja::Value::from(text),
        Value::Array(items) => {
            minijinja::Value::from(items.into_iter().map(into_jinja).collect::<Vec<_>>())
        }
        Value::Object(map) => minijinja::Value::from_pairs(
            map.into_iter()
                .map(|(key, value)| (minijinja::Value::from(key), into_jinja(value))),
        ),
        Value::Null => minijinja::Value::from(()),
        Value::Bool(is) => minijinja::Value::from(is),
        Value::Number(number) => match (number.as_i64(), number.as_u64(), number.as_f64()) {
            (Some(number), ..) => minijinja::Value::from(number),
            (None, Some(number), _) => minijinja::Value::from(number),
            (None, None, number) => minijinja::Value::from(number.unwrap_or(f64::NAN)),
        },
    }
}

fn common_start(one: &str, other: &str) -> usize {
    one.char_indices()
        .zip(other.chars())
        .find(|((_, a), b)| a != b)
        .map_or(one.len().min(other.len()), |((at, _), _)| at)
}

#[cfg(test)]
mod tests;
