//! Compares the workers of each model. Pure: its caller takes the snapshots.

use super::compare::compare;
use crate::fleet::Snapshot;

/// Sets how many times as long as the fastest of its model each worker takes. To be called about once a second.
pub fn update(snapshot: &Snapshot) {
    for group in snapshot.models.values().filter(|group| !group.is_adapter) {
        let workers = || group.workers.iter();
        let times: Vec<_> = workers()
            .map(|worker| (worker.decode_times.median(), worker.load.decode_time()))
            .collect();
        for (worker, time) in workers().zip(compare(&times)) {
            worker.load.set_decode_time(time);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::fleet::registry::tests::{bring_up, registry};

    const TOKEN: Duration = Duration::from_millis(25);

    #[test]
    fn a_restarted_engine_counts_as_fast_until_it_is_known() {
        let registry = registry(&["slow", "fast"]);
        bring_up(&registry, "m");
        let worker = |index: usize| registry.snapshot().workers[index].worker.clone();
        for _ in 0..7 {
            worker(0).decode_times.on_stream(64, TOKEN * 256);
            worker(1).decode_times.on_stream(64, TOKEN * 64);
        }
        update(&registry.snapshot());
        let times = || [0, 1].map(|index| worker(index).load.decode_time());
        assert_eq!(times(), [4.0, 1.0]);
        registry.restarted(worker(0).id);
        update(&registry.snapshot());
        assert_eq!(times(), [1.0, 1.0]);
    }
}
