//! Renders a request body into the text that its engine will tokenize, or into the token ids that it contains.
//!
//! Follows vLLM 0.32 between body and tokenizer, read from its source and compared with a running one: by API
//! (`chat`, `responses`, `completions`, `messages`) and by message (`message`). The result is a [`TokenizeError`] if the engine
//! would refuse the request, or if the rendering depends on something that only the engine knows. Pure.

mod chat;
mod chat_message;
mod completions;
mod continued;
mod exact_integers;
mod kwargs;
mod message;
pub(super) mod messages;
mod responses;
mod types;
mod variables;

use std::sync::OnceLock;

use serde_json::{Map, Value, json};

use self::chat::ChatInput;
use self::chat_message::Message;
use self::kwargs::Arguments;
use self::message::Placeholder;
use self::messages::TemplateFacts;
use self::types::refused;
pub use self::types::{Options, RenderedPrompt, RenderedText, TokenizeError};
use self::variables::{Fixed, Variables, message_value, to_jinja};
use super::template::{self, Template};
use super::types::Api;

/// Arguments that `apply_chat_template` of transformers consumes. Templates never see them.
const CONSUMED_ARGUMENTS: &[&str] = &[
    "continue_final_message",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
];

/// Renders the requests of one model.
#[derive(Debug)]
pub struct Renderer {
    templates: Templates,
    /// The variables of all renderings.
    fixed: Fixed,
    options: Options,
    /// Found out with the first Messages request.
    facts: OnceLock<TemplateFacts>,
}

/// A model may have a separate template for requests with tools.
#[derive(Debug, Default)]
pub struct Templates {
    pub plain: Option<Template>,
    pub with_tools: Option<Template>,
}

impl Renderer {
    /// `special_tokens` are `bos_token` and similar variables that templates may print.
    pub fn new(templates: Templates, special_tokens: Map<String, Value>, options: Options) -> Self {
        let mut fixed = vec![
            ("tools".into(), minijinja::Value::from(())),
            ("documents".into(), minijinja::Value::from(())),
            ("add_generation_prompt".into(), false.into()),
        ];
        let special_tokens = special_tokens.into_iter();
        fixed.extend(special_tokens.map(|(name, value)| (name.into(), to_jinja(&value))));
        Self {
            templates,
            fixed: fixed.into(),
            options,
            facts: OnceLock::new(),
        }
    }

    /// False if the model has no chat template, so that only completions can be rendered.
    pub fn has_template(&self) -> bool {
        self.templates.plain.is_some() || self.templates.with_tools.is_some()
    }

    /// Whether the chat template fails on a system message after the first other message.
    pub fn refuses_later_system(&self) -> bool {
        self.has_template() && self.facts().has_system_first
    }

    /// `now_s` is the time in seconds since 1970, for templates that print the date.
    pub fn render(
        &self,
        api: Api,
        body: &[u8],
        now_s: i64,
    ) -> Result<RenderedPrompt, TokenizeError> {
        if api == Api::Completions {
            return completions::read(body);
        }
        let body = &*exact_integers::marked(body);
        let chat = match api {
            Api::Chat => chat::read(body, &self.options)?,
            Api::Responses => responses::read(body, &self.options)?,
            Api::Messages | Api::CountTokens => {
                chat::of_value(messages::to_chat(body, self.facts())?, &self.options)?
            }
            Api::Completions
            | Api::Embeddings
            | Api::Rerank
            | Api::Tokenize
            | Api::Detokenize
            | Api::Generate
            | Api::Other => {
                return Err(TokenizeError::Api);
            }
        };
        self.render_chat(chat, now_s).map(RenderedPrompt::Text)
    }

    /// What an engine finds out about its template with probes.
    fn facts(&self) -> TemplateFacts {
        *self.facts.get_or_init(|| {
            let text = |chat: Value| {
                let chat = chat::of_value(chat, &self.options).ok()?;
                self.render_chat(chat, 0).ok().map(|rendered| rendered.text)
            };
            let turns = ["system", "user", "system", "user"];
            let turns = turns.map(|role| json!({"role": role, "content": "t"}));
            let plain = |tools: Value| {
                text(json!({"messages": turns, "tools": tools, "add_generation_prompt": false}))
            };
            let of_effort = |effort: &str| {
                let messages = json!([{"role": "user", "content": "Hi"}]);
                text(json!({"messages": messages, "reasoning_effort": effort}))
            };
            let none = of_effort("none");
            let efforts = ["low", "medium", "high", "xhigh", "max"];
            let is_ignored =
                none.is_none() || efforts.into_iter().any(|effort| of_effort(effort) == none);
            TemplateFacts {
                has_system_first: plain(Value::Null).is_none() || plain(json!([])).is_none(),
                effort_without_thinking: if is_ignored { "low" } else { "none" },
            }
        })
    }

