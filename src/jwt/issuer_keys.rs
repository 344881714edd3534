//! The keys of one issuer: reads them again and again in the background, and at once when a token needs it. What was
//! read last stays in use while they cannot be read.

use std::io;
use std::sync::{Arc, Weak};
use std::time::Duration;

use arc_swap::ArcSwapOption;
use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::{Notify, watch};
use tracing::{info, warn};

use super::key_set::{KeySet, MAX_BYTES, read_file};
use super::location::Location;
use super::metrics::Metrics;
use super::pacing::{Pacing, Wanted};
use super::settings::Advanced;
use crate::http::client::{self, Pool};
use crate::http::file_thread::FileThread;
use crate::http::supervisor::Supervisor;
use crate::http::tls;
use crate::observe;

/// Between two looks at a file.
const FILE_INTERVAL: Duration = Duration::from_secs(2);

/// After the first of several failures; doubled with each until it is the regular interval.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// What one issuer's keys are read with. Keys with the same are read once; a change of any of it reads them anew.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Spec {
    pub(super) issuer: String,
    pub(super) location: Location,
    pub(super) advanced: Advanced,
}

/// The keys of one issuer. The task that reads them ends when the last of its users is gone.
#[derive(Debug)]
pub(super) struct IssuerKeys {
    pub(super) spec: Spec,
    pub(super) current: ArcSwapOption<KeySet>,
    pacing: Mutex<Pacing>,
    /// A token needs a look.
    wanted: Arc<Notify>,
    /// Looks that have ended.
    ended: watch::Sender<u64>,
    metrics: Metrics,
}

impl IssuerKeys {
    pub(super) fn new(spec: Spec, metrics: Metrics) -> Arc<Self> {
        metrics.keys.with_label_values(&[&spec.issuer]).set(0);
        Arc::new(Self {
            current: ArcSwapOption::empty(),
            pacing: Mutex::new(Pacing::new(spec.advanced.unknown_key_interval)),
            wanted: Arc::default(),
            ended: watch::channel(0).0,
            spec,
            metrics,
        })
    }

    /// The generation of the keys in use; 0 if there are none.
    pub(super) fn generation(&self) -> u64 {
        self.current
            .load()
            .as_ref()
            .map_or(0, |keys| keys.generation)
    }

    /// For a token whose key is not known: waits for a look at the keys, unless the last one was just before. Whether
    /// there was one.
    pub(super) async fn looked_again(&self) -> bool {
        let mut ended = self.ended.subscribe();
        match self.pacing.lock().on_unknown_key(observe::now()) {
            Wanted::TooSoon => return false,
            Wanted::Start => self.wanted.notify_one(),
            Wanted::Wait => {}
        }
        let limit = self.spec.advanced.timeout;
        matches!(
            tokio::time::timeout(limit, ended.changed()).await,
            Ok(Ok(()))
        )
    }

    /// Whether a key that is not known does not exist.
    pub(super) fn are_current(&self) -> bool {
        self.pacing.lock().is_current()
    }

    /// Reads the keys for as long as anything uses them.
    pub(super) async fn read_for_ever(
        keys: Weak<Self>,
        mut source: Source,
        supervisor: Supervisor,
    ) {
        let mut last = None;
        let mut failures = 0;
        loop {
            let Some(this) = keys.upgrade() else { return };
            this.pacing.lock().on_started();
            let look = this.look(&mut source, &mut last);
            let result = supervisor.attempt("jwks", look).await;
            failures = match result.unwrap_or_else(|| Err("the look panicked".to_owned())) {
                Ok(()) => 0,
                Err(error) => {
                    this.on_failure(&error, failures);
                    failures + 1
                }
            };
            this.pacing.lock().on_ended(observe::now(), failures == 0);
            this.ended.send_modify(|count| *count += 1);
            let pause = this.pause(failures);
            let wanted = this.wanted.clone();
            drop(this);
            let _ = tokio::time::timeout(pause, wanted.notified()).await;
        }
    }

