use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use futures_core::Stream;
use hyper::Request;
use hyper::body::Incoming;
use hyper::header::HeaderValue;
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use parking_lot::Mutex;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::*;
use crate::http::grpc;
use crate::kv::event::{Batch, EngineHash, Event, Removed};
use crate::kv::protobuf::encode_batch;
use crate::kv::source::SnapshotChunk;
use crate::observe::metrics::Registry;

type Item = Result<Bytes, Status>;

/// How a call is answered.
pub(crate) enum Answer {
    Refuse(Status),
    /// What stands there, and then what the sender sends, for as long as it lives.
    Stream {
        epoch: Option<&'static str>,
        last: Option<u64>,
        items: Vec<Item>,
        live: mpsc::UnboundedReceiver<Item>,
    },
}

fn refuse(status: Status) -> Answer {
    Answer::Refuse(status)
}

/// Answers, and then is silent.
fn open(epoch: Option<&'static str>, items: Vec<Item>) -> Answer {
    let (sender, live) = mpsc::unbounded_channel();
    std::mem::forget(sender);
    Answer::Stream {
        epoch,
        last: None,
        items,
        live,
    }
}

/// Answers as [`open`] does, as engine `a`, and says how far the answer goes.
fn up_to(number: u64, items: Vec<Item>) -> Answer {
    match open(Some("a"), items) {
        Answer::Stream {
            epoch, items, live, ..
        } => Answer::Stream {
            epoch,
            last: Some(number),
            items,
            live,
        },
        refused @ Answer::Refuse(_) => refused,
    }
}

/// What a source asked for.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Asked {
    path: String,
    start: u64,
    rank: Option<String>,
}

/// A servicer that obeys the test.
pub(crate) struct Servicer {
    pub(crate) address: SocketAddr,
    asked: Arc<Mutex<Vec<Asked>>>,
    running: JoinSet<()>,
}

impl Servicer {
    pub(crate) async fn start(answer: impl FnMut(&Asked) -> Answer + Send + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        Self::on(listener, answer)
    }

    fn on(listener: TcpListener, answer: impl FnMut(&Asked) -> Answer + Send + 'static) -> Self {
        let address = listener.local_addr().unwrap();
        let asked = Arc::new(Mutex::new(Vec::new()));
        let answer = Arc::new(Mutex::new(answer));
        let mut running = JoinSet::new();
        running.spawn({
            let asked = asked.clone();
            async move {
                let mut connections = JoinSet::new();
                loop {
                    let (stream, _) = listener.accept().await.unwrap();
                    let (asked, answer) = (asked.clone(), answer.clone());
                    let service = service_fn(move |request: Request<Incoming>| {
                        let (asked, answer) = (asked.clone(), answer.clone());
                        async move {
                            let path = request.uri().path().to_owned();
                            let rank = request.headers().get(RANK_METADATA);
                            let rank = rank.map(|rank| rank.to_str().unwrap().to_owned());
                            let bytes = grpc::question(request, 100).await.unwrap();
                            let start = protobuf::decode_request(&bytes).unwrap();
                            let question = Asked { path, start, rank };
                            asked.lock().push(question.clone());
                            let answer = (*answer.lock())(&question);
                            Ok::<_, hyper::Error>(respond(answer))
                        }
                    });
                    connections.spawn(async move {
                        let builder = http2::Builder::new(TokioExecutor::new());
                        let _ = builder
                            .serve_connection(TokioIo::new(stream), service)
                            .await;
                    });
                }
            }
        });
        Self {
            address,
            asked,
            running,
        }
    }

    fn source(&self) -> Grpc {
        Grpc::new(&self.address.to_string(), 0, fast(), metrics())
    }

    fn starts(&self) -> Vec<u64> {
        self.asked.lock().iter().map(|asked| asked.start).collect()
    }

    async fn kill(mut self) {
        self.running.shutdown().await;
    }
}

struct Items {
    ready: std::vec::IntoIter<Item>,
    live: mpsc::UnboundedReceiver<Item>,
}

impl Stream for Items {
    type Item = Item;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Item>> {
        match self.ready.next() {
            Some(item) => Poll::Ready(Some(item)),
            None => self.live.poll_recv(cx),
        }
    }
}

fn respond(answer: Answer) -> hyper::Response<crate::http::Body> {
    match answer {
        Answer::Refuse(status) => status.into_http(),
        Answer::Stream {
            epoch,
            last,
            items,
            live,
        } => {
            let ready = items.into_iter();
            let mut response = grpc::answer(Items { ready, live });
            if let Some(epoch) = epoch {
                let epoch = HeaderValue::from_static(epoch);
                response.headers_mut().insert(INCARNATION_METADATA, epoch);
            }
            if let Some(last) = last {
                response
                    .headers_mut()
                    .insert(LAST_SEQUENCE_METADATA, last.into());
            }
            response
        }
    }
}

