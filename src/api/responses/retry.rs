//! Writes that come at the end of what cannot be done again are tried more than once.

use std::time::Duration;

use crate::store;
use crate::store::Asked;

/// Before each further try: two seconds in all, which a failover of the store takes about.
const PAUSES: [Duration; 3] = [
    Duration::from_millis(100),
    Duration::from_millis(500),
    Duration::from_millis(1_400),
];

/// Does a write until the store says what became of it. It must carry a token, for it may be done twice.
pub(super) async fn until_known<'a, T>(
    write: impl Fn() -> Asked<'a, T>,
) -> Result<T, store::Error> {
    let mut pauses = PAUSES.into_iter();
    loop {
        let error = match write().await {
            Ok(done) => return Ok(done),
            Err(error) => error,
        };
        let may_help = matches!(
            error,
            store::Error::Unavailable { .. } | store::Error::Unknown { .. }
        );
        match pauses.next().filter(|_| may_help) {
            Some(pause) => tokio::time::sleep(pause).await,
            None => return Err(error),
        }
    }
}
