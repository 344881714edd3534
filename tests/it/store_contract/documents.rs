//! Documents of the Batch API: inserted once, replaced if unchanged, listed, due, bounded, removed.

use std::ops::Range;

use bytes::Bytes;
use warmroute::store::Error;
use warmroute::store::conversation::Order;
use warmroute::store::documents::{
    Collection, DOCUMENT_BYTES_MAX, DOCUMENT_ID_BYTES_MAX, Document, DocumentBounds, DocumentKey,
    DocumentList, DocumentPage, InsertOutcome, NewDocument, RemoveOutcome, ReplaceOutcome,
};
use warmroute::store::redis::{Mode, Settings};

use super::*;
use crate::redis_server;

const WIDE: DocumentBounds = DocumentBounds {
    documents: 1_000_000,
    weight: 1 << 40,
};

fn of(tenant: Tenant, collection: Collection, id: &str) -> DocumentKey {
    DocumentKey {
        collection,
        tenant,
        id: id.to_owned(),
    }
}

fn batch_key(id: &str) -> DocumentKey {
    of(tenant(), Collection::Batches, id)
}

fn new(value: &str) -> NewDocument {
    NewDocument {
        value: Bytes::copy_from_slice(value.as_bytes()),
        created_ms: 1_700_000_000_000,
        weight: 1,
        due_ms: None,
    }
}

async fn insert(store: &Store, key: &DocumentKey, new: NewDocument) {
    let inserted = store.insert_document(key.clone(), new, WIDE).await;
    assert_eq!(inserted, Ok(InsertOutcome::Done));
}

async fn read(store: &Store, key: &DocumentKey) -> Option<(u64, String)> {
    let found = store.document(key.clone()).await.unwrap()?;
    assert_eq!(found.key, *key);
    let text = String::from_utf8(found.value.to_vec()).unwrap();
    Some((found.version, text))
}

fn version_of(version: u64, value: &str) -> Option<(u64, String)> {
    Some((version, value.to_owned()))
}

fn ids(documents: &[Document]) -> Vec<&str> {
    let ids = documents.iter().map(|document| &*document.key.id);
    ids.collect()
}

async fn list(store: &Store, after: Option<&str>, limit: usize, order: Order) -> DocumentList {
    let page = DocumentPage {
        after: after.map(str::to_owned),
        limit,
        order,
    };
    let listed = store.documents(Collection::Batches, tenant(), page).await;
    listed.unwrap()
}

async fn due(store: &Store, now_ms: u64, max: usize) -> Vec<String> {
    due_at(store, now_ms, 0..max).await
}

async fn due_at(store: &Store, now_ms: u64, places: Range<usize>) -> Vec<String> {
    let due = store.due_documents(Collection::Batches, now_ms, places);
    let due = due.await.unwrap();
    ids(&due).into_iter().map(str::to_owned).collect()
}

#[tokio::test]
async fn a_document_is_inserted_once() {
    on_each(async |Pair { a, b, .. }| {
        let key = batch_key("batch_1");
        assert_eq!(read(a, &key).await, None);
        insert(a, &key, new("first")).await;
        assert_eq!(read(b, &key).await, version_of(1, "first"));
        // Its answer was lost, and another replica has changed it meanwhile.
        insert(a, &key, new("first")).await;
        let replaced = b.replace_document(key.clone(), 1, "second".into(), None);
        assert_eq!(replaced.await, Ok(ReplaceOutcome::Done(2)));
        insert(a, &key, new("first")).await;
        assert_eq!(read(a, &key).await, version_of(2, "second"));
        for other in ["second", "third"] {
            let inserted = a.insert_document(key.clone(), new(other), WIDE).await;
            assert_eq!(inserted, Ok(InsertOutcome::Exists));
        }
        assert_eq!(read(b, &key).await, version_of(2, "second"));
        // It counts once.
        let bounds = DocumentBounds {
            documents: 2,
            weight: 2,
        };
        let inserted = a.insert_document(batch_key("batch_2"), new("x"), bounds);
        assert_eq!(inserted.await, Ok(InsertOutcome::Done));
    })
    .await;
}