fn fast() -> Settings {
    Settings {
        backoff: Duration::from_millis(1),
        max_backoff: Duration::from_millis(10),
        refused_backoff: Duration::from_millis(3_600_000),
        ..Settings::default()
    }
}

/// Says nothing but how many requests run.
pub(crate) fn load_of(running: u8) -> Answer {
    // sequence 6; load (field 8) with running_requests and load_only.
    let load_only = grpc::frame(&[0x08, 6, 0x42, 4, 0x08, running, 0x48, 1]);
    open(None, vec![Ok(load_only)])
}

fn metrics() -> Metrics {
    Metrics::new(&Registry::default())
}

fn batch(sequence: u64) -> Item {
    of_rank(sequence, None)
}

fn of_rank(sequence: u64, rank: Option<u32>) -> Item {
    encoded(sequence, rank, None)
}

fn chunk(sequence: u64, index: u32, count: u32) -> Item {
    let chunk = SnapshotChunk {
        index,
        count,
        unknown_before: 0,
    };
    encoded(sequence, None, Some((chunk, 9)))
}

fn encoded(sequence: u64, rank: Option<u32>, snapshot: Option<(SnapshotChunk, u64)>) -> Item {
    let batch = Batch {
        joined: 0,
        timestamp: sequence as f64,
        rank,
        events: vec![Event::Removed(Removed {
            hashes: vec![EngineHash(sequence)],
            ..Removed::default()
        })],
    };
    Ok(grpc::frame(
        &encode_batch(sequence, &batch, snapshot).unwrap().message,
    ))
}

/// The next word, in short.
async fn next(source: &mut Grpc) -> String {
    let said = tokio::time::timeout(Duration::from_secs(10), source.next());
    match said.await.expect("something is said") {
        SourceEvent::Connected { incarnation } => {
            format!("connected {}", incarnation.unwrap_or_default())
        }
        SourceEvent::Live(frame) => format!("live {}", number(&frame)),
        SourceEvent::Replayed(frame) => format!("replayed {}", number(&frame)),
        SourceEvent::ReplayEnd => "end".to_owned(),
        SourceEvent::ReplayFailed { reason } => format!("failed {reason}"),
        SourceEvent::Disconnected { reason } => format!("lost {reason}"),
    }
}

fn number(frame: &SourceBatch) -> u64 {
    assert!(frame.batch.is_ok() && frame.bytes > 0 && frame.digest != 0);
    frame.sequence
}

async fn check(source: &mut Grpc, expected: &[&str]) {
    for word in expected {
        let said = next(source).await;
        assert!(said.starts_with(word), "expected {word}, said {said}");
    }
}

/// Keeps 1 to 5, sends the state as a snapshot, and goes on with 6.
fn relay(asked: &Asked) -> Answer {
    match asked.start {
        0 => open(None, vec![chunk(4, 0, 2), chunk(5, 1, 2), batch(6)]),
        start @ 1..=5 => open(None, (start + 1..=6).map(batch).collect()),
        _ => refuse(Status::out_of_range("not held")),
    }
}

/// Keeps nothing: what is live is all there is.
fn live_only(asked: &Asked) -> Answer {
    match asked.start {
        0 => open(None, vec![batch(6), batch(7)]),
        _ => refuse(Status::out_of_range("no replay here")),
    }
}

#[tokio::test]
async fn the_service_is_found_by_asking() {
    let servicer = Servicer::start(|asked| {
        if asked.path.contains("trtllm") {
            open(Some("e1"), vec![batch(3)])
        } else {
            refuse(Status::unimplemented(""))
        }
    })
    .await;
    let mut source = servicer.source();
    check(&mut source, &["connected e1", "live 3"]).await;
    let paths: Vec<_> = servicer
        .asked
        .lock()
        .iter()
        .map(|asked| asked.path.clone())
        .collect();
    assert_eq!(paths, Service::ALL.map(Service::path));
    assert_eq!(servicer.asked.lock()[0].rank.as_deref(), Some("0"));
}

#[tokio::test]
async fn a_service_that_is_set_is_the_only_one_asked() {
    let servicer = Servicer::start(|_| refuse(Status::unimplemented("what?"))).await;
    let settings = Settings {
        services: &[Service::Sglang],
        ..fast()
    };
    let mut source = Grpc::new(&servicer.address.to_string(), 0, settings, metrics());
    check(&mut source, &["lost Unimplemented: what?"]).await;
    assert_eq!(servicer.asked.lock().len(), 1);
}

