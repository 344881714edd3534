//! SGLang as routers see it: its pages, its errors, and pairs of engines that meet in rooms. Written after a real 0.5.23.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use warmroute::fleet::Role;

/// How long a leg waits for the other.
const ALONE: Duration = Duration::from_secs(300);

/// What goes wrong at an engine, until it is changed.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) enum Fault {
    #[default]
    None,
    /// The status of every answer to a request that generates.
    Status(u16),
    /// The KV transfer fails after this time; a stream has begun by then.
    Transfer(Duration),
    /// Requests that generate are read and never answered.
    Hang,
    /// A prompt takes this time.
    Slow(Duration),
    /// The blocks of prompts are fetched, and no answer follows.
    Silent,
    /// Streams begin, and say that the request is at fault.
    Refusal,
}

/// Where the engines of a fleet meet.
#[derive(Debug, Default)]
pub(crate) struct Rooms {
    /// Room -> the prompt of its prefill leg, and whether a decode leg has taken its blocks.
    open: Mutex<BTreeMap<u64, (String, bool)>>,
    changed: Notify,
    /// Every room that a prefill leg named.
    pub(crate) used: Mutex<Vec<u64>>,
}

#[derive(Debug)]
pub(crate) struct SglangEngine {
    pub(crate) address: SocketAddr,
    pub(crate) bootstrap: SocketAddr,
    state: Arc<State>,
    tasks: Vec<JoinHandle<()>>,
}

#[derive(Debug)]
struct State {
    role: Role,
    rooms: Arc<Rooms>,
    fault: Mutex<Fault>,
    is_registered: Mutex<bool>,
    /// Data-parallel ranks. With several, the room of a prefill leg stands for one.
    ranks: u64,
    /// Requests that generate and are not over.
    open: AtomicUsize,
    /// The bodies of requests that generate, also of those that are over.
    bodies: Mutex<Vec<Value>>,
    /// The ranks that they were pinned to.
    pinned: Mutex<Vec<Option<u64>>>,
    /// The ids of requests that were to be aborted.
    aborted: Mutex<Vec<String>>,
    /// Paths of all other requests.
    asked: Mutex<Vec<String>>,
    connections: Mutex<Vec<JoinHandle<()>>>,
}

/// Counts a request for as long as it runs.
struct Slot<'a>(&'a AtomicUsize);

impl<'a> Slot<'a> {
    fn take(open: &'a AtomicUsize) -> Self {
        open.fetch_add(1, Relaxed);
        Self(open)
    }
}

impl Drop for Slot<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}

impl SglangEngine {
    pub(crate) async fn start(role: Role, rooms: &Arc<Rooms>) -> Self {
        Self::with_ranks(role, rooms, 1).await
    }

    pub(crate) async fn with_ranks(role: Role, rooms: &Arc<Rooms>, ranks: u64) -> Self {
        let state = Arc::new(State {
            role,
            rooms: rooms.clone(),
            fault: Mutex::default(),
            is_registered: Mutex::new(true),
            ranks,
            pinned: Mutex::default(),
            open: AtomicUsize::new(0),
            bodies: Mutex::default(),
            aborted: Mutex::default(),
            asked: Mutex::default(),
            connections: Mutex::default(),
        });
        let api = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let bootstrap = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (address, bootstrap_address) =
            (api.local_addr().unwrap(), bootstrap.local_addr().unwrap());
        let tasks = vec![
            tokio::spawn(serve(api, state.clone())),
            tokio::spawn(serve(bootstrap, state.clone())),
        ];
        Self {
            address,
            bootstrap: bootstrap_address,
            state,
            tasks,
        }
    }

    pub(crate) fn fault(&self, fault: Fault) {
        *self.state.fault.lock() = fault;
    }

    pub(crate) fn set_registered(&self, is_registered: bool) {
        *self.state.is_registered.lock() = is_registered;
    }

    pub(crate) fn open(&self) -> usize {
        self.state.open.load(Relaxed)
    }

    pub(crate) fn bodies(&self) -> Vec<Value> {
        self.state.bodies.lock().clone()
    }

    pub(crate) fn pinned(&self) -> Vec<Option<u64>> {
        self.state.pinned.lock().clone()
    }

    pub(crate) fn aborted(&self) -> Vec<String> {
        self.state.aborted.lock().clone()
    }

    pub(crate) fn asked(&self, path: &str) -> usize {
        let asked = self.state.asked.lock();
        asked
            .iter()
            .filter(|request| request.starts_with(path))
            .count()
    }

    /// As kill -9: every connection breaks, and none is accepted.
    pub(crate) fn kill(&self) {
        for task in &self.tasks {
            task.abort();
        }
        for connection in self.state.connections.lock().drain(..) {
            connection.abort();
        }
    }
}

impl Drop for SglangEngine {
    fn drop(&mut self) {
        self.kill();
    }
}