#[tokio::test]
async fn a_replacement_of_an_outdated_version_changes_nothing() {
    on_each(async |Pair { a, b, .. }| {
        let key = batch_key("batch_1");
        let replace = async |store: &Store, version, value: &str, due_ms| {
            let value = Bytes::copy_from_slice(value.as_bytes());
            let replaced = store.replace_document(key.clone(), version, value, due_ms);
            replaced.await.unwrap()
        };
        assert_eq!(replace(a, 1, "x", None).await, ReplaceOutcome::Gone);
        assert_eq!(read(a, &key).await, None);
        insert(a, &key, new("one")).await;
        assert_eq!(replace(b, 1, "two", Some(5)).await, ReplaceOutcome::Done(2));
        for outdated in [0, 1, 3] {
            let replaced = replace(a, outdated, "lost", Some(1)).await;
            assert_eq!(replaced, ReplaceOutcome::Changed);
        }
        assert_eq!(read(a, &key).await, version_of(2, "two"));
        assert!(due(a, 4, 9).await.is_empty());
        assert_eq!(due(a, 5, 9).await, ["batch_1"]);
        assert_eq!(replace(a, 2, "", None).await, ReplaceOutcome::Done(3));
        assert_eq!(read(b, &key).await, version_of(3, ""));
    })
    .await;
}

#[tokio::test]
async fn of_replicas_that_replace_at_once_one_wins_each_time() {
    on_each(async |Pair { a, b, .. }| {
        let key = batch_key("batch_1");
        insert(a, &key, new("0")).await;
        let add = async |store: &Store| {
            let mut added = 0;
            while added < 20 {
                let (version, value) = read(store, &key).await.unwrap();
                let sum: u32 = value.parse().unwrap();
                let more = (sum + 1).to_string().into();
                match store
                    .replace_document(key.clone(), version, more, None)
                    .await
                {
                    Ok(ReplaceOutcome::Done(next)) => {
                        assert_eq!(next, version + 1);
                        added += 1;
                    }
                    Ok(ReplaceOutcome::Changed) => {}
                    other => panic!("{other:?}"),
                }
            }
        };
        tokio::join!(add(a), add(b));
        assert_eq!(read(a, &key).await, version_of(41, "40"));
    })
    .await;
}

#[tokio::test]
async fn documents_and_their_weight_are_bounded_and_a_removal_makes_room() {
    on_each(async |Pair { a, b, .. }| {
        let bounds = DocumentBounds {
            documents: 3,
            weight: 100,
        };
        let insert = async |id: &str, weight| {
            let new = NewDocument { weight, ..new(id) };
            let inserted = a.insert_document(batch_key(id), new, bounds);
            inserted.await.unwrap()
        };
        assert_eq!(insert("a", 101).await, InsertOutcome::TooHeavy);
        assert_eq!(insert("a", 60).await, InsertOutcome::Done);
        assert_eq!(insert("b", 41).await, InsertOutcome::TooHeavy);
        assert_eq!(read(b, &batch_key("b")).await, None);
        assert_eq!(insert("b", 40).await, InsertOutcome::Done);
        assert_eq!(insert("c", 1).await, InsertOutcome::TooHeavy);
        assert_eq!(insert("c", 0).await, InsertOutcome::Done);
        assert_eq!(insert("d", 0).await, InsertOutcome::TooMany);
        // A repeated insertion needs no room.
        assert_eq!(insert("a", 60).await, InsertOutcome::Done);
        // A replacement leaves the weight as it is.
        let replaced = b.replace_document(batch_key("a"), 1, "longer".into(), None);
        assert_eq!(replaced.await, Ok(ReplaceOutcome::Done(2)));
        let removed = b.remove_document(batch_key("a"), None).await;
        assert_eq!(removed, Ok(RemoveOutcome::Done));
        assert_eq!(insert("d", 61).await, InsertOutcome::TooHeavy);
        assert_eq!(insert("d", 60).await, InsertOutcome::Done);
        assert_eq!(insert("e", 0).await, InsertOutcome::TooMany);
        let listed = list(b, None, 9, Order::OldestFirst).await;
        assert_eq!(ids(&listed.documents), ["b", "c", "d"]);
        // One that may exceed the bounds of the others does not change theirs.
        let forced = NewDocument {
            weight: 1_000,
            ..new("e")
        };
        let inserted = a.insert_document(batch_key("e"), forced, WIDE).await;
        assert_eq!(inserted, Ok(InsertOutcome::Done));
        let removed = b.remove_document(batch_key("b"), None).await;
        assert_eq!(removed, Ok(RemoveOutcome::Done));
        let removed = b.remove_document(batch_key("c"), None).await;
        assert_eq!(removed, Ok(RemoveOutcome::Done));
        assert_eq!(insert("f", 0).await, InsertOutcome::TooHeavy);
        let removed = b.remove_document(batch_key("e"), None).await;
        assert_eq!(removed, Ok(RemoveOutcome::Done));
        assert_eq!(insert("f", 40).await, InsertOutcome::Done);
    })
    .await;
}

