use std::future::poll_fn;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener};
use std::pin::pin;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::mpsc;
use std::task::{Context, Waker};
use std::thread;

use hyper_util::rt::TokioIo;
use tokio::task::coop;

use super::*;
use crate::http::io_threads::IoThreadScope;

/// How long an answer is waited for.
const PATIENCE: Duration = Duration::from_secs(30);

/// Reads the head of a request. False if the connection ends before.
fn has_request(stream: &mut impl Read) -> bool {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        match stream.read(&mut byte) {
            Ok(1) => head.push(byte[0]),
            _ => return false,
        }
    }
    true
}

/// A server that answers each request, and closes a connection after so many. Returns its address and the number of
/// connections that it accepted.
fn server(requests_each: usize) -> (String, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let accepted = Arc::new(AtomicUsize::new(0));
    let count = accepted.clone();
    thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            count.fetch_add(1, SeqCst);
            thread::spawn(move || {
                for _ in 0..requests_each {
                    if !has_request(&mut stream) {
                        return;
                    }
                    let answer = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok";
                    stream.write_all(answer).unwrap();
                }
                let _ = stream.shutdown(Shutdown::Both);
            });
        }
    });
    (address, accepted)
}

/// A server of one connection after the other. It answers with a head and half of a body in one write, and writes the
/// other half when it is told to. Returns its address and what tells it.
fn halting_server() -> (String, mpsc::Sender<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let (tell, told) = mpsc::channel();
    thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            while has_request(&mut stream) {
                let begin = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nab";
                stream.write_all(begin).unwrap();
                if told.recv().is_err() {
                    return;
                }
                stream.write_all(b"cd").unwrap();
            }
        }
    });
    (address, tell)
}

/// An I/O thread that sends a request each time it is asked.
struct Sender {
    ask: mpsc::Sender<()>,
    answers: mpsc::Receiver<Bytes>,
}

impl Sender {
    fn start(number: usize, pool: &Arc<Pool>) -> Self {
        let (ask, asked) = mpsc::channel();
        let (answer, answers) = mpsc::channel();
        let pool = pool.clone();
        thread::spawn(move || {
            let _scope = IoThreadScope::enter(number);
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .unwrap();
            while asked.recv().is_ok() {
                let (_, body) = runtime.block_on(pool.get("/", None, 100)).unwrap();
                answer.send(body).unwrap();
            }
        });
        Self { ask, answers }
    }

    fn send(&self) -> Bytes {
        self.ask.send(()).unwrap();
        self.answers.recv_timeout(PATIENCE).unwrap()
    }
}

/// Two I/O threads that share the connections to a server, which counts them.
fn two_threads(requests_each: usize, settings: Settings) -> ([Sender; 2], Arc<AtomicUsize>) {
    let (address, accepted) = server(requests_each);
    let pool = Pool::new(address, settings);
    ([1, 2].map(|number| Sender::start(number, &pool)), accepted)
}

/// So long that a connection does not expire before the test is over.
fn patient() -> Settings {
    Settings {
        idle_connection_timeout: Duration::from_secs(60),
        ..Settings::default()
    }
}

/// Until an idle connection may be taken by another thread.
fn wait() {
    #[expect(
        clippy::disallowed_methods,
        reason = "the test has a thread of its own"
    )]
    thread::sleep(UNUSED_AFTER);
}

#[test]
fn an_idle_connection_of_another_thread_is_used_before_a_new_one_is_opened() {
    let ([one, other], accepted) = two_threads(usize::MAX, patient());
    for _ in 0..3 {
        assert_eq!(one.send(), "ok");
        wait();
        assert_eq!(other.send(), "ok");
        assert_eq!(other.send(), "ok");
        wait();
    }
    assert_eq!(accepted.load(SeqCst), 1);
}

