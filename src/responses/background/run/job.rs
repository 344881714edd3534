//! What a background run is given.

use hyper::HeaderMap;

use crate::ids::RequestId;
use crate::responses::background::stored_request::StoredRequest;
use crate::responses::client_state::ClientState;
use crate::responses::conversation_lock::ConversationLock;
use crate::store::Item;

/// What a run needs besides its record.
#[derive(Debug)]
pub(in crate::responses::background) struct Job {
    pub(in crate::responses::background) request: StoredRequest,
    /// The client's headers; empty after a take-over.
    pub(in crate::responses::background) headers: HeaderMap,
    pub(in crate::responses::background) id: RequestId,
    /// The new input items, if a conversation gets them.
    pub(in crate::responses::background) new_items: Vec<Item>,
    pub(in crate::responses::background) conversation: Option<ConversationLock>,
    pub(in crate::responses::background) client_state: Option<ClientState>,
}

impl Job {
    pub(in crate::responses::background) fn taken_over(request: StoredRequest) -> Self {
        Self {
            request,
            headers: HeaderMap::new(),
            id: RequestId::new(fastrand::u128(..)),
            new_items: Vec::new(),
            conversation: None,
            client_state: None,
        }
    }
}
