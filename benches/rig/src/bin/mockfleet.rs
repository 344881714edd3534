//! A cheap vLLM-shaped fleet for measuring routers: K workers on consecutive ports, one thread.
//! It answers at once (or token by token), spends almost no CPU, and counts what each worker got.
use bytes::Bytes;
use clap::Parser;
use http_body_util::{BodyExt, Full, StreamBody, combinators::BoxBody};
use hyper::{
    Method, Request, Response,
    body::{Frame, Incoming},
    service::service_fn,
};
use hyper_util::rt::TokioIo;
use std::{
    convert::Infallible,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
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
type Body = BoxBody<Bytes, Infallible>;
fn full(s: String) -> Body {
    Full::new(Bytes::from(s)).boxed()
}
struct Guard(Arc<Seen>, bool);
impl Drop for Guard {
    fn drop(&mut self) {
        if !self.1 {
            self.0.aborted.fetch_add(1, Relaxed);
        }
    }
}

async fn handle(
    req: Request<Incoming>,
    a: Arc<Args>,
    seen: Arc<Seen>,
    port: u16,
) -> Result<Response<Body>, Infallible> {
    let path = req.uri().path().to_string();
    let json = |s: String| {
        Response::builder()
            .header("content-type", "application/json")
            .body(full(s))
            .unwrap()
    };
    if req.method() == Method::GET {
        return Ok(match path.as_str() {
            "/health" | "/health_generate" | "/ping" => json("{}".into()),
            "/v1/models" => json(format!(r#"{{"object":"list","data":[{{"id":"{0}","object":"model","created":1,"owned_by":"vllm","root":"{0}","max_model_len":131072}}]}}"#, a.model)),
            "/get_model_info" | "/model_info" => json(format!(r#"{{"model_path":"{}","is_generation":true}}"#, a.model)),
            "/get_server_info" | "/server_info" => json(format!(r#"{{"model_path":"{0}","served_model_name":"{0}","version":"0.32.0","dp_size":1}}"#, a.model)),
            "/version" => json(r#"{"version":"0.32.0"}"#.into()),
            "/metrics" => Response::builder().header("content-type", "text/plain; version=0.0.4").body(full(
                "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{model_name=\"mock\"} 0\n# TYPE vllm:num_requests_waiting gauge\nvllm:num_requests_waiting{model_name=\"mock\"} 0\n# TYPE vllm:kv_cache_usage_perc gauge\nvllm:kv_cache_usage_perc{model_name=\"mock\"} 0\n".into())).unwrap(),
            "/seen" => json(format!(r#"{{"port":{port},"requests":{},"aborted":{},"bytes":{}}}"#, seen.requests.load(Relaxed), seen.aborted.load(Relaxed), seen.bytes.load(Relaxed))),
            _ => Response::builder().status(404).body(full("{}".into())).unwrap(),
        });
    }
    let body = req
        .into_body()
        .collect()
        .await
        .map(|b| b.to_bytes())
        .unwrap_or_default();
    if path == "/tokenize" {
        // One token for four bytes of the text, whatever the request's shape.
        let ids: Vec<String> = body
            .chunks(4)
            .map(|c| {
                (c.iter()
                    .fold(0u32, |h, b| h.wrapping_mul(31).wrapping_add(*b as u32))
                    % 150_000)
                    .to_string()
            })
            .collect();
        return Ok(json(format!(
            r#"{{"count":{},"max_model_len":262144,"tokens":[{}],"token_strs":null}}"#,
            ids.len(),
            ids.join(",")
        )));
    }
    if !matches!(
        path.as_str(),
        "/v1/chat/completions" | "/v1/completions" | "/v1/responses"
    ) {
        return Ok(Response::builder()
            .status(404)
            .header("content-type", "application/json")
            .body(full(r#"{"detail":"Not Found"}"#.into()))
            .unwrap());
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
        return Ok(json(if responses {
            format!(
                r#"{{"id":"resp_mock","object":"response","created_at":1,"status":"completed","model":"{m}","output":[{{"id":"msg_1","type":"message","role":"assistant","status":"completed","content":[{{"type":"output_text","text":"ok","annotations":[]}}]}}],"parallel_tool_calls":true,"tool_choice":"auto","tools":[],"temperature":1.0,"top_p":1.0,"metadata":{{}},"instructions":null,"error":null,"incomplete_details":null,"usage":{{"input_tokens":10,"input_tokens_details":{{"cached_tokens":0}},"output_tokens":1,"output_tokens_details":{{"reasoning_tokens":0}},"total_tokens":11}}}}"#
            )
        } else {
            format!(
                r#"{{"id":"chatcmpl-1","object":"chat.completion","created":1,"model":"{m}","choices":[{{"index":0,"message":{{"role":"assistant","content":"ok"}},"finish_reason":"stop","logprobs":null}}],"usage":{{"prompt_tokens":10,"completion_tokens":1,"total_tokens":11}}}}"#
            )
        }));
    }
    let (n, itl) = (a.tokens, a.itl_ms);
    let model = m.clone();
    let guard = Guard(seen, false);
    let frames = futures_util::stream::unfold(
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
            Some((
                Ok::<_, Infallible>(Frame::data(Bytes::from(s))),
                (i + 1, g, model),
            ))
        },
    );
    Ok(Response::builder()
        .header("content-type", "text/event-stream")
        .body(BodyExt::boxed(StreamBody::new(sync(frames))))
        .unwrap())
}
// BoxBody wants Sync; the stream is only ever polled by one task.
fn sync<S: futures_util::Stream + Send + 'static>(
    s: S,
) -> impl futures_util::Stream<Item = S::Item> + Send + Sync + 'static {
    struct W<S>(std::sync::Mutex<std::pin::Pin<Box<S>>>);
    impl<S: futures_util::Stream> futures_util::Stream for W<S> {
        type Item = S::Item;
        fn poll_next(
            self: std::pin::Pin<&mut Self>,
            cx: &mut std::task::Context<'_>,
        ) -> std::task::Poll<Option<S::Item>> {
            self.0.lock().unwrap().as_mut().poll_next(cx)
        }
    }
    W(std::sync::Mutex::new(Box::pin(s)))
}
fn find(h: &[u8], n: &[u8]) -> bool {
    let k = 4096.min(h.len());
    h[..k].windows(n.len()).any(|w| w == n) || h[h.len() - k..].windows(n.len()).any(|w| w == n)
}
#[tokio::main(flavor = "current_thread")]
async fn main() {
    let a = Arc::new(Args::parse());
    let mut tasks = vec![];
    for k in 0..a.workers {
        let (a, port) = (a.clone(), a.port + k);
        let seen = Arc::new(Seen::default());
        let l = tokio::net::TcpListener::bind(SocketAddr::from(([127, 0, 0, 1], port)))
            .await
            .expect("bind");
        tasks.push(tokio::spawn(async move {
            loop {
                let Ok((s, _)) = l.accept().await else {
                    continue;
                };
                let _ = s.set_nodelay(true);
                let (a, seen) = (a.clone(), seen.clone());
                tokio::spawn(async move {
                    let _ = hyper::server::conn::http1::Builder::new()
                        .serve_connection(
                            TokioIo::new(s),
                            service_fn(move |r| handle(r, a.clone(), seen.clone(), port)),
                        )
                        .await;
                });
            }
        }));
    }
    println!("mockfleet: {} workers from port {}", a.workers, a.port);
    for t in tasks {
        let _ = t.await;
    }
}
