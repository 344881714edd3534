//! A client of files and batches, and lines for it.

use std::net::SocketAddr;

use serde_json::{Value, json};

use crate::client::{self, Answer};
use crate::cluster::{Router, eventually};

/// The statuses of batches that have ended.
pub(crate) const ENDS: [&str; 4] = ["completed", "failed", "expired", "cancelled"];

/// The header of a [`form`].
pub(crate) const FORM: (&str, &str) = ("content-type", "multipart/form-data; boundary=x1");

/// A line that asks for a chat completion of so many tokens.
pub(crate) fn chat_line(custom_id: &str, text: &str, max_tokens: u32) -> String {
    json!({
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {
            "model": "sim",
            "messages": [{"role": "user", "content": text}],
            "max_tokens": max_tokens,
        },
    })
    .to_string()
}

/// The ids of results, sorted.
pub(crate) fn custom_ids(results: &[Value]) -> Vec<String> {
    let ids = results.iter().map(|result| {
        let id = result["custom_id"].as_str();
        id.unwrap_or_else(|| panic!("no id: {result}")).to_owned()
    });
    let mut ids: Vec<String> = ids.collect();
    ids.sort();
    ids
}

/// The body of an upload of these lines.
pub(crate) fn form(lines: &[String]) -> String {
    let part = |head: &str, value: &str| {
        format!("--x1\r\nContent-Disposition: form-data; {head}\r\n\r\n{value}\r\n")
    };
    let file = "name=\"file\"; filename=\"in.jsonl\"";
    let form = [
        part("name=\"purpose\"", "batch"),
        part(file, &lines.join("\n")),
        "--x1--\r\n".to_owned(),
    ];
    form.concat()
}

/// The lines of an answer in JSONL.
pub(super) fn json_lines(answer: &Answer) -> Vec<Value> {
    let lines = answer.text().lines();
    lines
        .map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}")))
        .collect()
}

/// A client of one router.
#[derive(Clone, Debug)]
pub(crate) struct Client {
    pub(super) api: SocketAddr,
    bearer: String,
}

impl Client {
    pub(crate) fn of(router: &Router) -> Self {
        Self::with_key(router, "none")
    }

    pub(super) fn with_key(router: &Router, key: &str) -> Self {
        Self {
            api: router.api,
            bearer: format!("Bearer {key}"),
        }
    }

    pub(crate) async fn get(&self, path: &str) -> Answer {
        self.send("GET", path, String::new()).await
    }

    pub(super) async fn send(&self, method: &str, path: &str, body: String) -> Answer {
        let headers = [("authorization", &*self.bearer)];
        client::send(self.api, method, path, &headers, body).await
    }

    /// Uploads lines; returns the file's id.
    pub(super) async fn upload(&self, lines: &[String]) -> String {
        let headers = [("authorization", &*self.bearer), FORM];
        let answer = client::send(self.api, "POST", "/v1/files", &headers, form(lines)).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        let object = answer.json();
        assert_eq!(object["purpose"], "batch");
        object["id"].as_str().unwrap().to_owned()
    }

    /// Creates a batch of chat completions, or of what `more` says.
    pub(super) async fn try_create(&self, file: &str, more: Value) -> Answer {
        let mut body = json!({
            "input_file_id": file,
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
        });
        let more = more.as_object().unwrap().clone();
        body.as_object_mut().unwrap().extend(more);
        self.send("POST", "/v1/batches", body.to_string()).await
    }

    pub(super) async fn create(&self, file: &str, more: Value) -> Value {
        let answer = self.try_create(file, more).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        answer.json()
    }

    pub(super) async fn cancel(&self, batch: &Value) -> Answer {
        let path = format!("{}/cancel", path(batch));
        self.send("POST", &path, String::new()).await
    }

    /// The batch as it is now. While the store cannot be asked it is null.
    pub(super) async fn batch(&self, batch: &Value) -> Value {
        let answer = self.get(&path(batch)).await;
        match answer.status {
            200 => answer.json(),
            503 => Value::Null,
            status => panic!("{status}: {}", answer.text()),
        }
    }

    /// The batch once it has ended.
    pub(crate) async fn ended(&self, batch: &Value) -> Value {
        let mut last = Value::Null;
        eventually("the batch ends", async || {
            last = self.batch(batch).await;
            ENDS.contains(&last["status"].as_str().unwrap_or_default())
        })
        .await;
        last
    }

    /// The lines of one of its files.
    pub(crate) async fn results(&self, batch: &Value, file: &str) -> Vec<Value> {
        let id = batch[file].as_str();
        let id = id.unwrap_or_else(|| panic!("no {file}: {batch}"));
        let content = self.get(&format!("/v1/files/{id}/content")).await;
        assert_eq!(content.status, 200, "{}", content.text());
        json_lines(&content)
    }
}

pub(crate) fn path(batch: &Value) -> String {
    format!("/v1/batches/{}", batch["id"].as_str().unwrap())
}
