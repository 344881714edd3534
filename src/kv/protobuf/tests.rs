use proptest::prelude::*;

use super::*;
use crate::kv::event::{Batch, EngineHash, Event, ExtraKey, Location, Medium, Removed, Stored};
use crate::kv::source::SnapshotChunk;

fn word() -> impl Strategy<Value = Box<str>> {
    "[a-z]{0,4}".prop_map(Into::into)
}

fn maybe_word() -> impl Strategy<Value = Option<Box<str>>> {
    proptest::option::of(word())
}

fn location() -> impl Strategy<Value = Location> {
    let medium = prop_oneof![
        Just(Medium::Unspecified),
        Just(Medium::Gpu),
        Just(Medium::Cpu),
        Just(Medium::Disk),
        word().prop_map(Medium::Other),
    ];
    let locality = proptest::option::of(prop_oneof![Just("LOCAL".into()), Just("REMOTE".into())]);
    (
        medium,
        proptest::option::of(0u32..3),
        locality,
        maybe_word(),
    )
        .prop_map(|(medium, group, locality, ownership)| Location {
            medium,
            group,
            locality,
            ownership,
        })
}

fn extra_key() -> impl Strategy<Value = ExtraKey> {
    prop_oneof![
        word().prop_map(ExtraKey::Text),
        proptest::collection::vec(any::<u8>(), 0..4).prop_map(|blob| ExtraKey::Blob(blob.into())),
        any::<i64>().prop_map(ExtraKey::Number),
        (word(), any::<i64>())
            .prop_map(|(identifier, offset)| ExtraKey::Multimodal { identifier, offset }),
        proptest::collection::vec(any::<u32>(), 1..4)
            .prop_map(|tokens| ExtraKey::Lookahead(tokens.into())),
    ]
}

fn stored() -> impl Strategy<Value = Event> {
    let hashes = proptest::collection::vec(any::<u64>(), 1..4);
    let words = (
        maybe_word(),
        maybe_word(),
        maybe_word(),
        maybe_word(),
        location(),
    );
    (
        hashes,
        1u32..4,
        any::<Option<u64>>(),
        any::<Option<i64>>(),
        words,
    )
        .prop_flat_map(|(hashes, size, parent, lora_id, words)| {
            let count = hashes.len();
            let tokens = proptest::collection::vec(any::<u32>(), count * size as usize);
            // One block without keys beside one with, but never a list that says nothing.
            let keys = proptest::collection::vec(extra_key(), 1..3)
                .prop_map(move |keys| {
                    let mut all = vec![Vec::new(); count];
                    all[0] = keys;
                    all
                })
                .boxed();
            let keys = prop_oneof![Just(Vec::new()), keys];
            (tokens, keys, any::<Option<u32>>()).prop_map(move |(token_ids, extra_keys, window)| {
                let (lora_name, cache_salt, spec_kind, session_id, location) = words.clone();
                Event::Stored(Stored {
                    hashes: hashes.iter().copied().map(EngineHash).collect(),
                    parent: parent.map(EngineHash),
                    token_ids,
                    block_size: size,
                    lora_id,
                    lora_name,
                    cache_salt,
                    extra_keys,
                    location,
                    spec_kind,
                    sliding_window: window,
                    session_id,
                })
            })
        })
}

fn event() -> impl Strategy<Value = Event> {
    let hashes = proptest::collection::vec(any::<u64>().prop_map(EngineHash), 0..4);
    prop_oneof![
        stored(),
        (hashes, location())
            .prop_map(|(hashes, location)| Event::Removed(Removed { hashes, location })),
        maybe_word().prop_map(|ownership| Event::Cleared { ownership }),
    ]
}

/// Removals of a row are read as one.
fn removals_joined(written: Batch) -> Batch {
    let (events, mut read) = (
        written.events,
        Batch {
            events: Vec::new(),
            ..written
        },
    );
    for event in events {
        match event {
            Event::Removed(removed) => read.remove(&removed.hashes, removed.location),
            other => read.events.push(other),
        }
    }
    read
}

proptest! {
    #[test]
    fn what_is_written_is_read(
        sequence: u64,
        timestamp in 0.0..1e10,
        rank in proptest::option::of(0u32..8),
        events in proptest::collection::vec(event(), 0..4),
        chunk in proptest::option::of((0u32..4, 1u32..4, 0u64..9)),
    ) {
        let snapshot = chunk.map(|(index, count, unknown_before)| SnapshotChunk { index, count, unknown_before });
        let batch = Batch { timestamp, rank, events, joined: 0 };
        let bytes = encode_batch(sequence, &batch, snapshot.map(|chunk| (chunk, 7))).unwrap().message;
        let expected = Message { sequence, batch: removals_joined(batch), snapshot, ..Message::default() };
        prop_assert_eq!(decode_batch(&bytes).unwrap(), expected);
    }

    #[test]
    fn what_was_damaged_is_read_or_refused(
        events in proptest::collection::vec(event(), 0..4),
        damage in proptest::collection::vec((any::<proptest::sample::Index>(), any::<u8>()), 1..4),
    ) {
        let batch = Batch { events, ..Batch::default() };
        let mut bytes = encode_batch(7, &batch, None).unwrap().message.to_vec();
        for (at, byte) in damage {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        let _ = digest(&bytes);
        if let Ok(read) = decode_batch(&bytes)
            && let Ok(written) = encode_batch(7, &read.batch, None)
        {
            let again = decode_batch(&written.message).unwrap();
            prop_assert_eq!(
                again.batch.events.len() + written.left_out.len(),
                read.batch.events.len()
            );
        }
    }

    #[test]
    fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
        let _ = decode_batch(&bytes);
        let _ = digest(&bytes);
        let _ = decode_request(&bytes);
    }
}