#[tokio::test]
async fn a_late_joiner_gets_the_snapshot_as_its_answer_without_a_second_call() {
    let servicer = Servicer::start(relay).await;
    let mut source = servicer.source();
    check(&mut source, &["connected"]).await;
    source.replay(0);
    check(&mut source, &["replayed 4", "replayed 5", "end", "live 6"]).await;
    assert_eq!(servicer.starts(), [0]);
}

#[tokio::test]
async fn an_answer_goes_as_far_as_its_head_says() {
    let servicer = Servicer::start(|asked| match asked.start {
        0 => up_to(
            7,
            vec![chunk(4, 0, 2), chunk(5, 1, 2), batch(6), batch(7), batch(8)],
        ),
        start => up_to(8, (start + 1..=9).map(batch).collect()),
    })
    .await;
    let mut source = servicer.source();
    check(&mut source, &["connected"]).await;
    source.replay(0);
    let answer = [
        "replayed 4",
        "replayed 5",
        "replayed 6",
        "replayed 7",
        "end",
    ];
    check(&mut source, &answer).await;
    check(&mut source, &["live 8"]).await;
    source.replay(7);
    check(&mut source, &["replayed 7", "replayed 8", "end", "live 9"]).await;
}

#[tokio::test]
async fn a_list_alone_is_an_answer_whose_head_says_so() {
    let servicer = Servicer::start(|_| up_to(5, vec![chunk(4, 0, 2), chunk(5, 1, 2)])).await;
    let mut source = servicer.source();
    check(&mut source, &["connected"]).await;
    source.replay(0);
    check(&mut source, &["replayed 4", "replayed 5", "end"]).await;
}

#[tokio::test]
async fn a_gap_is_answered_up_to_what_was_said_already() {
    let servicer = Servicer::start(relay).await;
    let mut source = servicer.source();
    check(&mut source, &["connected", "live 4", "live 5", "live 6"]).await;
    source.replay(3);
    let answer = [
        "replayed 3",
        "replayed 4",
        "replayed 5",
        "replayed 6",
        "end",
    ];
    check(&mut source, &answer).await;
    assert_eq!(servicer.starts(), [0, 2]);
}

#[tokio::test]
async fn the_end_of_an_answer_is_not_that_of_the_next_one() {
    let servicer = Servicer::start(relay).await;
    let mut source = servicer.source();
    check(&mut source, &["connected", "live 4", "live 5", "live 6"]).await;
    source.replay(6);
    check(&mut source, &["replayed 6"]).await;
    // It was another process's, say.
    source.replay(0);
    check(&mut source, &["replayed 4", "replayed 5", "end", "live 6"]).await;
}

#[tokio::test]
async fn a_replay_that_is_not_held_fails_and_the_live_call_goes_on() {
    let servicer = Servicer::start(live_only).await;
    let mut source = servicer.source();
    check(&mut source, &["connected", "live 6"]).await;
    source.replay(3);
    check(
        &mut source,
        &["failed OutOfRange: no replay here", "live 7"],
    )
    .await;
    assert_eq!(servicer.starts(), [0, 2]);
}

#[tokio::test]
async fn a_server_that_cannot_repeat_its_last_word_is_not_asked_again() {
    let servicer = Servicer::start(|asked| match asked.start {
        0 => open(None, vec![batch(6)]),
        _ => refuse(Status::out_of_range("no replay here")),
    })
    .await;
    let mut source = servicer.source();
    check(&mut source, &["connected", "live 6"]).await;
    assert!(source.can_replay());
    source.replay(6);
    let expected = ["failed OutOfRange", "lost Unavailable: the server keeps no"];
    check(&mut source, &expected).await;
    check(&mut source, &["connected", "live 6"]).await;
    assert!(!source.can_replay());
}

#[tokio::test]
async fn what_keeps_a_connection_from_being_made_is_said_once() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    drop(listener);
    let mut source = Grpc::new(&address, 0, fast(), metrics());
    check(&mut source, &["lost Unavailable: Connection refused"]).await;
    let again = tokio::time::timeout(Duration::from_millis(100), source.next()).await;
    assert!(again.is_err(), "{again:?}");
}

