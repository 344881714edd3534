//! An object as the Kubernetes API sent it: read, or named with the reason why it cannot be read. One object that cannot be
//! read fails neither the list nor the watch that it is part of. Pure.

use std::borrow::Cow;

use kube::Resource;
use kube::core::ObjectMeta;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer};
use serde_json::Value;

/// Reasons quote what was sent.
const MAX_REASON_CHARS: usize = 200;

#[derive(Clone, Debug)]
pub(super) enum Received<K> {
    Object(K),
    Unreadable(Box<Unreadable>),
}

/// An object that cannot be read.
#[derive(Clone, Debug)]
pub(super) struct Unreadable {
    /// As much as can be read of it.
    metadata: ObjectMeta,
    pub(super) reason: String,
}

impl Unreadable {
    pub(super) fn uid(&self) -> Option<&str> {
        self.metadata.uid.as_deref()
    }

    /// For the log.
    pub(super) fn name(&self) -> &str {
        let name = self.metadata.name.as_deref().or(self.uid());
        name.unwrap_or("without a name")
    }

    fn new(object: &Value, error: &serde_json::Error) -> Self {
        let metadata = &object["metadata"];
        let text = |key: &str| metadata[key].as_str().map(str::to_owned);
        Self {
            metadata: ObjectMeta {
                name: text("name"),
                namespace: text("namespace"),
                uid: text("uid"),
                // A watch goes on after it.
                resource_version: text("resourceVersion"),
                ..ObjectMeta::default()
            },
            reason: cut(&error.to_string()),
        }
    }
}

impl<'de, K: DeserializeOwned> Deserialize<'de> for Received<K> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let object = Value::deserialize(deserializer)?;
        Ok(match K::deserialize(&object) {
            Ok(read) => Self::Object(read),
            Err(error) => Self::Unreadable(Box::new(Unreadable::new(&object, &error))),
        })
    }
}

impl<K: Resource> Resource for Received<K> {
    type DynamicType = K::DynamicType;
    type Scope = K::Scope;

    fn kind(dynamic: &K::DynamicType) -> Cow<'_, str> {
        K::kind(dynamic)
    }

    fn group(dynamic: &K::DynamicType) -> Cow<'_, str> {
        K::group(dynamic)
    }

    fn version(dynamic: &K::DynamicType) -> Cow<'_, str> {
        K::version(dynamic)
    }

    fn plural(dynamic: &K::DynamicType) -> Cow<'_, str> {
        K::plural(dynamic)
    }

    fn meta(&self) -> &ObjectMeta {
        match self {
            Self::Object(object) => object.meta(),
            Self::Unreadable(object) => &object.metadata,
        }
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        match self {
            Self::Object(object) => object.meta_mut(),
            Self::Unreadable(object) => &mut object.metadata,
        }
    }
}

/// Reads each element of a list by itself; of one that cannot be read only the reason is known.
pub(super) fn each<'de, T: DeserializeOwned, D: Deserializer<'de>>(
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

    use super::super::objects::Pod;
    use super::*;

    fn check(object: Value, expected: Result<&str, &str>) {
        let found: Received<Pod> = serde_json::from_value(object).unwrap();
        let found = match &found {
            Received::Object(pod) => Ok(pod.metadata.name.as_deref().unwrap_or_default()),
            Received::Unreadable(object) => Err(object.name()),
        };
        assert_eq!(found, expected);
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
        let Received::Unreadable(pod) = serde_json::from_value::<Received<Pod>>(object).unwrap()
        else {
            panic!("it is no pod");
        };
        assert_eq!(pod.reason.chars().count(), MAX_REASON_CHARS);
    }
}
