//! The operations on documents in memory.

use std::ops::Range;

use bytes::Bytes;

use super::store::Memory;
use crate::ids::Tenant;
use crate::observe;
use crate::store::StoreFuture;
use crate::store::documents::{
    Collection, Document, DocumentBounds, DocumentKey, DocumentList, DocumentPage, DocumentSums,
    Documents, InsertOutcome, NewDocument, RemoveOutcome, ReplaceOutcome, check_id, check_value,
};
use crate::store::meters::Op;

impl Documents for Memory {
    fn insert_document(
        &self,
        key: DocumentKey,
        new: NewDocument,
        bounds: DocumentBounds,
    ) -> StoreFuture<'_, InsertOutcome> {
        self.operation(Op::InsertDocument, move |_| {
            check_id(&key)?;
            check_value(&new.value)?;
            Ok(self.documents.lock().insert(key, new, bounds))
        })
    }

    fn document(&self, key: DocumentKey) -> StoreFuture<'_, Option<Document>> {
        self.operation(Op::Document, move |_| Ok(self.documents.lock().find(key)))
    }

    fn replace_document(
        &self,
        key: DocumentKey,
        version: u64,
        value: Bytes,
        due_ms: Option<u64>,
    ) -> StoreFuture<'_, ReplaceOutcome> {
        self.operation(Op::ReplaceDocument, move |_| {
            check_value(&value)?;
            let mut documents = self.documents.lock();
            Ok(documents.replace(&key, version, &value, due_ms))
        })
    }

    fn remove_document(
        &self,
        key: DocumentKey,
        version: Option<u64>,
    ) -> StoreFuture<'_, RemoveOutcome> {
        self.operation(Op::RemoveDocument, move |_| {
            Ok(self.documents.lock().remove(&key, version))
        })
    }

    fn documents(
        &self,
        collection: Collection,
        tenant: Tenant,
        page: DocumentPage,
    ) -> StoreFuture<'_, DocumentList> {
        self.operation(Op::Documents, move |_| {
            Ok(self.documents.lock().list(collection, tenant, &page))
        })
    }

    fn document_sums(
        &self,
        collection: Collection,
        tenant: Tenant,
    ) -> StoreFuture<'_, DocumentSums> {
        self.operation(Op::DocumentSums, move |_| {
            Ok(self.documents.lock().sums(collection, tenant))
        })
    }

    fn due_documents(
        &self,
        collection: Collection,
        now_ms: u64,
        places: Range<usize>,
    ) -> StoreFuture<'_, Vec<Document>> {
        self.operation(Op::DueDocuments, move |_| {
            Ok(self.documents.lock().due(collection, now_ms, places))
        })
    }

    fn clock_ms(&self) -> StoreFuture<'_, u64> {
        self.operation(Op::Clock, |_| Ok(observe::unix_ms()))
    }
}
