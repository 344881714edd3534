//! A real kubectl against the fake API server: that the fake answers as Kubernetes does, where discovery relies on it.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use super::fake::{FakeApi, names};
use super::*;

/// `make manifests` says where it is.
fn kubectl(file: &Removed, arguments: &[&str]) -> Command {
    let path = std::env::var("WARMROUTE_KUBECTL").expect("the path of kubectl");
    let mut command = Command::new(path);
    command.arg("--kubeconfig").arg(&file.0).args(arguments);
    // Its cache of what the server has.
    command.env("HOME", file.0.with_extension("home"));
    command
}

fn run(file: &Removed, arguments: &[&str]) -> String {
    let run = kubectl(file, arguments).output().unwrap();
    let error = String::from_utf8_lossy(&run.stderr);
    assert!(run.status.success(), "{arguments:?}: {error}");
    String::from_utf8(run.stdout).unwrap()
}

struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs kubectl: make manifests"]
async fn kubectl_lists_pages_selects_watches_and_deletes() {
    let api = FakeApi::start().await;
    put_pods(&api, &["a", "b", "c", "d", "e"]);
    let mut other = named_pod("x");
    other["metadata"]["labels"]["app"] = json!("other");
    api.put("pods", other);
    let file = kubeconfig(&api, &json!({}));
    let lines = |text: &str| text.lines().map(str::to_owned).collect::<Vec<_>>();
    let listed = run(&file, &["get", "pods", "-o", "name"]);
    assert_eq!(lines(&listed).len(), 6, "{listed}");
    let before = api.count("list", "pods");
    let paged = run(
        &file,
        &[
            "get",
            "pods",
            "-l",
            "app in (vllm)",
            "--chunk-size=2",
            "-o",
            "name",
        ],
    );
    assert_eq!(lines(&paged), ["pod/a", "pod/b", "pod/c", "pod/d", "pod/e"]);
    assert_eq!(api.count("list", "pods"), before + 3);
    let json = run(&file, &["get", "pods", "-l", "app!=vllm", "-o", "json"]);
    let json: Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["items"][0]["metadata"]["name"], "x");

    let arguments = [
        "get",
        "pods",
        "-l",
        "app=vllm",
        "--watch",
        "--output-watch-events",
    ];
    let mut watching = kubectl(&file, &arguments)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut events = BufReader::new(watching.stdout.take().unwrap()).lines();
    let _watching = Killed(watching);
    let mut next = || events.next().unwrap().unwrap();
    assert!(next().starts_with("EVENT"), "the head of a table");
    let first: Vec<String> = (0..5).map(|_| next()).collect();
    assert!(first.iter().all(|line| line.contains("ADDED")), "{first:?}");
    put_pods(&api, &["f"]);
    assert!(next().contains("ADDED"));
    api.put("pods", with_ready(named_pod("f"), false));
    assert!(next().contains("MODIFIED"));
    let mut moved = named_pod("f");
    moved["metadata"]["labels"]["app"] = json!("other");
    api.put("pods", moved);
    assert!(next().contains("DELETED"), "it does not match any more");
    run(&file, &["delete", "pod", "a", "--wait=false"]);
    assert!(next().contains("DELETED"));
    assert_eq!(names(&api, "app=vllm").len(), 4);

    let slice =
        json!({"metadata": {"name": "s"}, "addressType": "IPv4", "endpoints": [], "ports": []});
    api.put("endpointslices", slice);
    let pool = json!({"metadata": {"name": "p"}, "spec": {"selector": {"matchLabels": {}}, "targetPorts": []}});
    api.put("inferencepools", pool);
    let named = ["get", "endpointslices,inferencepools", "-o", "name"];
    let listed = run(&file, &named);
    assert_eq!(lines(&listed).len(), 2, "{listed}");
    let one = [
        "get",
        "inferencepools",
        "--field-selector",
        "metadata.name=p",
        "-o",
        "name",
    ];
    assert_eq!(lines(&run(&file, &one)).len(), 1);

    api.set(|faults| faults.forbidden = vec![("list", "pods")]);
    let refused = kubectl(&file, &["get", "pods"]).output().unwrap();
    let refused = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(
        refused.contains("Error from server (Forbidden)"),
        "{refused}"
    );
    api.set(|faults| (faults.forbidden, faults.tokens) = (Vec::new(), vec!["t".to_owned()]));
    let refused = kubectl(&file, &["get", "pods", "--raw=/api/v1/namespaces/llm/pods"])
        .output()
        .unwrap();
    assert!(!refused.status.success());
}
