//! Names of the Redis keys. All keys of one root (a chain of responses, or a conversation with its responses) have
//! the hash tag `{tenant:root}`, so that a Redis cluster keeps them in one slot and one script can use them.
//!
//! | key | type of data |
//! |---|---|
//! | `r:{tenant:root}:id` | record of a response |
//! | `e:{tenant:root}:id` | event log of a background response |
//! | `d:` with the same tag | exists for a day after a response of the root was deleted |
//! | `c:`, `i:`, `x:` with the same tag | a conversation's object and lock, its items, the order of its items |
//! | `o:owner` | lease of an owner |
//! | `q:owner`, `q:nobody` | responses that an owner runs; released responses |
//! | `n:owner` | notices to an owner |
//! | `owners` | all owners by last heartbeat |
//! | `probe:` with `{0}`, `{1}` and so on | nothing: asked whether a node of a cluster replies |
//! | `hd:`, `ha:`, `he:`, `ho:`, `hu:` with `{endpoint}` | a webhook endpoint's events by when they are due and were added, the events, whether it takes none, its addresses |
//! | `l:`, `lr:`, `lc:` with `{tenant}` | a tenant's limits, its requests that are charged and run, background responses charged once |
//! | `bd:{batches}:collection` | the documents of a collection, of all tenants, and sums of each tenant's |
//! | `bu:{batches}:collection` | those of them that are to become due, by when |
//! | `bl:{batches}:collection:tenant` | the documents of a tenant by when they were created |
//!
//! All documents have one hash tag: a list, sums and due times change in the same script as a document, and one read
//! finds what is due of all tenants. They are few and small, so they need no second node of a cluster.

use crate::ids::{ResponseId, Root, Tenant, hex};
use crate::store::documents::{Collection, DocumentKey};
use crate::store::outbox::{BatchKey, EventKey};
use crate::store::{ConversationKey, Owner, ResponseKey};

#[derive(Clone, Debug)]
pub(super) struct Keys {
    prefix: String,
}

impl Keys {
    pub(super) fn new(prefix: &str) -> Self {
        Self {
            prefix: prefix.to_owned(),
        }
    }

    /// A key of kind `kind` with the hash tag. `own`: the part of the id after the root.
    fn tagged(&self, kind: &str, tenant: Tenant, root: Root, own: u128) -> String {
        let root = hex::<16>(&root.0.to_be_bytes());
        let own = hex::<32>(&own.to_be_bytes());
        let [root, own] = [&root[..], &own[..]].map(|hex| str::from_utf8(hex).unwrap_or_default());
        [
            &self.prefix,
            kind,
            ":{",
            tenant.as_str(),
            ":",
            root,
            "}:",
            own,
        ]
        .concat()
    }

    pub(super) fn record(&self, key: ResponseKey) -> String {
        self.tagged("r", key.tenant, key.id.root(), key.id.own())
    }

    pub(super) fn log(&self, key: ResponseKey) -> String {
        self.tagged("e", key.tenant, key.id.root(), key.id.own())
    }

    /// Exists if a response of the same root was deleted lately.
    pub(super) fn deleted(&self, key: ResponseKey) -> String {
        self.tagged("d", key.tenant, key.id.root(), 0)
    }

    /// The keys of a conversation: object and lock, items, order of items.
    pub(super) fn conversation(&self, key: ConversationKey) -> [String; 3] {
        let (root, own) = (key.id.root(), key.id.own());
        ["c", "i", "x"].map(|kind| self.tagged(kind, key.tenant, root, own))
    }

    /// A tenant's limits, its running requests, and the background responses that were charged.
    pub(super) fn limits(&self, tenant: Tenant) -> [String; 3] {
        ["l", "lr", "lc"].map(|kind| format!("{}{kind}:{{{tenant}}}", self.prefix))
    }

    /// The queue of a webhook endpoint: events by when they are due, by when they were added, the events, whether it
    /// takes none, and its addresses by when each became the newest.
    pub(super) fn outbox(&self, endpoint: &str) -> [String; 5] {
        ["hd", "ha", "he", "ho", "hu"].map(|kind| format!("{}{kind}:{{{endpoint}}}", self.prefix))
    }

