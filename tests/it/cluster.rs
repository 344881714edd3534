//! Pretend engines and a router in front of them, in this process or as real ones.

use std::fmt::Write as _;
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde_json::Value;
use tempfile::{NamedTempFile, TempPath};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use warmroute::app::App;
use warmroute::config::{Config, reader};
use warmroute::fleet::Role;
use warmroute::fleet::discovery::WorkerSpec;
use warmroute::fleet::kv_transfer;
use warmroute::openai::tenant::TenantSpec;
use warmroute::secret::Secret;
use warmroute::sim::fault::Faults;
use warmroute::sim::worker::publisher::{self, BoundEndpoints};
use warmroute::sim::worker::{self, CacheContents, RequestStats, Settings, TransferStats};

use crate::client::{self, Answer, Open};
use crate::own_ports;
use crate::patience::too_long;

/// The only wait: polls until the condition holds, and gives up after far longer than it can take.
pub(crate) async fn eventually(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let started = Instant::now();
    while !holds().await {
        assert!(started.elapsed() < too_long(), "never: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// An engine that computes so fast that tests wait for the router only.
pub(crate) fn fast() -> Settings {
    Settings {
        decode_ms: 1,
        prefill_tokens_per_second: 1_000_000.try_into().unwrap(),
        ..Settings::default()
    }
}

/// As [`fast`], and it publishes KV events.
pub(crate) fn telling() -> Settings {
    Settings {
        kv: publisher::Settings::loopback(),
        ..fast()
    }
}

/// An engine that generates for as long as a test wants it to.
pub(crate) fn unhurried() -> Settings {
    Settings {
        decode_ms: 20,
        ..fast()
    }
}

/// An engine that speaks chat completions only.
pub(crate) fn chat_only() -> Settings {
    Settings {
        no_responses: true,
        ..fast()
    }
}

/// An engine with this role in disaggregated prefill/decode.
pub(crate) fn with_role(settings: Settings, connector: worker::Connector, role: Role) -> Settings {
    Settings {
        transfer: worker::TransferSettings {
            role: Some(role),
            connector: Some(connector),
            connect_ms: 50,
            ..worker::TransferSettings::default()
        },
        ..settings
    }
}

/// The engines' connector, as a router is told of it.
pub(crate) fn router_connector(connector: worker::Connector) -> kv_transfer::Connector {
    match connector {
        worker::Connector::Nixl => kv_transfer::Connector::Nixl,
        worker::Connector::Mooncake => kv_transfer::Connector::Mooncake,
        worker::Connector::Moriio => kv_transfer::Connector::Moriio,
    }
}

/// A tenant with a key of its own: its name after `sk-`.
pub(crate) fn tenant(name: &str) -> TenantSpec {
    TenantSpec {
        name: name.to_owned(),
        keys: vec![Secret::new(format!("sk-{name}"))],
        ..TenantSpec::default()
    }
}

/// A chat of one message.
pub(crate) fn chat(text: &str, max_tokens: usize, stream: bool) -> String {
    serde_json::json!({
        "model": "sim",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": max_tokens,
        "stream": stream,
    })
    .to_string()
}

/// The three APIs that generate, with a body for each. Their prompts have nothing in common.
pub(crate) fn generating(max_tokens: usize, stream: bool) -> [(&'static str, String); 3] {
    let text = |of: &str| format!("{of}: once upon a time there was a router. ").repeat(8);
    let completion = serde_json::json!({
        "model": "sim", "prompt": text("1"), "max_tokens": max_tokens, "stream": stream});
    let response = serde_json::json!({
        "model": "sim", "input": text("2"), "max_output_tokens": max_tokens, "stream": stream});
    [
        ("/v1/chat/completions", chat(&text("3"), max_tokens, stream)),
        ("/v1/completions", completion.to_string()),
        ("/v1/responses", response.to_string()),
    ]
}

/// One pretend engine.
#[derive(Debug)]
pub(crate) struct Engine {
    pub(crate) name: String,
    pub(crate) address: SocketAddr,
    /// Where each rank's KV events are; empty if they are off.
    pub(crate) events: Vec<BoundEndpoints>,
    /// What it does of a request; all of it, if it has no connector.
    role: Role,
    /// Where decode engines learn its id, if they ask for that.
    bootstrap: Option<SocketAddr>,
    is_killed: bool,
    process: Process,
}

#[derive(Debug)]
enum Process {
    Here {
        handle: worker::Handle,
        task: JoinHandle<()>,
    },
    Child(Killed),
}

/// A child process that does not outlive the test.
#[derive(Debug)]
pub(crate) struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Killed {
    /// Starts it. What it prints can be read; what it logs is lost.
    pub(crate) fn start(command: &mut Command) -> (Self, BufReader<ChildStdout>) {
        command.stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = Self(command.spawn().unwrap());
        let printed = child.0.stdout.take().unwrap();
        (child, BufReader::new(printed))
    }

    pub(crate) fn id(&self) -> u32 {
        self.0.id()
    }

    pub(crate) fn signal(&self, name: &str) {
        let kill = format!("kill -{name} {}", self.0.id());
        let status = Command::new("sh").args(["-c", &kill]).status().unwrap();
        assert!(status.success(), "{kill}");
    }

    /// The exit status, if it has ended.
    pub(crate) fn ended(&mut self) -> Option<ExitStatus> {
        self.0.try_wait().unwrap()
    }
}

/// Another process may take a port between its being found and its use.
const TRIES: usize = 5;

impl Engine {
    pub(crate) async fn here(name: &str, settings: Settings) -> Self {
        for _ in 0..TRIES {
            let engine = Self::try_here(name, with_own_ports(settings.clone())).await;
            if let Some(engine) = engine {
                return engine;
            }
        }
        panic!("no engine could listen");
    }

    pub(crate) async fn try_here(name: &str, settings: Settings) -> Option<Self> {
        let role = settings.transfer.role().unwrap_or_default();
        let worker = worker::bind(settings).await.ok()?;
        let (address, handle) = (worker.addr(), worker.handle());
        let (events, bootstrap) = (handle.kv_events(), handle.bootstrap());
        let task = tokio::spawn(worker.run(std::future::pending()));
        Some(Self {
            name: name.to_owned(),
            address,
            events,
            role,
            bootstrap,
            is_killed: false,
            process: Process::Here { handle, task },
        })
    }

    /// A process of its own, which can be killed.
    pub(crate) fn child(name: &str, settings: &Settings) -> Self {
        let mut tries = (0..TRIES).map(|_| with_own_ports(settings.clone()));
        let engine = tries.find_map(|settings| Self::try_child(name, &settings));
        engine.expect("an engine that listens")
    }

    fn try_child(name: &str, settings: &Settings) -> Option<Self> {
        let mut command = Command::new(env!("CARGO_BIN_EXE_warmroute"));
        command
            .arg("sim")
            .args(["--listen", &settings.listen.to_string()])
            .args(["--decode-time", &format!("{}ms", settings.decode_ms)])
            .args([
                "--prefill-tokens-per-second",
                &settings.prefill_tokens_per_second.to_string(),
            ]);
        for model in &settings.models {
            command.args(["--model", model]);
        }
        command
            .args(["--block-tokens", &settings.block_tokens.to_string()])
            .args(["--cache-blocks", &settings.cache_blocks.to_string()]);
        if settings.no_responses {
            command.arg("--no-responses");
        }
        command.args(event_arguments(settings));
        command.args(transfer_arguments(settings));
        let (child, printed) = Killed::start(&mut command);
        let mut lines = printed.lines();
        let line = lines.next()?.unwrap();
        let address = line.trim_start_matches("listening on http://");
        let ranks = match settings.kv.events {
            Some(_) => settings.data_parallel_size.get(),
            None => 0,
        };
        let events = lines.by_ref().take(usize::from(ranks));
        let events = events.map(|line| bound(&line.unwrap())).collect();
        let has_bootstrap = settings.transfer.connector == Some(worker::Connector::Mooncake)
            && settings.transfer.role != Some(Role::Decode);
        let bootstrap = has_bootstrap.then(|| lines.next().unwrap().unwrap());
        let bootstrap = bootstrap.map(|line| {
            let address = line.trim_start_matches("bootstrap on http://");
            address.parse().unwrap()
        });
        Some(Self {
            name: name.to_owned(),
            address: address.parse().ok()?,
            events,
            role: settings.transfer.role().unwrap_or_default(),
            bootstrap,
            is_killed: false,
            process: Process::Child(child),
        })
    }

    pub(crate) async fn stats(&self) -> RequestStats {
        match &self.process {
            Process::Here { handle, .. } => handle.stats(),
            Process::Child(_) => panic!("only engines in this process are looked into"),
        }
    }

    pub(crate) async fn fault(&self, faults: Faults) {
        match &self.process {
            Process::Here { handle, .. } => handle.set_faults(faults),
            Process::Child(_) => {
                let body = serde_json::to_string(&faults).unwrap();
                let answer = client::post(self.address, "/sim/faults", body).await;
                assert_eq!(answer.status, 200);
            }
        }
    }

    /// No answer gets more than this many tokens until [`Self::let_go`]: what a test does in the middle of an answer is in its
    /// middle on a slow machine, too.
    pub(crate) async fn hold_after(&self, tokens: usize) {
        self.fault(Faults {
            stall_after_tokens: Some(tokens),
            ..Faults::default()
        })
        .await;
    }

    pub(crate) async fn let_go(&self) {
        self.fault(Faults::default()).await;
    }

    /// What it has seen of prompts that are handed over.
    pub(crate) async fn kv_transfers(&self) -> TransferStats {
        match &self.process {
            Process::Here { handle, .. } => handle.kv_transfers(),
            Process::Child(_) => {
                let answer = client::get(self.address, "/sim/kv_transfers").await;
                serde_json::from_slice(&answer.body).unwrap()
            }
        }
    }

    /// What a rank has cached, and how much of that it has published.
    pub(crate) async fn cache_contents(&self, rank: usize) -> CacheContents {
        match &self.process {
            Process::Here { handle, .. } => handle.cache_contents(rank),
            Process::Child(_) => {
                let answer = client::get(self.address, "/sim/cache").await;
                let mut truths: Vec<CacheContents> = serde_json::from_slice(&answer.body).unwrap();
                truths.swap_remove(rank)
            }
        }
    }

    /// Forgets its cache, as an operator asks it to.
    pub(crate) async fn reset(&self) {
        let answer = client::post(self.address, "/reset_prefix_cache", "").await;
        assert_eq!(answer.status, 200);
    }

    /// Prompt tokens that the engine found in its cache, ever.
    pub(crate) fn cached_tokens(&self) -> u64 {
        match &self.process {
            Process::Here { handle, .. } => handle.counters().prefix_hits,
            Process::Child(_) => panic!("only engines in this process are looked into"),
        }
    }

    /// Ends it without a word: SIGKILL for a child, its sockets closed at once for one of ours.
    pub(crate) async fn kill(&mut self) {
        self.is_killed = true;
        match &mut self.process {
            Process::Here { task, .. } => {
                task.abort();
                eventually("its sockets are closed", async || task.is_finished()).await;
            }
            Process::Child(child) => {
                child.0.kill().unwrap();
                child.0.wait().unwrap();
            }
        }
    }

    /// Whether its process has ended, by itself or because a test killed it.
    pub(crate) fn is_gone(&self) -> bool {
        match &self.process {
            Process::Here { task, .. } => task.is_finished(),
            Process::Child(_) => self.is_killed,
        }
    }

    pub(crate) fn signal(&self, name: &str) {
        match &self.process {
            Process::Here { .. } => panic!("only children take signals"),
            Process::Child(child) => child.signal(name),
        }
    }

    /// A new process in the place of this one. Its events, if it has any, take the ports of rank 0 and
    /// up.
    pub(crate) async fn restart(&mut self, settings: Settings) {
        self.kill().await;
        let first = self.events.first();
        let settings = Settings {
            listen: self.address,
            kv: publisher::Settings {
                events: settings
                    .kv
                    .events
                    .and(first.map(|endpoints| endpoints.events.into())),
                replay: settings
                    .kv
                    .replay
                    .and(first.and_then(|endpoints| endpoints.replay.map(Into::into))),
                ..settings.kv
            },
            ..settings
        };
        let is_here = matches!(self.process, Process::Here { .. });
        let mut started = None;
        // A killed process' sockets may be there for a moment.
        eventually("the ports are free again", async || {
            started = if is_here {
                Self::try_here(&self.name, settings.clone()).await
            } else {
                Self::try_child(&self.name, &settings)
            };
            started.is_some()
        })
        .await;
        *self = started.unwrap();
    }

    pub(crate) fn listed(&self) -> WorkerSpec {
        WorkerSpec {
            url: format!("http://{}", self.address),
            name: self.name.clone(),
            role: Some(self.role),
            bootstrap: self
                .bootstrap
                .map_or_else(String::new, |at| format!("http://{at}")),
            ..WorkerSpec::default()
        }
    }
}

/// Ports that stay the engine's when it starts again, where it may take any.
fn with_own_ports(mut settings: Settings) -> Settings {
    if settings.listen.port() == 0 {
        settings.listen.set_port(own_ports::port());
    }
    let kv = &mut settings.kv;
    for endpoint in [&mut kv.events, &mut kv.replay].into_iter().flatten() {
        if endpoint.port == 0 {
            endpoint.port = own_ports::ports(settings.data_parallel_size.get());
        }
    }
    settings
}

fn transfer_arguments(settings: &Settings) -> Vec<String> {
    let transfer = &settings.transfer;
    let lower =
        |name: &str, value: &dyn std::fmt::Debug| format!("--kv-{name}={value:?}").to_lowercase();
    let role = transfer.role.iter().map(|role| lower("role", role));
    let connector = transfer
        .connector
        .iter()
        .map(|connector| lower("connector", connector));
    let lease = transfer
        .lease_ms
        .iter()
        .map(|ms| format!("--kv-transfer-lease={ms}ms"));
    let connect = format!("--kv-transfer-connect-timeout={}ms", transfer.connect_ms);
    role.chain(connector)
        .chain(lease)
        .chain([connect])
        .collect()
}

impl Drop for Engine {
    fn drop(&mut self) {
        if let Process::Here { task, .. } = &self.process {
            task.abort();
        }
    }
}

fn event_arguments(settings: &Settings) -> Vec<String> {
    let kv = &settings.kv;
    let mut arguments = vec![
        format!("--data-parallel-size={}", settings.data_parallel_size),
        format!("--kv-topic={}", kv.topic),
        format!("--kv-buffer-steps={}", kv.buffer_steps),
        format!("--kv-first-sequence={}", kv.first_sequence),
        format!("--kv-layout={:?}", kv.layout).to_lowercase(),
        format!("--kv-hashes={:?}", kv.hashes).to_lowercase(),
    ];
    let endpoints = [("events", &kv.events), ("replay", &kv.replay)];
    for (name, endpoint) in endpoints {
        arguments.extend(endpoint.iter().map(|at| format!("--kv-{name}={at}")));
    }
    arguments
}

/// Reads where a child says that a rank's events are.
fn bound(line: &str) -> BoundEndpoints {
    let addresses = line.split("tcp://").skip(1);
    let mut addresses = addresses.map(|at| at.split(',').next().unwrap().parse().unwrap());
    BoundEndpoints {
        events: addresses.next().unwrap(),
        replay: addresses.next(),
    }
}

/// A router, in this process or as a child.
#[derive(Debug)]
pub(crate) struct Router {
    pub(crate) api: SocketAddr,
    pub(crate) admin: SocketAddr,
    /// Where other replicas connect.
    pub(crate) peers: Option<SocketAddr>,
    _app: Option<App>,
    pub(crate) child: Option<Killed>,
    log: Arc<Mutex<String>>,
    /// Whether the child's log is read as it is written.
    is_log_read: Arc<AtomicBool>,
    _file: Option<Removed>,
}

/// A file that does not outlive the test.
#[derive(Debug)]
pub(crate) struct Removed(pub(crate) TempPath);

impl Removed {
    pub(crate) fn new(text: &str) -> Self {
        let file = NamedTempFile::with_suffix(".yaml").unwrap();
        std::fs::write(file.path(), text).unwrap();
        Self(file.into_temp_path())
    }
}

impl Router {
    pub(crate) async fn here(config: &Config) -> Self {
        let listen = async || TcpListener::bind("127.0.0.1:0").await.unwrap();
        let peers = if config.peers.is_on() {
            Some(listen().await)
        } else {
            None
        };
        let app = App::start_with_peers(config, listen().await, listen().await, peers).unwrap();
        Self {
            peers: app.peers_address(),
            api: app.api_address(),
            admin: app.admin_address(),
            _app: Some(app),
            child: None,
            log: Arc::default(),
            is_log_read: Arc::default(),
            _file: None,
        }
    }

    pub(crate) async fn child(config: &Config) -> Self {
        Self::child_with(config, "$(ulimit -Hn)", &[]).await
    }

    /// As [`Router::child`], with environment variables.
    pub(crate) async fn child_in(config: &Config, environment: &[(&str, &str)]) -> Self {
        Self::child_with(config, "$(ulimit -Hn)", environment).await
    }

    /// `limit`: file descriptors that it may open.
    async fn child_with(config: &Config, limit: &str, environment: &[(&str, &str)]) -> Self {
        let mut text = reader::to_yaml(config).unwrap();
        // A printed configuration hides its secrets.
        let keys = config.responses.state_token.keys.iter();
        if let Some(key) = keys
            .chain([&config.peers.secret])
            .find(|key| !key.is_empty())
        {
            text = text.replace("***", key.expose());
        }
        let file = Removed::new(&text);
        let mut router = Self::child_of(&file.0, limit, environment).await;
        router._file = Some(file);
        router
    }

    /// As [`Router::child`], with a file of the test's own.
    pub(crate) async fn child_of(
        file: &std::path::Path,
        limit: &str,
        environment: &[(&str, &str)],
    ) -> Self {
        // A thousand connections need more files than a shell allows by default.
        let mut command = Command::new("sh");
        command
            .arg("-c")
            .arg(format!(r#"ulimit -n "{limit}"; exec "$0" "$@""#))
            .arg(env!("CARGO_BIN_EXE_warmroute"))
            .args(["serve", "--config"])
            .arg(file)
            .envs(environment.iter().copied());
        let mut child = Killed(command.stderr(Stdio::piped()).spawn().unwrap());
        let mut lines = BufReader::new(child.0.stderr.take().unwrap()).lines();
        let log: Arc<Mutex<String>> = Arc::default();
        let kept = log.clone();
        let is_log_read = Arc::new(AtomicBool::new(true));
        let is_read = is_log_read.clone();
        // Ends with the child.
        std::thread::spawn(move || {
            while let Some(Ok(line)) = lines.next() {
                writeln!(kept.lock(), "{line}").unwrap();
                while !is_read.load(Relaxed) {
                    std::thread::sleep(Duration::from_millis(5));
                }
            }
        });
        let mut addresses = None;
        eventually("the child listens", async || {
            addresses = log.lock().lines().find_map(listening);
            addresses.is_some()
        })
        .await;
        let (api, admin, peers) = addresses.unwrap();
        Self {
            api,
            admin,
            peers,
            _app: None,
            child: Some(child),
            log,
            is_log_read,
            _file: None,
        }
    }

    /// Waits until its first worker is up.
    pub(crate) async fn worker_is_up(&self) {
        eventually("the worker is up", async || {
            let fleet = client::get(self.admin, "/fleet").await.json();
            fleet["workers"][0]["health"] == "up"
        })
        .await;
    }

    pub(crate) fn log(&self) -> String {
        self.log.lock().clone()
    }

    /// Reads a child's log, or leaves it where it is, so that the pipe fills.
    pub(crate) fn read_log(&self, reads: bool) {
        self.is_log_read.store(reads, Relaxed);
    }
}

/// The addresses in a log line, if it is the one that has them.
fn listening(line: &str) -> Option<(SocketAddr, SocketAddr, Option<SocketAddr>)> {
    let line: Value = serde_json::from_str(line).ok()?;
    let address = |name: &str| line[name].as_str()?.parse().ok();
    (line["message"] == "listening").then_some(())?;
    Some((address("api")?, address("admin")?, address("peers")))
}

/// Quick probes, free ports, logs that a test can read.
pub(crate) fn config() -> Config {
    let mut config = Config::default();
    "127.0.0.1:0".clone_into(&mut config.api.listen);
    "127.0.0.1:0".clone_into(&mut config.admin.listen);
    config.api.drain_delay = Duration::ZERO;
    config.fleet.health.interval = Duration::from_millis(50);
    config.requests.advanced.min_retries_per_second = 1_000;
    config.log.format = warmroute::observe::Format::Json;
    config
}

/// Engines with a router in front of them.
#[derive(Debug)]
pub(crate) struct Cluster {
    pub(crate) engines: Vec<Engine>,
    pub(crate) router: Router,
}

impl Cluster {
    /// `count` fast engines and a router of default settings, all in this process.
    pub(crate) async fn fast(count: usize) -> Self {
        Self::start(vec![fast(); count], |_| {}).await
    }

    pub(crate) async fn start(engines: Vec<Settings>, change: impl FnOnce(&mut Config)) -> Self {
        let engines = Self::engines_here(engines).await;
        let config = Self::config_of(&engines, change);
        Self::of(engines, Router::here(&config).await).await
    }

    /// As [`Cluster::start`], with engines that are processes of their own.
    pub(crate) async fn start_children(
        engines: Vec<Settings>,
        change: impl FnOnce(&mut Config),
    ) -> Self {
        let engines = Self::engine_children(&engines);
        let config = Self::config_of(&engines, change);
        Self::of(engines, Router::here(&config).await).await
    }

    /// As [`Cluster::start`], with a router that is a process of its own.
    pub(crate) async fn with_router_child(
        engines: Vec<Settings>,
        change: impl FnOnce(&mut Config),
    ) -> Self {
        let engines = Self::engines_here(engines).await;
        let config = Self::config_of(&engines, change);
        Self::of(engines, Router::child(&config).await).await
    }

    /// As [`Cluster::with_router_child`], with a router that may open only this many file descriptors.
    pub(crate) async fn with_few_descriptors(engines: Vec<Settings>, limit: u32) -> Self {
        let engines = Self::engines_here(engines).await;
        let config = Self::config_of(&engines, |_| {});
        let router = Router::child_with(&config, &limit.to_string(), &[]).await;
        Self::of(engines, router).await
    }

    /// Everything is a process of its own.
    pub(crate) async fn all_children(engines: Vec<Settings>) -> Self {
        let engines = Self::engine_children(&engines);
        let config = Self::config_of(&engines, |_| {});
        Self::of(engines, Router::child(&config).await).await
    }

    /// A cluster with engines of the test's own.
    pub(crate) async fn with(engines: Vec<Engine>, change: impl FnOnce(&mut Config)) -> Self {
        let config = Self::config_of(&engines, change);
        Self::of(engines, Router::here(&config).await).await
    }

    pub(crate) async fn engines_here(settings: Vec<Settings>) -> Vec<Engine> {
        let mut engines = Vec::new();
        for (place, settings) in settings.into_iter().enumerate() {
            engines.push(Engine::here(&format!("w{place}"), settings).await);
        }
        engines
    }

    fn engine_children(settings: &[Settings]) -> Vec<Engine> {
        let child = |(place, settings)| Engine::child(&format!("w{place}"), settings);
        settings.iter().enumerate().map(child).collect()
    }

    fn config_of(engines: &[Engine], change: impl FnOnce(&mut Config)) -> Config {
        let mut config = config();
        config.workers = engines.iter().map(Engine::listed).collect();
        change(&mut config);
        config
    }

    async fn of(engines: Vec<Engine>, router: Router) -> Self {
        let cluster = Self { engines, router };
        cluster.all_up().await;
        cluster
    }

    /// Waits until every engine can take requests.
    pub(crate) async fn all_up(&self) {
        for engine in &self.engines {
            self.is_worker(&engine.name, "health", "up").await;
        }
    }

    /// Waits until a worker's row of `/fleet` says so.
    pub(crate) async fn is_worker(&self, name: &str, field: &str, value: impl Into<Value>) {
        let value = value.into();
        eventually(&format!("{name}: {field} is {value}"), async || {
            self.worker(name).await[field] == value
        })
        .await;
    }

    /// A worker's row of `/fleet`; null if there is none.
    pub(crate) async fn worker(&self, name: &str) -> Value {
        let fleet = self.admin("/fleet").await.json();
        let mut rows = fleet["workers"].as_array().unwrap().iter();
        rows.find(|row| row["name"] == name)
            .cloned()
            .unwrap_or_default()
    }

    pub(crate) async fn admin(&self, path: &str) -> Answer {
        client::get(self.router.admin, path).await
    }

    pub(crate) async fn post_admin(&self, path: &str, body: &str) -> Answer {
        client::post(self.router.admin, path, body.to_owned()).await
    }

    pub(crate) async fn post(&self, path: &str, body: impl Into<bytes::Bytes>) -> Answer {
        client::post(self.router.api, path, body).await
    }

    /// A POST that asks for the decision, and the worker it names.
    pub(crate) async fn post_decided(&self, path: &str, body: &str) -> (Answer, Decided) {
        let headers = [("x-warmroute-decision", "1")];
        let answer = client::send(self.router.api, "POST", path, &headers, body.to_owned()).await;
        let decided = Decided::of(answer.header("x-warmroute-decision"));
        (answer, decided)
    }

    pub(crate) async fn open(&self, path: &str, body: &str) -> Open {
        client::open(self.router.api, "POST", path, &[], body.to_owned()).await
    }

    pub(crate) async fn get(&self, path: &str) -> Answer {
        client::get(self.router.api, path).await
    }

    /// The sum of a metric's samples whose line has all of `labels`.
    pub(crate) async fn metric(&self, name: &str, labels: &[&str]) -> f64 {
        let page = self.admin("/metrics").await;
        let lines = page.text().lines().filter(|line| {
            let named = line.strip_prefix(name);
            named.is_some_and(|rest| rest.starts_with(['{', ' ']))
                && labels.iter().all(|label| line.contains(label))
        });
        let value = |line: &str| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap();
        lines.map(value).sum()
    }

    pub(crate) async fn requests(&self) -> Vec<u64> {
        let mut counts = Vec::new();
        for engine in &self.engines {
            counts.push(engine.generated().await);
        }
        counts
    }
}

impl Engine {
    /// Requests for model work, whatever became of them. Probes are not counted.
    pub(crate) async fn generated(&self) -> u64 {
        let stats = self.stats().await;
        stats.finished + stats.aborted + stats.refused + stats.running
    }

    /// The last POST that it was sent.
    pub(crate) async fn last_post(&self) -> worker::ReceivedRequest {
        let stats = self.stats().await;
        let mut posts = stats.last.into_iter().rev();
        posts
            .find(|arrival| arrival.method == "POST")
            .expect("a POST has arrived")
    }

    /// The body of the last POST that it was sent.
    pub(crate) async fn last_body(&self) -> Value {
        serde_json::from_slice(&self.last_post().await.body).unwrap()
    }
}

/// What `x-warmroute-decision` says.
#[derive(Debug)]
pub(crate) struct Decided {
    pub(crate) worker: String,
    /// The dp rank that the request was pinned to.
    pub(crate) rank: Option<usize>,
    pub(crate) reason: String,
    pub(crate) cached_tokens: u64,
    pub(crate) tries: u32,
}

impl Decided {
    fn of(header: &str) -> Self {
        let find = |name: &str| {
            let mut pairs = header.split("; ").filter_map(|pair| pair.split_once('='));
            let found = pairs.find(|(key, _)| *key == name);
            found.map(|(_, value)| value.to_owned())
        };
        let field = |name: &str| find(name).unwrap_or_else(|| panic!("no {name} in {header:?}"));
        Self {
            worker: field("worker"),
            rank: find("rank").map(|rank| rank.parse().unwrap()),
            reason: field("reason"),
            cached_tokens: field("cached_tokens").parse().unwrap(),
            tries: field("attempts").parse().unwrap(),
        }
    }
}
