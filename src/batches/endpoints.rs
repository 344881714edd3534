//! OpenAI's endpoints of batches, and what Anthropic's share with them.

use bytes::Bytes;
use hyper::Response;
use tracing::info;

use super::batch::{BatchRecord, NewBatch};
use super::batch_query::BatchQuery;
use super::create_batch::CreateBatch;
use super::file::FilePurpose;
use super::http_answer::json;
use super::line::Flavor;
use super::object;
use super::paths;
use super::records::{Changed, record_of};
use super::service::{BatchCaller, Batches, key_of, random_id};
use super::works::StopWork;
use crate::ids::Tenant;
use crate::openai::error::ApiError;
use crate::store::conversation::Order;
use crate::store::documents::{Collection, DocumentPage};
use crate::{http, observe};

/// Records that are fetched at once.
const FETCHED: usize = 100;

impl Batches {
    /// `POST /v1/batches`.
    pub(super) async fn create(
        &self,
        caller: BatchCaller<'_>,
        body: &Bytes,
    ) -> Result<Response<http::Body>, ApiError> {
        let create = CreateBatch::read(body, self.settings.retention)?;
        let id = &create.input_file_id;
        let file = self.file(caller.tenant, id).await?;
        let file = file.ok_or_else(|| ApiError::unknown_input_file(id))?;
        if file.purpose != FilePurpose::Batch {
            let purpose = file.purpose.as_str();
            let why = format!("its file has the purpose '{purpose}', and needs 'batch'");
            return Err(ApiError::wrong_value("input_file_id", why));
        }
        let new = NewBatch {
            id: random_id(Flavor::OpenAi)?,
            tenant_name: caller.name.to_owned(),
            flavor: Flavor::OpenAi,
            endpoint: create.endpoint,
            input_file_id: create.input_file_id,
            completion_window: create.completion_window,
            window: create.window,
            retention: self.settings.retention,
            metadata: create.metadata,
            output_expires_after: create.output_expires_after,
            total: 0,
        };
        let record = BatchRecord::new(new, observe::unix_ms());
        let key = key_of(caller.tenant, record.flavor, &record.id);
        let key = key.ok_or_else(|| ApiError::unknown_batch(&record.id))?;
        self.insert(&key, &record, 0).await?;
        self.metrics.created.with_label_values(&["openai"]).inc();
        info!(
            batch = record.id,
            tenant = record.tenant_name,
            "batch created"
        );
        self.look_at(key);
        Ok(json(record.object()))
    }

    /// `GET /v1/batches`.
    pub(super) async fn list(
        &self,
        tenant: Tenant,
        query: &str,
    ) -> Result<Response<http::Body>, ApiError> {
        let query = BatchQuery::of_openai(query)?;
        let (records, has_more) = self.page(tenant, Flavor::OpenAi, &query).await?;
        Ok(json(object::list_object(&records, has_more)))
    }

    /// `GET /v1/batches/{id}`.
    pub(super) async fn get(
        &self,
        tenant: Tenant,
        flavor: Flavor,
        id: &str,
    ) -> Result<Response<http::Body>, ApiError> {
        let (record, _) = self.existing(tenant, flavor, id).await?;
        Ok(json(record.object()))
    }

    /// `POST /v1/batches/{id}/cancel`.
    pub(super) async fn cancel(
        &self,
        tenant: Tenant,
        flavor: Flavor,
        id: &str,
    ) -> Result<Response<http::Body>, ApiError> {
        let key = key_of(tenant, flavor, id).ok_or_else(|| ApiError::unknown_batch(id))?;
        let changed = self
            .records
            .change(&key, |record, now_ms| record.cancel(now_ms).then_some(()));
        match changed.await.map_err(|error| ApiError::of_store(&error))? {
            Changed::Done((), record) => {
                // What runs here stops at once, and elsewhere within half a second.
                let now_ms = observe::unix_ms();
                let is_stopping = record.is_stopping(now_ms);
                self.works.stop(&key, |work| {
                    StopWork::of_stopping_batch(work).filter(|_| is_stopping)
                });
                info!(
                    batch = record.id,
                    tenant = record.tenant_name,
                    "batch is being cancelled"
                );
                self.look_at(key);
                Ok(json(record.object()))
            }
            Changed::Unchanged(record) => {
                Err(ApiError::not_cancellable(record.shown_status().as_str()))
            }
            Changed::Gone => Err(ApiError::unknown_batch(id)),
        }
    }

    /// One page of a tenant's batches that were made with one API, the newest first, and whether there are more.
    pub(super) async fn page(
        &self,
        tenant: Tenant,
        flavor: Flavor,
        query: &BatchQuery,
    ) -> Result<(Vec<BatchRecord>, bool), ApiError> {
        let mut after = query.from.clone();
        if after
            .as_deref()
            .is_some_and(|id| !paths::is_batch_id(flavor, id))
        {
            return Err(query.unknown());
        }
        let mut found = Vec::new();
        let mut is_first = true;
        let has_more = 'pages: loop {
            let page = DocumentPage {
                after: after.clone(),
                limit: FETCHED,
                order: query.order,
            };
            let listed = self
                .store
                .documents(Collection::Batches, tenant, page)
                .await;
            let listed = listed.map_err(|error| ApiError::of_store(&error))?;
            if listed.is_unknown {
                if is_first {
                    return Err(query.unknown());
                }
                // The batch after which the next begin was deleted just now. The client asks from the last that it
                // gets.
                break true;
            }
            is_first = false;
            after = listed.documents.last().map(|last| last.key.id.clone());
            for document in &listed.documents {
                // Batches of the other API are in another list.
                if !paths::is_batch_id(flavor, &document.key.id) {
                    continue;
                }
                if found.len() == query.limit {
                    break 'pages true;
                }
                let record = record_of(document).map_err(|error| ApiError::of_store(&error))?;
                found.push(record);
            }
            if !listed.has_more || after.is_none() {
                break false;
            }
        };
        if query.order == Order::OldestFirst {
            found.reverse();
        }
        Ok((found, has_more))
    }
}
