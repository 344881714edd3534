//! TLS of connections to workers. Workers with the same settings share what was made of them.

use std::collections::BTreeMap;
use std::error::Error as StdError;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::SystemTime;

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use rustls::{AlertDescription, CertificateError, Error};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tracing::{info, warn};

use super::client_config::{Built, server_name};
use super::contents::{Contents, Seen, one_line};
use super::metrics::Metrics;
use super::settings::ClientSettings;
use super::socket::Socket;
use crate::http::file_thread::LookError;
use crate::observe;

/// As metrics name it.
const USE: &str = "workers";

#[derive(Debug, Default)]
pub struct Clients {
    known: Mutex<BTreeMap<ClientSettings, Known>>,
    /// See [`Clients::keep`].
    kept: Mutex<Vec<Arc<Client>>>,
    metrics: OnceLock<Metrics>,
}

/// What is known of some settings. Who uses them holds the client. The files are held by who looks at them, too, which
/// may hang for ever.
#[derive(Debug)]
struct Known {
    client: Weak<Client>,
    files: Weak<Files>,
}

/// TLS of the connections to some workers.
#[derive(Debug)]
pub struct Client {
    files: Arc<Files>,
}

/// The files of some settings, and what was made of them.
#[derive(Debug)]
pub(super) struct Files {
    settings: ClientSettings,
    /// What is wrong with the files, if they cannot be used. They are looked at again.
    current: ArcSwap<Result<Built, String>>,
    /// Locked while the files are looked at, which nobody else does.
    seen: Mutex<Seen>,
    /// Whether the last look at the files hangs.
    hangs: AtomicBool,
    /// Whether nobody uses the settings any more. Locked while their metrics are set: they have no series then.
    is_forgotten: Mutex<bool>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    Http1,
    Http2,
}

impl Clients {
    /// From now on what happens is counted.
    pub fn set_metrics(&self, metrics: Metrics) {
        let _ = self.metrics.set(metrics);
    }

    pub(super) fn metrics(&self) -> Option<&Metrics> {
        self.metrics.get()
    }

    /// TLS with these settings. Reads their files if nobody uses these settings yet.
    pub fn get(&self, settings: &ClientSettings) -> Arc<Client> {
        if let Some(client) = self.known.lock().get(settings).and_then(Known::client) {
            return client;
        }
        // Without the lock: files that hang must not stop those who need others.
        let client = Arc::new(Client::new(settings, observe::wall_clock()));
        let mut known = self.known.lock();
        let first = known.get(settings).and_then(Known::client);
        first.unwrap_or_else(|| {
            if let Some(before) = known.insert(settings.clone(), Known::of(&client)) {
                self.forget(settings, &before);
            }
            client
        })
    }

    /// Keeps these until others are kept. Who needs them then reads no files, which may hang: not even for the first
    /// worker that a name has after a time without any.
    pub fn keep(&self, clients: Vec<Arc<Client>>) {
        *self.kept.lock() = clients;
    }

    /// The files of the settings that are in use. Forgets others.
    pub(super) fn used(&self) -> Vec<Arc<Files>> {
        let mut used = Vec::new();
        self.known.lock().retain(|settings, known| {
            let client = known.client();
            if client.is_none() {
                self.forget(settings, known);
            }
            let is_used = client.is_some();
            used.extend(client.map(|client| client.files.clone()));
            is_used
        });
        used
    }

    /// Nobody uses these settings any more. What a look that still hangs finds counts for nothing.
    fn forget(&self, settings: &ClientSettings, known: &Known) {
        // First: otherwise that look could bring the series back.
        if let Some(files) = known.files.upgrade() {
            *files.is_forgotten.lock() = true;
        }
        if let Some(metrics) = self.metrics.get() {
            metrics.forget(USE, settings.file());
        }
    }
}

impl Known {
    fn of(client: &Arc<Client>) -> Self {
        Self {
            client: Arc::downgrade(client),
            files: Arc::downgrade(&client.files),
        }
    }

    fn client(&self) -> Option<Arc<Client>> {
        self.client.upgrade()
    }
}

impl Files {
    fn read(settings: &ClientSettings, now: SystemTime) -> Self {
        let (mut seen, contents) = Seen::first(&settings.files());
        let current = build(settings, &contents, now);
        if let Err(reason) = &current {
            seen.failed(reason);
            warn!(
                reason,
                "TLS files of workers cannot be used; no connection to these workers is made"
            );
        }
        Self {
            settings: settings.clone(),
            current: ArcSwap::from_pointee(current),
            seen: Mutex::new(seen),
            hangs: AtomicBool::new(false),
            is_forgotten: Mutex::new(false),
        }
    }

