//! Discovery by DNS: each address of a name is a worker. The name is resolved periodically.

use std::time::Duration;

use super::{Discovery, WorkerDefaults};
use crate::fleet::Member;

#[derive(Debug)]
pub struct Dns {
    /// `dns:HOST:PORT`, unique among the discoveries in use.
    name: String,
    host_and_port: String,
    interval: Duration,
    workers: WorkerDefaults,
    /// The first lookup happens immediately, later ones after the interval.
    is_first: bool,
}

impl Dns {
    pub fn new(host: &str, port: u16, interval: Duration, mut workers: WorkerDefaults) -> Self {
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
            interval,
            workers,
            is_first: true,
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
        // Resolvers rotate the order of addresses; workers should keep theirs.
        let mut addresses: Vec<String> = found.map(|address| address.to_string()).collect();
        addresses.sort();
        addresses.dedup();
        if addresses.is_empty() {
            return Err(format!("{name} has no addresses"));
        }
        let member = |address| {
            let member = self.workers.member(address);
            member.map_err(|(key, error)| format!("{key}: {error}"))
        };
        addresses.into_iter().map(member).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dns(host: &str, port: u16) -> Dns {
        Dns::new(
            host,
            port,
            Duration::from_millis(1),
            WorkerDefaults::default(),
        )
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

    #[tokio::test]
    async fn a_name_that_cannot_be_resolved_is_an_error_not_an_empty_fleet() {
        let mut dns = dns("no such host", 1);
        assert!(dns.next().await.is_err());
    }
}
