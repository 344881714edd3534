use proptest::prelude::*;

use super::*;
use crate::kv::event::Medium;

/// The payloads of a recording: each message's last frame.
macro_rules! recorded {
    ($name:literal) => {
        payloads(include_str!(concat!(
            "../../../tests/fixtures/kv/",
            $name,
            ".txt"
        )))
    };
}

fn payloads(recording: &str) -> Vec<Vec<u8>> {
    let messages = recording.lines().filter(|line| !line.starts_with('#'));
    messages
        .map(|message| {
            let payload = message.rsplit(' ').next().unwrap();
            let digits = payload.trim_start_matches('-').as_bytes();
            let pairs = digits.chunks(2).map(|pair| str::from_utf8(pair).unwrap());
            pairs
                .map(|pair| u8::from_str_radix(pair, 16).unwrap())
                .collect()
        })
        .collect()
}

fn batches(payloads: &[Vec<u8>]) -> Vec<Batch> {
    payloads.iter().map(|p| decode(p).unwrap()).collect()
}

fn stored(batch: &Batch) -> &Stored {
    let found = batch.events.iter().find_map(|event| match event {
        Event::Stored(stored) => Some(stored),
        _ => None,
    });
    found.unwrap()
}

fn why(payload: &[u8]) -> String {
    decode(payload).unwrap_err().0
}

#[test]
fn a_recorded_prompt_and_its_continuation_are_read_in_full() {
    let batches = batches(&recorded!("stored"));
    let first = Batch {
        joined: 0,
        timestamp: batches[0].timestamp,
        rank: Some(0),
        events: vec![Event::Stored(Stored {
            hashes: stored(&batches[0]).hashes.clone(),
            token_ids: stored(&batches[0]).token_ids.clone(),
            block_size: 32,
            location: Location {
                medium: Medium::Gpu,
                group: Some(0),
                ..Location::default()
            },
            spec_kind: Some("full_attention".into()),
            ..Stored::default()
        })],
    };
    assert_eq!(batches[0], first);
    assert!(batches[0].timestamp > 1.7e9);
    assert_eq!(stored(&batches[0]).hashes.len(), 1);
    assert_eq!(stored(&batches[0]).token_ids.len(), 32);
    assert_eq!(
        stored(&batches[1]).parent,
        Some(stored(&batches[0]).hashes[0])
    );
    assert!(stored(&batches[2]).session_id.is_some());
    let salted = stored(&batches[3]);
    let salt = ExtraKey::Text("tenant-7".into());
    assert_eq!(salted.extra_keys, [vec![salt], vec![], vec![]]);
    assert_eq!(salted.token_ids.len(), 96);
}

#[test]
fn the_numbers_of_a_recorded_block_are_exact() {
    let batch = &batches(&recorded!("lora"))[0];
    let block = stored(batch);
    assert_eq!(
        block.hashes,
        [
            EngineHash(0x97d3_df3a_96e1_db27),
            EngineHash(0x5469_169f_8c04_1d60)
        ]
    );
    assert_eq!(block.token_ids, Vec::from_iter(500..564));
}

#[test]
fn a_recorded_reset_comes_before_the_blocks_of_its_batch() {
    let batch = &batches(&recorded!("cleared"))[0];
    assert_eq!(batch.events[0], Event::Cleared { ownership: None });
    assert_eq!(stored(batch).hashes.len(), 3);
}

#[test]
fn recorded_byte_hashes_are_their_low_64_bits() {
    let payloads = recorded!("byte_hashes");
    let batches = batches(&payloads);
    let hashes = &stored(&batches[0]).hashes;
    assert_eq!(hashes.len(), 16);
    // The last eight bytes of the first digest stand in the payload as they are in the name.
    let first = hashes[0].0.to_be_bytes();
    assert!(payloads[0].windows(8).any(|window| window == first));
    let Event::Removed(removed) = &batches[1].events[0] else {
        panic!("{:?}", batches[1].events[0]);
    };
    assert_eq!(removed.hashes.len(), 1);
    assert_eq!(removed.location.medium, Medium::Gpu);
}

