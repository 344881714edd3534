//! KV events as a subscriber sees them.

use std::collections::BTreeMap;
use std::num::{NonZeroU16, NonZeroU32, NonZeroUsize};

use bytes::Bytes;
use tokio::time::timeout;
use zeromq::{SocketRecv, SocketSend, ZmqMessage};

use super::event_clients::{Asker, MOMENT, Message, Subscriber, number, sequences, with_events};
use super::*;
use crate::kv::event::{EngineHash, Event};
use crate::sim::worker::publisher::{Hashes, Layout};

/// Follows batches as a consumer that counts copies would.
fn follow<'a>(batches: impl IntoIterator<Item = &'a Message>) -> BTreeMap<u64, usize> {
    let mut held = BTreeMap::new();
    for event in batches
        .into_iter()
        .flat_map(|message| message.batch().events)
    {
        match event {
            Event::Stored(stored) => {
                assert!(
                    stored
                        .parent
                        .is_none_or(|parent| held.contains_key(&parent.0))
                );
                for EngineHash(name) in stored.hashes {
                    *held.entry(name).or_default() += 1;
                }
            }
            Event::Removed(removed) => {
                for EngineHash(name) in removed.hashes {
                    let copies = held.get_mut(&name).expect("it was stored");
                    *copies -= 1;
                    if *copies == 0 {
                        held.remove(&name);
                    }
                }
            }
            Event::Cleared { .. } => held.clear(),
            Event::Unknown { kind, .. } => panic!("{kind}"),
        }
    }
    held
}

fn held(truth: &CacheContents) -> BTreeMap<u64, usize> {
    let held = truth.blocks.iter();
    held.map(|held| (held.hash.0, held.copies)).collect()
}

#[tokio::test]
async fn each_step_is_a_batch_of_its_own_number() {
    let worker = Running::start(Settings {
        kv: publisher::Settings {
            topic: "kv-events".to_owned(),
            ..publisher::Settings::loopback()
        },
        ..with_events()
    })
    .await;
    let mut subscriber = Subscriber::join(&worker, 0).await;
    let first = worker.last_sequence(0).unwrap() + 1;
    worker.read(0, 0..40).await;
    // All in the cache: this reports nothing.
    worker.read(0, 0..40).await;
    worker.read(0, 0..56).await;
    let message = subscriber.next().await;
    assert_eq!(
        (&message.topic[..], message.sequence),
        (&b"kv-events"[..], first)
    );
    let batch = message.batch();
    assert_eq!(batch.rank, Some(0));
    assert!(batch.timestamp > 1.7e9, "{batch:?}");
    let [Event::Stored(one)] = &batch.events[..] else {
        panic!("{batch:?}");
    };
    assert_eq!((one.parent, one.block_size), (None, 16));
    assert_eq!(one.token_ids, (0..32).collect::<Vec<u32>>());
    let message = subscriber.next().await;
    assert_eq!(message.sequence, first + 1);
    let [Event::Stored(two)] = &message.batch().events[..] else {
        panic!("{message:?}");
    };
    assert_eq!(two.parent, one.hashes.last().copied());
    assert_eq!(two.token_ids, (32..48).collect::<Vec<u32>>());
    worker.stop().await;
}

#[tokio::test]
async fn replayed_events_add_up_to_the_cached_blocks() {
    let worker = Running::start(Settings {
        cache_blocks: NonZeroU32::new(8).unwrap(),
        ..with_events()
    })
    .await;
    let mut asker = Asker::connect(&worker, 0).await;
    for prompt in [0..64, 0..64, 0..64, 500..600, 0..70, 10..90] {
        worker.read(0, prompt).await;
        let truth = worker.handle.cache_contents(0);
        let replayed = asker.replay(0).await;
        assert_eq!(
            replayed.last().map(|message| message.sequence),
            truth.last_sequence
        );
        assert_eq!(follow(&replayed), held(&truth));
        assert!(truth.blocks.iter().all(|held| held.token_ids.len() == 16));
    }
    // A reset is published with the next step, before its other events.
    assert!(worker.handle.reset());
    assert_eq!(worker.handle.cache_contents(0).blocks, []);
    let before = asker.replay(0).await.len();
    worker.read(0, 0..20).await;
    let replayed = asker.replay(0).await;
    let [last] = &replayed[before..] else {
        panic!("{replayed:?}");
    };
    let events = last.batch().events;
    assert!(
        matches!(events[..], [Event::Cleared { .. }, Event::Stored(_)]),
        "{events:?}"
    );
    assert_eq!(follow(&replayed), held(&worker.handle.cache_contents(0)));
    worker.stop().await;
}

