//! From pods to the members of the fleet. Pure.

use std::collections::{BTreeMap, BTreeSet, btree_map};
use std::net::SocketAddr;
use std::sync::Arc;

use super::endpoints::PodEndpoint;
use crate::fleet::Member;
use crate::fleet::discovery::WorkerDefaults;

/// Remembers which pods have been ready once.
#[derive(Debug, Default)]
pub(super) struct ServedPods {
    served: BTreeSet<String>,
}

/// The members, and how many pods are in each state.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Members {
    pub(super) members: Vec<Member>,
    pub(super) ready: usize,
    pub(super) draining: usize,
    /// Pods that have not been ready yet.
    pub(super) starting: usize,
}

impl ServedPods {
    /// A pod that was ready and is not any more drains: it keeps its requests, its load and what is known of its cache. One
    /// that has not been ready yet is no member: there is nothing to ask it.
    pub(super) fn members(
        &mut self,
        pods: Vec<PodEndpoint>,
        defaults: &WorkerDefaults,
    ) -> Result<Members, String> {
        let is_there: BTreeSet<&str> = pods.iter().map(|pod| &*pod.uid).collect();
        self.served.retain(|uid| is_there.contains(&**uid));
        let serving = pods.iter().filter(|pod| pod.is_serving);
        self.served.extend(serving.map(|pod| pod.uid.clone()));
        let (mut pods, starting): (Vec<PodEndpoint>, Vec<PodEndpoint>) = pods
            .into_iter()
            .partition(|pod| self.served.contains(&pod.uid));
        let count = |is_serving| {
            pods.iter()
                .filter(|pod| pod.is_serving == is_serving)
                .count()
        };
        let (ready, draining) = (count(true), count(false));
        // An address may have passed to another pod while the one before is still listed: that of a ready pod counts.
        pods.sort_by(|a, b| (!a.is_serving, &a.name).cmp(&(!b.is_serving, &b.name)));
        let mut found = BTreeMap::new();
        for pod in pods {
            for port in &pod.ports {
                let address = SocketAddr::new(pod.address, *port);
                if let btree_map::Entry::Vacant(free) = found.entry(address) {
                    free.insert(member(&pod, address, defaults)?);
                }
            }
        }
        let mut members: Vec<Member> = found.into_values().collect();
        members.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(Members {
            members,
            ready,
            draining,
            starting: starting.len(),
        })
    }
}

fn member(
    pod: &PodEndpoint,
    address: SocketAddr,
    defaults: &WorkerDefaults,
) -> Result<Member, String> {
    let member = defaults.member(address.to_string());
    let mut member = member.map_err(|(key, error)| format!("{key}: {error}"))?;
    member.name = match &*pod.ports {
        [_] => pod.name.clone(),
        _ => format!("{}:{}", pod.name, address.port()),
    };
    member.identity = Some(Arc::from(&*pod.uid));
    member.role = pod.role.unwrap_or(member.role);
    member.labels.extend(pod.labels.clone());
    member.draining = !pod.is_serving;
    Ok(member)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::Role;

    fn pod(uid: &str, address: &str, is_serving: bool) -> PodEndpoint {
        PodEndpoint {
            uid: uid.to_owned(),
            name: format!("pod-{uid}"),
            address: address.parse().unwrap(),
            ports: vec![8_000],
            role: None,
            labels: BTreeMap::new(),
            is_serving,
        }
    }

    fn check(served_pods: &mut ServedPods, pods: &[PodEndpoint], expected: &[(&str, &str, bool)]) {
        let members = served_pods
            .members(pods.to_vec(), &WorkerDefaults::default())
            .unwrap();
        let members = members.members.iter();
        let rows: Vec<_> = members
            .map(|member| (&*member.name, &*member.address, member.draining))
            .collect();
        assert_eq!(rows, expected);
    }

    #[test]
    fn a_pod_joins_once_it_is_ready_and_drains_when_it_is_not_any_more() {
        let mut served_pods = ServedPods::default();
        check(&mut served_pods, &[pod("a", "10.0.0.1", false)], &[]);
        check(
            &mut served_pods,
            &[pod("a", "10.0.0.1", true)],
            &[("pod-a", "10.0.0.1:8000", false)],
        );
        check(
            &mut served_pods,
            &[pod("a", "10.0.0.1", false)],
            &[("pod-a", "10.0.0.1:8000", true)],
        );
        check(&mut served_pods, &[], &[]);
        // Forgotten: a uid never comes back, but a pod without one is known by its address.
        check(&mut served_pods, &[pod("a", "10.0.0.1", false)], &[]);
    }

    #[test]
    fn an_address_belongs_to_the_pod_that_is_ready() {
        let mut served_pods = ServedPods::default();
        let old = |is_serving| pod("a", "10.0.0.1", is_serving);
        check(
            &mut served_pods,
            &[old(true)],
            &[("pod-a", "10.0.0.1:8000", false)],
        );
        let new = pod("b", "10.0.0.1", true);
        check(
            &mut served_pods,
            &[old(false), new],
            &[("pod-b", "10.0.0.1:8000", false)],
        );
    }

    #[test]
    fn each_port_of_a_pod_is_a_worker_and_all_have_its_uid() {
        let mut two = pod("a", "fd00::1", true);
        two.ports = vec![8_000, 8_001];
        two.role = Some(Role::Decode);
        let members = ServedPods::default()
            .members(vec![two], &WorkerDefaults::default())
            .unwrap();
        assert_eq!(
            (members.ready, members.draining, members.starting),
            (1, 0, 0)
        );
        let names: Vec<_> = members
            .members
            .iter()
            .map(|member| (&*member.name, &*member.address))
            .collect();
        assert_eq!(
            names,
            [
                ("pod-a:8000", "[fd00::1]:8000"),
                ("pod-a:8001", "[fd00::1]:8001")
            ]
        );
        for member in &members.members {
            assert_eq!(member.identity.as_deref(), Some("a"));
            assert_eq!(member.role, Role::Decode);
        }
    }

    #[test]
    fn pods_are_counted_by_state() {
        let mut served_pods = ServedPods::default();
        let pods = |second| {
            vec![
                pod("a", "10.0.0.1", true),
                pod("b", "10.0.0.2", second),
                pod("c", "10.0.0.3", false),
            ]
        };
        let mut counts = |second| {
            let members = served_pods
                .members(pods(second), &WorkerDefaults::default())
                .unwrap();
            (members.ready, members.draining, members.starting)
        };
        assert_eq!(counts(true), (2, 0, 1));
        assert_eq!(counts(false), (1, 1, 1));
    }
}
