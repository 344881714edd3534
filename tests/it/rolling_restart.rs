//! Three routers are replaced one after the other, as a Deployment of Kubernetes replaces its pods, behind a balancer that knows
//! of their readiness as late as a Service does. No client notices.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use http_body_util::{BodyExt, Full};
use hyper::body::Bytes;
use hyper::client::conn::http1::SendRequest;
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use warmroute::config::Config;
use warmroute::peers::settings::PeerDiscovery;
use warmroute::responses::Mode;

use crate::client;
use crate::cluster::{Engine, Router, chat, config, eventually, unhurried};

const CHAT: &str = "/v1/chat/completions";
/// How often the kubelet asks for readiness.
const PROBE_INTERVAL: Duration = Duration::from_millis(200);
/// How long a change of readiness takes to reach the balancer.
const PROPAGATION: Duration = Duration::from_millis(500);
/// Room for machines that are busy.
const DRAIN_DELAY: Duration = Duration::from_secs(4);

/// Passes connections on to routers that it believes to be ready.
#[derive(Debug, Default)]
struct Balancer {
    /// Where the probes ask, and where connections go.
    routers: Mutex<Vec<(SocketAddr, SocketAddr)>>,
    ready: Mutex<Vec<SocketAddr>>,
    refused: Mutex<Vec<String>>,
}

impl Balancer {
    /// Accepts connections and follows readiness until the tasks are dropped.
    async fn start(tasks: &mut JoinSet<()>) -> (Arc<Self>, SocketAddr) {
        let balancer = Arc::new(Self::default());
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tasks.spawn(balancer.clone().follow());
        tasks.spawn(balancer.clone().accept(listener));
        (balancer, address)
    }

    /// Asks every router for its readiness, and acts upon the answers later.
    async fn follow(self: Arc<Self>) {
        let mut underway = VecDeque::new();
        loop {
            let routers = self.routers.lock().clone();
            let mut ready = Vec::new();
            for (admin, api) in routers {
                let answer = client::try_open(admin, "GET", "/readyz", &[], "").await;
                if answer.is_ok_and(|answer| answer.status == 200) {
                    ready.push(api);
                }
            }
            underway.push_back((Instant::now() + PROPAGATION, ready));
            while let Some((_, ready)) = underway.pop_front_if(|(due, _)| *due <= Instant::now()) {
                *self.ready.lock() = ready;
            }
            tokio::time::sleep(PROBE_INTERVAL).await;
        }
    }

    async fn accept(self: Arc<Self>, listener: TcpListener) {
        let mut connections = JoinSet::new();
        for number in 0.. {
            let (mut client, _) = listener.accept().await.unwrap();
            let ready = self.ready.lock().clone();
            let Some(&target) = ready.get(number % ready.len().max(1)) else {
                self.refused.lock().push("no router is ready".to_owned());
                continue;
            };
            let balancer = self.clone();
            connections.spawn(async move {
                match TcpStream::connect(target).await {
                    Ok(mut router) => {
                        let _ = tokio::io::copy_bidirectional(&mut client, &mut router).await;
                    }
                    Err(error) => balancer.refused.lock().push(format!("{target}: {error}")),
                }
            });
            while connections.try_join_next().is_some() {}
        }
    }

    fn add(&self, router: &Router) {
        self.routers.lock().push((router.admin, router.api));
    }
}

/// What clients saw.
#[derive(Debug, Default)]
struct Seen {
    is_over: AtomicBool,
    failures: Mutex<Vec<String>>,
    /// Requests of clients that keep their connection, those of others, and streams.
    answered: Mutex<[usize; 3]>,
    /// Connections that a router asked the client to close.
    moved: Mutex<usize>,
}

impl Seen {
    fn note(&self, kind: usize, result: Result<(), String>) {
        match result {
            Ok(()) => self.answered.lock()[kind] += 1,
            Err(failure) => self.failures.lock().push(failure),
        }
    }
}

async fn connect(address: SocketAddr) -> Result<SendRequest<Full<Bytes>>, String> {
    let stream = TcpStream::connect(address)
        .await
        .map_err(|error| error.to_string())?;
    let (sender, driver) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
        .await
        .map_err(|error| error.to_string())?;
    tokio::spawn(async move {
        let _ = driver.await;
    });
    Ok(sender)
}

/// Sends request after request over one connection, and opens another only when the router has closed it or has asked
/// for that. A request that was sent is never sent again.
async fn keep_alive(balancer: SocketAddr, seen: Arc<Seen>, number: usize) {
    let mut connection: Option<SendRequest<Full<Bytes>>> = None;
    while !seen.is_over.load(Relaxed) {
        let mut sender = match connection.take().filter(|sender| !sender.is_closed()) {
            Some(sender) => sender,
            None => match connect(balancer).await {
                Ok(sender) => sender,
                Err(error) => {
                    seen.note(0, Err(format!("kept-alive client, connecting: {error}")));
                    continue;
                }
            },
        };
        if sender.ready().await.is_err() {
            continue;
        }
        let request = hyper::Request::post(CHAT)
            .header("host", "router")
            .header("content-type", "application/json")
            .body(Full::new(Bytes::from(chat("hello", 1, false))))
            .unwrap();
        match sender.send_request(request).await {
            Ok(answer) => {
                let status = answer.status();
                let closes = answer
                    .headers()
                    .get("connection")
                    .is_some_and(|value| value == "close");
                let whole = answer.into_body().collect().await;
                seen.note(
                    0,
                    match whole {
                        Ok(_) if status == 200 => Ok(()),
                        Ok(body) => {
                            Err(format!("kept-alive client: {status} {:?}", body.to_bytes()))
                        }
                        Err(error) => Err(format!("kept-alive client, reading: {error}")),
                    },
                );
                if closes {
                    *seen.moved.lock() += 1;
                } else {
                    connection = Some(sender);
                }
            }
            // It was not sent: the connection had been closed before.
            Err(error) if error.is_canceled() => {}
            Err(error) => seen.note(0, Err(format!("kept-alive client, sending: {error}"))),
        }
        tokio::time::sleep(Duration::from_millis(5 * (number as u64 % 8))).await;
    }
}

