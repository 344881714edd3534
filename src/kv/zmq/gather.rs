//! One wake-up of the thread that follows the engines for what they all sent meanwhile. Engines whose many requests end at
//! once publish several times in a millisecond, and many engines together always do. Read one by one, each batch would cost
//! a wake-up.

use std::cell::Cell;
use std::time::{Duration, Instant};

/// Blocks that are reported this much later count as unconfirmed until then, so routing misses nothing.
const GATHER_TIME: Duration = Duration::from_millis(1);
/// What is read in larger pieces, as a replay, is no reason to sleep.
const SMALL_BYTES: usize = 16 * 1_024;

thread_local! {
    static LAST_READ: Cell<Option<Instant>> = const { Cell::new(None) };
    static IS_BUSY: Cell<bool> = const { Cell::new(false) };
}

/// Bytes of a peer were read on this thread.
pub(super) fn on_read(now: Instant, bytes: usize) {
    let last = LAST_READ.replace(Some(now));
    let is_busy = last.is_some_and(|last| now < last + 2 * GATHER_TIME);
    if is_busy && bytes < SMALL_BYTES {
        IS_BUSY.set(true);
    }
}

/// To be called before the thread waits for more: while much comes, it sleeps first.
pub fn before_park() {
    if IS_BUSY.take() {
        #[expect(
            clippy::disallowed_methods,
            reason = "the thread has nothing else to do, and a timer would wake it as often as the engines"
        )]
        std::thread::sleep(GATHER_TIME);
    }
}
