//! Changes of the configuration while the router runs.

mod diff;
mod entries;
mod hung_files;
mod lasting;
mod settings;

use std::fmt::Write as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use serde_json::Value;
use tempfile::TempDir;
use tokio::task::JoinHandle;
use warmroute::config::Config;

use crate::client::{self, Answer};
use crate::cluster::{Cluster, Engine, Router, chat, eventually, fast, unhurried};

/// A folder with a configuration that a test changes.
pub(crate) struct Folder(TempDir);

impl Folder {
    pub(crate) fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub(crate) fn file(&self) -> PathBuf {
        self.path("config.yaml")
    }

    /// Replaces the file in one step.
    pub(crate) fn write(&self, text: &str) {
        let new = self.path("new");
        std::fs::write(&new, text).unwrap();
        std::fs::rename(new, self.file()).unwrap();
    }

    /// Engines and a router that was started with the file.
    pub(crate) async fn start(&self, engines: Vec<Engine>, text: &str) -> Cluster {
        self.write(text);
        let config = Config::load(&self.file()).unwrap();
        let router = Router::here(&config).await;
        Cluster { engines, router }
    }

    pub(crate) async fn start_child(&self, engines: Vec<Engine>, text: &str) -> Cluster {
        self.write(text);
        let router = Router::child_of(&self.file(), "$(ulimit -Hn)", &[]).await;
        Cluster { engines, router }
    }
}

/// A configuration that is not watched.
pub(crate) fn text(rest: &str) -> String {
    format!(
        "api: {{listen: '127.0.0.1:0', drain_delay: 0s}}\n\
         admin: {{listen: '127.0.0.1:0'}}\n\
         fleet: {{health: {{interval: 50ms}}}}\n\
         reload: {{watch_interval: 0s}}\n\
         log: {{format: json}}\n\
         {rest}"
    )
}

pub(crate) fn workers<'a>(engines: impl IntoIterator<Item = &'a Engine>) -> String {
    let mut list = "workers:\n".to_owned();
    for engine in engines {
        let (name, address) = (&engine.name, engine.address);
        writeln!(list, "  - {{url: 'http://{address}', name: {name}}}").unwrap();
    }
    list
}

pub(crate) async fn engines(count: usize) -> Vec<Engine> {
    Cluster::engines_here(vec![fast(); count]).await
}

pub(crate) async fn reload(cluster: &Cluster) -> Answer {
    cluster.post_admin("/reload", "").await
}

/// Reloads a file that must be taken over.
pub(crate) async fn applied(cluster: &Cluster) -> Value {
    let answer = reload(cluster).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert_eq!(answer.json()["result"], "applied");
    answer.json()["changes"].clone()
}

/// Clients that send one request after the other until they are asked how many failed.
pub(crate) struct Clients {
    stop: Arc<AtomicBool>,
    tasks: Vec<JoinHandle<(usize, Vec<String>)>>,
}

impl Clients {
    pub(crate) fn start(cluster: &Cluster, count: usize) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let api = cluster.router.api;
        let client = |number: usize| {
            let stop = stop.clone();
            async move {
                let (mut sent, mut failed) = (0, Vec::new());
                while !stop.load(Relaxed) {
                    let body = chat(
                        &format!("client {number}, request {sent}"),
                        4,
                        sent % 2 == 0,
                    );
                    let answer = client::post(api, "/v1/chat/completions", body).await;
                    sent += 1;
                    if answer.status != 200 || client::has_error(answer.text()) {
                        failed.push(format!("{} {}", answer.status, answer.text()));
                    }
                }
                (sent, failed)
            }
        };
        let tasks = (0..count).map(|number| tokio::spawn(client(number)));
        Self {
            tasks: tasks.collect(),
            stop: stop.clone(),
        }
    }

    /// The number of requests, none of which may have failed.
    pub(crate) async fn none_failed(self) -> usize {
        self.stop.store(true, Relaxed);
        let mut all = 0;
        for task in self.tasks {
            let (sent, failed) = task.await.unwrap();
            assert!(failed.is_empty(), "{failed:?}");
            all += sent;
        }
        all
    }
}

