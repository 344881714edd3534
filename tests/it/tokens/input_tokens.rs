//! Input tokens of the Responses API, counted here where the tokenizer is, whatever the worker can.

use serde_json::json;

use super::Folder;
use crate::client;
use crate::stub::Stub;

#[tokio::test]
async fn input_tokens_are_counted_here_though_the_worker_cannot() {
    let refusal = "HTTP/1.1 501 Not Implemented\r\nconnection: close\r\ncontent-length: 0\r\n\r\n";
    let folder = Folder::new();
    let body = json!({"model": "sim", "input": "How many tokens are these?"}).to_string();
    for has_tokenizer in [false, true] {
        let stub = Stub::start(refusal).await;
        let models = has_tokenizer.then(|| folder.model());
        let router = stub.router(|config| config.models.extend(models)).await;
        let answer = client::post(router.api, "/v1/responses/input_tokens", body.clone()).await;
        if has_tokenizer {
            assert_eq!(answer.status, 200, "{}", answer.text());
            let tokens = answer.json()["input_tokens"].as_u64().unwrap();
            assert!((6..100).contains(&tokens), "{tokens}");
        } else {
            assert_eq!(answer.status, 501, "{}", answer.text());
            assert_eq!(answer.json()["error"]["code"], "cannot_count_tokens");
        }
    }
}