#[tokio::test]
async fn a_replay_begins_where_asked_and_has_an_end() {
    let worker = Running::start(Settings {
        kv: publisher::Settings {
            first_sequence: 50,
            buffer_steps: NonZeroUsize::new(3).unwrap(),
            ..publisher::Settings::loopback()
        },
        ..with_events()
    })
    .await;
    let mut asker = Asker::connect(&worker, 0).await;
    assert_eq!(sequences(&asker.replay(0).await), [0_u64; 0]);
    for prompt in 0..5 {
        worker.read(0, 100 * prompt..100 * prompt + 16).await;
    }
    assert_eq!(sequences(&asker.replay(53).await), [53, 54]);
    assert_eq!(sequences(&asker.replay(50).await), [52, 53, 54]);
    assert_eq!(sequences(&asker.replay(99).await), [0_u64; 0]);
    // What has another shape gets no answer.
    let request = ZmqMessage::from(Bytes::from_static(b"12345678"));
    asker.socket.send(request).await.unwrap();
    asker.hears_nothing().await;
    assert_eq!(sequences(&asker.replay(54).await), [54]);
    worker.stop().await;
}

#[tokio::test]
async fn the_bytes_are_those_of_a_real_engine() {
    let worker = Running::start(Settings {
        models: vec!["tiny".to_owned(), "sql-lora".to_owned()],
        block_tokens: NonZeroU32::new(32).unwrap(),
        ..with_events()
    })
    .await;
    let mut asker = Asker::connect(&worker, 0).await;
    let prompt: Vec<u32> = (500..565).collect();
    let body = serde_json::json!({
        "model": "sql-lora", "cache_salt": "abc", "prompt": prompt, "max_tokens": 1,
    });
    worker.post_json("/v1/completions", &body.to_string()).await;
    assert!(worker.handle.reset());
    worker.read(0, 300..400).await;
    let replayed = asker.replay(0).await;
    assert_eq!(masked(&replayed[0].payload), masked(&recorded(ADAPTER)));
    assert_eq!(masked(&replayed[1].payload), masked(&recorded(CLEARED)));
    worker.stop().await;
}

/// What vLLM 0.32 published for 65 tokens from 500 on with an adapter and a salt, among others.
const ADAPTER: &str = include_str!("../../../../tests/fixtures/kv/lora.txt");
/// What it published for the 100 tokens from 300 on, after a reset.
const CLEARED: &str = include_str!("../../../../tests/fixtures/kv/cleared.txt");

/// The payload of a recording's last message.
fn recorded(recording: &str) -> Vec<u8> {
    let hex = recording.trim_end().rsplit(' ').next().unwrap();
    let digits = hex.as_bytes().chunks(2);
    let byte = |two| u8::from_str_radix(std::str::from_utf8(two).unwrap(), 16).unwrap();
    digits.map(byte).collect()
}

/// The payload without what two engines cannot have in common: the time and the names.
fn masked(payload: &[u8]) -> Vec<u8> {
    let mut payload = payload.to_vec();
    payload[2..10].fill(0);
    let is_stored_or_parent = |rest: &[u8]| rest[0] == 0xcf;
    let mut place = 10;
    while place + 9 <= payload.len() {
        if is_stored_or_parent(&payload[place..]) {
            payload[place + 1..place + 9].fill(0);
            place += 8;
        }
        place += 1;
    }
    payload
}

#[tokio::test]
async fn older_engines_write_arrays_and_leave_the_topic_out_of_replays() {
    let worker = Running::start(Settings {
        cache_blocks: NonZeroU32::new(4).unwrap(),
        kv: publisher::Settings {
            layout: Layout::Array,
            hashes: Hashes::Bytes,
            topic: "t".to_owned(),
            ..publisher::Settings::loopback()
        },
        ..with_events()
    })
    .await;
    worker.read(0, 0..40).await;
    worker.read(0, 100..140).await;
    let mut asker = Asker::connect(&worker, 0).await;
    asker.ask(0).await;
    let mut replayed = Vec::new();
    loop {
        let [sequence, payload] = <[Bytes; 2]>::try_from(asker.frames().await).unwrap();
        let sequence = number(&sequence);
        if sequence == u64::MAX {
            break;
        }
        replayed.push(Message {
            topic: Bytes::new(),
            sequence,
            payload,
        });
    }
    assert_eq!(sequences(&replayed), [0, 1]);
    // An array of type and names, and the names as the 32 bytes of a hash.
    let head = b"\xabBlockStored\x92\xc4\x20";
    assert_eq!(replayed[0].payload[12..12 + head.len()], head[..]);
    assert_eq!(follow(&replayed), held(&worker.handle.cache_contents(0)));
    worker.stop().await;
}

