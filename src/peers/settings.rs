//! The `peers` section: where replicas find each other, how they trust each other, and how often they report.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize};

use crate::http::tls;
use crate::secret::Secret;
use crate::units::DurationText;

/// Replicas of this router that share what they know: the load that each has at the workers. Off unless `listen` is set.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Settings {
    /// Address and port for other replicas, such as `:9701` (all addresses) or `127.0.0.1:9701`. Empty: this router
    /// is the only one, and shares nothing. Several replicas need Redis (`responses.store`) or
    /// `responses.mode: pass_through`.
    pub listen: String,
    /// Where the other replicas are; any number of addresses and other entries. This replica's own address may be among them.
    #[serde(deserialize_with = "addresses_or_maps")]
    #[schemars(with = "Vec<AddressOrMap>")]
    pub discovery: Vec<PeerDiscovery>,
    /// Proves that a replica belongs here; it is never sent. The same text on all replicas, of at least 16 bytes
    /// (`openssl rand -hex 32`): text, `${NAME}` or `file:/path`. Without it only replicas on this host are
    /// accepted. It does not encrypt: run replicas in a network that you trust, or use `tls`.
    pub secret: Secret,
    /// TLS between replicas, each of which presents its certificate, as server and as client. Then `secret` is not
    /// needed. Left out: connections are not encrypted.
    pub tls: Option<tls::ServerSettings>,
    /// This replica's name in logs, metrics and on `/fleet`. Empty: the host's name and the port of `listen`.
    pub name: String,
    /// How long a starting replica is not ready (`/readyz`) because it takes over what other replicas know of the
    /// workers' caches. Then it serves, and says that it serves cold. With no other replica ready it does not wait.
    #[serde(with = "DurationText")]
    #[schemars(extend("min" = "0s", "max" = "10m"))]
    pub warm_start_timeout: Duration,
    /// No keys: measured, and bounds that no fleet reaches.
    #[serde(skip)]
    pub advanced: Advanced,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            listen: String::new(),
            discovery: Vec::new(),
            secret: Secret::default(),
            tls: None,
            name: String::new(),
            // Trees of 160 workers come in about a second; longer than this an old replica need not wait to be replaced.
            warm_start_timeout: Duration::from_secs(10),
            advanced: Advanced::default(),
        }
    }
}

/// One source of other replicas' addresses.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum PeerDiscovery {
    /// Addresses such as `10.0.0.1:9701` or `router-0.routers:9701`.
    Static(Vec<String>),
    /// A DNS name each of whose addresses is a replica.
    Dns(DnsPeers),
}

/// The forms in which other replicas are listed: an address, or a map.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum AddressOrMap {
    Address(String),
    Map(PeerDiscovery),
}

/// Reads sources from any of their forms; addresses that follow one another are one list.
fn addresses_or_maps<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Vec<PeerDiscovery>, D::Error> {
    let mut sources = Vec::new();
    let mut is_plain = false;
    for form in Vec::<AddressOrMap>::deserialize(deserializer)? {
        match (form, sources.last_mut()) {
            (AddressOrMap::Address(address), Some(PeerDiscovery::Static(listed))) if is_plain => {
                listed.push(address);
            }
            (AddressOrMap::Address(address), _) => {
                sources.push(PeerDiscovery::Static(vec![address]));
                is_plain = true;
            }
            (AddressOrMap::Map(source), _) => {
                sources.push(source);
                is_plain = false;
            }
        }
    }
    Ok(sources)
}

/// A DNS name each of whose addresses is a replica, such as a headless Service of Kubernetes with
/// `publishNotReadyAddresses: true`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct DnsPeers {
    /// The name, without a port.
    pub name: String,
    /// The port on which the replicas listen for each other.
    #[serde(default = "DnsPeers::port")]
    #[schemars(range(min = 1))]
    pub port: u16,
}

impl DnsPeers {
    fn port() -> u16 {
        9_701
    }
}

/// Intervals and bounds, the same in all fleets.
#[derive(Clone, Debug, PartialEq)]
pub struct Advanced {
    /// How often changed load is reported, on average; with more than 8 other replicas proportionally less often.
    /// Choices that another replica made within this time and the network's delay are not seen.
    pub report_interval: Duration,
    /// A replica without anything to report says so this often.
    pub heartbeat_interval: Duration,
    /// A replica that is silent for this long is shown as stale; its load still counts.
    pub stale_after: Duration,
    /// A replica that is silent for this long is disconnected, and its load no longer counts.
    pub dead_after: Duration,
    /// A replica that does not accept a connection within this time is tried again.
    pub connect_timeout: Duration,
    /// The longest pause between two attempts to connect to a replica.
    pub max_backoff: Duration,
    /// Replicas that this one shares with; more are refused.
    pub max_peers: u32,
    /// Workers and ranks that another replica may report; more are ignored and counted.
    pub max_workers: u32,
    /// Blocks of prompts that this replica routed and has not sent to the others, about 11 bytes each: as many as are
    /// sent with one report. More are dropped and counted, and sent with the next use of their prompts.
    pub max_queued_blocks: u32,
    /// Size of a message of another replica; one that sends a longer one is disconnected.
    pub max_message: usize,
}

