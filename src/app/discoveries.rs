//! The discoveries that the configuration asks for.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use crate::config::{Config, DiscoveryEntry, WorkersFile, parse_workers};
use crate::fleet::Member;
use crate::fleet::discovery::dns::Dns;
use crate::fleet::discovery::file::File;
use crate::fleet::discovery::kubernetes;
use crate::fleet::discovery::static_list::StaticList;
use crate::fleet::discovery::{self, Discovery};
use crate::fleet::registry::Registry;
use crate::http::drain::Tasks;
use crate::observe;

/// The workers that the configuration lists itself, and the files and names that list others.
pub(super) struct Discoveries {
    pub(super) members: Vec<Member>,
    pub(super) files: Vec<File>,
    pub(super) names: Vec<Dns>,
    pub(super) kubernetes: Vec<kubernetes::Settings>,
}

impl Discoveries {
    pub(super) fn of(config: &Config) -> Self {
        let mut discoveries = Self {
            members: config.members(),
            files: Vec::new(),
            names: Vec::new(),
            kubernetes: Vec::new(),
        };
        let has_roles = config.prefill_decode.connector.is_some();
        for entry in &config.discovery {
            match entry {
                DiscoveryEntry::Static(_) => {}
                DiscoveryEntry::File(listed) => discoveries.files.push(file(listed, has_roles)),
                DiscoveryEntry::Dns(dns) => {
                    let workers = dns.defaults.clone();
                    let dns = Dns::new(&dns.name, dns.port, dns.interval, workers);
                    discoveries.names.push(dns);
                }
                DiscoveryEntry::Kubernetes(entry) => {
                    discoveries.kubernetes.push(entry.as_ref().clone());
                }
            }
        }
        discoveries
    }
}

fn file(listed: &WorkersFile, has_roles: bool) -> File {
    let WorkersFile {
        path,
        interval,
        defaults,
    } = listed.clone();
    let name = path.clone();
    let parse = move |text: &str| parse_workers(&name, text, &defaults, has_roles);
    File::new(PathBuf::from(path), interval, Box::new(parse))
}

/// Follows all of them.
pub(super) fn find_workers(
    config: &Config,
    fleet: &Arc<Registry>,
    tasks: &Tasks,
    metrics: &observe::metrics::Registry,
) -> io::Result<()> {
    let Discoveries {
        members,
        files,
        names,
        kubernetes,
    } = Discoveries::of(config);
    let metrics = kubernetes::Metrics::new(metrics);
    if !members.is_empty() {
        // At once, so that the first requests find the workers listed.
        follow(StaticList::new(members), fleet, tasks);
    }
    for file in files {
        follow(file, fleet, tasks);
    }
    for dns in names {
        follow(dns, fleet, tasks);
    }
    for entry in kubernetes {
        follow_kubernetes(entry, config, fleet, tasks, &metrics)?;
    }
    Ok(())
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

#[cfg(feature = "kubernetes")]
fn follow_kubernetes(
    entry: kubernetes::Settings,
    config: &Config,
    fleet: &Arc<Registry>,
    tasks: &Tasks,
    metrics: &kubernetes::Metrics,
) -> io::Result<()> {
    follow(kubernetes(entry, config, metrics)?, fleet, tasks);
    Ok(())
}

/// The check of the configuration refuses such entries before.
#[cfg(not(feature = "kubernetes"))]
fn follow_kubernetes(
    _: kubernetes::Settings,
    _: &Config,
    _: &Arc<Registry>,
    _: &Tasks,
    _: &kubernetes::Metrics,
) -> io::Result<()> {
    Err(io::Error::other("built without the feature `kubernetes`"))
}

fn follow(discovery: impl Discovery, fleet: &Arc<Registry>, tasks: &Tasks) {
    tasks.spawn_until_stopped(discovery::follow(discovery, fleet.clone()));
}