#[tokio::test]
async fn the_sums_of_a_tenant_are_those_of_its_documents() {
    on_each(async |Pair { a, b, .. }| {
        let sums = async || {
            let sums = b.document_sums(Collection::Batches, tenant());
            let sums = sums.await.unwrap();
            (sums.documents, sums.weight)
        };
        assert_eq!(sums().await, (0, 0));
        for (id, weight) in [("a", 60), ("b", 7)] {
            let new = NewDocument { weight, ..new(id) };
            insert(a, &batch_key(id), new).await;
        }
        let of_another = of(Tenant::tagged(7), Collection::Batches, "c");
        insert(a, &of_another, new("c")).await;
        let file = of(tenant(), Collection::Files, "d");
        insert(a, &file, new("d")).await;
        assert_eq!(sums().await, (2, 67));
        let removed = a.remove_document(batch_key("a"), None).await;
        assert_eq!(removed, Ok(RemoveOutcome::Done));
        assert_eq!(sums().await, (1, 7));
    })
    .await;
}

#[tokio::test]
async fn a_document_is_removed_whatever_its_version_or_only_one() {
    on_each(async |Pair { a, b, .. }| {
        let key = batch_key("batch_1");
        let remove = async |version| b.remove_document(key.clone(), version).await.unwrap();
        assert_eq!(remove(None).await, RemoveOutcome::Gone);
        assert_eq!(remove(Some(1)).await, RemoveOutcome::Gone);
        let with_due = NewDocument {
            due_ms: Some(7),
            ..new("x")
        };
        insert(a, &key, with_due.clone()).await;
        assert_eq!(remove(Some(2)).await, RemoveOutcome::Changed);
        assert_eq!(read(a, &key).await, version_of(1, "x"));
        assert_eq!(due(a, 7, 9).await, ["batch_1"]);
        assert_eq!(remove(Some(1)).await, RemoveOutcome::Done);
        assert_eq!(remove(Some(1)).await, RemoveOutcome::Gone);
        assert_eq!(read(a, &key).await, None);
        assert!(due(a, 7, 9).await.is_empty());
        let listed = list(a, None, 9, Order::OldestFirst).await;
        assert_eq!(listed, DocumentList::default());
        let replaced = a.replace_document(key.clone(), 1, "y".into(), Some(1));
        assert_eq!(replaced.await, Ok(ReplaceOutcome::Gone));
        assert_eq!(read(b, &key).await, None);
        // Its id is free.
        insert(a, &key, with_due).await;
        let replaced = a.replace_document(key.clone(), 1, "y".into(), None);
        assert_eq!(replaced.await, Ok(ReplaceOutcome::Done(2)));
        assert_eq!(remove(None).await, RemoveOutcome::Done);
    })
    .await;
}

