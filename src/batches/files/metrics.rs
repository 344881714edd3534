//! Metrics of files.

use crate::observe::metrics::metric_table;

metric_table! {
    #[derive(Clone, Debug)]
    pub(super) struct Metrics {
        uploads_in_flight: gauge "warmroute_batch_uploads_in_flight"
            "Files that are being uploaded.",
        uploads: counters "warmroute_batch_uploads_total" ["outcome"]
            "Uploads of files, by outcome: stored, refused (the request was wrong or a bound was reached), failed \
             (storage or store could not be used), or abandoned by the client.",
        bounds_reached: counters "warmroute_batch_file_bounds_reached_total" ["bound"]
            "Uploads refused by a bound: file_size (batches.max_file_size), tenant_files (10,000 of a tenant; batches, \
             too, while there are more), tenant_size (batches.max_size_per_tenant; the same), tenant_uploads (8 at a \
             time) or uploads (16 at a time).",
        file_bytes: counters "warmroute_batch_file_bytes_total" ["direction"]
            "Bytes of files, by direction: received from clients or sent to them.",
        deleted: counters "warmroute_batch_files_deleted_total" ["reason"]
            "Files that were deleted, by reason: client or expired.",
        pub(super) storage_errors: counter "warmroute_batch_storage_errors_total"
            "Operations on files that failed because the storage could not be used; the log says why.",
    }
}

impl Metrics {
    pub(super) fn begin_upload(&self) -> UploadInFlight {
        self.uploads_in_flight.inc();
        UploadInFlight {
            metrics: self.clone(),
            outcome: "abandoned",
        }
    }

    pub(super) fn on_bound(&self, bound: &'static str) {
        self.bounds_reached.with_label_values(&[bound]).inc();
    }

    pub(super) fn on_received(&self, bytes: u64) {
        self.file_bytes
            .with_label_values(&["received"])
            .inc_by(bytes);
    }

    pub(super) fn on_sent(&self, bytes: u64) {
        self.file_bytes.with_label_values(&["sent"]).inc_by(bytes);
    }

    pub(super) fn on_deleted(&self, reason: &'static str) {
        self.deleted.with_label_values(&[reason]).inc();
    }
}

/// Counts an upload as in flight until it is dropped. One that was not ended was abandoned.
#[must_use = "dropping the guard ends the upload"]
#[derive(Debug)]
pub(super) struct UploadInFlight {
    metrics: Metrics,
    outcome: &'static str,
}

impl UploadInFlight {
    pub(super) fn end(mut self, outcome: &'static str) {
        self.outcome = outcome;
    }
}

impl Drop for UploadInFlight {
    fn drop(&mut self) {
        let uploads = &self.metrics.uploads;
        uploads.with_label_values(&[self.outcome]).inc();
        self.metrics.uploads_in_flight.dec();
    }
}
