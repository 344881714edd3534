//! Where the configuration says that workers are listed.

use std::path::PathBuf;
use std::time::Duration;

use crate::config::{self, Config};
use crate::fleet::discovery::dns::Dns;
use crate::fleet::discovery::file::File;
use crate::fleet::discovery::{bearer, shared};
use crate::fleet::{Member, Role};

/// The workers that the configuration lists itself, and who lists others.
pub(super) struct Discoveries {
    pub(super) fixed: Vec<Member>,
    pub(super) file: Option<File>,
    pub(super) dns: Vec<Dns>,
}

impl Discoveries {
    pub(super) fn of(config: &Config) -> Self {
        let fleet = &config.fleet;
        let names = [
            ("dns", &fleet.dns.name, fleet.dns.role),
            ("dns_prefill", &fleet.dns.prefill_name, Role::Prefill),
        ];
        let dns = names
            .into_iter()
            .filter(|(_, name, _)| !name.is_empty())
            .map(|(discovery, name, role)| Dns {
                discovery,
                name: format!("{name}:{}", fleet.dns.port),
                interval: Duration::from_millis(fleet.dns.interval_ms),
                authorization: bearer(&fleet.dns.api_key).unwrap_or_default(),
                events: fleet.dns.events.check().unwrap_or_default(),
                labels: shared(&fleet.dns.labels),
                role,
                asked: false,
            });
        Self {
            fixed: config.members(),
            file: (!fleet.file.path.is_empty()).then(|| file(config)),
            dns: dns.collect(),
        }
    }
}

fn file(config: &Config) -> File {
    let path = config.fleet.file.path.clone();
    let interval = Duration::from_millis(config.fleet.file.interval_ms);
    let splits = config.prefill_decode.connector.is_some();
    let parse = {
        let path = path.clone();
        Box::new(move |text: &str| config::parse_workers(&path, text, splits))
    };
    File::new(PathBuf::from(path), interval, parse)
}