#[test]
fn recorded_adapters_ranks_and_pulled_blocks_are_read() {
    let lora = batches(&recorded!("lora"));
    assert_eq!(stored(&lora[1]).lora_name.as_deref(), Some("sql-lora"));
    assert_eq!(stored(&lora[1]).lora_id, Some(1));
    let keys = ["sql-lora", "abc"].map(|key| ExtraKey::Text(key.into()));
    assert_eq!(stored(&lora[2]).extra_keys[0], keys);
    assert_eq!(batches(&recorded!("second_rank"))[0].rank, Some(1));
    assert_eq!(stored(&batches(&recorded!("pulled"))[0]).hashes.len(), 12);
    let again = batches(&recorded!("stored_again"));
    assert_eq!(stored(&again[0]).hashes, stored(&again[2]).hashes);
    let evicted = &batches(&recorded!("evicted"))[0];
    assert_eq!((evicted.events.len(), evicted.joined), (2, 1));
    assert_eq!(batches(&recorded!("several_events"))[0].events.len(), 2);
}

#[test]
fn a_batch_may_be_a_map_and_lack_its_rank() {
    // {"events": [], "ts": 1.5, "later": {"a": [nil]}}
    let map = b"\x83\xa6events\x90\xa2ts\xcb\x3f\xf8\0\0\0\0\0\0\xa5later\x81\xa1a\x91\xc0";
    let batch = decode(map).unwrap();
    assert_eq!((batch.timestamp, batch.rank), (1.5, None));
    assert_eq!(decode(b"\x92\x01\x90").unwrap().timestamp, 1.0);
}

#[test]
fn the_oldest_array_layout_ends_after_the_medium() {
    // [0, [["BlockStored", [7], nil, [1, 2], 2, nil, "GPU"]]]
    let old = b"\x92\x00\x91\x97\xabBlockStored\x91\x07\xc0\x92\x01\x02\x02\xc0\xa3GPU";
    let batch = decode(old).unwrap();
    assert_eq!(stored(&batch).hashes, [EngineHash(7)]);
    assert_eq!(stored(&batch).token_ids, [1, 2]);
    assert_eq!(stored(&batch).location.medium, Medium::Gpu);
}

#[test]
fn unknown_types_and_keys_are_passed_over() {
    // [0, [{"a": 1, "type": "New", "block_hashes": "odd"}, ["Other", {}]], 3]
    let new =
        b"\x93\x00\x92\x83\xa1a\x01\xa4type\xa3New\xacblock_hashes\xa3odd\x92\xa5Other\x80\x03";
    let batch = decode(new).unwrap();
    let unknown = |kind: &str| Event::Unknown {
        kind: kind.into(),
        hashes: None,
    };
    assert_eq!(batch.events, [unknown("New"), unknown("Other")]);
    assert_eq!(batch.rank, Some(3));
}

#[test]
fn an_unknown_type_names_its_blocks_by_whatever_is_called_a_hash() {
    let check = |event: &[u8], expected: Option<&[u64]>| {
        let payload = [b"\x92\x00\x91".as_slice(), event].concat();
        let batch = decode(&payload).unwrap();
        let [Event::Unknown { hashes, .. }] = &batch.events[..] else {
            panic!("{batch:?}")
        };
        let hashes = hashes.as_ref().map(|hashes| {
            let numbers = hashes.iter().map(|hash| hash.0);
            numbers.collect::<Vec<_>>()
        });
        assert_eq!(hashes.as_deref(), expected, "{event:?}");
    };
    check(b"\x81\xa4type\xa3New", Some(&[]));
    check(
        b"\x83\xa4type\xa3New\xacblock_hashes\x92\x01\x02\xb1parent_block_hash\x09",
        Some(&[1, 2]),
    );
    check(b"\x82\xa4type\xa3New\xa8old_hash\x07", Some(&[7]));
    check(b"\x82\xa4type\xa3New\xa6hashes\x81\x01\x02", None);
    check(b"\x92\xa3New\x92\x01\x02", Some(&[1, 2]));
}

