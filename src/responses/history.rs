//! What a request goes on from, read from the store or from what its client carries.

use std::future::poll_fn;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::task::Poll;

use bytes::Bytes;

use super::Responses;
use super::client_state::{LARGE_BYTES, StateReader};
use super::conversation_lock::{self, ConversationLock};
use super::input::{self, InputContext, NewInput, ReferencedItems};
use super::request::Parent;
use crate::ids::{ConversationId, ResponseId, Root, Tenant};
use crate::openai::error::ApiError;
use crate::store::{
    self, ConversationKey, HistoryLimits, ItemsOutcome, LockOutcome, ResponseKey, StoreFuture,
};
use crate::{observe, state_token};

/// Of other responses, whose items one input refers to.
const READS_AT_ONCE: usize = 16;

#[derive(Debug)]
pub(super) struct History {
    pub(super) root: Root,
    /// JSON arrays of items, oldest first.
    pub(super) lists: Vec<Bytes>,
    /// For the record of what follows.
    pub(super) chain: Option<store::Chain>,
    pub(super) conversation: Option<Conversation>,
    /// Items that the client brought along: nobody stores them but who goes on from them.
    pub(super) carried: Option<Bytes>,
}

#[derive(Debug)]
pub(super) struct Conversation {
    pub(super) id: ConversationId,
    /// None where it is only looked at.
    pub(super) lock: Option<ConversationLock>,
}

/// Whether a conversation is for this request alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Access {
    Exclusive,
    ReadOnly,
}

impl History {
    fn new(root: Root) -> Self {
        Self {
            root,
            lists: Vec::new(),
            chain: None,
            conversation: None,
            carried: None,
        }
    }

    pub(super) fn bytes(&self) -> usize {
        self.lists.iter().map(Bytes::len).sum()
    }
}

impl Responses {
    /// Reads all that comes before a request's own input.
    pub(super) async fn past(
        &self,
        before: &Parent<'_>,
        state_reader: &StateReader<'_>,
        access: Access,
    ) -> Result<History, ApiError> {
        let begun = observe::now();
        let past = match before {
            Parent::None => return Ok(History::new(Root(fastrand::u64(..)))),
            Parent::ClientHeld(response) => {
                let items = Bytes::from(self.carried(response, state_reader).await?);
                History {
                    lists: vec![items.clone()],
                    carried: Some(items),
                    ..History::new(Root(fastrand::u64(..)))
                }
            }
            Parent::Response(id) => self.chain(id, state_reader.tenant).await?,
            Parent::Conversation(id) => self.conversation(id, state_reader.tenant, access).await?,
        };
        let took = observe::now().saturating_duration_since(begun);
        self.metrics.on_history_read(took.as_secs_f64());
        Ok(past)
    }

    async fn carried(
        &self,
        response: &str,
        state_reader: &StateReader<'_>,
    ) -> Result<String, ApiError> {
        if response.len() < LARGE_BYTES {
            return state_reader.conversation(response);
        }
        let response = response.to_owned();
        let open = move |state_reader: &StateReader<'_>| state_reader.conversation(&response);
        self.opened_aside(state_reader, open).await
    }

