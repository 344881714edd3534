//! Documents: small values of the Batch API that all replicas change, such as the record of a file and the state
//! of a batch. The store interprets nothing of a value. A caller reads a document, decides what it becomes, and
//! writes that if nobody else has changed it meanwhile.
//!
//! # The contract
//!
//! 1. **An insertion never overwrites.** Inserting an id again is `Done` if it is inserted with the same value, as by a
//!    repeated write, whatever the document has become since; else it is `Exists`. Neither changes anything.
//! 2. **A replacement is a compare-and-set.** It is done only if the version is still the one that the caller read, and
//!    raises it by one; a document is inserted with version 1. `Changed` and `Gone` change nothing.
//! 3. **Documents and weights of a tenant are bounded**, for each collection. An insertion that would exceed a bound
//!    writes nothing. Bounds are the caller's: an insertion with wider ones may exceed those of others, which are
//!    refused then. Sums are exact up to 2^53.
//! 4. **A document, its place in the list, its weight and its due time are one write.** A removal frees its weight.
//! 5. **The tenant is part of the key.** Documents of other tenants do not exist for the caller, except in
//!    [`Documents::due_documents`], which is for the router itself.
//! 6. **A document stays until it is removed**: it has no expiry and is never evicted. Who inserts it sees to its
//!    removal, for which its due time is.
//! 7. **An unreachable store is an [`Error`]**, never `Gone`, `None` or an empty list. After [`Error::Unknown`] an
//!    insertion is safely repeated; a caller whose replacement or removal is unknown reads the document again.

use std::ops::Range;

use bytes::Bytes;
use xxhash_rust::xxh3::xxh3_64;

use super::conversation::Order;
use super::error::{Error, StoreFuture};
use crate::ids::Tenant;
use crate::observe::metrics::words;

pub const DOCUMENT_ID_BYTES_MAX: usize = 64;
/// Bytes of a value: a replacement sends all of it, and Redis keeps it in one piece. States of batches have some
/// kilobytes, a hundred with all complaints about a file.
pub const DOCUMENT_BYTES_MAX: usize = 512 << 10;

