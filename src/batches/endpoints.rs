//! OpenAI's endpoints of batches, and what Anthropic's share with them.

use std::time::Duration;

use bytes::Bytes;
use tracing::info;

use super::batch::BatchRecord;
use super::create_batch::CreateBatch;
use super::file::FilePurpose;
use super::line::Flavor;
use super::list_page::{MAX_FETCHES, MIN_FETCHED, list_page};
use super::list_query::{ListOf, ListQuery};
use super::object;
use super::paths;
use super::records::{Changed, record_of};
use super::service::{BatchCaller, Batches, key_of, random_id};
use super::works::StopWork;
use crate::http;
use crate::ids::Tenant;
use crate::openai::error::{Answer, ApiError};
use crate::store;
use crate::store::conversation::Order;
use crate::store::documents::{Collection, Document, DocumentKey, DocumentPage};

impl Batches {
    /// `POST /v1/batches`.
    pub(super) async fn create(&self, caller: BatchCaller<'_>, body: &Bytes) -> Answer {
        // The input is kept for as long as the batch, and was uploaded before it.
        let create = CreateBatch::read(body, self.settings.retention / 2)?;
        let id = &create.input_file_id;
        let file = self.files.record(caller.tenant, id).await?;
        let file = file.ok_or_else(|| ApiError::unknown_input_file(id))?;
        if file.purpose != FilePurpose::Batch {
            let purpose = file.purpose.as_str();
            let why = format!("its file has the purpose '{purpose}', and needs 'batch'");
            return Err(ApiError::wrong_value("input_file_id", why));
        }
        self.files.check_bounds(caller.tenant).await?;
        let (now_ms, retention) = (self.now_ms(), self.settings.retention);
        let record = BatchRecord {
            id: random_id(Flavor::OpenAi)?,
            tenant_name: caller.name.to_owned(),
            flavor: Flavor::OpenAi,
            endpoint: create.endpoint,
            input_file_id: create.input_file_id,
            completion_window: create.completion_window,
            metadata: create.metadata,
            output_expires_after_s: create.output_expires_after.map(|time| time.as_secs()),
            accepted_by: Some(self.owner),
            ..BatchRecord::new(now_ms, create.window, retention)
        };
        if file.due_ms().is_some_and(|at| at < record.expires_ms) {
            let why = "its file expires before the batch would: upload it again, to be kept for longer, or choose a \
                       shorter 'completion_window'";
            return Err(ApiError::wrong_value("input_file_id", why));
        }
        let key = key_of(caller.tenant, record.flavor, &record.id)?;
        self.insert(&key, &record, 0).await?;
        self.confirm(&key, &record).await?;
        self.begin(&record);
        Ok(http::json(record.object()))
    }

    /// `DELETE /v1/files/{id}`. A file that a batch has yet to read stays.
    pub(super) async fn delete_file(&self, tenant: Tenant, id: &str) -> Answer {
        let file = self.files.record(tenant, id).await?;
        if file.is_some_and(|file| file.purpose == FilePurpose::Batch) {
            let reads =
                |record: &BatchRecord| !record.status.is_terminal() && record.input_file_id == id;
            if let Some(key) = self.find(tenant, Order::NewestFirst, reads).await? {
                return Err(ApiError::file_in_use(id, &key.id));
            }
        }
        self.files.delete(tenant, id).await
    }

    /// `GET /v1/batches`.
    pub(super) async fn list(&self, tenant: Tenant, query: &str) -> Answer {
        let query = ListQuery::read(ListOf::Batches, query)?;
        let (records, has_more) = self.page(tenant, Flavor::OpenAi, &query).await?;
        Ok(http::json(object::list_object(&records, has_more)))
    }

    /// `GET /v1/batches/{id}`.
    pub(super) async fn get(&self, tenant: Tenant, flavor: Flavor, id: &str) -> Answer {
        let record = self.existing(tenant, flavor, id).await?;
        Ok(http::json(record.object()))
    }

