//! What came before a request: a chain of stored responses, a conversation, or a state token of the client.

use std::future::poll_fn;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::task::Poll;

use bytes::Bytes;
use tracing::debug;

use super::client_state::{LARGE_BYTES, StateReader, joined};
use super::conversation_lock::{self, ConversationLock};
use super::input::{self, InputContext, NewInput, ReferencedItems};
use super::members;
use super::request::Parent;
use super::service::Responses;
use super::websocket::memory::Remembered;
use crate::ids::{ConversationId, ResponseId, Root, Tenant};
use crate::openai::error::ApiError;
use crate::store::{
    self, ConversationKey, HistoryLimits, ItemsOutcome, LockOutcome, ResponseKey, StoreFuture,
};
use crate::{observe, state_token};

/// Size of all items of a chain or of a conversation, as JSON: eight million tokens.
pub(super) const MAX_HISTORY_BYTES: u64 = 32 << 20;
/// Concurrent reads of other responses for `item_reference`s. Each reads a whole list, which may be as large as a
/// record, for what may be one small item.
const READS_AT_ONCE: usize = 4;

#[derive(Debug)]
pub(super) struct History {
    pub(super) root: Root,
    /// JSON arrays of items, oldest first.
    pub(super) lists: Vec<Bytes>,
    /// The continued responses, for the record of the new one.
    pub(super) chain: Option<store::Chain>,
    pub(super) conversation: Option<Conversation>,
    /// Items from a state token of the client, or of a response that only its connection remembers. No record has them,
    /// so the new record must.
    pub(super) client_held: Option<Bytes>,
    /// The response that is continued, if it is not the last of `chain`.
    pub(super) previous: Option<ResponseId>,
}

#[derive(Debug)]
pub(super) struct Conversation {
    pub(super) id: ConversationId,
    /// Only for [`Access::Exclusive`].
    pub(super) lock: Option<ConversationLock>,
}

/// What the history is read for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Access {
    /// A turn: its conversation is locked.
    Exclusive,
    ReadOnly,
    /// A compaction, which changes nothing either. Of any number of turns: it is the way out for a chain that has too many
    /// to be continued.
    Compaction,
}

impl History {
    fn new(root: Root) -> Self {
        Self {
            root,
            lists: Vec::new(),
            chain: None,
            conversation: None,
            client_held: None,
            previous: None,
        }
    }

    pub(super) fn take_lock(&mut self) -> Option<ConversationLock> {
        self.conversation.as_mut()?.lock.take()
    }

    /// Each as written, oldest first.
    pub(super) fn items(&self) -> impl Iterator<Item = &str> {
        let lists = self.lists.iter();
        lists.filter_map(|list| members::list_of(list)).flatten()
    }

    pub(super) fn bytes(&self) -> usize {
        self.lists.iter().map(Bytes::len).sum()
    }
}

impl Responses {
    /// Reads what comes before the new input.
    pub(super) async fn history(
        &self,
        parent: &Parent<'_>,
        reader: &StateReader<'_>,
        access: Access,
    ) -> Result<History, ApiError> {
        let started = observe::now();
        let history = match parent {
            Parent::None => return Ok(History::new(Root(fastrand::u64(..)))),
            Parent::ClientHeld(response) => {
                let items = Bytes::from(self.client_held(response, reader).await?);
                History {
                    lists: vec![items.clone()],
                    client_held: Some(items),
                    ..History::new(Root(fastrand::u64(..)))
                }
            }
            Parent::Response(id) => self.chain(id, reader.tenant, access).await?,
            Parent::Conversation(id) => {
                let read = self.conversation(id, reader.tenant, access).await;
                if read.as_ref().is_err_and(ApiError::is_locked_conversation) {
                    self.metrics.conversation_conflicts.inc();
                }
                read?
            }
        };
        let took = observe::now().saturating_duration_since(started);
        self.metrics.history_seconds.observe(took.as_secs_f64());
        Ok(history)
    }

