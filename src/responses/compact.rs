//! `POST /v1/responses/compact`: a conversation becomes its user messages and one item with a summary.
//!
//! The summary is written by the model, in one call whose prompt begins with the conversation as every other turn sends
//! it, so that it hits the worker's prefix cache. The item carries the summary in a state token.

use std::sync::Arc;

use bytes::Bytes;
use tracing::warn;

use super::client_request::ClientRequest;
use super::client_state::StateSigner;
use super::engine_call::collect;
use super::history::Access;
use super::http_response::mark_degraded;
use super::item::{Ids, joined_text, prefix};
use super::members::{self, Members, put, put_comma, put_number, put_string, put_text};
use super::object::with_output;
use super::outcome::{Outcome, Usage};
use super::request::{CreateRequest, Parent};
use super::service::Responses;
use super::{engine_body, retry};
use crate::ids::{ResponseId, Root};
use crate::openai::body_budget::Reservation;
use crate::openai::error::{Answer, ApiError};
use crate::store::record::{Content, InitialState};
use crate::store::{IdempotencyToken, NewRecord, ResponseKey, RoutingHint, Status};
use crate::{http, openai};

/// What the summary begins with when it is sent to a model again.
pub(super) const LEAD_IN: &str = "Summary of the conversation so far:\n";

/// The `object` of a compacted conversation. It can be continued but is no response that could be retrieved.
pub(super) const OBJECT: &str = "response.compaction";

/// The conversation after compaction.
pub(super) struct Window {
    /// The user's messages, and the items that list tools.
    kept: Vec<String>,
    /// The summary as an assistant message with this id.
    pub(super) summary_id: String,
    summary: Vec<u8>,
}

impl Responses {
    pub(super) async fn compact(
        self: &Arc<Self>,
        request: &ClientRequest<'_>,
        reserved: &mut Reservation<'_>,
    ) -> Answer {
        let create = CreateRequest::read_without_required(&request.body)?;
        if create.model.is_empty() {
            return Err(ApiError::missing_parameter("model"));
        }
        for (name, is_asked) in [("stream", create.stream), ("background", create.background)] {
            if is_asked {
                let why = "is not supported for a compaction: its answer is one object";
                return Err(ApiError::unsupported(name, why));
            }
        }
        if create.members.get("max_output_tokens").is_some() {
            let why = "is not supported for a compaction: the router's configuration limits it";
            return Err(ApiError::unsupported("max_output_tokens", why));
        }
        if create.input.is_none() && create.parent == Parent::None {
            return Err(ApiError::missing_parameter("input"));
        }
        let is_stored = self
            .will_store(&create, create.parent.is_in_store())
            .await?;
        let reader = self.state_reader(request.admitted.tenant, &create.model);
        // A chain of its own: what it replaces is not read again.
        let id = ResponseId::new(Root(fastrand::u64(..)), openai::random()?);
        let ids = Ids::of(id);
        let expanded = self
            .read_input(&create, reader.tenant, Access::Compaction, &ids, reserved)
            .await?;
        let (text, usage) = self
            .summarise(request, &create, id, &expanded.input)
            .await?;
        let new = expanded.new_input.items.iter().map(|item| &*item.json);
        let window = Window::new(expanded.history.items().chain(new), &ids, &text);
        let signer = self.signer_of(&create, &reader, &id.to_string());
        let item = window.item(&signer)?;
        let head = head(&id.to_string(), reader.now_s, usage.as_ref());
        if is_stored {
            let key = ResponseKey {
                tenant: reader.tenant,
                id,
            };
            self.store_window(key, &create, &head, &window).await?;
        }
        let mut response = http::json(window.with(&head, &item));
        mark_degraded(&mut response, create.store && !is_stored);
        Ok(response)
    }

