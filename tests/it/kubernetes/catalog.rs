//! The pages by which kubectl finds out what the fake API server has.

use serde_json::{Value, json};

use super::fake::KINDS;

pub(super) fn page(path: &str) -> Option<Value> {
    let groups = KINDS.iter().filter(|kind| kind.2 != "v1").map(|kind| {
        let (group, version) = kind.2.split_once('/').unwrap();
        let version = json!({"groupVersion": kind.2, "version": version});
        json!({"name": group, "versions": [version], "preferredVersion": version})
    });
    let page = match path {
        "/version" => json!({"major": "1", "minor": "37", "gitVersion": "v1.37.0"}),
        "/api" => json!({"kind": "APIVersions", "versions": ["v1"]}),
        "/apis" => json!({
            "kind": "APIGroupList", "apiVersion": "v1", "groups": groups.collect::<Vec<_>>(),
        }),
        path => {
            let (plural, kind, version, _) = KINDS.into_iter().find(|kind| kind.3 == path)?;
            let resource = json!({
                "name": plural, "singularName": kind.to_lowercase(), "namespaced": true, "kind": kind,
                "verbs": ["delete", "get", "list", "watch"],
            });
            json!({
                "kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version,
                "resources": [resource],
            })
        }
    };
    Some(page)
}
