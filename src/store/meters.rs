//! The metrics of the response store, of either kind.

use std::time::Instant;

use prometheus::{Histogram, IntCounter};

use super::{
    CancelOutcome, DeleteOutcome, Error, History, ItemOutcome, ItemsOutcome, LockOutcome,
    PutOutcome, Report, StoreFuture, Takeover, WriteOutcome,
};
use crate::observe;
use crate::observe::metrics::{Registry, metric_table, words};
use crate::store::documents::{
    DocumentList, DocumentSums, InsertOutcome, RemoveOutcome, ReplaceOutcome,
};
use crate::store::outbox::Claimed;

/// Histogram buckets, from a lookup in memory to the longest write time-out.
const SECONDS: &[f64] = &[
    0.000_01, 0.000_05, 0.000_1, 0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1,
    0.25, 0.5, 1.0, 2.5,
];

words! {
    /// An operation of the store, the label `operation`.
    #[derive(Clone, Copy, Debug)]
    pub(super) enum Op {
        Admit = "admit",
        Create = "create",
        CreateInConversation = "create_in_conversation",
        Get = "get",
        Input = "input",
        Request = "request",
        History = "history",
        KeepChain = "keep_chain",
        Delete = "delete",
        Start = "start",
        Append = "append",
        Finalize = "finalize",
        Cancel = "cancel",
        FinalizeCancelled = "finalize_cancelled",
        Events = "events",
        Heartbeat = "heartbeat",
        EndLease = "end_lease",
        CheckOwnership = "check_ownership",
        Orphans = "orphans",
        Untracked = "untracked",
        TakeOver = "take_over",
        Release = "release",
        Notices = "notices",
        CreateConversation = "create_conversation",
        Conversation = "conversation",
        UpdateConversation = "update_conversation",
        DeleteConversation = "delete_conversation",
        AddItems = "add_items",
        Items = "items",
        AllItems = "all_items",
        Item = "item",
        DeleteItem = "delete_item",
        Lock = "lock",
        RenewLock = "renew_lock",
        Commit = "commit",
        Unlock = "unlock",
        AddEvent = "add_event",
        ClaimEvents = "claim_events",
        SettleEvent = "settle_event",
        DisableEndpoint = "disable_endpoint",
        EnableEndpoint = "enable_endpoint",
        InsertDocument = "insert_document",
        Document = "document",
        ReplaceDocument = "replace_document",
        RemoveDocument = "remove_document",
        Documents = "documents",
        DocumentSums = "document_sums",
        DueDocuments = "due_documents",
        Clock = "clock",
        Report = "report",
    }
}

metric_table! {
    #[derive(Clone, Debug)]
    pub(super) struct Metrics {
        ops: counters "warmroute_store_operations_total" ["operation", "outcome"]
            "Operations of the response store, by outcome.",
        duration: histograms "warmroute_store_operation_duration_seconds" ["operation"] in SECONDS
            "Duration of operations of the response store.",
        fenced: counter "warmroute_store_fenced_writes_total"
            "Writes refused because of an outdated fencing token: another replica owns the response.",
        pub(super) evicted: counters "warmroute_store_evictions_total" ["reason"]
            "Records that the memory store evicted, by reason.",
        pub(super) records: gauge "warmroute_store_records" "Responses and conversations in the memory store.",
        pub(super) bytes: gauge "warmroute_store_bytes" "Size of the memory store, including overhead.",
        pub(super) breaker: gauge "warmroute_store_circuit_breaker_state"
            "State of the circuit breaker of Redis: 0 closed, 1 half-open, 2 open; in a cluster the worst of its nodes.",
        pub(super) may_evict: gauge "warmroute_store_may_evict"
            "1 if the maxmemory-policy of Redis is not noeviction, so that it may drop what is stored or running.",
        pub(super) in_flight: gauge "warmroute_store_operations_in_flight" "Operations that wait for Redis.",
        pub(super) reconnects: counter "warmroute_store_connections_opened_total" "Connections opened to Redis.",
        pub(super) foreign_replies: counter "warmroute_store_foreign_replies_total"
            "Replies of Redis that belonged to another request and were given to nobody; each connection with one is replaced.",
        pub(super) replica_waits: counters "warmroute_store_replica_waits_total" ["result"]
            "Writes that were to wait for replicas of Redis, by result: acknowledged, timed_out, or not_asked \
             (within a second of a time-out). Those that were not acknowledged stand; a failover may lose them.",
        pub(super) scripts_reloaded: counter "warmroute_store_scripts_reloaded_total"
            "Scripts sent again because Redis did not have them cached.",
    }
}

#[derive(Clone, Debug)]
pub(super) struct Meters {
    pub(super) metrics: Metrics,
    /// Counters of the outcome `ok`, by operation.
    succeeded: Vec<IntCounter>,
    seconds: Vec<Histogram>,
}