#[tokio::test]
async fn pages_go_through_all_documents_in_either_order() {
    on_each(async |Pair { a, b, .. }| {
        // Three at a time were created in the same millisecond.
        let mut created = Vec::new();
        for number in 0..33 {
            let id = format!("batch_{:02}", (number * 7) % 33);
            let new = NewDocument {
                created_ms: 1_700_000_000_000 + number / 3,
                ..new(&id)
            };
            created.push((new.created_ms, id.clone()));
            insert(a, &batch_key(&id), new).await;
        }
        created.sort();
        let expected: Vec<&str> = created.iter().map(|(_, id)| &**id).collect();
        for order in [Order::OldestFirst, Order::NewestFirst] {
            let mut seen: Vec<String> = Vec::new();
            loop {
                let listed = list(b, seen.last().map(|id| &**id), 7, order).await;
                assert!(!listed.is_unknown && !listed.documents.is_empty());
                for document in &listed.documents {
                    assert_eq!(document.value, document.key.id.as_bytes());
                }
                seen.extend(ids(&listed.documents).into_iter().map(str::to_owned));
                assert_eq!(listed.has_more, seen.len() < 33);
                if !listed.has_more {
                    break;
                }
            }
            if order == Order::NewestFirst {
                seen.reverse();
            }
            assert_eq!(seen, expected);
        }
        let whole = list(b, None, 33, Order::OldestFirst).await;
        assert_eq!((whole.documents.len(), whole.has_more), (33, false));
        let last = list(b, Some(expected[32]), 7, Order::OldestFirst).await;
        assert_eq!(last, DocumentList::default());
        let nothing = list(b, None, 0, Order::NewestFirst).await;
        assert_eq!((nothing.documents.len(), nothing.has_more), (0, true));
        let removed = a.remove_document(batch_key(expected[5]), None).await;
        assert_eq!(removed, Ok(RemoveOutcome::Done));
        for unknown in [expected[5], "batch_99", "", "a b", "é"] {
            for order in [Order::OldestFirst, Order::NewestFirst] {
                let listed = list(b, Some(unknown), 7, order).await;
                assert!(listed.is_unknown, "{unknown}");
                assert!(listed.documents.is_empty() && !listed.has_more);
            }
        }
    })
    .await;
}

#[tokio::test]
async fn what_is_due_comes_earliest_first_and_what_has_no_due_time_never_does() {
    on_each(async |Pair { a, b, .. }| {
        let other = of(Tenant::tagged(7), Collection::Batches, "other");
        for (key, due_ms) in [
            (batch_key("late"), Some(30)),
            (batch_key("never"), None),
            (batch_key("early"), Some(10)),
            (other.clone(), Some(20)),
            (of(tenant(), Collection::Files, "file-1"), Some(1)),
        ] {
            let new = NewDocument { due_ms, ..new("x") };
            insert(a, &key, new).await;
        }
        assert!(due(b, 9, 9).await.is_empty());
        assert_eq!(due(b, 10, 9).await, ["early"]);
        assert_eq!(due(b, 1 << 50, 9).await, ["early", "other", "late"]);
        assert_eq!(due(b, 1 << 50, 2).await, ["early", "other"]);
        assert!(due(b, 1 << 50, 0).await.is_empty());
        assert_eq!(due(b, u64::MAX, usize::MAX).await.len(), 3);
        assert_eq!(due_at(b, 1 << 50, 1..2).await, ["other"]);
        assert_eq!(due_at(b, 1 << 50, 2..9).await, ["late"]);
        assert!(due_at(b, 1 << 50, 3..9).await.is_empty());
        let found = b.due_documents(Collection::Batches, 20, 0..9);
        let found = found.await.unwrap();
        assert_eq!(found[1].key, other);
        assert_eq!((found[1].version, &*found[1].value), (1, &b"x"[..]));
        // Each replacement says anew when.
        for (id, due_ms) in [("early", Some(40)), ("late", None), ("never", Some(5))] {
            let replaced = a.replace_document(batch_key(id), 1, "y".into(), due_ms);
            assert_eq!(replaced.await, Ok(ReplaceOutcome::Done(2)));
        }
        assert_eq!(due(b, 39, 9).await, ["never", "other"]);
        assert_eq!(due(b, 40, 9).await, ["never", "other", "early"]);
    })
    .await;
}