    /// The documents of a collection, their order in the list of a tenant, and which are due.
    pub(super) fn documents(&self, collection: Collection, tenant: Tenant) -> [String; 3] {
        let [documents, due] = self.due_documents(collection);
        let collection = collection.as_str();
        let order = format!("{}bl:{{batches}}:{collection}:{tenant}", self.prefix);
        [documents, order, due]
    }

    /// The documents of a collection, and which are due.
    pub(super) fn due_documents(&self, collection: Collection) -> [String; 2] {
        let collection = collection.as_str();
        ["bd", "bu"].map(|kind| format!("{}{kind}:{{batches}}:{collection}", self.prefix))
    }

    /// Never exists.
    pub(super) fn lacking(&self) -> String {
        format!("{}none:{:016x}", self.prefix, fastrand::u64(..))
    }

    /// Keys that never exist. Each lies in another quarter of the slots, so that one node of a cluster rarely has all.
    pub(super) fn probes(&self) -> [String; 4] {
        [0, 1, 2, 3].map(|number| self.probe(number))
    }

    /// One of the keys that never exist.
    pub(super) fn probe(&self, number: usize) -> String {
        format!("{}probe:{{{number}}}", self.prefix)
    }

    /// Exists while the lease of the owner is valid.
    pub(super) fn lease(&self, owner: Owner) -> String {
        format!("{}o:{owner}", self.prefix)
    }

    /// The set of responses that an owner runs; for `None`, the released responses, which any replica may run.
    pub(super) fn running(&self, owner: Option<Owner>) -> String {
        match owner {
            Some(owner) => format!("{}q:{owner}", self.prefix),
            None => format!("{}q:nobody", self.prefix),
        }
    }

    /// The stream of notices to an owner, for example that one of its responses was cancelled.
    pub(super) fn notices(&self, owner: Owner) -> String {
        format!("{}n:{owner}", self.prefix)
    }

    /// The sorted set of all owners, by their last heartbeat.
    pub(super) fn owners(&self) -> String {
        format!("{}owners", self.prefix)
    }
}

/// Encodes a response key for a set or a notice.
pub(super) fn member(key: ResponseKey) -> String {
    format!("{}:{}:{:032x}", key.tenant, key.id.root(), key.id.own())
}

pub(super) fn parse_member(text: &str) -> Option<ResponseKey> {
    let mut parts = text.split(':');
    let (tenant, root, own) = (parts.next()?, parts.next()?, parts.next()?);
    if (tenant.len(), root.len(), own.len(), parts.next()) != (16, 16, 32, None) {
        return None;
    }
    let root = Root(u64::from_str_radix(root, 16).ok()?);
    let own = u128::from_str_radix(own, 16).ok()?;
    Some(ResponseKey {
        tenant: Tenant::tagged(u64::from_str_radix(tenant, 16).ok()?),
        id: ResponseId::new(root, own),
    })
}

/// Encodes what an event is about. A batch is written as the document that its record is.
pub(super) fn event_member(key: EventKey) -> String {
    match key {
        EventKey::Response(key) => member(key),
        EventKey::Batch(key) => format!("{}:{key}", key.tenant),
    }
}

pub(super) fn parse_event_member(text: &str) -> Option<EventKey> {
    if let Some(key) = parse_member(text) {
        return Some(EventKey::Response(key));
    }
    let batch = parse_document_member(Collection::Batches, text)?;
    BatchKey::of(batch.tenant, &batch.id).map(EventKey::Batch)
}

/// Encodes a document's key among those of its collection.
pub(super) fn document_member(key: &DocumentKey) -> String {
    format!("{}:{}", key.tenant, key.id)
}

pub(super) fn parse_document_member(collection: Collection, text: &str) -> Option<DocumentKey> {
    let (tenant, id) = text.split_once(':')?;
    if tenant.len() != 16 {
        return None;
    }
    let tenant = Tenant::tagged(u64::from_str_radix(tenant, 16).ok()?);
    Some(DocumentKey::new(collection, tenant, id))
}

