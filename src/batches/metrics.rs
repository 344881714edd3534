//! Metrics of batches. Those of files are in `files`.

use super::batch::Work;
use super::works::StopWork;
use crate::observe::metrics::{metric_table, words};

metric_table! {
    #[derive(Clone, Debug)]
    pub struct Metrics {
        pub(super) created: counters "warmroute_batches_created_total" ["api"]
            "Batches that were created, by API: openai or messages.",
        pub(super) bounds_reached: counters "warmroute_batch_bounds_reached_total" ["bound"]
            "Batches refused by a bound: tenant_batches (1,000 of a tenant), tenant_size (batches.max_size_per_tenant), \
             too_many_tasks (batches.max_lines) or token_limit_exceeded (limits.batch_tokens_queued of a tenant); \
             results_too_large: those that failed because S3 takes no object of more than 177 GiB (64 GiB where it wants \
             equal parts); ended_batches: those that had ended and were removed to make room for others.",
        pub(super) clock_refusals: counter "warmroute_batch_clock_refusals_total"
            "Looks for work, and for what has expired, that this replica has refused, because its clock and that of Redis are \
             more than five minutes apart: it begins and deletes nothing of batches.",
        pub(super) ended: counters "warmroute_batches_ended_total" ["status"]
            "Batches that this replica has ended, by status: completed, failed, expired, cancelled.",
        pub(super) lines: counters "warmroute_batch_lines_total" ["outcome"]
            "Lines of batches whose result was written, by outcome: completed, failed (an engine's or the router's error, after \
             all tries) or invalid (not sent).",
        pub(super) retries: counters "warmroute_batch_line_retries_total" ["status"]
            "Tries of lines after the first, by the status of the answer before.",
        pub(super) gave_way: counter "warmroute_batch_lines_gave_way_total"
            "Lines of batches that were given up, to be sent again, because interactive requests wanted their places.",
        pub(super) lines_in_flight: gauge "warmroute_batch_lines_in_flight"
            "Lines of batches that are being answered.",
        pub(super) lines_waiting: gauge "warmroute_batch_lines_waiting"
            "Lines of batches that wait for room that no interactive request wants.",
        pub(super) shards_running: gauge "warmroute_batch_shards_running"
            "Shards of batches that run on this replica.",
        pub(super) storage_usable: gauges "warmroute_batch_storage_usable" ["operation"]
            "1 if the storage of batches could be used at the last trial, which each replica makes every minute, by operation \
             (write, read, delete), and with the operation identity if it is the storage that all replicas share; 0 if not. \
             Nothing is tried after what has failed.",
        pub(super) works: counters "warmroute_batch_works_total" ["work", "outcome"]
            "Works of batches on this replica, by work (validate, shard, finalize, delete) and outcome: done, stopped (cancelled \
             or expired), returned (the replica drains, storage failed, or others are to have it) or lost \
             (to another replica).",
    }
}

words! {
    /// How a work ended.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(super) enum WorkOutcome {
        Done = "done",
        Stopped = "stopped",
        Returned = "returned",
        Lost = "lost",
    }
}

impl From<StopWork> for WorkOutcome {
    fn from(stop: StopWork) -> Self {
        match stop {
            StopWork::Stopping => Self::Stopped,
            StopWork::Lost => Self::Lost,
            StopWork::Draining | StopWork::Stalled | StopWork::GivesPlace => Self::Returned,
        }
    }
}

impl Metrics {
    pub(super) fn on_work(&self, work: Work, outcome: WorkOutcome) {
        let name = match work {
            Work::Validate => "validate",
            Work::Shard(_) => "shard",
            Work::Finalize => "finalize",
            Work::Delete => "delete",
        };
        let labels = [name, outcome.as_str()];
        self.works.with_label_values(&labels).inc();
    }
}