impl Default for Advanced {
    fn default() -> Self {
        Self {
            // In simulations of 8 replicas a delay of 50 ms costs 5 % of mean time to first token, 5 ms nothing; shorter
            // intervals cost more CPU time.
            report_interval: Duration::from_millis(10),
            heartbeat_interval: Duration::from_millis(250),
            // Four heartbeats.
            stale_after: Duration::from_secs(1),
            dead_after: Duration::from_secs(3),
            // With `max_backoff` less than 1 s, so that a network that works again is noticed within a second.
            connect_timeout: Duration::from_millis(500),
            max_backoff: Duration::from_millis(400),
            max_peers: 64,
            // 4,096 workers with 15 ranks each.
            max_workers: 65_536,
            // 800,000 blocks a second: 4,000 prompts of 40,000 tokens of which nothing is cached.
            max_queued_blocks: 16_384,
            // The names of so many, with addresses of 100 bytes, or their load, are one message.
            max_message: 8 << 20,
        }
    }
}

/// Shorter secrets can be guessed by who records a handshake.
const MIN_SECRET: usize = 16;

impl Settings {
    /// Whether there are other replicas.
    pub fn is_on(&self) -> bool {
        !self.listen.is_empty()
    }

    /// Whether replicas of other hosts prove who they are, by the secret or by certificates.
    pub fn has_proof(&self) -> bool {
        !self.secret.is_empty() || self.tls.is_some()
    }

    /// What is wrong beyond types and bounds: keys with a message each. `listen` is `listen` as an address, or what
    /// is wrong with it. `has_proof`: replicas of other hosts
    /// prove who they are, or would with a secret that was refused.
    pub fn check(
        &self,
        listen: Result<SocketAddr, String>,
        has_proof: bool,
    ) -> Vec<(String, String)> {
        let mut problems = Vec::new();
        let mut problem = |key: String, message: String| problems.push((key, message));
        if !self.is_on() {
            if !self.discovery.is_empty() {
                let message = "is needed when `peers.discovery` is set; write `listen: \":9701\"`";
                problem("listen".to_owned(), message.to_owned());
            }
            return problems;
        }
        match listen {
            Err(error) => problem("listen".to_owned(), error),
            Ok(listen) if !has_proof && !listen.ip().is_loopback() => {
                let message = format!(
                    "is needed, because `peers.listen` (`{}`) can be reached from other hosts: make one with \
                     `openssl rand -hex 32`, set `peers.tls`, or listen at `127.0.0.1:{}`",
                    self.listen,
                    listen.port()
                );
                problem("secret".to_owned(), message);
            }
            Ok(_) => {}
        }
        let tls = self.tls.as_ref();
        if tls.is_some_and(|tls| tls.client_ca.is_empty()) {
            let message = "is needed: the CA by which replicas verify each other's certificates";
            problem("tls.client_ca".to_owned(), message.to_owned());
        }
        if tls.is_some_and(|tls| tls.self_signed) {
            let message = "cannot be used: replicas verify each other's certificates";
            problem("tls.self_signed".to_owned(), message.to_owned());
        }
        if tls.is_some_and(|tls| tls.client_auth == tls::ClientAuth::Optional) {
            let message = "must be `required`: each replica presents its certificate";
            problem("tls.client_auth".to_owned(), message.to_owned());
        }
        let length = self.secret.expose().len();
        if length > 0 && length < MIN_SECRET {
            let message = format!(
                "has {length} bytes and must have {MIN_SECRET} at least; make one with `openssl rand -hex 32`"
            );
            problem("secret".to_owned(), message);
        }
        for (index, entry) in self.discovery.iter().enumerate() {
            for (key, message) in check_entry(entry, has_proof) {
                problem(format!("discovery[{index}].{key}"), message);
            }
            if self.discovery[..index].contains(entry) {
                problem(format!("discovery[{index}]"), "is listed twice".to_owned());
            }
        }
        problems
    }
}

