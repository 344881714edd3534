//! The documents of the Batch API in memory, their lists, sums and due times.
//!
//! They are few and small, so one lock is enough. They are neither evicted nor counted in the store's capacity: the
//! bounds with which they are inserted bound what they take.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound::{Excluded, Unbounded};
use std::ops::Range;

use bytes::Bytes;

use crate::ids::Tenant;
use crate::store::conversation::Order;
use crate::store::documents::{
    Collection, Document, DocumentBounds, DocumentKey, DocumentList, DocumentPage, DocumentSums,
    InsertOutcome, NewDocument, RemoveOutcome, ReplaceOutcome, fingerprint,
};

#[derive(Debug, Default)]
pub(super) struct DocumentTable {
    documents: BTreeMap<DocumentKey, Stored>,
    tenants: BTreeMap<(Collection, Tenant), TenantDocuments>,
    due: BTreeSet<(Collection, u64, Tenant, String)>,
}

#[derive(Debug)]
struct Stored {
    /// Of the value with which it was inserted.
    fingerprint: u64,
    version: u64,
    value: Bytes,
    created_ms: u64,
    weight: u64,
    due_ms: Option<u64>,
}

/// What one tenant has of a collection; never empty.
#[derive(Debug, Default)]
struct TenantDocuments {
    /// When each document was created, and its id.
    order: BTreeSet<(u64, String)>,
    weight: u64,
}

impl DocumentTable {
    pub(super) fn len(&self) -> usize {
        self.documents.len()
    }

    pub(super) fn insert(
        &mut self,
        key: DocumentKey,
        new: NewDocument,
        bounds: DocumentBounds,
    ) -> InsertOutcome {
        let fingerprint = fingerprint(&new.value);
        if let Some(found) = self.documents.get(&key) {
            return if found.fingerprint == fingerprint {
                InsertOutcome::Done
            } else {
                InsertOutcome::Exists
            };
        }
        let sums = self.sums(key.collection, key.tenant);
        if sums.documents >= bounds.documents {
            return InsertOutcome::TooMany;
        }
        let weight = sums.weight.saturating_add(new.weight);
        if weight > bounds.weight {
            return InsertOutcome::TooHeavy;
        }
        let of_tenant = (key.collection, key.tenant);
        let in_list = self.tenants.entry(of_tenant).or_default();
        in_list.weight = weight;
        in_list.order.insert((new.created_ms, key.id.clone()));
        if let Some(due_ms) = new.due_ms {
            self.due.insert(due_entry(&key, due_ms));
        }
        let stored = Stored {
            fingerprint,
            version: 1,
            // No larger buffer is kept alive.
            value: Bytes::copy_from_slice(&new.value),
            created_ms: new.created_ms,
            weight: new.weight,
            due_ms: new.due_ms,
        };
        self.documents.insert(key, stored);
        InsertOutcome::Done
    }

    pub(super) fn sums(&self, collection: Collection, tenant: Tenant) -> DocumentSums {
        let Some(found) = self.tenants.get(&(collection, tenant)) else {
            return DocumentSums::default();
        };
        DocumentSums {
            documents: found.order.len() as u64,
            weight: found.weight,
        }
    }

    pub(super) fn find(&self, key: DocumentKey) -> Option<Document> {
        let found = self.documents.get(&key)?;
        Some(Document {
            version: found.version,
            value: found.value.clone(),
            key,
        })
    }

    pub(super) fn replace(
        &mut self,
        key: &DocumentKey,
        version: u64,
        value: &Bytes,
        due_ms: Option<u64>,
    ) -> ReplaceOutcome {
        let Some(found) = self.documents.get_mut(key) else {
            return ReplaceOutcome::Gone;
        };
        if found.version != version {
            return ReplaceOutcome::Changed;
        }
        found.version += 1;
        found.value = Bytes::copy_from_slice(value);
        let was_due_ms = std::mem::replace(&mut found.due_ms, due_ms);
        let version = found.version;
        if let Some(was_due_ms) = was_due_ms {
            self.due.remove(&due_entry(key, was_due_ms));
        }
        if let Some(due_ms) = due_ms {
            self.due.insert(due_entry(key, due_ms));
        }
        ReplaceOutcome::Done(version)
    }

    pub(super) fn remove(&mut self, key: &DocumentKey, version: Option<u64>) -> RemoveOutcome {
        let Some(found) = self.documents.get(key) else {
            return RemoveOutcome::Gone;
        };
        if version.is_some_and(|version| version != found.version) {
            return RemoveOutcome::Changed;
        }
        if let Some(due_ms) = found.due_ms {
            self.due.remove(&due_entry(key, due_ms));
        }
        let of_tenant = (key.collection, key.tenant);
        if let Some(in_list) = self.tenants.get_mut(&of_tenant) {
            in_list.weight = in_list.weight.saturating_sub(found.weight);
            in_list.order.remove(&(found.created_ms, key.id.clone()));
            if in_list.order.is_empty() {
                self.tenants.remove(&of_tenant);
            }
        }
        self.documents.remove(key);
        RemoveOutcome::Done
    }

    pub(super) fn list(
        &self,
        collection: Collection,
        tenant: Tenant,
        page: &DocumentPage,
    ) -> DocumentList {
        let key = |id: &str| DocumentKey::new(collection, tenant, id);
        let mut after = None;
        if let Some(id) = &page.after {
            let Some(found) = self.documents.get(&key(id)) else {
                return DocumentList {
                    is_unknown: true,
                    ..DocumentList::default()
                };
            };
            after = Some((found.created_ms, id.clone()));
        }
        let Some(in_list) = self.tenants.get(&(collection, tenant)) else {
            return DocumentList::default();
        };
        let after = after.map_or(Unbounded, Excluded);
        let mut ordered: Box<dyn Iterator<Item = &(u64, String)>> = match page.order {
            Order::OldestFirst => Box::new(in_list.order.range((after, Unbounded))),
            Order::NewestFirst => Box::new(in_list.order.range((Unbounded, after)).rev()),
        };
        let documents = ordered
            .by_ref()
            .take(page.limit)
            .filter_map(|(_, id)| self.find(key(id)))
            .collect();
        DocumentList {
            documents,
            has_more: ordered.next().is_some(),
            is_unknown: false,
        }
    }

    pub(super) fn due(
        &self,
        collection: Collection,
        now_ms: u64,
        places: Range<usize>,
    ) -> Vec<Document> {
        // Nothing is sorted before it.
        let first = (collection, 0, Tenant::tagged(0), String::new());
        self.due
            .range(first..)
            .take_while(|(of, due_ms, ..)| *of == collection && *due_ms <= now_ms)
            .skip(places.start)
            .take(places.len())
            .filter_map(|(_, _, tenant, id)| self.find(DocumentKey::new(collection, *tenant, id)))
            .collect()
    }
}

fn due_entry(key: &DocumentKey, due_ms: u64) -> (Collection, u64, Tenant, String) {
    (key.collection, due_ms, key.tenant, key.id.clone())
}

#[cfg(test)]
mod tests;
