//! Opens connections to Redis: to one server, to the master that sentinels name, or to a cluster.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};
use std::{fmt, fs};

use parking_lot::Mutex;
use redis::aio::{ConnectionLike, MultiplexedConnection};
use redis::cluster::{ClusterClient, ClusterClientBuilder};
use redis::cluster_async::ClusterConnection;
use redis::cluster_routing::{Route, RoutingInfo, SingleNodeRoutingInfo, SlotAddr};
use redis::io::tcp::TcpSettings;
use redis::sentinel::{SentinelClientBuilder, SentinelServerType};
use redis::{
    AsyncConnectionConfig, Client, ClientTlsConfig, Cmd, ConnectionAddr, ConnectionInfo, ErrorKind,
    IntoConnectionInfo, Pipeline, RedisConnectionInfo, RedisResult, ServerErrorKind,
    TlsCertificates, Value,
};
use socket2::TcpKeepalive;
use tracing::{info, warn};

use super::password_files::PasswordFiles;
use super::settings::{Advanced, Mode, Settings, address};
use crate::observe;

/// Attempts of the cluster library per operation, redirections included. The deadline of the operation bounds
/// them too.
const CLUSTER_RETRIES: u32 = 4;
const CLUSTER_RETRY_MS: u64 = 50;
/// A cluster is connected in two steps. Each waits for its slowest node: of those in the settings, then of all that
/// these name. So a node has half the time of a server that is alone, and the cluster twice that time: a node that
/// hangs in both steps leaves as much again for the others.
const NODE_TIMEOUT_DIVISOR: u32 = 2;
const CLUSTER_TIMEOUT_FACTOR: u32 = 2;
/// The library follows redirections at once, and uses up its attempts within a millisecond if it has no connection to the
/// node then: it opens them anew, all of them, when one node is lost. So such an operation, which no node has executed, is
/// tried again after these pauses.
const MOVED_PAUSES: [Duration; 2] = [Duration::from_millis(50), Duration::from_millis(100)];

/// How often passwords' files are read at most because operations fail: all that wait for a lost node fail at once.
const PASSWORD_CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// Passwords' files have this part of the time to answer that a connection has, or a read that waits for it. Then the last
/// passwords are used, and have the rest.
const PASSWORD_PATIENCE_DIVISOR: u32 = 2;

/// Write buffer of a connection: some dozens of small responses.
const WRITE_BYTES: usize = 64 << 10;

/// TCP keepalive, so that middleboxes do not drop idle connections and a vanished server is noticed: after ten
/// seconds and three probes.
const PROBE_AFTER: Duration = Duration::from_secs(10);
const PROBE_EVERY: Duration = Duration::from_secs(3);
const PROBES: u32 = 3;
/// TCP user time-out: many times the deadline of an operation.
const UNACKNOWLEDGED: Duration = Duration::from_secs(10);

/// Asks a cluster again if all that it did was to redirect.
async fn redirected<F: Future<Output = RedisResult<Value>>>(
    mut ask: impl FnMut() -> F,
) -> RedisResult<Value> {
    let moved = ErrorKind::Server(ServerErrorKind::Moved);
    for pause in MOVED_PAUSES {
        match ask().await.and_then(Value::extract_error) {
            Err(error) if error.kind() == moved => tokio::time::sleep(pause).await,
            answer => return answer,
        }
    }
    ask().await
}

pub(super) struct Target {
    mode: Mode,
    /// Replaced when a password's file has another one.
    current: Arc<Mutex<Current>>,
    /// `None` if no password is in a file.
    passwords: Option<PasswordFiles>,
    timeout: Duration,
}

struct Current {
    settings: Settings,
    kind: Arc<Kind>,
    /// How often a password was replaced.
    replaced: u64,
    /// When the passwords' files may be read again because an operation failed.
    check_at: Instant,
}

impl Current {
    /// Reads the passwords' files. One such call runs at a time, and none has the lock while it reads.
    fn read_again(current: &Mutex<Self>) {
        let before = current.lock().settings.clone();
        let settings = before.read_again();
        if settings == before {
            return;
        }
        match Kind::new(&settings) {
            Ok(kind) => {
                info!("a password of Redis was replaced in its file");
                let mut current = current.lock();
                current.settings = settings;
                current.kind = Arc::new(kind);
                current.replaced += 1;
            }
            Err(error) => warn!(error, "cannot take up a password of Redis"),
        }
    }
}

enum Kind {
    Standalone(Box<Client>),
    Sentinel(Box<Sentinels>),
    Cluster(Box<ClusterClient>),
}

