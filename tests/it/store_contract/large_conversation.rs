//! What a very large conversation costs Redis, and those who use the same Redis. Prints:
//! `cargo test --test it -- --ignored --nocapture what_a_conversation_of_140_000_items_costs`

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use warmroute::store::{Error, Item, ItemsOutcome, NewConversation, PutOutcome};

use super::*;

const ITEMS: usize = 140_000;
const BATCH: usize = 1_000;
const READS: usize = 5;
const AT_ONCE: usize = 8;

fn items(numbers: std::ops::Range<usize>) -> Vec<Item> {
    let item = |number: usize| Item {
        id: format!("msg_{number:032x}").into(),
        json: format!("{{\"n\":{number},\"text\":\"{}\"}}", "x".repeat(120)).into(),
    };
    numbers.map(item).collect()
}

/// Time that Redis has spent in scripts, in microseconds, and how many it has run.
fn scripts(server: &Server) -> (u64, u64) {
    let stats = server.cli(&["info", "commandstats"]);
    let line = stats
        .lines()
        .find(|line| line.starts_with("cmdstat_evalsha:"));
    let value = |name: &str| {
        let text = line?.split_once(&format!("{name}="))?.1;
        text.split(',').next()?.trim().parse::<u64>().ok()
    };
    (
        value("usec").unwrap_or_default(),
        value("calls").unwrap_or_default(),
    )
}

fn median(mut values: Vec<f64>) -> (f64, f64, f64) {
    values.sort_by(f64::total_cmp);
    let last = values.len() - 1;
    (values[0], values[last / 2], values[last])
}

async fn read(store: &Store, key: ConversationKey) -> Result<usize, Error> {
    match store.all_items(key, 32 << 20).await? {
        ItemsOutcome::Found { items, .. } => Ok(items.len()),
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "measures, and takes a minute"]
async fn what_a_conversation_of_140_000_items_costs() {
    let server = Server::start().await;
    // The limits of production.
    let settings = redis::Settings {
        urls: vec![server.url()],
        ..redis::Settings::default()
    };
    let open = || open(&settings, &RetentionSettings::default());
    let (store, other) = (open(), open());
    let key = new_conversation_key();
    let new = NewConversation {
        token: token(),
        object: Bytes::from_static(b"{}"),
        items: Vec::new(),
    };
    store.create_conversation(key, new).await.unwrap();
    for first in (0..ITEMS).step_by(BATCH) {
        let put = store.add_items(key, token(), items(first..first + BATCH));
        assert_eq!(put.await, Ok(PutOutcome::Done));
    }
    let response = new_key();
    other.create(response, finished()).await.unwrap();

    let mut seconds = Vec::new();
    let (usec, calls) = scripts(&server);
    for _ in 0..READS {
        let started = Instant::now();
        assert_eq!(read(&store, key).await, Ok(ITEMS));
        seconds.push(started.elapsed().as_secs_f64());
    }
    let (usec_after, calls_after) = scripts(&server);
    let (calls, usec) = (calls_after - calls, usec_after - usec);
    eprintln!(
        "one read: {:.3?} s (min, median, max of {READS}); Redis {:.3} s in {} scripts of {:.2} ms",
        median(seconds),
        usec as f64 / 1e6 / READS as f64,
        calls / READS as u64,
        usec as f64 / 1e3 / calls as f64,
    );

    let is_over = AtomicBool::new(false);
    let large = async {
        let reads = (0..AT_ONCE).map(|_| {
            let store = store.clone();
            tokio::spawn(async move { read(&store, key).await })
        });
        let started = Instant::now();
        let mut failed = 0;
        for one in reads.collect::<Vec<_>>() {
            failed += usize::from(one.await.unwrap().is_err());
        }
        is_over.store(true, Ordering::Relaxed);
        (failed, started.elapsed())
    };
    let small = async {
        let (mut millis, mut failed, mut was_open) = (Vec::new(), 0, false);
        while !is_over.load(Ordering::Relaxed) {
            let started = Instant::now();
            failed += usize::from(other.get(response).await.is_err());
            millis.push(started.elapsed().as_secs_f64() * 1e3);
            was_open |= !store.health().is_up || !other.health().is_up;
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        (millis, failed, was_open)
    };
    let ((large_failed, took), (millis, failed, was_open)) = tokio::join!(large, small);
    eprintln!(
        "{AT_ONCE} at once: {took:.2?}, {large_failed} failed; meanwhile {} reads of a response by another router: \
         {:.2?} ms (min, median, max), {failed} failed; a circuit breaker opened: {was_open}",
        millis.len(),
        median(millis.clone()),
    );
}