async fn serve(listener: TcpListener, state: Arc<State>) {
    loop {
        let (stream, _) = listener.accept().await.unwrap();
        let served = state.clone();
        let task = tokio::spawn(async move { connection(stream, &served).await });
        state.connections.lock().push(task);
    }
}

/// One request, and its answer's end.
async fn connection(mut stream: TcpStream, state: &State) {
    let mut bytes = Vec::new();
    let end = loop {
        if let Some(end) = bytes.windows(4).position(|four| four == b"\r\n\r\n") {
            break end + 4;
        }
        if stream.read_buf(&mut bytes).await.unwrap_or(0) == 0 {
            return;
        }
    };
    let head = String::from_utf8_lossy(&bytes[..end]).to_lowercase();
    let length = head
        .lines()
        .find_map(|line| line.strip_prefix("content-length: "))
        .map_or(0, |length| length.parse::<usize>().unwrap());
    while bytes.len() < end + length {
        if stream.read_buf(&mut bytes).await.unwrap_or(0) == 0 {
            return;
        }
    }
    let path = head.split(' ').nth(1).unwrap_or_default().to_owned();
    let body: Value = serde_json::from_slice(&bytes[end..end + length]).unwrap_or_default();
    let generates = matches!(&*path, "/v1/chat/completions" | "/v1/completions");
    if !generates {
        if let Some(id) = body["rid"].as_str() {
            state.aborted.lock().push(id.to_owned());
        }
        state.asked.lock().push(path.clone());
        let (status, page) = state.page(&path);
        let _ = stream.write_all(whole(status, &page).as_bytes()).await;
        return;
    }
    let _slot = Slot::take(&state.open);
    let rank = head
        .lines()
        .find_map(|line| line.strip_prefix("x-data-parallel-rank: "))
        .map(|rank| rank.parse().unwrap());
    state.bodies.lock().push(body.clone());
    state.pinned.lock().push(rank);
    let (mut reader, mut writer) = stream.split();
    let gone = async {
        let mut rest = [0; 16];
        while reader.read(&mut rest).await.unwrap_or(0) > 0 {}
    };
    tokio::select! {
        () = state.generate(&body, rank, path == "/v1/chat/completions", &mut writer) => {}
        // The client closed the connection.
        () = gone => {}
    }
}

fn whole(status: u16, page: &Value) -> String {
    let page = match page {
        Value::Null => String::new(),
        page => page.to_string(),
    };
    format!(
        "HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{page}",
        page.len()
    )
}

fn error(status: u16, message: &str) -> String {
    let error = json!({"object": "error", "message": message, "type": "BadRequestError", "param": null, "code": status});
    whole(status, &error)
}

impl State {
    fn page(&self, path: &str) -> (u16, Value) {
        let mode = match self.role {
            Role::Prefill => "prefill",
            Role::Decode => "decode",
            Role::Both => "null",
        };
        match path.split('?').next().unwrap() {
            "/ready" | "/health" => (200, Value::Null),
            "/v1/models" => (
                200,
                json!({"object": "list", "data": [{"id": "tiny", "object": "model", "owned_by": "sglang", "parent": null, "max_model_len": 4096}]}),
            ),
            "/server_info" => (
                200,
                json!({"version": "0.5.23", "page_size": 16, "disable_radix_cache": false, "disaggregation_mode": mode, "kv_events": null}),
            ),
            "/v1/loads" => (
                200,
                json!({"loads": [{"dp_rank": 0, "num_running_reqs": self.open.load(Relaxed), "num_waiting_reqs": 0, "token_usage": 0.0, "max_total_num_tokens": 1024}]}),
            ),
            "/route" if *self.is_registered.lock() => (
                200,
                json!({"attn_tp_size": 1, "dp_size": self.ranks, "pp_size": 1, "page_size": 16, "follow_bootstrap_room": true, "prefill_http_port": 1}),
            ),
            "/route" => (503, Value::Null),
            "/abort_request" => (200, Value::Null),
            "/v1/responses" | "/v1/messages" => (400, json!({"error": {"message": "no"}})),
            _ => (404, json!({"detail": "Not Found"})),
        }
    }