#[test]
fn a_connection_that_its_thread_has_just_used_stays_with_it() {
    let ([one, other], accepted) = two_threads(usize::MAX, patient());
    // On a machine that stalls, a connection may look unused.
    let began = observe::now();
    for _ in 0..3 {
        assert_eq!(one.send(), "ok");
        assert_eq!(other.send(), "ok");
    }
    let expected = if began.elapsed() < UNUSED_AFTER {
        2..=2
    } else {
        1..=2
    };
    assert!(expected.contains(&accepted.load(SeqCst)));
}

#[test]
fn a_borrowed_connection_that_its_server_has_closed_is_replaced() {
    let ([one, other], accepted) = two_threads(1, patient());
    for _ in 0..3 {
        assert_eq!(one.send(), "ok");
        wait();
        assert_eq!(other.send(), "ok");
        wait();
    }
    assert_eq!(accepted.load(SeqCst), 6);
}

#[test]
fn an_expired_connection_is_not_borrowed() {
    let settings = Settings {
        idle_connection_timeout: Duration::ZERO,
        ..Settings::default()
    };
    let ([one, other], accepted) = two_threads(usize::MAX, settings);
    assert_eq!(one.send(), "ok");
    wait();
    assert_eq!(other.send(), "ok");
    assert_eq!(accepted.load(SeqCst), 2);
}

#[tokio::test]
async fn a_connection_that_was_idle_for_longer_than_a_request_allows_is_left_for_others() {
    let (address, accepted) = server(usize::MAX);
    let pool = Pool::new(address, patient());
    let request = || Request::get("/").body(Full::default()).unwrap();
    for (max_idle, expected) in [
        (Duration::MAX, 1),
        (Duration::MAX, 1),
        (Duration::ZERO, 2),
        (Duration::MAX, 2),
    ] {
        let answer = pool.send_young(request(), max_idle).await.unwrap();
        assert_eq!(answer.collect().await.unwrap().to_bytes(), "ok");
        assert_eq!(accepted.load(SeqCst), expected, "{max_idle:?}");
    }
}

#[tokio::test]
async fn an_answer_is_seen_however_much_of_its_tasks_budget_is_used() {
    let (address, tell) = halting_server();
    let pool = Pool::new(address, patient());
    // A task has 128 units for each poll.
    for used in 0..128 {
        let request = Request::get("/").body(Full::default()).unwrap();
        let mut sent = pin!(pool.send(request));
        let exchange = async {
            // The units of a new poll are all there.
            tokio::task::yield_now().await;
            let answer = poll_fn(|cx| {
                for _ in 0..used {
                    assert!(pin!(coop::consume_budget()).poll(cx).is_ready());
                }
                sent.as_mut().poll(cx)
            });
            let answer = answer.await.unwrap();
            tell.send(()).unwrap();
            answer.collect().await.unwrap().to_bytes()
        };
        let body = tokio::time::timeout(PATIENCE, exchange).await;
        assert_eq!(body, Ok(Bytes::from_static(b"abcd")), "{used}");
    }
}

#[expect(
    clippy::disallowed_methods,
    reason = "the test waits for the task that it spawns"
)]
#[tokio::test]
async fn a_body_wakes_the_task_that_waits_for_it_and_not_the_one_that_polled_it_before() {
    let (address, tell) = halting_server();
    let pool = Pool::new(address, patient());
    let request = Request::get("/").body(Full::default()).unwrap();
    let mut body = pool.send(request).await.unwrap().into_body();
    let first = body.frame().await.unwrap().unwrap();
    assert_eq!(first.into_data().unwrap(), "ab");
    let nobody = &mut Context::from_waker(Waker::noop());
    assert!(pin!(body.frame()).poll(nobody).is_pending());
    let reader = tokio::spawn(body.collect());
    // Now the reader waits.
    tokio::task::yield_now().await;
    tell.send(()).unwrap();
    let rest = tokio::time::timeout(PATIENCE, reader).await.unwrap();
    assert_eq!(rest.unwrap().unwrap().to_bytes(), "cd");
}

