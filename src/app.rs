//! Wiring: builds every part from the configuration, starts its tasks, and drains them.

mod admin_parts;
mod batches_parts;
mod bind;
pub mod check;
mod connection_settings;
mod discoveries;
pub mod doctor;
mod drain;
mod endpoint_picker;
mod events;
pub mod kv_tap;
mod load_sockets;
mod lost_caches;
mod memory_bounds;
mod memory_return;
pub mod metrics_reference;
pub mod process_setup;
mod reload;
mod responses_parts;
mod sharing;
mod tenants;
pub mod tls;
mod traces;
mod warm_start;
pub mod warnings;
mod worker_speeds;

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use arc_swap::ArcSwap;
use tokio::net::TcpListener;
use tracing::{info, warn};

use self::admin_parts::AdminParts;
use self::discoveries::FollowedDiscoveries;
use self::reload::{Parts, Reloader};
use self::responses_parts::key_ring;
use self::sharing::{Prepared, Sharing};
use self::traces::Traces;
use self::warm_start::Start;
use crate::admin::{AdminServer, KvPages, Readiness, Sources};
use crate::api::ApiServer;
use crate::api::dry_run::DryRun;
use crate::config::Config;
use crate::fleet::kv_transfer::watch;
use crate::fleet::{probe, registry};
use crate::http::drain::Tasks;
use crate::http::io_threads::{IoThreads, OffloadThread};
use crate::http::server;
use crate::kv::indexes::PrefixIndexes;
use crate::kv::predicted::{self, PredictedIndex};
use crate::kv::subscriber::joins::Joins;
use crate::kv::subscriber::{self, StatusBoard};
use crate::kv::tokenizer_check::{Detokenize, IsServed, TokenizerCheck, Watcher};
use crate::kv::unconfirmed::{self, UnconfirmedBlocks};
use crate::kv::{grpc, zmq};
use crate::observe::metrics::Registry;
use crate::observe::{self, process};
use crate::openai::body_budget::BodyMemory;
use crate::peers::routed::RoutedPrompts;
use crate::relay::account::hindsight::Hindsight;
use crate::relay::account::usage::Usage;
use crate::relay::prompt::tokens::Tokens;
use crate::relay::{Caches, Queues, Relay};
use crate::responses::{Mode, Responses};
use crate::store;

/// Connections of operators and of what scrapes metrics.
const ADMIN_CONNECTIONS: u32 = 64;

/// A running router.
#[derive(Debug)]
pub struct App {
    api: SocketAddr,
    admin: SocketAddr,
    tasks: Tasks,
    /// The tasks that go on until the drain is over: the admin listener, and what has requests aborted at engines.
    admin_tasks: Tasks,
    fleet: Arc<registry::Registry>,
    /// The API of the configuration that runs.
    api_server: Arc<ArcSwap<ApiServer>>,
    admin_server: Arc<AdminServer>,
    /// For the reference of metrics.
    metrics: Registry,
    readiness: Arc<Readiness>,
    /// Where requests wait for room at a worker.
    queues: Arc<Queues>,
    reload: reload::Handle,
    /// What is shared with other replicas, if there are any.
    sharing: Option<Sharing>,
    tls: tls::Listeners,
    usage: Arc<Usage>,
    traces: Traces,
    /// Connections run there, also while they drain.
    io_threads: IoThreads,
    _kv_events: OffloadThread,
}

impl App {
    /// Starts a router on two listeners. Returns at once; workers are found meanwhile.
    pub fn start(config: &Config, api: TcpListener, admin: TcpListener) -> io::Result<Self> {
        Self::start_with_peers(config, api, admin, None)
    }

