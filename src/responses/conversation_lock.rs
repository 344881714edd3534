//! The lock of a conversation while one response is generated. A task renews its lease, and releases the lock
//! however the response ends.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;
use tracing::{debug, warn};

use super::retry;
use crate::http::drain::Tasks;
use crate::store::{
    self, Claim, Commit, ConversationKey, IdempotencyToken, Item, LockOutcome, NewRecord,
    PutOutcome, ResponseKey, ResponseStore, StoreFuture,
};

/// Renewals per lease period.
const RENEWALS: u32 = 3;

/// A held lock. Dropping it unlocks the conversation.
#[derive(Debug)]
pub(super) struct ConversationLock {
    pub(super) key: ConversationKey,
    pub(super) token: IdempotencyToken,
    end: oneshot::Sender<End>,
}

#[derive(Debug)]
enum End {
    Commit {
        /// The record of the response, unless it is not stored.
        record: Option<Box<(ResponseKey, NewRecord)>>,
        items: Vec<Item>,
        done: oneshot::Sender<Result<PutOutcome, store::Error>>,
    },
    NoCommit {
        /// Otherwise another owner continues it with its token.
        unlocks: bool,
        done: oneshot::Sender<()>,
    },
}

/// Acquires the lock, or says why it is not available.
pub(super) async fn acquire(
    store: &Arc<dyn ResponseStore>,
    key: ConversationKey,
    lease: Duration,
    tasks: &Tasks,
) -> Result<Result<ConversationLock, LockOutcome>, store::Error> {
    let token = IdempotencyToken(fastrand::u64(..));
    let claim = Claim { token, lease };
    let (end, ending) = oneshot::channel();
    // Spawned first: if the caller is dropped while the lock is being acquired, the task releases it.
    let (acquired, is_acquired) = oneshot::channel();
    let held = hold_once_acquired(store.clone(), key, claim, is_acquired, ending);
    tasks.spawn(held);
    let lock = store.lock(key, claim).await?;
    let is_locked = lock == LockOutcome::Locked;
    let _ = acquired.send(is_locked);
    if !is_locked {
        return Ok(Err(lock));
    }
    Ok(Ok(ConversationLock { key, token, end }))
}

/// Continues the lock that was acquired with this token, unless another response has taken it since.
pub(super) async fn resume(
    store: &Arc<dyn ResponseStore>,
    key: ConversationKey,
    token: IdempotencyToken,
    lease: Duration,
    tasks: &Tasks,
) -> Result<Result<ConversationLock, LockOutcome>, store::Error> {
    let claim = Claim { token, lease };
    resumed(store, key, claim, tasks, store.renew_lock(key, claim)).await
}

/// The lock, if `renewed` says that the token still has it. Without an answer it stays as it is: the caller asks again,
/// or the next replica that takes the response over does. Otherwise its lease ends.
async fn resumed(
    store: &Arc<dyn ResponseStore>,
    key: ConversationKey,
    claim: Claim,
    tasks: &Tasks,
    renewed: StoreFuture<'_, LockOutcome>,
) -> Result<Result<ConversationLock, LockOutcome>, store::Error> {
    let lock = renewed.await?;
    if lock != LockOutcome::Locked {
        return Ok(Err(lock));
    }
    let (end, ending) = oneshot::channel();
    tasks.spawn(hold(store.clone(), key, claim, ending));
    let token = claim.token;
    Ok(Ok(ConversationLock { key, token, end }))
}

async fn hold_once_acquired(
    store: Arc<dyn ResponseStore>,
    key: ConversationKey,
    claim: Claim,
    is_acquired: oneshot::Receiver<bool>,
    ending: oneshot::Receiver<End>,
) {
    match is_acquired.await {
        Ok(true) => hold(store, key, claim, ending).await,
        // The token has no lock.
        Ok(false) => {}
        // The store did not answer, or the caller is gone: make sure that it does not stay locked.
        Err(_) => unlock(&store, key, claim.token).await,
    }
}

