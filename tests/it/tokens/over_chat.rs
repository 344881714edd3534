//! Requests of the Responses API over workers that speak chat completions only: their tokens are those of the chat.

use serde_json::{Value, json};
use warmroute::sim::worker::Settings;

use super::{Folder, bodies, cluster_with_events, prompt_tokens};
use crate::cluster::Cluster;

const PATH: &str = "/v1/responses";

fn chat_only(folder: &Folder) -> Settings {
    Settings {
        no_responses: true,
        ..folder.engine()
    }
}

fn responses() -> impl Iterator<Item = Value> {
    let bodies = bodies("sim").into_iter();
    let responses = bodies.filter(|(path, _)| *path == PATH);
    responses.map(|(_, mut body)| {
        // A call would be an item of the next turn.
        body["tool_choice"] = "none".into();
        body
    })
}

async fn input_tokens(cluster: &Cluster, body: &Value) -> Value {
    let mut asked = body.clone();
    asked.as_object_mut().unwrap().remove("max_output_tokens");
    let answer = cluster
        .post("/v1/responses/input_tokens", asked.to_string())
        .await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer.json()["input_tokens"].clone()
}

#[tokio::test]
async fn the_tokens_are_those_that_the_engine_is_sent() {
    let folder = Folder::new();
    let engines = vec![chat_only(&folder); 2];
    let cluster = cluster_with_events(engines, folder.model(), |_| {}).await;
    let mut tokenized = 0;
    for body in responses() {
        let text = body.to_string();
        let (answer, first) = cluster.post_decided(PATH, &text).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        let tokens = prompt_tokens(&answer.json());
        let worker: usize = first.worker[1..].parse().unwrap();
        cluster.wait_for_kv_events(worker).await;
        assert_eq!(cluster.explain(PATH, &text).await["prompt_tokens"], tokens);
        assert_eq!(input_tokens(&cluster, &body).await, tokens);
        let (_, again) = cluster.post_decided(PATH, &text).await;
        assert_eq!(
            (&again.worker, again.reason.as_str()),
            (&first.worker, "longest_prefix")
        );
        assert_eq!(again.cached_tokens, tokens / 16 * 16);
        // Sent twice, explained and counted once each.
        tokenized += 4;
    }
    let outcomes = cluster.metric(
        "warmroute_tokenizer_prompts_total",
        &["outcome=\"complete\""],
    );
    assert_eq!(outcomes.await, f64::from(tokenized));
}

#[tokio::test]
async fn workers_of_both_kinds_give_no_false_alarm() {
    let folder = Folder::new();
    let engines = vec![folder.engine(), chat_only(&folder)];
    let cluster = cluster_with_events(engines, folder.model(), |_| {}).await;
    for round in 0..8 {
        for mut body in responses() {
            // Two system messages that are merged in a chat: other tokens.
            body["instructions"] = format!("round {round}").into();
            let answer = cluster.post(PATH, body.to_string()).await;
            assert_eq!(answer.status, 200, "{}", answer.text());
        }
    }
    assert!(cluster.requests().await.iter().all(|count| *count > 0));
    let all = cluster
        .metric("warmroute_tokenizer_prompts_total", &[])
        .await;
    let complete = cluster
        .metric(
            "warmroute_tokenizer_prompts_total",
            &["outcome=\"complete\""],
        )
        .await;
    assert_eq!(all, complete);
}

#[tokio::test]
async fn a_template_that_fails_on_a_later_system_message_is_sent_none() {
    const STRICT: &str = "{% for message in messages %}{% if message['role'] == 'system' and not loop.first %}{{ raise_exception('the system message must be the first') }}{% endif %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
    let roles = async |folder: &Folder| {
        let engines = vec![chat_only(folder)];
        let cluster = cluster_with_events(engines, folder.model(), |_| {}).await;
        let message = |role: &str| json!({"role": role, "content": role});
        let input = ["user", "developer", "user"].map(message);
        let body = json!({"model": "sim", "max_output_tokens": 2, "store": false,
            "input": input});
        let answer = cluster.post(PATH, body.to_string()).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        let sent = cluster.engines[0].last_body().await;
        let messages = sent["messages"].as_array().unwrap().iter();
        let roles: Vec<String> = messages
            .map(|message| message["role"].as_str().unwrap().to_owned())
            .collect();
        roles.join(" ")
    };
    let folder = Folder::new();
    assert_eq!(roles(&folder).await, "user system user");
    std::fs::write(folder.0.path().join("chat_template.jinja"), STRICT).unwrap();
    assert_eq!(roles(&folder).await, "system user user");
}
