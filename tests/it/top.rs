//! `warmroute top` as a pipe gets it, in front of a real router.

use std::process::{Command, Output};

use warmroute::secret::Secret;

use crate::cluster::{Cluster, Engine, Router, chat, config, fast};

async fn top(arguments: &[&str]) -> Output {
    let arguments: Vec<String> = arguments
        .iter()
        .map(|argument| (*argument).to_owned())
        .collect();
    let run = tokio::task::spawn_blocking(move || {
        Command::new(env!("CARGO_BIN_EXE_warmroute"))
            .arg("top")
            .args(arguments)
            .output()
            .unwrap()
    });
    run.await.unwrap()
}

#[tokio::test]
async fn a_pipe_gets_one_table_of_the_fleet() {
    let cluster = Cluster::start(vec![fast(), fast()], |_| {}).await;
    let url = format!("http://{}", cluster.router.admin);
    let arguments = ["--url", &url, "--interval", "500ms"];
    let shown = top(&arguments);
    let sent = async {
        for _ in 0..5 {
            let answer = cluster
                .post("/v1/chat/completions", chat("once upon a time", 2, true))
                .await;
            assert_eq!(answer.status, 200);
            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        }
    };
    let (shown, ()) = tokio::join!(shown, sent);
    let text = String::from_utf8(shown.stdout).unwrap();
    assert!(shown.status.success(), "{text} {:?}", shown.stderr);
    let lines: Vec<&str> = text.lines().collect();
    assert!(lines[0].starts_with("ready   workers 2/2 up"), "{text}");
    assert!(lines[1].starts_with("req/s "), "{text}");
    assert!(lines[5].starts_with("WORKER"), "{text}");
    assert!(
        lines[6].starts_with("w0") && lines[7].starts_with("w1"),
        "{text}"
    );
    assert!(
        !text.contains('\u{1b}'),
        "no control sequences in a pipe: {text}"
    );
}

#[tokio::test]
async fn a_router_that_cannot_be_asked_is_named_with_what_to_write() {
    let check = async |arguments: &[&str], expected: &str| {
        let shown = top(arguments).await;
        let problem = String::from_utf8(shown.stderr).unwrap();
        assert_eq!(shown.status.code(), Some(1), "{problem}");
        assert!(problem.contains(expected), "{problem}");
    };
    check(&["--url", "127.0.0.1:1"], "write http://HOST:PORT").await;
    check(
        &["--url", "http://127.0.0.1:1"],
        "is this the router's admin listener? (--url; with `admin.tls` https:// and --ca)",
    )
    .await;
    let engine = Engine::here("w0", fast()).await;
    let mut config = config();
    config.workers = vec![engine.listed()];
    config.admin.token = Secret::new("a-token-of-operators");
    let router = Router::here(&config).await;
    let url = format!("http://{}", router.admin);
    let lacks_token = "401 Unauthorized: this page needs the role `read`";
    check(&["--url", &url], lacks_token).await;
    let api = format!("http://{}", router.api);
    let other_listener = "404 Not Found; is this the router's admin listener? (--url";
    check(&["--url", &api], other_listener).await;
    let once = [
        "--url",
        &url,
        "--token",
        "a-token-of-operators",
        "--once",
        "--interval",
        "250ms",
    ];
    assert!(top(&once).await.status.success());
}
