//! `warmroute batch` against a router of the test's making: what it sends, how it goes on after each step, and the codes
//! that it ends with.

use std::collections::{BTreeMap, VecDeque};
use std::convert::Infallible;
use std::net::SocketAddr;
use std::process::{Command, Output, Stdio};
use std::sync::Arc;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper::{Method, Request, Response};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::net::TcpListener;

use crate::cluster::eventually;

const BATCH: &str = "batch_1";
const RUN: [&str; 4] = ["run", "in.jsonl", "-o", "out.jsonl"];
const FIRST: &str = r#"{"custom_id":"a","method":"POST","url":"/v1/completions","body":{"model":"m","prompt":"1"}}"#;
const SECOND: &str = r#"{"custom_id":"b","method":"POST","url":"/v1/completions","body":{"model":"m","prompt":"2"}}"#;

/// What the router was asked, and what it answers.
#[derive(Debug, Default)]
struct FakeState {
    /// Method and path of each request.
    requests: Vec<String>,
    authorization: String,
    forms: Vec<Bytes>,
    creates: Vec<Value>,
    /// What the batch looks like, one look after the other; the last one stays.
    looks: VecDeque<Value>,
    /// By method and path: statuses and errors that the next such requests get instead.
    failures: BTreeMap<String, VecDeque<(u16, Value)>>,
    /// Files by their ids.
    contents: BTreeMap<String, String>,
    /// The batches that the list has.
    listed: Vec<Value>,
}

impl FakeState {
    /// At most 100 of the batches: those after the one that the query names, or the first.
    fn page_of_batches(&self, query: &str) -> Value {
        let after = query.split_once("after=").map(|(_, id)| id);
        let is_last = |batch: &Value| after.is_some_and(|id| batch["id"] == id);
        let before = self.listed.iter().position(is_last);
        let rest = &self.listed[before.map_or(0, |index| index + 1)..];
        let data = &rest[..rest.len().min(100)];
        json!({"object": "list", "data": data, "has_more": data.len() < rest.len()})
    }
}

#[derive(Clone, Debug)]
struct FakeRouter {
    address: SocketAddr,
    state: Arc<Mutex<FakeState>>,
}

impl FakeRouter {
    async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let router = Self {
            address: listener.local_addr().unwrap(),
            state: Arc::default(),
        };
        let served = router.clone();
        tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let served = served.clone();
                let service = service_fn(move |request| {
                    let served = served.clone();
                    async move { Ok::<_, Infallible>(served.answer(request).await) }
                });
                tokio::spawn(async move {
                    let connection = hyper::server::conn::http1::Builder::new();
                    // A command that ends is none of the test's concern.
                    let _ = connection
                        .serve_connection(TokioIo::new(stream), service)
                        .await;
                });
            }
        });
        router
    }

    fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// The router's answers for a batch of two lines that looks like this, one look after the other.
    fn looks(&self, looks: &[Value]) {
        self.state.lock().looks = looks.iter().cloned().collect();
    }

    fn content(&self, file_id: &str, content: &str) {
        let mut state = self.state.lock();
        state
            .contents
            .insert(file_id.to_owned(), content.to_owned());
    }

    /// The next such request gets this status and this error.
    fn fail(&self, request: &str, status: u16, error: Value) {
        let mut state = self.state.lock();
        let failures = state.failures.entry(request.to_owned()).or_default();
        failures.push_back((status, error));
    }

    /// How often there was a request whose method and path begin like this.
    fn count(&self, begin: &str) -> usize {
        let state = self.state.lock();
        let requests = state.requests.iter();
        requests
            .filter(|request| request.starts_with(begin))
            .count()
    }

    async fn answer(&self, request: Request<Incoming>) -> Response<Full<Bytes>> {
        let (head, body) = request.into_parts();
        let body = body.collect().await.map(|body| body.to_bytes());
        let body = body.unwrap_or_default();
        let (method, path) = (head.method, head.uri.path().to_owned());
        let mut state = self.state.lock();
        state.requests.push(format!("{method} {path}"));
        if let Some(value) = head.headers.get("authorization") {
            state.authorization = value.to_str().unwrap().to_owned();
        }
        let failures = state.failures.get_mut(&format!("{method} {path}"));
        if let Some((status, error)) = failures.and_then(VecDeque::pop_front) {
            return page(status, json!({"error": error}).to_string());
        }
        let batch = format!("/v1/batches/{BATCH}");
        match (&method, path.as_str()) {
            (&Method::POST, "/v1/files") => {
                state.forms.push(body);
                page(200, json!({"id": "file-in", "object": "file"}).to_string())
            }
            (&Method::POST, "/v1/batches") => {
                state.creates.push(serde_json::from_slice(&body).unwrap());
                page(200, look("validating", [2, 0, 0]).to_string())
            }
            (&Method::GET, "/v1/batches") => {
                let query = head.uri.query().unwrap_or_default();
                page(200, state.page_of_batches(query).to_string())
            }
            (&Method::POST, path) if path == format!("{batch}/cancel") => {
                page(200, look("cancelling", [2, 1, 0]).to_string())
            }
            (&Method::GET, path) if path == batch => {
                let shown = state.looks.front().cloned().unwrap();
                if state.looks.len() > 1 {
                    state.looks.pop_front();
                }
                page(200, shown.to_string())
            }
            (&Method::GET, path) => {
                let id = path
                    .strip_prefix("/v1/files/")
                    .and_then(|rest| rest.strip_suffix("/content"));
                match id.and_then(|id| state.contents.get(id)) {
                    Some(content) => page(200, content.clone()),
                    None => gone(),
                }
            }
            _ => gone(),
        }
    }
}