#[tokio::test]
async fn workers_that_join_and_leave_cost_no_request() {
    let folder = Folder::new();
    let engines = engines(3).await;
    let first = text(&workers(&engines[..1]));
    let cluster = folder.start(engines, &first).await;
    cluster.is_worker("w0", "health", "up").await;
    let clients = Clients::start(&cluster, 4);
    let [one, two, three] = &cluster.engines[..] else {
        panic!("there are three")
    };
    for listed in [&[one, two][..], &[two, three], &[three], &[one, two, three]] {
        folder.write(&text(&workers(listed.iter().copied())));
        applied(&cluster).await;
        for engine in listed {
            cluster.is_worker(&engine.name, "health", "up").await;
        }
        let fleet = cluster.admin("/fleet").await.json();
        assert_eq!(fleet["workers"].as_array().unwrap().len(), listed.len());
        let before = listed[0].generated().await;
        eventually("it gets requests", async || {
            listed[0].generated().await > before
        })
        .await;
    }
    assert!(clients.none_failed().await > 10);
}

#[tokio::test]
async fn a_stream_goes_on_when_its_worker_leaves() {
    let folder = Folder::new();
    let gone = Engine::here("gone", unhurried()).await;
    let stays = Engine::here("stays", fast()).await;
    let both = vec![gone, stays];
    let first = text(&workers(&both[..1]));
    let cluster = folder.start(both, &first).await;
    cluster.is_worker("gone", "health", "up").await;
    cluster.engines[0].hold_after(3).await;
    let body = chat("a long story", 40, true);
    let mut stream = cluster.open("/v1/chat/completions", &body).await;
    stream.until("data: ").await;
    folder.write(&text(&workers(&cluster.engines[1..])));
    applied(&cluster).await;
    eventually("it left", async || cluster.worker("gone").await.is_null()).await;
    cluster.engines[0].let_go().await;
    let (rest, is_whole) = stream.rest().await;
    assert!(is_whole && rest.contains("[DONE]"), "{rest}");
}

#[tokio::test]
async fn a_file_with_problems_changes_nothing_and_all_of_them_are_answered() {
    let folder = Folder::new();
    let engines = engines(1).await;
    let good = text(&workers(&engines));
    let cluster = folder.start(engines, &good).await;
    cluster.is_worker("w0", "health", "up").await;
    let metric = async |name: &str, labels: &[&str]| cluster.metric(name, labels).await;
    let successful = "warmroute_config_last_reload_successful";
    assert_eq!(metric(successful, &[]).await, 1.0);
    let hash = metric("warmroute_config_hash", &[]).await;
    assert!(hash > 0.0);

    folder.write(&format!("{good}requests: {{max_attempts: 0}}\nlgo: {{}}\n"));
    let answer = reload(&cluster).await;
    assert_eq!(answer.status, 400, "{}", answer.text());
    let problems = answer.json()["problems"].clone();
    let paths: Vec<&Value> = problems
        .as_array()
        .unwrap()
        .iter()
        .map(|problem| &problem["path"])
        .collect();
    assert_eq!(paths, ["requests.max_attempts", "lgo"]);
    assert_eq!(problems[0]["line"], 8);
    assert_eq!(metric(successful, &[]).await, 0.0);
    assert_eq!(metric("warmroute_config_hash", &[]).await, hash);
    let invalid = ["result=\"invalid\""];
    assert_eq!(
        metric("warmroute_config_reloads_total", &invalid).await,
        1.0
    );
    // Ready all the same, with a note.
    let ready = cluster.admin("/readyz").await;
    assert_eq!(ready.status, 200);
    assert!(
        ready.text().contains("configuration file is refused"),
        "{}",
        ready.text()
    );
    let page = cluster.admin("/config").await.json();
    assert_eq!(page["last_reload"]["problems"], problems);
    assert_eq!(page["config"]["requests"]["max_attempts"], 3);

    folder.write(&good);
    let answer = reload(&cluster).await.json();
    assert_eq!(answer["result"], "unchanged");
    assert_eq!(metric(successful, &[]).await, 1.0);
    assert_eq!(cluster.admin("/readyz").await.text(), "ready\n");
}

#[tokio::test]
async fn a_change_that_needs_a_restart_refuses_the_whole_file() {
    let folder = Folder::new();
    let engines = engines(2).await;
    let good = text(&workers(&engines[..1]));
    let more = text(&workers(&engines)) + "runtime: {threads: 3}\npeers: {name: x}\n";
    let cluster = folder.start(engines, &good).await;
    folder.write(&more);
    let answer = reload(&cluster).await;
    assert_eq!(answer.status, 422, "{}", answer.text());
    let problems = answer.json()["problems"].clone();
    assert_eq!(problems[0]["path"], "runtime.threads");
    assert_eq!(problems[1]["path"], "peers.name");
    let message = problems[0]["message"].as_str().unwrap();
    assert!(message.contains("restart"), "{message}");
    assert!(cluster.worker("w1").await.is_null());
    let labels = ["result=\"needs_restart\""];
    assert_eq!(
        cluster
            .metric("warmroute_config_reloads_total", &labels)
            .await,
        1.0
    );
}

