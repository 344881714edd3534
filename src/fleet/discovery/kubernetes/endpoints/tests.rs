use serde_json::{Value, json};

use super::*;

fn pod(change: impl FnOnce(&mut Value)) -> Pod {
    let mut pod = json!({
        "metadata": {"name": "a", "uid": "u1", "labels": {"app": "vllm", "zone": "z1"}},
        "spec": {"containers": [{"ports": [{"name": "http", "containerPort": 8000}]}]},
        "status": {
            "phase": "Running",
            "podIP": "10.0.0.1",
            "podIPs": [{"ip": "10.0.0.1"}, {"ip": "fd00::1"}],
            "conditions": [{"type": "Initialized", "status": "True"}, {"type": "Ready", "status": "True"}],
        },
    });
    change(&mut pod);
    serde_json::from_value(pod).unwrap()
}

fn rules() -> Rules {
    Rules {
        role_label: "llm-d.ai/role".to_owned(),
        labels: vec!["zone".to_owned()],
        has_connector: true,
    }
}

fn check(change: impl FnOnce(&mut Value), expected: Result<bool, LeftOut>) {
    let ports = [Port::Name("http".to_owned())];
    let found = of_pod(&pod(change), &ports, &rules());
    assert_eq!(found.map(|endpoint| endpoint.is_serving), expected);
}

#[test]
fn a_ready_pod_is_a_worker_at_its_first_address() {
    let found = of_pod(
        &pod(|_| {}),
        &[Port::Number(9_000), Port::Name("http".to_owned())],
        &rules(),
    );
    let expected = PodEndpoint {
        uid: "u1".to_owned(),
        name: "a".to_owned(),
        address: "10.0.0.1".parse().unwrap(),
        ports: vec![9_000, 8_000],
        role: None,
        labels: [("zone".to_owned(), "z1".into())].into(),
        is_serving: true,
    };
    assert_eq!(found, Ok(expected));
}

#[test]
fn a_pod_that_is_not_ready_or_is_being_deleted_does_not_serve() {
    check(|_| {}, Ok(true));
    check(
        |pod| pod["status"]["conditions"][1]["status"] = json!("False"),
        Ok(false),
    );
    check(
        |pod| pod["status"]["conditions"][1]["status"] = json!("Unknown"),
        Ok(false),
    );
    check(|pod| pod["status"]["conditions"] = json!([]), Ok(false));
    check(
        |pod| pod["metadata"]["deletionTimestamp"] = json!("2026-11-01T00:00:00Z"),
        Ok(false),
    );
}

#[test]
fn a_pod_without_an_address_or_that_has_ended_is_no_worker() {
    check(
        |pod| pod["status"]["podIP"] = json!(""),
        Err(LeftOut::NoAddress),
    );
    check(
        |pod| drop(pod["status"].as_object_mut().unwrap().remove("podIP")),
        Err(LeftOut::NoAddress),
    );
    check(
        |pod| pod["status"]["podIP"] = json!("no address"),
        Err(LeftOut::NoAddress),
    );
    check(
        |pod| pod["status"]["phase"] = json!("Failed"),
        Err(LeftOut::Ended),
    );
    check(
        |pod| pod["status"]["phase"] = json!("Succeeded"),
        Err(LeftOut::Ended),
    );
    check(|pod| pod["status"] = json!({}), Err(LeftOut::NoAddress));
}

#[test]
fn a_named_port_is_that_of_any_container() {
    let named = |name: &str| Port::Name(name.to_owned());
    let of = |port| of_pod(&pod(|_| {}), &[port], &rules()).map(|endpoint| endpoint.ports);
    assert_eq!(of(named("http")), Ok(vec![8_000]));
    assert_eq!(of(named("grpc")), Err(LeftOut::NoPort("grpc".to_owned())));
    check(
        |pod| {
            let containers = pod["spec"]["containers"].take();
            pod["spec"] = json!({"initContainers": containers});
        },
        Ok(true),
    );
}

