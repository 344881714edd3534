use proptest::option::of as some;
use proptest::prelude::*;

use super::*;
use crate::kv::event::Location;
use crate::kv::msgpack::decode;

const LAYOUTS: [(Layout, Hashes); 4] = [
    (Layout::Map, Hashes::Int),
    (Layout::Map, Hashes::Bytes),
    (Layout::Array, Hashes::Int),
    (Layout::Array, Hashes::Bytes),
];

/// The payloads of a recording: each message's last frame.
macro_rules! recorded {
    ($name:literal) => {
        payloads(include_str!(concat!(
            "../../../../../tests/fixtures/kv/",
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

#[test]
fn our_own_map_layout_is_the_recorded_one_byte_for_byte() {
    for payload in recorded!("stored").iter().chain(&recorded!("evicted")) {
        let batch = decode(payload).unwrap();
        let as_sent = one_removal_a_block(batch.clone());
        assert_eq!(&encode(&as_sent, Layout::Map, Hashes::Int), payload);
        let batch = Batch { joined: 0, ..batch };
        assert_eq!(
            decode(&encode(&batch, Layout::Map, Hashes::Int)).unwrap(),
            batch
        );
    }
}

/// The batch as its engine sent it, before removals in a row were joined.
fn one_removal_a_block(batch: Batch) -> Batch {
    let events = batch.events.into_iter().flat_map(|event| match event {
        Event::Removed(Removed { hashes, location }) => {
            let removal = |hash| {
                Event::Removed(Removed {
                    hashes: vec![hash],
                    location: location.clone(),
                })
            };
            hashes.into_iter().map(removal).collect()
        }
        other => vec![other],
    });
    Batch {
        events: events.collect(),
        joined: 0,
        ..batch
    }
}

/// The batch as it is read: with removals in a row joined.
fn with_removals_joined(batch: Batch) -> Batch {
    let (mut events, mut joined) = (Vec::new(), 0);
    for event in batch.events {
        match (events.last_mut(), event) {
            (Some(Event::Removed(last)), Event::Removed(next))
                if last.location == next.location =>
            {
                last.hashes.extend(next.hashes);
                joined += 1;
            }
            (_, event) => events.push(event),
        }
    }
    Batch {
        events,
        joined,
        ..batch
    }
}

fn text() -> impl Strategy<Value = Box<str>> {
    "[a-z0-9-]{0,40}".prop_map(Box::from)
}

fn medium() -> impl Strategy<Value = Medium> {
    let other = "[a-z]{1,8}".prop_map(|name| Medium::Other(name.into()));
    prop_oneof![
        Just(Medium::Unspecified),
        Just(Medium::Gpu),
        Just(Medium::Cpu),
        Just(Medium::Disk),
        other
    ]
}

fn location() -> impl Strategy<Value = Location> {
    (medium(), some(any::<u32>()), some(text()), some(text())).prop_map(
        |(medium, group, locality, ownership)| Location {
            medium,
            group,
            locality,
            ownership,
        },
    )
}

fn hashes() -> impl Strategy<Value = Vec<EngineHash>> {
    proptest::collection::vec(any::<u64>().prop_map(EngineHash), 0..20)
}

fn extra_keys() -> impl Strategy<Value = Vec<ExtraKey>> {
    let key = prop_oneof![
        text().prop_map(ExtraKey::Text),
        any::<Vec<u8>>().prop_map(|bytes| ExtraKey::Blob(bytes.into())),
        any::<i64>().prop_map(ExtraKey::Number),
        (text(), any::<i64>())
            .prop_map(|(identifier, offset)| ExtraKey::Multimodal { identifier, offset }),
    ];
    proptest::collection::vec(key, 0..3)
}

fn stored_event() -> impl Strategy<Value = Event> {
    let keys = proptest::collection::vec(extra_keys(), 20);
    let content = (
        hashes(),
        some(any::<u64>()),
        proptest::collection::vec(any::<u32>(), 0..100),
        any::<u32>(),
        keys,
    );
    let rest = (
        some(any::<i64>()),
        some(text()),
        location(),
        some(text()),
        some(any::<u32>()),
        some(text()),
    );
    (content, rest).prop_map(|(content, rest)| {
        let (hashes, parent, token_ids, block_size, mut extra_keys) = content;
        let (lora_id, lora_name, location, spec_kind, sliding_window, session_id) = rest;
        extra_keys.truncate(hashes.len());
        if extra_keys.iter().all(Vec::is_empty) {
            extra_keys.clear();
        }
        Event::Stored(Stored {
            hashes,
            parent: parent.map(EngineHash),
            token_ids,
            block_size,
            lora_id,
            lora_name,
            cache_salt: None,
            extra_keys,
            location,
            spec_kind,
            sliding_window,
            session_id,
        })
    })
}

fn batch() -> impl Strategy<Value = Batch> {
    let event = prop_oneof![
        stored_event(),
        (hashes(), location())
            .prop_map(|(hashes, location)| Event::Removed(Removed { hashes, location })),
        some(text()).prop_map(|ownership| Event::Cleared { ownership }),
        "[A-Z][a-z]{0,8}".prop_map(|kind| Event::Unknown {
            kind: kind.into(),
            hashes: Some(Vec::new()),
        }),
    ];
    (
        0.0..4e9,
        some(any::<u32>()),
        proptest::collection::vec(event, 0..6),
    )
        .prop_map(|(timestamp, rank, events)| Batch {
            joined: 0,
            timestamp,
            rank,
            events,
        })
}

#[test]
fn the_tokens_after_blocks_are_written_as_their_own_field() {
    let after = |tokens: [u32; 2]| vec![ExtraKey::Lookahead(tokens.into())];
    let batch = Batch {
        events: vec![Event::Stored(Stored {
            hashes: vec![EngineHash(1), EngineHash(2)],
            token_ids: vec![1, 2],
            block_size: 1,
            extra_keys: vec![after([2, 3]), after([3, 4])],
            ..Stored::default()
        })],
        ..Batch::default()
    };
    let payload = encode(&batch, Layout::Map, Hashes::Int);
    assert_eq!(decode(&payload).unwrap(), batch);
    let name = b"lookahead_token_ids";
    assert!(payload.windows(name.len()).any(|window| window == name));
}

proptest! {
    #[test]
    fn what_is_written_in_any_layout_is_read_again(batch in batch()) {
        let expected = with_removals_joined(batch.clone());
        for (layout, hashes) in LAYOUTS {
            prop_assert_eq!(&decode(&encode(&batch, layout, hashes)).unwrap(), &expected);
        }
    }

    #[test]
    fn a_cut_payload_is_an_error(batch in batch(), at in any::<prop::sample::Index>()) {
        let payload = encode(&batch, Layout::Map, Hashes::Int);
        prop_assert!(decode(&payload[..at.index(payload.len())]).is_err());
    }

    #[test]
    fn changed_bytes_never_panic(
        batch in batch(),
        at in any::<prop::sample::Index>(),
        byte in any::<u8>(),
    ) {
        let mut payload = encode(&batch, Layout::Array, Hashes::Int);
        let at = at.index(payload.len());
        payload[at] = byte;
        let _ = decode(&payload);
    }
}