fn raw(events: Vec<message::KvCacheEvent>) -> Vec<u8> {
    let batch = message::KvEventBatch {
        events,
        ..message::KvEventBatch::default()
    };
    batch.encode_to_vec()
}

fn raw_stored(data: message::KvBlocksStored) -> Vec<Event> {
    let data = Some(message::kv_cache_event::Data::Stored(data));
    let bytes = raw(vec![message::KvCacheEvent { event_id: 1, data }]);
    decode_batch(&bytes).unwrap().batch.events
}

fn block(hash: i64, size: i32, tokens: &[u32]) -> message::KvBlock {
    message::KvBlock {
        block_hash: hash,
        token_ids: tokens.to_vec(),
        block_size: size,
        ..message::KvBlock::default()
    }
}

#[test]
fn a_name_is_the_low_64_bits_whatever_their_sign() {
    let events = raw_stored(message::KvBlocksStored {
        blocks: vec![block(-1, 1, &[5])],
        parent_block_hash: Some(i64::MIN),
        ..message::KvBlocksStored::default()
    });
    let [Event::Stored(stored)] = &events[..] else {
        panic!("{events:?}")
    };
    assert_eq!(stored.hashes, [EngineHash(u64::MAX)]);
    assert_eq!(stored.parent, Some(EngineHash(1 << 63)));
    assert_eq!(stored.location.medium, Medium::Unspecified);
}