async fn hold(
    store: Arc<dyn ResponseStore>,
    key: ConversationKey,
    claim: Claim,
    mut ending: oneshot::Receiver<End>,
) {
    let mut is_lost = false;
    let end = loop {
        tokio::select! {
            biased;
            end = &mut ending => break end,
            () = tokio::time::sleep(claim.lease / RENEWALS), if !is_lost => match store.renew_lock(key, claim).await {
                Ok(LockOutcome::Locked) => {}
                Ok(lock) => {
                    is_lost = true;
                    debug!(conversation_id = %key.id, ?lock, "conversation lock lost; the response will not be added");
                }
                Err(error) => {
                    debug!(conversation_id = %key.id, %error, "conversation lock not renewed; trying again");
                }
            },
        }
    };
    let (record, items, done) = match end {
        Ok(End::Commit {
            record,
            items,
            done,
        }) => (record, items, done),
        Ok(End::NoCommit { unlocks, done }) => {
            if unlocks {
                unlock(&store, key, claim.token).await;
            }
            let _ = done.send(());
            return;
        }
        Err(_) => {
            unlock(&store, key, claim.token).await;
            return;
        }
    };
    let put = retry::until_known(|| {
        let commit = Commit {
            conversation: key,
            token: claim.token,
            items: items.clone(),
        };
        let Some(record) = &record else {
            return store.commit(commit);
        };
        let (response, record) = &**record;
        store.create_in_conversation(*response, record.clone(), commit)
    })
    .await;
    if !matches!(put, Ok(PutOutcome::Done)) {
        warn!(conversation_id = %key.id, ?put, "response not added to its conversation");
        unlock(&store, key, claim.token).await;
    }
    let _ = done.send(put);
}

pub(super) async fn unlock(
    store: &Arc<dyn ResponseStore>,
    key: ConversationKey,
    token: IdempotencyToken,
) {
    if let Err(error) = retry::until_known(|| store.unlock(key, token)).await {
        debug!(conversation_id = %key.id, %error, "conversation not unlocked; its lease expires");
    }
}

impl ConversationLock {
    /// Appends items to the conversation, stores the record of the response that they belong to, and unlocks the
    /// conversation, in one write.
    pub(super) async fn commit(
        self,
        record: Option<Box<(ResponseKey, NewRecord)>>,
        items: Vec<Item>,
    ) -> Result<PutOutcome, store::Error> {
        let (done, is_done) = oneshot::channel();
        let gone = || store::Error::Unknown {
            retry_after: Duration::from_secs(1),
            reason: "the router is stopping".into(),
        };
        let commit = End::Commit {
            record,
            items,
            done,
        };
        if self.end.send(commit).is_err() {
            return Err(gone());
        }
        is_done.await.unwrap_or_else(|_| Err(gone()))
    }

    /// Stops renewing the lock without unlocking: it goes on for another holder of the token, or until its lease ends.
    pub(super) async fn leave(self) {
        self.end(false).await;
    }

    /// Unlocks the conversation and waits for it, so that a client that retries after an error finds it unlocked.
    pub(super) async fn release(self) {
        self.end(true).await;
    }

    async fn end(self, unlocks: bool) {
        let (done, is_done) = oneshot::channel();
        if self.end.send(End::NoCommit { unlocks, done }).is_ok() {
            let _ = is_done.await;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::{pending, ready};
    use std::task::{Context, Waker};

    use super::*;
    use crate::ids::{ConversationId, Root, Tenant};
    use crate::observe::metrics::Registry;
    use crate::store::memory::Memory;
    use crate::store::{NewConversation, RetentionSettings};

    #[tokio::test]
    async fn a_lock_that_could_not_be_resumed_stays_for_the_next_try() {
        let keep = RetentionSettings::default();
        let memory = Memory::new(&Default::default(), &keep, &Registry::default());
        let store: Arc<dyn ResponseStore> = Arc::new(memory);
        let key = ConversationKey {
            tenant: Tenant::default(),
            id: ConversationId::new(Root(1), 2),
        };
        let token = IdempotencyToken(3);
        let new = NewConversation {
            token,
            object: "{}".into(),
            items: Vec::new(),
        };
        store.create_conversation(key, new).await.unwrap();
        let lease = Duration::from_secs(60);
        let claim = Claim { token, lease };
        let locked = store.lock(key, claim).await;
        assert_eq!(locked, Ok(LockOutcome::Locked));
        let tasks = Tasks::default();
        let lost: Result<LockOutcome, store::Error> = Err(store::Error::Unknown {
            retry_after: Duration::ZERO,
            reason: "lost".into(),
        });
        let failed = resumed(&store, key, claim, &tasks, Box::pin(ready(lost))).await;
        assert!(failed.is_err());
        // The run is stopped while it waits: another replica may have the response now.
        let silent = pending::<Result<LockOutcome, store::Error>>();
        let mut stopped = Box::pin(resumed(&store, key, claim, &tasks, Box::pin(silent)));
        let mut context = Context::from_waker(Waker::noop());
        assert!(stopped.as_mut().poll(&mut context).is_pending());
        drop(stopped);
        // Whatever unlocks it has done so by then.
        assert_eq!(tasks.drain(Duration::from_secs(60)).await, 0);
        let again = resume(&store, key, token, lease, &tasks).await;
        assert!(matches!(again, Ok(Ok(_))), "{again:?}");
    }
}