#[tokio::test]
async fn a_refusal_after_the_head_is_one_all_the_same() {
    for status in [Status::out_of_range("late"), Status::data_loss("late")] {
        let servicer = Servicer::start(move |asked| match asked.start {
            0 => open(None, vec![batch(6)]),
            _ => open(None, vec![Err(status.clone())]),
        })
        .await;
        let mut source = servicer.source();
        check(&mut source, &["connected", "live 6"]).await;
        source.replay(3);
        // The call before is gone by then; another one says what is live.
        let said = next(&mut source).await;
        assert!(
            said.starts_with("failed") && said.ends_with("late"),
            "{said}"
        );
        check(&mut source, &["live 6"]).await;
        assert_eq!(servicer.starts(), [0, 2, 0]);
    }
}

#[tokio::test]
async fn after_a_kill_the_last_batch_can_be_proved_over_the_first_call() {
    let servicer = Servicer::start(relay).await;
    let address = servicer.address;
    let mut source = servicer.source();
    check(&mut source, &["connected", "live 4", "live 5", "live 6"]).await;
    servicer.kill().await;
    check(&mut source, &["lost"]).await;
    let listener = TcpListener::bind(address).await.unwrap();
    let servicer = Servicer::on(listener, relay);
    // It may have failed to connect a few times meanwhile.
    let mut said = next(&mut source).await;
    while said.starts_with("lost") {
        said = next(&mut source).await;
    }
    assert_eq!(said, "connected ");
    source.replay(6);
    check(&mut source, &["replayed 6", "end"]).await;
    assert_eq!(servicer.starts(), [5]);
}

#[tokio::test]
async fn a_restarted_server_that_lacks_the_number_is_asked_for_its_state() {
    let mut calls = 0;
    let servicer = Servicer::start(move |asked| {
        calls += 1;
        match (calls, asked.start) {
            (1, _) => open(Some("a"), vec![batch(8), Err(Status::unavailable("bye"))]),
            (_, 0) => open(Some("b"), vec![chunk(1, 0, 1), batch(2)]),
            _ => refuse(Status::out_of_range("another life")),
        }
    })
    .await;
    let mut source = servicer.source();
    check(
        &mut source,
        &["connected a", "live 8", "lost", "connected b"],
    )
    .await;
    source.replay(8);
    check(&mut source, &["failed OutOfRange"]).await;
    source.replay(0);
    check(&mut source, &["replayed 1", "end", "live 2"]).await;
    assert_eq!(servicer.starts(), [0, 7, 0, 7]);
}

#[tokio::test]
async fn what_becomes_of_connections_and_questions_is_counted() {
    let servicer = Servicer::start(|asked| match asked.start {
        5 => open(None, vec![batch(6), Err(Status::data_loss("restarted"))]),
        _ => live_only(asked),
    })
    .await;
    let registry = Registry::default();
    let address = servicer.address.to_string();
    let mut source = Grpc::new(&address, 0, fast(), Metrics::new(&registry));
    check(&mut source, &["connected", "live 6"]).await;
    source.replay(3);
    source.replay(3);
    check(&mut source, &["failed", "live 7"]).await;
    source.replay(6);
    // Number 7 was said already, so it takes more than that to end the answer.
    check(&mut source, &["replayed 6", "lost", "connected"]).await;
    source.replay(0);
    check(&mut source, &["replayed 6", "end"]).await;
    let text = registry.text();
    let bytes = encoded(6, None, None).unwrap().len() - 5;
    for line in [
        "connections_total 2".to_owned(),
        "disconnects_total{reason=\"data_loss\"} 1".to_owned(),
        format!("received_bytes_total {}", 4 * bytes),
        "replays_total{outcome=\"replaced\"} 1".to_owned(),
        "replays_total{outcome=\"failed\"} 1".to_owned(),
        "replays_total{outcome=\"completed\"} 1".to_owned(),
    ] {
        assert!(
            text.contains(&format!("warmroute_kv_grpc_{line}\n")),
            "{line}: {text}"
        );
    }
}

#[tokio::test]
async fn data_loss_ends_what_was_known() {
    let mut calls = 0;
    let servicer = Servicer::start(move |_| {
        calls += 1;
        match calls {
            1 => open(None, vec![batch(8), Err(Status::data_loss("restarted"))]),
            _ => open(None, vec![batch(1)]),
        }
    })
    .await;
    let mut source = servicer.source();
    check(
        &mut source,
        &[
            "connected",
            "live 8",
            "lost DataLoss: restarted",
            "connected",
        ],
    )
    .await;
    // Not from the number before: that would only be refused.
    assert_eq!(servicer.starts(), [0, 0]);
}

#[tokio::test]
async fn another_process_on_the_same_connection_is_noticed() {
    let servicer = Servicer::start(|asked| match asked.start {
        0 => open(Some("a"), vec![batch(5)]),
        _ => open(Some("b"), vec![batch(3)]),
    })
    .await;
    let mut source = servicer.source();
    check(&mut source, &["connected a", "live 5"]).await;
    source.replay(3);
    check(
        &mut source,
        &["lost Aborted: the server is now another engine incarnation"],
    )
    .await;
}

