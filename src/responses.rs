//! The Responses API. The router keeps its state; an engine sees one stateless request per response.
//!
//! ```text
//! body ─▶ request (checked) ─▶ history (store, state token or conversation) ─▶ input (items with ids)
//!      ─▶ engine_input (one list, calls paired) ─▶ engine_body ─▶ relay
//!      ─▶ outcome (whole answer) or events (stream) ─▶ finish (stored) ─▶ client
//! ```

mod additional_tools;
mod allowed_tools;
pub mod background;
mod chat;
mod client_request;
mod client_state;
mod compact;
mod content;
mod conversation_lock;
mod conversations;
mod create;
mod engine_body;
mod engine_call;
mod engine_error;
mod engine_events;
mod engine_input;
mod events;
pub mod fail_reason;
mod finish;
mod grammar;
mod history;
mod http_response;
mod inline_compaction;
mod input;
mod input_tokens;
mod item;
mod known_json;
mod member_checks;
mod member_table;
mod members;
mod metrics;
mod object;
mod outcome;
mod output_item;
mod page;
mod prepare;
mod prewarm;
mod request;
mod retry;
mod routes;
mod service;
mod settings;
mod stored;
mod stream;
mod template;
mod truncation;
pub mod websocket;

use std::sync::Arc;

pub use self::chat::{
    ChatSettings, InvalidArguments, OutputLimit, SystemMessages, UnsupportedTools,
    converted as converted_chat,
};
pub(crate) use self::client_request::ClientRequest;
pub use self::events::ReasoningEvents;
pub(crate) use self::routes::{Endpoint, route};
pub use self::service::{Counts, Responses};
pub use self::settings::{CompactSettings, Mode, OnStoreDown, Settings};
pub use self::websocket::Settings as WebsocketSettings;
use crate::openai::body_budget::Reservation;
use crate::openai::error::Answer;

impl Responses {
    /// `reserved`: the memory of the request's body, which grows by what the body refers to.
    pub(super) async fn answer(
        self: &Arc<Self>,
        endpoint: &Endpoint,
        request: &ClientRequest<'_>,
        reserved: &mut Reservation<'_>,
    ) -> Answer {
        let tenant = request.admitted.tenant;
        match endpoint {
            Endpoint::Create => self.create(request, reserved).await,
            Endpoint::InputTokens => self.count(request, reserved).await,
            Endpoint::Compact => self.compact(request, reserved).await,
            Endpoint::Retrieve(id) => self.retrieve(tenant, id, request.query).await,
            Endpoint::Delete(id) => self.delete(tenant, id).await,
            Endpoint::Cancel(id) => self.cancel(tenant, id).await,
            Endpoint::InputItems(id) => self.input_items(tenant, id, request.query).await,
            Endpoint::CreateConversation => self.create_conversation(request).await,
            Endpoint::Conversation(id) => self.conversation_object(tenant, id).await,
            Endpoint::UpdateConversation(id) => self.update_conversation(request, id).await,
            Endpoint::DeleteConversation(id) => self.delete_conversation(tenant, id).await,
            Endpoint::AddItems(id) => self.add_conversation_items(request, id).await,
            Endpoint::Items(id) => self.conversation_items(tenant, id, request.query).await,
            Endpoint::Item(id, item) => self.conversation_item(tenant, id, item).await,
            Endpoint::DeleteItem(id, item) => self.delete_conversation_item(tenant, id, item).await,
        }
    }
}
