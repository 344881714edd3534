//! Routers that are killed around the write of an end: others see the response and its turn in the conversation, or
//! neither, and never one twice.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use warmroute::observe;

use super::{PATH, Pair, ask, create, ended, events, over, part, path, short_lease};
use crate::client;
use crate::cluster::{Engine, Router, eventually, unhurried};
use crate::redis_server::Server;

/// A status that is an argument of its own: only the write of an end has it.
const END: &[u8] = b"\r\n$10\r\nincomplete\r\n";

#[derive(Clone, Copy, Debug, PartialEq)]
enum Cut {
    /// Redis does not get the write.
    Before,
    /// Redis gets it. The router does not get the answer, and nothing more passes.
    After,
}

/// The way of one router to Redis, which ends at the write of an end.
struct Gate {
    address: SocketAddr,
    is_armed: Arc<AtomicBool>,
    is_closed: Arc<AtomicBool>,
    _task: JoinSet<()>,
}

impl Gate {
    async fn start(to: u16, cut: Cut) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (is_armed, is_closed) = (Arc::<AtomicBool>::default(), Arc::<AtomicBool>::default());
        let flags = (is_armed.clone(), is_closed.clone());
        let mut task = JoinSet::new();
        task.spawn(async move {
            let mut connections = JoinSet::new();
            while !flags.1.load(Ordering::Relaxed) {
                let (client, _) = listener.accept().await.unwrap();
                connections.spawn(pass(client, to, cut, flags.clone()));
            }
        });
        Self {
            address,
            is_armed,
            is_closed,
            _task: task,
        }
    }

    fn arm(&self) {
        self.is_armed.store(true, Ordering::Relaxed);
    }

    async fn has_closed(&self) {
        eventually("an end is written", async || {
            self.is_closed.load(Ordering::Relaxed)
        })
        .await;
    }
}

async fn pass(
    mut client: TcpStream,
    to: u16,
    cut: Cut,
    (is_armed, is_closed): (Arc<AtomicBool>, Arc<AtomicBool>),
) {
    let mut server = TcpStream::connect(("127.0.0.1", to)).await.unwrap();
    let (mut sent, mut answered) = (vec![0; 1 << 20], vec![0; 1 << 20]);
    let mut last: Vec<u8> = Vec::new();
    while !is_closed.load(Ordering::Relaxed) {
        tokio::select! {
            read = client.read(&mut sent) => {
                let Ok(length @ 1..) = read else { return };
                last.extend_from_slice(&sent[..length]);
                let has_end = memchr::memmem::find(&last, END).is_some();
                last.drain(..last.len().saturating_sub(END.len() - 1));
                if has_end && is_armed.load(Ordering::Relaxed) {
                    is_closed.store(true, Ordering::Relaxed);
                    if cut == Cut::Before {
                        break;
                    }
                }
                server.write_all(&sent[..length]).await.unwrap();
            }
            read = server.read(&mut answered) => {
                let Ok(length @ 1..) = read else { return };
                if !is_closed.load(Ordering::Relaxed) {
                    let _ = client.write_all(&answered[..length]).await;
                }
            }
            () = tokio::time::sleep(Duration::from_millis(5)) => {}
        }
    }
    // What was passed on is executed, though its connection ends.
    let _ = server.shutdown().await;
    let _ = server.read_to_end(&mut answered).await;
}

/// A router behind a gate, as a process, and one beside it.
async fn pair(cut: Cut) -> (Pair, Gate) {
    let redis = Server::start().await;
    let engine = Engine::here("w0", unhurried()).await;
    let mut config = over(&engine, &redis);
    short_lease(&mut config);
    // A router that is killed leaves its conversation locked for this long.
    config.responses.advanced.conversation_lease = Duration::from_millis(1_500);
    let b = Router::here(&config).await;
    let gate = Gate::start(redis.port, cut).await;
    config.responses.store.redis.as_mut().unwrap().urls = vec![format!("redis://{}", gate.address)];
    let a = Router::child(&config).await;
    for router in [&a, &b] {
        router.worker_is_up().await;
    }
    let pair = Pair {
        a,
        b,
        engine,
        redis,
    };
    (pair, gate)
}

async fn items(router: &Router, conversation: &Value) -> Vec<Value> {
    let id = conversation.as_str().unwrap();
    let path = format!("/v1/conversations/{id}/items?order=asc");
    let answer = client::get(router.api, &path).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer.json()["data"].as_array().unwrap().clone()
}

/// A turn in the foreground, with a stream.
async fn turn(router: &Router, conversation: &Value) -> client::Open {
    let body = ask(
        8,
        json!({"background": false, "stream": true, "conversation": conversation}),
    );
    client::open(router.api, "POST", PATH, &[], body.to_string()).await
}

/// A conversation with one turn, whose scripts Redis knows now.
async fn with_a_turn(pair: &Pair) -> Value {
    let made = client::post(pair.b.api, "/v1/conversations", "{}").await;
    let conversation = made.json()["id"].clone();
    let (text, is_whole) = turn(&pair.a, &conversation).await.rest().await;
    assert!(is_whole && text.contains("response.incomplete"), "{text}");
    conversation
}

