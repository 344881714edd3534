//! A cheap vLLM-shaped fleet for measuring routers: K workers on consecutive ports, one thread.
//! It answers at once (or token by token), spends almost no CPU, and counts what each worker got.
use clap::Parser;
use hyper::{Method, Request, body::Incoming};
use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};
use warmroute_rig::{
    Answer, body_of, events, generates, json, metrics, models, not_found, serve, tokenized,
};

#[derive(Parser, Clone)]
struct Args {
    #[arg(long, default_value_t = 9100)]
    port: u16,
    #[arg(long, default_value_t = 4)]
    workers: u16,
    /// tokens in a streamed answer
    #[arg(long, default_value_t = 64)]
    tokens: usize,
    /// milliseconds between streamed tokens (0: as fast as the socket takes them)
    #[arg(long, default_value_t = 0)]
    itl_ms: u64,
    /// milliseconds before the first byte
    #[arg(long, default_value_t = 0)]
    ttft_ms: u64,
    #[arg(long, default_value = "mock")]
    model: String,
}
#[derive(Default)]
struct Seen {
    requests: AtomicU64,
    aborted: AtomicU64,
    bytes: AtomicU64,
}
struct Guard(Arc<Seen>, bool);
impl Drop for Guard {
    fn drop(&mut self) {
        if !self.1 {
            self.0.aborted.fetch_add(1, Relaxed);
        }
    }
}