fn page(status: u16, body: String) -> Response<Full<Bytes>> {
    let response = Response::builder().status(status);
    response.body(Full::new(body.into())).unwrap()
}

fn gone() -> Response<Full<Bytes>> {
    let error = json!({"message": "there is no such thing", "param": null, "code": null});
    page(404, json!({"error": error}).to_string())
}

/// A batch with so many lines in all, completed and failed.
fn look(status: &str, [total, completed, failed]: [u64; 3]) -> Value {
    json!({
        "id": BATCH, "object": "batch", "status": status, "endpoint": "/v1/completions",
        "input_file_id": "file-in", "completion_window": "24h", "created_at": 1_784_740_000,
        "request_counts": {"total": total, "completed": completed, "failed": failed},
        "output_file_id": null, "error_file_id": null,
    })
}

fn with(mut look: Value, name: &str, value: impl Into<Value>) -> Value {
    look[name] = value.into();
    look
}

/// A folder with an input of two lines, and a router.
struct Desk {
    folder: TempDir,
    router: FakeRouter,
}

impl Desk {
    async fn start() -> Self {
        let desk = Self {
            folder: tempfile::tempdir().unwrap(),
            router: FakeRouter::start().await,
        };
        desk.write("in.jsonl", &format!("{FIRST}\n{SECOND}\n"));
        desk
    }

    /// Both lines succeed at the second look.
    async fn with_results() -> Self {
        let desk = Self::start().await;
        let done = with(look("completed", [2, 2, 0]), "output_file_id", "file-out");
        desk.router.looks(&[look("in_progress", [2, 1, 0]), done]);
        desk.router.content("file-out", "{\"1\":1}\n{\"2\":2}\n");
        desk
    }

    fn write(&self, name: &str, text: &str) {
        std::fs::write(self.folder.path().join(name), text).unwrap();
    }

    fn read(&self, name: &str) -> Option<String> {
        std::fs::read_to_string(self.folder.path().join(name)).ok()
    }

    fn begun(&self) -> Value {
        serde_json::from_str(&self.read("out.jsonl.batch").unwrap()).unwrap()
    }

    /// A run that ends and leaves what it has written down so far, changed like this.
    async fn run_before(&self, change: impl FnOnce(&mut Value)) {
        self.run(0).await;
        let mut begun = self.begun();
        change(&mut begun);
        self.write("out.jsonl.batch", &begun.to_string());
    }

