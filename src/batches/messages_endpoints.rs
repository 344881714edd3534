//! Anthropic's endpoints of Message Batches.

use std::sync::Arc;
use std::time::Duration;

use hyper::header::{CONTENT_TYPE, HeaderValue};
use tokio::sync::oneshot;

use super::batch::{BatchRecord, RequestCounts};
use super::files::{FileUpload, ReceivedRequests};
use super::line::{Flavor, LineEndpoint};
use super::list_query::{ListOf, ListQuery};
use super::messages_batch;
use super::paths;
use super::service::{BatchCaller, Batches, key_of, random_id};
use crate::http;
use crate::ids::Tenant;
use crate::openai::error::{Answer, ApiError};
use crate::store::documents::DocumentKey;

/// Anthropic's window, which no client chooses.
const WINDOW: Duration = Duration::from_secs(24 * 3_600);

impl Batches {
    /// `POST /v1/messages/batches`.
    pub(super) async fn create_of_messages(
        self: &Arc<Self>,
        caller: BatchCaller<'_>,
        upload: FileUpload<'_>,
    ) -> Answer {
        let id = random_id(Flavor::Messages)?;
        let path = paths::own(&id, paths::OWN_INPUT);
        let received = self.files.receive_requests(caller.tenant, upload, &path);
        let received = received.await?;
        let retention = self.settings.retention;
        let record = BatchRecord {
            id,
            tenant_name: caller.name.to_owned(),
            flavor: Flavor::Messages,
            endpoint: LineEndpoint::Messages,
            input_file_id: paths::OWN_INPUT.to_owned(),
            completion_window: "24h".to_owned(),
            counts: RequestCounts {
                total: received.count,
                ..RequestCounts::default()
            },
            ..BatchRecord::new(self.now_ms(), WINDOW.min(retention), retention)
        };
        let key = key_of(caller.tenant, record.flavor, &record.id)?;
        // The requests are complete. From here on a client that leaves changes nothing.
        let (sender, receiver) = oneshot::channel();
        let batches = self.clone();
        self.tasks.spawn(async move {
            let stored = batches.store_requests(key, record, received).await;
            let _ = sender.send(stored);
        });
        let stored = receiver.await;
        let record = stored.unwrap_or_else(|_| Err(ApiError::stopping()))?;
        Ok(http::json(record.object()))
    }

    /// First the record, then the object: whatever stops in between, no object is left that no record names. The batch
    /// runs once the record is confirmed.
    async fn store_requests(
        &self,
        key: DocumentKey,
        record: BatchRecord,
        received: ReceivedRequests,
    ) -> Result<BatchRecord, ApiError> {
        if let Err(error) = self.insert(&key, &record, received.bytes()).await {
            received.abort().await;
            // The insertion may have been done though its answer was lost.
            let _ = self.store.remove_document(key, None).await;
            return Err(error);
        }
        if let Err(error) = received.finish().await {
            // Storage that did not answer in time may have the object later. The record, which no client finds, stays
            // until `UNCONFIRMED_LIMIT`, and what is there then goes with it.
            if error.leaves_nothing() {
                let _ = self.store.remove_document(key, None).await;
            }
            return Err(self.storage_failed(&error));
        }
        self.confirm(&key, &record).await?;
        self.begin(&record);
        Ok(record)
    }

    /// `GET /v1/messages/batches`.
    pub(super) async fn list_of_messages(&self, tenant: Tenant, query: &str) -> Answer {
        let query = ListQuery::read(ListOf::MessageBatches, query)?;
        let (records, has_more) = self.page(tenant, Flavor::Messages, &query).await?;
        Ok(http::json(messages_batch::list_object(&records, has_more)))
    }

    /// `DELETE /v1/messages/batches/{id}`.
    pub(super) async fn delete_of_messages(&self, tenant: Tenant, id: &str) -> Answer {
        let record = self.existing(tenant, Flavor::Messages, id).await?;
        if let Some(why) = messages_batch::undeletable(&record) {
            return Err(ApiError::batch_not_ended(why));
        }
        self.remove(key_of(tenant, Flavor::Messages, id)?).await?;
        Ok(http::json(messages_batch::deleted_object(id)))
    }

    /// `GET /v1/messages/batches/{id}/results`.
    pub(super) async fn results(&self, tenant: Tenant, id: &str) -> Answer {
        let record = self.existing(tenant, Flavor::Messages, id).await?;
        if !record.status.is_terminal() {
            return Err(ApiError::batch_not_ended("it has no results"));
        }
        let path = match record.output_file_id.as_deref() {
            None => return Err(ApiError::no_batch_results(id)),
            Some(paths::OWN_ERRORS) => paths::own(id, paths::OWN_ERRORS),
            Some(_) => paths::own(id, paths::OWN_RESULTS),
        };
        let gone = ApiError::unknown_batch(id);
        let mut answer = self.files.stored(&path, gone).await?;
        let kind = HeaderValue::from_static("application/x-jsonl");
        answer.headers_mut().insert(CONTENT_TYPE, kind);
        Ok(answer)
    }
}
