//! What a connection remembers of a response, and what a turn leaves for it.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use bytes::Bytes;
use parking_lot::Mutex;

use crate::ids::ResponseId;
use crate::responses::outcome::Outcome;
use crate::store::Chain;

/// A response that can be continued without the store: the whole conversation up to its end.
#[derive(Clone, Debug)]
pub struct Remembered {
    pub id: ResponseId,
    /// JSON arrays of items, oldest first, shared by the responses that continue each other.
    pub lists: Vec<Bytes>,
    /// The response and those it continues, if they are stored.
    pub chain: Option<Chain>,
}

impl Remembered {
    /// The items' size. What forks share counts in each.
    pub fn bytes(&self) -> u64 {
        self.lists.iter().map(|list| list.len() as u64).sum()
    }
}

/// How a turn ended, for its connection's memory.
#[derive(Clone, Debug)]
pub enum TurnEnd {
    /// With output, or without any that was asked for. None to remember: it can be continued from the store alone.
    Ended(Option<Arc<Remembered>>),
    /// With an error, before or after the response began.
    Failed,
}

/// What a create over a WebSocket has besides its body.
#[derive(Clone, Debug)]
pub(crate) struct TurnContext {
    /// False: no model is asked.
    pub(crate) generates: bool,
    /// The response it continues, if its connection remembers that.
    pub(crate) continued: Option<Arc<Remembered>>,
    pub(crate) record: TurnRecord,
    pub(crate) counted: BodyCounted,
}

/// Whether the memory of bodies (`api.max_total_body`) counts the body of a turn; before, its connection does.
#[derive(Clone, Debug, Default)]
pub(crate) struct BodyCounted(Arc<AtomicBool>);

impl BodyCounted {
    pub(crate) fn set(&self) {
        self.0.store(true, Relaxed);
    }

    pub(crate) fn is_set(&self) -> bool {
        self.0.load(Relaxed)
    }
}

impl TurnContext {
    /// What the end of the turn's response is to leave. `lists`: all items up to the response's output.
    pub(in crate::responses) fn memory(&self, lists: Vec<Bytes>) -> TurnMemory {
        TurnMemory {
            record: self.record.clone(),
            lists: Some(lists),
        }
    }
}

/// Becomes what a connection remembers of a response, once the response has ended.
#[derive(Debug)]
pub(in crate::responses) struct TurnMemory {
    record: TurnRecord,
    lists: Option<Vec<Bytes>>,
}

impl TurnMemory {
    /// For a response that its connection does not remember: it is continued from the store, or not at all.
    pub(in crate::responses) fn without_items(self) -> Self {
        Self {
            lists: None,
            ..self
        }
    }

    /// `chain`: the stored responses that it continues. `is_stored`: whether it is stored itself.
    pub(in crate::responses) fn end(
        self,
        id: ResponseId,
        outcome: &Outcome,
        chain: Option<&Chain>,
        is_stored: bool,
    ) {
        if !outcome.status.is_continuable() {
            return self.record.set(TurnEnd::Failed);
        }
        let response = self.lists.map(|mut lists| {
            lists.push(Bytes::copy_from_slice(&outcome.output));
            let mut response = Remembered {
                id,
                lists,
                chain: None,
            };
            if is_stored {
                let before = chain.map_or(&[][..], |chain| &chain.ids);
                response.chain = Some(Chain {
                    ids: before.iter().copied().chain([id]).collect(),
                    bytes: response.bytes(),
                });
            }
            Arc::new(response)
        });
        self.record.set(TurnEnd::Ended(response));
    }
}

/// Where the end of a response leaves what its connection remembers.
#[derive(Clone, Debug, Default)]
pub struct TurnRecord(Arc<Mutex<Option<TurnEnd>>>);

impl TurnRecord {
    pub fn set(&self, end: TurnEnd) {
        *self.0.lock() = Some(end);
    }

    /// True once the response has ended.
    pub fn is_set(&self) -> bool {
        self.0.lock().is_some()
    }

    /// A turn that left nothing has failed.
    pub fn take(&self) -> TurnEnd {
        self.0.lock().take().unwrap_or(TurnEnd::Failed)
    }
}