#[test]
fn extra_keys_of_every_form_are_kept() {
    // [["a", h'01', -2, ["image", 5], [1, 2], 2^64 - 1]] in the place of extra keys
    let mut payload =
        b"\x92\x00\x91\x99\xabBlockStored\x91\x07\xc0\x91\x01\x01\xc0\xc0\xc0".to_vec();
    payload.extend(b"\x91\x96\xa1a\xc4\x01\x01\xfe\x92\xa5image\x05\x92\x01\x02");
    payload.extend(b"\xcf\xff\xff\xff\xff\xff\xff\xff\xff");
    let batch = decode(&payload).unwrap();
    let expected = [
        ExtraKey::Text("a".into()),
        ExtraKey::Blob([1].into()),
        ExtraKey::Number(-2),
        ExtraKey::Multimodal {
            identifier: "image".into(),
            offset: 5,
        },
        ExtraKey::Blob(b"\x92\x01\x02"[..].into()),
        ExtraKey::Blob(b"\xcf\xff\xff\xff\xff\xff\xff\xff\xff"[..].into()),
    ];
    assert_eq!(stored(&batch).extra_keys, [Vec::from(expected)]);
}

#[test]
fn a_key_that_is_read_in_part_takes_nothing_of_the_one_behind_it() {
    let check = |first: &[u8], second: &[u8], expected: ExtraKey| {
        // [[first, second]] in the place of extra keys
        let mut payload =
            b"\x92\x00\x91\x99\xabBlockStored\x91\x07\xc0\x91\x01\x01\xc0\xc0\xc0".to_vec();
        payload.extend(b"\x91\x92");
        payload.extend(first);
        payload.extend(second);
        let batch = decode(&payload).unwrap();
        let keys = vec![ExtraKey::Blob(first.into()), expected];
        assert_eq!(stored(&batch).extra_keys, [keys]);
    };
    let above_2_63 = b"\xcf\xff\xff\xff\xff\xff\xff\xff\xff";
    let pair = ExtraKey::Multimodal {
        identifier: "id".into(),
        offset: 0,
    };
    check(above_2_63, b"\x92\xa2id\x00", pair);
    let not_utf8 = b"\xa1\xff";
    check(not_utf8, b"\xc4\x01\x01", ExtraKey::Blob([1].into()));
    check(not_utf8, b"\x05", ExtraKey::Number(5));
}

#[test]
fn the_tokens_after_each_block_are_among_its_keys() {
    // As vLLM 0.33 declares it: {"type": "BlockStored", "block_hashes": [7, 8], "parent_block_hash": nil,
    // "token_ids": [1, 2], "block_size": 1, "extra_keys": [nil, ["salt"]], "lookahead_token_ids": [[2, 3], [3, 4]]}
    let mut payload =
        b"\x92\x00\x91\x87\xa4type\xabBlockStored\xacblock_hashes\x92\x07\x08".to_vec();
    payload.extend(b"\xb1parent_block_hash\xc0\xa9token_ids\x92\x01\x02\xaablock_size\x01");
    payload.extend(b"\xaaextra_keys\x92\xc0\x91\xa4salt");
    let without = decode(&payload_of(6, &payload)).unwrap();
    assert_eq!(stored(&without).extra_keys[1].len(), 1);
    payload.extend(b"\xb3lookahead_token_ids\x92\x92\x02\x03\x92\x03\x04");
    let batch = decode(&payload).unwrap();
    let after = |tokens: [u32; 2]| ExtraKey::Lookahead(tokens.into());
    let expected = [
        vec![after([2, 3])],
        vec![ExtraKey::Text("salt".into()), after([3, 4])],
    ];
    assert_eq!(stored(&batch).extra_keys, expected);
    // Of another number of blocks: as many lists, so that the event is known to be inconsistent.
    payload.truncate(payload.len() - 7);
    payload.extend(b"\x93\x91\x02\xc0\x90");
    let batch = decode(&payload).unwrap();
    assert_eq!(stored(&batch).extra_keys.len(), 3);
    payload.truncate(payload.len() - 5);
    payload.extend(b"\x92\xa1x");
    assert!(
        why(&payload).contains("lookahead_token_ids[0]: expected"),
        "{}",
        why(&payload)
    );
}

