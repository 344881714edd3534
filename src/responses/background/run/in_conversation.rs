//! The conversation of a run: its lock goes with the response from replica to replica, and its items are written in
//! one step with the response's end.

use std::time::Duration;

use tokio::time::sleep;
use tracing::debug;

use crate::responses::background::runs::RunGuard;
use crate::responses::background::stored_request::StoredRequest;
use crate::responses::conversation_lock::{self, ConversationLock};
use crate::responses::finish::Finisher;
use crate::responses::outcome::Outcome;
use crate::responses::service::Responses;
use crate::store::{Commit, ConversationKey, Item};

const PAUSE: Duration = Duration::from_millis(200);

/// Continues the lock that the previous owner of the response held. Returns once the store has answered; without the
/// lock the response fails.
pub(super) async fn resume(
    responses: &Responses,
    guard: &RunGuard,
    request: &StoredRequest,
) -> Option<(ConversationLock, Vec<Item>)> {
    let (id, token, items) = request.conversation()?;
    let Ok(id) = id.parse() else {
        guard.run.state.lock().on_conversation_lost();
        return None;
    };
    let key = ConversationKey {
        tenant: guard.key.tenant,
        id,
    };
    let lease = responses.conversation_lease();
    loop {
        let resumed =
            conversation_lock::resume(&responses.store, key, token, lease, &responses.tasks);
        match resumed.await {
            Ok(Ok(lock)) => return Some((lock, items)),
            Err(error) if error.retry_after().is_some() => sleep(PAUSE).await,
            refused => {
                debug!(conversation_id = %key.id, refused = ?refused.err(), "conversation of an orphaned response not locked");
                guard.run.state.lock().on_conversation_lost();
                return None;
            }
        }
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
        conversation: lock.key(),
        token: lock.token(),
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
    if let Some(commit) = commit.filter(|_| !is_given_up) {
        conversation_lock::unlock(&responses.store, commit.conversation, commit.token).await;
    }
}
