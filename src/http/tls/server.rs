//! TLS of one listener: what its connections are served with, which can be replaced, and their handshakes.

use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::SystemTime;

use arc_swap::ArcSwap;
use bytes::Bytes;
use parking_lot::Mutex;
use prometheus::IntGauge;
use rustls::pki_types::ServerName;
use rustls::{CertificateError, ClientConfig, Error, ServerConfig};
use tokio::net::TcpStream;
use tokio_rustls::{TlsAcceptor, TlsConnector, server};
use tracing::{info, warn};

use super::contents::{Contents, Problem, Seen, one_line};
use super::handshakes::Handshakes;
use super::metrics::Metrics;
use super::names::ClientNames;
use super::peer_config;
use super::server_config::Built;
use super::settings::ServerSettings;
use super::socket::{Early, Socket};
use crate::http::file_thread::LookError;
use crate::observe;
use crate::observe::metrics::{Counted, words};

words! {
    /// What a listener is for.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Listener {
        Api = "api",
        Admin = "admin",
        /// Of other replicas, which speak HTTP/2 only and present their certificates both ways.
        Peers = "peers",
        /// Of gateways that ask for a worker, over HTTP/2 only.
        EndpointPicker = "endpoint_picker",
        /// Of a `warmroute bridge`.
        Bridge = "bridge",
    }
}

impl Listener {
    fn alpn(self) -> &'static [&'static [u8]] {
        match self {
            Self::Api | Self::Admin | Self::Bridge => &[b"h2", b"http/1.1"],
            Self::Peers | Self::EndpointPicker => &[b"h2"],
        }
    }
}

#[derive(Debug)]
pub struct Server {
    listener: Listener,
    current: ArcSwap<Current>,
    /// Also keeps apart what a look and a reload replace. Not locked while files are read, which may hang.
    seen: Mutex<Seen>,
    /// Whether the last look at the files that are in use hangs.
    hangs: AtomicBool,
    handshakes: Handshakes,
    max_connections: usize,
    running: IntGauge,
    metrics: Metrics,
}

#[derive(Debug)]
pub(super) struct Current {
    settings: ServerSettings,
    config: Arc<ServerConfig>,
    /// For connections to other replicas.
    connector: Option<Arc<ClientConfig>>,
}

impl Server {
    /// Reads the files. `max_connections` is that of the listener.
    pub fn new(
        listener: Listener,
        settings: &ServerSettings,
        max_connections: u32,
        metrics: &Metrics,
    ) -> io::Result<Arc<Self>> {
        let (seen, contents) = Seen::first(&settings.files());
        let current = Current::build(listener, settings, &contents, observe::wall_clock())
            .map_err(|found| {
                let name = listener.as_str();
                io::Error::other(format!("{name}.tls: {}", one_line(&found)))
            })?;
        let (current, not_after) = current;
        metrics.in_use(listener.as_str(), settings.file(), not_after);
        metrics.is_current(listener.as_str(), settings.file(), true);
        Ok(Arc::new(Self {
            listener,
            current: ArcSwap::from_pointee(current),
            seen: Mutex::new(seen),
            hangs: AtomicBool::new(false),
            handshakes: Handshakes::default(),
            max_connections: max_connections as usize,
            running: metrics.running(listener.as_str()),
            metrics: metrics.clone(),
        }))
    }

    /// Uses other settings for connections from now on. If they cannot be used, nothing changes, and the keys that are
    /// wrong are returned with a message each.
    pub fn replace(&self, settings: &ServerSettings) -> Result<(), Vec<(String, String)>> {
        let (now_seen, contents) = Seen::first(&settings.files());
        let built = Current::build(self.listener, settings, &contents, observe::wall_clock())?;
        let mut seen = self.seen.lock();
        let before = self.current.load();
        if before.settings.file() != settings.file() {
            self.metrics.forget(self.name(), before.settings.file());
        }
        *seen = now_seen;
        self.hangs.store(false, Ordering::Relaxed);
        self.swap(built);
        Ok(())
    }

    /// What new connections are served with.
    pub(super) fn current(&self) -> Arc<Current> {
        self.current.load_full()
    }

