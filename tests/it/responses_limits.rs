//! `truncation` and `max_tool_calls`, over workers of both kinds.

use serde_json::{Value, json};
use warmroute::sim::worker::Settings;

use crate::cluster::{Cluster, eventually, fast};
use crate::responses;

const PATH: &str = "/v1/responses";

/// A cluster for each kind of worker, and the member that has the items there.
async fn each() -> [(Cluster, &'static str); 2] {
    let chat = Settings {
        no_responses: true,
        ..fast()
    };
    [
        (Cluster::start(vec![fast()], |_| {}).await, "input"),
        (Cluster::start(vec![chat], |_| {}).await, "messages"),
    ]
}

fn body(input: &Value, more: Value) -> String {
    responses::with(responses::ask(input.clone()), more).to_string()
}

/// The end of a response that runs in the background.
async fn ended(cluster: &Cluster, response: &Value) -> Value {
    let path = format!("{PATH}/{}", response["id"].as_str().unwrap());
    let mut last = Value::Null;
    eventually("it ends", async || {
        last = cluster.get(&path).await.json();
        !["queued", "in_progress"].contains(&last["status"].as_str().unwrap())
    })
    .await;
    last
}

fn user(text: &str) -> Value {
    json!({"role": "user", "content": text})
}

fn call(id: usize) -> [Value; 2] {
    let (id, output) = (format!("call_{id}"), "word ".repeat(12_000));
    [
        json!({"type": "function_call", "call_id": id, "name": "f", "arguments": "{}"}),
        json!({"type": "function_call_output", "call_id": id, "output": output}),
    ]
}

#[tokio::test]
async fn a_too_long_input_loses_its_oldest_items_on_every_way() {
    let long = "word ".repeat(200_000);
    let talk = json!([user(&long), {"role": "assistant", "content": "yes"}, user("short")]);
    let mut steps = vec![user("go")];
    steps.extend((0..6).flat_map(call));
    let tools = json!([{"type": "function", "name": "f", "parameters": {"type": "object"}}]);
    for (cluster, items) in each().await {
        // Of an agent's loop, the question stays and the newest calls with their outputs.
        for (input, kept) in [(&talk, 2), (&json!(steps), 5)] {
            for more in [
                json!({}),
                json!({"stream": true}),
                json!({"background": true}),
            ] {
                let mut more = more;
                more["tools"] = tools.clone();
                let refused = cluster.post(PATH, body(input, more.clone())).await;
                if more["background"] == true {
                    let last = ended(&cluster, &refused.json()).await;
                    assert_eq!(last["status"], "failed", "{last}");
                } else {
                    assert_eq!(
                        (refused.status, &*refused.code()),
                        (400, "context_length_exceeded")
                    );
                }
                more["truncation"] = json!("auto");
                let answer = cluster.post(PATH, body(input, more.clone())).await;
                assert_eq!(answer.status, 200, "{more}: {}", answer.text());
                if more["background"] == true {
                    let last = ended(&cluster, &answer.json()).await;
                    assert_eq!(
                        (&last["status"], &last["truncation"]),
                        (&json!("incomplete"), &json!("auto"))
                    );
                } else {
                    assert!(answer.text().contains(r#""truncation":"auto""#));
                }
                let sent = cluster.engines[0].last_body().await;
                let list = sent[items].as_array().unwrap();
                assert_eq!(list.len(), kept, "{items} {more}");
                assert!(sent.get("truncation").is_none());
                if kept == 5 {
                    assert!(list[0].to_string().contains(r#""go""#));
                }
            }
        }
    }
}

#[tokio::test]
async fn a_question_that_is_too_long_alone_is_refused_in_spite_of_truncation() {
    let [(cluster, _), _] = each().await;
    let input = json!([{"role": "system", "content": "s"}, user(&"word ".repeat(200_000))]);
    let answer = cluster
        .post(PATH, body(&input, json!({"truncation": "auto"})))
        .await;
    assert_eq!(
        (answer.status, &*answer.code()),
        (400, "context_length_exceeded")
    );
}

#[tokio::test]
async fn max_tool_calls_is_checked_echoed_and_passed_where_tools_can_run() {
    for (cluster, items) in each().await {
        let answer = cluster
            .post(PATH, body(&json!("x"), json!({"max_tool_calls": 3})))
            .await;
        assert_eq!(
            (answer.status, &answer.json()["max_tool_calls"]),
            (200, &json!(3))
        );
        let passed = if items == "input" {
            json!(3)
        } else {
            Value::Null
        };
        let sent = cluster.engines[0].last_body().await;
        assert_eq!(sent["max_tool_calls"], passed);
        let background = json!({"max_tool_calls": 3, "background": true});
        let answer = cluster.post(PATH, body(&json!("x"), background)).await;
        assert_eq!(ended(&cluster, &answer.json()).await["max_tool_calls"], 3);
        for wrong in [json!(0), json!("3"), json!(1.5)] {
            let answer = cluster
                .post(PATH, body(&json!("x"), json!({"max_tool_calls": wrong})))
                .await;
            assert_eq!(
                (answer.status, &*answer.param()),
                (400, "max_tool_calls"),
                "{wrong}"
            );
        }
    }
}
