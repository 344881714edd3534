//! The end of a response: stores it, appends it to its conversation, and builds the final object.

use std::sync::Arc;

use bytes::Bytes;
use tracing::{debug, warn};

use super::client_state::{ClientState, LARGE_BYTES, StateItem, joined};
use super::conversation_lock::ConversationLock;
use super::fail_reason::FailReason;
use super::members::{self, Members};
use super::object::with_member;
use super::outcome::Outcome;
use super::retry;
use super::service::Responses;
use super::settings::OnStoreDown;
use super::template::ResponseTemplate;
use super::websocket::memory::TurnMemory;
use crate::ids::Model;
use crate::observe;
use crate::observe::metrics::Counted;
use crate::openai::error::ApiError;
use crate::store::record::{Content, InitialState};
use crate::store::{
    self, CommitRefusal, IdempotencyToken, Item, NewRecord, ResponseKey, RoutingHint,
};

/// The final Response object, without its output.
#[derive(Debug)]
pub(super) struct FinalResponse {
    pub(super) response: Vec<u8>,
    pub(super) state_item: Option<StateItem>,
}

/// What a response needs at its end.
#[derive(Debug)]
pub(super) struct Finisher {
    pub(super) responses: Arc<Responses>,
    pub(super) key: ResponseKey,
    /// Whether to store it.
    pub(super) is_stored: bool,
    /// The responses it continues, for its record.
    pub(super) chain: Option<store::Chain>,
    pub(super) model: Model,
    pub(super) worker: Option<Arc<str>>,
    /// The new input items, if a conversation gets them.
    pub(super) new_items: Vec<Item>,
    /// The input list for the record: the new items, after those of a client-held state.
    pub(super) input: Bytes,
    pub(super) conversation: Option<ConversationLock>,
    pub(super) client_state: Option<ClientState>,
    /// Whether the answer can still become an error if it cannot be stored.
    pub(super) may_withhold: bool,
    pub(super) in_flight: Counted,
    /// What the WebSocket that it came over remembers of it.
    pub(super) memory: Option<TurnMemory>,
}

/// Why a response was not stored.
#[derive(Debug, thiserror::Error)]
pub(super) enum NotStored {
    #[error("{0}")]
    Store(store::Error),
    /// Its conversation did not accept it.
    #[error("its conversation did not accept it: {0:?}")]
    NotAdded(CommitRefusal),
}

/// What the client gets.
#[derive(Debug)]
pub(super) struct FinishedResponse {
    /// The Response object without its output.
    pub(super) response: Bytes,
    pub(super) outcome: Outcome,
    pub(super) state_item: Option<StateItem>,
    /// The error to answer instead.
    pub(super) error: Option<ApiError>,
    /// Whether it should have been stored and is not.
    pub(super) is_degraded: bool,
    /// Whether the state token was left out because it is too large.
    pub(super) is_state_left_out: bool,
}

impl Finisher {
    pub(super) async fn run(
        mut self,
        template: ResponseTemplate,
        mut outcome: Outcome,
        item_count: usize,
    ) -> FinishedResponse {
        let responses = self.responses.clone();
        let FinalResponse {
            response,
            mut state_item,
        } = self.compose(&template, &mut outcome, item_count).await;
        let mut response = Bytes::from(response);
        let is_state_left_out =
            state_item.is_none() && self.client_state.is_some() && outcome.status.is_continuable();
        if is_state_left_out {
            debug!(response_id = %self.key.id, "state token too large; response sent without it");
        }
        let mut stored = self.store(&response, &outcome).await;
        if let Some(lock) = self.conversation.take() {
            lock.release().await;
        }
        if let Err(NotStored::NotAdded(refusal)) = stored
            && !self.may_withhold
        {
            // Its client has read most of it.
            state_item = None;
            outcome.refuse(FailReason::of_conversation(refusal));
            response = template
                .ended(&outcome, observe::unix_s().unsigned_abs())
                .into();
            stored = self.store(&response, &outcome).await;
        }
        responses.metrics.on_end(outcome.status);
        let mut finished = FinishedResponse {
            response: Bytes::new(),
            outcome,
            state_item,
            error: None,
            is_degraded: false,
            is_state_left_out,
        };
        if let Err(NotStored::NotAdded(refusal)) = stored {
            finished.error = Some(refused_turn(refusal));
        } else if let Err(NotStored::Store(store::Error::BrokenChain(missing))) = stored {
            debug!(response_id = %self.key.id, %missing, "response not stored, because one that it continues was deleted");
            finished.is_degraded = true;
            response = with_member(&response, "store", "false").into();
            responses.metrics.on_not_stored("deleted");
            self.memory = self.memory.map(TurnMemory::without_items);
        } else if let Err(error) = stored {
            warn!(response_id = %self.key.id, %error, "response generated but not stored");
            finished.is_degraded = true;
            let unstored = with_member(&response, "store", "false");
            response = with_member(&unstored, "conversation", "null").into();
            if self.may_withhold && responses.settings.on_store_down == OnStoreDown::Fail {
                responses.metrics.on_not_stored("withheld");
                finished.error = Some(match error {
                    // A retry would fail in the same way.
                    // One that is full says when to try again, and refuses that before it is generated.
                    NotStored::Store(
                        error @ (store::Error::TooLarge { .. } | store::Error::Full { .. }),
                    ) => ApiError::of_store(&error),
                    NotStored::Store(_) | NotStored::NotAdded(_) => ApiError::not_stored(),
                });
            } else {
                responses.metrics.on_not_stored("served");
            }
        }
        if let Some(memory) = self.memory.take() {
            let is_stored = self.is_stored && !finished.is_degraded;
            let chain = self.chain.as_ref();
            memory.end(self.key.id, &finished.outcome, chain, is_stored);
        }
        drop(self.in_flight);
        finished.response = response;
        finished
    }