    /// Looks at the files, and uses what they contain if that has changed or could not be used before.
    pub(super) fn look(&self, now: SystemTime) {
        let (mut seen, before) = {
            let seen = self.seen.lock();
            (seen.clone(), self.current.load_full())
        };
        let settings = &before.settings;
        // Without the lock: files that hang must not keep a reload waiting that names others.
        let built = seen.rebuild(&settings.files(), |contents| {
            let built = Current::build(self.listener, settings, contents, now);
            built.map_err(|found| one_line(&found))
        });
        let mut last = self.seen.lock();
        if !Arc::ptr_eq(&before, &self.current.load_full()) {
            // A reload has replaced them meanwhile.
            return;
        }
        let is_usable = seen.is_usable();
        *last = seen;
        let file = settings.file();
        if self.hangs.swap(false, Ordering::Relaxed) {
            self.metrics.is_current(self.name(), file, is_usable);
            info!(
                listener = self.name(),
                file, "TLS files can be looked at again"
            );
        }
        let Some(built) = built else {
            return;
        };
        self.metrics.reloaded(self.name(), file, built.is_ok());
        match built {
            Ok(built) => {
                let expires = humantime::format_rfc3339_seconds(built.1);
                info!(listener = self.name(), file, %expires, "TLS files have changed; new connections use them");
                self.swap(built);
            }
            Err(reason) => warn!(
                listener = self.name(),
                reason, "TLS files have changed and cannot be used; keeping the ones before"
            ),
        }
    }

    /// The files of what was in use then hang.
    pub(super) fn on_hang(&self, current: &Arc<Current>, error: LookError) {
        let _last = self.seen.lock();
        let is_in_use = Arc::ptr_eq(current, &self.current.load_full());
        if is_in_use && !self.hangs.swap(true, Ordering::Relaxed) {
            let file = current.settings.file();
            self.metrics.reloaded(self.name(), file, false);
            warn!(
                listener = self.name(),
                file, %error, "TLS files cannot be looked at; keeping the ones before"
            );
        }
    }

    fn swap(&self, (current, not_after): (Current, SystemTime)) {
        let file = current.settings.file();
        self.metrics.in_use(self.name(), file, not_after);
        self.metrics.is_current(self.name(), file, true);
        self.current.store(Arc::new(current));
    }

    fn name(&self) -> &'static str {
        self.listener.as_str()
    }

    /// Shakes hands on a connection of which `early` was read. Returns also the names of the client's certificate, if it
    /// has one.
    pub async fn accept(
        &self,
        stream: TcpStream,
        early: Bytes,
    ) -> io::Result<(Socket, Option<ClientNames>)> {
        let current = self.current.load_full();
        let in_progress = Counted::new(&self.running);
        let limit = current.settings.advanced.handshake_timeout;
        let handshake = self.shake_hands(&current, stream, early);
        let ended = tokio::time::timeout(limit, handshake).await;
        drop(in_progress);
        let ended = ended.unwrap_or_else(|_| Err(("timeout", io::ErrorKind::TimedOut.into())));
        let outcome = ended
            .as_ref()
            .map_or_else(|(outcome, _)| *outcome, |_| "ok");
        self.metrics.handshake_ended(self.name(), outcome);
        let stream = ended.map_err(|(_, error)| error)?;
        let names = stream.get_ref().1.peer_certificates();
        let names = names.and_then(|chain| chain.first()).map(ClientNames::of);
        Ok((Socket::Accepted(Box::new(stream)), names))
    }

    /// An error comes with the outcome, as metrics name it.
    async fn shake_hands(
        &self,
        current: &Current,
        stream: TcpStream,
        early: Bytes,
    ) -> Result<server::TlsStream<Early>, (&'static str, io::Error)> {
        let advanced = &current.settings.advanced;
        // Handshakes that stall must leave connections for others.
        let max = advanced.max_concurrent_handshakes as usize;
        let max = max.min(self.max_connections / 2);
        let patience = advanced.handshake_timeout / 10;
        let mut handshake = self.handshakes.start(max, patience).await;
        let stream = Early {
            stream,
            bytes: early,
        };
        let shaking = TlsAcceptor::from(current.config.clone()).accept(stream);
        tokio::select! {
            shaken = shaking => shaken.map_err(|error| (outcome_of(&error), error)),
            // It took long while others waited.
            () = handshake.must_end() => Err(("limit", io::ErrorKind::TimedOut.into())),
        }
    }

    /// Connects to another replica, which must have a certificate of the same CA and one of the names allowed.
    pub async fn connect(&self, stream: TcpStream, to: IpAddr) -> io::Result<Socket> {
        let connector = self.current.load().connector.clone();
        let connector = connector
            .ok_or_else(|| io::Error::other("this listener's certificate is for clients only"))?;
        let name = ServerName::IpAddress(to.into());
        let stream = TlsConnector::from(connector).connect(name, stream).await?;
        Ok(Socket::Opened(Box::new(stream)))
    }
}

