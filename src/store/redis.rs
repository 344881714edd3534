//! The store in Redis, shared by all replicas: one server, a master found through sentinels, or a cluster.
//!
//! A response is one hash, plus a stream for its events. All keys of a chain, and of a conversation with its
//! responses, have the hash tag `{tenant:root}`, so a cluster keeps them in one slot. Each transition is one
//! script (`redis/*.lua`; `redis/common.lua` documents the record). Data that spans slots (which owner runs
//! which responses, notices) is written by separate commands, ordered so that a crash in between leaves only
//! entries that a later scan removes.
//!
//! `redis/ask.rs` sends the commands. An operation on an I/O thread uses that thread's own connection, so no
//! other thread is woken. Other threads, and all operations on a cluster, use a connection on the store's own
//! thread.

mod ask;
mod background;
mod breaker;
mod conversations;
mod keys;
mod link;
mod owners;
mod packed;
mod reply;
mod responses;
mod scripts;
mod settings;
mod target;

use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use serde_json::json;
use tokio::task::JoinHandle;

use super::meters::{Meters, Op};
use super::settings::RetentionSettings;
use super::{
    CancelOutcome, Cancellation, CancelledOutput, Claim, ConversationKey, DeleteOutcome, Error,
    EventBatch, FencingToken, Finalization, Health, History, HistoryLimits, IdempotencyToken, Item,
    ItemOutcome, ItemsOutcome, LockOutcome, LoggedEvents, NewConversation, NewRecord, Notice,
    NoticeCursor, Orphan, Owner, OwnershipLoss, Page, PutOutcome, Record, Report, ResponseKey,
    ResponseStore, StoreFuture, Takeover, WriteOutcome,
};
use crate::http::io_threads::{self, OffloadThread};
use crate::observe::metrics::Registry;
use ask::{Asking, Kind, Request};
use breaker::State;
use conversations::PutKind;
use keys::Keys;
use link::Link;
use reply::Reply;
use scripts::Call;
pub use settings::{Advanced, CircuitBreaker, Mode, Settings, Tls, UrlOrMap, url_or_map};
use target::Target;

/// Notices expire after this time: an owner that reads none for so long has stopped.
const NOTICES_TTL_S: u64 = 3_600;

#[derive(Debug)]
pub struct Redis {
    asking: Arc<Asking>,
    link: Arc<Link>,
    keys: Keys,
    keep: RetentionSettings,
    mode: Mode,
    compress_min: u64,
    meters: Meters,
    /// The thread of the shared connection. It ends with the store.
    aside: OffloadThread,
    /// Compresses and decompresses large values. Its queue has at most one value per operation.
    packer: OffloadThread,
}

/// An operation that runs on the store's thread. Dropping this does not cancel it.
struct Begun(JoinHandle<Result<redis::Value, Error>>);

impl Begun {
    async fn answer(self) -> Result<redis::Value, Error> {
        self.0.await.unwrap_or_else(|_| Err(closing()))
    }
}

fn closing() -> Error {
    Error::Unknown {
        retry_after: Duration::from_secs(1),
        reason: "the store is closing".into(),
    }
}

impl Redis {
    /// Starts the store's thread. It connects at the first operation, so a router starts while Redis is down.
    pub fn open(
        settings: &Settings,
        keep: &RetentionSettings,
        carriers: usize,
        registry: &Registry,
    ) -> io::Result<Self> {
        let meters = Meters::new(registry);
        let target = Target::new(settings).map_err(io::Error::other)?;
        let timeout = settings.advanced.connect_timeout;
        let own = match settings.mode {
            // The cluster client has its own connection to each node.
            Mode::Cluster => 0,
            Mode::Standalone | Mode::Sentinel => {
                carriers.min(settings.advanced.max_thread_connections as usize)
            }
        };
        let link = Link::new(target, timeout, own, meters.reconnects.clone());
        let link = Arc::new(link);
        Ok(Self {
            asking: Arc::new(Asking::new(link.clone(), settings, meters.clone())),
            link,
            keys: Keys::new(&settings.prefix),
            keep: keep.clone(),
            mode: settings.mode,
            compress_min: settings.advanced.compress_from,
            meters,
            aside: OffloadThread::start("redis")?,
            packer: OffloadThread::start("redis-values")?,
        })
    }

    fn begin(&self, kind: Kind, request: Request) -> Begun {
        let asking = self.asking.clone();
        let asked = async move { asking.ask(link::SHARED, kind, &request).await };
        Begun(self.aside.runtime().spawn(asked))
    }

    async fn ask(&self, kind: Kind, request: Request) -> Result<redis::Value, Error> {
        match self.link.index_for(io_threads::index()) {
            link::SHARED => self.begin(kind, request).answer().await,
            own => self.asking.ask(own, kind, &request).await,
        }
    }

    async fn call(&self, kind: Kind, call: Call) -> Result<Reply, Error> {
        Reply::new(self.ask(kind, Request::Script(call)).await?)
    }

