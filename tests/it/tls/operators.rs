//! Operators with client certificates, whose names have roles.

use std::process::Command;

use warmroute::admin::{NamesByRole, Tokens};
use warmroute::http::tls::{ClientAuth, ServerSettings};
use warmroute::secret::Secret;

use super::ca::{Ca, Folder};
use super::client::Client;
use crate::cluster::{Router, config};

#[tokio::test]
async fn an_operators_certificate_has_the_role_of_its_name() {
    let (ca, folder) = (Ca::new("operators"), Folder::new());
    for has_tokens in [false, true] {
        let mut config = config();
        config.admin.tls = Some(ServerSettings {
            client_ca: folder.write("client-ca.crt", &ca.pem()),
            client_auth: ClientAuth::Optional,
            ..folder.server(&ca.issue(&["localhost"]))
        });
        config.admin.client_names = NamesByRole {
            read: vec!["dashboard.example.com".to_owned()],
            operate: vec!["spiffe://example.com/operator".to_owned()],
        };
        if has_tokens {
            config.admin.tokens = Tokens {
                operate: vec![Secret::new("operator-0123456789")],
                ..Tokens::default()
            };
        }
        let router = Router::here(&config).await;
        let admin = router.admin;
        // Where a token could help, a client that has neither is asked for one.
        let no_role = if has_tokens { 401 } else { 403 };
        let with = |name: &str| Client::with_certificate(&ca, &ca.issue(&[name]));
        for (client, read, operate) in [
            (Client::new(&ca), no_role, no_role),
            (with("other.example.com"), no_role, no_role),
            (with("dashboard.example.com"), 200, 403),
            // No worker has this name.
            (with("spiffe://example.com/operator"), 200, 404),
        ] {
            let status = async |method: &str, path: &str| {
                let answer = client.send(admin, method, path, "").await;
                answer.unwrap().status
            };
            // As the kubelet and Prometheus, which have no certificate.
            assert_eq!(status("GET", "/healthz").await, 200);
            assert_eq!(status("GET", "/metrics").await, 200);
            assert_eq!(status("GET", "/fleet").await, read);
            assert_eq!(
                client.get_http2(admin, "/fleet").await.unwrap().status,
                read
            );
            assert_eq!(status("POST", "/undrain?worker=unknown").await, operate);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_is_compared_with_what_runs_behind_tls() {
    let (ca, folder) = (Ca::new("operators"), Folder::new());
    let mut config = config();
    config.admin.tls = Some(folder.server(&ca.issue(&["localhost"])));
    let router = Router::here(&config).await;
    let url = format!("https://localhost:{}", router.admin.port());
    let authority = folder.write("ca.crt", &ca.pem());
    let file = folder.write(
        "new.yaml",
        "workers: [\"http://127.0.0.1:1\"]\nrouting: {policy: random}\n",
    );
    let diff = move |arguments: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_warmroute"))
            .args(["config", "diff", &file, "--url", &url])
            .args(arguments)
            .output()
            .unwrap();
        let text = [output.stdout, output.stderr].concat();
        (output.status.code(), String::from_utf8(text).unwrap())
    };
    let diffs = move || (diff(&["--ca", &authority]), diff(&[]));
    let (with_ca, without) = tokio::task::spawn_blocking(diffs).await.unwrap();
    assert_eq!(with_ca.0, Some(1), "{with_ca:?}");
    let changed = "~ routing.policy: cache_aware -> random";
    assert!(with_ca.1.contains(changed), "{with_ca:?}");
    assert_eq!(without.0, Some(2), "{without:?}");
    let reason = "is not signed by a CA of `tls.ca`";
    assert!(without.1.contains(reason), "{without:?}");
}
