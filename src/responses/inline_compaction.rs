//! Compaction in the middle of a response: `context_management` with a `compact_threshold`, or an item
//! `compaction_trigger` at the end of the input. What came before is replaced by the user's messages and a summary; the
//! compaction item is the first of the output.

use bytes::Bytes;
use hyper::Response;

use super::additional_tools;
use super::client_request::ClientRequest;
use super::client_state::{StateReader, joined};
use super::compact::Window;
use super::engine_input::EngineInput;
use super::item::{Ids, is_user_message};
use super::members;
use super::outcome::CompactionItem;
use super::prepare::PreparedResponse;
use super::request::{CompactAt, CreateRequest, Parent};
use super::service::Responses;
use crate::http;
use crate::openai::error::ApiError;

/// A response whose history was compacted.
pub(super) struct Compacted {
    pub(super) item: CompactionItem,
    /// What the engine is sent, and later responses continue: a JSON array of items.
    pub(super) window: Bytes,
    /// Whether an answer was asked for, not only the compaction.
    pub(super) goes_on: bool,
}

impl Compacted {
    /// The list of items for the engine.
    pub(super) fn engine_input(&self) -> Result<Vec<u8>, ApiError> {
        let mut input = EngineInput::new(self.window.len() * 9 / 8 + 128);
        input.add_list(&self.window)?;
        input.finish()
    }
}

/// The input, divided into what is summarised and the message that the answer is for.
struct Divided<'a> {
    /// A JSON array of items as engines get them.
    head: Vec<u8>,
    /// The user's new message as it is stored.
    last: Option<&'a str>,
}

impl Responses {
    /// Compacts what came before, if the request asks for it and is long enough.
    pub(super) async fn compact_in_line(
        &self,
        request: &ClientRequest<'_>,
        create: &CreateRequest<'_>,
        prepared: &PreparedResponse,
        reader: &StateReader<'_>,
    ) -> Result<Option<Compacted>, ApiError> {
        let Some(at) = create.compact_at else {
            return Ok(None);
        };
        if request.turn.is_some_and(|turn| !turn.generates) {
            return Ok(None);
        }
        if matches!(create.parent, Parent::Conversation(_)) {
            let why = "is not supported with `conversation`, which keeps all of its items";
            return Err(ApiError::unsupported(at.param(), why));
        }
        if let CompactAt::Tokens(threshold) = at
            && self.prompt_tokens(request, create, &prepared.input).await? as u64 <= threshold
        {
            return Ok(None);
        }
        let divided = divided(prepared, at);
        if additional_tools::has_no_prompt(&divided.head) {
            return match at {
                CompactAt::Tokens(_) => Ok(None),
                CompactAt::Now => Err(ApiError::missing_parameter("input")),
            };
        }
        let (text, usage) = self
            .summarise(request, create, prepared.id, &divided.head)
            .await?;
        let ids = Ids::of(prepared.id);
        let new = prepared.new_input.items.iter().map(|item| &*item.json);
        let new_count = prepared.new_input.items.len() - usize::from(divided.last.is_some());
        let window = Window::new(
            prepared.history.items().chain(new.take(new_count)),
            &ids,
            &text,
        );
        let signer = self.signer_of(create, reader, &prepared.name);
        let json = window.item(&signer)?;
        let last = divided.last.unwrap_or_default();
        let kept = joined(&[&window.items(), format!("[{last}]").as_bytes()]);
        Ok(Some(Compacted {
            item: CompactionItem {
                id: window.summary_id,
                json: json.into(),
                usage,
            },
            window: kept.into(),
            goes_on: at != CompactAt::Now,
        }))
    }
}

/// The message of the user that comes last is not summarised: the answer is for it.
fn divided(prepared: &PreparedResponse, at: CompactAt) -> Divided<'_> {
    let whole = || Divided {
        head: prepared.input.clone(),
        last: None,
    };
    let last = prepared.new_input.items.last().map(|item| &*item.json);
    let Some(last) = last.filter(|last| at != CompactAt::Now && is_user_message(last)) else {
        return whole();
    };
    let Ok(text) = std::str::from_utf8(&prepared.input) else {
        return whole();
    };
    let items = members::list(text).unwrap_or_default();
    let Some(sent) = items.last().filter(|sent| is_user_message(sent)) else {
        return whole();
    };
    let place = sent.as_ptr() as usize - text.as_ptr() as usize;
    let before = text[..place].trim_end().trim_end_matches(',');
    Divided {
        head: [before, "]"].concat().into_bytes(),
        last: Some(last),
    }
}

/// The answer of a response that only compacts, as an engine would give it.
pub(super) fn empty_answer(is_stream: bool) -> Response<http::Body> {
    let body: &'static [u8] = if is_stream {
        b"event: response.completed\ndata: {\"type\":\"response.completed\",\"response\":{\"status\":\"completed\",\"output\":[]}}\n\n"
    } else {
        br#"{"status":"completed","output":[]}"#
    };
    Response::new(http::full(Bytes::from_static(body)))
}
