//! Inference requests: parses and checks their JSON bodies. Pure.
//!
//! Unknown fields are ignored, as by a real server, and so are most known ones.

mod checks;
mod messages;
pub(super) mod output;
mod sharing;
mod turns;

use std::sync::Arc;

use serde::Deserialize;
use serde_json::Value;

pub(crate) use self::checks::{check_model, check_prompts, from_json, missing_field};
pub(crate) use self::messages::count as count_messages;
use self::output::{JsonFrame, Output};
use super::error::ApiError;
use super::tokenizer::{self, Turn};
use super::transfer::params::TransferParams;
use crate::sim::engine::cache::Label;

/// Tokens of an answer without a limit in the request. A real server generates up to the end of the context.
const DEFAULT_ANSWER_TOKENS: usize = 16;

/// vLLM's `--max-logprobs` by default.
const MAX_LOGPROBS: usize = 20;
/// OpenAI's bound of `n`.
const MAX_CHOICES: usize = 128;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Api {
    Chat,
    Completions,
    Responses,
    Messages,
}

/// Which events of a stream have the usage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum UsageReport {
    Never,
    AtTheEnd,
    Always,
}

#[derive(Clone, Debug)]
pub(crate) struct GenerationRequest {
    pub(crate) api: Api,
    pub(crate) id: String,
    pub(crate) created: u64,
    pub(crate) model: String,
    /// Each as often as it has answers (`n`), one after the other.
    pub(crate) prompts: Vec<Vec<u32>>,
    /// `n`: answers to each prompt.
    pub(crate) choices: usize,
    pub(crate) answer_tokens: usize,
    /// How many other tokens are named beside each one with its probability; `None`: no probabilities.
    pub(crate) logprobs: Option<usize>,
    pub(crate) salt: u64,
    pub(crate) label: Option<Arc<Label>>,
    /// `ignore_eos`: the answer always has its maximum length.
    pub(crate) ignores_eos: bool,
    pub(crate) stream: bool,
    /// `return_token_ids`: the chunks of a stream have the ids of the prompt and of their own tokens.
    pub(crate) returns_token_ids: bool,
    pub(crate) usage: UsageReport,
    /// Fields of a Responses request that its answer echoes.
    pub(crate) echoed: EchoedFields,
    /// The content of a Responses answer or of a chat.
    pub(crate) output: Output,
}

#[derive(Clone, Debug, Default, Deserialize)]
pub(crate) struct EchoedFields {
    pub(crate) instructions: Option<String>,
    pub(crate) metadata: Option<Value>,
    pub(crate) temperature: Option<f64>,
    pub(crate) top_p: Option<f64>,
    pub(crate) user: Option<String>,
}

/// What else a request is parsed with: settings, time and headers.
#[derive(Clone, Debug)]
pub(crate) struct Context<'a> {
    pub(crate) models: &'a [String],
    pub(crate) max_context_tokens: usize,
    /// Chats have reasoning, too, which otherwise only responses have, and calls and JSON may be cut by a limit.
    pub(crate) is_chat_only: bool,
    /// Unix seconds.
    pub(crate) now: u64,
    /// The request's X-Request-Id, if it has one.
    pub(crate) request_id: Option<&'a str>,
    /// The request's X-Session-ID, if it has one.
    pub(crate) session_id: Option<&'a str>,
    /// For requests without an id.
    pub(crate) random_id: String,
}

#[derive(Deserialize)]
struct ChatBody {
    messages: Option<Vec<Value>>,
    tools: Option<Value>,
    tool_choice: Option<Value>,
    reasoning_effort: Option<String>,
    response_format: Option<Value>,
    max_completion_tokens: Option<usize>,
    logprobs: Option<bool>,
    top_logprobs: Option<usize>,
    #[serde(flatten)]
    common: Common,
}

#[derive(Deserialize)]
struct CompletionBody {
    prompt: Option<Prompt>,
    logprobs: Option<usize>,
    #[serde(flatten)]
    common: Common,
}