struct Sentinels {
    addresses: Vec<ConnectionAddr>,
    settings: Settings,
    certificates: Option<TlsCertificates>,
    /// Each attempt starts with the next sentinel, so that a sentinel that hangs costs only one attempt.
    attempts: AtomicUsize,
}

impl fmt::Debug for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.mode {
            Mode::Standalone => "standalone",
            Mode::Sentinel => "sentinel",
            Mode::Cluster => "cluster",
        })
    }
}

/// A connection of the Redis library. Clones share it.
#[derive(Clone)]
pub(super) enum Wire {
    One(MultiplexedConnection),
    Cluster(ClusterConnection),
}

impl Wire {
    pub(super) async fn one(&mut self, command: &Cmd) -> RedisResult<Value> {
        let answer = match self {
            Self::One(connection) => connection.req_packed_command(command).await,
            Self::Cluster(connection) => {
                // Clones share the connection.
                let ask = || {
                    let mut connection = connection.clone();
                    async move { connection.req_packed_command(command).await }
                };
                redirected(ask).await
            }
        };
        // An error of the server arrives as a value.
        answer?.extract_error()
    }

    /// A command and an `ECHO` after it: the echo, then the reply, as scripts reply. `None` if that cannot be asked here:
    /// in a cluster, which may move one of the two, or of a user who has no `ECHO`.
    pub(super) async fn with_echo(&mut self, commands: &Pipeline) -> RedisResult<Option<Value>> {
        let Self::One(connection) = self else {
            return Ok(None);
        };
        let replies = connection.send_packed_commands(commands, 0, 2).await?;
        Ok(match <[Value; 2]>::try_from(replies) {
            Ok([_, Value::ServerError(_)]) | Err(_) => None,
            Ok([reply, echo @ Value::BulkString(_)]) => {
                Some(Value::Array(vec![echo, reply.extract_error()?]))
            }
            // It belongs to another request, whatever the first one is.
            Ok([reply, echo]) => Some(Value::Array(vec![echo, reply])),
        })
    }

    /// A command without a key, for the master of this slot.
    pub(super) async fn at_slot(&mut self, command: Cmd, slot: usize) -> RedisResult<Value> {
        let answer = match self {
            Self::One(connection) => connection.req_packed_command(&command).await,
            Self::Cluster(connection) => {
                let route = Route::new(slot as u16, SlotAddr::Master);
                let node = SingleNodeRoutingInfo::SpecificNode(route);
                let routing = RoutingInfo::SingleNode(node);
                let ask = || {
                    let (mut connection, command) = (connection.clone(), command.clone());
                    let routing = routing.clone();
                    async move { connection.route_command(command, routing).await }
                };
                redirected(ask).await
            }
        };
        answer?.extract_error()
    }

    pub(super) fn is_cluster(&self) -> bool {
        matches!(self, Self::Cluster(_))
    }
}

impl Kind {
    fn new(settings: &Settings) -> Result<Self, String> {
        let addresses = addresses(settings)?;
        let is_tls = matches!(addresses.first(), Some(ConnectionAddr::TcpTls { .. }));
        let certificates = if is_tls {
            Some(certificates(settings)?)
        } else {
            None
        };
        let wrong = |error: redis::RedisError| error.to_string();
        Ok(match settings.mode {
            Mode::Standalone => {
                let address = addresses.into_iter().next().ok_or("has no address")?;
                let info = info(address, settings).map_err(wrong)?;
                let client = match certificates {
                    Some(certificates) => Client::build_with_tls(info, certificates),
                    None => Client::open(info),
                };
                Self::Standalone(Box::new(client.map_err(wrong)?))
            }
            Mode::Sentinel => Self::Sentinel(Box::new(Sentinels {
                addresses,
                settings: settings.clone(),
                certificates,
                attempts: AtomicUsize::new(0),
            })),
            Mode::Cluster => {
                let nodes: Result<Vec<_>, _> = addresses
                    .into_iter()
                    .map(|address| info(address, settings))
                    .collect();
                let timeout = settings.advanced.connect_timeout;
                let mut builder = ClusterClientBuilder::new(nodes.map_err(wrong)?)
                    .connection_timeout(timeout / NODE_TIMEOUT_DIVISOR)
                    .tcp_settings(tcp())
                    .response_timeout(settings.advanced.write_timeout)
                    .retries(CLUSTER_RETRIES)
                    .min_retry_wait(CLUSTER_RETRY_MS)
                    .max_retry_wait(CLUSTER_RETRY_MS);
                if let Some(certificates) = certificates {
                    builder = builder.certs(certificates);
                }
                Self::Cluster(Box::new(builder.build().map_err(wrong)?))
            }
        })
    }
}