    async fn generate(
        &self,
        body: &Value,
        rank: Option<u64>,
        is_chat: bool,
        writer: &mut (impl AsyncWriteExt + Unpin),
    ) {
        let mut answer = async |text: String| {
            let _ = writer.write_all(text.as_bytes()).await;
        };
        let fault = *self.fault.lock();
        match fault {
            Fault::Status(status) => return answer(error(status, "as the test wants it")).await,
            Fault::Hang => return std::future::pending().await,
            Fault::Slow(time) => tokio::time::sleep(time).await,
            Fault::Refusal => {
                let error =
                    json!({"object": "error", "message": "as the test wants it", "code": 400});
                let error = json!({"error": error});
                return answer(format!("{EVENTS}data: {error}\n\ndata: [DONE]\n\n")).await;
            }
            Fault::None | Fault::Transfer(_) | Fault::Silent => {}
        }
        let prompt = body["messages"].to_string() + &body["prompt"].to_string();
        if prompt.len() > 4_000 {
            let message = "The input is longer than the model's context length (4096 tokens).";
            return answer(error(400, message)).await;
        }
        let is_stream = body["stream"] == json!(true);
        let room = body["bootstrap_room"].as_u64();
        if let Some(rank) = rank.filter(|rank| *rank >= self.ranks) {
            let message = format!("data_parallel_rank={rank} is out of range");
            return answer(error(400, &message)).await;
        }
        if self.role == Role::Prefill
            && let Some(room) = room
        {
            // A rank that is not told which one is meant takes itself for rank 0 (plain `--dp-size`).
            let of_room = room % self.ranks;
            let own = body["disagg_prefill_dp_rank"].as_u64().unwrap_or(0);
            if own != of_room || rank.is_some_and(|rank| rank != of_room) {
                return answer(error(500, "follow_bootstrap_room conflict")).await;
            }
        }
        let said = match (self.role, room) {
            (Role::Both, _) => "alone",
            (_, None) => {
                let message = "Disaggregated request received without bootstrap room id";
                return answer(error(400, message)).await;
            }
            (Role::Prefill, Some(room)) => {
                let is_taken = self.prefill(room, prompt).await;
                if is_taken {
                    "a"
                } else {
                    return answer(error(500, "KVTransferError")).await;
                }
            }
            (Role::Decode, Some(room)) => {
                if is_stream {
                    answer(EVENTS.to_owned()).await;
                    answer(event(is_chat, "", None)).await;
                }
                let said = match fault {
                    Fault::Transfer(after) => {
                        tokio::time::sleep(after).await;
                        None
                    }
                    _ => self.decode(room, &prompt).await,
                };
                match said {
                    Some(_) if fault == Fault::Silent => return std::future::pending().await,
                    Some(said) => said,
                    None if is_stream => {
                        let error = json!({"error": {"object": "error", "message": "KVTransferError", "code": 500}});
                        return answer(format!("data: {error}\n\ndata: [DONE]\n\n")).await;
                    }
                    None => return answer(error(500, "KVTransferError")).await,
                }
            }
        };
        let usage = json!({"prompt_tokens": 48, "completion_tokens": 2, "total_tokens": 50, "prompt_tokens_details": {"cached_tokens": 32}});
        if is_stream {
            if self.role != Role::Decode {
                answer(EVENTS.to_owned()).await;
            }
            for token in said.split_inclusive(' ') {
                answer(event(is_chat, token, None)).await;
            }
            answer(event(is_chat, "", Some("stop"))).await;
            return answer("data: [DONE]\n\n".to_owned()).await;
        }
        let choice = if is_chat {
            json!({"index": 0, "message": {"role": "assistant", "content": said}, "finish_reason": "stop"})
        } else {
            json!({"index": 0, "text": said, "finish_reason": "stop"})
        };
        let page = json!({"id": "x", "object": "chat.completion", "model": "tiny", "choices": [choice], "usage": usage});
        answer(whole(200, &page)).await;
    }

    /// Whether a decode leg has taken the blocks.
    async fn prefill(&self, room: u64, prompt: String) -> bool {
        self.rooms.used.lock().push(room);
        let before = self.rooms.open.lock().insert(room, (prompt, false));
        assert_eq!(before, None, "a room was used twice");
        self.rooms.changed.notify_waiters();
        let taken = self
            .rooms
            .find(room, |(_, is_taken)| is_taken.then_some(()));
        tokio::time::timeout(ALONE, taken).await.is_ok()
    }

    /// What the decode engine says: not that of its own prompt, if the prefill leg had another.
    async fn decode(&self, room: u64, prompt: &str) -> Option<&'static str> {
        let blocks = self.rooms.find(room, |(prompt, is_taken)| {
            *is_taken = true;
            Some(prompt.clone())
        });
        let blocks = tokio::time::timeout(ALONE, blocks).await.ok()?;
        self.rooms.changed.notify_waiters();
        Some(if blocks == prompt {
            "together with another"
        } else {
            "garbage"
        })
    }
}

impl Rooms {
    async fn find<T>(
        &self,
        room: u64,
        mut look: impl FnMut(&mut (String, bool)) -> Option<T>,
    ) -> T {
        loop {
            let changed = self.changed.notified();
            let mut changed = std::pin::pin!(changed);
            changed.as_mut().enable();
            if let Some(found) = self.open.lock().get_mut(&room).and_then(&mut look) {
                return found;
            }
            changed.await;
        }
    }
}

const EVENTS: &str =
    "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n";

fn event(is_chat: bool, text: &str, finish: Option<&str>) -> String {
    let choice = if is_chat {
        json!({"index": 0, "delta": {"role": "assistant", "content": text}, "finish_reason": finish})
    } else {
        json!({"index": 0, "text": text, "finish_reason": finish})
    };
    let chunk =
        json!({"id": "x", "object": "chat.completion.chunk", "model": "tiny", "choices": [choice]});
    format!("data: {chunk}\n\n")
}