#[tokio::test]
async fn each_rank_has_a_cache_and_numbers_of_its_own() {
    let worker = Running::start(Settings {
        data_parallel_size: NonZeroU16::new(2).unwrap(),
        ..with_events()
    })
    .await;
    for (rank, prompts) in [(0, 1), (1, 3)] {
        for prompt in 0..prompts {
            worker.read(rank, 100 * prompt..100 * prompt + 16).await;
        }
    }
    let (zero, one) = (
        worker.handle.cache_contents(0),
        worker.handle.cache_contents(1),
    );
    assert_eq!((zero.blocks.len(), zero.last_sequence), (1, Some(0)));
    assert_eq!((one.blocks.len(), one.last_sequence), (3, Some(2)));
    let replayed = Asker::connect(&worker, 1).await.replay(0).await;
    assert_eq!(replayed[2].batch().rank, Some(1));

    let refused = worker.read(2, 0..16).await;
    let expected = "data_parallel_rank 2 is out of range [0, 2).";
    assert_eq!(refused["error"]["message"], expected);

    // Without a pin they take turns, whatever the header says.
    let mut stored = Vec::new();
    for text in ["one", "two"] {
        let body = serde_json::json!({"input": text.repeat(30), "max_output_tokens": 1});
        let mut stream = TcpStream::connect(worker.addr).await.unwrap();
        let headers = "connection: close\r\nx-data-parallel-rank: 1\r\n";
        write(
            &mut stream,
            "POST",
            "/v1/responses",
            &body.to_string(),
            headers,
        )
        .await;
        stream.read_to_string(&mut String::new()).await.unwrap();
        stored.push((worker.last_sequence(0), worker.last_sequence(1)));
    }
    assert_eq!(stored.last(), Some(&(Some(1), Some(3))));
    let page = worker.ask("GET", "/metrics", "").await;
    for line in [
        "vllm:num_requests_running{engine=\"1\",model_name=\"sim\"} 0.0\n",
        "vllm:cache_config_info{block_size=\"16\",enable_prefix_caching=\"True\",engine=\"1\"",
    ] {
        assert!(page.contains(line), "{line} is not in {page}");
    }
    worker.stop().await;
}

#[tokio::test]
async fn it_reports_where_its_events_are() {
    let worker = Running::fast().await;
    let none = worker.ask("GET", "/kv_event_sources", "").await;
    assert!(none.ends_with("\r\n\r\n{}"), "{none}");
    worker.stop().await;

    let worker = Running::start(Settings {
        data_parallel_size: NonZeroU16::new(2).unwrap(),
        kv: publisher::Settings {
            events: Some("tcp://*:0".parse().unwrap()),
            replay: None,
            topic: "t".to_owned(),
            ..publisher::Settings::loopback()
        },
        ..with_events()
    })
    .await;
    let bound = worker.handle.kv_events();
    let answer = worker.ask("GET", "/kv_event_sources", "").await;
    let source = |rank: usize| {
        let port = bound[rank].events.port();
        format!(
            r#""{rank}":{{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:{port}","replay_endpoint":null,"buffer_steps":10000,"hwm":100000,"max_queue_size":100000,"topic":"t"}}"#
        )
    };
    let expected = format!("\r\n\r\n{{{},{}}}", source(0), source(1));
    assert!(answer.ends_with(&expected), "{answer}");
    worker.stop().await;
}

#[tokio::test]
async fn another_worker_takes_the_ports_of_one_that_was_killed() {
    let worker = Running::start(with_events()).await;
    let mut subscriber = Subscriber::join(&worker, 0).await;
    let [bound] = &worker.handle.kv_events()[..] else {
        panic!("one rank")
    };
    worker.task.abort();
    assert!(worker.task.await.unwrap_err().is_cancelled());
    let again = Running::start(Settings {
        listen: worker.addr,
        kv: publisher::Settings {
            events: Some(bound.events.into()),
            replay: bound.replay.map(Into::into),
            first_sequence: 7,
            ..publisher::Settings::default()
        },
        ..with_events()
    })
    .await;
    assert_eq!(again.last_sequence(0), None);
    assert_eq!(&again.handle.kv_events()[0], bound);
    // A subscriber connects again by itself.
    for round in 0.. {
        again.read(0, 16 * round..16 * round + 16).await;
        if let Ok(message) = timeout(MOMENT, subscriber.socket.recv()).await {
            assert!(Message::of(message.unwrap()).sequence >= 7);
            break;
        }
    }
    again.stop().await;
}
