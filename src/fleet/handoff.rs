//! What two workers need of each other to hand a prompt over: by which connector, where a prefill
//! worker's blocks are to be had, and why two of them are no pair. Pure.

pub mod pairs;
pub mod watch;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Status, Worker};

/// How engines transfer KV blocks. Each is a variant here and a file under `relay/handoff`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Connector {
    /// vLLM's `NixlConnector`: the response of the prefill leg says where the blocks are.
    Nixl,
    /// vLLM's `MooncakeConnector`: both legs have an id that the router makes, and the decode leg has the address
    /// of the prefill worker's bootstrap server.
    Mooncake,
}

impl Connector {
    pub const ALL: [Connector; 2] = [Connector::Nixl, Connector::Mooncake];

    pub fn as_str(self) -> &'static str {
        match self {
            Connector::Nixl => "nixl",
            Connector::Mooncake => "mooncake",
        }
    }

    /// Whether a prefill worker must have told its [`Peer`] before anything can be fetched from it.
    pub fn needs_peer(self) -> bool {
        match self {
            Connector::Nixl => false,
            Connector::Mooncake => true,
        }
    }
}

impl fmt::Display for Connector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Where a Mooncake prefill worker is met, and the names of its ranks: what its bootstrap server says.
/// Another process has other names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// `http://host:port`, as a decode worker is told it.
    pub bootstrap: Arc<str>,
    /// Data-parallel rank -> the name of its engine; never empty.
    engines: BTreeMap<u32, Arc<str>>,
}

impl Peer {
    /// Reads a bootstrap server's `GET /query`:
    /// `{"0":{"engine_id":"...","worker_addr":{"0":{"0":"tcp://..."}}}}`, a key for each rank. None for a
    /// page that names no engine, and for one that names a rank's badly: half of a list is of no use.
    pub fn read(page: &[u8], bootstrap: &str) -> Option<Self> {
        #[derive(Deserialize)]
        struct Entry {
            engine_id: String,
        }
        let entries: BTreeMap<String, Entry> = serde_json::from_slice(page).ok()?;
        let mut engines = BTreeMap::new();
        for (rank, entry) in entries {
            if entry.engine_id.is_empty() {
                return None;
            }
            engines.insert(rank.parse().ok()?, entry.engine_id.into());
        }
        let is_named = !engines.is_empty();
        is_named.then(|| Self {
            bootstrap: bootstrap.into(),
            engines,
        })
    }

    pub fn engine(&self, rank: u32) -> Option<&str> {
        self.engines.get(&rank).map(|engine| &**engine)
    }

    /// Its ranks, from the least.
    pub fn ranks(&self) -> impl ExactSizeIterator<Item = u32> {
        self.engines.keys().copied()
    }
}

/// Where a worker's bootstrap server is: what its entry says, else its own host and the fleet's port.
pub fn bootstrap(worker: &Worker, port: u16) -> String {
    match &worker.bootstrap {
        Some(own) => own.to_string(),
        None => format!("http://{}:{port}", host(worker)),
    }
}

/// A worker's host, as it is listed.
pub fn host(worker: &Worker) -> &str {
    let address = worker.pool.address();
    address.rsplit_once(':').map_or(address, |(host, _)| host)
}

/// What of a worker decides whether it can be one of a pair, beside its models and its [`Peer`]. Made once a
/// snapshot, compared for each pair that a decision looks at.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Shape {
    block_size: Option<u32>,
    version: Option<Arc<str>>,
    /// Its value of the topology label; of two without one, both are in the same place.
    place: Option<Arc<str>>,
}

impl Shape {
    /// `topology` is the label that a pair must share; empty for none.
    pub fn of(status: &Status, topology: &str) -> Self {
        let label = status.worker.labels.get(topology);
        Self {
            block_size: status.facts.block_size,
            version: status.facts.version.as_deref().map(Arc::from),
            place: label.filter(|_| !topology.is_empty()).cloned(),
        }
    }

    /// Whether nothing is known that speaks against the pair. What one of them did not tell does not.
    pub fn fits(&self, other: &Shape) -> bool {
        agree(&self.block_size, &other.block_size)
            && agree(&self.version, &other.version)
            && self.place == other.place
    }
}

fn agree<T: PartialEq>(one: &Option<T>, other: &Option<T>) -> bool {
    one.is_none() || other.is_none() || one == other
}