    /// The model's summary of a list of items as engines get them, and what it used.
    pub(super) async fn summarise(
        &self,
        request: &ClientRequest<'_>,
        create: &CreateRequest<'_>,
        id: ResponseId,
        input: &[u8],
    ) -> Result<(String, Option<Usage>), ApiError> {
        let settings = &self.settings.compact;
        let salt = request.salt(create)?;
        let input = with_prompt(input, &settings.prompt);
        let id = id.to_string();
        // The number is the router's: a tenant that may ask for fewer tokens would be refused for what it did not ask for.
        let allowed = self
            .relay
            .max_output_tokens(request.admitted.tenant, &create.model);
        let max = settings.max_output_tokens.min(allowed.unwrap_or(u64::MAX));
        let body = engine_body::summary_body(create, &input, &id, salt, max);
        let answer = self.ask_response(&request.engine_call(), body).await?;
        let line = request.context.kind.batch_line();
        let bytes_max = self.event_options().bytes_max;
        let whole = collect(answer.into_body(), bytes_max, line).await?;
        let wrong = |why: &str| {
            warn!(id = %request.context.id, why, "conversation not compacted");
            ApiError::invalid_engine_response(format!("the conversation was not compacted: {why}"))
        };
        let text = std::str::from_utf8(&whole).map_err(|_| wrong("its answer is not UTF-8"))?;
        let members = Members::parse(text).map_err(|_| wrong("its answer is no JSON object"))?;
        let outcome = Outcome::of_engine(&members);
        let outcome = outcome.ok_or_else(|| wrong("its answer is no response object"))?;
        match outcome.status {
            Status::Completed => {}
            Status::Incomplete => {
                return Err(wrong(
                    "the summary did not end within responses.compact.max_output_tokens, or the tenant's max_tokens if that \
                     is less",
                ));
            }
            _ => return Err(wrong("the engine failed")),
        }
        let summary = summary_of(&members)
            .ok_or_else(|| wrong("the model called a tool instead of writing a summary"))?;
        if summary.trim().is_empty() {
            Err(wrong("the model wrote an empty summary"))
        } else {
            Ok((summary.trim().to_owned(), outcome.usage))
        }
    }

    async fn store_window(
        &self,
        key: ResponseKey,
        create: &CreateRequest<'_>,
        head: &[u8],
        window: &Window,
    ) -> Result<(), ApiError> {
        let record = NewRecord {
            token: IdempotencyToken(fastrand::u64(..)),
            parent: None,
            hint: RoutingHint {
                model: (&*create.model).into(),
                worker: None,
            },
            input: Bytes::from_static(b"[]"),
            content: Content {
                response: Bytes::copy_from_slice(head),
                output: window.items().into(),
            },
            initial: InitialState::Finished {
                status: Status::Completed,
            },
        };
        let created = retry::until_known(|| self.store.create(key, record.clone())).await;
        created.map_err(|error| {
            warn!(response_id = %key.id, %error, "compacted conversation not stored");
            ApiError::not_stored()
        })
    }
}