#[derive(Deserialize)]
struct ResponsesBody {
    input: Option<Input>,
    tools: Option<Value>,
    tool_choice: Option<Value>,
    reasoning: Option<Reasoning>,
    text: Option<Value>,
    prompt: Option<Value>,
    previous_response_id: Option<String>,
    background: Option<bool>,
    max_output_tokens: Option<usize>,
    #[serde(flatten)]
    common: Common,
    #[serde(flatten)]
    echoed: EchoedFields,
}

#[derive(Deserialize)]
struct Reasoning {
    effort: Option<String>,
}

#[derive(Deserialize)]
struct Common {
    model: Option<String>,
    n: Option<usize>,
    max_tokens: Option<usize>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    request_id: Option<String>,
    cache_salt: Option<String>,
    session_id: Option<String>,
    kv_transfer_params: Option<TransferParams>,
    ignore_eos: Option<bool>,
    return_token_ids: Option<bool>,
}

#[derive(Deserialize)]
struct StreamOptions {
    #[serde(default)]
    include_usage: bool,
    #[serde(default)]
    continuous_usage_stats: bool,
}

#[derive(Deserialize)]
#[serde(untagged)]
pub(crate) enum Prompt {
    Text(String),
    Tokens(Vec<u32>),
    Texts(Vec<String>),
    TokenLists(Vec<Vec<u32>>),
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Input {
    Text(String),
    Items(Vec<Value>),
}

impl Prompt {
    pub(crate) fn into_tokens(self) -> Vec<Vec<u32>> {
        match self {
            Self::Text(text) => vec![tokenizer::encode(&text)],
            Self::Tokens(tokens) => vec![tokens],
            Self::Texts(texts) => texts.iter().map(|text| tokenizer::encode(text)).collect(),
            Self::TokenLists(lists) => lists,
        }
    }
}

impl GenerationRequest {
    pub(crate) fn read(api: Api, body: &[u8], context: Context<'_>) -> Result<Self, ApiError> {
        match api {
            Api::Chat => Self::read_chat(body, context),
            Api::Completions => Self::read_completion(body, context),
            Api::Responses => Self::read_responses(body, context),
            Api::Messages => {
                let chat = messages::as_chat(body)?;
                let context = Context {
                    is_chat_only: true,
                    ..context
                };
                let read = Self::read_chat(chat.to_string().as_bytes(), context)?;
                Ok(Self {
                    api: Api::Messages,
                    output: Output {
                        // A limit is required, and most answers end before it.
                        has_no_token_limit: false,
                        ..read.output
                    },
                    ..read
                })
            }
        }
    }

    fn read_chat(body: &[u8], context: Context<'_>) -> Result<Self, ApiError> {
        let request: ChatBody = from_json(body)?;
        let messages = request
            .messages
            .ok_or_else(|| missing_field("messages", body))?;
        let turns = turns::conversation(None, request.tools.as_ref(), &messages)?;
        let (param, limit) = match request.max_completion_tokens {
            Some(limit) => ("max_completion_tokens", Some(limit)),
            None => ("max_tokens", request.common.max_tokens),
        };
        let prompts = vec![request.common.prompt_or(&turns)];
        let own_id = context.request_id.or(request.common.request_id.as_deref());
        let id = format!("chatcmpl-{}", own_id.unwrap_or(&context.random_id));
        let output = Output {
            has_reasoning: request
                .reasoning_effort
                .is_some_and(|effort| effort != "none"),
            call: output::chat_call(
                request.tools.as_ref(),
                request.tool_choice.as_ref(),
                messages.last().unwrap_or(&Value::Null),
            ),
            format: request
                .response_format
                .and_then(|format| JsonFrame::of_format(&format, &format["json_schema"]["schema"])),
            has_no_token_limit: limit.is_none(),
        };
        let limit = (param, limit);
        let output = match output {
            _ if context.is_chat_only => output,
            // Clients parse these: they are whole, whatever the limit.
            Output { call, format, .. } if call.is_some() || format.is_some() => Output {
                has_reasoning: false,
                call,
                format,
                has_no_token_limit: true,
            },
            _ => Output::default(),
        };
        let top = request.top_logprobs.unwrap_or(0);
        let logprobs = (request.logprobs == Some(true)).then_some(top);
        check_logprobs("top_logprobs", logprobs)?;
        let parsed = finish(Api::Chat, id, prompts, limit, request.common, context)?;
        Ok(Self {
            output,
            logprobs,
            ..parsed
        })
    }