    /// As [`App::start`], with a listener for other replicas.
    pub fn start_with_peers(
        config: &Config,
        api: TcpListener,
        admin: TcpListener,
        peers_listener: Option<TcpListener>,
    ) -> io::Result<Self> {
        let (api_address, admin_address) = (api.local_addr()?, admin.local_addr()?);
        let metrics = Registry::default();
        process::register(&metrics);
        let tasks = Tasks::default();
        let admin_tasks = tasks.beside();
        let supervisor = tasks.supervisor().clone();
        supervisor.register(&metrics);
        let io_threads = IoThreads::start(config.runtime.threads)?;
        let tls = tls::Listeners::new(config, ADMIN_CONNECTIONS, &metrics)?;
        let connections = config.fleet.advanced.clone();
        let fleet = registry::Registry::new(connections, config.registry_settings());
        let predicted = Arc::new(PredictedIndex::new(
            config.predicted.clone(),
            predicted::Metrics::new(&metrics),
            observe::now(),
        ));
        let indexes = PrefixIndexes::new(config.kv_events.index.clone(), &metrics);
        let unconfirmed = UnconfirmedBlocks::new(
            config.kv_events.advanced.unconfirmed.clone(),
            unconfirmed::Metrics::new(&metrics),
        );
        let routed = Arc::new(RoutedPrompts::new(
            config.peers.advanced.max_queued_blocks as usize,
            predicted.clone(),
            unconfirmed.clone(),
            &metrics,
        ));
        let (peers, prepared) = Prepared::new(
            config,
            peers_listener,
            tls.peers.clone(),
            &fleet,
            &routed,
            &metrics,
        )?;
        let board = Arc::new(StatusBoard::default());
        let sources = config.token_sources().map_err(io::Error::other)?;
        let tokens = Tokens::new(&config.tokenization, sources, fastrand::u64(..), &metrics)?;
        let tokens = Arc::new(ArcSwap::from_pointee(tokens));
        // Without a tokenizer, logs show token ids instead of text.
        let detokenize: Detokenize = {
            let tokens = tokens.clone();
            Arc::new(move |model, ids| tokens.load().text_of(model, ids))
        };
        let (tokenizer_check, checks) =
            TokenizerCheck::new(config.kv_events.advanced.tokenizer_check.clone(), &metrics);
        let is_served: IsServed = {
            let fleet = fleet.clone();
            Arc::new(move |model: &str| fleet.snapshot().models.contains_key(model))
        };
        let watcher = Watcher::new(tokenizer_check.clone(), checks, detokenize, is_served);
        let usage = tenants::usage(config, &metrics)?;
        let store = store::open(&config.responses.store, io_threads.count(), &metrics)?;
        let limiter = tenants::limiter(config, &store, io_threads.count(), &metrics)?;
        tenants::start_limiter(&limiter, &peers, &tasks);
        let webhooks = responses_parts::webhooks(config, &store, fleet.tls(), &tasks, &metrics);
        let (open_store, store) = (store.clone(), store.responses);
        let (traces, tracer) = Traces::start(config, &fleet, &metrics)?;
        let mut relay = Relay::new(
            config.requests.clone(),
            fleet.clone(),
            Caches {
                indexes: indexes.clone(),
                board: board.clone(),
                unconfirmed: unconfirmed.clone(),
                predicted: predicted.clone(),
                tokenizer_check: tokenizer_check.clone(),
                routed,
            },
            config.model_settings(),
            &config.prefill_decode,
            tokens.load_full(),
            peers.clone(),
            tenants::table(config, &limiter),
            config.queue.settings().cloned(),
            usage.clone(),
            &metrics,
        );
        relay.tracer = tracer;
        relay.ends_in = tasks.last_part().clone();
        let relay = Arc::new(relay);

        let queues = relay.queues().clone();
        let dispatched = (queues.clone(), tasks.clone());
        let dispatch = |(queues, tasks)| Queues::dispatch(queues, tasks);
        tasks.spawn(supervisor.restarts("queue", dispatched, dispatch));
        // Beyond the drain, because what the drain ends is aborted, too.
        let aborting = relay.aborts.clone().run(admin_tasks.stopped());
        admin_tasks.spawn(supervisor.essential("aborts", aborting));
        let hindsight = relay.hindsight().clone();
        let looking_back = supervisor.restarts("hindsight", hindsight, Hindsight::run);
        tasks.spawn_until_stopped(looking_back);
        tls.watch(&fleet, &tasks)?;
        fleet.tls().keep(tls::clients(config, fleet.tls()));
        let discoveries = FollowedDiscoveries::start(config, &fleet, &tasks, &metrics)?;
        let pairing = &config.prefill_decode;
        let connector = pairing
            .connector
            .filter(|connector| connector.needs_bootstrap());
        let bootstrap = connector.map(|connector| (connector, pairing.advanced.bootstrap_port));
        let lasting = relay.lasting_state();
        let on_connected: probe::OnConnected = {
            let lasting = lasting.clone();
            Arc::new(move |worker, asked_at| lasting.on_connected(worker, asked_at))
        };
        let probed = (fleet.clone(), on_connected, tasks.clone());
        let begin =
            move |(fleet, on_connected, tasks)| probe::run(fleet, bootstrap, on_connected, tasks);
        tasks.spawn_until_stopped(supervisor.restarts("probes", probed, begin));
        let looking_up = supervisor.restarts("model_lookup", fleet.clone(), probe::lookup::run);
        tasks.spawn_until_stopped(looking_up);
        let learning = supervisor.restarts("speeds", fleet.clone(), worker_speeds::learn);
        tasks.spawn_until_stopped(learning);
        watch_pairs(config, &fleet, &tasks);
        let start = Start::new(&config.peers, &peers, &fleet, &board, &predicted, &metrics);
        let shared = subscriber::Shared {
            indexes: indexes.clone(),
            board: board.clone(),
            metrics: subscriber::Metrics::new(&metrics),
            settings: config.kv_events.advanced.stream.clone(),
            // A restarted engine has lost the predicted blocks, too.
            on_cache_lost: {
                let (predicted, unconfirmed) = (predicted.clone(), unconfirmed.clone());
                Arc::new(move |worker| {
                    predicted.forget(observe::now(), worker);
                    unconfirmed.forget(worker);
                })
            },
            joins: Joins::new(&config.kv_events.advanced.joins, &metrics),
            trees: start.trees(),
        };
        let kv_events = OffloadThread::start_with("kv-events", zmq::before_park)?;
        let followed = (
            fleet.clone(),
            shared,
            config.kv_events.advanced.clone(),
            events::Metrics {
                zmq: zmq::Metrics::new(&metrics),
                grpc: grpc::Metrics::new(&metrics),
            },
            tasks.clone(),
        );
        let follow = |(fleet, shared, settings, metrics, tasks)| {
            events::follow(fleet, shared, settings, metrics, tasks)
        };
        let following = supervisor.restarts("kv_events", followed, follow);
        tasks.spawn_until_stopped_on(kv_events.runtime(), following);
        let followed = (
            fleet.clone(),
            config.kv_events.advanced.zmq.clone(),
            load_sockets::failures(&metrics),
            tasks.clone(),
        );
        let follow = |(fleet, settings, failures, tasks)| {
            load_sockets::follow(fleet, settings, failures, tasks)
        };
        let following = supervisor.restarts("load_sockets", followed, follow);
        tasks.spawn_until_stopped_on(kv_events.runtime(), following);
        let watching = watcher.run(indexes.clone(), board.clone(), supervisor.clone());
        tasks.spawn_until_stopped_on(kv_events.runtime(), watching);
        let confirmed = (unconfirmed.clone(), board.clone());
        let confirm = |(unconfirmed, board)| lost_caches::confirm(unconfirmed, board);
        let confirming = supervisor.restarts("unconfirmed_blocks", confirmed, confirm);
        tasks.spawn_until_stopped(confirming);
        tasks.spawn_until_stopped(lost_caches::forget(
            fleet.clone(),
            lasting,
            predicted,
            unconfirmed,
            supervisor.clone(),
        ));

        let responses = Responses::new(
            config.responses_settings(),
            store.clone(),
            relay.clone(),
            Arc::new(key_ring(config, &metrics)?),
            BodyMemory::new(config.api.requests.max_total_body),
            tasks.clone(),
            io_threads.clone(),
            &metrics,
        )?;
        // It does not begin again: a table of leases that a panic left in the middle of a change must own nothing any more.
        let owning = responses.clone().run_background();
        tasks.spawn(supervisor.essential("background_runs", owning));
        let batches = batches_parts::open(
            &config.batches,
            config.responses.store.lease.duration,
            &open_store,
            fleet.tls(),
            &tasks,
            &io_threads,
            &metrics,
        )?;
        let stateful = config.responses.mode == Mode::Stateful;
        let needs_store = stateful && !config.responses.advanced.ready_without_store;
        let (reload, reload_requests) = reload::channel(config);
        let readiness = Arc::new(Readiness {
            fleet: fleet.clone(),
            queues: queues.clone(),
            store: store.clone(),
            needs_store,
            tasks: tasks.clone(),
            start: start.status.clone(),
            config: reload.status.ready.clone(),
            is_draining: AtomicBool::new(false),
            was_asked: AtomicBool::new(false),
        });
        let dry_run = DryRun::new(responses.clone(), &config.salted_tenants());
        let dry_run = Arc::new(ArcSwap::from_pointee(dry_run));
        let others = AdminParts {
            reload: reload.clone(),
            dry_run: dry_run.clone(),
            batches: batches.clone(),
        };
        let sources = Sources {
            relay: ArcSwap::new(relay.clone()),
            peers: peers.clone(),
            kv: Arc::new(KvPages {
                board,
                indexes,
                tokenizer_check,
            }),
            store,
            webhooks: webhooks.clone(),
            others: Box::new(others),
            registry: metrics.clone(),
        };
        let max_body = config.api.requests.max_body;
        let admin_server = AdminServer::new(sources, readiness.clone(), &config.admin, max_body)?;
        let api_server = ApiServer::new(
            config.api.requests.clone(),
            tenants::callers(config, fleet.tls(), &tasks, &metrics)?,
            responses,
            batches.clone(),
            relay,
            readiness.clone(),
            tasks.clone(),
            &metrics,
        );
        if let Some(batches) = &batches {
            batches.start(api_server.batch_sender());
        }
        let on_malformed = api_server.on_malformed();
        let api_server = Arc::new(ArcSwap::new(api_server));
        let parts = Parts {
            api: api_server.clone(),
            admin: admin_server.clone(),
            dry_run,
            tokens,
            fleet: fleet.clone(),
            tls: tls.clone(),
            discoveries,
            limiter,
            webhooks,
            batches,
        };
        let reloader = Reloader::new(config, parts, &reload, reload_requests, &metrics)?;
        tasks.spawn_until_stopped(supervisor.essential("reload", reloader.run()));
        let api_metrics = server::Metrics::new(&metrics);
        let returning = supervisor.restarts("memory", api_metrics.clone(), memory_return::run);
        tasks.spawn_until_stopped(returning);
        let served = api_server.clone();
        let serving = server::serve(
            api,
            connection_settings::new(config, io_threads.count()),
            api_metrics,
            server::Handlers {
                handler: move |request, peer| served.load_full().handle(request, peer),
                on_malformed: Some(on_malformed),
                tls: tls.api.clone(),
            },
            io_threads.clone(),
            tasks.clone(),
        );
        tasks.spawn(supervisor.essential("api", serving));
        let sharing =
            prepared.map(|prepared| prepared.start(peers.clone(), readiness.clone(), &tasks));
        let sharing = sharing.transpose()?;
        let starting = supervisor.essential("warm_start", start.run(supervisor.clone()));
        tasks.spawn_until_stopped_on(kv_events.runtime(), starting);
        admin_server.start_dashboard(&admin_tasks);
        let handler = admin_server.clone();
        // A registry of its own: the connection metrics are about the API's clients.
        let serving = server::serve(
            admin,
            server::Settings {
                max_connections: ADMIN_CONNECTIONS,
                ..server::Settings::default()
            },
            server::Metrics::new(&Registry::default()),
            server::Handlers {
                handler: move |request, peer| handler.clone().handle(request, peer),
                on_malformed: None,
                tls: tls.admin.clone(),
            },
            // Pages of megabytes must not delay requests.
            IoThreads::single("admin")?,
            admin_tasks.clone(),
        );
        admin_tasks.spawn(supervisor.essential("admin", serving));
        let peers_address = sharing.as_ref().map(|sharing| sharing.address);
        let shown = peers_address.map(tracing::field::display);
        for warning in warnings::of_running(config) {
            warn!("configuration: {warning}");
        }
        info!(api = %api_address, admin = %admin_address, peers = shown, "listening");
        Ok(Self {
            api: api_address,
            admin: admin_address,
            tasks,
            admin_tasks,
            fleet,
            api_server,
            admin_server,
            metrics,
            readiness,
            queues,
            reload,
            sharing,
            tls,
            usage,
            traces,
            io_threads,
            _kv_events: kv_events,
        })
    }

