//! Conversations: made, filled, paged, locked, deleted.

use std::time::Duration;

use bytes::Bytes;
use warmroute::store::conversation::Order;
use warmroute::store::{
    Claim, Commit, CommitRefusal, Error, Item, ItemOutcome, ItemsOutcome, LockOutcome,
    NewConversation, Page, PutOutcome, WriteOutcome,
};

use super::*;
use crate::cluster::eventually;

fn item(number: usize) -> Item {
    Item {
        id: format!("msg_{number}").into(),
        json: format!("{{\"n\":{number}}}").into(),
    }
}

fn items(numbers: std::ops::Range<usize>) -> Vec<Item> {
    numbers.map(item).collect()
}

fn turn(conversation: ConversationKey, token: IdempotencyToken, items: Vec<Item>) -> Commit {
    Commit {
        conversation,
        token,
        items,
    }
}

fn new(items: Vec<Item>) -> NewConversation {
    NewConversation {
        token: token(),
        object: Bytes::from_static(b"{\"conversation\":1}"),
        items,
    }
}

fn found(items: Vec<Item>) -> ItemsOutcome {
    ItemsOutcome::Found {
        items,
        has_more: false,
    }
}

const ALL: u64 = 1 << 40;

#[tokio::test]
async fn a_conversation_is_made_once_changed_and_deleted() {
    on_each(async |Pair { a, b, .. }| {
        let key = new_conversation_key();
        assert_eq!(a.conversation(key).await.unwrap(), None);
        let conversation = new(items(0..2));
        a.create_conversation(key, conversation.clone())
            .await
            .unwrap();
        // Its answer was lost.
        a.create_conversation(key, conversation.clone())
            .await
            .unwrap();
        assert_eq!(
            a.create_conversation(key, new(vec![])).await,
            Err(Error::Exists)
        );
        assert_eq!(
            b.conversation(key).await.unwrap(),
            Some(conversation.object)
        );
        assert_eq!(b.all_items(key, ALL).await.unwrap(), found(items(0..2)));
        let changed = Bytes::from_static(b"{\"conversation\":2}");
        assert!(b.update_conversation(key, changed.clone()).await.unwrap());
        assert_eq!(a.conversation(key).await.unwrap(), Some(changed));
        let foreign = ConversationKey {
            tenant: Tenant::tagged(1),
            ..key
        };
        assert_eq!(a.conversation(foreign).await.unwrap(), None);
        assert!(!a.delete_conversation(foreign).await.unwrap());
        assert!(a.delete_conversation(key).await.unwrap());
        assert!(!b.delete_conversation(key).await.unwrap());
        assert!(!b.update_conversation(key, Bytes::new()).await.unwrap());
        assert_eq!(b.conversation(key).await.unwrap(), None);
        assert_eq!(b.all_items(key, ALL).await.unwrap(), ItemsOutcome::Gone);
        assert_eq!(
            b.add_items(key, token(), items(0..1)).await.unwrap(),
            PutOutcome::Gone
        );
    })
    .await;
}

