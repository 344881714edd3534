//! How much memory the batches of a replica hold at a time: 64 MiB for the input of shards, for answers until they are
//! written, and for what reads whole files. Files of results above 64 GiB have larger parts (`storage/writer.rs`),
//! which come on top of that.

use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::relay::{AnswerRoom, GrowFuture};

/// The input of the shards that run: four of 4 MiB, or two whose only line is as long as one may be.
const INPUT_BYTES: u32 = 16 << 20;

/// Answers that share this. Each is there twice at times (as it came and as a result line, or as a result line and in a
/// part), so that they take 16 MiB. Parts that are not full have 4 MiB of it at most.
const SHARED_BYTES: usize = 8 << 20;

/// One at a time has more than its share: an answer of any size (16 MiB at most, which are there twice), or a work that
/// reads a whole file (a result line of 16 MiB, and two parts of the files that it writes, of 8 MiB up to 64 GiB).
const LARGE_ONES: usize = 1;

/// Room in memory. Those who find none wait, and so do the engines and the storage that they read from.
#[derive(Debug)]
pub struct MemoryBounds {
    input: Arc<Semaphore>,
    shared: Arc<Semaphore>,
    large: Arc<Semaphore>,
}

/// What one answer holds of it, until its result is written.
///
/// An answer that has no room left waits for the shared bytes, and for being the large one. Who is the large one waits
/// for nothing more; so answers that wait for each other come to an end.
#[derive(Debug)]
pub struct HeldAnswer {
    bounds: Arc<MemoryBounds>,
    permits: Mutex<AnswerPermits>,
}

#[derive(Debug, Default)]
struct AnswerPermits {
    shared: Option<OwnedSemaphorePermit>,
    large: Option<OwnedSemaphorePermit>,
}

impl Default for MemoryBounds {
    fn default() -> Self {
        Self::new(SHARED_BYTES)
    }
}

impl MemoryBounds {
    fn new(shared_bytes: usize) -> Self {
        Self {
            input: Arc::new(Semaphore::new(INPUT_BYTES as usize)),
            shared: Arc::new(Semaphore::new(shared_bytes)),
            large: Arc::new(Semaphore::new(LARGE_ONES)),
        }
    }

    /// Waits until so many bytes of an input may be read. The room comes back when the permit is dropped.
    pub async fn input(&self, bytes: u64) -> Option<OwnedSemaphorePermit> {
        let bytes = u32::try_from(bytes).map_or(INPUT_BYTES, |bytes| bytes.min(INPUT_BYTES));
        self.input.clone().acquire_many_owned(bytes).await.ok()
    }

    /// Waits until a whole file may be read.
    pub async fn whole_file(&self) -> Option<OwnedSemaphorePermit> {
        self.large.clone().acquire_owned().await.ok()
    }
}

impl HeldAnswer {
    pub fn new(bounds: &Arc<MemoryBounds>) -> Arc<Self> {
        Arc::new(Self {
            bounds: bounds.clone(),
            permits: Mutex::default(),
        })
    }

    /// Whether others wait for its end.
    pub fn is_large(&self) -> bool {
        self.permits.lock().large.is_some()
    }

    /// How many more of so many bytes it has to wait for.
    fn missing(&self, bytes: usize) -> usize {
        let permits = self.permits.lock();
        if permits.large.is_some() {
            return 0;
        }
        let shared = permits.shared.as_ref();
        bytes.saturating_sub(shared.map_or(0, OwnedSemaphorePermit::num_permits))
    }

    async fn wait_for(&self, missing: usize) {
        let count = u32::try_from(missing).unwrap_or(u32::MAX);
        let (shared, large) = (self.bounds.shared.clone(), self.bounds.large.clone());
        // Neither is ever closed.
        tokio::select! {
            biased;
            Ok(more) = shared.acquire_many_owned(count) => {
                let mut permits = self.permits.lock();
                match &mut permits.shared {
                    Some(held) => held.merge(more),
                    none => *none = Some(more),
                }
            }
            Ok(large) = large.acquire_owned() => self.permits.lock().large = Some(large),
            else => {}
        }
    }
}

impl AnswerRoom for HeldAnswer {
    /// What it was let have before counts: whoever passes the answer on may ask for the same bytes again.
    fn grow_to(&self, bytes: usize) -> GrowFuture<'_> {
        Box::pin(async move {
            let missing = self.missing(bytes);
            if missing > 0 {
                self.wait_for(missing).await;
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use std::pin::{Pin, pin};
    use std::task::{Context, Waker};

    use super::*;

    fn is_ready<T>(future: Pin<&mut impl Future<Output = T>>) -> bool {
        future
            .poll(&mut Context::from_waker(Waker::noop()))
            .is_ready()
    }

    #[test]
    fn answers_share_the_room_and_one_may_be_larger() {
        let bounds = Arc::new(MemoryBounds::new(10));
        let [a, b, c, d] = [(); 4].map(|()| HeldAnswer::new(&bounds));
        assert!(is_ready(pin!(a.grow_to(2))) && is_ready(pin!(a.grow_to(6))));
        // Of these bytes it has all.
        assert!(is_ready(pin!(a.grow_to(6))) && is_ready(pin!(a.grow_to(1))));
        assert!(!a.is_large());
        assert!(is_ready(pin!(b.grow_to(5))) && b.is_large());
        assert!(is_ready(pin!(b.grow_to(1_000))));
        let mut waits = pin!(c.grow_to(5));
        assert!(!is_ready(waits.as_mut()));
        drop(a);
        assert!(is_ready(waits.as_mut()) && !c.is_large());
        let mut waits = pin!(d.grow_to(6));
        assert!(!is_ready(waits.as_mut()));
        drop(b);
        assert!(is_ready(waits.as_mut()) && d.is_large());
    }

    #[test]
    fn a_work_on_a_whole_file_is_the_large_one() {
        let bounds = Arc::new(MemoryBounds::new(10));
        let held = HeldAnswer::new(&bounds);
        assert!(is_ready(pin!(held.grow_to(11))) && held.is_large());
        let mut waits = pin!(bounds.whole_file());
        assert!(!is_ready(waits.as_mut()));
        drop(held);
        assert!(is_ready(waits.as_mut()));
    }

    #[tokio::test]
    async fn an_input_waits_for_those_before_it() {
        let bounds = MemoryBounds::default();
        let half = u64::from(INPUT_BYTES) / 2;
        let first = bounds.input(half).await;
        let second = bounds.input(half).await;
        let mut waits = pin!(bounds.input(1));
        assert!(!is_ready(waits.as_mut()));
        drop(first);
        assert!(is_ready(waits.as_mut()));
        drop(second);
        // One that is longer than any may be has all of it.
        assert!(bounds.input(u64::MAX).await.is_some());
    }
}
