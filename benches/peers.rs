//! Replicas that report their load to each other, over real sockets in one process.
//!
//! Budget: one replica beside 29 others, each with 500 requests/s at 20 workers, at most 3 % of a core for its thread;
//! with 8 replicas in a full mesh a request at one is seen by the others within 50 ms (p99). Numbers are printed, with
//! medians of the rounds, and the process's resident memory: `cargo bench --bench peers`.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    clippy::disallowed_methods,
    reason = "a bench prints, and waits in real time"
)]

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};
use tokio::net::TcpListener;
use tokio::runtime::Handle;
use warmroute::fleet::Worker;
use warmroute::fleet::discovery::{WorkerDefaults, WorkerSpec};
use warmroute::fleet::in_flight::InFlight;
use warmroute::fleet::registry::{self, Registry};
use warmroute::http::client;
use warmroute::http::drain::Tasks;
use warmroute::http::io_threads::OffloadThread;
use warmroute::kv::predicted::{self, PredictedIndex};
use warmroute::kv::unconfirmed::{self, UnconfirmedBlocks};
use warmroute::observe::metrics;
use warmroute::peers::pace;
use warmroute::peers::routed::RoutedPrompts;
use warmroute::peers::settings::PeerDiscovery;
use warmroute::peers::{Peers, Settings};

const WORKERS: usize = 20;

struct Replica {
    peers: Peers,
    address: SocketAddr,
    workers: Vec<Arc<Worker>>,
    running: VecDeque<InFlight>,
}

impl Replica {
    /// One among `peers` other replicas in all, which need not all be connected.
    fn start(runtime: &Handle, listed: Vec<String>, peers: usize) -> Self {
        let fleet = Registry::new(client::Settings::default(), registry::Settings::default());
        let url = |worker| WorkerSpec::from(format!("http://10.0.0.{worker}:8000"));
        let defaults = WorkerDefaults::default();
        let members = (0..WORKERS).map(|worker| url(worker).member(&defaults).unwrap());
        fleet.set_members("static", members.collect());
        let snapshot = fleet.snapshot().clone();
        let workers = snapshot.workers.iter();
        let workers = workers.map(|status| status.worker.clone()).collect();
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        let mut settings = Settings {
            listen: address.to_string(),
            discovery: vec![PeerDiscovery::Static(listed)],
            ..Settings::default()
        };
        let interval = &mut settings.advanced.report_interval;
        *interval = pace::interval(*interval, peers);
        let (registry, now) = (metrics::Registry::default(), Instant::now());
        let predicted = PredictedIndex::new(
            predicted::Settings::default(),
            predicted::Metrics::new(&registry),
            now,
        );
        let unconfirmed = UnconfirmedBlocks::new(
            unconfirmed::Settings::default(),
            unconfirmed::Metrics::new(&registry),
        );
        let routed = RoutedPrompts::new(1_000, Arc::new(predicted), unconfirmed, &registry);
        let peers =
            Peers::new(&settings, address, None, fleet, Arc::new(routed), &registry).unwrap();
        let running = peers.clone();
        drop(runtime.spawn(async move {
            let listener = TcpListener::from_std(listener).unwrap();
            running.run(settings, listener, Tasks::default()).await;
        }));
        Self {
            peers,
            address,
            workers,
            running: VecDeque::new(),
        }
    }

    /// A request starts; one has its first token, and one ends.
    fn step(&mut self) {
        let worker = self.workers[fastrand::usize(..WORKERS)].clone();
        self.running.push_back(InFlight::new(worker, 2_000, 500));
        let decoding = self.running.len().saturating_sub(50);
        if let Some(request) = self.running.get_mut(decoding) {
            request.on_first_token();
        }
        if self.running.len() > 250 {
            self.running.pop_front();
        }
    }

    fn connected(&self) -> usize {
        let status = self.peers.status(Instant::now()).unwrap();
        status
            .peers
            .iter()
            .filter(|peer| peer.state == "connected")
            .count()
    }
}

/// CPU time of a runtime's only thread.
fn cpu_time(runtime: &Handle) -> Duration {
    let (sender, receiver) = std::sync::mpsc::channel();
    drop(runtime.spawn(async move {
        let time = clock_gettime(ClockId::ThreadCPUTime);
        let time = Duration::new(time.tv_sec as u64, time.tv_nsec as u32);
        sender.send(time).unwrap();
    }));
    receiver.recv().unwrap()
}

/// The resident memory of this process.
fn resident_mb() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.trim().parse().ok());
    kib.unwrap_or(f64::NAN) / 1_024.0
}

