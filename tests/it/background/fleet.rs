//! Three router processes with one engine and one Redis, and clients that survive a router's end.

use std::sync::Arc;

use parking_lot::Mutex;
use serde_json::Value;
use warmroute::config::Config;
use warmroute::sim::worker::Settings;

use super::{PATH, over, part, path, short_lease};
use crate::client::{self, Open};
use crate::cluster::{Engine, Router, eventually};
use crate::redis_server::Server;

pub(super) const END: &str = "data: [DONE]\n\n";
const ENDS: [&str; 3] = [
    "response.completed",
    "response.failed",
    "response.incomplete",
];

pub(super) struct Fleet {
    pub(super) routers: Vec<Router>,
    pub(super) engine: Engine,
    pub(super) redis: Server,
    config: Config,
}

impl Fleet {
    /// Leases are short, and Redis syncs every write to disk.
    pub(super) async fn new(engine: Settings) -> Self {
        Self::with(engine, Server::durable().await, |_| {}).await
    }

    pub(super) async fn with(
        engine: Settings,
        redis: Server,
        change: impl FnOnce(&mut Config),
    ) -> Self {
        let engine = Engine::here("w0", engine).await;
        let mut config = over(&engine, &redis);
        short_lease(&mut config);
        change(&mut config);
        let mut routers = Vec::new();
        for _ in 0..3 {
            routers.push(Router::child(&config).await);
        }
        for router in &routers {
            router.worker_is_up().await;
        }
        Self {
            routers,
            engine,
            redis,
            config,
        }
    }

    /// Replaces a router process, which is killed if it still runs.
    pub(super) async fn replace(&mut self, place: usize) {
        let router = Router::child(&self.config).await;
        router.worker_is_up().await;
        self.routers[place] = router;
    }

    /// Waits until the engine runs this many requests.
    pub(super) async fn runs(&self, count: u64) {
        eventually("the engine runs so many", async || {
            self.engine.stats().await.running == count
        })
        .await;
    }

    /// The end of a response, which must be the same on every router.
    pub(super) async fn end(&self, response: &Value) -> Value {
        let routers: Vec<&Router> = self.routers.iter().collect();
        end(&routers, response).await
    }

    pub(super) async fn metric(&self, place: usize, sample: &str) -> f64 {
        let page = client::get(self.routers[place].admin, "/metrics").await;
        let lines = page.text().lines();
        let mut values = lines.filter_map(|line| line.strip_prefix(sample)?.trim().parse().ok());
        values.next().unwrap_or_default()
    }
}

/// The response on a router; `None` while its store is down. It must never be missing.
pub(super) async fn retrieved(router: &Router, response: &Value) -> Option<Value> {
    let answer = client::get(router.api, &path(response)).await;
    match answer.status {
        200 => Some(answer.json()),
        503 => None,
        other => panic!("{other}: {}", answer.text()),
    }
}

/// As [`Fleet::end`]. The events of a stream must also be the same everywhere and end exactly once.
pub(super) async fn end(routers: &[&Router], response: &Value) -> Value {
    let mut ends = Vec::new();
    for router in routers {
        let mut last = Value::Null;
        eventually("it ends on every router", async || {
            last = retrieved(router, response).await.unwrap_or_default();
            let status = last["status"].as_str().unwrap_or("queued");
            !["queued", "in_progress"].contains(&status)
        })
        .await;
        ends.push(last);
    }
    let last = ends.pop().unwrap();
    assert!(ends.iter().all(|other| *other == last), "{ends:?} {last}");
    last
}

/// The events of an ended stream, which must be the same on every router.
pub(super) async fn replayed(routers: &[&Router], response: &Value) -> Vec<(String, Value)> {
    let mut tellings = Vec::new();
    for router in routers {
        tellings.push(super::resumed(router, response, None).await);
    }
    let events = tellings.pop().unwrap();
    assert!(tellings.iter().all(|other| *other == events));
    ends_once(&events);
    events
}

pub(super) fn ends_once(events: &[(String, Value)]) {
    let is_end = |(name, _): &(String, Value)| ENDS.contains(&name.as_str());
    let ends: Vec<usize> = (0..events.len())
        .filter(|at| is_end(&events[*at]))
        .collect();
    assert_eq!(ends, [events.len() - 1], "{events:?}");
}

/// The addresses of the routers, while they restart.
pub(super) type Places = Arc<Mutex<Vec<std::net::SocketAddr>>>;

pub(super) fn any(places: &Places) -> std::net::SocketAddr {
    let places = places.lock();
    places[fastrand::usize(..places.len())]
}

/// Starts a stream at any router that accepts it.
pub(super) async fn started(places: &Places, body: &Value) -> Open {
    let mut started = None;
    eventually("some router takes it", async || {
        let open = client::try_open(any(places), "POST", PATH, &[], body.to_string()).await;
        started = open.ok().filter(|open| open.status == 200);
        started.is_some()
    })
    .await;
    started.unwrap()
}

/// Reads a stream to its end and resumes it at another router if it breaks off. Empty if it broke off before the
/// response id.
pub(super) async fn followed(places: &Places, live: Open) -> Vec<(String, Value)> {
    followed_after(places, live, String::new()).await
}

/// As [`followed`], of a stream that has started with this text.
pub(super) async fn followed_after(
    places: &Places,
    mut live: Open,
    mut started: String,
) -> Vec<(String, Value)> {
    let mut seen: Vec<(String, Value)> = Vec::new();
    loop {
        let (text, _) = live.rest().await;
        let text = std::mem::take(&mut started) + &text;
        let whole = text.strip_suffix(END);
        seen.extend(part(whole.unwrap_or(&text), seen.len() as u64));
        let last = seen.last();
        let has_moved = last.is_some_and(|(_, event)| event["code"] == "router_draining");
        if has_moved {
            // A reader of a response that runs elsewhere is sent there.
            seen.pop();
        }
        let Some((_, first)) = seen.first() else {
            return seen;
        };
        if whole.is_some() && !has_moved {
            return seen;
        }
        let after = seen.len() - 1;
        let path = format!(
            "{}?stream=true&starting_after={after}",
            path(&first["response"])
        );
        eventually("some router goes on", async || {
            match client::try_open(any(places), "GET", &path, &[], "").await {
                Ok(open) if open.status == 200 => {
                    live = open;
                    true
                }
                Ok(open) => {
                    assert_eq!(open.status, 503, "{path}");
                    false
                }
                Err(_) => false,
            }
        })
        .await;
    }
}
