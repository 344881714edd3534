//! The conversation of a run: its lock goes with the response from replica to replica, and its items are written in
//! one step with the response's end.

use std::time::Duration;

use tokio::time::sleep;
use tracing::{debug, warn};

use crate::responses::background::runs::RunGuard;
use crate::responses::conversation_lock::{self, ConversationLock};
use crate::responses::finish::Finisher;
use crate::responses::outcome::Outcome;
use crate::responses::service::Responses;
use crate::store::{
    Commit, CommitRefusal, ConversationKey, IdempotencyToken, LockOutcome, ResponseKey,
};

pub(super) const PAUSE: Duration = Duration::from_millis(200);

/// Continues the lock that the previous owner of the response held. Returns once the store has answered; without the
/// lock the response is generated again, or fails.
pub(super) async fn resume(
    responses: &Responses,
    guard: &RunGuard,
    id: &str,
    token: IdempotencyToken,
) -> Option<ConversationLock> {
    let Ok(id) = id.parse() else {
        let mut state = guard.run.state.lock();
        state.on_conversation_lost(CommitRefusal::Gone);
        return None;
    };
    let key = ConversationKey {
        tenant: guard.key.tenant,
        id,
    };
    let lease = responses.settings.advanced.conversation_lease;
    loop {
        let resumed =
            conversation_lock::resume(&responses.store, key, token, lease, &responses.tasks);
        let refusal = match resumed.await {
            Ok(Ok(lock)) => return Some(lock),
            Err(error) if error.retry_after().is_some() => {
                sleep(PAUSE).await;
                continue;
            }
            Ok(Err(LockOutcome::Gone)) => CommitRefusal::Gone,
            Ok(Err(_)) | Err(_) => CommitRefusal::Unlocked,
        };
        debug!(conversation_id = %key.id, ?refusal, "conversation of an orphaned response not locked");
        guard.run.state.lock().on_conversation_lost(refusal);
        return None;
    }
}

/// The conversation did not accept the items. It is unlocked, if this response still holds the lock.
pub(super) async fn on_not_added(
    responses: &Responses,
    key: ResponseKey,
    refusal: CommitRefusal,
    commit: Option<Commit>,
) {
    warn!(response_id = %key.id, ?refusal, "background response not added to its conversation");
    responses.metrics.on_turn_refused(refusal);
    unlock(responses, commit).await;
}

/// Ends the lock of items that will not be written.
pub(super) async fn unlock(responses: &Responses, commit: Option<Commit>) {
    if let Some(commit) = commit {
        conversation_lock::unlock(&responses.store, commit.conversation, commit.token).await;
    }
}

/// What the conversation gets from this end. From here on the lock is not renewed: the write of the end is its last
/// use.
pub(super) async fn commit(finisher: &mut Finisher, outcome: &Outcome) -> Option<Commit> {
    // A failed response leaves nothing in the conversation.
    if !outcome.status.is_continuable() {
        return None;
    }
    let lock = finisher.conversation.take()?;
    let commit = Commit {
        conversation: lock.key,
        token: lock.token,
        items: finisher.conversation_items(outcome),
    };
    lock.leave().await;
    Some(commit)
}

/// The run has ended here: unlocks the conversation, unless another replica goes on with the response. `commit`: was
/// not written.
pub(super) async fn leave(
    responses: &Responses,
    is_given_up: bool,
    lock: Option<ConversationLock>,
    commit: Option<Commit>,
) {
    match lock {
        Some(lock) if is_given_up => lock.leave().await,
        Some(lock) => lock.release().await,
        None => {}
    }
    unlock(responses, commit.filter(|_| !is_given_up)).await;
}