    fn read_completion(body: &[u8], context: Context<'_>) -> Result<Self, ApiError> {
        let request: CompletionBody = from_json(body)?;
        let prompt = request
            .prompt
            .ok_or_else(|| missing_field("prompt", body))?;
        let own_id = context.request_id.or(request.common.request_id.as_deref());
        let id = format!("cmpl-{}", own_id.unwrap_or(&context.random_id));
        let limit = ("max_tokens", request.common.max_tokens);
        let prompts = prompt.into_tokens();
        let logprobs = request.logprobs;
        check_logprobs("logprobs", logprobs)?;
        let parsed = finish(
            Api::Completions,
            id,
            prompts,
            limit,
            request.common,
            context,
        )?;
        Ok(Self { logprobs, ..parsed })
    }

    fn read_responses(body: &[u8], context: Context<'_>) -> Result<Self, ApiError> {
        let request: ResponsesBody = from_json(body)?;
        let input = request.input.ok_or_else(|| missing_field("input", body))?;
        if request.prompt.is_some() {
            let message = "prompt template is not supported (parameter=prompt)";
            return Err(ApiError::bad_param("prompt", message));
        }
        // Responses are not stored, as on a real server with its store off.
        if let Some(id) = request.previous_response_id {
            return Err(ApiError::unknown_response(&id));
        }
        if request.background == Some(true) {
            let message = "This vLLM engine does not support `store=True` and therefore does not support the background mode.";
            return Err(ApiError::bad_param("background", message));
        }
        let items = match input {
            Input::Text(text) => vec![serde_json::json!({"role": "user", "content": text})],
            Input::Items(items) => items,
        };
        items.iter().try_for_each(turns::check_item)?;
        let call = output::call(
            request.tools.as_ref(),
            request.tool_choice.as_ref(),
            items.last().unwrap_or(&Value::Null),
        );
        let format = &request.text.unwrap_or_default()["format"];
        let effort = request.reasoning.and_then(|reasoning| reasoning.effort);
        let output = Output {
            has_reasoning: effort.is_some_and(|effort| effort != "none"),
            call,
            format: JsonFrame::of_format(format, &format["schema"]),
            has_no_token_limit: request.max_output_tokens.is_none(),
        };
        let instructions = request.echoed.instructions.as_deref();
        let turns = turns::conversation(instructions, request.tools.as_ref(), &items)?;
        let prompts = vec![request.common.prompt_or(&turns)];
        // vLLM ignores the header here and takes the id of the body as it is.
        let id = request.common.request_id.clone();
        let id = id.unwrap_or_else(|| format!("resp_{}", context.random_id));
        let limit = ("max_output_tokens", request.max_output_tokens);
        let mut parsed = finish(Api::Responses, id, prompts, limit, request.common, context)?;
        parsed.echoed = request.echoed;
        parsed.output = output;
        Ok(parsed)
    }

    pub(crate) fn prompt_tokens(&self) -> usize {
        self.own_prompts().map(Vec::len).sum()
    }

    /// Each prompt once.
    pub(crate) fn own_prompts(&self) -> impl Iterator<Item = &Vec<u32>> {
        self.prompts.iter().step_by(self.choices)
    }
}

impl Common {
    /// The tokens of the prompt: those that the router sent along, or the rendered conversation.
    fn prompt_or(&self, turns: &[Turn]) -> Vec<u32> {
        let transfer = self.kv_transfer_params.as_ref();
        match transfer.and_then(|params| params.prompt_token_ids.as_ref()) {
            Some(tokens) => tokens.clone(),
            None => tokenizer::encode_turns(turns),
        }
    }