/// How long passwords' files have to answer.
fn password_patience(advanced: &Advanced) -> Duration {
    let shorter = advanced.connect_timeout.min(advanced.read_timeout);
    shorter / PASSWORD_PATIENCE_DIVISOR
}

impl Target {
    /// Reads the certificates. Does not connect.
    pub(super) fn new(settings: &Settings) -> Result<Self, String> {
        let has_files = settings.has_password_files();
        let patience = password_patience(&settings.advanced);
        let passwords = has_files.then(|| PasswordFiles::new(patience));
        let passwords = passwords.transpose().map_err(|error| error.to_string())?;
        let current = Current {
            settings: settings.clone(),
            kind: Arc::new(Kind::new(settings)?),
            replaced: 0,
            check_at: observe::now(),
        };
        Ok(Self {
            mode: settings.mode,
            current: Arc::new(Mutex::new(current)),
            passwords,
            timeout: settings.advanced.connect_timeout,
        })
    }

    /// How long a connection may take, that to a cluster with those to its nodes.
    pub(super) fn connect_timeout(&self) -> Duration {
        match self.mode {
            Mode::Standalone | Mode::Sentinel => self.timeout,
            Mode::Cluster => self.timeout * CLUSTER_TIMEOUT_FACTOR,
        }
    }

    /// Whether it is time to look whether a password's file has another one. False if no password is in a file, or if
    /// that was asked lately.
    pub(super) fn is_password_due(&self, now: Instant) -> bool {
        let mut current = self.current.lock();
        let is_due = self.passwords.is_some() && now >= current.check_at;
        if is_due {
            current.check_at = now + PASSWORD_CHECK_INTERVAL;
        }
        is_due
    }

    /// Whether a password's file has another one than a connection was opened with, after so many replacements.
    pub(super) async fn has_new_password(&self, replaced: u64) -> bool {
        self.read_passwords().await;
        self.current.lock().replaced != replaced
    }

    /// Takes the passwords up that their files have now, if these can be read.
    async fn read_passwords(&self) {
        if let Some(files) = &self.passwords {
            let current = self.current.clone();
            files.look(move || Current::read_again(&current)).await;
        }
    }

    /// With the passwords that their files have now: a connection is opened seldom, and passwords are rotated.
    async fn current(&self) -> (Arc<Kind>, u64) {
        self.read_passwords().await;
        let current = self.current.lock();
        (current.kind.clone(), current.replaced)
    }

    /// Connects. The caller sets the deadline. Tasks of the connection run on the runtime that polls this. Returns also
    /// how often a password had been replaced.
    pub(super) async fn connect(&self) -> RedisResult<(Wire, u64)> {
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(self.timeout))
            // Commands that arrive together are sent in one write.
            .set_write_backpressure_boundary(WRITE_BYTES)
            // Each operation has a deadline of its own.
            .set_response_timeout(None);
        let (kind, replaced) = self.current().await;
        let wire = match &*kind {
            Kind::Standalone(client) => {
                let connection = client.get_multiplexed_async_connection_with_config(&config);
                Wire::One(connection.await?)
            }
            Kind::Sentinel(sentinels) => {
                let client = sentinels.master().await?;
                let connection = client.get_multiplexed_async_connection_with_config(&config);
                Wire::One(connection.await?)
            }
            Kind::Cluster(client) => Wire::Cluster(client.get_async_connection().await?),
        };
        Ok((wire, replaced))
    }
}

impl Sentinels {
    async fn master(&self) -> RedisResult<Client> {
        let mut addresses = self.addresses.clone();
        let begin = self.attempts.fetch_add(1, Relaxed) % addresses.len().max(1);
        addresses.rotate_left(begin);
        let settings = &self.settings;
        let mut builder =
            SentinelClientBuilder::new(addresses, &settings.master, SentinelServerType::Master)?;
        builder = builder
            .set_client_to_redis_db(settings.database.into())
            .set_client_to_redis_tcp_settings(tcp())
            .set_client_to_sentinel_tcp_settings(tcp());
        if !settings.password.is_empty() {
            builder = builder.set_client_to_redis_password(settings.password.expose());
        }
        if !settings.username.is_empty() {
            builder = builder.set_client_to_redis_username(&settings.username);
        }
        if !settings.sentinel_password.is_empty() {
            builder = builder.set_client_to_sentinel_password(settings.sentinel_password.expose());
        }
        if !settings.sentinel_username.is_empty() {
            builder = builder.set_client_to_sentinel_username(&settings.sentinel_username);
        }
        if let Some(certificates) = &self.certificates {
            builder = builder
                .set_client_to_redis_tls_mode(redis::TlsMode::Secure)
                .set_client_to_redis_certificates(certificates.clone())
                .set_client_to_sentinel_tls_mode(redis::TlsMode::Secure)
                .set_client_to_sentinel_certificates(certificates.clone());
        }
        builder.build()?.async_get_client().await
    }
}

