//! What every response store must do, held against each: the memory store, and Redis as servers that
//! the tests start.

mod conversations;
mod documents;
mod faults;
mod formats;
mod large_conversation;
mod model;
mod outbox;
mod owners;
mod replicas;
mod responses;

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use warmroute::http::io_threads::IoThreadScope;
use warmroute::ids::{ConversationId, ResponseId, Root, Tenant};
use warmroute::observe::metrics::Registry;
use warmroute::store::memory::Memory;
use warmroute::store::record::{Content, InitialState, Retention};
use warmroute::store::redis::{self, Redis};
use warmroute::store::{
    Cancellation, Chain, ConversationKey, EventBatch, FencingToken, Finalization, HistoryLimits,
    IdempotencyToken, NewRecord, Owner, ResponseKey, ResponseStore, RetentionSettings, RoutingHint,
    Status,
};

use crate::redis_server::Server;

type Store = Arc<dyn ResponseStore>;

/// As if for a router with one carrier. A test's own thread is none, unless it says so.
const CARRIERS: usize = 1;

/// A store as two replicas see it. In memory it is one.
struct Pair {
    a: Store,
    b: Store,
    _server: Option<Server>,
}

fn keep() -> RetentionSettings {
    RetentionSettings {
        max_event_log: 1_000,
        ..RetentionSettings::default()
    }
}

fn in_memory(keep: &RetentionSettings) -> Pair {
    let store = Memory::new(&Default::default(), keep, &Registry::default());
    let store: Store = Arc::new(store);
    Pair {
        a: store.clone(),
        b: store,
        _server: None,
    }
}

fn at(server: &Server) -> redis::Settings {
    redis::Settings {
        urls: vec![server.url()],
        // A machine that builds and tests at once is slow at times, and that is no fact about the store.
        advanced: redis::Advanced {
            read_timeout: Duration::from_millis(5_000),
            write_timeout: Duration::from_millis(5_000),
            ..redis::Advanced::default()
        },

        ..redis::Settings::default()
    }
}

fn open(settings: &redis::Settings, keep: &RetentionSettings) -> Store {
    Arc::new(Redis::open(settings, keep, CARRIERS, &Registry::default()).unwrap())
}

async fn in_redis(keep: &RetentionSettings) -> Pair {
    let server = Server::start().await;
    let settings = at(&server);
    Pair {
        a: open(&settings, keep),
        b: open(&settings, keep),
        _server: Some(server),
    }
}

/// Makes a check on each kind of store.
async fn on_each(check: impl AsyncFn(&Pair)) {
    on_each_with(&keep(), check).await;
}

async fn on_each_with(keep: &RetentionSettings, check: impl AsyncFn(&Pair)) {
    eprintln!("in memory");
    check(&in_memory(keep)).await;
    eprintln!("in Redis");
    check(&in_redis(keep).await).await;
    eprintln!("in Redis, asked on a carrier");
    let _scope = IoThreadScope::enter(1);
    check(&in_redis(keep).await).await;
}

fn tenant() -> Tenant {
    Tenant::tagged(0xabc)
}

/// A response that is not stored, alone in its chain.
fn new_key() -> ResponseKey {
    ResponseKey {
        tenant: tenant(),
        id: ResponseId::new(Root(fastrand::u64(..)), fastrand::u128(..)),
    }
}

/// One that continues `key`.
fn child(key: ResponseKey) -> ResponseKey {
    ResponseKey {
        id: ResponseId::new(key.id.root(), fastrand::u128(..)),
        ..key
    }
}

fn new_conversation_key() -> ConversationKey {
    ConversationKey {
        tenant: tenant(),
        id: ConversationId::new(Root(fastrand::u64(..)), fastrand::u128(..)),
    }
}

fn token() -> IdempotencyToken {
    IdempotencyToken(fastrand::u64(..))
}

fn hint() -> RoutingHint {
    RoutingHint {
        model: "model".into(),
        worker: Some("worker \"7\"".into()),
    }
}

const OWNER: Owner = Owner(0xa);
const OTHER: Owner = Owner(0xb);
const FENCE: FencingToken = FencingToken {
    owner: OWNER,
    number: 1,
};
const LEASE: Duration = Duration::from_secs(60);
const ANY: HistoryLimits = HistoryLimits {
    turns: 10_000,
    bytes: 1 << 40,
};

fn record(begin: InitialState) -> NewRecord {
    NewRecord {
        token: token(),
        parent: None,
        hint: hint(),
        input: Bytes::from_static(br#"[{"in":1}]"#),
        content: Content {
            response: Bytes::from_static(br#"{"id":"r"}"#),
            output: Bytes::from_static(br#"[{"out":1}]"#),
        },
        initial: begin,
    }
}

fn finished() -> NewRecord {
    let status = Status::Completed;
    record(InitialState::Finished { status })
}

fn continuing(past: Chain) -> NewRecord {
    NewRecord {
        parent: Some(past),
        ..finished()
    }
}

fn queued() -> NewRecord {
    kept_as(Retention::Stored)
}

fn kept_as(retention: Retention) -> NewRecord {
    record(InitialState::Background {
        fence: FENCE,
        retention,
        streams: true,
        request: Bytes::from_static(b"{\"request\":1}"),
    })
}

fn ending(status: Status) -> Finalization {
    Finalization {
        commit: None,
        retention: Retention::Stored,
        token: token(),
        status,
        content: Content {
            response: Bytes::from_static(b"{\"final\":1}"),
            output: Bytes::from_static(b"[\"final\"]"),
        },
        hint: hint(),
        batch: None,
        delta_table: Bytes::from_static(b"cut"),
    }
}

fn cancelling() -> Cancellation {
    Cancellation {
        token: token(),
        response: Bytes::from_static(b"{\"cancelled\":1}"),
        event: Bytes::from_static(b"cancelled"),
    }
}

fn batch(first: u64, last: u64) -> EventBatch {
    EventBatch {
        first,
        last,
        bytes: format!("{first}..={last}").into(),
        tokens: Bytes::new(),
    }
}
