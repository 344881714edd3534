//! A time weight that decisions read without a lock.

use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;

/// 1 at first.
#[derive(Debug)]
pub struct TimeWeight(AtomicU32);

impl Default for TimeWeight {
    fn default() -> Self {
        Self(AtomicU32::new(1.0_f32.to_bits()))
    }
}

impl TimeWeight {
    #[inline]
    pub fn get(&self) -> f64 {
        f32::from_bits(self.0.load(Relaxed)).into()
    }

    pub fn set(&self, time: f64) {
        self.0.store((time as f32).to_bits(), Relaxed);
    }

    /// Sets it if it is higher.
    pub(super) fn lower(&self, time: f64) {
        self.set(self.get().min(time));
    }
}
