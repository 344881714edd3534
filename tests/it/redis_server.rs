//! Redis servers of the tests' own, on free ports: started, paused, killed, started again.

use std::fs::File;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use tempfile::TempDir;

use crate::cluster::eventually;
use crate::own_ports;

/// One `redis-server`, or a sentinel. It ends with this.
#[derive(Debug)]
pub(crate) struct Server {
    child: Option<Child>,
    pub(crate) port: u16,
    directory: TempDir,
    arguments: Vec<String>,
    /// How `redis-cli` gets in.
    entry: Vec<String>,
}

impl Server {
    /// Keeps nothing over a restart.
    pub(crate) async fn start() -> Self {
        Self::with(&[], &[]).await
    }

    /// Writes all to disk before it answers, and has it again when it is killed and run.
    pub(crate) async fn durable() -> Self {
        Self::with(&["--appendonly", "yes", "--appendfsync", "always"], &[]).await
    }

    /// `PORT` and `BUS` in the arguments stand for the ports that are found.
    pub(crate) async fn with(arguments: &[&str], entry: &[&str]) -> Self {
        // Another process may have taken a port that was free before.
        for _ in 0..20 {
            let mut server = Self::prepared(arguments, entry);
            if server.has_started().await {
                return server;
            }
            let log = server.directory.path().join("log");
            eprintln!("{}", std::fs::read_to_string(log).unwrap());
        }
        panic!("redis-server does not start: {arguments:?}");
    }

    /// A node of a cluster that is not made yet, and that goes on without nodes that are down.
    async fn node() -> Self {
        let arguments = [
            "--cluster-enabled",
            "yes",
            "--cluster-node-timeout",
            "1000",
            "--cluster-require-full-coverage",
            "no",
            "--cluster-port",
            "BUS",
        ];
        Self::with(&arguments, &[]).await
    }

    /// A sentinel that gives `master` half a second.
    pub(crate) async fn sentinel(master: &Self) -> Self {
        let mut server = Self::prepared(&[], &[]);
        let text = format!(
            "sentinel monitor main 127.0.0.1 {} 1\nsentinel down-after-milliseconds main 500\n\
             sentinel failover-timeout main 2000\n",
            master.port
        );
        let file = server.directory.path().join("sentinel.conf");
        std::fs::write(&file, text).unwrap();
        server.arguments = vec![file.display().to_string(), "--sentinel".to_owned()];
        server.run().await;
        server
    }

    fn prepared(arguments: &[&str], entry: &[&str]) -> Self {
        let (port, bus) = (own_ports::port(), own_ports::port());
        let filled = |text: &&str| match *text {
            "PORT" => port.to_string(),
            "BUS" => bus.to_string(),
            text => text.to_owned(),
        };
        Self {
            child: None,
            port,
            directory: tempfile::tempdir().unwrap(),
            arguments: arguments.iter().map(filled).collect(),
            entry: entry.iter().map(filled).collect(),
        }
    }

    /// Runs the server, each time on the same port.
    pub(crate) async fn run(&mut self) {
        self.cut_off_unfinished();
        assert!(self.has_started().await, "its port was taken");
    }

    /// Cuts off what a killed server had not written to its end. A server that finds the writes of half a script there
    /// ignores them, but leaves them in the file, and at its next start they are part of the writes that followed
    /// (<https://github.com/valkey-io/valkey/pull/4342>).
    fn cut_off_unfinished(&self) {
        // Redis before version 7 has one file.
        let names = ["appendonlydir/appendonly.aof.manifest", "appendonly.aof"];
        let directory = self.directory.path();
        let mut files = names.iter().map(|name| directory.join(name));
        let Some(file) = files.find(|file| file.exists()) else {
            return;
        };
        let yes = Command::new("yes").stdout(Stdio::piped()).spawn();
        let mut yes = yes.unwrap();
        let checked = Command::new("redis-check-aof")
            .arg("--fix")
            .arg(file)
            .stdin(yes.stdout.take().unwrap())
            .output()
            .unwrap();
        let _ = yes.kill();
        let _ = yes.wait();
        let said = String::from_utf8_lossy(&checked.stdout);
        assert!(checked.status.success(), "{said}");
        for line in said
            .lines()
            .filter(|line| line.starts_with("This will shrink"))
        {
            eprintln!("{line}");
        }
    }