/// Why a prefill worker cannot hand over to a decode worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Mismatch {
    /// They serve no model in common.
    Model,
    BlockSize {
        prefill: u32,
        decode: u32,
    },
    Version {
        prefill: Arc<str>,
        decode: Arc<str>,
    },
    /// The prefill worker's bootstrap server does not answer, so nobody can be told where it is met.
    NoBootstrap,
    /// They are in different places.
    Topology {
        prefill: Option<Arc<str>>,
        decode: Option<Arc<str>>,
    },
}

impl Mismatch {
    pub fn as_str(&self) -> &'static str {
        match self {
            Mismatch::Model => "model",
            Mismatch::BlockSize { .. } => "block_size",
            Mismatch::Version { .. } => "version",
            Mismatch::NoBootstrap => "no_bootstrap",
            Mismatch::Topology { .. } => "topology",
        }
    }
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Mismatch::Model => f.write_str("they serve no model in common"),
            Mismatch::BlockSize { prefill, decode } => {
                write!(f, "blocks of {prefill} tokens against {decode}")
            }
            Mismatch::Version { prefill, decode } => {
                write!(f, "version {prefill} against {decode}")
            }
            Mismatch::NoBootstrap => {
                f.write_str("the prefill worker's bootstrap server does not answer")
            }
            Mismatch::Topology { prefill, decode } => write!(
                f,
                "in different places: {} and {}",
                prefill.as_deref().unwrap_or("(no label)"),
                decode.as_deref().unwrap_or("(no label)"),
            ),
        }
    }
}

/// What is known to keep a pair from handing over. None is not a proof that it can: what two engines make
/// of each other is only seen by trying.
pub fn mismatch(
    connector: Connector,
    topology: &str,
    prefill: &Status,
    decode: &Status,
) -> Option<Mismatch> {
    let models = &prefill.facts.models;
    if !models
        .keys()
        .any(|model| decode.facts.models.contains_key(model))
    {
        return Some(Mismatch::Model);
    }
    let (from, to) = (Shape::of(prefill, topology), Shape::of(decode, topology));
    if from.place != to.place {
        return Some(Mismatch::Topology {
            prefill: from.place,
            decode: to.place,
        });
    }
    if let (Some(prefill), Some(decode)) = (from.version, to.version)
        && prefill != decode
    {
        return Some(Mismatch::Version { prefill, decode });
    }
    if let (Some(prefill), Some(decode)) = (from.block_size, to.block_size)
        && prefill != decode
    {
        return Some(Mismatch::BlockSize { prefill, decode });
    }
    let is_unmet = connector.needs_peer() && prefill.worker.peer.load().is_none();
    is_unmet.then_some(Mismatch::NoBootstrap)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_bootstrap_servers_page_names_the_engine_of_each_rank() {
        // As a real one answered.
        let page = br#"{"0":{"engine_id":"7a490732-5bda-4b2f-aa25-1317f9998686","worker_addr":{"0":{"0":"tcp://127.0.0.1:33165"}}}}"#;
        let peer = Peer::read(page, "http://p:8998").unwrap();
        assert_eq!(&*peer.bootstrap, "http://p:8998");
        assert_eq!(peer.ranks().collect::<Vec<_>>(), [0]);
        let engine = Some("7a490732-5bda-4b2f-aa25-1317f9998686");
        assert_eq!(peer.engine(0), engine);
        assert_eq!(peer.engine(1), None);

        let two = br#"{"10":{"engine_id":"b"},"2":{"engine_id":"a"}}"#;
        let two = Peer::read(two, "").unwrap();
        assert_eq!(two.ranks().collect::<Vec<_>>(), [2, 10]);
    }

    #[test]
    fn a_page_that_names_none_or_one_badly_is_of_no_use() {
        for page in [
            "{}",
            "[]",
            "",
            r#"{"detail":"Not Found"}"#,
            r#"{"0":{"engine_id":""}}"#,
            r#"{"0":{"engine_id":"a"},"1":{}}"#,
            r#"{"0":{"engine_id":"a"},"-1":{"engine_id":"b"}}"#,
        ] {
            assert_eq!(Peer::read(page.as_bytes(), ""), None, "{page}");
        }
    }

    proptest! {
        #[test]
        fn no_page_makes_it_panic(page in "(\\{|\\}|\"0\"|\"engine_id\"|:|,|\"é\"|1){0,12}") {
            let _ = Peer::read(page.as_bytes(), "");
        }
    }
}