    /// Looks at the files, and uses what they contain if that has changed or could not be used before. One look after
    /// the other.
    pub(super) fn look(&self, now: SystemTime, metrics: Option<&Metrics>) {
        let file = self.settings.file();
        let build = |contents: &Contents| build(&self.settings, contents, now);
        let (built, is_usable) = {
            let mut seen = self.seen.lock();
            let built = seen.rebuild(&self.settings.files(), build);
            (built, seen.is_usable())
        };
        let is_forgotten = self.is_forgotten.lock();
        if *is_forgotten {
            return;
        }
        if self.hangs.swap(false, Ordering::Relaxed) {
            if let Some(metrics) = metrics {
                metrics.is_current(USE, file, is_usable);
            }
            info!(file, "TLS files of workers can be looked at again");
        }
        if let Some(built) = built {
            if let Some(metrics) = metrics {
                metrics.reloaded(USE, file, built.is_ok());
            }
            match built {
                Ok(built) => {
                    info!(
                        file,
                        "TLS files of workers have changed; new connections use them"
                    );
                    self.current.store(Arc::new(Ok(built)));
                }
                Err(reason) => {
                    warn!(
                        reason,
                        "TLS files of workers have changed and cannot be used; keeping the ones before"
                    );
                    // Without ones before, connections fail with what is wrong now.
                    if self.current.load().is_err() {
                        self.current.store(Arc::new(Err(reason)));
                    }
                }
            }
        }
        let current = self.current.load();
        if let (Some(metrics), Ok(built)) = (metrics, &**current)
            && let Some(not_after) = built.not_after
        {
            metrics.in_use(USE, file, not_after);
        }
    }

    pub(super) fn on_hang(&self, metrics: Option<&Metrics>, error: LookError) {
        let is_forgotten = self.is_forgotten.lock();
        if *is_forgotten || self.hangs.swap(true, Ordering::Relaxed) {
            return;
        }
        let file = self.settings.file();
        if let Some(metrics) = metrics {
            metrics.reloaded(USE, file, false);
        }
        warn!(file, %error, "TLS files of workers cannot be looked at; keeping the ones before");
    }
}

impl Client {
    fn new(settings: &ClientSettings, now: SystemTime) -> Self {
        Self {
            files: Arc::new(Files::read(settings, now)),
        }
    }

    /// Shakes hands with the worker at `host`, a name or an address.
    pub async fn connect(
        &self,
        host: &str,
        stream: TcpStream,
        protocol: Protocol,
    ) -> io::Result<Socket> {
        let current = self.files.current.load_full();
        let built = match &*current {
            Ok(built) => built,
            Err(reason) => return Err(io::Error::other(reason.clone())),
        };
        let config = match protocol {
            Protocol::Http1 => &built.http1,
            Protocol::Http2 => &built.http2,
        };
        let host = match self.files.settings.server_name.as_str() {
            "" => host,
            name => name,
        };
        let name = server_name(host).map_err(io::Error::other)?;
        let connector = TlsConnector::from(config.clone());
        let connected = connector.connect(name, stream).await;
        let stream = connected.map_err(|error| match explain(&error, host) {
            Some(reason) => io::Error::other(reason),
            None => error,
        })?;
        Ok(Socket::Opened(Box::new(stream)))
    }
}

impl ClientSettings {
    /// By which metrics and logs name the settings.
    fn file(&self) -> &str {
        match self.certificate.as_str() {
            "" => &self.ca,
            file => file,
        }
    }
}

fn build(settings: &ClientSettings, contents: &Contents, now: SystemTime) -> Result<Built, String> {
    let built = settings.build(contents, now);
    built.map_err(|found| format!("tls.{}", one_line(&found)))
}