/// The conversation goes on with this router, and has so many turns then.
async fn goes_on(router: &Router, conversation: &Value, turns: usize) {
    eventually("the conversation is free", async || {
        let mut open = turn(router, conversation).await;
        let is_free = open.status == 200;
        let _ = open.rest().await;
        is_free
    })
    .await;
    let items = items(router, conversation).await;
    assert_eq!(items.len(), 2 * turns, "{items:?}");
    let roles: Vec<_> = items.iter().map(|item| &item["role"]).collect();
    assert_eq!(roles, ["user", "assistant"].repeat(turns));
}

#[tokio::test]
async fn a_killed_router_leaves_a_response_with_its_turn_in_the_conversation_or_neither() {
    for cut in [Cut::Before, Cut::After] {
        let (pair, gate) = pair(cut).await;
        let conversation = with_a_turn(&pair).await;
        gate.arm();
        let mut live = turn(&pair.a, &conversation).await;
        let started = live.until("output_text.delta").await;
        let response = part(&started, 0)[0].1["response"].clone();
        gate.has_closed().await;
        pair.a.child.as_ref().unwrap().signal("KILL");
        let found = async || client::get(pair.b.api, &path(&response)).await.status;
        if cut == Cut::After {
            eventually("the write is executed", async || found().await == 200).await;
            assert_eq!(items(&pair.b, &conversation).await.len(), 4);
            goes_on(&pair.b, &conversation, 3).await;
        } else {
            assert_eq!(items(&pair.b, &conversation).await.len(), 2);
            goes_on(&pair.b, &conversation, 2).await;
            assert_eq!(found().await, 404);
        }
    }
}

#[tokio::test]
async fn a_background_response_whose_router_dies_at_its_end_has_one_turn_in_its_conversation() {
    for cut in [Cut::Before, Cut::After] {
        let (pair, gate) = pair(cut).await;
        let conversation = with_a_turn(&pair).await;
        gate.arm();
        let body = ask(8, json!({"conversation": conversation}));
        let response = super::create(&pair.a, &body).await;
        gate.has_closed().await;
        pair.a.child.as_ref().unwrap().signal("KILL");
        let last = ended(&pair.b, &response).await;
        assert_eq!(last["status"], "incomplete", "{last}");
        let items = items(&pair.b, &conversation).await;
        assert_eq!(items.len(), 4, "{items:?}");
        assert_eq!(items[3]["content"], last["output"][0]["content"]);
        goes_on(&pair.b, &conversation, 3).await;
    }
}

/// Refuses to continue it.
async fn is_not_continued(router: &Router, response: &Value) {
    let next = ask(
        2,
        json!({"background": false, "previous_response_id": response["id"]}),
    );
    let answer = client::post(router.api, PATH, next.to_string()).await;
    assert_eq!(answer.status, 400, "{}", answer.text());
    let error = answer.json();
    assert_eq!(error["error"]["code"], "previous_response_not_found");
}

#[tokio::test]
async fn a_child_whose_parent_was_deleted_while_it_ran_says_that_it_is_not_stored() {
    let pair = Pair::new(unhurried()).await;
    for (is_background, streams) in [(true, true), (true, false), (false, true), (false, false)] {
        let parent = create(&pair.a, &ask(2, json!({"background": false}))).await;
        let more = json!({"background": is_background, "stream": streams, "previous_response_id": parent["id"]});
        let body = ask(60, more).to_string();
        pair.engine.hold_after(3).await;
        let opened = client::open(pair.a.api, "POST", PATH, &[], body);
        let (mut open, ()) = tokio::join!(opened, async {
            pair.runs(1).await;
            let deleted = client::send(pair.b.api, "DELETE", &path(&parent), &[], "").await;
            assert_eq!(deleted.status, 200);
            pair.engine.let_go().await;
        });
        let (text, _) = open.rest().await;
        let mut last = if streams {
            events(&text, 0).pop().unwrap().1["response"].clone()
        } else {
            serde_json::from_str(&text).unwrap()
        };
        if is_background {
            last = ended(&pair.b, &last).await;
        } else {
            let found = client::get(pair.b.api, &path(&last)).await;
            assert_eq!(found.status, 404);
        }
        assert_eq!(last["status"], "incomplete", "{last}");
        assert_eq!(last["store"], false, "{last}");
        assert_eq!(last["previous_response_id"], parent["id"]);
        is_not_continued(&pair.b, &last).await;
    }
}

#[tokio::test]
async fn what_a_run_continues_outlives_it_however_long_it_takes() {
    let pair = Pair::with(unhurried(), |config| {
        config.responses.store.retention.responses = Duration::from_secs(4);
    })
    .await;
    let parent = create(&pair.a, &ask(2, json!({"background": false}))).await;
    let more = json!({"previous_response_id": parent["id"]});
    let began = observe::now();
    let child = create(&pair.a, &ask(300, more)).await;
    let child = ended(&pair.b, &child).await;
    assert!(began.elapsed() > Duration::from_secs(5));
    assert_eq!(child["store"], true, "{child}");
    let more = json!({"background": false, "previous_response_id": child["id"]});
    create(&pair.b, &ask(2, more)).await;
}
