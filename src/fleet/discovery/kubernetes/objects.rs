//! The objects of the Kubernetes API, with no more of them than discovery reads. Pure.
//!
//! One that cannot be read is named with the reason, and fails neither the list nor the watch that it is part of. (kube's
//! `DeserializeGuard` does as much only for objects whose metadata can be read.)

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt::Debug;

use kube::Resource;
use kube::core::{NamespaceResourceScope, ObjectMeta};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer};
use serde_json::Value;

/// Reasons quote what was sent.
const MAX_REASON_CHARS: usize = 200;

/// What is read of one kind of object, and where the API has it.
pub(super) trait ObjectKind:
    Clone + Debug + DeserializeOwned + Send + Sync + 'static
{
    const KIND: &str;
    const PLURAL: &str;
    /// Empty for the core group.
    const GROUP: &str = "";
}

impl ObjectKind for Pod {
    const KIND: &str = "Pod";
    const PLURAL: &str = "pods";
}

impl ObjectKind for EndpointSlice {
    const KIND: &str = "EndpointSlice";
    const PLURAL: &str = "endpointslices";
    const GROUP: &str = "discovery.k8s.io";
}

impl ObjectKind for InferencePool {
    const KIND: &str = "InferencePool";
    const PLURAL: &str = "inferencepools";
    const GROUP: &str = "inference.networking.k8s.io";
}

#[derive(Clone, Debug)]
pub(super) struct Received<K> {
    /// Names, uid and version, as far as they can be read: a watch goes on after an object that cannot.
    metadata: ObjectMeta,
    /// What it says, or why it cannot be read.
    pub(super) object: Result<K, String>,
}

impl<K> Received<K> {
    pub(super) fn version(&self) -> Option<&str> {
        self.metadata.resource_version.as_deref()
    }

    /// By what it is remembered.
    pub(super) fn key(&self) -> &str {
        self.metadata.uid.as_deref().unwrap_or_else(|| self.name())
    }

    /// For the log.
    pub(super) fn name(&self) -> &str {
        let name = self.metadata.name.as_ref().or(self.metadata.uid.as_ref());
        name.map_or("without a name", String::as_str)
    }
}

impl<'de, K: DeserializeOwned> Deserialize<'de> for Received<K> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let object = Value::deserialize(deserializer)?;
        let text = |key: &str| object["metadata"][key].as_str().map(str::to_owned);
        Ok(Self {
            metadata: ObjectMeta {
                name: text("name"),
                namespace: text("namespace"),
                uid: text("uid"),
                resource_version: text("resourceVersion"),
                ..ObjectMeta::default()
            },
            object: K::deserialize(&object).map_err(|error| cut(&error.to_string())),
        })
    }
}

impl<K: ObjectKind> Resource for Received<K> {
    type DynamicType = ();
    type Scope = NamespaceResourceScope;

    fn kind((): &()) -> Cow<'_, str> {
        K::KIND.into()
    }

    fn group((): &()) -> Cow<'_, str> {
        K::GROUP.into()
    }

    fn version((): &()) -> Cow<'_, str> {
        "v1".into()
    }

    fn plural((): &()) -> Cow<'_, str> {
        K::PLURAL.into()
    }

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Pod {
    pub(super) metadata: PodMetadata,
    pub(super) spec: PodSpec,
    pub(super) status: PodStatus,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct PodMetadata {
    pub(super) uid: Option<String>,
    pub(super) name: Option<String>,
    pub(super) labels: Option<BTreeMap<String, String>>,
    pub(super) deletion_timestamp: Option<String>,
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

/// Reads each element of a list by itself; of one that cannot be read only the reason is known.
fn each<'de, T: DeserializeOwned, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Vec<Result<T, String>>, D::Error> {
    let elements = Option::<Vec<Value>>::deserialize(deserializer)?;
    let read = |element: Value| {
        let read = T::deserialize(&element);
        read.map_err(|error| cut(&format!("{error} in {element}")))
    };
    Ok(elements.unwrap_or_default().into_iter().map(read).collect())
}

fn cut(reason: &str) -> String {
    reason.chars().take(MAX_REASON_CHARS).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn check(object: Value, expected: Result<&str, &str>) {
        let found: Received<Pod> = serde_json::from_value(object).unwrap();
        let read = found.object.as_ref().map_err(|_| found.name());
        let read = read.map(|pod| pod.metadata.name.as_deref().unwrap_or_default());
        assert_eq!(read, expected);
    }

    #[test]
    fn what_cannot_be_read_is_known_by_its_name_if_there_is_one() {
        let with = |metadata: Value, spec: Value| json!({"metadata": metadata, "spec": spec});
        let pod = json!({"name": "a", "uid": "1"});
        check(with(pod.clone(), json!({})), Ok("a"));
        check(with(pod.clone(), json!({"containers": 5})), Err("a"));
        let port = json!({"containers": [{"ports": [{"containerPort": 70000}]}]});
        check(with(pod, port), Err("a"));
        // Also if it is the metadata that cannot be read.
        let labels = json!({"name": "a", "labels": [1]});
        check(with(labels, json!({})), Err("a"));
        check(with(json!({"uid": "1", "name": 5}), json!({})), Err("1"));
        for object in [json!(null), json!("pod"), json!({"metadata": 1})] {
            check(object, Err("without a name"));
        }
    }

    #[test]
    fn a_long_reason_is_cut() {
        let object = json!({"metadata": {}, "spec": "é".repeat(10_000)});
        let pod: Received<Pod> = serde_json::from_value(object).unwrap();
        let reason = pod.object.unwrap_err();
        assert_eq!(reason.chars().count(), MAX_REASON_CHARS);
    }
}