fn check_entry(entry: &PeerDiscovery, has_proof: bool) -> Vec<(String, String)> {
    let addresses = match entry {
        PeerDiscovery::Dns(dns) if dns.name.is_empty() => {
            return vec![("dns.name".to_owned(), "is empty".to_owned())];
        }
        PeerDiscovery::Dns(dns) if dns.name.contains([':', '/']) => {
            let name = &dns.name;
            let message = format!("`{name}` must be a name alone; the port has its own key");
            return vec![("dns.name".to_owned(), message)];
        }
        PeerDiscovery::Dns(_) => return Vec::new(),
        PeerDiscovery::Static(addresses) => addresses,
    };
    let check = |(index, address): (usize, &String)| {
        let message = match host_and_port(address) {
            Err(error) => error,
            Ok((host, _)) if !has_proof && !may_be_loopback(host) => {
                format!("`{address}` is another host, for which `peers.secret` is needed")
            }
            Ok(_) if addresses[..index].contains(address) => {
                format!("`{address}` is listed twice")
            }
            Ok(_) => return None,
        };
        Some((format!("static[{index}]"), message))
    };
    addresses.iter().enumerate().filter_map(check).collect()
}

/// Splits `10.0.0.1:9701`, `[::1]:9701` or `router-0:9701`.
pub(super) fn host_and_port(address: &str) -> Result<(&str, u16), String> {
    let wrong = || {
        format!("`{address}` is not an address such as `10.0.0.1:9701` or `router-0.routers:9701`")
    };
    let (host, port) = address.rsplit_once(':').ok_or_else(wrong)?;
    let port: u16 = port.parse().map_err(|_| wrong())?;
    let is_ipv6 = host.starts_with('[') && host.ends_with(']');
    let host = if is_ipv6 {
        &host[1..host.len() - 1]
    } else {
        host
    };
    let is_wrong = host.is_empty()
        || port == 0
        || host.contains(['/', '@', ' '])
        || (is_ipv6 && host.parse::<IpAddr>().is_err())
        || (!is_ipv6 && host.contains(':'));
    if is_wrong {
        Err(wrong())
    } else {
        Ok((host, port))
    }
}

/// False for addresses of other hosts; what a name stands for is known only when it is resolved.
fn may_be_loopback(host: &str) -> bool {
    host.parse::<IpAddr>().map_or(true, |ip| ip.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(change: impl FnOnce(&mut Settings)) -> Vec<String> {
        let mut settings = Settings {
            listen: "127.0.0.1:9701".to_owned(),
            ..Settings::default()
        };
        change(&mut settings);
        let listen = settings.listen.parse();
        let listen = listen.map_err(|_| "is not an address".to_owned());
        let has_proof = settings.has_proof();
        let problems = settings.check(listen, has_proof).into_iter();
        problems
            .map(|(key, message)| format!("{key}: {message}"))
            .collect()
    }

    fn listed(addresses: &[&str]) -> Vec<PeerDiscovery> {
        let addresses = addresses.iter().map(|address| (*address).to_owned());
        vec![PeerDiscovery::Static(addresses.collect())]
    }

    #[test]
    fn replicas_of_one_host_need_no_secret() {
        let none: Vec<String> = Vec::new();
        assert_eq!(
            check(
                |settings| settings.discovery = listed(&["127.0.0.1:1", "[::1]:2", "localhost:3"])
            ),
            none
        );
    }

    #[test]
    fn other_hosts_need_a_secret() {
        let problems = check(|settings| {
            "0.0.0.0:9701".clone_into(&mut settings.listen);
            settings.discovery = listed(&["10.0.0.2:9701"]);
        });
        assert!(problems[0].starts_with("secret: is needed"), "{problems:?}");
        assert!(
            problems[1].starts_with("discovery[0].static[0]: `10.0.0.2:9701` is another host"),
            "{problems:?}"
        );
        let with_secret = |secret: &'static str| {
            move |settings: &mut Settings| {
                "0.0.0.0:9701".clone_into(&mut settings.listen);
                settings.secret = Secret::new(secret);
                settings.discovery = listed(&["10.0.0.2:9701"]);
            }
        };
        assert_eq!(check(with_secret("0123456789abcdef")).len(), 0);
        let short = check(with_secret("0123456789abcde"));
        assert!(short[0].starts_with("secret: has 15 bytes"), "{short:?}");
    }

    #[test]
    fn mistakes_are_named_with_their_place() {
        let found = |change: fn(&mut Settings), expected: &str| {
            let problems = check(change);
            assert!(
                problems.iter().any(|problem| problem.contains(expected)),
                "{problems:?} has no {expected}"
            );
        };
        found(
            |settings| settings.discovery = listed(&["router-0"]),
            "discovery[0].static[0]: `router-0` is not an address",
        );
        found(
            |settings| settings.discovery = listed(&["h:0"]),
            "static[0]: `h:0` is not an address",
        );
        found(
            |settings| settings.discovery = listed(&["::1:9701"]),
            "`::1:9701` is not an address",
        );
        found(
            |settings| settings.discovery = listed(&["h:1", "h:1"]),
            "static[1]: `h:1` is listed twice",
        );
        found(
            |settings| {
                settings.listen.clear();
                settings.discovery = listed(&["h:1"]);
            },
            "listen: is needed when `peers.discovery` is set",
        );
    }
}