#[test]
fn the_role_is_what_the_label_says() {
    for (value, expected) in [
        ("prefill", Ok(Some(Role::Prefill))),
        ("decode", Ok(Some(Role::Decode))),
        ("both", Ok(Some(Role::Both))),
        ("prefill-decode", Ok(Some(Role::Both))),
        ("encode", Err(LeftOut::UnknownRole("encode".to_owned()))),
    ] {
        let pod = pod(|pod| pod["metadata"]["labels"]["llm-d.ai/role"] = json!(value));
        let role = |rules: &Rules| of_pod(&pod, &[], rules).map(|endpoint| endpoint.role);
        assert_eq!(role(&rules()), expected, "{value}");
        let without_label = Rules {
            role_label: String::new(),
            ..rules()
        };
        assert_eq!(role(&without_label), Ok(None));
    }
    let pod = pod(|pod| pod["metadata"]["labels"]["llm-d.ai/role"] = json!("decode"));
    let alone = Rules {
        has_connector: false,
        ..rules()
    };
    let refused = of_pod(&pod, &[], &alone).unwrap_err();
    assert_eq!(refused, LeftOut::RoleWithoutConnector(Role::Decode));
    assert!(
        refused
            .warning()
            .unwrap()
            .contains("prefill_decode.connector")
    );
}

fn slice(family: &str, endpoints: &Value) -> EndpointSlice {
    let slice = json!({
        "metadata": {"name": family, "uid": family},
        "addressType": family,
        "endpoints": endpoints,
        "ports": [{"name": "http", "port": 8000}],
    });
    serde_json::from_value(slice).unwrap()
}

fn endpoint(uid: &str, address: &str, conditions: &Value) -> Value {
    json!({
        "addresses": [address],
        "conditions": conditions,
        "targetRef": {"kind": "Pod", "name": uid, "uid": uid},
        "zone": "z1",
    })
}

fn found(slices: &[EndpointSlice]) -> Vec<(String, String, bool)> {
    let found = of_slices(slices.iter(), None).into_iter().flatten();
    let row = |endpoint: PodEndpoint| {
        (
            endpoint.uid,
            endpoint.address.to_string(),
            endpoint.is_serving,
        )
    };
    found.map(row).collect()
}

#[test]
fn an_endpoint_serves_by_serving_or_else_ready_unless_it_terminates() {
    for (conditions, expected) in [
        (json!({}), true),
        (json!({"ready": true}), true),
        (json!({"ready": false}), false),
        (json!({"ready": null}), true),
        (json!({"ready": false, "serving": true}), true),
        (json!({"ready": true, "serving": false}), false),
        (
            json!({"ready": false, "serving": true, "terminating": true}),
            false,
        ),
        (json!({"ready": true, "terminating": true}), false),
        (json!({"ready": true, "terminating": false}), true),
    ] {
        let slices = [slice(
            "IPv4",
            &json!([endpoint("a", "10.0.0.1", &conditions)]),
        )];
        assert_eq!(
            found(&slices),
            [("a".to_owned(), "10.0.0.1".to_owned(), expected)],
            "{conditions}"
        );
    }
}

#[test]
fn of_two_families_one_counts_and_it_stays_the_same_while_pods_leave() {
    let ready = json!({"ready": true});
    let v6 = slice("IPv6", &json!([endpoint("a", "fd00::1", &ready)]));
    let v4 = slice("IPv4", &json!([endpoint("a", "10.0.0.1", &ready)]));
    let row = |address: &str| ("a".to_owned(), address.to_owned(), true);
    assert_eq!(found(&[v6.clone(), v4]), [row("10.0.0.1")]);
    assert_eq!(found(std::slice::from_ref(&v6)), [row("fd00::1")]);
    // Without endpoints the list is null.
    assert_eq!(found(&[v6, slice("IPv4", &Value::Null)]), []);
}

