//! The end of a response: what is stored, what is added to its conversation, what its client is told.

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use tracing::{debug, warn};

use super::client_state::{LARGE_BYTES, StateSigner, joined};
use super::conversation_lock::ConversationLock;
use super::members::{self, Members};
use super::metrics::InFlight;
use super::object::{Outcome, ResponseTemplate, with_member};
use super::{OnStoreDown, Responses, retry};
use crate::ids::Model;
use crate::observe;
use crate::openai::error::ApiError;
use crate::store::record::{Content, InitialState};
use crate::store::{self, IdempotencyToken, Item, NewRecord, PutOutcome, ResponseKey, RoutingHint};

/// A Response object without its output, and an item of the router's own: as it is added, and as it is done.
pub(super) type FinalResponse = (Vec<u8>, Option<(Vec<u8>, Vec<u8>)>);

/// What a response that is being made will need at its end.
#[derive(Debug)]
pub(super) struct Finisher {
    pub(super) responses: Arc<Responses>,
    pub(super) key: ResponseKey,
    /// Whether it is kept.
    pub(super) is_stored: bool,
    pub(super) past: Option<store::Chain>,
    pub(super) model: Model,
    pub(super) worker: Option<Arc<str>>,
    /// Its own input items, one by one.
    pub(super) own: Vec<Item>,
    /// The same as one list, with what the client carried before them.
    pub(super) input: Bytes,
    pub(super) conversation: Option<ConversationLock>,
    pub(super) client_state: Option<ClientState>,
    /// Whether an answer that could not be stored may still be withheld.
    pub(super) may_refuse: bool,
    pub(super) in_flight: InFlight,
}

/// For a client that keeps the state itself.
#[derive(Debug)]
pub(super) struct ClientState {
    pub(super) state_signer: StateSigner,
    /// All items before the answer's own, oldest first.
    pub(super) lists: Vec<Bytes>,
}

/// Why a response is not kept.
#[derive(Debug)]
pub(super) enum NotKept {
    Store(store::Error),
    /// Its conversation did not take it.
    NotAdded(PutOutcome),
}

impl fmt::Display for NotKept {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Store(error) => error.fmt(f),
            Self::NotAdded(put) => write!(f, "its conversation did not take it: {put:?}"),
        }
    }
}

/// What a client is told.
#[derive(Debug)]
pub(super) struct FinishedResponse {
    /// The object without its output.
    pub(super) response: Bytes,
    pub(super) outcome: Outcome,
    /// An item of the router's own at the end of the output: as it is added, and as it is done.
    pub(super) state: Option<(Vec<u8>, Vec<u8>)>,
    /// In its place, where the answer may still be an error.
    pub(super) error: Option<ApiError>,
    /// Whether it should have been stored.
    pub(super) is_degraded: bool,
    /// Whether the item with the state was asked for and is not there.
    pub(super) is_state_left_out: bool,
}

impl Finisher {
    /// `place` is where an item would be that follows the output.
    pub(super) async fn run(
        mut self,
        template: ResponseTemplate,
        mut outcome: Outcome,
        place: usize,
    ) -> FinishedResponse {
        let responses = self.responses.clone();
        let (response, state) = self.compose(&template, &mut outcome, place).await;
        let mut response = Bytes::from(response);
        let is_state_left_out =
            state.is_none() && self.client_state.is_some() && outcome.status.is_continuable();
        if is_state_left_out {
            debug!(id = %self.key.id, "the state is too large to go with the response");
        }
        let is_kept = self.keep(&response, &outcome).await;
        let is_added = match is_kept {
            Ok(()) => self.add_to_conversation(&outcome).await,
            Err(_) => Ok(()),
        };
        if let Some(lock) = self.conversation.take() {
            lock.release().await;
        }
        if is_added.is_err() {
            self.forget().await;
        }
        responses.metrics.on_end(outcome.status);
        let mut ended = FinishedResponse {
            response: Bytes::new(),
            outcome,
            state,
            error: None,
            is_degraded: false,
            is_state_left_out,
        };
        let wrong = is_kept.err().or(is_added.err());
        if let Some(error) = wrong {
            warn!(id = %self.key.id, %error, "response was made and not stored");
            ended.is_degraded = true;
            let unstored = with_member(&response, "store", "false");
            response = with_member(&unstored, "conversation", "null").into();
            if self.may_refuse && responses.settings.on_store_down == OnStoreDown::Fail {
                responses.metrics.on_lost();
                ended.error = Some(match error {
                    // No later try would fare better.
                    NotKept::Store(error @ store::Error::TooLarge { .. }) => {
                        ApiError::of_store(&error)
                    }
                    NotKept::Store(_) | NotKept::NotAdded(_) => ApiError::not_stored(),
                });
            } else {
                responses.metrics.on_degraded();
            }
        }
        drop(self.in_flight);
        ended.response = response;
        ended
    }

