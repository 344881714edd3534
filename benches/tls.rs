//! What TLS costs the router, beside the same router without it: CPU a kept-alive request of 2 KB and a stream, and the
//! latency of requests while others shake hands.
//!
//! ```sh
//! cargo build --release
//! WARMROUTE=target/release/warmroute cargo bench --bench tls
//! ```
//! The router is a process of its own, whose CPU time is read from /proc. Budgets: 1.35 times the CPU a request; with
//! 1,000 full handshakes a second at most twice the p99.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    clippy::disallowed_methods,
    reason = "a program that measures prints, and stops where it fails"
)]

use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::Request;
use hyper::client::conn::http1::SendRequest;
use hyper_util::rt::TokioIo;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, RootCertStore};
use serde_json::json;
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio_rustls::TlsConnector;
use warmroute::sim::step_time::AnswerTimes;
use warmroute::sim::worker;

const ROUNDS: usize = 5;
const CONNECTIONS: usize = 8;
const REQUESTS: usize = 2_000;
const STREAMS: usize = 400;
const STREAM_TOKENS: usize = 200;
/// Requests a second while others shake hands.
const PACE: u32 = 200;
const HANDSHAKES: u32 = 1_000;
const PACED_TIME: Duration = Duration::from_secs(10);

/// A router that ends with this program.
struct Router {
    child: Child,
    address: SocketAddr,
    connector: Option<TlsConnector>,
}

impl Drop for Router {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Router {
    fn start(engine: SocketAddr, folder: &Path, connector: Option<TlsConnector>) -> Self {
        let free = || {
            std::net::TcpListener::bind("127.0.0.1:0")
                .unwrap()
                .local_addr()
                .unwrap()
        };
        let (address, admin) = (free(), free());
        let tls = match connector {
            None => json!(null),
            Some(_) => {
                json!({"certificate": folder.join("tls.crt"), "key": folder.join("tls.key")})
            }
        };
        let mut config = json!({
            "api": {"listen": address.to_string()},
            "admin": {"listen": admin.to_string()},
            "workers": [format!("http://{engine}")],
            "runtime": {"threads": 1},
            "responses": {"mode": "pass_through"},
            "log": {"level": "warn"},
        });
        if !tls.is_null() {
            config["api"]["tls"] = tls;
        }
        let file = folder.join(format!("{}.yaml", address.port()));
        std::fs::write(&file, config.to_string()).unwrap();
        let program = std::env::var("WARMROUTE");
        let program = program.unwrap_or_else(|_| env!("CARGO_BIN_EXE_warmroute").to_owned());
        let child = Command::new(program)
            .args(["serve", "--config"])
            .arg(file)
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        Self {
            child,
            address,
            connector,
        }
    }

