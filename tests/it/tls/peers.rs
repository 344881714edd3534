//! Replicas that know each other by certificates.

use warmroute::config::Config;
use warmroute::http::tls::ServerSettings;

use super::ca::{Ca, Folder};
use crate::client;
use crate::cluster::{Engine, Router, eventually, fast};
use crate::peers::{are_connected, fleet_page, replica};

/// Settings with a certificate of `own`, by which others are verified by `trusted`.
fn tls(
    folder: &Folder,
    own: &Ca,
    trusted: &Ca,
    names: &[&str],
    allowed: &[&str],
) -> ServerSettings {
    ServerSettings {
        client_ca: folder.write("peers-ca.crt", &trusted.pem()),
        client_names: allowed.iter().map(|name| (*name).to_owned()).collect(),
        ..folder.server(&own.issue(names))
    }
}

fn secured(engines: &[Engine], others: &[&Router], tls: ServerSettings) -> Config {
    let mut config = replica(engines, others);
    config.peers.tls = Some(tls);
    config
}

#[tokio::test]
async fn replicas_with_certificates_of_one_ca_share_without_a_secret() {
    let (ca, folder) = (Ca::new("replicas"), Folder::new());
    let engines = [Engine::here("w0", fast()).await];
    let settings = tls(
        &folder,
        &ca,
        &ca,
        &["warmroute-peers"],
        &["warmroute-peers"],
    );
    let first = Router::here(&secured(&engines, &[], settings.clone())).await;
    let second = Router::here(&secured(&engines, &[&first], settings)).await;
    are_connected(&[&first, &second]).await;
    let page = client::get(first.admin, "/metrics").await;
    let ok = "warmroute_tls_handshakes_total{listener=\"peers\",outcome=\"ok\"}";
    assert!(page.text().contains(ok), "{}", page.text());
}

#[tokio::test]
async fn a_replica_of_another_ca_or_without_the_name_or_tls_is_not_connected() {
    let (ca, other) = (Ca::new("replicas"), Ca::new("others"));
    let folders = [Folder::new(), Folder::new(), Folder::new()];
    let engines = [Engine::here("w0", fast()).await];
    let name = "warmroute-peers";
    let first = tls(&folders[0], &ca, &ca, &[name], &[name]);
    let first = Router::here(&secured(&engines, &[], first)).await;
    // It trusts the first one, which does not trust it.
    let foreign = tls(&folders[1], &other, &ca, &[name], &[]);
    let foreign = Router::here(&secured(&engines, &[&first], foreign)).await;
    let unnamed = tls(&folders[2], &ca, &ca, &["other"], &[]);
    let unnamed = Router::here(&secured(&engines, &[&first], unnamed)).await;
    let plain = Router::here(&replica(&engines, &[&first])).await;
    let outcomes = ["client_certificate", "client_name", "not_tls"];
    eventually("each was refused", async || {
        let page = client::get(first.admin, "/metrics").await;
        outcomes.iter().all(|outcome| {
            let name = format!("{{listener=\"peers\",outcome=\"{outcome}\"}}");
            page.text().contains(&name)
        })
    })
    .await;
    let refused = "does not accept the certificate";
    for (router, reason) in [(&foreign, refused), (&unnamed, refused)] {
        eventually("its page says why", async || {
            let page = fleet_page(router).await;
            page["peers"].to_string().contains(reason)
        })
        .await;
    }
    for router in [&first, &foreign, &unnamed, &plain] {
        let page = fleet_page(router).await;
        let peers = page["peers"].as_array().unwrap();
        assert!(
            peers.iter().all(|peer| peer["state"] != "connected"),
            "{peers:?}"
        );
    }
}