#[tokio::test]
async fn an_only_rank_may_have_any_number_but_always_the_same_on_a_connection() {
    let servicer = Servicer::start(|_| {
        let batches = vec![
            of_rank(1, None),
            of_rank(2, Some(3)),
            of_rank(9, Some(0)),
            of_rank(3, Some(3)),
        ];
        open(None, batches)
    })
    .await;
    let mut source = servicer.source().with_only_rank(true);
    check(&mut source, &["connected", "live 1", "live 2", "live 3"]).await;
}

#[tokio::test]
async fn other_ranks_batches_are_dropped() {
    let servicer = Servicer::start(|_| {
        let items = vec![
            of_rank(1, None),
            of_rank(9, Some(1)),
            of_rank(2, Some(0)),
            of_rank(10, Some(1)),
        ];
        open(None, items)
    })
    .await;
    let mut first = servicer.source();
    check(&mut first, &["connected", "live 1", "live 2"]).await;
    let mut second = Grpc::new(&servicer.address.to_string(), 1, fast(), metrics());
    check(&mut second, &["connected", "live 9", "live 10"]).await;
}

#[tokio::test]
async fn a_report_of_load_alone_is_no_batch() {
    // sequence 6; load (field 8) with running_requests 3 and load_only.
    let load_only = Ok(grpc::frame(&[0x08, 6, 0x42, 4, 0x08, 3, 0x48, 1]));
    let servicer = Servicer::start(move |_| {
        open(
            None,
            vec![load_only.clone(), batch(6), load_only.clone(), batch(7)],
        )
    })
    .await;
    let loads = Arc::new(Mutex::new(Vec::new()));
    let mut source = servicer.source().with_load({
        let loads = loads.clone();
        move |load| loads.lock().push(load.running_requests)
    });
    check(&mut source, &["connected"]).await;
    source.replay(0);
    check(&mut source, &["replayed 6", "end", "live 7"]).await;
    assert_eq!(*loads.lock(), [3, 3]);
}

#[tokio::test]
async fn what_cannot_be_served_is_said_and_not_asked_for_again_soon() {
    let servicer = Servicer::start(|_| refuse(Status::failed_precondition("null blocks"))).await;
    let mut source = servicer.source();
    check(&mut source, &["lost FailedPrecondition: null blocks"]).await;
    let again = tokio::time::timeout(Duration::from_millis(50), source.next()).await;
    assert!(again.is_err());
    assert_eq!(servicer.starts(), [0]);
}

#[tokio::test]
async fn a_message_that_is_too_large_or_none_ends_the_connection() {
    let servicer = Servicer::start(|_| open(None, vec![Ok(grpc::frame(&[0xff; 9]))])).await;
    check(
        &mut servicer.source(),
        &["connected", "lost InvalidArgument"],
    )
    .await;
    let settings = Settings {
        max_message: 8,
        ..fast()
    };
    let mut source = Grpc::new(&servicer.address.to_string(), 0, settings, metrics());
    check(&mut source, &["connected", "lost OutOfRange"]).await;
}

#[tokio::test]
async fn dropping_the_source_closes_its_connection() {
    let (closed, mut is_closed) = mpsc::unbounded_channel::<()>();
    let (sender, live) = mpsc::unbounded_channel::<Item>();
    let mut answers = Some(Answer::Stream {
        epoch: None,
        last: None,
        items: vec![batch(1)],
        live,
    });
    let servicer = Servicer::start(move |_| answers.take().unwrap()).await;
    let mut source = servicer.source();
    check(&mut source, &["connected", "live 1"]).await;
    let watch = async {
        sender.closed().await;
        drop(closed);
    };
    drop(source);
    tokio::time::timeout(Duration::from_secs(10), watch)
        .await
        .unwrap();
    assert!(is_closed.recv().await.is_none());
}

#[tokio::test]
async fn a_next_that_was_given_up_loses_nothing() {
    let servicer = Servicer::start(relay).await;
    let mut source = servicer.source();
    let mut said = Vec::new();
    while said.len() < 4 {
        // Half of the polls end before anything is said.
        if let Ok(word) = tokio::time::timeout(Duration::from_micros(50), source.next()).await {
            said.push(match word {
                SourceEvent::Live(frame) => frame.sequence,
                SourceEvent::Connected { .. } => 0,
                other => panic!("{other:?}"),
            });
        }
    }
    assert_eq!(said, [0, 4, 5, 6]);
}