impl Window {
    /// The window that these items of a conversation become: what is kept of them, and the summary as a message.
    pub(super) fn new<'a>(items: impl Iterator<Item = &'a str>, ids: &Ids, summary: &str) -> Self {
        let kept = items.filter(|raw| is_kept(raw));
        let summary_id = ids.output(prefix("compaction"), 0);
        let mut message = br#"{"id":"#.to_vec();
        put_text(&mut message, &summary_id);
        put_string(&mut message, "type", "message");
        put_string(&mut message, "role", "assistant");
        put_string(&mut message, "status", "completed");
        put(&mut message, "content", r#"[{"type":"output_text","text":"#);
        put_text(&mut message, &format!("{LEAD_IN}{summary}"));
        message.extend_from_slice(br#","annotations":[],"logprobs":[]}]}"#);
        Self {
            kept: kept.map(str::to_owned).collect(),
            summary_id,
            summary: message,
        }
    }

    /// The items that a model gets.
    pub(super) fn items(&self) -> Vec<u8> {
        self.list(&self.summary)
    }

    /// The item that stands for the conversation.
    pub(super) fn item(&self, signer: &StateSigner) -> Result<Vec<u8>, ApiError> {
        let item = signer.compaction(&self.summary_id, &self.summary);
        item.ok_or_else(|| {
            ApiError::invalid_engine_response("the summary is too large for a state token")
        })
    }

    /// The list with `last` after what is kept.
    fn list(&self, last: &[u8]) -> Vec<u8> {
        let kept = self.kept.iter().map(String::as_bytes);
        members::array(kept.chain([last]))
    }

    /// The whole object: `head` with the output.
    fn with(&self, head: &[u8], item: &[u8]) -> Vec<u8> {
        with_output(head, &self.list(item))
    }
}

/// Whether an item stays as it is: a message of the user, or a list of tools that may be called on.
fn is_kept(raw: &str) -> bool {
    let item = Members::parse(raw).unwrap_or_default();
    item.get("role") == Some("\"user\"") || item.get("type") == Some("\"additional_tools\"")
}

/// The object without its output.
fn head(id: &str, created_at: u64, usage: Option<&Usage>) -> Vec<u8> {
    let mut out = br#"{"id":"#.to_vec();
    put_text(&mut out, id);
    put_string(&mut out, "object", OBJECT);
    put_number(&mut out, "created_at", created_at);
    put(&mut out, "usage", "");
    usage.copied().unwrap_or_default().write(&mut out);
    out.push(b'}');
    out
}

/// The list for the engine with the prompt as a last message of the user.
fn with_prompt(input: &[u8], prompt: &str) -> Vec<u8> {
    let mut out = input.strip_suffix(b"]").unwrap_or(input).to_vec();
    put_comma(&mut out);
    out.extend_from_slice(
        br#"{"type":"message","role":"user","content":[{"type":"input_text","text":"#,
    );
    put_text(&mut out, prompt);
    out.extend_from_slice(b"}]}]");
    out
}

/// The text of the answer's messages; `None` if it has a call.
fn summary_of(answer: &Members<'_>) -> Option<String> {
    let mut all = String::new();
    for raw in members::list(answer.get("output")?)? {
        let item = Members::parse(raw).ok()?;
        match item.text("type").as_deref() {
            Some("reasoning") => {}
            Some("message") => {
                let text = joined_text(item.get("content")?, "").unwrap_or_default();
                all.push_str(&members::text(&format!("\"{text}\""))?);
            }
            _ => return None,
        }
    }
    Some(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_prompt_follows_the_conversation_whose_bytes_stay_the_same() {
        let one = br#"[{"type":"message","role":"user","content":"a"}]"#;
        let sent = with_prompt(one, "sum \"up\"");
        assert!(sent.starts_with(&one[..one.len() - 1]));
        let parsed: serde_json::Value = serde_json::from_slice(&sent).unwrap();
        assert_eq!(parsed[1]["content"][0]["text"], "sum \"up\"");
        assert_eq!(parsed.as_array().unwrap().len(), 2);
        let alone: serde_json::Value = serde_json::from_slice(&with_prompt(b"[]", "p")).unwrap();
        assert_eq!(alone.as_array().unwrap().len(), 1);
    }

    #[test]
    fn a_window_keeps_the_users_messages_and_the_lists_of_tools() {
        let tools = r#"{"id":"at_1","type":"additional_tools","role":"developer","tools":[]}"#;
        let user = r#"{"type":"message","role":"user","content":"a"}"#;
        let others = [
            r#"{"type":"message","role":"assistant","content":"b"}"#,
            r#"{"type":"reasoning","summary":[]}"#,
        ];
        let items = [tools, user].into_iter().chain(others);
        let window = Window::new(items, &Ids::random(1), "so");
        let kept: Vec<&str> = window.kept.iter().map(String::as_str).collect();
        assert_eq!(kept, [tools, user]);
    }

    #[test]
    fn a_summary_is_the_text_of_messages_and_no_call() {
        let of = |output: &str| {
            let answer = format!(r#"{{"output":{output}}}"#);
            summary_of(&Members::parse(&answer).unwrap())
        };
        let text = r#"[{"type":"reasoning","summary":[]},{"type":"message","content":[{"type":"output_text","text":"a\n"},{"type":"output_text","text":"\"b"}]}]"#;
        assert_eq!(of(text).unwrap(), "a\n\"b");
        assert_eq!(of(r#"[{"type":"function_call","name":"f"}]"#), None);
        assert_eq!(of("[]").unwrap(), "");
    }
}