    fn render_chat(&self, chat: ChatInput<'_>, now_s: i64) -> Result<RenderedText, TokenizeError> {
        let arguments = Arguments {
            engine: &self.options.chat_template_kwargs,
            tools: chat.tools.map(Value::Array),
            request: chat.kwargs,
        };
        for key in ["chat_template", "tokenize"] {
            if arguments.get(key).is_some() {
                return Err(TokenizeError::Refused(format!(
                    "`{key}` in chat_template_kwargs"
                )));
            }
        }
        let with_tools = self.templates.with_tools.as_ref();
        let template = arguments.get("tools").and(with_tools);
        let template = template
            .or(self.templates.plain.as_ref())
            .ok_or(TokenizeError::Api)?;
        let is_true = |key| arguments.get(key) == Some(&Value::Bool(true));
        let continues = is_true("continue_final_message");
        if chat.messages.is_empty() {
            return Err(refused("no messages"));
        }
        if continues && is_true("add_generation_prompt") {
            let why = "continue_final_message with add_generation_prompt";
            return Err(refused(why));
        }
        let format = self.options.content_format.unwrap_or(template.format);
        let apply = |messages, placeholder| {
            let messages = message::to_template_messages(messages, format, placeholder)?;
            let messages = if template.supports_developer_role {
                messages
            } else {
                message::developer_to_system(messages)
            };
            self.apply(template, messages, &arguments, continues, now_s)
        };
        if !message::contain_media(&chat.messages) {
            let text = apply(chat.messages, Placeholder::Media)?;
            return Ok(RenderedText::complete(text, chat.add_special_tokens));
        }
        // The text before the first image is the part that is the same for two different placeholders.
        let text = apply(chat.messages.clone(), Placeholder::Media)?;
        let other_text = apply(chat.messages, Placeholder::Text)?;
        Ok(RenderedText {
            known_bytes: common_prefix(&text, &other_text),
            text,
            add_special_tokens: chat.add_special_tokens,
        })
    }

    /// Does what `apply_chat_template` of transformers does.
    fn apply(
        &self,
        template: &Template,
        mut messages: Vec<Message<'_>>,
        arguments: &Arguments<'_>,
        continues: bool,
        now_s: i64,
    ) -> Result<String, TokenizeError> {
        let last = if continues {
            let mut last = messages.pop().map(Message::into_object);
            let text = continued::append_tag(last.as_mut(), &template.source)?;
            messages.extend(last.map(Message::Object));
            Some(text)
        } else {
            None
        };
        let variables = self.variables(messages, arguments, now_s);
        let text = template
            .render(variables)
            .map_err(|error| TokenizeError::Refused(error.0))?;
        match last {
            Some(last) => continued::cut_at_tag(text, &last),
            None => Ok(text),
        }
    }

    fn variables(
        &self,
        messages: Vec<Message<'_>>,
        arguments: &Arguments<'_>,
        now_s: i64,
    ) -> minijinja::Value {
        let mut variables = Variables::new(self.fixed.clone());
        let arguments = arguments.iter();
        for (key, value) in arguments.filter(|(key, _)| !CONSUMED_ARGUMENTS.contains(&&**key)) {
            variables.put(key, to_jinja(value));
        }
        let messages: Vec<minijinja::Value> = messages.into_iter().map(message_value).collect();
        variables.put("messages", minijinja::Value::from(messages));
        variables.put(template::now_key(), minijinja::Value::from(now_s));
        variables.into_value()
    }
}

/// A Messages request as the chat completion that engines make of it, for a template that accepts system messages anywhere.
pub fn chat_of_messages(body: &[u8]) -> Result<Value, TokenizeError> {
    messages::to_chat(body, TemplateFacts::ANY)
}

fn common_prefix(one: &str, other: &str) -> usize {
    one.char_indices()
        .zip(other.chars())
        .find(|((_, a), b)| a != b)
        .map_or(one.len().min(other.len()), |((at, _), _)| at)
}

#[cfg(test)]
mod tests;