    fn files(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.folder.path()).unwrap();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<String> = names.collect();
        names.sort();
        names
    }

    fn command(&self, arguments: &[&str]) -> Command {
        self.command_at(&self.router.url(), arguments)
    }

    fn command_at(&self, url: &str, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_warmroute"));
        command
            .arg("batch")
            .args(arguments)
            .args(["--url", url])
            .current_dir(&self.folder)
            .env_remove("OPENAI_API_KEY")
            .env_remove("OPENAI_BASE_URL");
        command
    }

    async fn batch(&self, arguments: &[&str]) -> Output {
        self.batch_at(&self.router.url(), arguments).await
    }

    async fn batch_at(&self, url: &str, arguments: &[&str]) -> Output {
        let mut command = self.command_at(url, arguments);
        let run = tokio::task::spawn_blocking(move || command.output().unwrap());
        run.await.unwrap()
    }

    /// A run with these arguments that fails, before anything is uploaded, and says this.
    async fn refused(&self, arguments: &[&str], code: i32, expected: &str) {
        let output = self.batch(arguments).await;
        let problem = err(&output);
        assert_eq!(output.status.code(), Some(code), "{problem}");
        assert!(problem.contains(expected), "{problem}");
        assert_eq!(self.router.count("POST"), 0);
        assert_eq!(self.files(), ["in.jsonl"]);
        assert!(self.read("in.jsonl").unwrap().starts_with(FIRST));
    }

    /// A run that ends with this code. Returns what it wrote to standard output and to standard error.
    async fn run(&self, code: i32) -> (String, String) {
        let output = self.batch(&RUN).await;
        let (out, err) = (out(&output), err(&output));
        assert_eq!(output.status.code(), Some(code), "{err}");
        (out.to_owned(), err.to_owned())
    }
}

fn out(output: &Output) -> &str {
    std::str::from_utf8(&output.stdout).unwrap()
}

fn err(output: &Output) -> &str {
    std::str::from_utf8(&output.stderr).unwrap()
}

#[tokio::test]
async fn a_run_uploads_creates_waits_and_fetches() {
    let desk = Desk::with_results().await;
    let more = ["--completion-window", "2h", "--api-key", "sk-team"];
    let output = desk.batch(&[&RUN[..], &more[..]].concat()).await;
    assert_eq!(output.status.code(), Some(0), "{}", err(&output));
    let expected = "completed: 2 of 2 lines succeeded: out.jsonl\n";
    assert_eq!(out(&output), expected);
    let results = desk.read("out.jsonl");
    assert_eq!(results.as_deref(), Some("{\"1\":1}\n{\"2\":2}\n"));
    assert_eq!(desk.files(), ["in.jsonl", "out.jsonl", "out.jsonl.batch"]);
    let begun = desk.begun();
    assert_eq!(begun["url"], desk.router.url());
    assert_eq!(begun["file_id"], "file-in");
    assert_eq!(begun["batch_id"], BATCH);
    assert_eq!(begun["input"]["bytes"], FIRST.len() + SECOND.len() + 2);

    // A pipe gets lines of progress without control sequences.
    let progress = err(&output);
    let url = desk.router.url();
    for line in [
        "check: 2 lines, ".to_owned(),
        "upload: ".to_owned(),
        format!("batch: {BATCH} at {url}\n"),
        "batch: 1 of 2 lines, in progress\n".to_owned(),
        "batch: 2 of 2 lines, completed\n".to_owned(),
    ] {
        assert!(progress.contains(&line), "{line}\n{progress}");
    }
    assert!(!progress.contains('\u{1b}'), "{progress}");

    let state = desk.router.state.lock();
    assert_eq!(state.authorization, "Bearer sk-team");
    let form = String::from_utf8(state.forms[0].to_vec()).unwrap();
    let file = format!("\r\n\r\n{FIRST}\n{SECOND}\n\r\n--");
    assert!(form.contains("name=\"purpose\"\r\n\r\nbatch\r\n"), "{form}");
    assert!(form.contains("filename=\"in.jsonl\"\r\n"), "{form}");
    assert!(form.contains(&file), "{form}");
    let create = json!({"input_file_id": "file-in", "endpoint": "/v1/completions",
        "completion_window": "2h"});
    assert_eq!(state.creates, [create]);
}