    /// Builds the final object, and the state item if there is one.
    pub(super) async fn compose(
        &self,
        template: &ResponseTemplate,
        outcome: &mut Outcome,
        item_count: usize,
    ) -> FinalResponse {
        let response = template.ended(outcome, observe::unix_s().unsigned_abs());
        let state_item = self.state_item(template, outcome, item_count).await;
        if let Some(item) = &state_item {
            let state_list = [b"[", &*item.done, b"]"].concat();
            outcome.client_output = Some(joined(&[outcome.client_output(), &state_list]).into());
        }
        FinalResponse {
            response,
            state_item,
        }
    }

    async fn state_item(
        &self,
        template: &ResponseTemplate,
        outcome: &Outcome,
        index: usize,
    ) -> Option<StateItem> {
        let client_state = self
            .client_state
            .as_ref()
            .filter(|_| outcome.status.is_continuable())?;
        let mut lists = client_state.lists.clone();
        lists.push(Bytes::copy_from_slice(&outcome.output));
        let bytes: usize = lists.iter().map(Bytes::len).sum();
        let (signer, ids) = (client_state.signer.clone(), template.ids.clone());
        let sign = move || {
            let lists: Vec<&[u8]> = lists.iter().map(|list| &**list).collect();
            signer.state_item(&ids, index, &joined(&lists))
        };
        if bytes < LARGE_BYTES {
            sign()
        } else {
            self.responses.offload.run(sign).await.flatten()
        }
    }

    /// One write, with the items that the conversation gets. The client gets the end only after it.
    async fn store(&mut self, response: &Bytes, outcome: &Outcome) -> Result<(), NotStored> {
        let record = self.is_stored.then(|| self.record(response, outcome));
        // A failed response leaves nothing in the conversation.
        let lock = self
            .conversation
            .take_if(|_| outcome.status.is_continuable());
        let Some(lock) = lock else {
            let Some(record) = record else {
                return Ok(());
            };
            let store = &self.responses.store;
            let created = retry::until_known(|| store.create(self.key, record.clone())).await;
            return created.map_err(NotStored::Store);
        };
        let items = self.conversation_items(outcome);
        let record = record.map(|record| Box::new((self.key, record)));
        let refusal = match lock.commit(record, items).await {
            Ok(put) => put.refusal(),
            // What is too large for the store is too large for a conversation, which has it as well.
            Err(store::Error::TooLarge { .. }) => Some(CommitRefusal::TooLarge),
            Err(store::Error::DamagedConversation) => Some(CommitRefusal::Damaged),
            Err(error) => return Err(NotStored::Store(error)),
        };
        match refusal {
            None => Ok(()),
            Some(refusal) => {
                self.responses.metrics.on_turn_refused(refusal);
                Err(NotStored::NotAdded(refusal))
            }
        }
    }

    fn record(&self, response: &Bytes, outcome: &Outcome) -> NewRecord {
        NewRecord {
            token: IdempotencyToken(fastrand::u64(..)),
            parent: self.chain.clone(),
            hint: RoutingHint {
                model: self.model.clone(),
                worker: self.worker.clone(),
            },
            input: self.input.clone(),
            content: Content {
                response: response.clone(),
                output: Bytes::copy_from_slice(&outcome.output),
            },
            initial: InitialState::Finished {
                status: outcome.status,
            },
        }
    }

    /// What the conversation gets: new input and output.
    pub(super) fn conversation_items(&self, outcome: &Outcome) -> Vec<Item> {
        let output = members::list_of(&outcome.output).unwrap_or_default();
        let output = output.into_iter().filter_map(|raw| {
            let id = Members::parse(raw).ok()?.text("id")?;
            Some(Item {
                id: id.into(),
                json: Bytes::copy_from_slice(raw.as_bytes()),
            })
        });
        self.new_items.iter().cloned().chain(output).collect()
    }
}

/// The answer to a turn that its conversation did not accept, and of which its client has nothing.
fn refused_turn(refusal: CommitRefusal) -> ApiError {
    let reason = FailReason::of_conversation(refusal);
    match refusal {
        CommitRefusal::Damaged => ApiError::of_store(&store::Error::DamagedConversation),
        CommitRefusal::Gone => ApiError::deleted_conversation(reason.code, reason.message),
        CommitRefusal::Unlocked | CommitRefusal::Taken | CommitRefusal::TooLarge => {
            ApiError::refused_turn(reason.code, reason.message)
        }
    }
}