async fn handle(req: Request<Incoming>, a: Arc<Args>, seen: Arc<Seen>, port: u16) -> Answer {
    let path = req.uri().path().to_string();
    if req.method() == Method::GET {
        return match path.as_str() {
            "/health" | "/health_generate" | "/ping" => json("{}".into()),
            "/v1/models" => models(&a.model),
            "/get_model_info" | "/model_info" => json(format!(
                r#"{{"model_path":"{}","is_generation":true}}"#,
                a.model
            )),
            "/get_server_info" | "/server_info" => json(format!(
                r#"{{"model_path":"{0}","served_model_name":"{0}","version":"0.32.0","dp_size":1}}"#,
                a.model
            )),
            "/version" => json(r#"{"version":"0.32.0"}"#.into()),
            "/metrics" => metrics(&a.model, 0, 0, 0.0),
            "/seen" => json(format!(
                r#"{{"port":{port},"requests":{},"aborted":{},"bytes":{}}}"#,
                seen.requests.load(Relaxed),
                seen.aborted.load(Relaxed),
                seen.bytes.load(Relaxed)
            )),
            _ => not_found(),
        };
    }
    let body = body_of(req).await;
    if path == "/tokenize" {
        return tokenized(&body);
    }
    if !generates(&path) {
        return not_found();
    }
    seen.requests.fetch_add(1, Relaxed);
    seen.bytes.fetch_add(body.len() as u64, Relaxed);
    // A scan, not a parse: the flag stands near either end of a request.
    let stream = find(&body, b"\"stream\":true") || find(&body, b"\"stream\": true");
    let responses = path.ends_with("/responses");
    if a.ttft_ms > 0 {
        tokio::time::sleep(Duration::from_millis(a.ttft_ms)).await;
    }
    let m = &a.model;
    if !stream {
        return json(if responses {
            format!(
                r#"{{"id":"resp_mock","object":"response","created_at":1,"status":"completed","model":"{m}","output":[{{"id":"msg_1","type":"message","role":"assistant","status":"completed","content":[{{"type":"output_text","text":"ok","annotations":[]}}]}}],"parallel_tool_calls":true,"tool_choice":"auto","tools":[],"temperature":1.0,"top_p":1.0,"metadata":{{}},"instructions":null,"error":null,"incomplete_details":null,"usage":{{"input_tokens":10,"input_tokens_details":{{"cached_tokens":0}},"output_tokens":1,"output_tokens_details":{{"reasoning_tokens":0}},"total_tokens":11}}}}"#
            )
        } else {
            format!(
                r#"{{"id":"chatcmpl-1","object":"chat.completion","created":1,"model":"{m}","choices":[{{"index":0,"message":{{"role":"assistant","content":"ok"}},"finish_reason":"stop","logprobs":null}}],"usage":{{"prompt_tokens":10,"completion_tokens":1,"total_tokens":11}}}}"#
            )
        });
    }
    let (n, itl) = (a.tokens, a.itl_ms);
    let model = m.clone();
    let guard = Guard(seen, false);
    events(futures_util::stream::unfold(
        (0usize, guard, model),
        move |(i, mut g, model)| async move {
            if i > n + 1 {
                return None;
            }
            if i == n + 1 {
                g.1 = true
            }
            if itl > 0 && i > 0 && i <= n {
                tokio::time::sleep(Duration::from_millis(itl)).await
            } else {
                tokio::task::yield_now().await
            }
            let s = if responses {
                if i == 0 {
                    format!(
                        "event: response.created\ndata: {{\"type\":\"response.created\",\"sequence_number\":0,\"response\":{{\"id\":\"resp_mock\",\"object\":\"response\",\"created_at\":1,\"status\":\"in_progress\",\"model\":\"{model}\",\"output\":[]}}}}\n\n"
                    )
                } else if i <= n {
                    format!(
                        "event: response.output_text.delta\ndata: {{\"type\":\"response.output_text.delta\",\"sequence_number\":{i},\"item_id\":\"msg_1\",\"output_index\":0,\"content_index\":0,\"delta\":\" tok\",\"logprobs\":[]}}\n\n"
                    )
                } else {
                    format!(
                        "event: response.completed\ndata: {{\"type\":\"response.completed\",\"sequence_number\":{i},\"response\":{{\"id\":\"resp_mock\",\"object\":\"response\",\"created_at\":1,\"status\":\"completed\",\"model\":\"{model}\",\"output\":[{{\"id\":\"msg_1\",\"type\":\"message\",\"role\":\"assistant\",\"status\":\"completed\",\"content\":[{{\"type\":\"output_text\",\"text\":\"tok\",\"annotations\":[]}}]}}],\"usage\":{{\"input_tokens\":10,\"input_tokens_details\":{{\"cached_tokens\":0}},\"output_tokens\":{n},\"output_tokens_details\":{{\"reasoning_tokens\":0}},\"total_tokens\":11}}}}}}\n\n"
                    )
                }
            } else if i == 0 {
                format!(
                    "data: {{\"id\":\"chatcmpl-1\",\"object\":\"chat.completion.chunk\",\"created\":1,\"model\":\"{model}\",\"choices\":[{{\"index\":0,\"delta\":{{\"role\":\"assistant\",\"content\":\"\"}},\"finish_reason\":null}}]}}\n\n"
                )
            } else if i <= n {
                format!(
                    "data: {{\"id\":\"chatcmpl-1\",\"object\":\"chat.completion.chunk\",\"created\":1,\"model\":\"{model}\",\"choices\":[{{\"index\":0,\"delta\":{{\"content\":\" tok\"}},\"finish_reason\":null}}]}}\n\n"
                )
            } else {
                "data: [DONE]\n\n".to_string()
            };
            Some((s, (i + 1, g, model)))
        },
    ))
}
fn find(h: &[u8], n: &[u8]) -> bool {
    let k = 4096.min(h.len());
    h[..k].windows(n.len()).any(|w| w == n) || h[h.len() - k..].windows(n.len()).any(|w| w == n)
}
#[tokio::main(flavor = "current_thread")]
async fn main() {
    let a = Arc::new(Args::parse());
    serve("mockfleet", a.port, a.workers, |port| {
        let (a, seen) = (a.clone(), Arc::new(Seen::default()));
        move |request| handle(request, a.clone(), seen.clone(), port)
    })
    .await;
}
