//! Tokens, certificates and permissions.

use std::process::Command;

use warmroute::config::reader;

use super::fake::FakeApi;
use super::*;
use crate::cluster::Router;
use crate::localhost_tls::tls;

#[tokio::test]
async fn a_service_accounts_token_may_change() {
    let api = FakeApi::start().await;
    put_pods(&api, &["a"]);
    api.set(|faults| faults.tokens = vec!["first".to_owned()]);
    let token = Removed::new("first");
    let file = kubeconfig(&api, &json!({"tokenFile": token.0.to_str()}));
    let router = Routed::with_kubeconfig(file, vllm(), |_| {}).await;
    router.serves(&["a"]).await;
    // As kubelet does: the old one is good for a while.
    api.set(|faults| faults.tokens.push("second".to_owned()));
    std::fs::write(&token.0, "second").unwrap();
    api.set(|faults| drop(faults.tokens.remove(0)));
    put_pods(&api, &["b"]);
    api.drop_connections();
    eventually("the new token is used", async || {
        router.serving() == ["a", "b"]
    })
    .await;
    // An expired one: the workers stay until there is another.
    api.set(|faults| faults.tokens = vec!["third".to_owned()]);
    api.drop_connections();
    put_pods(&api, &["c"]);
    eventually("the API refuses it", async || {
        router
            .metric("warmroute_kubernetes_failures_total", "unauthorized")
            .await
            >= 1.0
    })
    .await;
    assert_eq!(router.serving(), ["a", "b"]);
    std::fs::write(&token.0, "third").unwrap();
    router.serves(&["a", "b", "c"]).await;
}

#[tokio::test]
async fn the_api_is_asked_over_tls_with_its_own_ca_and_no_other() {
    let (ca, acceptor) = tls(&[]);
    let api = FakeApi::with_tls(Some(acceptor)).await;
    put_pods(&api, &["a"]);
    let server = format!("https://{}", api.address);
    let with_ca = |ca: &str| {
        let ca = Removed::new(ca);
        let cluster = json!({"server": server, "certificate-authority": ca.0.to_str()});
        (ca, kubeconfig_of(&cluster, &json!({"token": "t"})))
    };
    let (_ca, file) = with_ca(&ca);
    let router = Routed::with_kubeconfig(file, vllm(), |_| {}).await;
    router.serves(&["a"]).await;
    let (_other, file) = with_ca(&tls(&[]).0);
    let router = Routed::with_kubeconfig(file, vllm(), |_| {}).await;
    eventually("the certificate is refused", async || {
        router
            .metric("warmroute_kubernetes_failures_total", "connection")
            .await
            >= 1.0
    })
    .await;
    assert_eq!(router.serving(), Vec::<String>::new());
}

fn config_of(file: &Removed, mut entry: Settings) -> Config {
    entry.kubeconfig = file.0.display().to_string();
    let mut config = cluster::config();
    config.discovery = vec![DiscoveryEntry::Kubernetes(Box::new(entry))];
    config
}

/// What `check --live` prints, and whether it is content.
fn check_live(config: &Config) -> (String, bool) {
    let file = Removed::new(&reader::to_yaml(config).unwrap());
    let mut command = Command::new(env!("CARGO_BIN_EXE_warmroute"));
    let run = command
        .args(["check", "--live", "--config"])
        .arg(&file.0)
        .output()
        .unwrap();
    let printed = String::from_utf8_lossy(&run.stdout).into_owned();
    (
        printed + &String::from_utf8_lossy(&run.stderr),
        run.status.success(),
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn the_live_check_names_the_permission_that_is_missing() {
    let api = FakeApi::start().await;
    put_pods(&api, &["a"]);
    let file = kubeconfig(&api, &json!({}));
    let config = config_of(&file, vllm());
    let (printed, _) = check_live(&config);
    assert!(printed.contains("127.1.0.1:8000"), "{printed}");
    assert!(!printed.contains("cannot list workers"), "{printed}");
    for verb in ["list", "watch"] {
        api.set(|faults| faults.forbidden = vec![(verb, "pods")]);
        let (printed, is_good) = check_live(&config);
        assert!(!is_good);
        for part in [
            &*format!("cannot {verb} pods in the namespace `llm`"),
            "needs a Role with the verbs get, list and watch for `pods`",
        ] {
            assert!(printed.contains(part), "{part}: {printed}");
        }
    }
    drop(api);
    let (printed, is_good) = check_live(&config);
    assert!(!is_good && printed.contains("refused"), "{printed}");
}

#[tokio::test(flavor = "multi_thread")]
async fn each_reason_is_logged_once_and_an_empty_fleet_loudly() {
    let api = FakeApi::start().await;
    put_pods(&api, &["a"]);
    api.set(|faults| faults.forbidden = vec![("list", "pods")]);
    let file = kubeconfig(&api, &json!({}));
    let router = Router::child(&config_of(&file, vllm())).await;
    let count = |text: &str| router.log().matches(text).count();
    eventually("it was refused several times", async || {
        let page = crate::client::get(router.admin, "/metrics").await;
        let refused = r#"reason="forbidden",request="list"} "#;
        let mut lines = page.text().lines();
        lines.any(|line| line.contains(refused) && !line.ends_with(" 1") && !line.ends_with(" 2"))
    })
    .await;
    assert_eq!(count("needs a Role with the verbs"), 1, "{}", router.log());
    api.set(|faults| faults.forbidden.clear());
    eventually("it is let in", async || {
        count("the Kubernetes API answers again") == 1
    })
    .await;
    eventually("the pod has joined", async || count("worker joined") == 1).await;
    api.delete("pods", "a");
    eventually("the empty fleet is logged", async || {
        count("lists no workers") == 1
    })
    .await;
    assert!(!router.log().contains("kube_"), "{}", router.log());
}