impl Current {
    fn build(
        listener: Listener,
        settings: &ServerSettings,
        contents: &Contents,
        now: SystemTime,
    ) -> Result<(Self, SystemTime), Vec<Problem>> {
        let Built {
            config,
            pair,
            roots,
        } = settings.build(contents, listener.alpn(), now)?;
        let connector = match (listener, roots) {
            (Listener::Peers, Some(roots)) => {
                let config = peer_config::build(&pair, roots, &settings.client_names);
                Some(config.map_err(|error| vec![("certificate".to_owned(), error)])?)
            }
            _ => None,
        };
        let current = Self {
            settings: settings.clone(),
            config,
            connector,
        };
        Ok((current, pair.not_after))
    }
}

/// As metrics name it.
fn outcome_of(error: &io::Error) -> &'static str {
    let source = error.get_ref();
    let Some(error) = source.and_then(|source| source.downcast_ref::<Error>()) else {
        return match error.kind() {
            io::ErrorKind::UnexpectedEof
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::ConnectionAborted
            | io::ErrorKind::BrokenPipe => "closed",
            _ => "other",
        };
    };
    match error {
        Error::InvalidCertificate(CertificateError::ApplicationVerificationFailure) => {
            "client_name"
        }
        Error::InvalidCertificate(_) | Error::NoCertificatesPresented => "client_certificate",
        Error::PeerIncompatible(_) => "protocol",
        Error::AlertReceived(_) => "alert",
        Error::InvalidMessage(_) => "not_tls",
        _ => "other",
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::time::{Duration, UNIX_EPOCH};

    use rcgen::{CertificateParams, KeyPair};

    use super::*;
    use crate::observe::metrics::Registry;

    #[test]
    fn a_certificate_that_is_not_valid_yet_is_served_once_it_is() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
        let key = KeyPair::generate().unwrap();
        let write_certificate = |from: i32| {
            let mut params = CertificateParams::new(["localhost".to_owned()]).unwrap();
            params.not_before = rcgen::date_time_ymd(from, 1, 1);
            params.not_after = rcgen::date_time_ymd(2300, 1, 1);
            let certificate = params.self_signed(&key).unwrap();
            // Another file, so that it differs from the one before even within a tick of the clock.
            fs::write(at("new.crt"), certificate.pem()).unwrap();
            fs::rename(at("new.crt"), at("tls.crt")).unwrap();
        };
        fs::write(at("tls.key"), key.serialize_pem()).unwrap();
        write_certificate(2020);
        let settings = ServerSettings {
            certificate: at("tls.crt"),
            key: at("tls.key"),
            ..ServerSettings::default()
        };
        let registry = Registry::default();
        let metrics = Metrics::new(&registry);
        let server = Server::new(Listener::Admin, &settings, 8, &metrics).unwrap();
        let served = || server.current.load().config.clone();
        let counted = |outcome: &str, times: u32| {
            let name = "warmroute_tls_certificate_reloads_total";
            let line = format!("{name}{{outcome=\"{outcome}\",use=\"admin\"}} {times}\n");
            registry.text().contains(&line)
        };
        let first = served();
        write_certificate(2100);
        let in_2100 = UNIX_EPOCH + Duration::from_secs(4_102_444_800);
        for seconds in [4, 2] {
            server.look(in_2100 - Duration::from_secs(seconds));
            assert!(Arc::ptr_eq(&served(), &first) && counted("failed", 1));
        }
        server.look(in_2100);
        let second = served();
        assert!(!Arc::ptr_eq(&second, &first) && counted("ok", 1));
        server.look(in_2100 + Duration::from_secs(2));
        assert!(Arc::ptr_eq(&served(), &second));
    }
}