    fn pause(&self, failures: u32) -> Duration {
        let regular = match self.spec.location {
            Location::File(_) => FILE_INTERVAL,
            Location::Url { .. } => self.spec.advanced.refresh_interval,
        };
        match failures {
            0 => regular,
            failures => RETRY_INTERVAL
                .saturating_mul(2_u32.saturating_pow(failures - 1))
                .min(regular),
        }
    }

    async fn look(&self, source: &mut Source, last: &mut Option<Bytes>) -> Result<(), String> {
        let issuer = &*self.spec.issuer;
        let text = source.read().await?;
        let count = |result| {
            self.metrics
                .reads
                .with_label_values(&[issuer, result])
                .inc()
        };
        if last.as_ref() == Some(&text) {
            count("unchanged");
            return Ok(());
        }
        // Keys are also withdrawn with a list; an empty or broken one is a mistake.
        let keys = KeySet::parse(&text)?;
        let number = keys.len();
        count("changed");
        self.metrics
            .keys
            .with_label_values(&[issuer])
            .set(number as i64);
        info!(
            issuer,
            keys = number,
            "public keys of an issuer of tokens are in use"
        );
        self.current.store(Some(Arc::new(keys)));
        *last = Some(text);
        Ok(())
    }

    fn on_failure(&self, error: &str, failures: u32) {
        let issuer = &*self.spec.issuer;
        self.metrics
            .reads
            .with_label_values(&[issuer, "failed"])
            .inc();
        if failures > 0 {
            return;
        }
        match self.generation() {
            0 => warn!(
                issuer,
                error,
                "public keys of an issuer of tokens cannot be read; its tokens are refused with 503 until they can"
            ),
            _ => warn!(
                issuer,
                error,
                "public keys of an issuer of tokens cannot be read; the last ones stay in use"
            ),
        }
    }
}

/// Where the text of an issuer's keys is read.
#[derive(Debug)]
pub(super) enum Source {
    File {
        path: String,
        /// This issuer's own: a file system that hangs must stop neither the caller nor other issuers.
        thread: FileThread<Result<Vec<u8>, String>>,
    },
    Url {
        authority: String,
        path: String,
        tls: Option<Arc<tls::Client>>,
        timeout: Duration,
    },
}

impl Source {
    pub(super) fn new(spec: &Spec, clients: &tls::Clients) -> io::Result<Self> {
        Ok(match &spec.location {
            Location::File(path) => Self::File {
                path: path.clone(),
                thread: FileThread::start("jwks-file")?,
            },
            Location::Url {
                authority,
                path,
                tls,
            } => Self::Url {
                authority: authority.clone(),
                path: path.clone(),
                tls: tls.as_ref().map(|settings| clients.get(settings)),
                timeout: spec.advanced.timeout,
            },
        })
    }

    /// The text that is there now.
    pub(super) async fn read(&mut self) -> Result<Bytes, String> {
        match self {
            Self::File { path, thread } => {
                let named = path.clone();
                let read = thread.look(move || read_file(&named)).await;
                let read = read.map_err(|error| format!("cannot read `{path}`: {error}"))?;
                read.map(Bytes::from)
            }
            Self::Url {
                authority,
                path,
                tls,
                timeout,
            } => {
                let settings = client::Settings::default();
                let pool = Pool::with_tls(authority.clone(), settings, tls.clone());
                fetch(&pool, path, *timeout).await
            }
        }
    }
}

/// What a server answers now.
async fn fetch(pool: &Arc<Pool>, path: &str, limit: Duration) -> Result<Bytes, String> {
    let answer = pool.get(path, None, MAX_BYTES);
    let answer = tokio::time::timeout(limit, answer).await;
    let answer = answer.map_err(|_| format!("no answer within {limit:?}"))?;
    let (status, body) = answer.map_err(|error| error.to_string())?;
    match status.as_u16() {
        200 => Ok(body),
        300..400 => Err(format!(
            "the server answered {status}; redirects are not followed: write the final URL in `jwks`"
        )),
        _ => Err(format!("the server answered {status}")),
    }
}

impl Drop for IssuerKeys {
    fn drop(&mut self) {
        self.wanted.notify_one();
    }
}
