//! `GET /v1/files`.

use super::service::Files;
use crate::batches::file;
use crate::batches::list_page::{MAX_FETCHES, list_page};
use crate::batches::list_query::{ListOf, ListQuery};
use crate::http;
use crate::ids::Tenant;
use crate::openai::error::Answer;
use crate::store::documents::{Collection, Document};

impl Files {
    /// `GET /v1/files`. `query`: what stands behind the path's `?`.
    pub async fn list(&self, tenant: Tenant, query: &str) -> Answer {
        let query = ListQuery::read(ListOf::Files, query)?;
        let from = query.from.as_deref();
        if from.is_some_and(|from| !file::is_file_id(from)) {
            return Err(query.unknown());
        }
        let now = self.clock.now_s();
        let shown = |document: &Document| {
            // One of a newer release hides no others.
            let record = self.readable(document)?;
            let asked = query.purpose.as_deref();
            let is_asked = asked.is_none_or(|asked| asked == record.purpose.as_str());
            let is_shown = is_asked && !record.is_expired(now);
            is_shown.then_some(record)
        };
        let page = list_page(
            &*self.store,
            Collection::Files,
            tenant,
            &query,
            MAX_FETCHES,
            shown,
        );
        let (records, has_more) = page.await?;
        Ok(http::json(file::list_object(&records, has_more)))
    }
}
