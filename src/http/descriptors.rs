//! File descriptors: how many connections of clients leave enough of them for engines. Pure.

/// What the process needs besides connections of clients and engines: listeners, the log, I/O threads, the response
/// store, files that are read.
const BASE: u64 = 64;
/// For each worker that is known at the start: a health check and two sockets of KV events for each of a few ranks.
const PER_WORKER: u64 = 8;
/// A connection of a client, and one to the engine that answers it.
const PER_CONNECTION: u64 = 2;

/// How many connections of clients are accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DescriptorPlan {
    pub max_connections: u32,
    /// Descriptors that the configured maximum needs.
    pub needed: u64,
    /// True if the process may not open that many, so that fewer connections are accepted.
    pub is_short: bool,
}

impl DescriptorPlan {
    /// `limit`: descriptors that the process may open; `None` for no limit.
    pub fn new(limit: Option<u64>, max_connections: u32, workers: usize) -> Self {
        let other = BASE + PER_WORKER * workers as u64;
        let needed = other + PER_CONNECTION * u64::from(max_connections);
        let limit = limit.unwrap_or(u64::MAX);
        if limit >= needed {
            return Self {
                max_connections,
                needed,
                is_short: false,
            };
        }
        // At least a quarter of the descriptors are for clients, whatever the number of workers.
        let for_connections = limit.saturating_sub(other).max(limit / 2);
        let fit = (for_connections / PER_CONNECTION).max(1);
        Self {
            max_connections: u32::try_from(fit).unwrap_or(u32::MAX).min(max_connections),
            needed,
            is_short: true,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn with_enough_descriptors_the_configured_maximum_is_accepted() {
        let plan = DescriptorPlan::new(Some(1 << 20), 16_384, 100);
        assert_eq!((plan.max_connections, plan.is_short), (16_384, false));
        assert_eq!(plan.needed, 64 + 800 + 2 * 16_384);
        let unlimited = DescriptorPlan::new(None, u32::MAX, 1);
        assert_eq!(unlimited.max_connections, u32::MAX);
    }

    #[test]
    fn with_too_few_engines_get_as_many_as_clients() {
        let plan = DescriptorPlan::new(Some(1_024), 16_384, 4);
        assert_eq!((plan.max_connections, plan.is_short), (464, true));
        assert_eq!(
            DescriptorPlan::new(Some(128), 16_384, 4).max_connections,
            32
        );
        assert_eq!(DescriptorPlan::new(Some(0), 16_384, 4).max_connections, 1);
    }

    proptest! {
        #[test]
        fn clients_never_get_more_than_half_of_what_is_short(limit in 4u64..1 << 20, workers in 0usize..4_096) {
            let plan = DescriptorPlan::new(Some(limit), u32::MAX, workers);
            prop_assert!(u64::from(plan.max_connections) * 2 <= limit);
        }
    }
}