#[tokio::test]
async fn items_are_added_at_the_end_all_or_none() {
    on_each(async |Pair { a, b, .. }| {
        let key = new_conversation_key();
        a.create_conversation(key, new(items(0..2))).await.unwrap();
        let first = token();
        assert_eq!(
            a.add_items(key, first, items(2..5)).await.unwrap(),
            PutOutcome::Done
        );
        // Its answer was lost.
        assert_eq!(
            a.add_items(key, first, items(2..5)).await.unwrap(),
            PutOutcome::Done
        );
        // Others came between the lost answer and the repetition.
        let (early, late) = (token(), token());
        for (token, number) in [(early, 5), (late, 6)] {
            let put = a.add_items(key, token, vec![item(number)]).await.unwrap();
            assert_eq!(put, PutOutcome::Done);
        }
        for (token, number) in [(early, 5), (first, 2), (late, 6)] {
            let put = b.add_items(key, token, vec![item(number)]).await.unwrap();
            assert_eq!(put, PutOutcome::Done);
        }
        for number in [5, 6] {
            let deleted = a.delete_item(key, &item(number).id).await.unwrap();
            assert!(matches!(deleted, ItemOutcome::Found(_)));
        }
        let taken = PutOutcome::Taken("msg_4".into());
        assert_eq!(
            b.add_items(key, token(), vec![item(9), item(4)])
                .await
                .unwrap(),
            taken
        );
        assert_eq!(
            b.add_items(key, token(), vec![item(4), item(4)])
                .await
                .unwrap(),
            taken
        );
        assert_eq!(b.all_items(key, ALL).await.unwrap(), found(items(0..5)));
        let bytes: usize = items(0..5)
            .iter()
            .map(|item| item.id.len() + item.json.len())
            .sum();
        let bytes = bytes as u64;
        assert_eq!(b.all_items(key, bytes).await.unwrap(), found(items(0..5)));
        assert_eq!(
            b.all_items(key, bytes - 1).await.unwrap(),
            ItemsOutcome::TooLarge { bytes }
        );
    })
    .await;
}

#[tokio::test]
async fn pages_go_through_all_items_in_either_order() {
    on_each(async |Pair { a, b, .. }| {
        let key = new_conversation_key();
        a.create_conversation(key, new(items(0..20))).await.unwrap();
        assert_eq!(
            a.add_items(key, token(), items(20..33)).await.unwrap(),
            PutOutcome::Done
        );
        for order in [Order::OldestFirst, Order::NewestFirst] {
            let mut seen = Vec::new();
            let mut after = None;
            loop {
                let page = Page {
                    after,
                    limit: 7,
                    order,
                };
                let ItemsOutcome::Found { items, has_more } = b.items(key, page).await.unwrap()
                else {
                    panic!("not found");
                };
                after = items.last().map(|item| item.id.clone());
                seen.extend(items);
                if !has_more {
                    break;
                }
            }
            if order == Order::NewestFirst {
                seen.reverse();
            }
            assert_eq!(seen, items(0..33));
        }
        let page = |after: &str, limit| Page {
            after: Some(after.into()),
            limit,
            order: Order::OldestFirst,
        };
        let whole = b.items(key, page("msg_25", 7)).await.unwrap();
        assert_eq!(whole, found(items(26..33)));
        assert_eq!(
            b.items(key, page("msg_32", 7)).await.unwrap(),
            found(vec![])
        );
        assert_eq!(
            b.items(key, page("msg_99", 7)).await.unwrap(),
            ItemsOutcome::UnknownAfter
        );
        let gone = new_conversation_key();
        assert_eq!(
            b.items(gone, page("msg_1", 7)).await.unwrap(),
            ItemsOutcome::Gone
        );
    })
    .await;
}

#[tokio::test]
async fn one_item_is_read_and_deleted_by_its_id() {
    on_each(async |Pair { a, b, .. }| {
        let key = new_conversation_key();
        let conversation = new(items(0..3));
        a.create_conversation(key, conversation.clone())
            .await
            .unwrap();
        assert_eq!(
            b.item(key, "msg_1").await.unwrap(),
            ItemOutcome::Found(item(1).json)
        );
        let object = ItemOutcome::Found(conversation.object);
        assert_eq!(b.delete_item(key, "msg_1").await.unwrap(), object);
        assert_eq!(a.item(key, "msg_1").await.unwrap(), ItemOutcome::NoItem);
        assert_eq!(
            a.delete_item(key, "msg_1").await.unwrap(),
            ItemOutcome::NoItem
        );
        assert_eq!(
            a.all_items(key, ALL).await.unwrap(),
            found(vec![item(0), item(2)])
        );
        // Its id is free, and it comes last now.
        assert_eq!(
            a.add_items(key, token(), vec![item(1)]).await.unwrap(),
            PutOutcome::Done
        );
        let all = found(vec![item(0), item(2), item(1)]);
        assert_eq!(b.all_items(key, ALL).await.unwrap(), all);
        let gone = new_conversation_key();
        assert_eq!(b.item(gone, "msg_1").await.unwrap(), ItemOutcome::Gone);
        assert_eq!(
            b.delete_item(gone, "msg_1").await.unwrap(),
            ItemOutcome::Gone
        );
    })
    .await;
}

