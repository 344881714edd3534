//! The discoveries that the configuration asks for.

use std::path::PathBuf;
use std::sync::Arc;

use crate::config::{Config, DiscoveryEntry, WorkersFile, parse_workers};
use crate::fleet::Member;
use crate::fleet::discovery::dns::Dns;
use crate::fleet::discovery::file::File;
use crate::fleet::discovery::static_list::StaticList;
use crate::fleet::discovery::{self, Discovery};
use crate::fleet::registry::Registry;
use crate::http::drain::Tasks;

/// The workers that the configuration lists itself, and the files and names that list others.
pub(super) struct Discoveries {
    pub(super) members: Vec<Member>,
    pub(super) files: Vec<File>,
    pub(super) names: Vec<Dns>,
}

impl Discoveries {
    pub(super) fn of(config: &Config) -> Self {
        let mut discoveries = Self {
            members: config.members(),
            files: Vec::new(),
            names: Vec::new(),
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
pub(super) fn find_workers(config: &Config, fleet: &Arc<Registry>, tasks: &Tasks) {
    let Discoveries {
        members,
        files,
        names,
    } = Discoveries::of(config);
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
}

fn follow(discovery: impl Discovery, fleet: &Arc<Registry>, tasks: &Tasks) {
    tasks.spawn_until_stopped(discovery::follow(discovery, fleet.clone()));
}