    fn usage(&self) -> UsageReport {
        match &self.stream_options {
            Some(options) if options.include_usage && options.continuous_usage_stats => {
                UsageReport::Always
            }
            Some(options) if options.include_usage => UsageReport::AtTheEnd,
            Some(_) | None => UsageReport::Never,
        }
    }
}

fn check_logprobs(param: &str, count: Option<usize>) -> Result<(), ApiError> {
    match count {
        Some(count) if count > MAX_LOGPROBS => {
            let message = format!("{param} must be at most {MAX_LOGPROBS}, got {count}.");
            Err(ApiError::bad_param(param, message))
        }
        Some(_) | None => Ok(()),
    }
}

fn finish(
    api: Api,
    id: String,
    prompts: Vec<Vec<u32>>,
    (limit_param, limit): (&str, Option<usize>),
    mut common: Common,
    context: Context<'_>,
) -> Result<GenerationRequest, ApiError> {
    let model = check_model(common.model.take(), context.models)?;
    let max_tokens = context.max_context_tokens;
    let answer_tokens = limit.unwrap_or(DEFAULT_ANSWER_TOKENS);
    if answer_tokens == 0 {
        let message = format!("{limit_param} must be at least 1, got 0.");
        return Err(ApiError::bad_param(limit_param, message));
    }
    if answer_tokens > max_tokens {
        let error = ApiError::answer_too_long(limit_param, answer_tokens, max_tokens);
        return Err(error);
    }
    check_prompts(&prompts, max_tokens, answer_tokens)?;
    let choices = common.n.unwrap_or(1);
    if !(1..=MAX_CHOICES).contains(&choices) {
        let message = format!("n must be 1 to {MAX_CHOICES}, got {choices}.");
        return Err(ApiError::bad_param("n", message));
    }
    let prompts = prompts
        .into_iter()
        .flat_map(|prompt| std::iter::repeat_n(prompt, choices))
        .collect();
    let session_id = common.session_id.as_deref().or(context.session_id);
    let label = sharing::label(
        &model,
        context.models,
        common.cache_salt.as_deref(),
        session_id,
    );
    Ok(GenerationRequest {
        api,
        id,
        created: context.now,
        salt: sharing::salt(&model, context.models, common.cache_salt.as_deref()),
        label,
        ignores_eos: common.ignore_eos == Some(true),
        model,
        prompts,
        choices,
        answer_tokens,
        logprobs: None,
        stream: common.stream.unwrap_or(false),
        returns_token_ids: common.return_token_ids == Some(true),
        usage: common.usage(),
        echoed: EchoedFields::default(),
        output: Output::default(),
    })
}

/// The tokens of a `/tokenize` request: of a prompt, or of a conversation rendered as for a chat.
pub(crate) fn read_tokenize(body: &[u8], models: &[String]) -> Result<Vec<u32>, ApiError> {
    #[derive(Deserialize)]
    struct Body {
        model: Option<String>,
        prompt: Option<String>,
        messages: Option<Vec<Value>>,
        tools: Option<Value>,
        add_generation_prompt: Option<bool>,
    }
    let request: Body = from_json(body)?;
    check_model(request.model, models)?;
    let segments = match (request.prompt, request.messages) {
        (Some(prompt), _) => vec![prompt],
        (None, Some(messages)) => {
            let turns = turns::conversation(None, request.tools.as_ref(), &messages)?;
            tokenizer::render(&turns, request.add_generation_prompt.unwrap_or(true))
        }
        (None, None) => return Err(missing_field("prompt", body)),
    };
    Ok(segments
        .iter()
        .flat_map(|segment| tokenizer::encode(segment))
        .collect())
}

#[cfg(test)]
mod tests;