    /// CPU time so far.
    fn cpu(&self) -> Duration {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id())).unwrap();
        let fields: Vec<&str> = stat[stat.rfind(')').unwrap() + 2..].split(' ').collect();
        let ticks: u64 = fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap();
        // Of 10 ms each on every Linux of today.
        Duration::from_millis(ticks * 10)
    }

    async fn connect(&self) -> SendRequest<Full<Bytes>> {
        let stream = TcpStream::connect(self.address).await.unwrap();
        stream.set_nodelay(true).unwrap();
        match &self.connector {
            None => {
                let (sender, driver) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
                    .await
                    .unwrap();
                tokio::spawn(driver);
                sender
            }
            Some(connector) => {
                let name = ServerName::try_from("localhost").unwrap();
                let stream = connector.connect(name, stream).await.unwrap();
                let (sender, driver) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
                    .await
                    .unwrap();
                tokio::spawn(driver);
                sender
            }
        }
    }

    async fn wait(&self) {
        loop {
            if TcpStream::connect(self.address).await.is_ok() {
                let mut sender = self.connect().await;
                let request = Request::get("/v1/models").header("host", "x");
                let answer = sender
                    .send_request(request.body(Full::default()).unwrap())
                    .await;
                let body = answer
                    .unwrap()
                    .into_body()
                    .collect()
                    .await
                    .unwrap()
                    .to_bytes();
                if body.windows(5).any(|part| part == b"\"sim\"") {
                    return;
                }
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

fn body(max_tokens: usize, stream: bool) -> Bytes {
    let text = "lorem ipsum dolor sit amet ".repeat(70);
    let body = json!({"model": "sim", "max_tokens": max_tokens, "stream": stream,
        "messages": [{"role": "user", "content": text}]});
    body.to_string().into()
}

async fn ask(sender: &mut SendRequest<Full<Bytes>>, body: Bytes) -> usize {
    sender.ready().await.unwrap();
    let request = Request::post("/v1/chat/completions")
        .header("host", "localhost")
        .header("content-type", "application/json")
        .body(Full::new(body))
        .unwrap();
    let answer = sender.send_request(request).await.unwrap();
    assert_eq!(answer.status(), 200);
    answer.into_body().collect().await.unwrap().to_bytes().len()
}

/// CPU of the router for each request, in microseconds.
async fn cpu_each(router: &Router, requests: usize, body: Bytes) -> f64 {
    let before = router.cpu();
    let mut clients = JoinSet::new();
    for _ in 0..CONNECTIONS {
        let mut sender = router.connect().await;
        let body = body.clone();
        clients.spawn(async move {
            for _ in 0..requests {
                ask(&mut sender, body.clone()).await;
            }
        });
    }
    clients.join_all().await;
    (router.cpu() - before).as_secs_f64() * 1e6 / (requests * CONNECTIONS) as f64
}

/// p99 of requests at a fixed pace, in microseconds, and handshakes that were completed a second.
async fn p99(router: &Arc<Router>, handshakes: u32) -> (f64, f64) {
    let started = Instant::now();
    let shaking = tokio::spawn({
        let router = router.clone();
        async move {
            let mut running = JoinSet::new();
            let mut done = 0_u32;
            let mut tick = tokio::time::interval(Duration::from_millis(5));
            while handshakes > 0 && started.elapsed() < PACED_TIME {
                tick.tick().await;
                for _ in 0..handshakes / 200 {
                    let router = router.clone();
                    running.spawn(async move { drop(router.connect().await) });
                }
                while running.try_join_next().is_some() {
                    done += 1;
                }
            }
            running.join_all().await;
            f64::from(done) / PACED_TIME.as_secs_f64()
        }
    });
    let mut senders = Vec::new();
    for _ in 0..4 {
        senders.push(router.connect().await);
    }
    let (sent, mut received) = tokio::sync::mpsc::unbounded_channel();
    let mut tick = tokio::time::interval(Duration::from_secs(1) / PACE);
    let free = Arc::new(tokio::sync::Mutex::new(senders));
    while started.elapsed() < PACED_TIME {
        let due = tick.tick().await.into_std();
        let (free, sent, router) = (free.clone(), sent.clone(), router.clone());
        tokio::spawn(async move {
            let sender = free.lock().await.pop();
            let mut sender = match sender {
                Some(sender) => sender,
                None => router.connect().await,
            };
            ask(&mut sender, body(1, false)).await;
            let _ = sent.send(due.elapsed());
            free.lock().await.push(sender);
        });
    }
    drop(sent);
    let mut times = Vec::new();
    while let Some(time) = received.recv().await {
        times.push(time.as_secs_f64() * 1e6);
    }
    times.sort_by(f64::total_cmp);
    (times[times.len() * 99 / 100], shaking.await.unwrap())
}

fn shown(values: &mut [f64]) -> String {
    values.sort_by(f64::total_cmp);
    let (least, most) = (values[0], values[values.len() - 1]);
    format!("{:8.1} ({least:.1} to {most:.1})", values[values.len() / 2])
}

fn main() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(run());
}

async fn run() {
    let temporary = tempfile::tempdir().unwrap();
    let folder = temporary.path();
    let mut params = CertificateParams::new(vec![]).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let ca = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
    let params = CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
    let key = KeyPair::generate().unwrap();
    let certificate = params.signed_by(&key, &ca).unwrap();
    std::fs::write(folder.join("tls.crt"), certificate.pem()).unwrap();
    std::fs::write(folder.join("tls.key"), key.serialize_pem()).unwrap();
    let mut roots = RootCertStore::empty();
    roots.add(ca.der().clone()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.resumption = rustls::client::Resumption::disabled();
    let connector = TlsConnector::from(Arc::new(config));

    let engine = worker::bind(worker::Settings {
        decode_ms: 0,
        answer_times: AnswerTimes::NONE,
        prefill_tokens_per_second: u32::MAX.try_into().unwrap(),
        ..worker::Settings::default()
    });
    let engine = engine.await.unwrap();
    let address = engine.addr();
    tokio::spawn(engine.run(std::future::pending()));
    let clear = Router::start(address, folder, None);
    let tls = Arc::new(Router::start(address, folder, Some(connector)));
    clear.wait().await;
    tls.wait().await;

    for (what, requests, body) in [
        ("CPU a request of 2 KB", REQUESTS, body(1, false)),
        (
            "CPU a stream of 200 tokens",
            STREAMS,
            body(STREAM_TOKENS, true),
        ),
    ] {
        let (mut of_clear, mut of_tls, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            let in_clear = cpu_each(&clear, requests, body.clone()).await;
            let over_tls = cpu_each(&tls, requests, body.clone()).await;
            of_clear.push(in_clear);
            of_tls.push(over_tls);
            ratios.push(over_tls / in_clear);
        }
        println!(
            "{what}, us: clear {}, TLS {}",
            shown(&mut of_clear),
            shown(&mut of_tls)
        );
        ratios.sort_by(f64::total_cmp);
        println!(
            "  ratio {:.2} ({:.2} to {:.2})",
            ratios[ROUNDS / 2],
            ratios[0],
            ratios[ROUNDS - 1]
        );
    }
    let (mut alone, mut beside, mut rates) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        alone.push(p99(&tls, 0).await.0);
        let (p99, rate) = p99(&tls, HANDSHAKES).await;
        beside.push(p99);
        rates.push(rate);
    }
    println!(
        "p99 of {PACE} requests/s over TLS, us: alone {}",
        shown(&mut alone)
    );
    println!(
        "  with {} handshakes/s: {}",
        shown(&mut rates),
        shown(&mut beside)
    );
}
