//! The metrics of the response store, of either kind.

use std::time::Instant;

use prometheus::{Histogram, IntCounter, IntCounterVec, IntGauge};

use super::{
    CancelOutcome, DeleteOutcome, Error, History, ItemOutcome, ItemsOutcome, LockOutcome,
    PutOutcome, Report, StoreFuture, Takeover, WriteOutcome,
};
use crate::observe;
use crate::observe::metrics::Registry;
use crate::store::documents::{
    DocumentList, DocumentSums, InsertOutcome, RemoveOutcome, ReplaceOutcome,
};
use crate::store::outbox::Claimed;

/// Histogram buckets, from a lookup in memory to the longest write time-out.
const SECONDS: &[f64] = &[
    0.000_01, 0.000_05, 0.000_1, 0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1,
    0.25, 0.5, 1.0, 2.5,
];

macro_rules! operations {
    ($($op:ident $name:literal)*) => {
        /// An operation of the store, the label `operation`.
        #[derive(Clone, Copy, Debug)]
        pub(super) enum Op {
            $($op,)*
        }

        /// The names of the operations, in their order.
        const NAMES: &[&str] = &[$($name),*];
    };
}

operations! {
    Admit "admit"
    Create "create"
    CreateInConversation "create_in_conversation"
    Get "get"
    Input "input"
    Request "request"
    History "history"
    KeepChain "keep_chain"
    Delete "delete"
    Start "start"
    Append "append"
    Finalize "finalize"
    Cancel "cancel"
    FinalizeCancelled "finalize_cancelled"
    Events "events"
    Heartbeat "heartbeat"
    EndLease "end_lease"
    CheckOwnership "check_ownership"
    Orphans "orphans"
    Untracked "untracked"
    TakeOver "take_over"
    Release "release"
    Notices "notices"
    CreateConversation "create_conversation"
    Conversation "conversation"
    UpdateConversation "update_conversation"
    DeleteConversation "delete_conversation"
    AddItems "add_items"
    Items "items"
    AllItems "all_items"
    Item "item"
    DeleteItem "delete_item"
    Lock "lock"
    RenewLock "renew_lock"
    Commit "commit"
    Unlock "unlock"
    AddEvent "add_event"
    ClaimEvents "claim_events"
    SettleEvent "settle_event"
    DisableEndpoint "disable_endpoint"
    EnableEndpoint "enable_endpoint"
    InsertDocument "insert_document"
    Document "document"
    ReplaceDocument "replace_document"
    RemoveDocument "remove_document"
    Documents "documents"
    DocumentSums "document_sums"
    DueDocuments "due_documents"
    Clock "clock"
    Report "report"
}

#[derive(Clone, Debug)]
pub(super) struct Meters {
    ops: IntCounterVec,
    /// Counters of the outcome `ok`, by operation.
    succeeded: Vec<IntCounter>,
    seconds: Vec<Histogram>,
    fenced: IntCounter,
    pub(super) evicted: IntCounterVec,
    pub(super) records: IntGauge,
    pub(super) bytes: IntGauge,
    /// 0 closed, 1 half-open, 2 open.
    pub(super) breaker: IntGauge,
    pub(super) in_flight: IntGauge,
    /// 1 if Redis may evict keys.
    pub(super) may_evict: IntGauge,
    pub(super) reconnects: IntCounter,
    pub(super) foreign_replies: IntCounter,
    pub(super) replica_waits: IntCounterVec,
    pub(super) scripts_reloaded: IntCounter,
}