/// Why a worker has refused this router's certificate, or that it needs one, if that is what an error says. With TLS 1.3
/// a worker says so only after the handshake, before it reads a request.
pub fn refused_certificate(error: &(dyn StdError + 'static)) -> Option<String> {
    let mut cause = Some(error);
    while let Some(error) = cause {
        let of_io = error.downcast_ref::<io::Error>();
        let tls = of_io.and_then(|error| error.get_ref()?.downcast_ref::<Error>());
        if let Some(Error::AlertReceived(alert)) = tls
            && is_about_certificate(*alert)
        {
            return Some(not_accepted(&format!("{alert:?}")));
        }
        cause = error.source();
    }
    None
}

fn is_about_certificate(alert: AlertDescription) -> bool {
    matches!(
        alert,
        AlertDescription::CertificateRequired
            | AlertDescription::BadCertificate
            | AlertDescription::UnsupportedCertificate
            | AlertDescription::CertificateRevoked
            | AlertDescription::CertificateExpired
            | AlertDescription::CertificateUnknown
            | AlertDescription::UnknownCA
            | AlertDescription::AccessDenied
    )
}

/// As [`refused_certificate`], of the text of an error of HTTP/2, which keeps no more of its cause.
pub fn refused_certificate_in(text: &str) -> Option<String> {
    let (_, alert) = text.split_once("received fatal alert: ")?;
    Some(not_accepted(alert))
}

fn not_accepted(alert: &str) -> String {
    format!(
        "TLS: the other side does not accept the certificate of `tls.certificate`, or needs one ({alert})"
    )
}

/// What a failed handshake with `name` means; `None` if that is not about TLS.
fn explain(error: &io::Error, name: &str) -> Option<String> {
    let error = error.get_ref()?.downcast_ref::<Error>()?;
    Some(match error {
        Error::InvalidCertificate(CertificateError::UnknownIssuer) => {
            format!("TLS: the certificate of {name} is not signed by a CA of `tls.ca`")
        }
        Error::InvalidCertificate(
            CertificateError::Expired | CertificateError::ExpiredContext { .. },
        ) => format!("TLS: the certificate of {name} has expired"),
        Error::InvalidCertificate(CertificateError::NotValidForNameContext {
            presented, ..
        }) => {
            let presented = presented.join(", ");
            format!(
                "TLS: the certificate is not valid for {name}; its names are: {presented} (set `tls.server_name`)"
            )
        }
        Error::InvalidCertificate(reason) => {
            format!("TLS: the certificate of {name} is not valid: {reason}")
        }
        Error::InvalidMessage(_) => format!("TLS: {name} does not speak TLS at this port"),
        Error::AlertReceived(alert) if is_about_certificate(*alert) => {
            not_accepted(&format!("{alert:?}"))
        }
        error => format!("TLS: {error}"),
    })
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::time::{Duration, UNIX_EPOCH};

    use rcgen::{CertificateParams, KeyPair};

    use super::*;
    use crate::observe::metrics::Registry;

    #[test]
    fn a_look_that_hangs_counts_for_nothing_once_the_files_were_read_again() {
        let registry = Registry::default();
        let clients = Clients::default();
        clients.set_metrics(Metrics::new(&registry));
        let settings = ClientSettings {
            ca: "/no/such/file".to_owned(),
            ..ClientSettings::default()
        };
        let before = clients.get(&settings).files.clone();
        let current = clients.get(&settings).files.clone();
        let hang = |files: &Files| files.on_hang(clients.metrics(), LookError::Ended);
        let is_named = || registry.text().contains("/no/such/file");
        hang(&before);
        assert!(!is_named());
        hang(&current);
        assert!(is_named());
    }

    #[test]
    fn what_is_kept_is_not_read_again() {
        let clients = Clients::default();
        let settings = ClientSettings {
            ca: "/no/such/file".to_owned(),
            ..ClientSettings::default()
        };
        let first = Arc::downgrade(&clients.get(&settings));
        assert!(first.upgrade().is_none());
        clients.keep(vec![clients.get(&settings)]);
        let kept = Arc::downgrade(&clients.get(&settings));
        assert!(kept.upgrade().is_some());
        clients.keep(Vec::new());
        assert!(kept.upgrade().is_none());
    }

    #[test]
    fn a_certificate_that_was_not_valid_at_first_is_used_once_it_is() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(["router".to_owned()]).unwrap();
        params.not_before = rcgen::date_time_ymd(2100, 1, 1);
        params.not_after = rcgen::date_time_ymd(2300, 1, 1);
        let certificate = params.self_signed(&key).unwrap();
        fs::write(at("tls.crt"), certificate.pem()).unwrap();
        fs::write(at("tls.key"), key.serialize_pem()).unwrap();
        let settings = ClientSettings {
            ca: at("tls.crt"),
            certificate: at("tls.crt"),
            key: at("tls.key"),
            ..ClientSettings::default()
        };
        let in_2100 = UNIX_EPOCH + Duration::from_secs(4_102_444_800);
        let early = in_2100 - Duration::from_secs(1);
        let files = Files::read(&settings, early);
        files.look(early, None);
        assert!(files.current.load().is_err());
        files.look(in_2100, None);
        assert!(files.current.load().is_ok());
    }
}