#[tokio::test]
async fn lines_that_failed_are_in_the_error_file_and_in_the_exit_code() {
    let desk = Desk::start().await;
    let done = with(look("completed", [2, 1, 1]), "output_file_id", "file-out");
    let done = with(done, "error_file_id", "file-err");
    desk.router.looks(&[done]);
    desk.router.content("file-out", "{\"1\":1}\n");
    desk.router.content("file-err", "{\"2\":2}\n");
    let (out, _) = desk.run(2).await;
    let expected = "completed: 1 of 2 lines succeeded: out.jsonl; 1 did not: out.errors.jsonl\n";
    assert_eq!(out, expected);
    let errors = desk.read("out.errors.jsonl");
    assert_eq!(errors.as_deref(), Some("{\"2\":2}\n"));

    let desk = Desk::start().await;
    let expired = with(look("expired", [2, 0, 0]), "error_file_id", "file-err");
    desk.router.looks(&[expired]);
    desk.router.content("file-err", "{\"1\":1}\n{\"2\":2}\n");
    let (out, _) = desk.run(2).await;
    let expected = "expired: 0 of 2 lines succeeded: out.jsonl; 2 did not: out.errors.jsonl\n";
    assert_eq!(out, expected);
    // The results are where they are looked for, though there are none.
    assert_eq!(desk.read("out.jsonl").as_deref(), Some(""));
}

#[tokio::test]
async fn a_bad_line_is_named_before_anything_is_sent() {
    let desk = Desk::start().await;
    desk.write("in.jsonl", &format!("{FIRST}\n\n{FIRST}\nnothing\n"));
    let (_, problems) = desk.run(1).await;
    assert!(problems.contains("in.jsonl: "), "{problems}");
    assert!(problems.contains("\nline 3: "), "{problems}");
    assert!(problems.contains("\nline 4: "), "{problems}");
    assert_eq!(desk.router.count(""), 0);
    assert_eq!(desk.files(), ["in.jsonl"]);
}

#[tokio::test]
async fn a_wrong_argument_is_refused_with_what_to_do() {
    let desk = Desk::start().await;
    for (input, output, expected) in [
        (
            "/dev/stdin",
            "out.jsonl",
            "/dev/stdin: the input must be a file",
        ),
        (".", "out.jsonl", ".: the input must be a file"),
        (
            "in.jsonl",
            "in.jsonl",
            "in.jsonl is the input; name another output",
        ),
        (
            "in.jsonl",
            "./in.jsonl",
            "is the input; name another output",
        ),
        (
            "in.jsonl",
            "none/out.jsonl",
            "the output needs a folder that can be written to",
        ),
        ("in.jsonl", ".", ". is no file; name another output"),
    ] {
        desk.refused(&["run", input, "-o", output], 1, expected)
            .await;
    }
    for window in ["soon", "24", "0s"] {
        let more = ["--completion-window", window];
        let expected = "a duration such as '24h', '30m' or '7d'";
        desk.refused(&[&RUN[..], &more[..]].concat(), 64, expected)
            .await;
    }
    assert_eq!(desk.router.count(""), 0);
}

#[tokio::test]
async fn an_url_that_is_none_is_a_mistake_in_the_arguments() {
    let desk = Desk::start().await;
    for url in ["router:8080", "ftp://router", "http://x:99999"] {
        for arguments in [&RUN[..], &["status", BATCH][..]] {
            let output = desk.batch_at(url, arguments).await;
            let problem = err(&output);
            assert_eq!(output.status.code(), Some(64), "{url}: {problem}");
            let expected = "expected http://HOST:PORT or https://HOST:PORT";
            assert!(problem.contains(expected), "{url}: {problem}");
        }
    }
    assert_eq!(desk.files(), ["in.jsonl"]);
}