    /// The history of a response that its connection remembers. A stored one is asked for: it may have been deleted since.
    pub(super) async fn remembered(
        &self,
        response: &Remembered,
        tenant: Tenant,
        will_store: bool,
    ) -> Result<History, ApiError> {
        if response.chain.is_some() {
            let id = response.id;
            match self.store.keep_chain(ResponseKey { tenant, id }).await {
                Ok(None) => {}
                Ok(Some(missing)) => {
                    return Err(ApiError::unknown_previous(&missing.to_string()));
                }
                // While the store is away, nobody deletes anything from it.
                Err(error) => {
                    debug!(response_id = %id, %error, "store not asked for a response that its connection remembers");
                }
            }
        }
        let turns = response.chain.as_ref().map_or(0, |chain| chain.ids.len());
        let turns_max = self.settings.advanced.max_history_turns;
        if turns as u64 > turns_max || response.bytes() > MAX_HISTORY_BYTES {
            return Err(self.too_long(turns, response.bytes()));
        }
        let has_no_record = will_store && response.chain.is_none();
        let lists = response.lists.iter().map(|list| &**list);
        let items = has_no_record.then(|| joined(&lists.collect::<Vec<_>>()));
        Ok(History {
            lists: response.lists.clone(),
            chain: response.chain.clone(),
            client_held: items.map(Bytes::from),
            previous: Some(response.id),
            ..History::new(response.id.root())
        })
    }

    async fn client_held(
        &self,
        response: &str,
        reader: &StateReader<'_>,
    ) -> Result<String, ApiError> {
        if response.len() < LARGE_BYTES {
            return reader.conversation(response);
        }
        let response = response.to_owned();
        let read = move |reader: &StateReader<'_>| reader.conversation(&response);
        self.offloaded(reader, read).await
    }

