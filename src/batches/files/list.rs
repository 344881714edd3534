//! `GET /v1/files`.

use hyper::Response;

use super::query::FileQuery;
use super::service::Files;
use crate::batches::file::{self, FileRecord};
use crate::batches::http_answer::json;
use crate::ids::Tenant;
use crate::openai::error::ApiError;
use crate::store::documents::{Collection, DocumentPage};
use crate::{http, observe};

/// Records that are fetched at once: 300 KB.
const FETCHED: usize = 1_000;

impl Files {
    /// `GET /v1/files`. `query`: what stands behind the path's `?`.
    pub async fn list(
        &self,
        tenant: Tenant,
        query: &str,
    ) -> Result<Response<http::Body>, ApiError> {
        let query = FileQuery::read(query)?;
        let (records, has_more) = self.page(tenant, &query).await?;
        Ok(json(file::list_object(&records, has_more)))
    }

    async fn page(
        &self,
        tenant: Tenant,
        query: &FileQuery,
    ) -> Result<(Vec<FileRecord>, bool), ApiError> {
        let unknown = |after: &str| {
            let why = format!("'{after}' is not an item of this list");
            ApiError::wrong_value("after", why)
        };
        let mut after = query.after.clone();
        if let Some(after) = after.as_deref().filter(|after| !file::is_file_id(after)) {
            return Err(unknown(after));
        }
        let now = observe::unix_s();
        let mut found = Vec::new();
        let mut is_first = true;
        loop {
            let page = DocumentPage {
                after: after.clone(),
                limit: FETCHED,
                order: query.order,
            };
            let listed = self.store.documents(Collection::Files, tenant, page).await;
            let listed = listed.map_err(|error| ApiError::of_store(&error))?;
            if listed.is_unknown {
                // The file after which the next records begin was deleted just now. The client asks again, from the
                // last that it gets.
                return match after.filter(|_| is_first) {
                    Some(after) => Err(unknown(&after)),
                    None => Ok((found, true)),
                };
            }
            is_first = false;
            after = listed.documents.last().map(|last| last.key.id.clone());
            for document in &listed.documents {
                // Others are what uploads have reserved.
                if !file::is_file_id(&document.key.id) {
                    continue;
                }
                // One of a newer release hides no others.
                let Some(record) = self.readable(document) else {
                    continue;
                };
                let is_asked = query.purpose.as_deref();
                let is_asked = is_asked.is_none_or(|asked| asked == record.purpose.as_str());
                if !is_asked || record.is_expired(now) {
                    continue;
                }
                if found.len() == query.limit {
                    return Ok((found, true));
                }
                found.push(record);
            }
            if !listed.has_more || after.is_none() {
                return Ok((found, false));
            }
        }
    }
}
