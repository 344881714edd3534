//! Certificates that change while the router runs.

use std::net::SocketAddr;
use std::os::unix::fs::symlink;

use rustls::pki_types::CertificateDer;
use warmroute::http::tls::ServerSettings;

use super::ca::{Ca, Folder, Pair};
use super::client::{Client, metric};
use crate::client;
use crate::cluster::{Cluster, eventually, fast};

/// The certificate that the listener presents.
async fn presented(client: &Client, api: SocketAddr) -> CertificateDer<'static> {
    let stream = client.connect(api, "http/1.1").await.unwrap();
    let chain = stream.get_ref().1.peer_certificates().unwrap();
    chain[0].clone().into_owned()
}

async fn becomes(client: &Client, api: SocketAddr, pair: &Pair) {
    eventually("new connections get the new certificate", async || {
        presented(client, api).await == pair.chain()[0]
    })
    .await;
}

async fn page(cluster: &Cluster) -> String {
    let page = client::get(cluster.router.admin, "/metrics").await;
    page.text().to_owned()
}

const FAILED: &str = "warmroute_tls_certificate_reloads_total{outcome=\"failed\",use=\"api\"}";
const IS_CURRENT: &str = "warmroute_tls_certificate_last_reload_successful{";
const EXPIRY: &str = "warmroute_tls_certificate_expiry_timestamp_seconds{";

#[tokio::test]
async fn a_new_pair_is_used_and_a_bad_one_keeps_the_old_one() {
    let (ca, folder) = (Ca::new("clients"), Folder::new());
    let (first, second) = (
        ca.issue(&["localhost"]),
        ca.issue_for_years(&["localhost"], 2020, 2090),
    );
    let settings = folder.server(&first);
    let cluster = Cluster::start(vec![fast()], |config| config.api.tls = Some(settings)).await;
    let (client, api) = (Client::new(&ca), cluster.router.api);
    let kept = client.connect(api, "http/1.1").await.unwrap();
    assert_eq!(presented(&client, api).await, first.chain()[0]);

    // A certificate without its key.
    folder.write("tls.crt", &second.certificate);
    eventually("the bad pair is counted", async || {
        metric(&page(&cluster).await, FAILED) == Some(1.0)
    })
    .await;
    assert_eq!(metric(&page(&cluster).await, IS_CURRENT), Some(0.0));
    assert_eq!(presented(&client, api).await, first.chain()[0]);

    folder.write("tls.key", &second.key);
    becomes(&client, api, &second).await;
    assert_eq!(metric(&page(&cluster).await, IS_CURRENT), Some(1.0));
    // 2090-01-01.
    assert_eq!(metric(&page(&cluster).await, EXPIRY), Some(3_786_912_000.0));

    // An expired one is no better.
    let expired = ca.issue_for_years(&["localhost"], 2020, 2021);
    folder.write("tls.crt", &expired.certificate);
    folder.write("tls.key", &expired.key);
    eventually("the expired one is counted", async || {
        metric(&page(&cluster).await, FAILED) >= Some(2.0)
    })
    .await;
    assert_eq!(presented(&client, api).await, second.chain()[0]);
    // Connections from before go on.
    let answer = super::client::answer(kept, api, "GET", "/health", "".into()).await;
    assert_eq!(answer.unwrap().status, 200);
}

#[tokio::test]
async fn the_swap_of_a_mounted_volume_is_followed() {
    let (ca, folder) = (Ca::new("clients"), Folder::new());
    let pairs = [ca.issue(&["localhost"]), ca.issue(&["localhost"])];
    for (version, pair) in ["..1", "..2"].iter().zip(&pairs) {
        let volume = folder.path().join(version);
        std::fs::create_dir_all(&volume).unwrap();
        std::fs::write(volume.join("tls.crt"), &pair.certificate).unwrap();
        std::fs::write(volume.join("tls.key"), &pair.key).unwrap();
    }
    let at = |name: &str| folder.path().join(name);
    symlink("..1", at("..data")).unwrap();
    for name in ["tls.crt", "tls.key"] {
        symlink(format!("..data/{name}"), at(name)).unwrap();
    }
    let settings = ServerSettings {
        certificate: at("tls.crt").to_str().unwrap().to_owned(),
        key: at("tls.key").to_str().unwrap().to_owned(),
        ..ServerSettings::default()
    };
    let cluster = Cluster::start(vec![fast()], |config| config.api.tls = Some(settings)).await;
    let (client, api) = (Client::new(&ca), cluster.router.api);
    assert_eq!(presented(&client, api).await, pairs[0].chain()[0]);
    symlink("..2", at("..new")).unwrap();
    std::fs::rename(at("..new"), at("..data")).unwrap();
    becomes(&client, api, &pairs[1]).await;
    assert_eq!(metric(&page(&cluster).await, FAILED), None);
}
