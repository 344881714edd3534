//! The discoveries that the configuration asks for.

use std::path::PathBuf;

use crate::config::{Config, DiscoveryEntry, WorkersFile, parse_workers};
use crate::fleet::Member;
use crate::fleet::discovery::dns::Dns;
use crate::fleet::discovery::file::File;

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