#[tokio::test]
async fn large_items_come_back_whole() {
    on_each_with(
        &RetentionSettings::default(),
        async |Pair { a, b, .. }| {
            let mut random = fastrand::Rng::with_seed(7);
            let mut large = |id: &str| Item {
                id: id.into(),
                json: (0..2 << 20).map(|_| random.u8(..)).collect(),
            };
            let (key, first, second) = (new_conversation_key(), large("1"), large("2"));
            a.create_conversation(key, new(vec![first.clone()]))
                .await
                .unwrap();
            let more = vec![item(7), second.clone()];
            assert_eq!(
                a.add_items(key, token(), more).await.unwrap(),
                PutOutcome::Done
            );
            let taken = a
                .add_items(key, token(), vec![second.clone()])
                .await
                .unwrap();
            assert_eq!(taken, PutOutcome::Taken("2".into()));
            assert_eq!(
                b.item(key, "2").await.unwrap(),
                ItemOutcome::Found(second.json.clone())
            );
            let all = found(vec![first, item(7), second.clone()]);
            assert!(b.all_items(key, ALL).await.unwrap() == all);
            assert!(matches!(
                b.delete_item(key, "1").await.unwrap(),
                ItemOutcome::Found(_)
            ));
            assert!(b.all_items(key, ALL).await.unwrap() == found(vec![item(7), second]));
            let too_large = Item {
                id: "3".into(),
                json: vec![b'x'; 64 << 20].into(),
            };
            let refused = a.add_items(key, token(), vec![too_large]).await;
            assert!(
                matches!(refused, Err(Error::TooLarge { .. })),
                "{refused:?}"
            );
        },
    )
    .await;
}