/// A path whose requests get no answer.
const HELD: &str = "/held";

/// A server of HTTP/2, which says what it was sent. Returns its address and the number of connections that it accepted.
#[expect(
    clippy::disallowed_methods,
    reason = "a server of a test dies with its runtime"
)]
async fn http2_server() -> (String, Arc<AtomicUsize>) {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let accepted = Arc::new(AtomicUsize::new(0));
    let count = accepted.clone();
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            count.fetch_add(1, SeqCst);
            let service =
                hyper::service::service_fn(async |request: Request<hyper::body::Incoming>| {
                    assert_eq!(request.version(), hyper::Version::HTTP_2);
                    if request.uri().path().ends_with(HELD) {
                        std::future::pending::<()>().await;
                    }
                    let said = format!(
                        "{} {}",
                        request.uri(),
                        request.headers().contains_key("host")
                    );
                    let body = request.into_body().collect().await?.to_bytes();
                    let said = [said.as_bytes(), b" ", &body].concat();
                    Ok::<_, hyper::Error>(Response::new(Full::new(Bytes::from(said))))
                });
            let server =
                hyper::server::conn::http2::Builder::new(hyper_util::rt::TokioExecutor::new());
            tokio::spawn(server.serve_connection(TokioIo::new(stream), service));
        }
    });
    (format!("{HTTP2}{address}/below"), accepted)
}

#[expect(
    clippy::disallowed_methods,
    reason = "a server of a test dies with its runtime"
)]
#[tokio::test]
async fn http2_carries_many_requests_over_one_connection() {
    let (address, accepted) = http2_server().await;
    let pool = Pool::new(address.clone(), Settings::default());
    let first = pool.post("/a", None, "1", 1 << 10).await.unwrap();
    let authority = pool.authority();
    assert_eq!(address, format!("{HTTP2}{authority}/below"));
    assert_eq!(first.1, format!("http://{authority}/below/a false 1"));
    let posts = (0..20).map(|number: u32| {
        let pool = pool.clone();
        tokio::spawn(async move { pool.post("/b?c", None, number.to_string(), 1 << 10).await })
    });
    for (number, post) in posts.collect::<Vec<_>>().into_iter().enumerate() {
        let answer = post.await.unwrap().unwrap().1;
        assert_eq!(
            answer,
            format!("http://{authority}/below/b?c false {number}")
        );
    }
    assert_eq!(accepted.load(SeqCst), 1);
    pool.close_idle();
    pool.get("/a", None, 1 << 10).await.unwrap();
    assert_eq!(accepted.load(SeqCst), 2);
}

#[tokio::test]
async fn answers_that_nobody_reads_stop_no_other_of_their_connection() {
    let (address, accepted) = http2_server().await;
    let pool = Pool::new(address, Settings::default());
    let large = Bytes::from(vec![b'x'; 1 << 20]);
    let mut unread = Vec::new();
    for _ in 0..8 {
        let request = Request::post("/a").body(Full::new(large.clone())).unwrap();
        unread.push(pool.send(request).await.unwrap());
    }
    for _ in 0..50 {
        let answer = tokio::time::timeout(PATIENCE, pool.get("/a", None, 1 << 10));
        answer.await.unwrap().unwrap();
    }
    for answer in unread {
        let answer = answer.into_body().collect().await.unwrap().to_bytes();
        assert!(answer.ends_with(&large));
    }
    assert_eq!(accepted.load(SeqCst), 1);
}

