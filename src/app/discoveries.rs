//! The discoveries that the configuration asks for, at the start and after each reload.

use std::collections::BTreeSet;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use prometheus::IntCounterVec;
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tracing::error;

use crate::config::{
    Config, DiscoveryEntry, DnsWorkers, ParsedWorkers, WorkersFile, parse_workers,
};
use crate::fleet::discovery::dns::Dns;
use crate::fleet::discovery::file::{File, ParsedList};
use crate::fleet::discovery::kubernetes;
use crate::fleet::discovery::{self, Discovery};
use crate::fleet::registry::Registry;
use crate::http::drain::Tasks;
use crate::http::io_threads::OffloadThread;
use crate::http::tls;
use crate::observe;

pub(super) fn dns(listed: &DnsWorkers) -> Dns {
    let workers = listed.defaults.clone();
    Dns::new(&listed.name, listed.port, workers)
}

/// `known`: where the TLS of its workers is made.
pub(super) fn file(
    listed: &WorkersFile,
    has_roles: bool,
    known: &Arc<tls::Clients>,
) -> io::Result<File> {
    let WorkersFile {
        path,
        interval,
        defaults,
    } = listed.clone();
    let (name, known) = (path.clone(), known.clone());
    let parse = move |text: &str| {
        let ParsedWorkers {
            members,
            mut secret_files,
        } = parse_workers(&name, text, &defaults, has_roles);
        let of_members = members.iter().flatten();
        let tls = of_members.filter_map(|member| member.tls.as_ref());
        ParsedList {
            tls: tls.map(|settings| known.get(settings)).collect(),
            members,
            have_files_changed: Box::new(move || secret_files.have_changed()),
        }
    };
    File::new(PathBuf::from(path), interval, Box::new(parse))
}

#[cfg(feature = "kubernetes")]
pub(super) fn kubernetes(
    entry: kubernetes::Settings,
    config: &Config,
    metrics: &kubernetes::Metrics,
) -> io::Result<kubernetes::Kubernetes> {
    let pairing = &config.prefill_decode;
    let has_connector = pairing.connector.is_some();
    let built = kubernetes::Kubernetes::new(entry, &pairing.topology, has_connector, metrics);
    built.map_err(io::Error::other)
}

/// How long a reload waits for new entries to list their workers, before it removes those that only old entries list. A
/// name that cannot be resolved must not hold up the rest of the file for longer.
const FIRST_LIST_TIMEOUT: Duration = Duration::from_secs(3);

/// Name of the list of the workers that the configuration itself has.
const STATIC: &str = "static";

/// The running discoveries. An entry that a new configuration has, too, runs on undisturbed.
#[derive(Debug)]
pub(super) struct FollowedDiscoveries {
    fleet: Arc<Registry>,
    tasks: Tasks,
    #[cfg_attr(
        not(feature = "kubernetes"),
        expect(
            dead_code,
            reason = "registered in every build, for the reference of metrics"
        )
    )]
    kubernetes: kubernetes::Metrics,
    failures: IntCounterVec,
    followed: Vec<Followed>,
}

#[derive(Debug)]
struct Followed {
    entry: DiscoveryEntry,
    /// The name of its list in the registry.
    name: String,
    /// The label of the topology, when it was started.
    topology: String,
    task: JoinHandle<()>,
}

impl Followed {
    /// Whether a configuration has the same entry. Those of Kubernetes set the label of the topology themselves.
    fn stays(&self, config: &Config) -> bool {
        let is_same = self.topology == config.prefill_decode.topology
            || !matches!(self.entry, DiscoveryEntry::Kubernetes(_));
        is_same && config.discovery.contains(&self.entry)
    }
}