    /// Sends a command without waiting for it: a later scan makes up for its failure.
    fn send_detached(&self, request: Request) {
        drop(self.begin(Kind::Write, request));
    }

    fn record_ttl_ms(&self) -> u64 {
        self.keep.responses.as_millis() as u64
    }

    /// Sends a command only if Redis has not answered recently.
    async fn admit_now(&self) -> Result<(), Error> {
        // In a cluster one reply says nothing about the other nodes.
        if self.asking.is_fresh() || self.mode == Mode::Cluster && self.is_up() {
            return Ok(());
        }
        let mut exists = redis::cmd("EXISTS");
        exists.arg(self.keys.owners());
        self.ask(Kind::Read, Request::Command(exists)).await?;
        Ok(())
    }

    fn is_up(&self) -> bool {
        !matches!(self.asking.breaker(), State::Open { .. })
    }

    async fn report_now(&self) -> Result<Report, Error> {
        let (owners, orphans) = self.report_owners().await.unwrap_or_default();
        let mut server = serde_json::Map::new();
        let (command, wanted): (&[&str], &[&str]) = match self.mode {
            Mode::Cluster => (
                &["CLUSTER", "INFO"],
                &["cluster_state", "cluster_slots_ok", "cluster_known_nodes"],
            ),
            Mode::Standalone | Mode::Sentinel => (
                &["INFO"],
                &[
                    "redis_version",
                    "used_memory",
                    "maxmemory",
                    "maxmemory_policy",
                    "connected_clients",
                    "role",
                ],
            ),
        };
        let mut info = redis::cmd(command[0]);
        info.arg(&command[1..]);
        if let Ok(value) = self.ask(Kind::Read, Request::Command(info)).await
            && let Ok(text) = redis::from_redis_value::<String>(value)
        {
            let lines = text.lines().filter_map(|line| line.split_once(':'));
            for (key, value) in lines.filter(|(key, _)| wanted.contains(key)) {
                server.insert(key.to_owned(), value.into());
            }
        }
        Ok(Report {
            kind: "redis",
            health: self.health(),
            details: json!({
                "mode": self.mode,
                "circuit_breaker": self.asking.breaker().as_str(),
                "connections_opened": self.link.opened(),
                "in_flight": self.asking.in_flight(),
                "server": server,
                "owners": owners,
                "orphans": orphans,
                "scripts": scripts::report(),
            }),
        })
    }

    fn meter<'a, T: super::meters::Outcome + Send + 'a>(
        &'a self,
        op: Op,
        asked: impl Future<Output = Result<T, Error>> + Send + 'a,
    ) -> StoreFuture<'a, T> {
        Box::pin(self.meters.observe(op, asked))
    }
}

