//! Workers behind a DNS name: each of its addresses is one, and the name is resolved again and again.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use hyper::header::HeaderValue;

use super::Discovery;
use crate::fleet::events::Events;
use crate::fleet::{Member, Role};

#[derive(Debug)]
pub struct Dns {
    /// Unique among the discoveries in use.
    pub discovery: &'static str,
    /// `host:port`.
    pub name: String,
    pub interval: Duration,
    pub authorization: Option<HeaderValue>,
    pub events: Events,
    pub labels: BTreeMap<String, Arc<str>>,
    /// Of each of them.
    pub role: Role,
    /// Whether it was asked before: the first time nothing is waited for.
    pub asked: bool,
}

impl Discovery for Dns {
    fn name(&self) -> &'static str {
        self.discovery
    }

    async fn next(&mut self) -> Result<Vec<Member>, String> {
        if self.asked {
            tokio::time::sleep(self.interval).await;
        }
        self.asked = true;
        let found = tokio::net::lookup_host(&self.name)
            .await
            .map_err(|error| format!("cannot resolve {}: {error}", self.name))?;
        // Resolvers rotate their answers; the fleet should not.
        let mut addresses: Vec<String> = found.map(|address| address.to_string()).collect();
        addresses.sort();
        addresses.dedup();
        if addresses.is_empty() {
            return Err(format!("{} has no addresses", self.name));
        }
        let member = |address: String| Member {
            name: address.clone(),
            address,
            role: self.role,
            draining: false,
            authorization: self.authorization.clone(),
            events: self.events.clone(),
            labels: self.labels.clone(),
            bootstrap: None,
        };
        Ok(addresses.into_iter().map(member).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dns(name: &str) -> Dns {
        Dns {
            discovery: "dns",
            name: name.to_owned(),
            interval: Duration::from_millis(1),
            authorization: None,
            events: Events::Auto,
            labels: BTreeMap::new(),
            role: Role::Both,
            asked: false,
        }
    }

    #[tokio::test]
    async fn each_address_of_a_name_is_a_worker() {
        let mut dns = dns("127.0.0.1:8000");
        for _ in 0..2 {
            let members = dns.next().await.unwrap();
            assert_eq!(members.len(), 1);
            assert_eq!(members[0].address, "127.0.0.1:8000");
        }
    }

    #[tokio::test]
    async fn a_name_without_a_port_is_an_error_not_an_empty_fleet() {
        let mut dns = dns("127.0.0.1");
        assert!(dns.next().await.is_err());
    }
}
