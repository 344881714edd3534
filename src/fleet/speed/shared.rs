//! A worker's speed that decisions read without a lock.

use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;

use super::types::Speed;

/// A number that one thread writes and all read.
#[derive(Debug, Default)]
pub struct SharedF32(AtomicU32);

impl SharedF32 {
    pub fn new(value: f64) -> Self {
        Self(AtomicU32::new((value as f32).to_bits()))
    }

    #[inline]
    pub fn get(&self) -> f64 {
        f32::from_bits(self.0.load(Relaxed)).into()
    }

    pub fn set(&self, value: f64) {
        self.0.store((value as f32).to_bits(), Relaxed);
    }
}

/// Its numbers are written one after the other: a decision in between reads some of before, which is no harm.
#[derive(Debug)]
pub struct SharedSpeed {
    prompt_token: SharedF32,
    step: SharedF32,
    /// The upper half of `batch` as an `f32`, which is within half a percent, and `overlap` in parts of [`WHOLE`]: a decision's
    /// numbers fill a cache line.
    batch_and_overlap: AtomicU32,
}

/// An overlap of 1. A power of two, so that a decision need not divide.
const WHOLE: f64 = 32_768.0;

fn packed(speed: &Speed) -> u32 {
    let overlap = (speed.overlap * WHOLE).round() as u32;
    (speed.batch as f32).to_bits() & !0xffff | overlap & 0xffff
}

impl Default for SharedSpeed {
    fn default() -> Self {
        let start = Speed::default();
        Self {
            prompt_token: SharedF32::new(start.prompt_token),
            step: SharedF32::new(start.step),
            batch_and_overlap: AtomicU32::new(packed(&start)),
        }
    }
}

impl SharedSpeed {
    #[inline]
    pub fn get(&self) -> Speed {
        let packed = self.batch_and_overlap.load(Relaxed);
        Speed {
            prompt_token: self.prompt_token.get(),
            step: self.step.get(),
            batch: f32::from_bits(packed & !0xffff).into(),
            overlap: f64::from(packed & 0xffff) / WHOLE,
        }
    }

    #[inline]
    pub fn prompt_token(&self) -> f64 {
        self.prompt_token.get()
    }

    pub fn set(&self, speed: &Speed) {
        self.prompt_token.set(speed.prompt_token);
        self.step.set(speed.step);
        self.batch_and_overlap.store(packed(speed), Relaxed);
    }
}