    pub fn api_address(&self) -> SocketAddr {
        self.api
    }

    pub fn admin_address(&self) -> SocketAddr {
        self.admin
    }

    pub fn fleet(&self) -> &registry::Registry {
        &self.fleet
    }

    /// Where other replicas connect, if there may be any.
    pub fn peers_address(&self) -> Option<SocketAddr> {
        self.sharing.as_ref().map(|sharing| sharing.address)
    }

    pub fn connected_peers(&self) -> usize {
        let sharing = self.sharing.as_ref();
        sharing.map_or(0, |sharing| sharing.connected())
    }

    /// Resolves when an operator has asked for a drain over the admin listener.
    pub async fn drain_requested(&self) {
        self.admin_server.drain_requested().await;
    }

    /// Resolves with the name of a background task that panicked and without which the router must not go on.
    pub async fn task_failed(&self) -> &'static str {
        self.tasks.supervisor().failed().await
    }
}

/// With disaggregated prefill/decode: logs which workers have no partner for KV transfers.
fn watch_pairs(config: &Config, fleet: &Arc<registry::Registry>, tasks: &Tasks) {
    let settings = &config.prefill_decode;
    if let Some(connector) = settings.connector {
        let begin = move |fleet| watch::run(fleet, connector);
        let watching = tasks.supervisor().restarts("pairs", fleet.clone(), begin);
        tasks.spawn_until_stopped(watching);
    }
}