/// As a ConfigMap volume changes.
#[tokio::test]
async fn a_changed_file_is_noticed_also_by_the_swap_of_a_symlink() {
    let folder = Folder::new();
    let engines = engines(3).await;
    let watched =
        |count: usize| text(&workers(&engines[..count])).replace("0s}\nlog", "20ms}\nlog");
    let texts = [watched(1), watched(2), watched(3)];
    for (number, text) in texts.iter().enumerate() {
        std::fs::create_dir(folder.path(&format!("..{number}"))).unwrap();
        std::fs::write(folder.path(&format!("..{number}/config.yaml")), text).unwrap();
    }
    let link = |from: &str, to: &str| {
        std::os::unix::fs::symlink(from, folder.path("link")).unwrap();
        std::fs::rename(folder.path("link"), folder.path(to)).unwrap();
    };
    link("..0", "..data");
    link("..data/config.yaml", "config.yaml");
    let config = Config::load(&folder.file()).unwrap();
    let router = Router::here(&config).await;
    let cluster = Cluster { engines, router };
    cluster.is_worker("w0", "health", "up").await;
    link("..1", "..data");
    cluster.is_worker("w1", "health", "up").await;
    // A bad one, which is counted once.
    std::fs::write(folder.path("..0/config.yaml"), "nonsense: 1\n").unwrap();
    link("..0", "..data");
    let invalid = ["result=\"invalid\""];
    let reloads = "warmroute_config_reloads_total";
    eventually("it is refused", async || {
        cluster.metric(reloads, &invalid).await > 0.0
    })
    .await;
    link("..2", "..data");
    cluster.is_worker("w2", "health", "up").await;
    assert_eq!(cluster.metric(reloads, &invalid).await, 1.0);
    let applied = ["result=\"applied\""];
    eventually("both others are applied", async || {
        cluster.metric(reloads, &applied).await == 2.0
    })
    .await;
}

#[tokio::test]
async fn sighup_reloads_and_ends_the_process_in_no_phase() {
    let folder = Folder::new();
    let engines = vec![
        Engine::here("w0", unhurried()).await,
        Engine::here("w1", fast()).await,
    ];
    let first = text(&workers(&engines[..1]));
    let both = text(&workers(&engines));
    let mut cluster = folder.start_child(engines, &first).await;
    let signal =
        |cluster: &Cluster, name: &str| cluster.router.child.as_ref().unwrap().signal(name);
    cluster.is_worker("w0", "health", "up").await;
    folder.write("nonsense: 1\n");
    for _ in 0..2 {
        signal(&cluster, "HUP");
    }
    eventually("it is logged", async || {
        cluster.router.log().contains("refused as a whole")
    })
    .await;
    folder.write(&both);
    signal(&cluster, "HUP");
    cluster.is_worker("w1", "health", "up").await;
    let log = cluster.router.log();
    assert_eq!(log.matches("refused as a whole").count(), 1, "{log}");
    assert!(log.contains("+ workers["), "{log}");

    for engine in &cluster.engines {
        engine.hold_after(3).await;
    }
    let body = chat("a long story", 60, true);
    let mut streams = Vec::new();
    for _ in 0..4 {
        let mut stream = cluster.open("/v1/chat/completions", &body).await;
        stream.until("data: ").await;
        streams.push(stream);
    }
    signal(&cluster, "TERM");
    eventually("it drains", async || {
        cluster.router.log().contains("draining: ")
    })
    .await;
    signal(&cluster, "HUP");
    for engine in &cluster.engines {
        engine.let_go().await;
    }
    for mut stream in streams {
        let (rest, is_whole) = stream.rest().await;
        assert!(is_whole && rest.contains("[DONE]"), "{rest}");
    }
    let child = cluster.router.child.as_mut().unwrap();
    let mut ended = None;
    eventually("it ends", async || {
        ended = child.ended();
        ended.is_some()
    })
    .await;
    assert_eq!(ended.unwrap().code(), Some(0));
}

#[tokio::test]
async fn a_router_without_a_file_has_nothing_to_reload() {
    let cluster = Cluster::fast(1).await;
    let answer = reload(&cluster).await;
    assert_eq!(answer.status, 400);
    assert_eq!(answer.json()["result"], "no_file");
    let page = cluster.admin("/config").await.json();
    assert!(page["file"].is_null() && page["hash"].is_null());
    assert_eq!(cluster.admin("/readyz").await.text(), "ready\n");
}