#[tokio::test]
async fn a_connection_of_http2_that_answers_nothing_gets_no_more_requests() {
    let (address, accepted) = http2_server().await;
    let pool = Pool::new(address, Settings::default());
    let answered = async || {
        let answer = tokio::time::timeout(PATIENCE, pool.get("/a", None, 1 << 10));
        answer.await.unwrap().unwrap();
    };
    let held = || {
        let mut held = Box::pin(pool.get(HELD, None, 1 << 10));
        let context = &mut Context::from_waker(Waker::noop());
        assert!(held.as_mut().poll(context).is_pending());
        held
    };
    answered().await;
    let given_up = held();
    answered().await;
    drop(given_up);
    answered().await;
    assert_eq!(accepted.load(SeqCst), 1);
    // More than its window, so that the rest comes only over a connection that lives.
    let large = Bytes::from(vec![b'x'; 1 << 20]);
    let request = Request::post("/a").body(Full::new(large.clone())).unwrap();
    let running = pool.send(request).await.unwrap();
    drop(held());
    answered().await;
    assert_eq!(accepted.load(SeqCst), 2);
    let rest = tokio::time::timeout(PATIENCE, running.into_body().collect());
    assert!(rest.await.unwrap().unwrap().to_bytes().ends_with(&large));
}

/// A server of HTTP/2 that answers the first request with this frame. Returns its address.
fn server_with_frame(frame: Vec<u8>) -> String {
    const PREFACE_BYTES: usize = 24;
    const HEADERS: u8 = 1;
    const SETTINGS: [u8; 9] = [0, 0, 0, 4, 0, 0, 0, 0, 0];
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.write_all(&SETTINGS).unwrap();
        stream.read_exact(&mut [0; PREFACE_BYTES]).unwrap();
        loop {
            let mut head = [0; 9];
            stream.read_exact(&mut head).unwrap();
            let length = u32::from_be_bytes([0, head[0], head[1], head[2]]);
            stream.read_exact(&mut vec![0; length as usize]).unwrap();
            if head[3] == HEADERS {
                break;
            }
        }
        stream.write_all(&frame).unwrap();
        // Until the client has closed it.
        let _ = stream.read_to_end(&mut Vec::new());
    });
    format!("{HTTP2}{address}")
}

#[tokio::test]
async fn what_a_server_of_http2_refused_unread_is_safe_to_send_again() {
    let reset = |reason: u8| vec![0, 0, 4, 3, 0, 0, 0, 0, 1, 0, 0, 0, reason];
    let go_away = vec![0, 0, 8, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let (internal_error, refused_stream) = (2, 7);
    for (frame, may_have_been_read) in [
        (reset(refused_stream), false),
        (go_away, false),
        (reset(internal_error), true),
    ] {
        let pool = Pool::new(server_with_frame(frame), Settings::default());
        let request = Request::post("/").body(Full::from("x")).unwrap();
        let error = pool.send(request).await.unwrap_err();
        assert_eq!(error.may_have_been_read(), may_have_been_read, "{error}");
        assert_eq!(matches!(error, Error::Stale { .. }), !may_have_been_read);
    }
}

#[expect(
    clippy::disallowed_methods,
    reason = "a server of a test dies with its runtime"
)]
#[tokio::test]
async fn a_unix_socket_is_a_server_like_any_other() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let listener = tokio::net::UnixListener::bind(&path).unwrap();
    let served = tokio::spawn(async move {
        let (stream, _) = listener.accept().await.unwrap();
        let service =
            hyper::service::service_fn(async |request: Request<hyper::body::Incoming>| {
                let host = request.headers()["host"].to_str().unwrap().to_owned();
                Ok::<_, hyper::Error>(Response::new(Full::new(Bytes::from(host))))
            });
        let server = hyper::server::conn::http1::Builder::new();
        server.serve_connection(TokioIo::new(stream), service).await
    });
    let pool = Pool::new(format!("{UNIX}{}", path.display()), Settings::default());
    for _ in 0..3 {
        let answer = pool.get("/health", None, 1 << 10).await.unwrap();
        assert_eq!(answer.1, "localhost");
    }
    pool.close_idle();
    served.await.unwrap().unwrap();
    std::fs::remove_file(path).unwrap();
    let answer = pool.get("/health", None, 1 << 10).await;
    assert!(answer.unwrap_err().to_string().contains("cannot connect"));
}
