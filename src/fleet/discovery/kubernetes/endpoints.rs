//! What the objects of the API say: which pods are there, where they are, and which take requests. Pure.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use super::objects::{EndpointSlice, Pod, SliceConditions, SliceEndpoint};
use super::settings::Port;
use crate::fleet::Role;

/// Where the zone and the node of a slice's endpoint are found among the worker's labels: under the names that nodes have.
const ZONE_LABEL: &str = "topology.kubernetes.io/zone";
const NODE_LABEL: &str = "kubernetes.io/hostname";

/// One pod with the ports of its engines.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PodEndpoint {
    /// Who it is. Its address may change, and another pod may get the address later.
    pub(super) uid: String,
    pub(super) name: String,
    pub(super) address: IpAddr,
    pub(super) ports: Vec<u16>,
    /// As a label says.
    pub(super) role: Option<Role>,
    pub(super) labels: BTreeMap<String, Arc<str>>,
    /// It is ready and stays: new requests may be sent to it.
    pub(super) is_serving: bool,
}

/// Why a pod is no worker.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum LeftOut {
    /// It has none yet, or none any more.
    NoAddress,
    /// Its containers have exited. It keeps its address in its status while another pod may have got it.
    Ended,
    NoPort(String),
    UnknownRole(String),
    RoleWithoutConnector(Role),
    Unreadable(String),
}

impl LeftOut {
    /// What an operator should know; nothing of what every pod goes through.
    pub(super) fn warning(&self) -> Option<String> {
        match self {
            Self::NoAddress | Self::Ended => None,
            Self::NoPort(port) => Some(format!("it has no port `{port}`")),
            Self::UnknownRole(value) => Some(format!(
                "its role label has the value `{value}`; expected `prefill`, `decode` or `both`"
            )),
            Self::RoleWithoutConnector(role) => Some(format!(
                "its label says `{role}`, which needs `prefill_decode.connector`; with `role_label: \"\"` labels do \
                 not count"
            )),
            Self::Unreadable(reason) => Some(format!(
                "the Kubernetes API's endpoint cannot be read: {reason}"
            )),
        }
    }
}

/// What is read of a pod besides its address.
#[derive(Clone, Debug, Default)]
pub(super) struct Rules {
    pub(super) role_label: String,
    /// Labels that the worker gets, too.
    pub(super) labels: Vec<String>,
    /// Requests are disaggregated, so that workers may have roles.
    pub(super) has_connector: bool,
}

/// A pod and the ports `ports` of it.
pub(super) fn of_pod(pod: &Pod, ports: &[Port], rules: &Rules) -> Result<PodEndpoint, LeftOut> {
    if matches!(&*pod.status.phase, "Succeeded" | "Failed") {
        return Err(LeftOut::Ended);
    }
    // `podIP` is the first of `podIPs`: the cluster's preferred family. So a pod with two families is one worker.
    let address = pod.status.pod_ip.parse().map_err(|_| LeftOut::NoAddress)?;
    let metadata = &pod.metadata;
    let uid = metadata.uid.clone().ok_or(LeftOut::NoAddress)?;
    let labels = metadata.labels.as_ref();
    let label = |name: &str| labels.and_then(|labels| labels.get(name));
    let role = role(label(&rules.role_label), rules)?;
    let ports: Result<Vec<u16>, LeftOut> =
        ports.iter().map(|port| port_of_pod(pod, port)).collect();
    let is_ready = |condition: &super::objects::Condition| {
        condition.kind == "Ready" && condition.status == "True"
    };
    let copied = rules.labels.iter();
    let copied = copied.filter_map(|name| Some((name.clone(), label(name)?.as_str().into())));
    Ok(PodEndpoint {
        uid,
        name: metadata.name.clone().unwrap_or_default(),
        address,
        ports: ports?,
        role,
        labels: copied.collect(),
        is_serving: metadata.deletion_timestamp.is_none()
            && pod.status.conditions.iter().any(is_ready),
    })
}

fn role(value: Option<&String>, rules: &Rules) -> Result<Option<Role>, LeftOut> {
    let role = match value.map(String::as_str) {
        None => return Ok(None),
        Some("prefill") => Role::Prefill,
        Some("decode") => Role::Decode,
        Some("both" | "prefill-decode") => Role::Both,
        Some(other) => return Err(LeftOut::UnknownRole(other.to_owned())),
    };
    if role == Role::Both || rules.has_connector {
        Ok(Some(role))
    } else {
        Err(LeftOut::RoleWithoutConnector(role))
    }
}