    /// Reads the new input; on the offload thread if it may contain large state tokens.
    pub(super) async fn new_input(
        &self,
        input: Option<&str>,
        context: &InputContext<'_>,
    ) -> Result<NewInput, ApiError> {
        let is_large =
            |text: &&str| text.len() >= LARGE_BYTES && text.contains(state_token::PREFIX);
        let Some(input) = input.filter(is_large) else {
            return NewInput::read(input, context);
        };
        let (input, param) = (input.to_owned(), context.param.to_owned());
        let (ids, referenced) = (context.ids.clone(), context.referenced.clone());
        let (referenced_bytes_max, keeps_ids) = (context.referenced_bytes_max, context.keeps_ids);
        let read = move |reader: &StateReader<'_>| {
            let context = InputContext {
                ids: &ids,
                referenced: &referenced,
                referenced_bytes_max,
                reader,
                keeps_ids,
                param: &param,
            };
            NewInput::read(Some(&input), &context)
        };
        self.offloaded(context.reader, read).await
    }

    /// Runs a slow read on the offload thread, with a copy of the reader.
    async fn offloaded<T: Send + 'static>(
        &self,
        reader: &StateReader<'_>,
        read: impl FnOnce(&StateReader<'_>) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let (key_ring, model) = (self.key_ring.clone(), reader.model.to_owned());
        let (tenant, now_s) = (reader.tenant, reader.now_s);
        let plain_bytes = reader.plain_bytes.load(Relaxed);
        let work = move || {
            let reader = StateReader {
                key_ring: &key_ring,
                tenant,
                now_s,
                model: &model,
                plain_bytes: AtomicU64::new(plain_bytes),
            };
            let result = read(&reader);
            (result, reader.plain_bytes.into_inner())
        };
        let done = self.offload.run(work).await;
        let (result, plain_bytes) = done.ok_or_else(ApiError::stopping)?;
        reader.plain_bytes.store(plain_bytes, Relaxed);
        result
    }

    async fn chain(&self, text: &str, tenant: Tenant, access: Access) -> Result<History, ApiError> {
        let unknown = || ApiError::unknown_previous(text);
        let id: ResponseId = text.parse().map_err(|_| unknown())?;
        let max = HistoryLimits {
            turns: match access {
                Access::Exclusive | Access::ReadOnly => {
                    usize::try_from(self.settings.advanced.max_history_turns).unwrap_or(usize::MAX)
                }
                Access::Compaction => usize::MAX,
            },
            bytes: MAX_HISTORY_BYTES,
        };
        match self.store.history(ResponseKey { tenant, id }, max).await? {
            store::History::Found(found) => {
                let turns = found.turns.into_iter();
                Ok(History {
                    lists: turns.flat_map(|turn| [turn.input, turn.output]).collect(),
                    chain: Some(found.chain),
                    ..History::new(id.root())
                })
            }
            // The named response, or an earlier one of its chain.
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
        let turns_max = self.settings.advanced.max_history_turns;
        if turns as u64 > turns_max {
            ApiError::too_many_turns(turns_max)
        } else {
            debug_assert!(bytes > 0);
            ApiError::too_long_history("bytes", MAX_HISTORY_BYTES)
        }
    }

    /// The items of a conversation, which is locked for one response unless it is only read.
    pub(super) async fn conversation(
        &self,
        text: &str,
        tenant: Tenant,
        access: Access,
    ) -> Result<History, ApiError> {
        let unknown = || ApiError::unknown_conversation(text);
        let id: ConversationId = text.parse().map_err(|_| unknown())?;
        let key = ConversationKey { tenant, id };
        let lock = match access {
            Access::ReadOnly | Access::Compaction => None,
            Access::Exclusive => {
                let lease = self.settings.advanced.conversation_lease;
                match conversation_lock::acquire(&self.store, key, lease, &self.tasks).await? {
                    Ok(locked) => Some(locked),
                    Err(LockOutcome::Gone) => return Err(unknown()),
                    Err(LockOutcome::Busy | LockOutcome::Lost | LockOutcome::Locked) => {
                        return Err(ApiError::locked_conversation());
                    }
                }
            }
        };
        let items = self.store.all_items(key, MAX_HISTORY_BYTES).await;
        let error = match items {
            Ok(ItemsOutcome::Found { items, .. }) => {
                let list = members::array(items.iter().map(|item| &*item.json));
                return Ok(History {
                    lists: vec![list.into()],
                    conversation: Some(Conversation { id, lock }),
                    ..History::new(id.root())
                });
            }
            Ok(ItemsOutcome::Gone | ItemsOutcome::UnknownAfter) => unknown(),
            Ok(ItemsOutcome::TooLarge { bytes }) => self.too_long(0, bytes),
            Err(error) => error.into(),
        };
        if let Some(lock) = lock {
            lock.release().await;
        }
        Err(error)
    }

    /// The items that `item_reference`s name, from the history or from other stored responses.
    pub(super) async fn referenced(
        &self,
        input: Option<&str>,
        history: &History,
        tenant: Tenant,
    ) -> Result<ReferencedItems, ApiError> {
        let mut found = ReferencedItems::new();
        let mut wanted = input::references(input);
        if wanted.is_empty() {
            return Ok(found);
        }
        // The newest first, since the first with an id is taken.
        for list in history.lists.iter().rev() {
            input::collect(list, &wanted, &mut found);
        }
        wanted.retain(|id| !found.contains_key(id));
        let mut bytes: usize = found.values().map(String::len).sum();
        let owners = input::owners(&wanted);
        let owners_max = self.settings.advanced.max_history_turns;
        if owners.len() as u64 > owners_max {
            return Err(ApiError::too_many_references(owners_max));
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
            bytes += input::collect(&list?.unwrap_or_default(), &wanted, &mut found);
            // More would be refused once all are here.
            if bytes as u64 > MAX_HISTORY_BYTES {
                return Err(ApiError::too_long_history("bytes", MAX_HISTORY_BYTES));
            }
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

/// The result of the first read to finish; `None` if there are none.
async fn first<T>(reads: &mut Vec<StoreFuture<'_, T>>) -> Option<Result<T, store::Error>> {
    poll_fn(|cx| {
        for index in 0..reads.len() {
            if let Poll::Ready(result) = reads[index].as_mut().poll(cx) {
                drop(reads.swap_remove(index));
                return Poll::Ready(Some(result));
            }
        }
        if reads.is_empty() {
            Poll::Ready(None)
        } else {
            Poll::Pending
        }
    })
    .await
}
