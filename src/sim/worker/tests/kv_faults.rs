//! KV events that go wrong on purpose.

use std::num::NonZeroU64;
use std::ops::Range;

use tokio::time::timeout;
use zeromq::{Socket, SocketRecv};

use super::event_clients::{Asker, LIMIT, MOMENT, Subscriber, sequences, with_events};
use super::*;
use crate::sim::fault::kv::KvFaults;

impl Running {
    fn kv_fault(&self, kv: KvFaults) {
        self.handle.set_faults(Faults {
            kv,
            ..Faults::default()
        });
    }
}

impl Subscriber {
    /// Causes a batch for each prompt. `expected` arrive, and no more; they are counted from the first
    /// of these batches.
    async fn gets(&mut self, worker: &Running, prompts: Range<u32>, expected: &[u64]) {
        let first = worker.last_sequence(self.rank).unwrap() + 1;
        for prompt in prompts {
            let start = 100 * prompt;
            worker.read(self.rank, start..start + 16).await;
        }
        let mut got = Vec::new();
        while got.len() < expected.len() {
            got.push(self.next().await.sequence - first);
        }
        assert_eq!(got, expected);
        let more = timeout(MOMENT, self.socket.recv()).await;
        assert!(more.is_err(), "{more:?}");
    }
}

#[tokio::test]
async fn batches_are_lost_repeated_and_swapped_on_demand() {
    let worker = Running::start(with_events()).await;
    let mut subscriber = Subscriber::join(&worker, 0).await;
    let every = |count| NonZeroU64::new(count);
    worker.kv_fault(KvFaults {
        lose_every: every(2),
        ..KvFaults::default()
    });
    subscriber.gets(&worker, 0..4, &[0, 2]).await;
    worker.kv_fault(KvFaults {
        repeat_every: every(2),
        ..KvFaults::default()
    });
    subscriber.gets(&worker, 10..13, &[0, 1, 1, 2]).await;
    worker.kv_fault(KvFaults {
        swap_next: 1,
        ..KvFaults::default()
    });
    subscriber.gets(&worker, 20..23, &[1, 0, 2]).await;
    worker.stop().await;
}

#[tokio::test]
async fn a_delayed_batch_can_be_asked_for_and_a_silent_engine_catches_up() {
    let worker = Running::start(with_events()).await;
    let mut subscriber = Subscriber::join(&worker, 0).await;
    let mut asker = Asker::connect(&worker, 0).await;
    let first = worker.last_sequence(0).unwrap() + 1;
    worker.kv_fault(KvFaults {
        delay_ms: 300,
        ..KvFaults::default()
    });
    let started = Instant::now();
    worker.read(0, 0..16).await;
    assert_eq!(sequences(&asker.replay(first).await), [first]);
    assert_eq!(subscriber.next().await.sequence, first);
    assert!(started.elapsed() >= Duration::from_millis(300));

    worker.kv_fault(KvFaults {
        silent: true,
        ..KvFaults::default()
    });
    subscriber.gets(&worker, 10..12, &[]).await;
    asker.ask(first).await;
    asker.hears_nothing().await;
    worker.kv_fault(KvFaults::default());
    assert_eq!(subscriber.next().await.sequence, first + 1);
    assert_eq!(subscriber.next().await.sequence, first + 2);
    worker.stop().await;
}

#[tokio::test]
async fn event_connections_are_cut_and_taken_again() {
    let worker = Running::start(with_events()).await;
    for fault in [
        KvFaults {
            cut: true,
            ..KvFaults::default()
        },
        KvFaults {
            cut_every: NonZeroU64::new(1),
            ..KvFaults::default()
        },
    ] {
        let subscriber = Subscriber::join(&worker, 0).await;
        let address = worker.handle.kv_events()[0].events;
        let mut raw = TcpStream::connect(address).await.unwrap();
        // A subscriber by hand, for one of the library would connect again.
        raw.write_all(&GREETING).await.unwrap();
        raw.write_all(READY).await.unwrap();
        raw.read_exact(&mut [0; 64 + READY.len()]).await.unwrap();
        raw.write_all(SUBSCRIBE).await.unwrap();
        worker.kv_fault(fault);
        worker.read(0, 0..16).await;
        worker.handle.reset();
        let mut rest = Vec::new();
        let closed = timeout(LIMIT, raw.read_to_end(&mut rest)).await;
        // With its end or with a reset, as it comes.
        let _ = closed.expect("the connection is cut");
        assert_eq!(rest, b"", "a batch came through");
        worker.kv_fault(KvFaults::default());
        drop(subscriber.socket.close().await);
    }
    Subscriber::join(&worker, 0).await;
    worker.stop().await;
}

/// A subscription to all topics.
const SUBSCRIBE: &[u8] = b"\x00\x01\x01";
/// ZMTP 3.0, no security.
const GREETING: [u8; 64] = {
    let mut greeting = [0; 64];
    greeting[0] = 0xff;
    greeting[9] = 0x7f;
    greeting[10] = 3;
    greeting[12] = b'N';
    greeting[13] = b'U';
    greeting[14] = b'L';
    greeting[15] = b'L';
    greeting
};
const READY: &[u8] = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03SUB";

#[tokio::test]
async fn replays_can_be_short_endless_or_refused() {
    let worker = Running::start(with_events()).await;
    for prompt in 0..4 {
        worker.read(0, 100 * prompt..100 * prompt + 16).await;
    }
    let mut asker = Asker::connect(&worker, 0).await;
    worker.kv_fault(KvFaults {
        replay_last: Some(2),
        ..KvFaults::default()
    });
    assert_eq!(sequences(&asker.replay(0).await), [2, 3]);
    worker.kv_fault(KvFaults {
        replay_stop_after: Some(1),
        ..KvFaults::default()
    });
    asker.ask(0).await;
    asker.frames().await;
    asker.hears_nothing().await;
    worker.kv_fault(KvFaults {
        replay_refuse: true,
        ..KvFaults::default()
    });
    asker.ask(0).await;
    asker.hears_nothing().await;
    worker.kv_fault(KvFaults::default());
    let mut asker = Asker::connect(&worker, 0).await;
    assert_eq!(sequences(&asker.replay(2).await), [2, 3]);
    worker.stop().await;
}