#[test]
fn blocks_in_different_places_become_chained_events() {
    let mut on_host = block(2, 1, &[6]);
    on_host.cache_level = Some(1);
    let events = raw_stored(message::KvBlocksStored {
        blocks: vec![block(1, 1, &[5]), on_host, block(3, 2, &[7, 8])],
        parent_block_hash: Some(9),
        ..message::KvBlocksStored::default()
    });
    let said: Vec<_> = events
        .iter()
        .map(|event| match event {
            Event::Stored(event) => (
                event.parent.unwrap().0,
                event.hashes[0].0,
                event.block_size,
                event.location.medium.clone(),
            ),
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(
        said,
        [
            (9, 1, 1, Medium::Unspecified),
            (1, 2, 1, Medium::Cpu),
            (2, 3, 2, Medium::Unspecified)
        ]
    );
}

#[test]
fn blocks_that_make_up_for_each_others_length_are_names_without_tokens() {
    let events = raw_stored(message::KvBlocksStored {
        blocks: vec![block(1, 2, &[5, 6, 7]), block(2, 2, &[8])],
        ..message::KvBlocksStored::default()
    });
    let [Event::Stored(stored)] = &events[..] else {
        panic!("{events:?}")
    };
    assert_eq!(stored.hashes, [EngineHash(1), EngineHash(2)]);
    assert!(stored.token_ids.is_empty());
}

#[test]
fn a_placeholder_beside_a_real_store_takes_nothing_from_it() {
    let events = raw_stored(message::KvBlocksStored {
        blocks: vec![block(1, 0, &[]), block(2, 1, &[5])],
        ..message::KvBlocksStored::default()
    });
    let sizes = events.iter().map(|event| match event {
        Event::Stored(stored) => (stored.block_size, stored.token_ids.len()),
        other => panic!("{other:?}"),
    });
    assert_eq!(sizes.collect::<Vec<_>>(), [(0, 0), (1, 1)]);
}

#[test]
fn a_tier_and_a_medium_that_disagree_are_unknown() {
    for (word, tier, expected) in [
        (None, Some(1), Medium::Gpu),
        (Some("CPU_PINNED"), Some(2), Medium::Cpu),
        (Some("GPU"), Some(0), Medium::Gpu),
        (Some("NVME"), Some(3), Medium::Disk),
        (Some("NVME"), None, Medium::Other("NVME".into())),
        (Some("S3"), Some(4), Medium::Other("S3".into())),
    ] {
        let events = raw_stored(message::KvBlocksStored {
            blocks: vec![block(1, 1, &[5])],
            medium: word.map(str::to_owned),
            tier,
            ..message::KvBlocksStored::default()
        });
        let [Event::Stored(stored)] = &events[..] else {
            panic!("{events:?}")
        };
        assert_eq!(stored.location.medium, expected, "{word:?} {tier:?}");
    }
    let events = raw_stored(message::KvBlocksStored {
        blocks: vec![block(1, 1, &[5])],
        medium: Some("CPU".to_owned()),
        tier: Some(1),
        ..message::KvBlocksStored::default()
    });
    let [Event::Stored(stored)] = &events[..] else {
        panic!("{events:?}")
    };
    assert!(matches!(stored.location.medium, Medium::Other(_)));
}

#[test]
fn an_event_of_a_later_kind_is_told_as_unknown() {
    let bytes = raw(vec![message::KvCacheEvent {
        event_id: 1,
        data: None,
    }]);
    let events = decode_batch(&bytes).unwrap().batch.events;
    assert!(matches!(&events[..], [Event::Unknown { .. }]));
}

#[test]
fn what_has_no_message_is_left_out_and_the_rest_of_its_batch_is_not() {
    let stored = Stored {
        hashes: vec![EngineHash(1), EngineHash(2)],
        token_ids: vec![1, 2, 3],
        block_size: 2,
        ..Stored::default()
    };
    let check = |event| {
        let cleared = Event::Cleared { ownership: None };
        let batch = Batch {
            events: vec![cleared.clone(), event, cleared.clone()],
            ..Batch::default()
        };
        let encoded = encode_batch(1, &batch, None).unwrap();
        let read = decode_batch(&encoded.message).unwrap().batch.events;
        assert_eq!(read, [cleared.clone(), cleared]);
        let [left_out] = &encoded.left_out[..] else {
            panic!("{encoded:?}")
        };
        assert_eq!(left_out.index, 1);
        (left_out.reason, left_out.detail.clone())
    };
    let inconsistent = LeftOutReason::InconsistentFields;
    assert_eq!(
        check(Event::Stored(stored.clone())),
        (inconsistent, "3 tokens for 2 blocks of 2".to_owned())
    );
    let sizeless = Stored {
        block_size: 0,
        token_ids: vec![],
        ..stored
    };
    assert_eq!(
        check(Event::Stored(sizeless)),
        (
            LeftOutReason::NoTokens,
            "0 tokens for 2 blocks of 0".to_owned()
        )
    );
    let unknown = |hashes| Event::Unknown {
        kind: "New".into(),
        hashes,
    };
    assert_eq!(
        check(unknown(Some(vec![]))),
        (
            LeftOutReason::UnknownEvent,
            "an event of type New".to_owned()
        )
    );
    let batch = Batch {
        events: vec![unknown(None)],
        ..Batch::default()
    };
    let error = encode_batch(1, &batch, None).unwrap_err();
    assert_eq!(error, "an event of type New");
}

#[test]
fn what_was_removed_in_an_unknown_place_is_read_as_such() {
    let locality = |event| {
        let batch = Batch {
            events: vec![event],
            ..Batch::default()
        };
        let encoded = encode_batch(1, &batch, None).unwrap();
        match &decode_batch(&encoded.message).unwrap().batch.events[..] {
            [Event::Removed(removed)] => {
                assert_eq!(removed.hashes, [EngineHash(1)]);
                removed.location.locality.clone().unwrap()
            }
            other => panic!("{other:?}"),
        }
    };
    let near = Removed {
        hashes: vec![EngineHash(1)],
        location: Location {
            locality: Some("NEAR".into()),
            ..Location::default()
        },
    };
    assert_eq!(&*locality(Event::Removed(near)), "locality 15");
    let moved = Event::Unknown {
        kind: "Moved".into(),
        hashes: Some(vec![EngineHash(1)]),
    };
    assert_eq!(&*locality(moved), "locality 15");
}

#[test]
fn the_load_is_read_and_leaves_the_digest_as_it_is() {
    let without = message::KvEventBatch {
        sequence_number: 7,
        timestamp: 1.5,
        dp_rank: Some(2),
        ..message::KvEventBatch::default()
    };
    let with = message::KvEventBatch {
        load: Some(message::EngineLoad {
            running_requests: 3,
            load_only: true,
            ..message::EngineLoad::default()
        }),
        ..without.clone()
    };
    let later = message::KvEventBatch {
        sequence_number: 8,
        ..without.clone()
    };
    let [without, with, later] = [without, with, later].map(|batch| batch.encode_to_vec());
    let read = decode_batch(&with).unwrap();
    assert!(read.is_load_only);
    assert_eq!(read.load.unwrap().running_requests, 3);
    assert_eq!(digest(&with), digest(&without));
    assert_ne!(digest(&with), digest(&later));
}

#[test]
fn the_paths_are_those_of_the_servicers() {
    let paths = Service::ALL.map(Service::path);
    assert_eq!(
        paths,
        [
            "/vllm.grpc.engine.VllmEngine/SubscribeKvEvents",
            "/sglang.grpc.scheduler.SglangScheduler/SubscribeKvEvents",
            "/tokenspeed.grpc.scheduler.TokenSpeedScheduler/SubscribeKvEvents",
            "/trtllm.TrtllmService/SubscribeKvEvents",
        ]
    );
}

#[test]
fn a_request_says_after_which_batch() {
    assert_eq!(decode_request(&encode_request(5)), Ok(5));
    assert_eq!(decode_request(&encode_request(0)), Ok(0));
}