fn wait(what: &str, mut holds: impl FnMut() -> bool) {
    let started = Instant::now();
    while !holds() {
        assert!(started.elapsed() < Duration::from_secs(30), "{what}");
        sleep(Duration::from_millis(5));
    }
}

fn median<const N: usize>(mut values: [f64; N]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[N / 2]
}

/// One replica beside 29 others, which report as often as if they were connected with each other, too; only its own
/// thread is measured.
fn share_of_a_core() {
    const OTHERS: usize = 29;
    let (own, other) = (
        OffloadThread::start("own").unwrap(),
        OffloadThread::start("others").unwrap(),
    );
    let subject = Replica::start(own.runtime(), Vec::new(), 0);
    let listed = vec![subject.address.to_string()];
    let start = |_| Replica::start(other.runtime(), listed.clone(), OTHERS);
    let mut replicas: Vec<Replica> = (0..OTHERS).map(start).collect();
    wait("all are connected", || subject.connected() == OTHERS);
    replicas.push(subject);
    let mut rounds = [0.0; 5];
    for share in &mut rounds {
        let (started, used) = (Instant::now(), cpu_time(own.runtime()));
        let mut requests = 0_u32;
        while started.elapsed() < Duration::from_secs(10) {
            // 500 a second at each.
            let due = (started.elapsed().as_secs_f64() * 500.0) as u32;
            while requests < due {
                replicas.iter_mut().for_each(Replica::step);
                requests += 1;
            }
            sleep(Duration::from_millis(1));
        }
        let used = cpu_time(own.runtime()) - used;
        *share = used.as_secs_f64() / started.elapsed().as_secs_f64() * 100.0;
    }
    println!(
        "30 replicas x 500 requests/s at {WORKERS} workers: {:.2} % of a core (rounds {rounds:.2?})",
        median(rounds)
    );
    println!("resident memory of all 30: {:.0} MB", resident_mb());
    // What was measured is right.
    let expected: u32 = replicas[..OTHERS]
        .iter()
        .map(|replica| replica.running.len() as u32)
        .sum();
    let subject = &replicas[OTHERS];
    wait("the sums are the truth", || {
        let seen: u32 = subject
            .workers
            .iter()
            .map(|worker| worker.load.peers_requests())
            .sum();
        seen == expected
    });
}

/// The time from a request at one replica until each of seven others counts it.
fn lag() {
    const REPLICAS: usize = 8;
    let threads: Vec<OffloadThread> = (0..REPLICAS)
        .map(|number| OffloadThread::start(&format!("replica-{number}")).unwrap())
        .collect();
    let mut replicas: Vec<Replica> = Vec::new();
    for thread in &threads {
        let listed = replicas
            .iter()
            .map(|replica| replica.address.to_string())
            .collect();
        replicas.push(Replica::start(thread.runtime(), listed, 0));
    }
    wait("all are connected", || {
        replicas
            .iter()
            .all(|replica| replica.connected() == REPLICAS - 1)
    });
    let mut rounds = [0.0; 3];
    let mut all = Vec::new();
    for p99 in &mut rounds {
        let mut lags = Vec::new();
        for _ in 0..100 {
            let (from, worker) = (fastrand::usize(..REPLICAS), fastrand::usize(..WORKERS));
            let before: Vec<u32> = replicas
                .iter()
                .map(|replica| replica.workers[worker].load.peers_requests())
                .collect();
            let started = Instant::now();
            let request = InFlight::new(replicas[from].workers[worker].clone(), 1_000, 0);
            let mut unseen: Vec<usize> = (0..REPLICAS).filter(|at| *at != from).collect();
            while !unseen.is_empty() {
                unseen.retain(|at| {
                    let is_seen = replicas[*at].workers[worker].load.peers_requests() > before[*at];
                    if is_seen {
                        lags.push(started.elapsed().as_secs_f64() * 1_000.0);
                    }
                    !is_seen
                });
                sleep(Duration::from_micros(200));
            }
            drop(request);
            sleep(Duration::from_millis(60 + fastrand::u64(..20)));
        }
        lags.sort_by(f64::total_cmp);
        *p99 = lags[lags.len() * 99 / 100];
        all.extend(lags);
    }
    all.sort_by(f64::total_cmp);
    println!(
        "lag at 8 replicas: p50 {:.1} ms, p99 {:.1} ms (rounds {rounds:.1?}), max {:.1} ms",
        all[all.len() / 2],
        median(rounds),
        all[all.len() - 1]
    );
}

fn main() {
    // Under `cargo test --benches` it is only built.
    if std::env::args().any(|argument| argument == "--test") {
        return;
    }
    share_of_a_core();
    lag();
}