#[tokio::test]
async fn the_clock_of_a_store_on_this_host_is_this_hosts() {
    on_each(async |Pair { a, b, .. }| {
        for store in [a, b] {
            let own_ms = warmroute::observe::unix_ms();
            let found_ms = store.clock_ms().await.unwrap();
            assert!(found_ms.abs_diff(own_ms) < 60_000, "{found_ms} {own_ms}");
        }
    })
    .await;
}

#[tokio::test]
async fn tenants_and_collections_do_not_see_each_others_documents() {
    on_each(async |Pair { a, b, .. }| {
        let narrow = DocumentBounds {
            documents: 1,
            weight: 1,
        };
        let keys = [
            batch_key("same"),
            of(Tenant::tagged(7), Collection::Batches, "same"),
            of(tenant(), Collection::Files, "same"),
        ];
        for (number, key) in keys.iter().enumerate() {
            assert_eq!(read(b, key).await, None);
            let new = new(&number.to_string());
            let inserted = a.insert_document(key.clone(), new, narrow).await;
            assert_eq!(inserted, Ok(InsertOutcome::Done));
        }
        for (number, key) in keys.iter().enumerate() {
            assert_eq!(read(b, key).await, version_of(1, &number.to_string()));
            let page = DocumentPage {
                after: None,
                limit: 9,
                order: Order::OldestFirst,
            };
            let listed = b.documents(key.collection, key.tenant, page).await;
            let listed = listed.unwrap();
            assert_eq!(listed.documents.len(), 1);
            assert_eq!(listed.documents[0].key, *key);
        }
        let stranger = of(Tenant::tagged(8), Collection::Batches, "same");
        let removed = b.remove_document(stranger.clone(), None).await;
        assert_eq!(removed, Ok(RemoveOutcome::Gone));
        let replaced = b.replace_document(stranger, 1, "z".into(), None).await;
        assert_eq!(replaced, Ok(ReplaceOutcome::Gone));
        let removed = b.remove_document(keys[1].clone(), None).await;
        assert_eq!(removed, Ok(RemoveOutcome::Done));
        assert_eq!(read(a, &keys[0]).await, version_of(1, "0"));
        assert_eq!(read(a, &keys[2]).await, version_of(1, "2"));
    })
    .await;
}

#[tokio::test]
async fn a_value_or_an_id_that_is_too_long_is_refused() {
    on_each(async |Pair { a, b, .. }| {
        let key = batch_key(&"i".repeat(DOCUMENT_ID_BYTES_MAX));
        let mut random = fastrand::Rng::with_seed(3);
        let value: Bytes = (0..DOCUMENT_BYTES_MAX).map(|_| random.u8(..)).collect();
        let largest = NewDocument {
            value: value.clone(),
            ..new("")
        };
        insert(a, &key, largest.clone()).await;
        let found = b.document(key.clone()).await.unwrap().unwrap();
        assert!(found.value == value);
        let longer: Bytes = vec![b'x'; DOCUMENT_BYTES_MAX + 1].into();
        let replaced = b.replace_document(key.clone(), 1, longer.clone(), None);
        assert!(matches!(replaced.await, Err(Error::TooLarge { .. })));
        let new = NewDocument {
            value: longer,
            ..largest
        };
        let inserted = a.insert_document(batch_key("other"), new, WIDE).await;
        assert!(matches!(inserted, Err(Error::TooLarge { .. })));
        // A list of large documents is whole all the same.
        for number in 0..4 {
            let new = NewDocument {
                value: value.clone(),
                ..self::new("")
            };
            insert(a, &batch_key(&format!("large_{number}")), new).await;
        }
        let listed = list(b, None, 9, Order::NewestFirst).await;
        assert_eq!((listed.documents.len(), listed.has_more), (5, false));
        let found = listed.documents.iter();
        assert!(
            found
                .map(|document| &document.value)
                .all(|found| *found == value)
        );
        for wrong in ["", "a:b", "é", &"i".repeat(DOCUMENT_ID_BYTES_MAX + 1)] {
            let key = batch_key(wrong);
            let inserted = a.insert_document(key.clone(), self::new("x"), WIDE).await;
            assert!(matches!(inserted, Err(Error::Unreadable(_))), "{wrong}");
            assert_eq!(read(b, &key).await, None);
            let removed = b.remove_document(key, None).await;
            assert_eq!(removed, Ok(RemoveOutcome::Gone));
        }
    })
    .await;
}