    /// A request's own items; beside the carrier where there may be much to open among them.
    pub(super) async fn own(
        &self,
        input: Option<&str>,
        with: &InputContext<'_>,
    ) -> Result<NewInput, ApiError> {
        let is_large = |it: &&str| it.len() >= LARGE_BYTES && it.contains(state_token::PREFIX);
        let Some(input) = input.filter(is_large) else {
            return NewInput::read(input, with);
        };
        let (input, param) = (input.to_owned(), with.param.to_owned());
        let (ids, referenced) = (with.ids.clone(), with.referenced.clone());
        let (referenced_bytes_max, keeps_ids) = (with.referenced_bytes_max, with.keeps_ids);
        let read = move |state_reader: &StateReader<'_>| {
            let with = InputContext {
                ids: &ids,
                referenced: &referenced,
                referenced_bytes_max,
                state_reader,
                keeps_ids,
                param: &param,
            };
            NewInput::read(Some(&input), &with)
        };
        self.opened_aside(with.state_reader, read).await
    }

    /// Does with an state_reader as that one what takes long.
    async fn opened_aside<T: Send + 'static>(
        &self,
        state_reader: &StateReader<'_>,
        open: impl FnOnce(&StateReader<'_>) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let (key_ring, model) = (self.key_ring.clone(), state_reader.model.to_owned());
        let (tenant, now_s) = (state_reader.tenant, state_reader.now_s);
        let before = state_reader.plain_bytes.load(Relaxed);
        let work = move || {
            let state_reader = StateReader {
                key_ring: &key_ring,
                tenant,
                now_s,
                model: &model,
                plain_bytes: AtomicU64::new(before),
            };
            let opened = open(&state_reader);
            (opened, state_reader.plain_bytes.into_inner())
        };
        let done = self.aside.run(work).await;
        let (opened, plain_bytes) = done.ok_or_else(ApiError::stopping)?;
        state_reader.plain_bytes.store(plain_bytes, Relaxed);
        opened
    }

    async fn chain(&self, text: &str, tenant: Tenant) -> Result<History, ApiError> {
        let unknown = || ApiError::unknown_previous(text);
        let id: ResponseId = text.parse().map_err(|_| unknown())?;
        let max = HistoryLimits {
            turns: usize::try_from(self.settings.history_turns_max).unwrap_or(usize::MAX),
            bytes: self.settings.history_bytes_max,
        };
        let history = self.store.history(ResponseKey { tenant, id }, max).await;
        match history.map_err(|error| ApiError::of_store(&error))? {
            store::History::Found(found) => {
                let turns = found.turns.into_iter();
                Ok(History {
                    lists: turns.flat_map(|turn| [turn.input, turn.output]).collect(),
                    chain: Some(found.chain),
                    ..History::new(id.root())
                })
            }
            // The asked one, or one that it builds on.
            store::History::Missing(missing) => {
                Err(ApiError::unknown_previous(&missing.to_string()))
            }
            store::History::Running(status) | store::History::Ended(status) => {
                Err(ApiError::unfinished_previous(text, status.as_str()))
            }
            store::History::TooLarge { turns, bytes } => Err(self.too_long(turns, bytes)),
        }
    }

    fn too_long(&self, turns: usize, bytes: u64) -> ApiError {
        let turns_max = self.settings.history_turns_max;
        match turns as u64 > turns_max {
            true => ApiError::too_long_history("turns", turns_max),
            false => {
                debug_assert!(bytes > 0);
                ApiError::too_long_history("bytes", self.settings.history_bytes_max)
            }
        }
    }

    async fn conversation(
        &self,
        text: &str,
        tenant: Tenant,
        access: Access,
    ) -> Result<History, ApiError> {
        let unknown = || ApiError::unknown_conversation(text);
        let id: ConversationId = text.parse().map_err(|_| unknown())?;
        let key = ConversationKey { tenant, id };
        let of_store = |error: store::Error| ApiError::of_store(&error);
        let lock = match access {
            Access::ReadOnly => None,
            Access::Exclusive => {
                let taken =
                    conversation_lock::acquire(&self.store, key, self.lease(), &self.tasks).await;
                match taken.map_err(of_store)? {
                    Ok(locked) => Some(locked),
                    Err(LockOutcome::Gone) => return Err(unknown()),
                    Err(LockOutcome::Busy | LockOutcome::Locked) => {
                        self.metrics.locked.inc();
                        return Err(ApiError::locked_conversation());
                    }
                }
            }
        };
        let bytes_max = self.settings.history_bytes_max;
        let items = self.store.all_items(key, bytes_max).await;
        let wrong = match items.map_err(of_store) {
            Ok(ItemsOutcome::Found { items, .. }) => {
                let length = items.iter().map(|item| item.json.len() + 1).sum::<usize>();
                let mut list = Vec::with_capacity(length + 1);
                list.push(b'[');
                for item in &items {
                    if list.len() > 1 {
                        list.push(b',');
                    }
                    list.extend_from_slice(&item.json);
                }
                list.push(b']');
                return Ok(History {
                    lists: vec![list.into()],
                    conversation: Some(Conversation { id, lock }),
                    ..History::new(id.root())
                });
            }
            Ok(ItemsOutcome::Gone | ItemsOutcome::UnknownAfter) => unknown(),
            Ok(ItemsOutcome::TooLarge { bytes }) => self.too_long(0, bytes),
            Err(error) => error,
        };
        if let Some(lock) = lock {
            lock.release().await;
        }
        Err(wrong)
    }

    /// The items that an input refers to: of what came before it, or of other stored responses.
    pub(super) async fn referenced(
        &self,
        input: Option<&str>,
        past: &History,
        tenant: Tenant,
    ) -> Result<ReferencedItems, ApiError> {
        let mut found = ReferencedItems::new();
        let mut wanted = input::references(input);
        if wanted.is_empty() {
            return Ok(found);
        }
        for list in &past.lists {
            input::collect(list, &wanted, &mut found);
        }
        wanted.retain(|id| !found.contains_key(id));
        let owners = input::owners(&wanted);
        let owners_max = self.settings.history_turns_max;
        if owners.len() as u64 > owners_max {
            return Err(ApiError::too_many_referred_to(owners_max));
        }
        let mut owners = owners.into_iter();
        let mut reads: Vec<StoreFuture<'_, Option<Bytes>>> = Vec::new();
        loop {
            let free = READS_AT_ONCE - reads.len();
            for (id, is_output) in owners.by_ref().take(free) {
                reads.push(Box::pin(
                    self.list_of(ResponseKey { tenant, id }, is_output),
                ));
            }
            let Some(list) = first(&mut reads).await else {
                return Ok(found);
            };
            let list = list.map_err(|error| ApiError::of_store(&error))?;
            input::collect(&list.unwrap_or_default(), &wanted, &mut found);
        }
    }

    /// The output of a stored response, or its input.
    async fn list_of(
        &self,
        key: ResponseKey,
        is_output: bool,
    ) -> Result<Option<Bytes>, store::Error> {
        if !is_output {
            return self.store.input(key).await;
        }
        let record = self.store.get(key).await?;
        Ok(record.map(|record| record.content.output))
    }
}

/// What the first of them to be done says; `None` where there are none.
async fn first<T>(asked: &mut Vec<StoreFuture<'_, T>>) -> Option<Result<T, store::Error>> {
    poll_fn(|cx| {
        for place in 0..asked.len() {
            if let Poll::Ready(said) = asked[place].as_mut().poll(cx) {
                drop(asked.swap_remove(place));
                return Poll::Ready(Some(said));
            }
        }
        match asked.is_empty() {
            true => Poll::Ready(None),
            false => Poll::Pending,
        }
    })
    .await
}
