//! Retries of writes after work that must not be repeated.
//!
//! Every such write carries a token, so that the store does it at most once.

use crate::store::repeat::{PAUSES, repeat};
use crate::store::{self, StoreFuture};

/// Repeats a write until the store confirms or refuses it.
pub(super) async fn until_known<'a, T>(
    write: impl Fn() -> StoreFuture<'a, T>,
) -> Result<T, store::Error> {
    use store::Error::{Unavailable, Unknown};
    let may_help = |error: &store::Error| matches!(error, Unavailable { .. } | Unknown { .. });
    repeat(PAUSES, may_help, write).await
}

/// Repeats a write only while its outcome is unknown. If it was surely not done, the client can retry it.
pub(super) async fn while_unknown<'a, T>(
    write: impl Fn() -> StoreFuture<'a, T>,
) -> Result<T, store::Error> {
    let mut pauses = PAUSES.into_iter();
    let mut unknown = None;
    loop {
        let error = match write().await {
            Err(error @ store::Error::Unknown { .. }) => error,
            // This attempt did nothing, but an earlier one may have.
            Err(error @ store::Error::Unavailable { .. }) => match unknown {
                Some(earlier) => earlier,
                None => return Err(error),
            },
            result => return result,
        };
        let Some(pause) = pauses.next() else {
            return Err(error);
        };
        unknown = Some(error);
        tokio::time::sleep(pause).await;
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::time::Duration;

    use super::*;

    fn unknown() -> store::Error {
        store::Error::Unknown {
            retry_after: Duration::from_secs(1),
            reason: "slow".into(),
        }
    }

    fn unavailable() -> store::Error {
        store::Error::Unavailable {
            retry_after: Duration::from_secs(1),
            reason: "down".into(),
        }
    }

    /// The result for these answers of the store, and the number of attempts.
    async fn check(answers: Vec<Result<u8, store::Error>>) -> (Result<u8, store::Error>, usize) {
        let answers = RefCell::new(answers.into_iter());
        let attempts = RefCell::new(0);
        let result = while_unknown(|| {
            *attempts.borrow_mut() += 1;
            let answer = answers.borrow_mut().next().unwrap();
            Box::pin(async { answer })
        })
        .await;
        let attempts = *attempts.borrow();
        (result, attempts)
    }

    #[tokio::test]
    async fn a_write_of_unknown_outcome_is_repeated_until_it_is_known() {
        assert_eq!(check(vec![Err(unknown()), Ok(7)]).await, (Ok(7), 2));
        assert_eq!(
            check(vec![Err(unavailable())]).await,
            (Err(unavailable()), 1)
        );
        let first = vec![Err(unknown()), Err(unavailable()), Ok(7)];
        assert_eq!(check(first).await, (Ok(7), 3));
        let mut never = vec![Err(unknown())];
        never.resize(PAUSES.len() + 1, Err(unavailable()));
        assert_eq!(check(never).await, (Err(unknown()), PAUSES.len() + 1));
    }
}