impl Meters {
    pub(super) fn new(registry: &Registry) -> Self {
        let seconds = registry.histograms(
            "warmroute_store_operation_duration_seconds",
            "Duration of operations of the response store.",
            SECONDS,
            &["operation"],
        );
        let ops = registry.counters(
            "warmroute_store_operations_total",
            "Operations of the response store, by outcome.",
            &["operation", "outcome"],
        );
        Self {
            succeeded: NAMES
                .iter()
                .map(|name| ops.with_label_values(&[*name, OK]))
                .collect(),
            ops,
            seconds: NAMES
                .iter()
                .map(|name| seconds.with_label_values(&[*name]))
                .collect(),
            fenced: registry.counter(
                "warmroute_store_fenced_writes_total",
                "Writes refused because of an outdated fencing token: another replica owns the response.",
            ),
            evicted: registry.counters(
                "warmroute_store_evictions_total",
                "Records that the memory store evicted, by reason.",
                &["reason"],
            ),
            records: registry.gauge(
                "warmroute_store_records",
                "Responses and conversations in the memory store.",
            ),
            bytes: registry.gauge(
                "warmroute_store_bytes",
                "Size of the memory store, including overhead.",
            ),
            breaker: registry.gauge(
                "warmroute_store_circuit_breaker_state",
                "State of the circuit breaker of Redis: 0 closed, 1 half-open, 2 open; in a cluster the worst of its nodes.",
            ),
            may_evict: registry.gauge(
                "warmroute_store_may_evict",
                "1 if the maxmemory-policy of Redis is not noeviction, so that it may drop what is stored or running.",
            ),
            in_flight: registry.gauge(
                "warmroute_store_operations_in_flight",
                "Operations that wait for Redis.",
            ),
            reconnects: registry.counter(
                "warmroute_store_connections_opened_total",
                "Connections opened to Redis.",
            ),
            foreign_replies: registry.counter(
                "warmroute_store_foreign_replies_total",
                "Replies of Redis that belonged to another request and were given to nobody; each connection with one is replaced.",
            ),
            replica_waits: registry.counters(
                "warmroute_store_replica_waits_total",
                "Writes that were to wait for replicas of Redis, by result: acknowledged, timed_out, or not_asked \
                 (within a second of a time-out). Those that were not acknowledged stand; a failover may lose them.",
                &["result"],
            ),
            scripts_reloaded: registry.counter(
                "warmroute_store_scripts_reloaded_total",
                "Scripts sent again because Redis did not have them cached.",
            ),
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
            self.fenced.inc();
        }
        let index = op as usize;
        if outcome == OK {
            self.succeeded[index].inc();
        } else {
            self.ops.with_label_values(&[NAMES[index], outcome]).inc();
        }
        let spent = observe::now().saturating_duration_since(started);
        self.seconds[index].observe(spent.as_secs_f64());
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

impl Outcome for WriteOutcome {
    fn outcome(&self) -> &'static str {
        match self {
            Self::Done => OK,
            Self::Gone => "gone",
            Self::Fenced => FENCED,
            Self::Terminal(_) => "terminal",
            Self::Duplicate { .. } => "duplicate",
            Self::Gap { .. } => "gap",
            Self::Overflow => "overflow",
            Self::NotAdded(_) => "not_added",
        }
    }
}

impl Outcome for CancelOutcome {
    fn outcome(&self) -> &'static str {
        match self {
            Self::Done { .. } => OK,
            Self::Terminal(_) => "terminal",
            Self::NotBackground => "not_background",
            Self::Gone => "gone",
        }
    }
}

impl Outcome for DeleteOutcome {
    fn outcome(&self) -> &'static str {
        match self {
            Self::Done { .. } => OK,
            Self::Gone => "gone",
        }
    }
}

impl Outcome for Takeover {
    fn outcome(&self) -> &'static str {
        match self {
            Self::Done(_) => OK,
            Self::Raced => "raced",
            Self::Terminal(_) => "terminal",
            Self::Gone => "gone",
        }
    }
}

impl Outcome for History {
    fn outcome(&self) -> &'static str {
        match self {
            Self::Found(_) => OK,
            Self::Missing(_) => "missing",
            Self::Running(_) => "running",
            Self::Ended(_) => "ended",
            Self::TooLarge { .. } => "too_large",
        }
    }
}

impl Outcome for PutOutcome {
    fn outcome(&self) -> &'static str {
        match self {
            Self::Done => OK,
            Self::Gone => "gone",
            Self::Taken(_) => "taken",
            Self::Unlocked => FENCED,
        }
    }
}

impl Outcome for LockOutcome {
    fn outcome(&self) -> &'static str {
        match self {
            Self::Locked => OK,
            Self::Busy => "busy",
            Self::Lost => "lost",
            Self::Gone => "gone",
        }
    }
}

impl Outcome for ItemsOutcome {
    fn outcome(&self) -> &'static str {
        match self {
            Self::Found { .. } => OK,
            Self::Gone => "gone",
            Self::UnknownAfter => "unknown_after",
            Self::TooLarge { .. } => "too_large",
        }
    }
}

impl Outcome for ItemOutcome {
    fn outcome(&self) -> &'static str {
        match self {
            Self::Found(_) => OK,
            Self::NoItem => "no_item",
            Self::Gone => "gone",
        }
    }
}

impl Outcome for InsertOutcome {
    fn outcome(&self) -> &'static str {
        match self {
            Self::Done => OK,
            Self::Exists => "exists",
            Self::TooMany => "too_many",
            Self::TooHeavy => "too_heavy",
        }
    }
}

impl Outcome for ReplaceOutcome {
    fn outcome(&self) -> &'static str {
        match self {
            Self::Done(_) => OK,
            Self::Changed => "changed",
            Self::Gone => "gone",
        }
    }
}

impl Outcome for RemoveOutcome {
    fn outcome(&self) -> &'static str {
        match self {
            Self::Done => OK,
            Self::Changed => "changed",
            Self::Gone => "gone",
        }
    }
}

impl Outcome for DocumentList {
    fn outcome(&self) -> &'static str {
        if self.is_unknown { "unknown_after" } else { OK }
    }
}