words! {
    /// A kind of documents.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
    pub enum Collection {
        Files = "file",
        Batches = "batch",
        /// Which storage the files and batches of all tenants lie in: one document, of no tenant.
        Storage = "storage",
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DocumentKey {
    pub collection: Collection,
    pub tenant: Tenant,
    /// At most 64 bytes of `[A-Za-z0-9_-]`.
    pub id: String,
}

impl DocumentKey {
    pub fn new(collection: Collection, tenant: Tenant, id: impl Into<String>) -> Self {
        Self {
            collection,
            tenant,
            id: id.into(),
        }
    }
}

/// A document as it was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Document {
    pub key: DocumentKey,
    /// What a replacement names.
    pub version: u64,
    pub value: Bytes,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewDocument {
    pub value: Bytes,
    /// By which lists are sorted, in Unix milliseconds.
    pub created_ms: u64,
    /// What it counts for among the documents of its tenant, for as long as it exists.
    pub weight: u64,
    /// When a replica is to look at it; `None` for never.
    pub due_ms: Option<u64>,
}

/// How many documents one tenant may have in one collection, and what they may weigh together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DocumentBounds {
    pub documents: u64,
    pub weight: u64,
}

/// How many documents one tenant has in one collection, and what they weigh together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DocumentSums {
    pub documents: u64,
    pub weight: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum InsertOutcome {
    /// Inserted now, or before, with the same value.
    Done,
    /// The id belongs to a document that was inserted with another value.
    Exists,
    /// The tenant has as many documents as it may have.
    TooMany,
    /// The tenant's documents would weigh more than they may.
    TooHeavy,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum ReplaceOutcome {
    /// Replaced; the document has this version now.
    Done(u64),
    /// The document has another version.
    Changed,
    /// No such document.
    Gone,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum RemoveOutcome {
    Done,
    /// The document has another version.
    Changed,
    /// No such document.
    Gone,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DocumentPage {
    /// Return documents after this one in the given order; from the start if `None`.
    pub after: Option<String>,
    pub limit: usize,
    pub order: Order,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DocumentList {
    pub documents: Vec<Document>,
    pub has_more: bool,
    /// `after` names no document of the tenant.
    pub is_unknown: bool,
}

pub trait Documents {
    /// Inserts a document if there is none with its key, and if the tenant has room for it.
    fn insert_document(
        &self,
        key: DocumentKey,
        new: NewDocument,
        bounds: DocumentBounds,
    ) -> StoreFuture<'_, InsertOutcome>;

    fn document(&self, key: DocumentKey) -> StoreFuture<'_, Option<Document>>;

    /// Writes a new value and due time if the version is still `version`. The weight stays.
    fn replace_document(
        &self,
        key: DocumentKey,
        version: u64,
        value: Bytes,
        due_ms: Option<u64>,
    ) -> StoreFuture<'_, ReplaceOutcome>;

    /// Removes the document: any version of it for `None`, else only that one.
    fn remove_document(
        &self,
        key: DocumentKey,
        version: Option<u64>,
    ) -> StoreFuture<'_, RemoveOutcome>;

    /// Lists documents of a tenant by when they were created, then by id. Documents that are inserted meanwhile may be
    /// included. One that cannot be read is left out, so that it hides no others.
    fn documents(
        &self,
        collection: Collection,
        tenant: Tenant,
        page: DocumentPage,
    ) -> StoreFuture<'_, DocumentList>;

    /// Returns the sums that a tenant's insertions are checked with.
    fn document_sums(
        &self,
        collection: Collection,
        tenant: Tenant,
    ) -> StoreFuture<'_, DocumentSums>;

    /// Returns documents of all tenants whose due time has come, earliest first: what replicas have something to do
    /// with. They are those at `places`, counted from 0, or fewer if they are large; what is left is due still. One
    /// that cannot be read is left out, so that it does not keep replicas from the others.
    fn due_documents(
        &self,
        collection: Collection,
        now_ms: u64,
        places: Range<usize>,
    ) -> StoreFuture<'_, Vec<Document>>;

    /// The time of the store's clock, in Unix milliseconds. Due times are compared with callers' clocks; by this a
    /// caller notices that its own is wrong.
    fn clock_ms(&self) -> StoreFuture<'_, u64>;
}

pub fn is_document_id(id: &str) -> bool {
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-');
    !id.is_empty() && id.len() <= DOCUMENT_ID_BYTES_MAX && id.bytes().all(is_allowed)
}

pub(super) fn check_id(key: &DocumentKey) -> Result<(), Error> {
    if is_document_id(&key.id) {
        Ok(())
    } else {
        let reason = format!("no document can have the id `{}`", key.id.escape_debug());
        Err(Error::Unreadable(reason.into()))
    }
}

pub(super) fn check_value(value: &Bytes) -> Result<(), Error> {
    if value.len() > DOCUMENT_BYTES_MAX {
        return Err(Error::TooLarge {
            bytes: value.len() as u64,
            max: DOCUMENT_BYTES_MAX as u64,
        });
    }
    Ok(())
}

/// By what a repeated insertion is known.
pub(super) fn fingerprint(value: &Bytes) -> u64 {
    xxh3_64(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_has_letters_digits_and_two_signs() {
        let longest = "x".repeat(DOCUMENT_ID_BYTES_MAX);
        for (id, expected) in [
            ("batch_0aZ", true),
            ("file-1", true),
            (&*longest, true),
            (&*format!("{longest}x"), false),
            ("", false),
            ("a:b", false),
            ("a b", false),
            ("é", false),
        ] {
            assert_eq!(is_document_id(id), expected, "{id}");
        }
    }
}