fn port_of_pod(pod: &Pod, port: &Port) -> Result<u16, LeftOut> {
    let name = match port {
        Port::Number(number) => return Ok(*number),
        Port::Name(name) => name,
    };
    let containers = pod.spec.containers.iter().chain(&pod.spec.init_containers);
    let mut ports = containers.flat_map(|container| &container.ports);
    let found = ports.find(|port| port.name == *name);
    found
        .map(|port| port.container_port)
        .ok_or_else(|| LeftOut::NoPort(name.clone()))
}

/// The endpoints of a Service's slices, each pod once. `port`: none if the Service has one port only.
pub(super) fn of_slices<'s>(
    slices: impl Iterator<Item = &'s EndpointSlice> + Clone,
    port: Option<&Port>,
) -> Vec<Result<PodEndpoint, LeftOut>> {
    // A Service of both families has slices of each, with the same pods. A family has a slice even without endpoints, so
    // the choice does not change while pods come and go.
    let has_ipv4 = slices.clone().any(|slice| slice.address_type == "IPv4");
    let family = if has_ipv4 { "IPv4" } else { "IPv6" };
    let mut found: BTreeMap<String, PodEndpoint> = BTreeMap::new();
    let mut left_out = Vec::new();
    for slice in slices.filter(|slice| slice.address_type == family) {
        let port = port_of_slice(slice, port);
        for endpoint in &slice.endpoints {
            let endpoint = endpoint.as_ref();
            let endpoint = endpoint.map_err(|reason| LeftOut::Unreadable(reason.clone()));
            let endpoint = match endpoint.and_then(|endpoint| of_slice_endpoint(endpoint, &port)) {
                Ok(endpoint) => endpoint,
                Err(reason) => {
                    left_out.push(Err(reason));
                    continue;
                }
            };
            // While slices are rearranged an endpoint may be in two of them; the older copy may be outdated either way.
            match found.get_mut(&endpoint.uid) {
                Some(known) if known.is_serving || !endpoint.is_serving => {}
                Some(known) => *known = endpoint,
                None => {
                    found.insert(endpoint.uid.clone(), endpoint);
                }
            }
        }
    }
    found.into_values().map(Ok).chain(left_out).collect()
}

fn port_of_slice(slice: &EndpointSlice, wanted: Option<&Port>) -> Result<u16, LeftOut> {
    let mut ports = slice.ports.iter().flatten();
    let found = match wanted {
        Some(Port::Number(number)) => ports.find(|port| port.port == Some(*number)),
        Some(Port::Name(name)) => ports.find(|port| port.name.as_ref() == Some(name)),
        None => ports.next().filter(|_| ports.next().is_none()),
    };
    found.and_then(|port| port.port).ok_or_else(|| {
        LeftOut::NoPort(wanted.map_or_else(|| "(the only one)".to_owned(), Port::to_string))
    })
}

fn of_slice_endpoint(
    endpoint: &SliceEndpoint,
    port: &Result<u16, LeftOut>,
) -> Result<PodEndpoint, LeftOut> {
    // Of several addresses, which are of one pod, consumers use the first.
    let address = endpoint.addresses.first().ok_or(LeftOut::NoAddress)?;
    let address: IpAddr = address.parse().map_err(|_| LeftOut::NoAddress)?;
    let port = port.clone()?;
    let target = endpoint.target_ref.clone().unwrap_or_default();
    // Several engines may be at one address without a pod: each has a port, in a slice of its own.
    let or_address = |text: String| {
        if text.is_empty() {
            SocketAddr::new(address, port).to_string()
        } else {
            text
        }
    };
    let zone = endpoint.zone.iter().map(|zone| (ZONE_LABEL, zone));
    let node = endpoint.node_name.iter().map(|node| (NODE_LABEL, node));
    let labels = zone.chain(node);
    Ok(PodEndpoint {
        uid: or_address(target.uid),
        name: or_address(target.name),
        address,
        ports: vec![port],
        role: None,
        labels: labels
            .map(|(name, value)| (name.to_owned(), value.as_str().into()))
            .collect(),
        is_serving: is_serving(endpoint.conditions),
    })
}

/// `serving` is newer than `ready`, of which absent means ready; it ignores that the pod is terminating.
fn is_serving(conditions: SliceConditions) -> bool {
    let is_terminating = conditions.terminating.unwrap_or(false);
    let is_ready = conditions.ready.unwrap_or(true);
    !is_terminating && conditions.serving.unwrap_or(is_ready)
}

#[cfg(test)]
mod tests;