#[test]
fn an_endpoint_that_cannot_be_read_costs_no_other_one_of_its_slice() {
    let ready = json!({"ready": true});
    let mut bad = endpoint("b", "10.0.0.2", &ready);
    bad["addresses"] = json!([5]);
    let endpoints = json!([endpoint("a", "10.0.0.1", &ready), bad, null]);
    let slices = [slice("IPv4", &endpoints)];
    let a = ("a".to_owned(), "10.0.0.1".to_owned(), true);
    assert_eq!(found(&slices), [a]);
    let warnings: Vec<String> = of_slices(slices.iter(), None)
        .into_iter()
        .filter_map(|object| object.err()?.warning())
        .collect();
    assert_eq!(warnings.len(), 2);
    assert!(warnings[0].contains(r#""name":"b""#), "{warnings:?}");
}

#[test]
fn an_endpoint_in_two_slices_is_one_worker() {
    let ready = slice(
        "IPv4",
        &json!([endpoint("a", "10.0.0.1", &json!({"ready": true}))]),
    );
    let not_ready = slice(
        "IPv4",
        &json!([endpoint("a", "10.0.0.1", &json!({"ready": false}))]),
    );
    let expected = [("a".to_owned(), "10.0.0.1".to_owned(), true)];
    assert_eq!(found(&[ready.clone(), not_ready.clone()]), expected);
    assert_eq!(found(&[not_ready, ready]), expected);
}

#[test]
fn each_port_of_an_address_without_a_pod_is_a_worker() {
    let of_port = |port: u16| {
        let endpoints = json!([{"addresses": ["10.0.0.1"], "conditions": {"ready": true}}]);
        let mut slice = slice("IPv4", &endpoints);
        slice.ports.as_mut().unwrap()[0].port = Some(port);
        slice
    };
    let http = Port::Name("http".to_owned());
    let found = of_slices([of_port(8_000), of_port(8_001)].iter(), Some(&http));
    let found: Vec<(String, Vec<u16>)> = found
        .into_iter()
        .flatten()
        .map(|endpoint| (endpoint.name, endpoint.ports))
        .collect();
    let expected = [8_000, 8_001].map(|port| (format!("10.0.0.1:{port}"), vec![port]));
    assert_eq!(found, expected);
}

#[test]
fn a_port_of_a_service_is_found_by_name_number_or_because_it_is_the_only_one() {
    let slice = slice("IPv4", &json!([endpoint("a", "10.0.0.1", &json!({}))]));
    let port = |wanted: Option<Port>, slice: &EndpointSlice| {
        let found = of_slices(std::iter::once(slice), wanted.as_ref());
        found
            .into_iter()
            .next()
            .unwrap()
            .map(|endpoint| endpoint.ports)
    };
    let name = |name: &str| Some(Port::Name(name.to_owned()));
    assert_eq!(port(None, &slice), Ok(vec![8_000]));
    assert_eq!(port(name("http"), &slice), Ok(vec![8_000]));
    assert_eq!(port(Some(Port::Number(8_000)), &slice), Ok(vec![8_000]));
    assert!(matches!(
        port(name("grpc"), &slice),
        Err(LeftOut::NoPort(_))
    ));
    let mut two = slice;
    let second = two.ports.as_ref().unwrap()[0].clone();
    two.ports.as_mut().unwrap().push(second);
    assert!(matches!(port(None, &two), Err(LeftOut::NoPort(_))));
}

#[test]
fn zone_and_node_of_an_endpoint_are_labels_of_the_worker() {
    let mut row = endpoint("a", "10.0.0.1", &json!({}));
    row["nodeName"] = json!("n1");
    let slice = slice("IPv4", &json!([row]));
    let found = of_slices(std::iter::once(&slice), None).remove(0).unwrap();
    assert_eq!(&*found.labels[ZONE_LABEL], "z1");
    assert_eq!(&*found.labels[NODE_LABEL], "n1");
}