#[tokio::test]
async fn one_response_at_a_time_has_the_lock() {
    on_each(async |Pair { a, b, .. }| {
        let key = new_conversation_key();
        let claim = |token| Claim {
            token,
            lease: LEASE,
        };
        let (mine, theirs) = (token(), token());
        assert_eq!(a.lock(key, claim(mine)).await.unwrap(), LockOutcome::Gone);
        a.create_conversation(key, new(vec![])).await.unwrap();
        assert_eq!(a.lock(key, claim(mine)).await.unwrap(), LockOutcome::Locked);
        assert_eq!(a.lock(key, claim(mine)).await.unwrap(), LockOutcome::Locked);
        assert_eq!(b.lock(key, claim(theirs)).await.unwrap(), LockOutcome::Busy);
        assert_eq!(
            b.commit(turn(key, theirs, items(0..1))).await.unwrap(),
            PutOutcome::Unlocked
        );
        b.unlock(key, theirs).await.unwrap();
        assert_eq!(b.lock(key, claim(theirs)).await.unwrap(), LockOutcome::Busy);
        assert_eq!(
            a.commit(turn(key, mine, items(0..2))).await.unwrap(),
            PutOutcome::Done
        );
        // Its answer was lost, and meanwhile another has the lock.
        assert_eq!(
            b.lock(key, claim(theirs)).await.unwrap(),
            LockOutcome::Locked
        );
        assert_eq!(
            a.commit(turn(key, mine, items(0..2))).await.unwrap(),
            PutOutcome::Done
        );
        assert_eq!(b.lock(key, claim(mine)).await.unwrap(), LockOutcome::Busy);
        b.unlock(key, theirs).await.unwrap();
        assert_eq!(b.lock(key, claim(mine)).await.unwrap(), LockOutcome::Locked);
        assert_eq!(b.all_items(key, ALL).await.unwrap(), found(items(0..2)));
        assert!(b.delete_conversation(key).await.unwrap());
        assert_eq!(
            b.commit(turn(key, token(), items(5..6))).await.unwrap(),
            PutOutcome::Gone
        );
        b.unlock(key, mine).await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn a_background_response_ends_and_commits_in_one_write() {
    on_each(async |Pair { a, b, .. }| {
        let key = new_conversation_key();
        a.create_conversation(key, new(items(0..2))).await.unwrap();
        let response = || ResponseKey {
            tenant: key.tenant,
            id: ResponseId::new(key.id.root(), fastrand::u128(..)),
        };
        let (one, two) = (response(), response());
        let claim = Claim {
            token: token(),
            lease: LEASE,
        };
        assert_eq!(a.lock(key, claim).await, Ok(LockOutcome::Locked));
        let large = Item {
            id: "large".into(),
            json: (0..3 << 20).map(|_| fastrand::u8(..)).collect(),
        };
        let end = |items: Vec<Item>| Finalization {
            commit: Some(Commit {
                conversation: key,
                token: claim.token,
                items,
            }),
            ..ending(Status::Completed)
        };
        for key in [one, two] {
            a.create(key, queued()).await.unwrap();
        }
        let whole = end(vec![item(2), large.clone()]);
        // Not with an outdated token.
        let late = FencingToken { number: 7, ..FENCE };
        let refused = a.finalize(one, late, whole.clone()).await;
        assert_eq!(refused, Ok(WriteOutcome::Fenced));
        assert_eq!(b.all_items(key, 1 << 30).await, Ok(found(items(0..2))));
        for _ in 0..2 {
            let ended = a.finalize(one, FENCE, whole.clone()).await;
            assert_eq!(ended, Ok(WriteOutcome::Done));
        }
        let mut expected = items(0..3);
        expected.push(large);
        assert_eq!(b.all_items(key, 1 << 30).await, Ok(found(expected.clone())));
        // It is unlocked, so nothing of this end is written.
        let refused = |refusal| Ok(WriteOutcome::NotAdded(refusal));
        let batch = || Some(batch(0, 1));
        let late = Finalization {
            batch: batch(),
            commit: Some(Commit {
                conversation: key,
                token: token(),
                items: vec![item(9)],
            }),
            ..ending(Status::Completed)
        };
        let ended = a.finalize(two, FENCE, late).await;
        assert_eq!(ended, refused(CommitRefusal::Unlocked));
        assert_eq!(b.all_items(key, 1 << 30).await, Ok(found(expected.clone())));
        let record = b.get(two).await.unwrap().unwrap();
        assert_eq!(record.status, Status::Queued);
        assert_eq!(record.background.unwrap().last_event, None);
        let again = Claim {
            token: token(),
            ..claim
        };
        assert_eq!(a.lock(key, again).await, Ok(LockOutcome::Locked));
        let with = |items: Vec<Item>| Finalization {
            batch: batch(),
            commit: Some(Commit {
                conversation: key,
                token: again.token,
                items,
            }),
            ..ending(Status::Completed)
        };
        let ended = a.finalize(two, FENCE, with(items(2..3))).await;
        assert_eq!(ended, refused(CommitRefusal::Taken));
        let ended = a.finalize(two, FENCE, with(items(3..4))).await;
        assert_eq!(ended, Ok(WriteOutcome::Done));
        expected.push(item(3));
        assert_eq!(b.all_items(key, 1 << 30).await, Ok(found(expected)));
        // The conversation is deleted, and this one ends without it.
        let three = response();
        a.create(three, queued()).await.unwrap();
        assert!(b.delete_conversation(key).await.unwrap());
        let ended = a.finalize(three, FENCE, with(items(4..5))).await;
        assert_eq!(ended, refused(CommitRefusal::Gone));
        let ended = a.finalize(three, FENCE, ending(Status::Failed)).await;
        assert_eq!(ended, Ok(WriteOutcome::Done));
    })
    .await;
}

#[tokio::test]
async fn an_end_whose_items_are_too_large_for_the_conversation_is_refused() {
    let keep = RetentionSettings {
        max_record: 64 << 10,
        ..keep()
    };
    on_each_with(&keep, async |Pair { a, b, .. }| {
        let key = new_conversation_key();
        a.create_conversation(key, new(vec![])).await.unwrap();
        let claim = Claim {
            token: token(),
            lease: LEASE,
        };
        assert_eq!(a.lock(key, claim).await, Ok(LockOutcome::Locked));
        let response = ResponseKey {
            tenant: key.tenant,
            id: ResponseId::new(key.id.root(), 1),
        };
        a.create(response, queued()).await.unwrap();
        let large = Item {
            id: "large".into(),
            json: vec![b' '; 65 << 10].into(),
        };
        let end = Finalization {
            commit: Some(Commit {
                conversation: key,
                token: claim.token,
                items: vec![large],
            }),
            ..ending(Status::Completed)
        };
        let ended = a.finalize(response, FENCE, end).await;
        let refused = WriteOutcome::NotAdded(CommitRefusal::TooLarge);
        assert_eq!(ended, Ok(refused));
        let record = b.get(response).await.unwrap().unwrap();
        assert_eq!(record.status, Status::Queued);
        assert_eq!(b.all_items(key, ALL).await, Ok(found(vec![])));
    })
    .await;
}

#[tokio::test]
async fn a_lock_is_renewed_for_its_holder_alone() {
    on_each(async |Pair { a, b, .. }| {
        let key = new_conversation_key();
        let (mine, theirs) = (token(), token());
        let claim = |token| Claim {
            token,
            lease: LEASE,
        };
        let renewed = async |token| a.renew_lock(key, claim(token)).await.unwrap();
        assert_eq!(renewed(mine).await, LockOutcome::Gone);
        a.create_conversation(key, new(vec![])).await.unwrap();
        assert_eq!(renewed(mine).await, LockOutcome::Lost);
        let brief = Claim {
            token: mine,
            lease: Duration::from_millis(50),
        };
        assert_eq!(a.lock(key, brief).await.unwrap(), LockOutcome::Locked);
        tokio::time::sleep(Duration::from_millis(80)).await;
        // Its lease has run out, and nobody else took it.
        assert_eq!(renewed(mine).await, LockOutcome::Locked);
        assert_eq!(b.lock(key, claim(theirs)).await.unwrap(), LockOutcome::Busy);
        assert_eq!(a.lock(key, brief).await.unwrap(), LockOutcome::Locked);
        eventually("the lease runs out", async || {
            b.lock(key, claim(theirs)).await.unwrap() == LockOutcome::Locked
        })
        .await;
        assert_eq!(renewed(mine).await, LockOutcome::Lost);
        // Not even once the other response has added its turn.
        let put = b.commit(turn(key, theirs, items(0..1))).await.unwrap();
        assert_eq!(put, PutOutcome::Done);
        assert_eq!(renewed(mine).await, LockOutcome::Lost);
    })
    .await;
}

#[tokio::test]
async fn a_response_and_its_items_are_created_in_one_write_or_not_at_all() {
    on_each(async |Pair { a, b, .. }| {
        let key = new_conversation_key();
        a.create_conversation(key, new(items(0..2))).await.unwrap();
        let response = || ResponseKey {
            tenant: key.tenant,
            id: ResponseId::new(key.id.root(), fastrand::u128(..)),
        };
        let claim = Claim {
            token: token(),
            lease: LEASE,
        };
        let commit = |items: Vec<Item>| Commit {
            conversation: key,
            token: claim.token,
            items,
        };
        // Without the lock, and with an item that is there already.
        let one = response();
        let put = a.create_in_conversation(one, finished(), commit(items(2..3)));
        assert_eq!(put.await, Ok(PutOutcome::Unlocked));
        assert_eq!(a.lock(key, claim).await, Ok(LockOutcome::Locked));
        let put = a.create_in_conversation(one, finished(), commit(items(1..3)));
        assert_eq!(put.await, Ok(PutOutcome::Taken("msg_1".into())));
        assert!(b.get(one).await.unwrap().is_none());
        assert_eq!(b.all_items(key, ALL).await, Ok(found(items(0..2))));
        let large = Item {
            id: "large".into(),
            json: (0..3 << 20).map(|_| fastrand::u8(..)).collect(),
        };
        let record = finished();
        for _ in 0..2 {
            // The second time its answer was lost.
            let items = vec![item(2), large.clone()];
            let put = a.create_in_conversation(one, record.clone(), commit(items));
            assert_eq!(put.await, Ok(PutOutcome::Done));
        }
        let mut expected = items(0..3);
        expected.push(large);
        assert_eq!(b.all_items(key, ALL).await, Ok(found(expected.clone())));
        let stored = b.get(one).await.unwrap().unwrap();
        assert_eq!((stored.status, stored.previous), (Status::Completed, None));
        // The lock went with it, and another response has the id.
        let two = response();
        let late = Commit {
            token: token(),
            ..commit(items(3..4))
        };
        let put = a.create_in_conversation(two, finished(), late.clone());
        assert_eq!(put.await, Ok(PutOutcome::Unlocked));
        let put = a.create_in_conversation(one, finished(), commit(items(3..4)));
        assert_eq!(put.await, Err(Error::Exists));
        assert!(b.delete_conversation(key).await.unwrap());
        let put = a.create_in_conversation(two, finished(), late);
        assert_eq!(put.await, Ok(PutOutcome::Gone));
        assert!(b.get(two).await.unwrap().is_none());
    })
    .await;
}

#[tokio::test]
async fn a_large_conversation_is_read_a_thousand_items_at_a_time() {
    let server = Server::start().await;
    let store = open(&at(&server), &keep());
    let key = new_conversation_key();
    store
        .create_conversation(key, new(items(0..2)))
        .await
        .unwrap();
    for from in (2..4_500).step_by(500) {
        let more = items(from..(from + 500).min(4_500));
        let put = store.add_items(key, token(), more).await;
        assert_eq!(put, Ok(PutOutcome::Done));
    }
    // The script is known there from now on.
    assert_eq!(
        store.all_items(key, 1 << 30).await,
        Ok(found(items(0..4_500)))
    );
    let listening = server.listen().await;
    let all = store.all_items(key, 1 << 30).await;
    assert_eq!(all, Ok(found(items(0..4_500))));
    assert_eq!(listening.commands().await, ["evalsha"; 5]);
}

#[tokio::test]
async fn a_lock_whose_lease_ran_out_is_the_next_ones() {
    on_each(async |Pair { a, b, .. }| {
        let key = new_conversation_key();
        a.create_conversation(key, new(vec![])).await.unwrap();
        let (mine, theirs) = (token(), token());
        let brief = Claim {
            token: mine,
            lease: Duration::from_millis(100),
        };
        assert_eq!(a.lock(key, brief).await.unwrap(), LockOutcome::Locked);
        let claim = Claim {
            token: theirs,
            lease: LEASE,
        };
        eventually("the lease runs out", async || {
            b.lock(key, claim).await.unwrap() == LockOutcome::Locked
        })
        .await;
        assert_eq!(
            a.commit(turn(key, mine, items(0..1))).await.unwrap(),
            PutOutcome::Unlocked
        );
        assert_eq!(
            b.commit(turn(key, theirs, items(0..1))).await.unwrap(),
            PutOutcome::Done
        );
    })
    .await;
}

#[tokio::test]
async fn a_repeated_write_is_known_after_fifteen_others_and_not_after_more() {
    on_each(async |Pair { a, b, .. }| {
        let key = new_conversation_key();
        a.create_conversation(key, new(vec![])).await.unwrap();
        let first = token();
        let again = async || b.add_items(key, first, items(0..1)).await.unwrap();
        assert_eq!(again().await, PutOutcome::Done);
        for number in 1..16 {
            let put = a.add_items(key, token(), vec![item(number)]).await;
            assert_eq!(put.unwrap(), PutOutcome::Done);
        }
        assert_eq!(again().await, PutOutcome::Done);
        let put = a.add_items(key, token(), vec![item(16)]).await;
        assert_eq!(put.unwrap(), PutOutcome::Done);
        assert_eq!(again().await, PutOutcome::Taken("msg_0".into()));
    })
    .await;
}
