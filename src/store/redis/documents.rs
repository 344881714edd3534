//! The operations on documents in Redis. `document.lua` has their form.

use std::ops::Range;

use bytes::Bytes;
use tracing::warn;

use super::client::Redis;
use super::keys::{document_member, parse_document_member};
use super::packed::BATCH_BYTES;
use super::reply::malformed;
use super::request::Kind;
use super::scripts::{Call, Name};
use super::values::REREADS_MAX;
use crate::ids::Tenant;
use crate::observe;
use crate::store::conversation::Order;
use crate::store::documents::{
    Collection, Document, DocumentBounds, DocumentKey, DocumentList, DocumentPage, DocumentSums,
    Documents, InsertOutcome, NewDocument, RemoveOutcome, ReplaceOutcome, check_id, check_value,
    fingerprint, is_document_id,
};
use crate::store::meters::Op;
use crate::store::{Error, StoreFuture};

/// The newest format of a document that this release reads.
const FORMAT: u64 = 1;
/// Documents that one read goes through: about three milliseconds of Redis on a busy machine.
const DOCUMENTS_AT_A_TIME: usize = 1_000;

impl Documents for Redis {
    fn insert_document(
        &self,
        key: DocumentKey,
        new: NewDocument,
        bounds: DocumentBounds,
    ) -> StoreFuture<'_, InsertOutcome> {
        self.meters.meter(Op::InsertDocument, move || async move {
            check_id(&key)?;
            check_value(&new.value)?;
            let call = self
                .document_call("insert", &key)
                .arg(self.pack_object(&new.value).await?)
                .arg(new.due_ms)
                .number(new.created_ms)
                .number(new.weight)
                .arg(format!("{:016x}", fingerprint(&new.value)))
                .number(bounds.documents)
                .number(bounds.weight);
            let mut reply = self.call_replicated(Kind::Write, call).await?;
            match reply.word()?.as_str() {
                "ok" => Ok(InsertOutcome::Done),
                "exists" => Ok(InsertOutcome::Exists),
                "too_many" => Ok(InsertOutcome::TooMany),
                "too_heavy" => Ok(InsertOutcome::TooHeavy),
                other => Err(reply.unexpected(other)),
            }
        })
    }

    fn document(&self, key: DocumentKey) -> StoreFuture<'_, Option<Document>> {
        self.meters.meter(Op::Document, move || async move {
            let [documents, _] = self.keys.due_documents(key.collection);
            let call = Call::new(Name::FIELDS)
                .key(documents)
                .arg(document_member(&key));
            match self.call(Kind::Read, call).await?.bytes()? {
                Some(entry) => self.read_document(key, &entry).await.map(Some),
                None => Ok(None),
            }
        })
    }

    fn replace_document(
        &self,
        key: DocumentKey,
        version: u64,
        value: Bytes,
        due_ms: Option<u64>,
    ) -> StoreFuture<'_, ReplaceOutcome> {
        self.meters.meter(Op::ReplaceDocument, move || async move {
            check_value(&value)?;
            let call = self
                .document_call("replace", &key)
                .arg(self.pack_object(&value).await?)
                .arg(due_ms)
                .number(version);
            let mut reply = self.call_replicated(Kind::WriteOnce, call).await?;
            match reply.word()?.as_str() {
                "ok" => Ok(ReplaceOutcome::Done(reply.count()?)),
                "changed" => Ok(ReplaceOutcome::Changed),
                "gone" => Ok(ReplaceOutcome::Gone),
                other => Err(reply.unexpected(other)),
            }
        })
    }

    fn remove_document(
        &self,
        key: DocumentKey,
        version: Option<u64>,
    ) -> StoreFuture<'_, RemoveOutcome> {
        self.meters.meter(Op::RemoveDocument, move || async move {
            let call = self.document_call("remove", &key).arg(version);
            let mut reply = self.call_replicated(Kind::WriteOnce, call).await?;
            match reply.word()?.as_str() {
                "ok" => Ok(RemoveOutcome::Done),
                "changed" => Ok(RemoveOutcome::Changed),
                "gone" => Ok(RemoveOutcome::Gone),
                other => Err(reply.unexpected(other)),
            }
        })
    }

    fn documents(
        &self,
        collection: Collection,
        tenant: Tenant,
        page: DocumentPage,
    ) -> StoreFuture<'_, DocumentList> {
        self.meters.meter(Op::Documents, move || {
            self.list_documents(collection, tenant, page)
        })
    }

    fn document_sums(
        &self,
        collection: Collection,
        tenant: Tenant,
    ) -> StoreFuture<'_, DocumentSums> {
        self.meters.meter(Op::DocumentSums, move || async move {
            let [documents, _] = self.keys.due_documents(collection);
            let call = Call::new(Name::FIELDS)
                .key(documents)
                .arg(format!("n:{tenant}"))
                .arg(format!("w:{tenant}"));
            // A tenant without documents has neither field.
            let mut reply = self.call(Kind::Read, call).await?;
            Ok(DocumentSums {
                documents: reply.count()?,
                weight: reply.count()?,
            })
        })
    }

    fn due_documents(
        &self,
        collection: Collection,
        now_ms: u64,
        places: Range<usize>,
    ) -> StoreFuture<'_, Vec<Document>> {
        self.meters.meter(Op::DueDocuments, move || async move {
            let call = Call::new(Name::DOCUMENTS_DUE)
                .keys(self.keys.due_documents(collection))
                .number(now_ms)
                .number(places.len().min(DOCUMENTS_AT_A_TIME) as u64)
                .number(BATCH_BYTES as u64)
                .number(places.start as u64)
                .expecting(BATCH_BYTES as u64);
            let mut reply = self.call(Kind::Read, call).await?;
            let mut due = Vec::new();
            while !reply.is_empty() {
                let member = reply.word()?;
                let entry = reply.whole("document")?;
                match self.due_document(collection, &member, &entry).await {
                    Ok(document) => due.push(document),
                    Err(error) => self.leave_out(collection, &member, error)?,
                }
            }
            Ok(due)
        })
    }

    fn clock_ms(&self) -> StoreFuture<'_, u64> {
        self.meters.meter(Op::Clock, move || async move {
            // Of a cluster, the node that has the batches.
            let [documents, _] = self.keys.due_documents(Collection::Batches);
            let call = Call::new(Name::CLOCK).key(documents);
            self.call(Kind::Read, call).await?.count()
        })
    }
}

