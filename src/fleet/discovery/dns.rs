//! Discovery by DNS: each address of a name is a worker. The name is resolved periodically.
//!
//! A host with an IPv4 and an IPv6 address is one worker, and DNS does not say which addresses are of one host. So addresses of
//! one family count: IPv4, if there are any.

use std::net::SocketAddr;
use std::time::Duration;

use super::{Discovery, WorkerDefaults};
use crate::fleet::Member;

/// A resolver that fails for one family answers with the other's addresses alone. IPv4 addresses that are missing for this
/// many lookups in a row are gone.
const MISSING_LOOKUPS_MAX: u32 = 10;

/// Time between two lookups. An answer of CoreDNS for a Service of Kubernetes is valid for 5 s by default.
const LOOKUP_INTERVAL: Duration = Duration::from_secs(5);

/// The addresses of one family. Pure.
#[derive(Debug, Default)]
struct OneFamily {
    v4: Vec<SocketAddr>,
    /// Lookups in a row without one of them.
    missing: u32,
}

impl OneFamily {
    /// The addresses that count after a lookup, in a fixed order: resolvers rotate them, and workers should keep theirs.
    fn on_found(&mut self, found: impl Iterator<Item = SocketAddr>) -> Vec<SocketAddr> {
        let (mut v4, mut v6): (Vec<_>, Vec<_>) = found.partition(SocketAddr::is_ipv4);
        for addresses in [&mut v4, &mut v6] {
            addresses.sort();
            addresses.dedup();
        }
        if !v4.is_empty() {
            self.missing = 0;
            self.v4 = v4;
        } else if self.missing < MISSING_LOOKUPS_MAX && !self.v4.is_empty() {
            self.missing += 1;
        } else {
            self.v4.clear();
            return v6;
        }
        self.v4.clone()
    }
}

#[derive(Debug)]
pub struct Dns {
    /// `dns:HOST:PORT`, unique among the discoveries in use.
    name: String,
    host_and_port: String,
    interval: Duration,
    workers: WorkerDefaults,
    /// The first lookup happens immediately, later ones after the interval.
    is_first: bool,
    family: OneFamily,
}

impl Dns {
    pub fn new(host: &str, port: u16, mut workers: WorkerDefaults) -> Self {
        // Certificates name hosts, seldom addresses.
        if let Some(tls) = workers
            .tls
            .as_mut()
            .filter(|tls| tls.server_name.is_empty())
        {
            host.clone_into(&mut tls.server_name);
        }
        Self {
            name: format!("dns:{host}:{port}"),
            host_and_port: format!("{host}:{port}"),
            interval: LOOKUP_INTERVAL,
            workers,
            is_first: true,
            family: OneFamily::default(),
        }
    }
}

impl Discovery for Dns {
    fn name(&self) -> &str {
        &self.name
    }

    async fn next(&mut self) -> Result<Vec<Member>, String> {
        if !std::mem::take(&mut self.is_first) {
            tokio::time::sleep(self.interval).await;
        }
        let name = &self.host_and_port;
        let found = tokio::net::lookup_host(name)
            .await
            .map_err(|error| format!("cannot resolve {name}: {error}"))?;
        let addresses = self.family.on_found(found);
        if addresses.is_empty() {
            return Err(format!("{name} has no addresses"));
        }
        let member = |address: SocketAddr| {
            let member = self.workers.member(address.to_string());
            member.map_err(|(key, error)| format!("{key}: {error}"))
        };
        addresses.into_iter().map(member).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dns(host: &str, port: u16) -> Dns {
        Dns {
            interval: Duration::from_millis(1),
            ..Dns::new(host, port, WorkerDefaults::default())
        }
    }

    #[tokio::test]
    async fn each_address_of_a_name_is_a_worker() {
        let mut dns = dns("127.0.0.1", 8_000);
        for _ in 0..2 {
            let members = dns.next().await.unwrap();
            assert_eq!(members.len(), 1);
            assert_eq!(members[0].address, "127.0.0.1:8000");
        }
    }

    #[test]
    fn a_host_with_both_families_is_one_worker_and_a_family_that_fails_keeps_its_workers() {
        let v4 = ["10.0.0.1:80", "10.0.0.2:80"];
        let v6 = ["[fd00::1]:80", "[fd00::2]:80"];
        let of = |texts: &[&str]| -> Vec<SocketAddr> {
            texts.iter().map(|text| text.parse().unwrap()).collect()
        };
        let both = [v6[1], v4[1], v6[0], v4[0], v4[1]];
        let mut family = OneFamily::default();
        assert_eq!(family.on_found(of(&both).into_iter()), of(&v4));
        // The resolver fails for IPv4.
        for _ in 0..MISSING_LOOKUPS_MAX {
            assert_eq!(family.on_found(of(&v6).into_iter()), of(&v4));
        }
        assert_eq!(family.on_found(of(&both).into_iter()), of(&v4));
        // It fails for IPv6.
        assert_eq!(family.on_found(of(&v4[..1]).into_iter()), of(&v4[..1]));
        // IPv4 was turned off.
        for _ in 0..MISSING_LOOKUPS_MAX {
            assert_eq!(family.on_found(of(&v6).into_iter()), of(&v4[..1]));
        }
        assert_eq!(family.on_found(of(&v6).into_iter()), of(&v6));
        assert_eq!(family.on_found(of(&v6).into_iter()), of(&v6));
        assert_eq!(OneFamily::default().on_found(of(&v6).into_iter()), of(&v6));
    }

    #[tokio::test]
    async fn a_name_that_cannot_be_resolved_is_an_error_not_an_empty_fleet() {
        let mut dns = dns("no such host", 1);
        assert!(dns.next().await.is_err());
    }
}