#[tokio::test]
async fn documents_of_a_cluster_lie_in_one_slot() {
    let nodes = redis_server::cluster_with_replicas(0).await;
    let settings = Settings {
        mode: Mode::Cluster,
        urls: nodes.iter().map(Server::url).collect(),
        ..at(&nodes[0])
    };
    let store = open(&settings, &keep());
    for tag in 0..8 {
        let key = of(Tenant::tagged(tag), Collection::Batches, "batch_1");
        let new = NewDocument {
            due_ms: Some(tag),
            ..new("x")
        };
        insert(&store, &key, new).await;
        assert_eq!(read(&store, &key).await, version_of(1, "x"));
    }
    let found = store.due_documents(Collection::Batches, 9, 0..9).await;
    let found = found.unwrap();
    let tags = found.iter().map(|document| document.key.tenant);
    assert!(tags.eq((0..8).map(Tenant::tagged)));
    for document in found {
        let removed = store.remove_document(document.key, Some(1)).await;
        assert_eq!(removed, Ok(RemoveOutcome::Done));
    }
    let left: Vec<String> = nodes.iter().map(|node| node.cli(&["dbsize"])).collect();
    assert!(left.iter().all(|size| size.trim() == "0"), "{left:?}");
}

/// What a newer release has written is neither changed nor taken for missing, and keeps nobody from what else is due.
#[tokio::test]
async fn a_document_of_a_newer_release_is_unreadable_and_stays() {
    let server = Server::start().await;
    let store = open(&at(&server), &keep());
    let (newer, known) = (batch_key("a"), batch_key("b"));
    for key in [&newer, &known] {
        let new = NewDocument {
            due_ms: Some(1),
            ..new("x")
        };
        insert(&store, key, new).await;
    }
    let member = format!("{}:a", tenant());
    server.cli(&["hset", "wr:bd:{batches}:batch", &member, "9 whatever"]);
    let is_unreadable = |error: Error| matches!(error, Error::Unreadable(_));
    let found = store.document(newer.clone()).await;
    assert!(found.is_err_and(is_unreadable));
    let inserted = store.insert_document(newer.clone(), new("x"), WIDE).await;
    assert!(inserted.is_err_and(is_unreadable));
    let replaced = store.replace_document(newer.clone(), 1, "y".into(), None);
    assert!(replaced.await.is_err_and(is_unreadable));
    let removed = store.remove_document(newer, None).await;
    assert!(removed.is_err_and(is_unreadable));
    assert_eq!(due(&store, 1, 9).await, ["b"]);
    let listed = list(&store, None, 9, Order::OldestFirst).await;
    assert_eq!(ids(&listed.documents), ["b"]);
}

/// A list that Redis has evicted is not taken for an empty one.
#[tokio::test]
async fn a_list_that_was_lost_is_an_error() {
    let server = Server::start().await;
    let store = open(&at(&server), &keep());
    insert(&store, &batch_key("a"), new("x")).await;
    server.cli(&["del", &format!("wr:bl:{{batches}}:batch:{}", tenant())]);
    let page = DocumentPage {
        after: None,
        limit: 9,
        order: Order::OldestFirst,
    };
    let listed = store.documents(Collection::Batches, tenant(), page).await;
    assert!(matches!(listed, Err(Error::Unreadable(_))));
    assert_eq!(read(&store, &batch_key("a")).await, version_of(1, "x"));
}
