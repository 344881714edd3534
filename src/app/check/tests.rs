use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use super::*;

/// Answers as an engine that says that it publishes KV events at this endpoint.
async fn serve(listener: TcpListener, endpoint: &str) {
    while let Ok((mut stream, _)) = listener.accept().await {
        let mut request = vec![0; 4_096];
        let len = stream.read(&mut request).await.unwrap_or(0);
        let request = String::from_utf8_lossy(&request[..len]).into_owned();
        let body = match request.split(' ').nth(1) {
            Some("/v1/models") => r#"{"data":[{"id":"m"}]}"#.to_owned(),
            Some("/kv_event_sources") => format!(
                r#"{{"0":{{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"{endpoint}"}}}}"#
            ),
            _ => String::new(),
        };
        let head = "HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length";
        let answer = format!("{head}: {}\r\n\r\n{body}", body.len());
        let _ = stream.write_all(answer.as_bytes()).await;
    }
}

#[tokio::test]
async fn events_that_cannot_be_followed_fail_the_check_with_the_line_to_change() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let text = format!("workers:\n  - {{url: \"http://{address}\"}}\n");
    let config = Config::parse("test.yaml", &text).unwrap();
    let mut out = Vec::new();
    let is_good = tokio::select! {
        is_good = run(&config, false, &mut out) => is_good.unwrap(),
        () = serve(listener, "tcp://127.0.0.1:5557") => unreachable!("it accepts for ever"),
    };
    let printed = String::from_utf8(out).unwrap();
    assert!(!is_good, "{printed}");
    for part in [
        "KV events",
        "FAILED: rank 0, tcp://127.0.0.1:5557",
        r#""endpoint":"tcp://*:5557""#,
    ] {
        assert!(printed.contains(part), "{part}: {printed}");
    }
}

#[tokio::test]
async fn the_redis_of_batches_and_limits_is_tried_where_no_responses_are_stored() {
    let text = "workers: ['http://127.0.0.1:1']\n\
                responses: {mode: pass_through, store: {redis: 'redis://127.0.0.1:1'}}\n";
    let config = Config::parse("test.yaml", text).unwrap();
    let mut out = Vec::new();
    assert!(!check_store(&config, &mut out).await.unwrap());
    let printed = String::from_utf8(out).unwrap();
    assert!(printed.contains("response store: FAILED: "), "{printed}");
}
