//! One page of a list of a tenant's documents, some of which are not shown.

use super::list_query::ListQuery;
use crate::ids::Tenant;
use crate::openai::error::ApiError;
use crate::store::ResponseStore;
use crate::store::documents::{Collection, Document, DocumentPage};

/// Documents that are fetched at once: a page, but no more than have some megabytes.
pub(super) const MIN_FETCHED: usize = 100;
const MAX_FETCHED: usize = 1_000;

/// What `shown` makes of the documents, as many as a page has, and whether there are more. `None` from it leaves a
/// document out.
pub(super) async fn list_page<T>(
    store: &dyn ResponseStore,
    collection: Collection,
    tenant: Tenant,
    query: &ListQuery,
    shown: impl Fn(&Document) -> Option<T> + Send,
) -> Result<(Vec<T>, bool), ApiError> {
    let mut after = query.from.clone();
    let mut found = Vec::new();
    let mut is_first = true;
    loop {
        let page = DocumentPage {
            after: after.clone(),
            limit: query.limit.clamp(MIN_FETCHED, MAX_FETCHED),
            order: query.order,
        };
        let listed = store.documents(collection, tenant, page).await;
        let listed = listed.map_err(|error| ApiError::of_store(&error))?;
        if listed.is_unknown && is_first {
            return Err(query.unknown());
        }
        if listed.is_unknown {
            // The item after which the next begin was deleted just now. The client asks from the last that it gets.
            return Ok((found, true));
        }
        is_first = false;
        after = listed.documents.last().map(|last| last.key.id.clone());
        for document in &listed.documents {
            let Some(item) = shown(document) else {
                continue;
            };
            if found.len() == query.limit {
                return Ok((found, true));
            }
            found.push(item);
        }
        if !listed.has_more || after.is_none() {
            return Ok((found, false));
        }
    }
}
