//! Three replicas over one Redis.

use serde_json::json;
use warmroute::secret::Secret;
use warmroute::store::redis;

use super::socket::{PATH, Socket, id};
use crate::client;
use crate::cluster::{self, Engine, Router, eventually, fast};
use crate::redis_server::Server;

/// The key of state tokens.
const KEY: &str = "e0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeff";

struct Replicas {
    routers: Vec<Router>,
    _engine: Engine,
    redis: Server,
}

async fn three() -> Replicas {
    let redis = Server::start().await;
    let engine = Engine::here("w0", fast()).await;
    let mut config = cluster::config();
    config.workers = vec![engine.listed()];
    config.responses.store.redis = Some(redis::Settings {
        urls: vec![redis.url()],
        ..redis::Settings::default()
    });
    config.responses.state_token.keys = vec![Secret::new(KEY)];
    let mut routers = Vec::new();
    for _ in 0..3 {
        let router = Router::here(&config).await;
        router.worker_is_up().await;
        routers.push(router);
    }
    Replicas {
        routers,
        _engine: engine,
        redis,
    }
}

#[tokio::test]
async fn a_stored_response_continues_on_every_replica() {
    let replicas = three().await;
    let mut previous = None;
    for round in 0..2 {
        for router in &replicas.routers {
            let mut socket = Socket::open(router.api).await;
            let mut more = json!({"input": format!("round {round}")});
            if let Some(previous) = &previous {
                more["previous_response_id"] = json!(previous);
            }
            let first = socket.respond(more).await;
            // The second turn continues what this connection remembers, and is stored as well.
            let second = socket
                .respond(json!({"previous_response_id": id(&first)}))
                .await;
            previous = Some(id(&second).to_owned());
        }
    }
    let path = format!("{PATH}/{}", previous.unwrap());
    for router in &replicas.routers {
        assert_eq!(
            client::get(router.api, &path).await.json()["status"],
            "incomplete"
        );
    }
}

#[tokio::test]
async fn what_a_connection_remembers_needs_no_store() {
    let mut replicas = three().await;
    let router = &replicas.routers[0];
    let mut socket = Socket::open(router.api).await;
    let first = socket.respond(json!({"store": false})).await;
    let stored = socket.respond(json!({"stream_id": "a"})).await;
    replicas.redis.kill();
    let more = json!({"store": false, "previous_response_id": id(&first)});
    socket.respond(more).await;
    let more = json!({"stream_id": "a", "store": false, "previous_response_id": id(&stored)});
    socket.respond(more).await;
    // The first may be served before the store is known to be down.
    eventually("what would be stored is refused", async || {
        socket.create(json!({})).await;
        let last = socket.turn().await.pop().unwrap();
        last["status"] == 503 && last["error"]["code"] == "store_unavailable"
    })
    .await;
}
