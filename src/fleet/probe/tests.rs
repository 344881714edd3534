use std::time::Instant;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use super::models::tests::{give, worker_at};
use super::*;
use crate::fleet::Member;
use crate::fleet::registry::tests::{member, registry};

const KNOWN: &str = "0.30.0";

fn answer(status: &str, page: &str) -> String {
    let bytes = page.len();
    format!("HTTP/1.1 {status}\r\ncontent-length: {bytes}\r\nconnection: close\r\n\r\n{page}")
}

#[tokio::test]
async fn another_release_is_asked_at_once_which_apis_it_serves() {
    for (version, is_asked) in [(KNOWN, false), ("0.31.0", true)] {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let fleet = registry(&[]);
        let listed = Member {
            address: listener.local_addr().unwrap().to_string(),
            ..member("a")
        };
        fleet.set_members("static", vec![listed]);
        let worker = fleet.snapshot().workers[0].worker.clone();
        let mut prober = Prober {
            schedule: ProbeSchedule::default(),
            settings: health::Settings::default(),
            worker,
            registry: fleet,
            bootstrap: None,
            on_connected: Arc::new(|_: &Worker, _: Instant| {}),
            facts: Some(Facts {
                version: Some(KNOWN.to_owned()),
                lacks_messages: true,
                lacks_responses: true,
                ..Facts::default()
            }),
            bootstrap_log: LogOnce::default(),
        };
        let engine = async {
            let models = r#"{"data":[{"id":"m","owned_by":"vllm"}]}"#;
            give(&listener, &answer("200 OK", models)).await;
            let page = format!(r#"{{"version":"{version}"}}"#);
            give(&listener, &answer("200 OK", &page)).await;
            // It serves both, which it has not done before.
            for _ in 0..2 {
                give(&listener, &answer("400 Bad Request", "")).await;
            }
            std::future::pending::<()>().await;
        };
        tokio::select! {
            listed = prober.list_models(false, false) => assert!(listed.is_ok(), "{version}"),
            () = engine => unreachable!("it waits for more"),
        }
        let found = prober.facts.unwrap();
        assert_eq!(found.version.as_deref(), Some(version));
        let lacks = (found.lacks_messages, found.lacks_responses);
        assert_eq!(lacks, (!is_asked, !is_asked), "{version}");
    }
}

#[tokio::test]
async fn a_worker_is_asked_for_both_apis_at_the_same_time() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut prober = Prober {
        schedule: ProbeSchedule::default(),
        settings: health::Settings {
            timeout: Duration::from_secs(60),
            ..health::Settings::default()
        },
        worker: worker_at(&listener),
        registry: registry(&[]),
        bootstrap: None,
        on_connected: Arc::new(|_, _| {}),
        facts: None,
        bootstrap_log: LogOnce::default(),
    };
    let engine = async {
        give(&listener, &answer("200 OK", r#"{"data":[]}"#)).await;
        give(&listener, &answer("200 OK", r#"{"version":"0.32.0"}"#)).await;
        // Neither is answered before both have come.
        let (first, _) = listener.accept().await.unwrap();
        let (second, _) = listener.accept().await.unwrap();
        for mut stream in [first, second] {
            let mut head = [0; 4_096];
            assert!(stream.read(&mut head).await.unwrap() > 0);
            let missing = answer("404 Not Found", "");
            stream.write_all(missing.as_bytes()).await.unwrap();
        }
    };
    let (listed, ()) = tokio::join!(prober.list_models(true, true), engine);
    assert!(listed.unwrap().has_said_apis);
    let facts = prober.facts.unwrap();
    assert!(facts.lacks_messages && facts.lacks_responses);
}
