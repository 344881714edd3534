//! The objects of the Kubernetes API, with no more of them than discovery reads. Pure.

use std::borrow::Cow;
use std::collections::BTreeMap;

use kube::Resource;
use kube::core::{NamespaceResourceScope, ObjectMeta};
use serde::Deserialize;

use super::received::each;

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Pod {
    pub(super) metadata: ObjectMeta,
    pub(super) spec: PodSpec,
    pub(super) status: PodStatus,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct PodSpec {
    pub(super) containers: Vec<Container>,
    /// Init containers that keep running (sidecars) have ports, too.
    pub(super) init_containers: Vec<Container>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Container {
    pub(super) ports: Vec<ContainerPort>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct ContainerPort {
    pub(super) name: String,
    pub(super) container_port: u16,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct PodStatus {
    pub(super) phase: String,
    #[serde(rename = "podIP")]
    pub(super) pod_ip: String,
    pub(super) conditions: Vec<Condition>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Condition {
    #[serde(rename = "type")]
    pub(super) kind: String,
    pub(super) status: String,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct EndpointSlice {
    pub(super) metadata: ObjectMeta,
    pub(super) address_type: String,
    /// One that cannot be read costs no other one.
    #[serde(deserialize_with = "each")]
    pub(super) endpoints: Vec<Result<SliceEndpoint, String>>,
    pub(super) ports: Option<Vec<SlicePort>>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct SliceEndpoint {
    pub(super) addresses: Vec<String>,
    pub(super) conditions: SliceConditions,
    pub(super) target_ref: Option<TargetRef>,
    pub(super) zone: Option<String>,
    pub(super) node_name: Option<String>,
}

#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct SliceConditions {
    pub(super) ready: Option<bool>,
    pub(super) serving: Option<bool>,
    pub(super) terminating: Option<bool>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct TargetRef {
    pub(super) name: String,
    pub(super) uid: String,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct SlicePort {
    pub(super) name: Option<String>,
    pub(super) port: Option<u16>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct InferencePool {
    pub(super) metadata: ObjectMeta,
    pub(super) spec: PoolSpec,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct PoolSpec {
    pub(super) selector: PoolSelector,
    pub(super) target_ports: Vec<TargetPort>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct PoolSelector {
    pub(super) match_labels: BTreeMap<String, String>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct TargetPort {
    pub(super) number: u16,
}

impl InferencePool {
    /// The selector as the API takes it.
    pub(super) fn selector(&self) -> String {
        let labels = self.spec.selector.match_labels.iter();
        let labels: Vec<String> = labels
            .map(|(name, value)| format!("{name}={value}"))
            .collect();
        labels.join(",")
    }
}

/// Where the API has the objects of a type.
macro_rules! resource {
    ($type:ty, $group:literal, $kind:literal, $plural:literal) => {
        impl Resource for $type {
            type DynamicType = ();
            type Scope = NamespaceResourceScope;

            fn kind((): &()) -> Cow<'_, str> {
                $kind.into()
            }

            fn group((): &()) -> Cow<'_, str> {
                $group.into()
            }

            fn version((): &()) -> Cow<'_, str> {
                "v1".into()
            }

            fn plural((): &()) -> Cow<'_, str> {
                $plural.into()
            }

            fn meta(&self) -> &ObjectMeta {
                &self.metadata
            }

            fn meta_mut(&mut self) -> &mut ObjectMeta {
                &mut self.metadata
            }
        }
    };
}

resource!(Pod, "", "Pod", "pods");
resource!(
    EndpointSlice,
    "discovery.k8s.io",
    "EndpointSlice",
    "endpointslices"
);
resource!(
    InferencePool,
    "inference.networking.k8s.io",
    "InferencePool",
    "inferencepools"
);
