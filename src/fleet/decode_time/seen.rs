//! The times of a worker's last streams. Requests add, one reader takes the median.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicU32, AtomicUsize};
use std::time::Duration;

/// A stream with fewer tokens after its first one shows nothing.
const MIN_TOKENS: u64 = 16;
/// The time is the median of this many streams: those of clients that read slowly, and pauses, change nothing.
const WINDOW: usize = 31;
/// Fewer streams show nothing.
const MIN_STREAMS: usize = 7;
/// Seconds a token of the last streams, as the bits of an `f32`; 0: none.
#[derive(Debug, Default)]
pub struct DecodeTimes {
    next: AtomicUsize,
    seconds: [AtomicU32; WINDOW],
}

impl DecodeTimes {
    /// A stream ended that had `tokens` in `time` after its first token.
    pub fn on_stream(&self, tokens: u64, time: Duration) {
        if tokens < MIN_TOKENS || time.is_zero() {
            return;
        }
        let seconds = (time.as_secs_f64() / tokens as f64) as f32;
        let at = self.next.fetch_add(1, Relaxed) % WINDOW;
        self.seconds[at].store(seconds.to_bits(), Relaxed);
    }

    /// Seconds for a token, once enough streams were seen.
    pub fn median(&self) -> Option<f64> {
        let seconds = self.seconds.iter().map(|it| it.load(Relaxed));
        let mut seconds: Vec<u32> = seconds.filter(|bits| *bits != 0).collect();
        if seconds.len() < MIN_STREAMS {
            return None;
        }
        let middle = (seconds.len() - 1) / 2;
        // The bits of positive numbers are in the numbers' order.
        let (_, median, _) = seconds.select_nth_unstable(middle);
        Some(f32::from_bits(*median).into())
    }

    /// The engine may be another one.
    pub(crate) fn clear(&self) {
        for seconds in &self.seconds {
            seconds.store(0, Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOKEN: Duration = Duration::from_millis(25);

    #[test]
    fn a_time_is_known_after_seven_streams_and_is_their_median() {
        let times = DecodeTimes::default();
        for _ in 0..6 {
            times.on_stream(100, TOKEN * 100);
        }
        times.on_stream(MIN_TOKENS - 1, TOKEN);
        times.on_stream(100, Duration::ZERO);
        assert_eq!(times.median(), None);
        times.on_stream(100, TOKEN * 100);
        assert_eq!(times.median(), Some(f64::from(0.025_f32)));
        // Clients that read slowly.
        for _ in 0..7 {
            times.on_stream(100, TOKEN * 10_000);
        }
        assert_eq!(times.median(), Some(f64::from(0.025_f32)));
        for _ in 0..WINDOW {
            times.on_stream(100, TOKEN * 400);
        }
        assert_eq!(times.median(), Some(f64::from(0.1_f32)));
        times.clear();
        assert_eq!(times.median(), None);
    }
}