impl FollowedDiscoveries {
    /// Follows all entries of a configuration. The workers that it lists itself are there at once, so that the first
    /// requests find them.
    pub(super) fn start(
        config: &Config,
        fleet: &Arc<Registry>,
        tasks: &Tasks,
        metrics: &observe::metrics::Registry,
    ) -> io::Result<Self> {
        let mut started = Self {
            fleet: fleet.clone(),
            tasks: tasks.clone(),
            kubernetes: kubernetes::Metrics::new(metrics),
            failures: metrics.counters(
                "warmroute_discovery_failures_total",
                "Times that an entry of `discovery` could not list its workers. Those that it listed before stay.",
                &["discovery"],
            ),
            followed: Vec::new(),
        };
        let members = config.members();
        if !members.is_empty() {
            fleet.set_members(STATIC, members);
        }
        for entry in &config.discovery {
            drop(started.follow(config, entry)?);
        }
        Ok(started)
    }

    /// Follows what a new configuration lists. New entries list their workers before others are removed, and what
    /// changes then changes at once, so that a worker which moves between entries stays.
    /// A thousand workers are put together on `thread`: the caller's accepts connections.
    pub(super) async fn replace(&mut self, config: &Arc<Config>, thread: &OffloadThread) {
        let (kept, ended): (Vec<_>, Vec<_>) = std::mem::take(&mut self.followed)
            .into_iter()
            .partition(|followed: &Followed| followed.stays(config));
        self.followed = kept;
        let mut ended_names = BTreeSet::new();
        for followed in ended {
            followed.task.abort();
            // It must not list anything after its list was removed.
            let _ = followed.task.await;
            ended_names.insert(followed.name);
        }
        let mut answers = Vec::new();
        for entry in &config.discovery {
            if !self
                .followed
                .iter()
                .any(|followed| followed.entry == *entry)
            {
                match self.follow(config, entry) {
                    Ok(answer) => answers.extend(answer),
                    // The check of the configuration has found nothing wrong with it.
                    Err(error) => {
                        error!(%error, ?entry, "discovery not started; its workers are not found")
                    }
                }
            }
        }
        let answered = async {
            for answer in answers {
                let _ = answer.await;
            }
        };
        let _ = tokio::time::timeout(FIRST_LIST_TIMEOUT, answered).await;
        for followed in &self.followed {
            ended_names.remove(&followed.name);
        }
        let (fleet, config) = (self.fleet.clone(), config.clone());
        let set_lists = move || {
            let removed = ended_names.into_iter().map(|name| (name, None));
            let listed = (STATIC.to_owned(), Some(config.members()));
            fleet.set_lists(removed.chain([listed]));
        };
        let _ = thread.run(set_lists).await;
    }

    /// What is returned resolves when the entry has listed its workers, or could not.
    fn follow(
        &mut self,
        config: &Config,
        entry: &DiscoveryEntry,
    ) -> io::Result<Option<oneshot::Receiver<()>>> {
        Ok(match entry {
            DiscoveryEntry::Static(_) => None,
            DiscoveryEntry::File(listed) => {
                let has_roles = config.prefill_decode.connector.is_some();
                let discovery = file(listed, has_roles, self.fleet.tls())?;
                Some(self.spawn(config, entry, discovery))
            }
            DiscoveryEntry::Dns(listed) => Some(self.spawn(config, entry, dns(listed))),
            #[cfg(feature = "kubernetes")]
            DiscoveryEntry::Kubernetes(listed) => {
                let discovery = kubernetes(listed.as_ref().clone(), config, &self.kubernetes)?;
                Some(self.spawn(config, entry, discovery))
            }
            // The check of the configuration refuses such entries before.
            #[cfg(not(feature = "kubernetes"))]
            DiscoveryEntry::Kubernetes(_) => {
                return Err(io::Error::other("built without the feature `kubernetes`"));
            }
        })
    }

    fn spawn(
        &mut self,
        config: &Config,
        entry: &DiscoveryEntry,
        discovery: impl Discovery,
    ) -> oneshot::Receiver<()> {
        let name = discovery.name().to_owned();
        let (answered, answer) = oneshot::channel();
        let following = discovery::follow(
            discovery,
            self.fleet.clone(),
            self.failures.clone(),
            answered,
            self.tasks.supervisor().clone(),
        );
        let task = Handle::current().spawn(self.tasks.track_until_stopped(following));
        self.followed.push(Followed {
            entry: entry.clone(),
            name,
            topology: config.prefill_decode.topology.clone(),
            task,
        });
        answer
    }
}