#[tokio::test]
async fn a_key_or_an_url_that_is_wrong_is_found_before_the_upload() {
    let desk = Desk::start().await;
    let list = "GET /v1/batches";
    for (status, code, expected) in [
        (
            401,
            "invalid_api_key",
            "check the key (--api-key, or OPENAI_API_KEY)",
        ),
        (403, "unknown_tenant", "take a key that may do this"),
        (404, "unknown_url", "is this the router's API? (--url)"),
        (429, "rate_limit_exceeded", "run the same command again"),
        (503, "store_unavailable", "run the same command again"),
    ] {
        desk.router
            .fail(list, status, json!({"message": "no.", "code": code}));
        desk.refused(&RUN, 1, expected).await;
    }
}

#[tokio::test]
async fn an_output_has_one_command_at_a_time() {
    let desk = Desk::start().await;
    desk.router.looks(&[look("in_progress", [2, 1, 0])]);
    let mut command = desk.command(&RUN);
    let mut child = command.stderr(Stdio::null()).spawn().unwrap();
    let look_at_batch = format!("GET /v1/batches/{BATCH}");
    eventually("the command waits", async || {
        desk.router.count(&look_at_batch) > 0
    })
    .await;
    let (_, problem) = desk.run(1).await;
    let expected = "another command with this output is running";
    assert!(problem.contains(expected), "{problem}");
    assert_eq!(desk.router.count("POST"), 2);
    child.kill().unwrap();
    child.wait().unwrap();

    // A process that was killed holds nothing.
    let done = with(look("completed", [2, 2, 0]), "output_file_id", "file-out");
    desk.router.looks(&[done]);
    desk.router.content("file-out", "{\"1\":1}\n{\"2\":2}\n");
    desk.run(0).await;
    assert_eq!(desk.router.count("POST"), 2);
}

#[tokio::test]
async fn after_ctrl_c_the_batch_runs_on_and_the_same_command_waits_for_it() {
    let desk = Desk::start().await;
    desk.router.looks(&[look("in_progress", [2, 1, 0])]);
    let mut command = desk.command(&RUN);
    let command = command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = command.spawn().unwrap();
    let look_at_batch = format!("GET /v1/batches/{BATCH}");
    eventually("the command waits", async || {
        desk.router.count(&look_at_batch) > 1
    })
    .await;
    let pid = child.id().to_string();
    let interrupted = Command::new("kill").args(["-INT", &pid]).status().unwrap();
    assert!(interrupted.success());
    let output = tokio::task::spawn_blocking(move || child.wait_with_output().unwrap());
    let output = output.await.unwrap();
    assert_eq!(output.status.code(), Some(1));
    let hint = format!("warmroute batch cancel {BATCH} --url {}", desk.router.url());
    assert!(err(&output).contains(&hint), "{}", err(&output));
    assert_eq!(desk.router.count("POST"), 2);

    let done = with(look("completed", [2, 2, 0]), "output_file_id", "file-out");
    desk.router.looks(&[done]);
    desk.router.content("file-out", "{\"1\":1}\n{\"2\":2}\n");
    desk.run(0).await;
    assert_eq!(desk.router.count("POST"), 2);
    assert_eq!(desk.files(), ["in.jsonl", "out.jsonl", "out.jsonl.batch"]);

    // What has ended is not asked for again.
    let before = desk.router.count("");
    let (_, said) = desk.run(0).await;
    assert!(said.contains("to begin anew, delete out.jsonl.batch"));
    assert_eq!(desk.router.count(""), before);
}

#[tokio::test]
async fn a_batch_that_was_created_unheard_is_found_and_not_created_again() {
    for newer in [Some(1), Some(250), None] {
        let desk = Desk::with_results().await;
        desk.run_before(|begun| {
            begun["batch_id"] = Value::Null;
            begun["ended"] = Value::Null;
        })
        .await;
        if let Some(count) = newer {
            let of_another = with(look("completed", [1, 1, 0]), "input_file_id", "file-x");
            let other = |number: i32| with(of_another.clone(), "id", format!("batch_x{number}"));
            let own = look("in_progress", [2, 1, 0]);
            desk.router.state.lock().listed = (0..count).map(other).chain([own]).collect();
        }
        desk.run(0).await;
        assert_eq!(desk.router.count("POST /v1/files"), 1);
        let creates = if newer.is_some() { 1 } else { 2 };
        assert_eq!(desk.router.count("POST /v1/batches"), creates);
        assert_eq!(desk.begun()["batch_id"], BATCH);
    }
}

