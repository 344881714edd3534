//! A run that another response came before in its conversation is generated again, on the history of now.

use hyper::StatusCode;
use tokio::time::sleep;

use super::Runner;
use super::in_conversation::{PAUSE, resume};
use crate::openai::error::ApiError;
use crate::responses::background::stored_request::StoredRequest;
use crate::responses::history::Access;
use crate::responses::prepare::input_after;
use crate::store::CommitRefusal;

/// The store cannot be asked now.
const BUSY: StatusCode = StatusCode::SERVICE_UNAVAILABLE;

impl Runner<'_> {
    /// After a take-over, continues the lock of the conversation. If another response was added to it, since this one
    /// read its history: locks it anew, and returns the request with the history of now.
    pub(super) async fn set_up_conversation(
        &mut self,
        request: &StoredRequest,
    ) -> Option<StoredRequest> {
        let state = &self.guard.run.state;
        if self.finisher.conversation.is_none()
            && !state.lock().has_old_history()
            && let Some((id, token, items)) = request.conversation()
        {
            self.finisher.new_items = items;
            self.finisher.conversation = resume(self.responses, self.guard, id, token).await;
        }
        if !state.lock().has_old_history() {
            return None;
        }
        match self.with_new_history(request).await {
            Ok(anew) => {
                state.lock().on_new_history();
                anew
            }
            Err(error) if error.status == StatusCode::NOT_FOUND => {
                state.lock().on_conversation_lost(CommitRefusal::Gone);
                None
            }
            Err(error) => {
                if !self.encoder.is_announced() {
                    state.lock().on_events(&self.encoder.announce());
                }
                let (events, outcome) = self.encoder.fail_refused(&error);
                self.conclude(&events, outcome).await;
                None
            }
        }
    }

    /// Waits until the conversation is free. The time limit of the run bounds that.
    async fn with_new_history(
        &mut self,
        request: &StoredRequest,
    ) -> Result<Option<StoredRequest>, ApiError> {
        let (responses, tenant) = (self.responses, self.guard.key.tenant);
        let id = request.conversation_id().unwrap_or_default();
        let mut history = loop {
            match responses.conversation(id, tenant, Access::Exclusive).await {
                Err(error) if error.is_locked_conversation() || error.status == BUSY => {
                    sleep(PAUSE).await;
                }
                read => break read?,
            }
        };
        // Its token differs from the one in the record, so a replica that takes over reads the history anew, too.
        self.finisher.conversation = history.take_lock();
        let new_items = &self.finisher.new_items;
        let input = input_after(&history, new_items)?;
        if let Some(state) = &mut self.finisher.client_state {
            state.lists = history.lists;
            state.lists.extend(
                new_items
                    .iter()
                    .map(|item| [b"[", &*item.json, b"]"].concat().into()),
            );
        }
        Ok(request.with_input(input))
    }
}
