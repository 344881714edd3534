//! File descriptors: how many connections of clients leave enough of them for engines. Pure.

/// What the process needs besides connections of clients and engines: listeners, the log, other threads than those for I/O,
/// the response store, files that are read.
const BASE: u64 = 64;
/// An I/O thread's runtime: epoll and a copy of it, what wakes the thread, and signals.
const PER_IO_THREAD: u64 = 4;
/// For each worker that is known at the start: a health check and two sockets of KV events for each of a few ranks.
const PER_WORKER: u64 = 8;
/// A connection of a client, and one to the engine that answers it.
const PER_CONNECTION: u64 = 2;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DescriptorPlan {
    pub max_connections: u32,
    /// Descriptors that the configured maximum needs.
    pub needed: u64,
    /// True if the process may not open that many, so that fewer connections are accepted.
    pub is_short: bool,
}

impl DescriptorPlan {
    /// `limit`: descriptors that the process may open; `None` for no limit. `for_engines`: descriptors for connections to
    /// engines; `None` for one with each connection of a client.
    pub fn new(
        limit: Option<u64>,
        max_connections: u32,
        workers: usize,
        io_threads: usize,
        for_engines: Option<u32>,
    ) -> Self {
        let own = BASE + PER_IO_THREAD * io_threads as u64;
        let other = own + PER_WORKER * workers as u64 + u64::from(for_engines.unwrap_or(0));
        let per_connection = match for_engines {
            Some(_) => 1,
            None => PER_CONNECTION,
        };
        let needed = other + per_connection * u64::from(max_connections);
        let limit = limit.unwrap_or(u64::MAX);
        // At least a quarter of the descriptors are for clients, whatever the number of workers.
        let least = limit / 4 * per_connection;
        let for_connections = limit.saturating_sub(other).max(least);
        let fit = (for_connections / per_connection).max(1);
        Self {
            max_connections: u32::try_from(fit).unwrap_or(u32::MAX).min(max_connections),
            needed,
            is_short: limit < needed,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn with_enough_descriptors_the_configured_maximum_is_accepted() {
        let plan = DescriptorPlan::new(Some(1 << 20), 16_384, 100, 8, None);
        assert_eq!((plan.max_connections, plan.is_short), (16_384, false));
        assert_eq!(plan.needed, 64 + 32 + 800 + 2 * 16_384);
        let unlimited = DescriptorPlan::new(None, u32::MAX, 1, 8, None);
        assert_eq!(unlimited.max_connections, u32::MAX);
    }

    #[test]
    fn with_too_few_engines_get_as_many_as_clients() {
        let accepted = |limit, io_threads| {
            let plan = DescriptorPlan::new(Some(limit), 16_384, 4, io_threads, None);
            assert!(plan.is_short);
            plan.max_connections
        };
        assert_eq!(accepted(1_024, 2), 460);
        assert_eq!(accepted(1_024, 96), 272);
        assert_eq!(accepted(128, 2), 32);
        assert_eq!(accepted(0, 2), 1);
    }

    #[test]
    fn an_operator_may_leave_engines_fewer_descriptors() {
        let plan = |limit, for_engines| DescriptorPlan::new(Some(limit), 16_384, 4, 0, for_engines);
        assert_eq!(plan(20_000, None).max_connections, 9_952);
        assert_eq!(plan(20_000, Some(4_096)).max_connections, 15_808);
        let enough = plan(20_000, Some(1_024));
        assert_eq!((enough.max_connections, enough.is_short), (16_384, false));
        // Clients are served whatever is left for engines.
        assert_eq!(plan(1_024, Some(1_000)).max_connections, 256);
    }

    proptest! {
        #[test]
        fn clients_never_get_more_than_half_of_what_is_short(limit in 4u64..1 << 20, workers in 0usize..4_096) {
            let plan = DescriptorPlan::new(Some(limit), u32::MAX, workers, 2, None);
            prop_assert!(u64::from(plan.max_connections) * 2 <= limit);
        }
    }
}