#[tokio::test]
async fn another_input_or_another_router_is_refused_with_what_to_do() {
    let desk = Desk::with_results().await;
    desk.run_before(|begun| begun["url"] = "http://elsewhere:80".into())
        .await;
    let asked = desk.router.count("");
    let (_, problem) = desk.run(1).await;
    assert!(problem.contains("--url http://elsewhere:80"), "{problem}");
    desk.write("in.jsonl", FIRST);
    let (_, problem) = desk.run(1).await;
    assert!(problem.contains("another input"), "{problem}");
    assert!(problem.contains("delete out.jsonl.batch"), "{problem}");
    assert_eq!(desk.router.count(""), asked);
}

#[tokio::test]
async fn another_window_than_that_of_the_batch_is_refused_with_what_to_do() {
    let with_window = |window: &'static str| {
        let more = ["--completion-window", window];
        [&RUN[..], &more[..]].concat()
    };
    let desk = Desk::with_results().await;
    desk.batch(&with_window("2h")).await;
    assert_eq!(desk.begun()["completion_window"], "2h");
    let asked = desk.router.count("");
    let output = desk.batch(&with_window("24h")).await;
    let problem = err(&output);
    assert_eq!(output.status.code(), Some(1), "{problem}");
    let expected = format!("--completion-window 2h and not 24h ({BATCH} at ");
    assert!(problem.contains(&expected), "{problem}");
    assert!(problem.contains("delete out.jsonl.batch"), "{problem}");
    assert_eq!(desk.router.count(""), asked);
    for same in [with_window("120m"), RUN.to_vec()] {
        let output = desk.batch(&same).await;
        assert_eq!(output.status.code(), Some(0), "{}", err(&output));
    }

    // Of a batch that was created unheard the router says the window.
    let desk = Desk::with_results().await;
    desk.run_before(|begun| {
        begun["batch_id"] = Value::Null;
        begun["completion_window"] = Value::Null;
        begun["ended"] = Value::Null;
    })
    .await;
    desk.router.state.lock().listed = vec![look("in_progress", [2, 1, 0])];
    let output = desk.batch(&with_window("2h")).await;
    let problem = err(&output);
    assert_eq!(output.status.code(), Some(1), "{problem}");
    let expected = "--completion-window 24h and not 2h";
    assert!(problem.contains(expected), "{problem}");
    assert!(!problem.contains("same command again"), "{problem}");
    desk.run(0).await;
    assert_eq!(desk.router.count("POST /v1/batches"), 1);
}

#[tokio::test]
async fn nothing_is_overwritten() {
    // The errors of `out` would be where those of `out.jsonl` are.
    let names = [
        "out.jsonl",
        "out.errors.jsonl",
        "out.jsonl.part",
        "out.batch",
    ];
    for name in names {
        let desk = Desk::with_results().await;
        desk.write(name, "precious");
        let (_, problem) = desk.run(1).await;
        let expected = format!("{name} exists already");
        assert!(problem.contains(&expected), "{problem}");
        assert_eq!(desk.read(name).as_deref(), Some("precious"));
        assert_eq!(desk.router.count(""), 0);
    }
}

#[tokio::test]
async fn an_input_that_the_router_refuses_can_be_mended_and_run_again() {
    let desk = Desk::with_results().await;
    let errors = json!({"object": "list", "data": [
        {"code": "model_not_found", "line": 2, "message": "there is no such model", "param": "body.model"}]});
    let refused = with(look("failed", [0, 0, 0]), "errors", errors);
    desk.router.looks(&[refused]);
    let (_, problem) = desk.run(1).await;
    let expected = "line 2: there is no such model (model_not_found)";
    assert!(problem.contains(expected), "{problem}");
    assert_eq!(desk.files(), ["in.jsonl"]);

    desk.write("in.jsonl", &format!("{SECOND}\n{FIRST}\n"));
    let done = with(look("completed", [2, 2, 0]), "output_file_id", "file-out");
    desk.router.looks(&[done]);
    desk.run(0).await;
    assert_eq!(desk.router.count("POST /v1/files"), 2);
}