fn tcp() -> TcpSettings {
    let probes = TcpKeepalive::new()
        .with_time(PROBE_AFTER)
        .with_interval(PROBE_EVERY)
        .with_retries(PROBES);
    TcpSettings::default()
        .set_keepalive(probes)
        .set_user_timeout(UNACKNOWLEDGED)
}

fn addresses(settings: &Settings) -> Result<Vec<ConnectionAddr>, String> {
    let parse = |url: &String| {
        let (is_tls, host, port) = address(url)?;
        Ok(if is_tls {
            ConnectionAddr::TcpTls {
                host,
                port,
                insecure: false,
                tls_params: None,
            }
        } else {
            ConnectionAddr::Tcp(host, port)
        })
    };
    settings.urls.iter().map(parse).collect()
}

fn info(address: ConnectionAddr, settings: &Settings) -> RedisResult<ConnectionInfo> {
    let mut redis = RedisConnectionInfo::default().set_db(settings.database.into());
    if !settings.password.is_empty() {
        redis = redis.set_password(settings.password.expose());
    }
    if !settings.username.is_empty() {
        redis = redis.set_username(&settings.username);
    }
    let info = address.into_connection_info()?;
    Ok(info.set_redis_settings(redis).set_tcp_settings(tcp()))
}

fn certificates(settings: &Settings) -> Result<TlsCertificates, String> {
    let read =
        |path: &str| fs::read(path).map_err(|error| format!("cannot read `{path}`: {error}"));
    let tls = &settings.tls;
    let root_cert = match tls.ca_file.as_str() {
        "" => None,
        path => Some(read(path)?),
    };
    let client_tls = match tls.certificate_file.as_str() {
        "" => None,
        path => Some(ClientTlsConfig {
            client_cert: read(path)?,
            client_key: read(&tls.key_file)?,
        }),
    };
    // The Redis library uses the process-wide TLS provider; keep the one that is installed already.
    let _ = rustls::crypto::ring::default_provider().install_default();
    Ok(TlsCertificates {
        client_tls,
        root_cert,
    })
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use redis::RedisError;

    use super::*;

    /// How often a cluster is asked that answers with these errors, and then does it; and whether it is done.
    async fn asked(errors: &[ServerErrorKind]) -> (usize, bool) {
        let count = Cell::new(0);
        let ask = || {
            let error = errors.get(count.get()).copied();
            count.set(count.get() + 1);
            async move {
                match error {
                    Some(kind) => Err(RedisError::from((ErrorKind::Server(kind), "refused"))),
                    None => Ok(Value::Okay),
                }
            }
        };
        let is_done = redirected(ask).await.is_ok();
        (count.get(), is_done)
    }

    #[test]
    fn passwords_files_leave_time_to_a_connection_and_to_a_read_that_waits_for_it() {
        for (connect, read) in [(1_000, 250), (250, 1_000), (1_000, 1)] {
            let advanced = Advanced {
                connect_timeout: Duration::from_millis(connect),
                read_timeout: Duration::from_millis(read),
                ..Advanced::default()
            };
            let patience = password_patience(&advanced);
            assert!(patience < advanced.connect_timeout, "{connect} {read}");
            assert!(patience < advanced.read_timeout, "{connect} {read}");
        }
    }

    #[tokio::test]
    async fn an_operation_that_was_only_redirected_is_asked_for_again_and_no_other() {
        use ServerErrorKind::{Moved, ReadOnly};

        assert_eq!(asked(&[]).await, (1, true));
        assert_eq!(asked(&[Moved, Moved]).await, (3, true));
        assert_eq!(asked(&[Moved, Moved, Moved]).await, (3, false));
        assert_eq!(asked(&[ReadOnly]).await, (1, false));
        assert_eq!(asked(&[Moved, ReadOnly]).await, (2, false));
    }
}
