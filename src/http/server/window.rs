//! How much of the window of one HTTP/2 connection bodies may hold that nobody reads, as while they wait for memory.
//!
//! All streams of a connection send from one window, and bytes that nobody reads stay in it. Without a bound, bodies of
//! one client that wait would stop the uploads of all others that share the connection, as behind a proxy. The window
//! cannot be as large as all streams could fill: that is uncounted memory of each connection. So a body that would hold
//! too much of it does not wait. Pure.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

/// What one HTTP/2 stream may have sent that nobody has read: a small part of the connection's window, so that a body
/// that is not read yet does not stop all others of its connection. An upload gets one window in each round trip, which
/// is still a megabyte a second over 250 ms.
pub(super) const STREAM_WINDOW_BYTES: u32 = 256 << 10;

/// The window of one HTTP/2 connection.
#[derive(Debug)]
pub(super) struct Window {
    bytes: u64,
    /// Bytes that bodies may hold of it while nobody reads them.
    held: AtomicU64,
}

impl Window {
    pub(super) fn new(bytes: u32) -> Arc<Self> {
        Arc::new(Self {
            bytes: bytes.into(),
            held: AtomicU64::new(0),
        })
    }

    /// For a body of which so much is still to come, if that is known. `None` if it would hold too much together with
    /// the others. `has_memory`: what was read of it counts for its owner, and comes back once all of it has come. So
    /// bodies without memory leave most of the window to it: they may hold a quarter, and all together three quarters.
    pub(super) fn hold(self: &Arc<Self>, rest: Option<u64>, has_memory: bool) -> Option<Unread> {
        let stream = u64::from(STREAM_WINDOW_BYTES);
        let bytes = rest.map_or(stream, |rest| rest.min(stream));
        let quarters = if has_memory { 3 } else { 1 };
        let max = self.bytes / 4 * quarters;
        let add = |held: u64| Some(held + bytes).filter(|sum| *sum <= max);
        let held = self.held.fetch_update(Relaxed, Relaxed, add);
        held.ok().map(|_| Unread(Some((self.clone(), bytes))))
    }
}

/// What a body that nobody reads may hold of its connection's window, until this is dropped. The default is that of a
/// body that holds up no other.
#[derive(Debug, Default)]
pub struct Unread(Option<(Arc<Window>, u64)>);

impl Drop for Unread {
    fn drop(&mut self) {
        if let Some((window, bytes)) = &self.0 {
            window.held.fetch_sub(*bytes, Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STREAM: u64 = STREAM_WINDOW_BYTES as u64;

    #[test]
    fn bodies_that_are_not_read_leave_a_part_of_the_window_to_others() {
        let window = Window::new(8 * STREAM_WINDOW_BYTES);
        // One of unknown length may fill its stream's window, and a long one no more.
        let mut held = vec![window.hold(None, false).unwrap()];
        held.push(window.hold(Some(100 * STREAM), false).unwrap());
        assert!(window.hold(None, false).is_none());
        assert!(window.hold(Some(1), false).is_none());
        // Nothing is to come of it.
        assert!(window.hold(Some(0), false).is_some());
        // Those that have memory may go further, and still not take all of it.
        held.extend((0..4).map(|_| window.hold(None, true).unwrap()));
        assert!(window.hold(Some(1), true).is_none());
        assert_eq!(window.held.load(Relaxed), 6 * STREAM);
        drop(held.split_off(1));
        assert!(window.hold(Some(STREAM), false).is_some());
        drop(held);
        assert_eq!(window.held.load(Relaxed), 0);
    }

    #[test]
    fn short_bodies_hold_no_more_than_they_have() {
        let window = Window::new(8 * STREAM_WINDOW_BYTES);
        let hold = || window.hold(Some(STREAM / 2), false);
        let held: Vec<Unread> = std::iter::from_fn(hold).collect();
        assert_eq!(held.len(), 4);
    }
}
