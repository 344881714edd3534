//! Requests of simulated replicas to the store, and its replies.

use std::time::Duration;

use bytes::Bytes;

use warmroute::store::{
    self, CancelOutcome, Cancellation, CancelledOutput, Claim, Commit, DeleteOutcome, EventBatch,
    FencingToken, Finalization, LockOutcome, LoggedEvents, NewRecord, Notice, NoticeCursor, Orphan,
    Owner, OwnershipLoss, PutOutcome, Record, ResponseKey, Takeover, WriteOutcome,
};

/// A request to the store.
#[derive(Clone, Debug)]
pub(super) enum StoreRequest {
    Heartbeat(Owner, Duration),
    EndLease(Owner),
    Create(ResponseKey, Box<NewRecord>),
    Start(ResponseKey, FencingToken),
    Append(ResponseKey, FencingToken, EventBatch),
    Finalize(ResponseKey, FencingToken, Box<Finalization>),
    Get(ResponseKey),
    FinalizeCancelled(ResponseKey, FencingToken, CancelledOutput),
    Release(ResponseKey, FencingToken),
    Events(ResponseKey, Option<u64>),
    Cancel(ResponseKey, Cancellation),
    Delete(ResponseKey),
    Notices(Owner, NoticeCursor),
    CheckOwnership(Vec<(ResponseKey, FencingToken)>),
    Orphans,
    Untracked(Owner, Vec<ResponseKey>),
    TakeOver(Orphan, Owner),
    Request(ResponseKey, Box<store::TakenOver>),
    /// The shared conversation is locked for a turn.
    Lock(Claim),
    RenewLock(Claim),
    Unlock(store::IdempotencyToken),
    /// The ids of its items.
    History,
    Commit(Commit),
}

/// The reply to a request.
#[derive(Debug)]
pub(super) enum StoreReply {
    Nothing(Result<(), store::Error>),
    Write(Result<WriteOutcome, store::Error>),
    Record(Result<Option<Record>, store::Error>),
    Events(Result<Option<LoggedEvents>, store::Error>),
    Cancelled(Result<CancelOutcome, store::Error>),
    Deleted(Result<DeleteOutcome, store::Error>),
    Notices(Result<(Vec<Notice>, NoticeCursor), store::Error>),
    Lost(Result<Vec<(ResponseKey, OwnershipLoss)>, store::Error>),
    Orphans(Result<Vec<Orphan>, store::Error>),
    Untracked(Result<Vec<(ResponseKey, FencingToken)>, store::Error>),
    TakenOver(Result<Takeover, store::Error>),
    Request(Result<Option<Bytes>, store::Error>),
    Lock(Result<LockOutcome, store::Error>),
    History(Result<Vec<u64>, store::Error>),
    Put(Result<PutOutcome, store::Error>),
}

impl StoreRequest {
    /// The reply for a store that is unreachable or whose reply was lost.
    pub(super) fn refused(&self, error: store::Error) -> StoreReply {
        match self {
            Self::Heartbeat(..) | Self::EndLease(_) | Self::Create(..) | Self::Unlock(_) => {
                StoreReply::Nothing(Err(error))
            }
            Self::Lock(_) | Self::RenewLock(_) => StoreReply::Lock(Err(error)),
            Self::History => StoreReply::History(Err(error)),
            Self::Commit(_) => StoreReply::Put(Err(error)),
            Self::Start(..)
            | Self::Append(..)
            | Self::Finalize(..)
            | Self::FinalizeCancelled(..)
            | Self::Release(..) => StoreReply::Write(Err(error)),
            Self::Get(_) => StoreReply::Record(Err(error)),
            Self::Events(..) => StoreReply::Events(Err(error)),
            Self::Cancel(..) => StoreReply::Cancelled(Err(error)),
            Self::Delete(_) => StoreReply::Deleted(Err(error)),
            Self::Notices(..) => StoreReply::Notices(Err(error)),
            Self::CheckOwnership(_) => StoreReply::Lost(Err(error)),
            Self::Orphans => StoreReply::Orphans(Err(error)),
            Self::Untracked(..) => StoreReply::Untracked(Err(error)),
            Self::TakeOver(..) => StoreReply::TakenOver(Err(error)),
            Self::Request(..) => StoreReply::Request(Err(error)),
        }
    }

    /// The response that the request concerns.
    pub(super) fn key(&self) -> Option<ResponseKey> {
        match self {
            Self::Create(key, _)
            | Self::Start(key, _)
            | Self::Append(key, ..)
            | Self::Finalize(key, ..)
            | Self::Get(key)
            | Self::FinalizeCancelled(key, ..)
            | Self::Release(key, _)
            | Self::Events(key, _)
            | Self::Cancel(key, _)
            | Self::Request(key, _)
            | Self::Delete(key) => Some(*key),
            Self::TakeOver(orphan, _) => Some(orphan.key),
            Self::Heartbeat(..)
            | Self::EndLease(_)
            | Self::Notices(..)
            | Self::CheckOwnership(_)
            | Self::Orphans
            | Self::Untracked(..)
            | Self::Lock(_)
            | Self::RenewLock(_)
            | Self::Unlock(_)
            | Self::History
            | Self::Commit(_) => None,
        }
    }

    pub(super) fn is_write(&self) -> bool {
        !matches!(
            self,
            Self::Get(_)
                | Self::Events(..)
                | Self::Notices(..)
                | Self::CheckOwnership(_)
                | Self::Orphans
                | Self::Untracked(..)
                | Self::Request(..)
                | Self::History
        )
    }

    /// The fencing token of a write.
    pub(super) fn fence(&self) -> Option<FencingToken> {
        match self {
            Self::Start(_, fence)
            | Self::Append(_, fence, _)
            | Self::Finalize(_, fence, _)
            | Self::FinalizeCancelled(_, fence, _)
            | Self::Release(_, fence) => Some(*fence),
            _ => None,
        }
    }
}