#[tokio::test]
async fn a_router_that_is_away_for_a_moment_is_asked_again() {
    let desk = Desk::with_results().await;
    let batch = format!("GET /v1/batches/{BATCH}");
    for (request, status) in [
        ("POST /v1/files", 503),
        ("POST /v1/batches", 503),
        (&*batch, 503),
        (&*batch, 503),
        (&*batch, 429),
    ] {
        desk.router
            .fail(request, status, json!({"message": "not now"}));
    }
    let (_, progress) = desk.run(0).await;
    assert!(progress.contains("asking again: POST "), "{progress}");
    assert!(progress.contains("asking again: GET "), "{progress}");
    // What has been said is not said again.
    assert_eq!(progress.matches("answered 503").count(), 3, "{progress}");
    let mut left = desk.router.state.lock().failures.clone().into_values();
    assert!(left.all(|failures| failures.is_empty()));
    assert_eq!(desk.router.count("POST /v1/files"), 2);
}

#[tokio::test]
async fn a_batch_or_a_router_that_is_not_there_is_named_with_what_to_do() {
    let desk = Desk::with_results().await;
    desk.run_before(|begun| {
        begun["batch_id"] = "batch_gone".into();
        begun["ended"] = Value::Null;
    })
    .await;
    let (_, problem) = desk.run(1).await;
    assert!(problem.contains("answered 404"), "{problem}");
    assert!(problem.contains("deleted or forgotten"), "{problem}");
    assert!(
        problem.contains("delete out.jsonl.batch, and run"),
        "{problem}"
    );
    assert!(!problem.contains("goes on"), "{problem}");

    // The router has forgotten the input, and then the results.
    let unknown = json!({"message": "No such File object", "param": "input_file_id"});
    let desk = Desk::with_results().await;
    desk.router.state.lock().contents.clear();
    desk.router.fail("POST /v1/batches", 400, unknown);
    for expected in ["No such File object", "there is no such thing"] {
        let (_, problem) = desk.run(1).await;
        assert!(problem.contains(expected), "{problem}");
        assert!(
            problem.contains("delete out.jsonl.batch, and run"),
            "{problem}"
        );
        assert_eq!(desk.files(), ["in.jsonl", "out.jsonl.batch"]);
    }

    // With the batch it goes on, once the key is right.
    let desk = Desk::with_results().await;
    let batch = format!("GET /v1/batches/{BATCH}");
    desk.router
        .fail(&batch, 401, json!({"message": "no such key"}));
    let (_, problem) = desk.run(1).await;
    assert!(problem.contains("check the key"), "{problem}");
    assert!(
        problem.contains(&format!("goes on with the batch {BATCH}")),
        "{problem}"
    );
    desk.run(0).await;
    assert_eq!(desk.router.count("POST"), 2);

    let mut desk = Desk::start().await;
    let closed = TcpListener::bind("127.0.0.1:0").await.unwrap();
    desk.router.address = closed.local_addr().unwrap();
    drop(closed);
    let (_, problem) = desk.run(1).await;
    assert!(problem.contains("cannot connect"), "{problem}");
}

#[tokio::test]
async fn a_batch_is_shown_and_cancelled_by_its_id() {
    let desk = Desk::start().await;
    let runs = look("in_progress", [2, 1, 1]);
    desk.router.looks(std::slice::from_ref(&runs));
    let cancelled = look("cancelling", [2, 1, 0]);
    for (action, expected) in [("status", runs), ("cancel", cancelled)] {
        let output = desk.batch(&[action, BATCH]).await;
        assert_eq!(output.status.code(), Some(0), "{}", err(&output));
        let shown: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(shown, expected);
    }
    let output = desk.batch(&["status", "batch_2"]).await;
    assert_eq!(output.status.code(), Some(1));
    assert!(err(&output).contains("there is no such thing"));
    for id in ["../files", "batch 1", "batch_1?x"] {
        let output = desk.batch(&["status", id]).await;
        assert_eq!(output.status.code(), Some(64), "{id}");
    }
}
