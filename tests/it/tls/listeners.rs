//! Clients over TLS: protocols, versions and certificates.

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use warmroute::http::tls::{ClientAuth, MinVersion, ServerSettings};

use super::ca::{Ca, Folder};
use super::client::{self as tls, Client, handshakes};
use crate::client;
use crate::cluster::{Cluster, chat, eventually, fast};

/// One engine behind a router whose API has TLS.
async fn cluster(settings: ServerSettings) -> Cluster {
    Cluster::start(vec![fast()], |config| config.api.tls = Some(settings)).await
}

#[tokio::test]
async fn clients_are_served_over_http1_and_http2() {
    let (ca, folder) = (Ca::new("clients"), Folder::new());
    let cluster = cluster(folder.server(&ca.issue(&["localhost"]))).await;
    let (client, api) = (Client::new(&ca), cluster.router.api);
    assert_eq!(client.get(api, "/v1/models").await.unwrap().status, 200);
    assert_eq!(
        client.get_http2(api, "/v1/models").await.unwrap().status,
        200
    );
    let body = chat("over TLS", 40, true);
    let answer = client
        .send(api, "POST", "/v1/chat/completions", body)
        .await
        .unwrap();
    assert_eq!(answer.status, 200);
    assert!(
        answer.text().ends_with("data: [DONE]\n\n"),
        "{}",
        answer.text()
    );
    // A client without ALPN.
    let stream = client.connect(api, "").await.unwrap();
    let answer = tls::answer(stream, api, "GET", "/v1/models", "".into())
        .await
        .unwrap();
    assert_eq!(answer.status, 200);
    assert_eq!(handshakes(cluster.router.admin, "ok").await, 4);
}

#[tokio::test]
async fn a_kept_connection_is_served_again_after_it_was_parked() {
    let (ca, folder) = (Ca::new("clients"), Folder::new());
    let cluster = cluster(folder.server(&ca.issue(&["localhost"]))).await;
    let api = cluster.router.api;
    let mut stream = Client::new(&ca).connect(api, "http/1.1").await.unwrap();
    let mut received = vec![0; 16 << 10];
    for pause in [2_500, 0] {
        let request = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n";
        stream.write_all(request).await.unwrap();
        let length = stream.read(&mut received).await.unwrap();
        assert!(received[..length].starts_with(b"HTTP/1.1 200"));
        // Longer than a connection keeps its buffers without a request.
        tokio::time::sleep(std::time::Duration::from_millis(pause)).await;
    }
    assert_eq!(handshakes(cluster.router.admin, "ok").await, 1);
}

#[tokio::test]
async fn operators_are_served_over_tls() {
    let (ca, folder) = (Ca::new("operators"), Folder::new());
    let settings = folder.server(&ca.issue(&["localhost"]));
    let mut config = crate::cluster::config();
    config.admin.tls = Some(settings);
    config.workers = vec!["http://127.0.0.1:1".to_owned().into()];
    let router = crate::cluster::Router::here(&config).await;
    let answer = Client::new(&ca)
        .get(router.admin, "/metrics")
        .await
        .unwrap();
    let expiry = tls::metric(
        answer.text(),
        "warmroute_tls_certificate_expiry_timestamp_seconds{file=",
    );
    // 2100-01-01.
    assert_eq!(expiry, Some(4_102_444_800.0));
}

#[tokio::test]
async fn operators_have_the_role_of_their_certificate() {
    let (ca, folder) = (Ca::new("operators"), Folder::new());
    let settings = ServerSettings {
        client_ca: folder.write("client-ca.crt", &ca.pem()),
        client_auth: ClientAuth::Optional,
        ..folder.server(&ca.issue(&["localhost"]))
    };
    let mut config = crate::cluster::config();
    config.admin.tls = Some(settings);
    let names = &mut config.admin.client_names;
    names.read = vec!["dashboard.example.com".to_owned()];
    names.operate = vec!["spiffe://example.com/on-call".to_owned()];
    config.workers = vec!["http://127.0.0.1:1".to_owned().into()];
    let router = crate::cluster::Router::here(&config).await;
    let probe = Client::new(&ca);
    let dashboard = Client::with_certificate(&ca, &ca.issue(&["dashboard.example.com"]));
    let on_call = Client::with_certificate(&ca, &ca.issue(&["spiffe://example.com/on-call"]));
    for (client, path, expected) in [
        (&probe, "/metrics", 200),
        (&probe, "/fleet", 403),
        (&dashboard, "/fleet", 200),
        (&dashboard, "/kv/blocks?worker=w", 403),
        (&on_call, "/fleet", 200),
        (&on_call, "/kv/blocks?worker=w", 404),
    ] {
        let answer = client.get(router.admin, path).await.unwrap();
        assert_eq!(answer.status, expected, "{path}: {}", answer.text());
    }
}

