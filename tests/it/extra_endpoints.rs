//! Endpoints that the configuration lists: passed on by load and by the model of a JSON body or of a form.

use serde_json::json;
use warmroute::config::Config;

use crate::client;
use crate::cluster::Cluster;
use crate::cluster::fast;
use crate::model_names::named;
use crate::stub::Stub;

const ANSWER: &str = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 12\r\nconnection: close\r\n\r\n{\"text\":\"a\"}";
const AUDIO: &str = "/v1/audio/transcriptions";

fn listed(config: &mut Config) {
    config.api.requests.extra_endpoints = vec!["/score".to_owned(), AUDIO.to_owned()];
    config.api.requests.max_body = 100_000;
}

fn form(model: &str) -> Vec<u8> {
    let file = "--b\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a.wav\"\r\n\r\n";
    let model = format!(
        "\r\n--b\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\n{model}\r\n--b--\r\n"
    );
    let sound = (0..=255_u8).chain([b'['; 200]).collect::<Vec<u8>>();
    [file.as_bytes(), &sound, model.as_bytes()].concat()
}

async fn send_form(api: std::net::SocketAddr, body: Vec<u8>) -> client::Answer {
    let headers = [("content-type", "multipart/form-data; boundary=b")];
    client::send(api, "POST", AUDIO, &headers, body).await
}

#[tokio::test]
async fn listed_endpoints_pass_with_json_and_with_forms() {
    let stub = Stub::start(ANSWER).await;
    let router = stub.router(listed).await;
    let body = json!({"model": "sim", "text_1": "a", "text_2": "b"}).to_string();
    let answer = client::post(router.api, "/score?x=1", body).await;
    assert_eq!((answer.status, answer.text()), (200, "{\"text\":\"a\"}"));
    assert!(stub.last_head().starts_with("post /score?x=1 "));
    let answer = send_form(router.api, form("sim")).await;
    assert_eq!((answer.status, answer.text()), (200, "{\"text\":\"a\"}"));
    let head = stub.last_head();
    assert!(head.contains("multipart/form-data; boundary=b"), "{head}");
    let length = form("sim").len();
    assert!(
        head.contains(&format!("content-length: {length}")),
        "{head}"
    );
}

#[tokio::test]
async fn a_form_is_held_to_the_same_rules_as_json() {
    let stub = Stub::start(ANSWER).await;
    let router = stub.router(listed).await;
    let answer = send_form(router.api, form("none")).await;
    assert_eq!((answer.status, &*answer.code()), (404, "model_not_found"));
    let mut cut = form("sim");
    cut.truncate(200);
    let answer = send_form(router.api, cut).await;
    assert_eq!((answer.status, &*answer.code()), (400, "invalid_form"));
    let answer = send_form(router.api, vec![b'x'; 200_000]).await;
    assert_eq!((answer.status, &*answer.code()), (413, "request_too_large"));
    let body = json!({"model": "sim", "kv_transfer_params": {}}).to_string();
    let answer = client::post(router.api, "/score", body).await;
    assert_eq!(
        (answer.status, &*answer.param()),
        (400, "kv_transfer_params")
    );
    for path in ["/classify", "/sleep", "/score/", "/v1/load_lora_adapter"] {
        let answer = client::post(router.api, path, "{}").await;
        assert_eq!((answer.status, &*answer.code()), (404, "unknown_url"));
    }
    assert_eq!(stub.last_head(), "");
}

#[tokio::test]
async fn a_name_in_a_form_leads_to_its_model() {
    let stub = Stub::start(ANSWER).await;
    let router = stub
        .router(|config| {
            listed(config);
            config.models = named(json!([{"name": "sim", "aliases": ["whisper-1"]}]));
        })
        .await;
    let answer = send_form(router.api, form("whisper-1")).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    let length = form("sim").len();
    let head = stub.last_head();
    assert!(
        head.contains(&format!("content-length: {length}")),
        "{head}"
    );
}

#[tokio::test]
async fn what_changes_an_engine_never_passes_even_if_it_is_listed() {
    // A list that the configuration's check would refuse.
    let cluster = Cluster::start(vec![fast()], |config| {
        config.api.requests.extra_endpoints = vec!["/reset_prefix_cache".to_owned()];
    })
    .await;
    let answer = cluster.post("/reset_prefix_cache", "{}").await;
    assert_eq!((answer.status, &*answer.code()), (404, "unknown_url"));
    let text = "workers: [\"http://a\"]\napi:\n  extra_endpoints: [/score, /sleep]\n";
    let problems = Config::parse("c", text).unwrap_err().to_string();
    assert!(problems.contains("api.extra_endpoints[1]"), "{problems}");
}