pub(super) fn parse_owner(text: &str) -> Option<Owner> {
    Some(Owner(u64::from_str_radix(text, 16).ok()?))
}

/// Encodes a chain of responses, oldest first. Only the part after the root is stored of each id, because all have
/// the root of the record's key.
pub(super) fn pack_chain(chain: &[ResponseId]) -> Vec<u8> {
    chain.iter().flat_map(|id| id.own().to_be_bytes()).collect()
}

/// How many ids of its chain a record has at most.
pub(super) const SEGMENT: usize = 128;

/// The part of a chain that the record of the next response has: the ids from the newest anchor on, and the anchors.
/// Each response that has a multiple of [`SEGMENT`] before it is an anchor: its record has the [`SEGMENT`] before it. So
/// what a record takes does not grow with the chain, but for an anchor's id in each [`SEGMENT`] turns.
pub(super) fn split_chain(chain: &[ResponseId]) -> (&[ResponseId], Vec<ResponseId>) {
    let recent_from = chain.len().saturating_sub(1) / SEGMENT * SEGMENT;
    let anchors = chain.iter().skip(SEGMENT).step_by(SEGMENT);
    (&chain[recent_from..], anchors.copied().collect())
}

pub(super) fn unpack_chain(root: Root, packed: &[u8]) -> Vec<ResponseId> {
    let (ids, _) = packed.as_chunks();
    let id = |own: &[u8; 16]| ResponseId::new(root, u128::from_be_bytes(*own));
    ids.iter().map(id).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_keys_of_a_root_have_its_hash_tag() {
        let keys = Keys::new("wr:");
        let key = ResponseKey {
            tenant: Tenant::tagged(1),
            id: ResponseId::new(Root(2), 3),
        };
        let tag = "{0000000000000001:0000000000000002}";
        let own = "00000000000000000000000000000003";
        assert_eq!(keys.record(key), format!("wr:r:{tag}:{own}"));
        assert_eq!(keys.log(key), format!("wr:e:{tag}:{own}"));
        assert_eq!(parse_member(&member(key)), Some(key));
        assert_eq!(parse_member("1:2:3"), None);
        let batch = BatchKey {
            tenant: key.tenant,
            number: 4,
        };
        for key in [EventKey::Response(key), EventKey::Batch(batch)] {
            assert_eq!(parse_event_member(&event_member(key)), Some(key));
        }
        assert_eq!(parse_event_member("0000000000000001:batch_4"), None);
        let ids: Vec<ResponseId> = (0..300).map(|own| ResponseId::new(Root(2), own)).collect();
        for (count, recent_from, anchors) in [
            (0, 0, &[][..]),
            (1, 0, &[]),
            (128, 0, &[]),
            (129, 128, &[128]),
            (256, 128, &[128]),
            (257, 256, &[128, 256]),
            (300, 256, &[128, 256]),
        ] {
            let anchors: Vec<ResponseId> = anchors.iter().map(|at| ids[*at]).collect();
            let expected = (&ids[recent_from..count], anchors);
            assert_eq!(split_chain(&ids[..count]), expected, "{count}");
        }
        let chain = [key.id, ResponseId::new(Root(2), u128::MAX)];
        assert_eq!(unpack_chain(Root(2), &pack_chain(&chain)), chain);
    }

    #[test]
    fn all_keys_of_documents_have_one_hash_tag() {
        let key = DocumentKey {
            collection: Collection::Batches,
            tenant: Tenant::of("a"),
            id: "batch_1".to_owned(),
        };
        for name in Keys::new("wr:").documents(key.collection, key.tenant) {
            assert!(name.contains(":{batches}:batch"), "{name}");
        }
        let member = document_member(&key);
        let parsed = parse_document_member(key.collection, &member);
        assert_eq!(parsed, Some(key));
        for wrong in ["", "batch_1", "1:batch_1", "zzzzzzzzzzzzzzzz:batch_1"] {
            let parsed = parse_document_member(Collection::Files, wrong);
            assert_eq!(parsed, None, "{wrong}");
        }
    }
}