    /// `POST /v1/batches/{id}/cancel`.
    pub(super) async fn cancel(&self, tenant: Tenant, flavor: Flavor, id: &str) -> Answer {
        let key = key_of(tenant, flavor, id)?;
        match self.records.change(&key, BatchRecord::cancel).await? {
            Changed::Done(record) => {
                // What runs here stops at once, and elsewhere within half a second.
                let is_stopping = record.is_stopping(self.now_ms());
                self.works.stop(&key, |work| {
                    StopWork::of_stopping_batch(work).filter(|_| is_stopping)
                });
                info!(
                    batch = record.id,
                    tenant = record.tenant_name,
                    "batch is being cancelled"
                );
                self.works.wake.notify_one();
                Ok(http::json(record.object()))
            }
            Changed::Unchanged(record) => {
                Err(ApiError::not_cancellable(record.shown_status().as_str()))
            }
            Changed::Gone => Err(ApiError::unknown_batch(id)),
        }
    }

    /// Counts a batch that was created, and has the runner look at it at once.
    pub(super) fn begin(&self, record: &BatchRecord) {
        let api = match record.flavor {
            Flavor::OpenAi => "openai",
            Flavor::Messages => "messages",
        };
        self.metrics.created.with_label_values(&[api]).inc();
        info!(
            batch = record.id,
            tenant = record.tenant_name,
            "batch created"
        );
        self.works.wake.notify_one();
    }

    /// One page of a tenant's batches that were made with one API, the newest first, and whether there are more.
    pub(super) async fn page(
        &self,
        tenant: Tenant,
        flavor: Flavor,
        query: &ListQuery,
    ) -> Result<(Vec<BatchRecord>, bool), ApiError> {
        let from = query.from.as_deref();
        if from.is_some_and(|id| !paths::is_batch_id(flavor, id)) {
            return Err(query.unknown());
        }
        let shown = |document: &Document| {
            // Batches of the other API are in another list. One of a newer release hides no others.
            let is_own = paths::is_batch_id(flavor, &document.key.id);
            is_own.then(|| self.readable(document)).flatten()
        };
        let page = list_page(
            &*self.store,
            Collection::Batches,
            tenant,
            query,
            MAX_FETCHES,
            shown,
        );
        let (mut found, has_more) = page.await?;
        if query.order == Order::OldestFirst {
            found.reverse();
        }
        Ok((found, has_more))
    }

    /// The first of a tenant's batches that is wanted; of those that can be read, and are confirmed. One that is
    /// created meanwhile may be missed. An error if the last of a page is deleted before the next is read.
    pub(super) async fn find(
        &self,
        tenant: Tenant,
        order: Order,
        mut is_wanted: impl FnMut(&BatchRecord) -> bool,
    ) -> Result<Option<DocumentKey>, store::Error> {
        let mut after = None;
        loop {
            let page = DocumentPage {
                after,
                limit: MIN_FETCHED,
                order,
            };
            let listed = self.store.documents(Collection::Batches, tenant, page);
            let listed = listed.await?;
            if listed.is_unknown {
                // What stood behind it is not known to be missing: the input of a batch would be deleted.
                return Err(store::Error::Unavailable {
                    retry_after: Duration::from_secs(1),
                    reason: "a batch was deleted while those of its tenant were read".into(),
                });
            }
            after = listed.documents.last().map(|last| last.key.id.clone());
            for document in listed.documents {
                if self
                    .readable(&document)
                    .is_some_and(|record| is_wanted(&record))
                {
                    return Ok(Some(document.key));
                }
            }
            if !listed.has_more || after.is_none() {
                return Ok(None);
            }
        }
    }

    /// `None`: the record is damaged, a newer release has written it, or the batch is not confirmed.
    fn readable(&self, document: &Document) -> Option<BatchRecord> {
        let read = record_of(document);
        read.inspect_err(|error| self.failed("the record of a batch is passed over", error))
            .ok()
            .filter(|record| !record.is_unconfirmed)
    }
}