#[tokio::test]
async fn a_version_below_the_minimum_is_refused() {
    let (ca, folder) = (Ca::new("clients"), Folder::new());
    let settings = folder.server(&ca.issue(&["localhost"]));
    let old = Client::of_tls12(&ca);
    let any = cluster(settings.clone()).await;
    assert_eq!(
        old.get(any.router.api, "/health").await.unwrap().status,
        200
    );
    let strict = cluster(ServerSettings {
        min_version: MinVersion::Tls13,
        ..settings
    })
    .await;
    let (api, admin) = (strict.router.api, strict.router.admin);
    let error = old.get(api, "/health").await.unwrap_err();
    assert!(error.contains("ProtocolVersion"), "{error}");
    assert_eq!(
        Client::new(&ca).get(api, "/health").await.unwrap().status,
        200
    );
    eventually("it is counted", async || {
        handshakes(admin, "protocol").await == 1
    })
    .await;
}

#[tokio::test]
async fn a_client_needs_a_certificate_with_an_allowed_name() {
    let (ca, other, folder) = (Ca::new("clients"), Ca::new("others"), Folder::new());
    let settings = ServerSettings {
        client_ca: folder.write("client-ca.crt", &ca.pem()),
        client_names: vec![
            "spiffe://example.com/gateway".to_owned(),
            "gateway.example.com".to_owned(),
        ],
        ..folder.server(&ca.issue(&["localhost"]))
    };
    let cluster = cluster(settings).await;
    let (api, admin) = (cluster.router.api, cluster.router.admin);
    let with = |names: &[&str]| Client::with_certificate(&ca, &ca.issue(names));
    for names in [
        &["spiffe://example.com/gateway"][..],
        &["other.example.com", "Gateway.example.com"],
    ] {
        let answer = with(names).get(api, "/health").await.unwrap();
        assert_eq!(answer.status, 200);
    }
    let unknown = with(&["spiffe://example.com/gateway/2", "example.com"]);
    assert!(unknown.get(api, "/health").await.is_err());
    eventually("it is counted", async || {
        handshakes(admin, "client_name").await == 1
    })
    .await;
    let foreign = other.issue(&["gateway.example.com"]);
    let foreign = Client::with_certificate(&ca, &foreign);
    assert!(foreign.get(api, "/health").await.is_err());
    assert!(Client::new(&ca).get(api, "/health").await.is_err());
    let expired = ca.issue_for_years(&["gateway.example.com"], 2020, 2021);
    let expired = Client::with_certificate(&ca, &expired);
    assert!(expired.get(api, "/health").await.is_err());
    eventually("they are counted", async || {
        handshakes(admin, "client_certificate").await == 3
    })
    .await;
}

#[tokio::test]
async fn a_client_without_a_certificate_is_served_where_that_is_optional() {
    let (ca, other, folder) = (Ca::new("clients"), Ca::new("others"), Folder::new());
    let settings = ServerSettings {
        client_ca: folder.write("client-ca.crt", &ca.pem()),
        client_auth: ClientAuth::Optional,
        ..folder.server(&ca.issue(&["localhost"]))
    };
    let cluster = cluster(settings).await;
    let api = cluster.router.api;
    assert_eq!(
        Client::new(&ca).get(api, "/health").await.unwrap().status,
        200
    );
    let foreign = Client::with_certificate(&ca, &other.issue(&["x.example.com"]));
    assert!(foreign.get(api, "/health").await.is_err());
}

#[tokio::test]
async fn a_client_that_speaks_no_tls_is_counted_and_closed() {
    let (ca, folder) = (Ca::new("clients"), Folder::new());
    let cluster = cluster(folder.server(&ca.issue(&["localhost"]))).await;
    let (api, admin) = (cluster.router.api, cluster.router.admin);
    assert!(
        client::try_open(api, "GET", "/health", &[], "")
            .await
            .is_err()
    );
    eventually("it is counted", async || {
        handshakes(admin, "not_tls").await == 1
    })
    .await;
    // A client that does not trust the certificate.
    let stranger = Client::new(&Ca::new("others"));
    assert!(stranger.get(api, "/health").await.is_err());
    eventually("it is counted", async || {
        handshakes(admin, "alert").await == 1
    })
    .await;
}

#[tokio::test]
async fn a_proxy_protocol_header_comes_before_the_handshake() {
    let (ca, folder) = (Ca::new("clients"), Folder::new());
    let settings = folder.server(&ca.issue(&["localhost"]));
    let cluster = Cluster::start(vec![fast()], |config| {
        config.api.tls = Some(settings);
        config.api.advanced.proxy_protocol = true;
    })
    .await;
    let api = cluster.router.api;
    let mut stream = TcpStream::connect(api).await.unwrap();
    let header = b"PROXY TCP4 203.0.113.9 10.0.0.1 56324 443\r\n";
    stream.write_all(header).await.unwrap();
    let stream = Client::new(&ca).secure(stream, "http/1.1").await.unwrap();
    let answer = tls::answer(stream, api, "GET", "/health", "".into())
        .await
        .unwrap();
    assert_eq!(answer.status, 200);
}