    /// False if it ended at once.
    async fn has_started(&mut self) -> bool {
        let log = File::create(self.directory.path().join("log")).unwrap();
        let mut command = Command::new("redis-server");
        command
            .args(&self.arguments)
            .arg("--dir")
            .arg(self.directory.path());
        if !self.arguments.iter().any(|argument| argument == "--port") {
            command.arg("--port").arg(self.port.to_string());
        }
        let mut child = command
            .args(["--bind", "127.0.0.1", "--save", "", "--daemonize", "no"])
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .expect("redis-server is installed (`make test` does)");
        let mut is_over = false;
        // Another process may listen on that port, and be a Redis too.
        let is_child = format!("process_id:{}", child.id());
        eventually("redis-server answers", async || {
            is_over = child.try_wait().unwrap().is_some();
            let info = || self.cli(&["info", "server"]);
            is_over
                || (self.cli(&["ping"]).contains("PONG")
                    && info().lines().any(|line| line == is_child))
        })
        .await;
        self.child = Some(child);
        !is_over
    }

    pub(crate) fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// What `redis-cli` prints.
    pub(crate) fn cli(&self, arguments: &[&str]) -> String {
        let output = Command::new("redis-cli")
            .args(["-h", "127.0.0.1", "-p", &self.port.to_string()])
            .args(&self.entry)
            .args(arguments)
            .stderr(Stdio::null())
            .output()
            .unwrap();
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// What clients send from now on until the returned is asked; what scripts do is not part of it.
    pub(crate) async fn listen(&self) -> Listening<'_> {
        let file = self.directory.path().join("monitor");
        let child = Command::new("redis-cli")
            .args(["-h", "127.0.0.1", "-p", &self.port.to_string(), "monitor"])
            .stdin(Stdio::null())
            .stdout(File::create(&file).unwrap())
            .spawn()
            .unwrap();
        let listening = Listening {
            server: self,
            child,
            file,
        };
        eventually("it listens", async || !listening.text().is_empty()).await;
        listening
    }

    fn signal(&self, signal: &str) {
        let id = self.child.as_ref().unwrap().id().to_string();
        let sent = Command::new("kill").args([signal, &id]).status().unwrap();
        assert!(sent.success());
    }

    /// Connections stay open, without an answer.
    pub(crate) fn pause(&self) {
        self.signal("-STOP");
    }

    pub(crate) fn wake(&self) {
        self.signal("-CONT");
    }

    pub(crate) fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// See [`Server::listen`].
pub(crate) struct Listening<'a> {
    server: &'a Server,
    child: Child,
    file: PathBuf,
}

impl Listening<'_> {
    fn text(&self) -> String {
        std::fs::read_to_string(&self.file).unwrap()
    }

    /// The names of the commands, in lower case.
    pub(crate) async fn commands(self) -> Vec<String> {
        self.server.cli(&["echo", "the end"]);
        eventually("all has arrived", async || {
            self.text().contains("\"the end\"")
        })
        .await;
        let text = self.text();
        let commands = text
            .lines()
            .filter(|line| line.contains('[') && !line.contains(" lua]"));
        let name = |line: &str| line.split('"').nth(1).unwrap_or_default().to_lowercase();
        let mut names: Vec<String> = commands.map(name).collect();
        // The last is our own.
        names.pop();
        names
    }
}

impl Drop for Listening<'_> {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Three masters with a replica each.
pub(crate) async fn cluster() -> Vec<Server> {
    cluster_with_replicas(1).await
}

/// Three masters with so many replicas each.
pub(crate) async fn cluster_with_replicas(replicas: usize) -> Vec<Server> {
    let mut nodes = Vec::new();
    for _ in 0..3 * (1 + replicas) {
        nodes.push(Server::node().await);
    }
    let addresses: Vec<String> = nodes
        .iter()
        .map(|node| format!("127.0.0.1:{}", node.port))
        .collect();
    let made = Command::new("redis-cli")
        .args(["--cluster", "create"])
        .args(&addresses)
        .args(["--cluster-replicas", &replicas.to_string(), "--cluster-yes"])
        .output()
        .unwrap();
    assert!(
        made.status.success(),
        "{}",
        String::from_utf8_lossy(&made.stdout)
    );
    eventually("the cluster is whole, replicas too", async || {
        nodes
            .iter()
            .all(|node| node.cli(&["cluster", "info"]).contains("cluster_state:ok"))
            && nodes[0].cli(&["cluster", "nodes"]).matches("slave").count() == 3 * replicas
            && nodes
                .iter()
                .filter(|node| node.cli(&["role"]).starts_with("slave"))
                .all(|node| node.cli(&["role"]).contains("connected"))
    })
    .await;
    nodes
}
