//! The WebSockets that are open, and their memory: bounds over all connections. Shared by all configurations.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use parking_lot::Mutex;

use crate::ids::Tenant;
use crate::observe::metrics::{Registry, metric_table};
use crate::openai::error::ApiError;
use crate::responses::WebsocketSettings;

metric_table! {
    #[derive(Debug)]
    pub(super) struct Metrics {
        pub(super) connections: gauge "warmroute_websocket_connections" "WebSockets of clients that are open.",
        pub(super) refused: counters "warmroute_websocket_connections_refused_total" ["reason"]
            "WebSockets refused because too many were open, by reason: in all (`total`) or of one tenant (`tenant`).",
        pub(super) closed: counters "warmroute_websocket_connections_closed_total" ["reason"]
            "WebSockets that ended, by reason: `client` (it closed or was lost), `over` (too old, or without a turn for too \
             long), `drain`, `unresponsive` (no answer to pings), `send_timeout` (the client reads nothing), `memory` (none for \
             a large message of it), `protocol` (bytes that are no WebSocket's, or a message that is too large).",
        pub(super) memory: gauge "warmroute_websocket_memory_bytes"
            "What all WebSockets together remember of responses, and turns that wait on them or for memory of \
             `api.max_total_body`.",
        pub(super) limited: counters "warmroute_websocket_limits_reached_total" ["bound"]
            "What bounds of a WebSocket refused or forgot, by bound: `queue` (a turn was refused), `lanes` (a turn named one \
             lane too many), `memory` (the latest response of a lane was forgotten), `messages` (a large message was not read \
             to its end).",
    }
}

#[derive(Debug)]
pub(crate) struct Open {
    counts: Mutex<Counts>,
    /// Bytes of what connections remember and of what waits on them.
    memory: AtomicU64,
    pub(super) metrics: Metrics,
}

#[derive(Debug, Default)]
struct Counts {
    all: u32,
    /// With keys only.
    of_tenants: HashMap<Tenant, u32>,
}

/// One open connection, until it is dropped.
#[derive(Debug)]
pub(super) struct Slot {
    pub(super) open: Arc<Open>,
    tenant: Option<Tenant>,
    /// Its part of the memory.
    bytes: u64,
}

impl Open {
    pub(crate) fn new(registry: &Registry) -> Arc<Self> {
        Arc::new(Self {
            counts: Mutex::default(),
            memory: AtomicU64::new(0),
            metrics: Metrics::new(registry),
        })
    }

    /// `tenant`: whose connection it is, if there are tenants.
    pub(super) fn enter(
        self: &Arc<Self>,
        settings: &WebsocketSettings,
        tenant: Option<Tenant>,
    ) -> Result<Slot, ApiError> {
        let refused = |is_of_tenant: bool| {
            let reason = if is_of_tenant { "tenant" } else { "total" };
            self.metrics.refused.with_label_values(&[reason]).inc();
            Err(ApiError::too_many_websockets(is_of_tenant))
        };
        let mut counts = self.counts.lock();
        if counts.all >= settings.max_connections {
            return refused(false);
        }
        if let Some(tenant) = tenant {
            let count = counts.of_tenants.entry(tenant).or_default();
            if *count >= settings.max_connections_per_tenant {
                return refused(true);
            }
            *count += 1;
        }
        counts.all += 1;
        self.metrics.connections.inc();
        Ok(Slot {
            open: self.clone(),
            tenant,
            bytes: 0,
        })
    }
}

impl Slot {
    /// Bytes that all connections together may still take.
    pub(super) fn room(&self, settings: &WebsocketSettings) -> u64 {
        let used = self.open.memory.load(Relaxed);
        settings.max_total_memory.saturating_sub(used)
    }

    pub(super) fn set_bytes(&mut self, bytes: u64) {
        if bytes == self.bytes {
            return;
        }
        let open = &self.open;
        // Wraps around where it shrinks.
        open.memory
            .fetch_add(bytes.wrapping_sub(self.bytes), Relaxed);
        open.metrics.memory.add(bytes as i64 - self.bytes as i64);
        self.bytes = bytes;
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.set_bytes(0);
        self.open.metrics.connections.dec();
        let mut counts = self.open.counts.lock();
        counts.all -= 1;
        if let Some(tenant) = self.tenant
            && let Some(count) = counts.of_tenants.get_mut(&tenant)
        {
            *count -= 1;
            if *count == 0 {
                counts.of_tenants.remove(&tenant);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(all: u32, of_tenant: u32) -> WebsocketSettings {
        WebsocketSettings {
            max_connections: all,
            max_connections_per_tenant: of_tenant,
            max_total_memory: 100,
            ..WebsocketSettings::default()
        }
    }

    #[test]
    fn connections_are_bounded_in_all_and_by_tenant_until_they_close() {
        let open = Open::new(&Registry::default());
        let settings = settings(3, 2);
        let (a, b) = (Some(Tenant::of("a")), Some(Tenant::of("b")));
        let status = |tenant| {
            open.enter(&settings, tenant)
                .map_err(|error| error.status.as_u16())
        };
        let first = status(a).unwrap();
        let second = status(a).unwrap();
        assert_eq!(status(a).unwrap_err(), 429);
        let third = status(b).unwrap();
        assert_eq!(status(b).unwrap_err(), 503);
        assert_eq!(status(None).unwrap_err(), 503);
        drop(first);
        let again = status(a).unwrap();
        assert_eq!(open.metrics.connections.get(), 3);
        drop((second, third, again));
        assert_eq!(open.counts.lock().of_tenants.len(), 0);
        assert_eq!(open.metrics.connections.get(), 0);
        assert!(
            (0..3)
                .map(|_| open.enter(&settings, None))
                .all(|entered| entered.is_ok())
        );
    }

    #[test]
    fn memory_is_shared_and_given_back() {
        let open = Open::new(&Registry::default());
        let settings = settings(3, 3);
        let mut one = open.enter(&settings, None).unwrap();
        let mut two = open.enter(&settings, None).unwrap();
        one.set_bytes(70);
        two.set_bytes(20);
        assert_eq!(two.room(&settings), 10);
        one.set_bytes(5);
        assert_eq!(two.room(&settings), 75);
        drop(one);
        assert_eq!(two.room(&settings), 80);
        two.set_bytes(400);
        assert_eq!(two.room(&settings), 0);
        assert_eq!(open.metrics.memory.get(), 400);
        drop(two);
        assert_eq!(open.metrics.memory.get(), 0);
    }
}