impl Meters {
    pub(super) fn new(registry: &Registry) -> Self {
        let metrics = Metrics::new(registry);
        Self {
            succeeded: Op::ALL
                .map(|op| metrics.ops.with_label_values(&[op.as_str(), OK]))
                .into(),
            seconds: Op::ALL
                .map(|op| metrics.duration.with_label_values(&[op.as_str()]))
                .into(),
            metrics,
        }
    }

    /// Starts the operation once it is polled, counts and times it. Its future may have some kilobytes of room of which
    /// its start fills a few hundred bytes, so it is made in the place that is allocated for it, and not copied there.
    #[inline]
    pub(super) fn meter<'a, T: Outcome + Send + 'a, F>(
        &'a self,
        op: Op,
        operation: impl FnOnce() -> F + Send + 'a,
    ) -> StoreFuture<'a, T>
    where
        F: Future<Output = Result<T, Error>> + Send + 'a,
    {
        let place = Box::new_uninit();
        let metered = async move {
            let started = observe::now();
            let result = operation().await;
            self.count(op, started, &result);
            result
        };
        let metered = Box::write(place, metered);
        Box::into_pin(metered)
    }

    fn count<T: Outcome>(&self, op: Op, started: Instant, result: &Result<T, Error>) {
        let outcome = match result {
            Ok(value) => value.outcome(),
            Err(error) => error.as_str(),
        };
        if outcome == FENCED {
            self.metrics.fenced.inc();
        }
        if outcome == OK {
            self.succeeded[op as usize].inc();
        } else {
            let labels = [op.as_str(), outcome];
            self.metrics.ops.with_label_values(&labels).inc();
        }
        let spent = observe::now().saturating_duration_since(started);
        self.seconds[op as usize].observe(spent.as_secs_f64());
    }
}

const OK: &str = "ok";
const FENCED: &str = "fenced";

/// The value of the label `outcome`: `ok` for what has no other outcome.
pub(super) trait Outcome {
    fn outcome(&self) -> &'static str {
        OK
    }
}

impl Outcome for () {}
impl Outcome for u64 {}
impl Outcome for Claimed {}
impl Outcome for DocumentSums {}
impl Outcome for Report {}
impl<T> Outcome for Vec<T> {}
impl<T, U> Outcome for (T, U) {}

impl Outcome for bool {
    fn outcome(&self) -> &'static str {
        if *self { OK } else { "gone" }
    }
}

impl<T> Outcome for Option<T> {
    fn outcome(&self) -> &'static str {
        if self.is_some() { OK } else { "gone" }
    }
}

/// The outcome of each variant, whatever the variant contains.
macro_rules! outcomes {
    ($($kind:ident { $($variant:ident = $outcome:expr,)* })*) => {
        $(impl Outcome for $kind {
            fn outcome(&self) -> &'static str {
                match self {
                    $(Self::$variant { .. } => $outcome,)*
                }
            }
        })*
    };
}

outcomes! {
    WriteOutcome {
        Done = OK,
        Gone = "gone",
        Fenced = FENCED,
        Terminal = "terminal",
        Duplicate = "duplicate",
        Gap = "gap",
        Overflow = "overflow",
        NotAdded = "not_added",
    }
    CancelOutcome {
        Done = OK,
        Terminal = "terminal",
        NotBackground = "not_background",
        Gone = "gone",
    }
    DeleteOutcome {
        Done = OK,
        Gone = "gone",
    }
    Takeover {
        Done = OK,
        Raced = "raced",
        Terminal = "terminal",
        Gone = "gone",
    }
    History {
        Found = OK,
        Missing = "missing",
        Running = "running",
        Ended = "ended",
        TooLarge = "too_large",
    }
    PutOutcome {
        Done = OK,
        Gone = "gone",
        Taken = "taken",
        Unlocked = FENCED,
    }
    LockOutcome {
        Locked = OK,
        Busy = "busy",
        Lost = "lost",
        Gone = "gone",
    }
    ItemsOutcome {
        Found = OK,
        Gone = "gone",
        UnknownAfter = "unknown_after",
        TooLarge = "too_large",
    }
    ItemOutcome {
        Found = OK,
        NoItem = "no_item",
        Gone = "gone",
    }
    InsertOutcome {
        Done = OK,
        Exists = "exists",
        TooMany = "too_many",
        TooHeavy = "too_heavy",
    }
    ReplaceOutcome {
        Done = OK,
        Changed = "changed",
        Gone = "gone",
    }
    RemoveOutcome {
        Done = OK,
        Changed = "changed",
        Gone = "gone",
    }
}

impl Outcome for DocumentList {
    fn outcome(&self) -> &'static str {
        if self.is_unknown { "unknown_after" } else { OK }
    }
}