/// The payload of one event, with the number of its fields set to `fields`.
fn payload_of(fields: u8, payload: &[u8]) -> Vec<u8> {
    let mut payload = payload.to_vec();
    payload[3] = 0x81 + fields - 1;
    payload
}

#[test]
fn errors_say_where() {
    assert_eq!(why(b""), "byte 0: expected a map, found the end");
    assert_eq!(
        why(b"\x92\x00\x91\x93\xabBlockStored\x91\xc0\xc0"),
        "byte 17, events[0].block_hashes[0]: expected an integer, found nothing (nil)"
    );
    assert_eq!(
        why(b"\x92\x00\x91\x92\xacBlockRemoved\x91\xc4\x00"),
        "byte 20, events[0].block_hashes[0]: a hash without bytes"
    );
    assert_eq!(
        why(b"\x92\x00\x91\x91\xabBlockStored"),
        "byte 16, events[0]: BlockStored without block_hashes"
    );
    assert_eq!(why(b"\x92\x00\x90\x01"), "byte 3: 1 bytes after the batch");
    assert_eq!(
        why(b"\x91\x00"),
        "byte 2: a batch without a timestamp or events"
    );
}

#[test]
fn a_lying_length_is_refused_before_anything_is_allocated() {
    let events = b"\x92\x00\xdd\xff\xff\xff\xff";
    assert_eq!(
        why(events),
        "byte 7, events: 4294967295 entries are announced, 0 bytes follow"
    );
    let tokens = b"\x92\x00\x91\x94\xabBlockStored\x90\xc0\xdd\x7f\xff\xff\xff\x01";
    assert!(why(tokens).contains("token_ids: 2147483647 entries are announced, 1 bytes follow"));
}

#[test]
fn deep_nesting_costs_no_stack() {
    let mut payload = b"\x93\x00\x90".to_vec();
    payload.extend(vec![0x91; 1_000_000]);
    assert!(why(&payload).contains("expected an integer"));
    // In a place that is skipped.
    payload[0] = 0x94;
    payload.insert(3, 0xc0);
    assert!(why(&payload).contains("1 entries are announced, 0 bytes follow"));
}

#[test]
fn counts_are_bounded() {
    let mut payload = b"\x92\x00\xdd\x00\x01\x00\x01".to_vec();
    payload.extend(b"\x91\xa1x".repeat(EVENTS_MAX + 1));
    assert!(why(&payload).contains("more than 65536 events"));
    let mut payload = b"\x92\x00\x91\x92\xacBlockRemoved\xdd\x00\x10\x00\x01".to_vec();
    payload.extend(vec![0; BLOCKS_MAX + 1]);
    assert!(why(&payload).contains("more than 1048576 hashes"));
}

#[test]
fn removals_in_a_row_become_one_event_if_they_are_of_the_same_place() {
    let removal = |hash: u8, group: u8| {
        let mut event = b"\x83\xa4type\xacBlockRemoved\xacblock_hashes\x91".to_vec();
        event.push(hash);
        event.extend_from_slice(b"\xa9group_idx");
        event.push(group);
        event
    };
    let clear = b"\x81\xa4type\xb0AllBlocksCleared".to_vec();
    let events = [
        removal(1, 0),
        removal(2, 0),
        removal(3, 1),
        removal(4, 1),
        clear,
        removal(5, 1),
    ];
    let payload = [&b"\x92\x01\x96"[..], &events.concat()].concat();
    let batch = decode(&payload).unwrap();
    let removed = |event: &Event| match event {
        Event::Removed(removed) => removed.hashes.iter().map(|hash| hash.0).collect(),
        _ => Vec::new(),
    };
    let hashes: Vec<Vec<u64>> = batch.events.iter().map(removed).collect();
    assert_eq!(hashes, [vec![1, 2], vec![3, 4], vec![], vec![5]]);
    assert_eq!(batch.joined, 2);
}

