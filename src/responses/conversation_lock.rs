//! A conversation that one response has for itself. A task keeps the lock while the response is made,
//! and gives it back however that ends.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;
use tracing::{debug, warn};

use crate::http::drain::Tasks;
use crate::store::{
    self, Claim, ConversationKey, IdempotencyToken, Item, LockOutcome, PutOutcome, ResponseStore,
};

/// How many times in a lease it is renewed.
const RENEWALS: u32 = 3;

/// The lock. Dropping it unlocks the conversation.
#[derive(Debug)]
pub(super) struct ConversationLock {
    end: oneshot::Sender<End>,
}

#[derive(Debug)]
enum End {
    Commit {
        items: Vec<Item>,
        done: oneshot::Sender<Result<PutOutcome, store::Error>>,
    },
    Release {
        done: oneshot::Sender<()>,
    },
}

/// Takes a conversation; tells why it could not.
pub(super) async fn acquire(
    store: &Arc<dyn ResponseStore>,
    key: ConversationKey,
    lease: Duration,
    tasks: &Tasks,
) -> Result<Result<ConversationLock, LockOutcome>, store::Error> {
    let token = IdempotencyToken(fastrand::u64(..));
    let claim = Claim { token, lease };
    let (end, asked) = oneshot::channel();
    // Parent the lock is asked for: whoever leaves while it is taken must give it back as well.
    let (taken, is_taken) = oneshot::channel();
    tasks.spawn(keep(store.clone(), key, claim, is_taken, asked));
    let lock = store.lock(key, claim).await?;
    if lock != LockOutcome::Locked {
        return Ok(Err(lock));
    }
    // Who keeps it waits for this word.
    let _ = taken.send(());
    Ok(Ok(ConversationLock { end }))
}

async fn keep(
    store: Arc<dyn ResponseStore>,
    key: ConversationKey,
    claim: Claim,
    is_taken: oneshot::Receiver<()>,
    mut asked: oneshot::Receiver<End>,
) {
    if is_taken.await.is_err() {
        // Not taken, or nobody was there any more to learn of it: then it must not stay locked.
        unlock(&store, key, claim.token).await;
        return;
    }
    let end = loop {
        tokio::select! {
            biased;
            end = &mut asked => break end,
            () = tokio::time::sleep(claim.lease / RENEWALS) => {
                if let Err(error) = store.lock(key, claim).await {
                    debug!(id = %key.id, %error, "conversation's lock was not renewed");
                }
            }
        }
    };
    let (items, done) = match end {
        Ok(End::Commit { items, done }) => (items, done),
        Ok(End::Release { done }) => {
            unlock(&store, key, claim.token).await;
            let _ = done.send(());
            return;
        }
        Err(_) => {
            unlock(&store, key, claim.token).await;
            return;
        }
    };
    let put = super::retry::until_known(|| store.commit(key, claim.token, items.clone())).await;
    if !matches!(put, Ok(PutOutcome::Done)) {
        warn!(id = %key.id, ?put, "response was not added to its conversation");
        unlock(&store, key, claim.token).await;
    }
    let _ = done.send(put);
}

async fn unlock(store: &Arc<dyn ResponseStore>, key: ConversationKey, token: IdempotencyToken) {
    if let Err(error) = super::retry::until_known(|| store.unlock(key, token)).await {
        // Its lease ends it.
        debug!(id = %key.id, %error, "conversation was not unlocked");
    }
}

impl ConversationLock {
    /// Puts items at the conversation's end and gives it back.
    pub(super) async fn commit(self, items: Vec<Item>) -> Result<PutOutcome, store::Error> {
        let (done, is_done) = oneshot::channel();
        let gone = || store::Error::Unknown {
            retry_after: Duration::from_secs(1),
            reason: "the router is stopping".into(),
        };
        if self.end.send(End::Commit { items, done }).is_err() {
            return Err(gone());
        }
        is_done.await.unwrap_or_else(|_| Err(gone()))
    }

    /// Gives the conversation back as it is. Who is told of an error afterwards finds it free.
    pub(super) async fn release(self) {
        let (done, is_done) = oneshot::channel();
        if self.end.send(End::Release { done }).is_ok() {
            // Where nobody says so, its lease ends it.
            let _ = is_done.await;
        }
    }
}
