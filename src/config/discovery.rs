//! Where workers come from: the entries of `discovery`, and the file that one of them may name.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::reader::{Outside, Reader};
use super::watched::{FileHash, WatchedFiles};
use super::worker_tls;
use crate::fleet::discovery::kubernetes;
use crate::fleet::discovery::{UrlOrMap, WorkerDefaults, WorkerSpec, urls_or_maps};
use crate::fleet::{Member, Role};
use crate::http::tls::Checked;
use crate::units::DurationText;

/// One source of workers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum DiscoveryEntry {
    /// Workers that are listed here.
    Static(StaticWorkers),
    /// Workers that a file lists.
    File(WorkersFile),
    /// Workers behind a DNS name.
    Dns(DnsWorkers),
    /// Pods that the Kubernetes API lists.
    Kubernetes(Box<kubernetes::Settings>),
}

/// Workers that are listed here.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct StaticWorkers {
    /// URLs or maps, as in the top-level `workers`.
    #[serde(deserialize_with = "urls_or_maps")]
    #[schemars(with = "Vec<UrlOrMap>")]
    pub workers: Vec<WorkerSpec>,
    #[serde(flatten)]
    pub defaults: WorkerDefaults,
}

/// A YAML file with a key `workers`, which is read again when it changes. A file with a mistake changes nothing.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct WorkersFile {
    /// Path of the file; a relative one starts where the router was started.
    pub path: String,
    /// Time between two looks at the file.
    #[serde(default = "WorkersFile::interval", with = "DurationText")]
    pub interval: Duration,
    #[serde(flatten)]
    pub defaults: WorkerDefaults,
}

impl WorkersFile {
    fn interval() -> Duration {
        Duration::from_secs(2)
    }
}

/// A DNS name each of whose addresses is a worker, such as a headless Service of Kubernetes. IPv6 addresses count only if there are
/// no IPv4 addresses: they are mostly of the same hosts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct DnsWorkers {
    /// The name, without a port.
    pub name: String,
    /// The port of the workers. vLLM listens on 8000.
    #[serde(default = "DnsWorkers::port")]
    #[schemars(range(min = 1))]
    pub port: u16,
    #[serde(flatten)]
    pub defaults: WorkerDefaults,
}

impl DnsWorkers {
    fn port() -> u16 {
        8_000
    }
}

impl DiscoveryEntry {
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Static(_) => "static",
            Self::File(_) => "file",
            Self::Dns(_) => "dns",
            Self::Kubernetes(_) => "kubernetes",
        }
    }

    /// The workers that the configuration itself lists.
    pub fn listed(&self) -> &[WorkerSpec] {
        match self {
            Self::Static(list) => &list.workers,
            Self::File(_) | Self::Dns(_) | Self::Kubernetes(_) => &[],
        }
    }

    pub fn defaults(&self) -> &WorkerDefaults {
        match self {
            Self::Static(list) => &list.defaults,
            Self::File(file) => &file.defaults,
            Self::Dns(dns) => &dns.defaults,
            Self::Kubernetes(entry) => &entry.defaults,
        }
    }
}

/// The file that an entry of `discovery` names.
#[derive(Default, Deserialize, JsonSchema)]
#[serde(default)]
struct Listing {
    #[serde(deserialize_with = "some_urls_or_maps")]
    #[schemars(with = "Vec<UrlOrMap>")]
    workers: Option<Vec<WorkerSpec>>,
}

fn some_urls_or_maps<'de, D: serde::Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<Vec<WorkerSpec>>, D::Error> {
    urls_or_maps(deserializer).map(Some)
}

#[derive(Debug)]
pub struct ParsedWorkers {
    /// The workers that it lists, or what is wrong with it, in one line.
    pub members: Result<Vec<Member>, String>,
    /// The files that secrets were read from.
    pub secret_files: WatchedFiles,
}

/// Reads the text of a file of workers, and the files of its secrets. `has_roles` says whether workers may be prefill
/// or decode workers.
pub fn parse_workers(
    name: &str,
    text: &str,
    defaults: &WorkerDefaults,
    has_roles: bool,
) -> ParsedWorkers {
    let secret_files = RefCell::new(BTreeMap::new());
    let read_file = |path: &str| {
        let text = std::fs::read_to_string(path)?;
        let hash = FileHash::of(text.as_bytes());
        // Many workers may have one key. If it changes between two of them, the first content is known as the old one.
        let mut files = secret_files.borrow_mut();
        files.entry(PathBuf::from(path)).or_insert(hash);
        Ok(text)
    };
    let outside = Outside {
        read_file: &read_file,
        ..Outside::of_process()
    };
    let (reader, listing) = Reader::read::<Listing>(name, text.as_bytes(), outside);
    ParsedWorkers {
        members: check_workers(reader, listing, defaults, has_roles),
        secret_files: WatchedFiles::new(secret_files.into_inner()),
    }
}

fn check_workers(
    mut reader: Reader,
    listing: Option<Listing>,
    defaults: &WorkerDefaults,
    has_roles: bool,
) -> Result<Vec<Member>, String> {
    if let Some(Listing { workers: None }) = listing {
        // A file that is being written is empty for a moment; `workers: []` says it on purpose.
        reader.problem("workers", "is missing");
    }
    let workers = listing.and_then(|listing| listing.workers);
    let workers = workers.unwrap_or_default();
    worker_tls::check("workers", &workers, &mut Checked::default(), &mut reader);
    let mut members = Vec::new();
    for (index, worker) in workers.iter().enumerate() {
        match worker.member(defaults) {
            Ok(member) if has_roles || member.role == Role::Both => members.push(member),
            Ok(member) => {
                let message = no_connector(member.role);
                reader.problem(&format!("workers[{index}].role"), message);
            }
            Err((key, error)) => reader.problem(&format!("workers[{index}].{key}"), error),
        }
    }
    reader
        .finish(Some(members))
        .map_err(|problems| problems.to_string().trim_end().replace('\n', "; "))
}

/// What is wrong with a role where requests are never disaggregated.
pub(super) fn no_connector(role: Role) -> String {
    format!(
        "`{role}` needs a connector, by which engines transfer KV blocks; write `prefill_decode: {{connector: \
         nixl}}` (or mooncake), or leave the role out"
    )
}