impl Redis {
    fn document_call(&self, how: &'static str, key: &DocumentKey) -> Call {
        Call::new(Name::DOCUMENT)
            .keys(self.keys.documents(key.collection, key.tenant))
            .arg(how)
            .arg(key.tenant.to_string())
            .arg(key.id.clone())
    }

    /// Reads in batches, so that small reads of other requests are not blocked. If the last document of a batch is
    /// removed before the next batch, reading starts over.
    async fn list_documents(
        &self,
        collection: Collection,
        tenant: Tenant,
        page: DocumentPage,
    ) -> Result<DocumentList, Error> {
        let mut listed = DocumentList::default();
        if page.after.as_deref().is_some_and(|id| !is_document_id(id)) {
            listed.is_unknown = true;
            return Ok(listed);
        }
        let first = page.after.unwrap_or_default();
        let mut after = first.clone();
        let mut rereads = 0;
        loop {
            let left = page.limit.saturating_sub(listed.documents.len());
            let [documents, order, _] = self.keys.documents(collection, tenant);
            let call = Call::new(Name::DOCUMENTS)
                .keys([documents, order])
                .arg(tenant.to_string())
                .arg(after.clone())
                .number(left.min(DOCUMENTS_AT_A_TIME) as u64)
                .arg(match page.order {
                    Order::OldestFirst => "asc",
                    Order::NewestFirst => "desc",
                })
                .number(BATCH_BYTES as u64)
                .expecting(BATCH_BYTES as u64);
            let mut reply = self.call(Kind::Read, call).await?;
            match reply.word()?.as_str() {
                "ok" => {}
                "unknown_after" if after == first => {
                    return Ok(DocumentList {
                        is_unknown: true,
                        ..DocumentList::default()
                    });
                }
                "unknown_after" if rereads < REREADS_MAX => {
                    rereads += 1;
                    listed.documents.clear();
                    after.clone_from(&first);
                    continue;
                }
                "incomplete" => {
                    return Err(malformed(
                        "a part of the list is lost: the store has evicted it",
                    ));
                }
                other => return Err(reply.unexpected(other)),
            }
            listed.has_more = reply.word()? == "1";
            after = reply.word()?;
            while !reply.is_empty() {
                let key = DocumentKey::new(collection, tenant, reply.word()?);
                let entry = reply.whole("document")?;
                match self.read_document(key.clone(), &entry).await {
                    Ok(document) => listed.documents.push(document),
                    Err(error) => self.leave_out(collection, &key.id, error)?,
                }
            }
            if !listed.has_more || listed.documents.len() >= page.limit {
                return Ok(listed);
            }
        }
    }

