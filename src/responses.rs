//! The Responses API: its state is the router's, engines see one stateless request each.
//!
//! ```text
//! body -> request (checked) -> past (store, carrier, conversation) -> input (items with ids) -> sent (one list, paired)
//!      -> engine (its body) -> relay -> object (whole) or events (streamed) -> finish (stored) -> client
//! ```

#[doc(hidden)]
pub mod background;
mod client_state;
mod conversation_lock;
mod conversations;
mod create;
mod engine_body;
mod engine_error;
mod engine_events;
mod engine_input;
mod events;
mod finish;
mod history;
mod input;
mod input_tokens;
mod item;
mod members;
mod metrics;
mod object;
mod page;
mod prepared;
mod request;
mod retry;
mod routes;
mod settings;
mod stored;
mod stream;

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use hyper::{HeaderMap, Response};
use serde::Serialize;

use self::background::Background;
pub use self::background::Settings as BackgroundSettings;
pub use self::engine_input::UnsupportedItems;
pub use self::events::ReasoningEvents;
use self::metrics::Metrics;
use self::request::CreateRequest;
pub(crate) use self::routes::{Endpoint, RouteMatch, route};
pub use self::settings::{Mode, OnStoreDown, Settings};
use crate::http;
use crate::http::drain::Tasks;
use crate::http::io_threads::OffloadThread;
use crate::ids::RequestId;
use crate::observe::metrics::Registry;
use crate::openai::error::ApiError;
use crate::openai::tenant::Admitted;
use crate::relay::{Relay, SummaryCell};
use crate::state_token::KeyRing;
use crate::store::ResponseStore;

/// The endpoints below `/v1/responses` and `/v1/conversations`.
#[derive(Debug)]
pub struct Responses {
    settings: Settings,
    store: Arc<dyn ResponseStore>,
    relay: Arc<Relay>,
    key_ring: Arc<KeyRing>,
    tasks: Tasks,
    metrics: Metrics,
    background: Arc<Background>,
    /// Where large states are sealed and opened. What waits for it is at most one of each request.
    aside: OffloadThread,
}

/// What of a request is told to who carries it to an engine.
#[derive(Clone, Copy, Debug)]
pub(super) struct RequestContext<'a> {
    pub(super) headers: &'a HeaderMap,
    pub(super) id: RequestId,
    pub(super) begun: Instant,
    pub(super) summary: Option<&'a SummaryCell>,
}

/// One request, read.
#[derive(Debug)]
pub(super) struct ClientRequest<'a> {
    pub(super) headers: &'a HeaderMap,
    pub(super) query: &'a str,
    pub(super) body: Bytes,
    pub(super) id: RequestId,
    pub(super) begun: Instant,
    pub(super) admitted: &'a Admitted,
    /// Filled with the figures of the engine's work, for the access log.
    pub(super) summary: Option<&'a SummaryCell>,
}

/// For the operator's page.
#[derive(Debug, Serialize)]
pub struct Counts {
    mode: Mode,
    in_flight: i64,
    /// By status, since the start.
    ended: BTreeMap<&'static str, u64>,
    conversations_locked: u64,
    background: background::Counts,
}

impl Responses {
    pub fn new(
        settings: Settings,
        store: Arc<dyn ResponseStore>,
        relay: Arc<Relay>,
        key_ring: Arc<KeyRing>,
        tasks: Tasks,
        registry: &Registry,
    ) -> io::Result<Arc<Self>> {
        let background = Background::new(
            settings.background.clone(),
            settings.store.lease.clone(),
            settings.store.keep.log_bytes_max,
            tasks.clone(),
            registry,
        );
        Ok(Arc::new(Self {
            settings,
            store,
            relay,
            key_ring,
            tasks,
            metrics: Metrics::new(registry),
            background,
            aside: OffloadThread::start("carried-state")?,
        }))
    }

    /// Owns background work until the process stops: to be spawned once.
    pub async fn run_background(self: Arc<Self>) {
        if self.settings.mode == Mode::Stateful {
            background::own(self).await;
        }
    }

    pub fn mode(&self) -> Mode {
        self.settings.mode
    }

    pub fn counts(&self) -> Counts {
        let (in_flight, ended) = self.metrics.counts();
        Counts {
            mode: self.settings.mode,
            in_flight,
            ended: ended.into_iter().collect(),
            conversations_locked: self.metrics.locked.get(),
            background: self.background.counts(),
        }
    }

    pub(super) async fn answer(
        self: &Arc<Self>,
        endpoint: &Endpoint,
        call: &ClientRequest<'_>,
    ) -> Result<Response<http::Body>, ApiError> {
        let tenant = call.admitted.tenant;
        match endpoint {
            Endpoint::Create => self.create(call).await,
            Endpoint::InputTokens => self.count(call).await,
            Endpoint::Retrieve(id) => self.retrieve(tenant, id, call.query).await,
            Endpoint::Delete(id) => self.delete(tenant, id).await,
            Endpoint::Cancel(id) => self.cancel(tenant, id).await,
            Endpoint::InputItems(id) => self.input_items(tenant, id, call.query).await,
            Endpoint::CreateConversation => self.create_conversation(call).await,
            Endpoint::Conversation(id) => self.conversation_object(tenant, id).await,
            Endpoint::UpdateConversation(id) => self.update_conversation(call, id).await,
            Endpoint::DeleteConversation(id) => self.delete_conversation(tenant, id).await,
            Endpoint::AddItems(id) => self.add_conversation_items(call, id).await,
            Endpoint::Items(id) => self.conversation_items(tenant, id, call.query).await,
            Endpoint::Item(id, item) => self.conversation_item(tenant, id, item).await,
            Endpoint::DeleteItem(id, item) => self.delete_conversation_item(tenant, id, item).await,
        }
    }

    fn lease(&self) -> Duration {
        Duration::from_millis(self.settings.conversation_lease_ms)
    }
}

impl ClientRequest<'_> {
    fn context(&self) -> RequestContext<'_> {
        RequestContext {
            headers: self.headers,
            id: self.id,
            begun: self.begun,
            summary: self.summary,
        }
    }

    /// The member by which an engine keeps this tenant's prompts apart.
    fn salt(&self, create: &CreateRequest<'_>) -> Result<Option<&str>, ApiError> {
        let Some(salt) = &self.admitted.cache_salt else {
            return Ok(None);
        };
        if create.members.iter().any(|(name, _)| name == "cache_salt") {
            return Err(ApiError::salted_already());
        }
        Ok(Some(&salt.field))
    }
}
