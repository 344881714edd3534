//! One page of a list of a tenant's documents, some of which are not shown.

use super::list_query::ListQuery;
use crate::ids::Tenant;
use crate::openai::error::ApiError;
use crate::store::documents::{Collection, Document, DocumentPage};
use crate::store::{self, ResponseStore};

/// Documents that are fetched at once: a page, but no more than have some megabytes.
pub(super) const MIN_FETCHED: usize = 100;
const MAX_FETCHED: usize = 1_000;

/// How often documents are fetched for one page: ten times what a tenant's files need that are all left out.
pub(super) const MAX_FETCHES: usize = 1_000;

/// What `shown` makes of the documents, as many as a page has, and whether there are more. `None` from it leaves a
/// document out. What lies behind many of these is found with up to `max_fetches` fetches; an error if all that they
/// bring is left out.
pub(super) async fn list_page<T>(
    store: &dyn ResponseStore,
    collection: Collection,
    tenant: Tenant,
    query: &ListQuery,
    max_fetches: usize,
    shown: impl Fn(&Document) -> Option<T> + Send,
) -> Result<(Vec<T>, bool), ApiError> {
    let mut after = query.from.clone();
    let mut found = Vec::new();
    let mut is_first = true;
    for _ in 0..max_fetches {
        let page = DocumentPage {
            after: after.clone(),
            limit: query.limit.clamp(MIN_FETCHED, MAX_FETCHED),
            order: query.order,
        };
        let listed = store.documents(collection, tenant, page).await?;
        if listed.is_unknown && is_first {
            return Err(query.unknown());
        }
        // Otherwise the item after which the next begin was deleted just now.
        if listed.is_unknown && found.is_empty() {
            after.clone_from(&query.from);
            is_first = true;
            continue;
        }
        if listed.is_unknown {
            // The client asks from the last that it gets.
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
    if found.is_empty() {
        let reason = "too many records of this list are left out, one after the other";
        return Err(store::Error::Unreadable(reason.into()).into());
    }
    Ok((found, true))
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;
    use crate::batches::list_query::ListOf;
    use crate::observe::metrics::Registry;
    use crate::store::RetentionSettings;
    use crate::store::documents::{
        DocumentBounds, DocumentKey, Documents, InsertOutcome, NewDocument,
    };
    use crate::store::memory::Memory;

    /// Documents in the order in which they were created: `true` for those that can be shown.
    async fn store_of(documents: impl Iterator<Item = bool>) -> Memory {
        let keep = RetentionSettings::default();
        let store = Memory::new(&Default::default(), &keep, &Registry::default());
        for (number, is_shown) in documents.enumerate() {
            let key = DocumentKey {
                collection: Collection::Batches,
                tenant: Tenant::default(),
                id: format!("b-{number}"),
            };
            let new = NewDocument {
                value: Bytes::from(if is_shown { "shown" } else { "?" }),
                created_ms: number as u64,
                weight: 0,
                due_ms: None,
            };
            let bounds = DocumentBounds {
                documents: 10_000,
                weight: 10_000,
            };
            let inserted = store.insert_document(key, new, bounds).await;
            assert_eq!(inserted, Ok(InsertOutcome::Done));
        }
        store
    }

    /// The ids of a page, the newest first, and whether there are more.
    async fn page(
        store: &Memory,
        query: &str,
        max_fetches: usize,
    ) -> Result<(Vec<String>, bool), ApiError> {
        let (batches, tenant) = (Collection::Batches, Tenant::default());
        let query = ListQuery::read(ListOf::Batches, query)?;
        let shown =
            |document: &Document| (document.value == "shown").then(|| document.key.id.clone());
        list_page(store, batches, tenant, &query, max_fetches, shown).await
    }

    #[tokio::test]
    async fn pages_of_records_that_are_left_out_hide_no_others() {
        let left_out = || (0..3 * MIN_FETCHED).map(|_| false);
        let documents = left_out().chain([true, true, true]).chain(left_out());
        let store = store_of(documents).await;
        let ids = |numbers: &[usize]| -> Vec<String> {
            let names = numbers.iter().map(|number| format!("b-{number}"));
            names.collect()
        };
        let check = async |query: &str, expected: (Vec<String>, bool)| {
            let found = page(&store, query, MAX_FETCHES).await.unwrap();
            assert_eq!(found, expected, "{query}");
        };
        check("limit=2", (ids(&[302, 301]), true)).await;
        check("limit=2&after=b-301", (ids(&[300]), false)).await;
        check("limit=3", (ids(&[302, 301, 300]), false)).await;
        check("limit=1&after=b-300", (ids(&[]), false)).await;
    }

    #[tokio::test]
    async fn a_page_ends_after_so_many_fetches() {
        let left_out = (0..3 * MIN_FETCHED).map(|_| false);
        let store = store_of([true].into_iter().chain(left_out).chain([true])).await;
        let (found, has_more) = page(&store, "limit=2", 2).await.unwrap();
        assert_eq!((found, has_more), (vec!["b-301".to_owned()], true));
        let error = page(&store, "after=b-301", 2).await.unwrap_err();
        assert!(error.status.is_server_error(), "{}", error.message);
        let (found, has_more) = page(&store, "after=b-301", 4).await.unwrap();
        assert_eq!((found, has_more), (vec!["b-0".to_owned()], false));
    }
}