    async fn due_document(
        &self,
        collection: Collection,
        member: &str,
        entry: &[u8],
    ) -> Result<Document, Error> {
        let key = parse_document_member(collection, member);
        let key = key.ok_or_else(|| malformed("invalid key of a document that is due"))?;
        self.read_document(key, entry).await
    }

    /// A document that cannot be read keeps nobody from the others.
    fn leave_out(&self, collection: Collection, name: &str, error: Error) -> Result<(), Error> {
        let Error::Unreadable(reason) = &error else {
            return Err(error);
        };
        let is_new = self.left_out.lock().should_log(observe::now(), reason);
        if is_new {
            warn!(collection = collection.as_str(), name, %error, "document left out of a list");
        }
        Ok(())
    }

    async fn read_document(&self, key: DocumentKey, entry: &[u8]) -> Result<Document, Error> {
        let (version, packed) = read_entry(entry)?;
        Ok(Document {
            value: self.unpack(packed.to_vec()).await?,
            version,
            key,
        })
    }
}

/// The version and the packed value of a document.
fn read_entry(entry: &[u8]) -> Result<(u64, &[u8]), Error> {
    let mut parts = entry.splitn(6, |byte| *byte == b' ');
    let mut number = || str::from_utf8(parts.next()?).ok()?.parse::<u64>().ok();
    match number() {
        Some(FORMAT) => {}
        Some(newer) => {
            return Err(malformed(format!(
                "written by a newer release (document format {newer})"
            )));
        }
        None => return Err(malformed("a document without a format")),
    }
    let version = number();
    // Behind creation, weight and fingerprint.
    let packed = parts.nth(3);
    version
        .zip(packed)
        .ok_or_else(|| malformed("a document is truncated"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_is_a_version_and_a_packed_value_that_may_contain_anything() {
        let read =
            |entry: &[u8]| read_entry(entry).map(|(version, packed)| (version, packed.to_vec()));
        assert_eq!(read(b"1 7 5 0 a1f r{ }\0 x"), Ok((7, b"r{ }\0 x".to_vec())));
        assert_eq!(
            read(b"1 18446744073709551615 5 0 a r"),
            Ok((u64::MAX, b"r".to_vec()))
        );
        let newer = read(b"2 whatever").unwrap_err();
        assert!(newer.to_string().contains("newer release"), "{newer}");
        for wrong in [
            &b""[..],
            b"r",
            b"1",
            b"1 7",
            b"1 7 5 0 a1f",
            b"1 x 5 0 a1f r",
            b"\xff 1",
        ] {
            assert!(
                matches!(read(wrong), Err(Error::Unreadable(_))),
                "{wrong:?}"
            );
        }
    }
}