    /// What it ends as.
    pub(super) async fn compose(
        &self,
        template: &ResponseTemplate,
        outcome: &mut Outcome,
        place: usize,
    ) -> FinalResponse {
        let response = template.ended(outcome, observe::unix_s().unsigned_abs());
        let state = self.state(template, outcome, place).await;
        if let Some((_, done)) = &state {
            outcome.told = Some(joined(&[outcome.told(), &[b"[", &**done, b"]"].concat()]).into());
        }
        (response, state)
    }

    async fn state(
        &self,
        template: &ResponseTemplate,
        outcome: &Outcome,
        place: usize,
    ) -> Option<(Vec<u8>, Vec<u8>)> {
        let client_state = self
            .client_state
            .as_ref()
            .filter(|_| outcome.status.is_continuable())?;
        let mut lists = client_state.lists.clone();
        lists.push(Bytes::copy_from_slice(&outcome.output));
        let bytes: usize = lists.iter().map(Bytes::len).sum();
        let (state_signer, ids) = (client_state.state_signer.clone(), template.ids.clone());
        let seal = move || {
            let lists: Vec<&[u8]> = lists.iter().map(|list| &**list).collect();
            state_signer.state(&ids, place, &joined(&lists))
        };
        match bytes < LARGE_BYTES {
            true => seal(),
            false => self.responses.aside.run(seal).await.flatten(),
        }
    }

    /// One write, and only then is anybody told of the end.
    async fn keep(&self, response: &Bytes, outcome: &Outcome) -> Result<(), NotKept> {
        if !self.is_stored {
            return Ok(());
        }
        let record = NewRecord {
            token: IdempotencyToken(fastrand::u64(..)),
            parent: self.past.clone(),
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
        };
        let store = &self.responses.store;
        let kept = retry::until_known(|| store.create(self.key, record.clone())).await;
        kept.map_err(NotKept::Store)
    }

    /// Takes back what was stored: its client is told that nothing is.
    async fn forget(&self) {
        if !self.is_stored {
            return;
        }
        let store = &self.responses.store;
        if let Err(error) = retry::until_known(|| store.delete(self.key)).await {
            warn!(id = %self.key.id, %error, "response is stored though its conversation did not take it");
        }
    }

    pub(super) async fn add_to_conversation(&mut self, outcome: &Outcome) -> Result<(), NotKept> {
        // What failed leaves no trace.
        if !outcome.status.is_continuable() {
            return Ok(());
        }
        let Some(lock) = self.conversation.take() else {
            return Ok(());
        };
        let output = std::str::from_utf8(&outcome.output).ok();
        let output = output.and_then(members::list).unwrap_or_default();
        let output = output.into_iter().filter_map(|raw| {
            let id = Members::parse(raw).ok()?.text("id")?;
            Some(Item {
                id: id.into(),
                json: Bytes::copy_from_slice(raw.as_bytes()),
            })
        });
        let items = self.own.drain(..).chain(output).collect();
        match lock.commit(items).await {
            Ok(PutOutcome::Done) => Ok(()),
            Ok(put) => Err(NotKept::NotAdded(put)),
            Err(error) => Err(NotKept::Store(error)),
        }
    }
}