/// Opens a connection for each request.
async fn short_lived(balancer: SocketAddr, seen: Arc<Seen>) {
    while !seen.is_over.load(Relaxed) {
        let answer = client::try_open(balancer, "POST", CHAT, &[], chat("hi", 1, false)).await;
        let result = match answer {
            Ok(mut answer) => match (answer.status, answer.rest().await) {
                (200, (_, true)) => Ok(()),
                (status, rest) => Err(format!("new connection: {status} {rest:?}")),
            },
            Err(error) => Err(format!("new connection: {error}")),
        };
        seen.note(1, result);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Streams of a few seconds.
async fn streams(balancer: SocketAddr, seen: Arc<Seen>) {
    while !seen.is_over.load(Relaxed) {
        let answer = client::try_open(balancer, "POST", CHAT, &[], chat("go on", 150, true)).await;
        let result = match answer {
            Ok(mut answer) => {
                let (text, is_whole) = answer.rest().await;
                let is_complete = is_whole && text.ends_with("data: [DONE]\n\n");
                if is_complete && !client::has_error(&text) {
                    Ok(())
                } else {
                    Err(format!("stream, proper end {is_whole}: {text}"))
                }
            }
            Err(error) => Err(format!("stream: {error}")),
        };
        seen.note(2, result);
    }
}

fn replica(engines: &[Engine], others: &[&Router]) -> Config {
    let mut config = config();
    config.responses.mode = Mode::PassThrough;
    config.workers = engines.iter().map(Engine::listed).collect();
    config.api.drain_delay = DRAIN_DELAY;
    "127.0.0.1:0".clone_into(&mut config.peers.listen);
    let others = others
        .iter()
        .filter_map(|other| Some(other.peers?.to_string()));
    let others: Vec<String> = others.collect();
    if !others.is_empty() {
        config.peers.discovery.push(PeerDiscovery::Static(others));
    }
    config
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn routers_are_replaced_one_by_one_and_no_client_notices() {
    let engines = [
        Engine::here("a", unhurried()).await,
        Engine::here("b", unhurried()).await,
    ];
    let mut tasks = JoinSet::new();
    let (balancer, address) = Balancer::start(&mut tasks).await;
    let mut routers: Vec<Router> = Vec::new();
    for _ in 0..3 {
        let others: Vec<&Router> = routers.iter().collect();
        let router = Router::child(&replica(&engines, &others)).await;
        balancer.add(&router);
        routers.push(router);
    }
    eventually("all are ready", async || balancer.ready.lock().len() == 3).await;

    let seen = Arc::new(Seen::default());
    let mut clients = JoinSet::new();
    for number in 0..8 {
        clients.spawn(keep_alive(address, seen.clone(), number));
        if number < 4 {
            clients.spawn(short_lived(address, seen.clone()));
            clients.spawn(streams(address, seen.clone()));
        }
    }
    for number in 0..3 {
        // The new one first: maxSurge 1, maxUnavailable 0.
        let others: Vec<&Router> = routers.iter().collect();
        let new = Router::child(&replica(&engines, &others)).await;
        balancer.add(&new);
        let api = new.api;
        eventually("the new one is ready", async || {
            balancer.ready.lock().contains(&api)
        })
        .await;
        routers.push(new);
        let mut old = routers.remove(0);
        let child = old.child.as_mut().unwrap();
        child.signal("TERM");
        let mut status = None;
        eventually("the old one ends", async || {
            status = child.ended();
            status.is_some()
        })
        .await;
        assert_eq!(status.unwrap().code(), Some(0), "{number}: {}", old.log());
        assert!(
            !old.log().contains("drain timeout is"),
            "{number}: {}",
            old.log()
        );
        balancer
            .routers
            .lock()
            .retain(|(admin, _)| *admin != old.admin);
    }
    seen.is_over.store(true, Relaxed);
    while let Some(ended) = clients.join_next().await {
        ended.unwrap();
    }
    let answered = *seen.answered.lock();
    assert!(answered.iter().all(|count| *count > 10), "{answered:?}");
    assert!(
        *seen.moved.lock() >= 8,
        "{:?} connections were moved",
        seen.moved
    );
    assert_eq!(*balancer.refused.lock(), [""; 0]);
    assert_eq!(*seen.failures.lock(), [""; 0], "of {answered:?}");
}