impl ResponseStore for Redis {
    fn admit(&self) -> StoreFuture<'_, ()> {
        self.meter(Op::Admit, self.admit_now())
    }

    fn create(&self, key: ResponseKey, record: NewRecord) -> StoreFuture<'_, ()> {
        self.meter(Op::Create, self.create_record(key, record))
    }

    fn get(&self, key: ResponseKey) -> StoreFuture<'_, Option<Record>> {
        self.meter(Op::Get, self.get_record(key))
    }

    fn input(&self, key: ResponseKey) -> StoreFuture<'_, Option<Bytes>> {
        self.meter(Op::Input, self.get_input(key))
    }

    fn history(&self, key: ResponseKey, max: HistoryLimits) -> StoreFuture<'_, History> {
        self.meter(Op::History, self.get_history(key, max))
    }

    fn delete(&self, key: ResponseKey) -> StoreFuture<'_, DeleteOutcome> {
        self.meter(Op::Delete, self.delete_record(key))
    }

    fn start(&self, key: ResponseKey, fence: FencingToken) -> StoreFuture<'_, WriteOutcome> {
        self.meter(Op::Start, self.start_record(key, fence))
    }

    fn append(
        &self,
        key: ResponseKey,
        fence: FencingToken,
        batch: EventBatch,
    ) -> StoreFuture<'_, WriteOutcome> {
        self.meter(Op::Append, self.append_events(key, fence, batch))
    }

    fn finalize(
        &self,
        key: ResponseKey,
        fence: FencingToken,
        end: Finalization,
    ) -> StoreFuture<'_, WriteOutcome> {
        self.meter(Op::Finalize, self.finalize_record(key, fence, end))
    }

    fn cancel(&self, key: ResponseKey, cancel: Cancellation) -> StoreFuture<'_, CancelOutcome> {
        self.meter(Op::Cancel, self.cancel_record(key, cancel))
    }

    fn finalize_cancelled(
        &self,
        key: ResponseKey,
        fence: FencingToken,
        amend: CancelledOutput,
    ) -> StoreFuture<'_, WriteOutcome> {
        self.meter(Op::FinalizeCancelled, self.amend_record(key, fence, amend))
    }

    fn events(
        &self,
        key: ResponseKey,
        after: Option<u64>,
        bytes_max: u64,
    ) -> StoreFuture<'_, Option<LoggedEvents>> {
        self.meter(Op::Events, self.read_events(key, after, bytes_max))
    }

    fn heartbeat(&self, owner: Owner, name: &str, lease: Duration) -> StoreFuture<'_, ()> {
        self.meter(
            Op::Heartbeat,
            self.beat_lease(owner, name.to_owned(), lease),
        )
    }

    fn end_lease(&self, owner: Owner) -> StoreFuture<'_, ()> {
        self.meter(Op::EndLease, self.end_lease(owner))
    }

    fn check_ownership(
        &self,
        running: Vec<(ResponseKey, FencingToken)>,
    ) -> StoreFuture<'_, Vec<(ResponseKey, OwnershipLoss)>> {
        self.meter(Op::CheckOwnership, self.check_running(running))
    }

    fn orphans(&self, max: usize) -> StoreFuture<'_, Vec<Orphan>> {
        self.meter(Op::Orphans, self.find_orphans(max))
    }

    fn untracked(
        &self,
        owner: Owner,
        running: Vec<ResponseKey>,
        max: usize,
    ) -> StoreFuture<'_, Vec<(ResponseKey, FencingToken)>> {
        self.meter(Op::Untracked, self.find_strays(owner, running, max))
    }

    fn take_over(&self, orphan: Orphan, by: Owner) -> StoreFuture<'_, Takeover> {
        self.meter(Op::TakeOver, self.adopt_orphan(orphan, by))
    }

    fn release(&self, key: ResponseKey, fence: FencingToken) -> StoreFuture<'_, WriteOutcome> {
        self.meter(Op::Release, self.release_record(key, fence))
    }

    fn notices(
        &self,
        owner: Owner,
        after: NoticeCursor,
    ) -> StoreFuture<'_, (Vec<Notice>, NoticeCursor)> {
        self.meter(Op::Notices, self.read_notices(owner, after))
    }

    fn create_conversation(
        &self,
        key: ConversationKey,
        new: NewConversation,
    ) -> StoreFuture<'_, ()> {
        self.meter(Op::CreateConversation, self.make_conversation(key, new))
    }

    fn conversation(&self, key: ConversationKey) -> StoreFuture<'_, Option<Bytes>> {
        self.meter(Op::Conversation, self.get_conversation(key))
    }

    fn update_conversation(&self, key: ConversationKey, object: Bytes) -> StoreFuture<'_, bool> {
        self.meter(Op::UpdateConversation, self.update_object(key, object))
    }

    fn delete_conversation(&self, key: ConversationKey) -> StoreFuture<'_, bool> {
        self.meter(Op::DeleteConversation, self.drop_conversation(key))
    }

    fn add_items(
        &self,
        key: ConversationKey,
        token: IdempotencyToken,
        items: Vec<Item>,
    ) -> StoreFuture<'_, PutOutcome> {
        let put = self.put_items(key, PutKind::Add, token, items, Bytes::new());
        self.meter(Op::AddItems, put)
    }

    fn items(&self, key: ConversationKey, page: Page) -> StoreFuture<'_, ItemsOutcome> {
        self.meter(Op::Items, self.page_of_items(key, page))
    }

    fn all_items(&self, key: ConversationKey, bytes_max: u64) -> StoreFuture<'_, ItemsOutcome> {
        self.meter(Op::AllItems, self.every_item(key, bytes_max))
    }

    fn item(&self, key: ConversationKey, item: &str) -> StoreFuture<'_, ItemOutcome> {
        self.meter(Op::Item, self.one_item(key, item.to_owned()))
    }

    fn delete_item(&self, key: ConversationKey, item: &str) -> StoreFuture<'_, ItemOutcome> {
        self.meter(Op::DeleteItem, self.drop_item(key, item.to_owned()))
    }

    fn lock(&self, key: ConversationKey, claim: Claim) -> StoreFuture<'_, LockOutcome> {
        self.meter(Op::Lock, self.take_lock(key, claim))
    }

    fn commit(
        &self,
        key: ConversationKey,
        token: IdempotencyToken,
        items: Vec<Item>,
    ) -> StoreFuture<'_, PutOutcome> {
        let put = self.put_items(key, PutKind::Commit, token, items, Bytes::new());
        self.meter(Op::Commit, put)
    }

    fn unlock(&self, key: ConversationKey, token: IdempotencyToken) -> StoreFuture<'_, ()> {
        self.meter(Op::Unlock, self.drop_lock(key, token))
    }

    fn health(&self) -> Health {
        let is_up = self.is_up();
        Health {
            is_up,
            reason: match is_up {
                true => String::new(),
                false => self.asking.last_failure().to_string(),
            },
        }
    }

    fn report(&self) -> StoreFuture<'_, Report> {
        self.meter(Op::Report, self.report_now())
    }
}