/// A removal of one block by its hash's bytes, or a clear.
fn some_event() -> impl Strategy<Value = Vec<u8>> {
    let hash = prop_oneof![
        6 => any::<u64>().prop_map(|hash| [&b"\xcf"[..], &hash.to_be_bytes()].concat()),
        2 => any::<[u8; 32]>().prop_map(|digest| [&b"\xc4\x20"[..], &digest].concat()),
        1 => any::<[u8; 5]>().prop_map(|digest| [&b"\xc4\x05"[..], &digest].concat()),
        1 => any::<u32>().prop_map(|hash| [&b"\xce"[..], &hash.to_be_bytes()].concat()),
        1 => (0u8..128).prop_map(|hash| vec![hash]),
    ];
    let kind = &b"\xa4type\xacBlockRemoved"[..];
    let removal = (hash, 0u8..12).prop_map(move |(hash, form)| {
        let hashes = [&b"\xacblock_hashes\x91"[..], &hash].concat();
        let twice = [&hashes[..], &hashes].concat();
        let array = [&b"\x93\xacBlockRemoved\x91"[..], &hash, b"\xa3CPU"].concat();
        match form {
            0 => array,
            1 => [b"\x82", &hashes[..], kind].concat(),
            2 => [b"\x83", kind, &twice].concat(),
            3 => [b"\x83", kind, &hashes, b"\xa9group_idx\x01"].concat(),
            _ => [b"\x83", kind, &hashes, b"\xa6medium\xa3GPU"].concat(),
        }
    });
    prop_oneof![
        20 => removal,
        1 => Just(b"\x81\xa4type\xb0AllBlocksCleared".to_vec()),
    ]
}

proptest! {
    #[test]
    fn events_in_a_row_are_read_as_each_is_alone(events in proptest::collection::vec(some_event(), 0..15)) {
        let header = [0x92, 0x01, 0x90 | events.len() as u8];
        let read = decode(&[&header[..], &events.concat()].concat()).unwrap();
        let mut expected = Batch { timestamp: 1.0, ..Batch::default() };
        for event in &events {
            let alone = decode(&[&b"\x92\x01\x91"[..], event].concat()).unwrap();
            match &alone.events[..] {
                [Event::Removed(removed)] => {
                    expected.remove(&removed.hashes, removed.location.clone());
                }
                others => expected.events.extend_from_slice(others),
            }
        }
        prop_assert_eq!(read, expected);
    }

    #[test]
    fn token_ids_are_read_whatever_their_lengths(ids in proptest::collection::vec(prop_oneof![0u32..128, 128u32..65_536, any::<u32>()], 0..200)) {
        let mut payload = b"\x92\x01\x91\x85\xa4type\xabBlockStored\xacblock_hashes\x91\x01\xb1parent_block_hash\xc0\xaablock_size\x10\xa9token_ids".to_vec();
        rmp::encode::write_array_len(&mut payload, ids.len() as u32).unwrap();
        for id in &ids {
            rmp::encode::write_uint(&mut payload, u64::from(*id)).unwrap();
        }
        let batch = decode(&payload).unwrap();
        prop_assert_eq!(&stored(&batch).token_ids, &ids);
        let cut = payload.len() - 1;
        prop_assert!(ids.is_empty() || decode(&payload[..cut]).is_err());
    }
}

#[test]
fn names_need_not_be_text_and_their_order_does_not_matter() {
    // {"later\xff": 1, "block_hashes": [7], "type": "BlockRemoved"}
    let event = b"\x83\xa6later\xff\x01\xacblock_hashes\x91\x07\xa4type\xacBlockRemoved";
    let payload = [&b"\x92\x01\x91"[..], event].concat();
    let removed = Event::Removed(crate::kv::event::Removed {
        hashes: vec![EngineHash(7)],
        location: Default::default(),
    });
    assert_eq!(decode(&payload).unwrap().events, [removed]);
    let lacking = b"\x92\x01\x91\x81\xa4type\xacBlockRemoved";
    assert!(why(lacking).contains("BlockRemoved without block_hashes"));
}
