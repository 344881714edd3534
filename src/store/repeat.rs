//! Does again what may succeed a little later: writes of which the store has not said whether they were done, and what
//! is to be undone.

use std::time::Duration;

use tokio::time::sleep;

use super::error::Error;

/// Pauses before a write is repeated: 2 s in all, about as long as a failover of the store.
pub const PAUSES: [Duration; 3] = [
    Duration::from_millis(100),
    Duration::from_millis(500),
    Duration::from_millis(1_400),
];

/// Writes, and writes again while the outcome is unknown, which must do no harm. Returns the last outcome; it may be
/// unknown still.
pub async fn until_known<T, W: Future<Output = Result<T, Error>>>(
    write: impl FnMut() -> W,
) -> Result<T, Error> {
    let is_unknown = |error: &Error| matches!(error, Error::Unknown { .. });
    repeat(PAUSES, is_unknown, write).await
}

/// Tries, and tries again after each of the pauses while `is_passing` says of the error that another try may help.
/// Returns what the last try has returned.
pub async fn repeat<T, E, W: Future<Output = Result<T, E>>>(
    pauses: impl IntoIterator<Item = Duration>,
    is_passing: impl Fn(&E) -> bool,
    mut attempt: impl FnMut() -> W,
) -> Result<T, E> {
    let mut pauses = pauses.into_iter();
    loop {
        match (attempt().await, pauses.next()) {
            (Err(error), Some(pause)) if is_passing(&error) => sleep(pause).await,
            (ended, _) => return ended,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::ready;

    use super::*;

    /// What comes of tries that end like this, with two pauses, and how many there were.
    async fn ended(ends: [Result<u8, &'static str>; 4]) -> (Result<u8, &'static str>, usize) {
        let mut made = 0;
        let attempt = || {
            let end = ends[made];
            made += 1;
            ready(end)
        };
        let is_passing = |error: &&str| *error == "passing";
        let last = repeat([Duration::ZERO; 2], is_passing, attempt).await;
        (last, made)
    }

    #[tokio::test]
    async fn what_fails_is_repeated_while_that_may_help_and_as_often_as_there_are_pauses() {
        let (passing, last) = (Err("passing"), Err("last"));
        for (ends, expected, made) in [
            ([Ok(1), Ok(2), Ok(3), Ok(4)], Ok(1), 1),
            ([passing, Ok(2), Ok(3), Ok(4)], Ok(2), 2),
            ([passing, last, Ok(3), Ok(4)], last, 2),
            ([passing, passing, Ok(3), Ok(4)], Ok(3), 3),
            ([passing, passing, passing, Ok(4)], passing, 3),
        ] {
            assert_eq!(ended(ends).await, (expected, made), "{ends:?}");
        }
    }

    #[tokio::test]
    async fn a_write_is_repeated_only_if_its_outcome_is_unknown() {
        let (retry_after, reason) = (Duration::from_secs(1), "no answer");
        let unknown = Error::Unknown {
            retry_after,
            reason: reason.into(),
        };
        let unavailable = Error::Unavailable {
            retry_after,
            reason: reason.into(),
        };
        let written = async |first: Error| {
            let mut ends = [Err(first), Ok(())].into_iter();
            until_known(|| ready(ends.next().unwrap_or(Ok(())))).await
        };
        assert_eq!(written(unknown).await, Ok(()));
        assert_eq!(written(unavailable.clone()).await, Err(unavailable));
    }
}
