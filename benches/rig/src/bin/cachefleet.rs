//! Engines that keep a prefix cache, for measuring how well a router uses it: K workers on consecutive
//! ports, each with an LRU over prompt blocks, one prefill queue and free decoding. Simulated time runs
//! `--speedup` times faster than the clock. A prompt is cut into blocks of `--block-bytes` bytes of its
//! last user message; each stands for `--block-tokens` tokens. `GET /stats` counts requests, blocks and cached blocks.
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
    collections::{BTreeMap, HashMap},
    convert::Infallible,
    hash::{Hash, Hasher},
    net::SocketAddr,
    sync::{Arc, Mutex},
    time::Duration,
};
use tokio::time::{Instant, sleep_until};

#[derive(Parser)]
struct Args {
    #[arg(long, default_value_t = 9100)]
    port: u16,
    #[arg(long, default_value_t = 8)]
    workers: u16,
    #[arg(long, default_value_t = 20.0)]
    speedup: f64,
    /// prefill tokens a simulated second
    #[arg(long, default_value_t = 12000.0)]
    prefill_rate: f64,
    /// simulated seconds a decoded token
    #[arg(long, default_value_t = 0.02)]
    itl: f64,
    /// tokens that a worker's cache holds
    #[arg(long, default_value_t = 1_048_576)]
    cache_tokens: usize,
    #[arg(long, default_value_t = 512)]
    block_tokens: usize,
    #[arg(long, default_value_t = 128)]
    block_bytes: usize,
    #[arg(long, default_value = "mock")]
    model: String,
}
#[derive(Default)]
struct Cache {
    at: HashMap<u64, u64>,
    order: BTreeMap<u64, u64>,
    clock: u64,
}
impl Cache {
    fn hit(&self, path: &[u64]) -> usize {
        path.iter().take_while(|h| self.at.contains_key(h)).count()
    }
    /// Deeper blocks get the older stamps, so that tails leave first.
    fn store(&mut self, path: &[u64], cap: usize) {
        self.clock += path.len() as u64;
        for (i, h) in path.iter().enumerate() {
            let stamp = self.clock - i as u64;
            if let Some(old) = self.at.insert(*h, stamp) {
                self.order.remove(&old);
            }
            self.order.insert(stamp, *h);
        }
        while self.at.len() > cap {
            let (_, h) = self.order.pop_first().unwrap();
            self.at.remove(&h);
        }
    }
}
#[derive(Default)]
struct Engine {
    cache: Cache,
    busy_until: Option<Instant>,
    requests: u64,
    blocks: u64,
    cached: u64,
    running: u64,
    waiting: u64,
}
type Shared = Arc<Mutex<Engine>>;
type Body = BoxBody<Bytes, Infallible>;
fn full(s: String) -> Body {
    Full::new(Bytes::from(s)).boxed()
}
fn json(s: String) -> Response<Body> {
    Response::builder()
        .header("content-type", "application/json")
        .body(full(s))
        .unwrap()
}
struct Count(Shared, fn(&mut Engine, i64));
impl Drop for Count {
    fn drop(&mut self) {
        (self.1)(&mut self.0.lock().unwrap(), -1)
    }
}
fn count(e: &Shared, f: fn(&mut Engine, i64)) -> Count {
    f(&mut e.lock().unwrap(), 1);
    Count(e.clone(), f)
}

async fn handle(
    req: Request<Incoming>,
    a: Arc<Args>,
    e: Shared,
    port: u16,
) -> Result<Response<Body>, Infallible> {
    let path = req.uri().path().to_string();
    if req.method() == Method::GET {
        let g = e.lock().unwrap();
        return Ok(match path.as_str() {
            "/health" | "/health_generate" | "/ping" => json("{}".into()),
            "/v1/models" => json(format!(r#"{{"object":"list","data":[{{"id":"{0}","object":"model","created":1,"owned_by":"vllm","root":"{0}","max_model_len":262144}}]}}"#, a.model)),
            "/metrics" => Response::builder().header("content-type", "text/plain; version=0.0.4").body(full(format!(
                "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{{engine=\"0\",model_name=\"{m}\"}} {r}\n# TYPE vllm:num_requests_waiting gauge\nvllm:num_requests_waiting{{engine=\"0\",model_name=\"{m}\"}} {w}\n# TYPE vllm:kv_cache_usage_perc gauge\nvllm:kv_cache_usage_perc{{engine=\"0\",model_name=\"{m}\"}} 0.1\n", m = a.model, r = g.running, w = g.waiting))).unwrap(),
            "/stats" => json(format!(r#"{{"port":{port},"requests":{},"blocks":{},"cached":{}}}"#, g.requests, g.blocks, g.cached)),
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
    let Ok(v) = serde_json::from_slice::<serde_json::Value>(&body) else {
        return Ok(Response::builder()
            .status(400)
            .body(full("{}".into()))
            .unwrap());
    };
    let text = v["messages"]
        .as_array()
        .and_then(|m| m.last())
        .and_then(|m| m["content"].as_str())
        .or(v["input"].as_str())
        .unwrap_or("")
        .to_string();
    let out = v["max_tokens"]
        .as_u64()
        .or(v["max_output_tokens"].as_u64())
        .unwrap_or(1);
    let mut h = std::collections::hash_map::DefaultHasher::new();
    let blocks: Vec<u64> = text
        .as_bytes()
        .chunks(a.block_bytes)
        .map(|c| {
            c.hash(&mut h);
            h.finish()
        })
        .collect();
    let real = |sim: f64| Duration::from_secs_f64(sim / a.speedup);
    let waiting = count(&e, |e, d| e.waiting = (e.waiting as i64 + d) as u64);
    // One prefill queue, first come first served. Hits are judged, and blocks kept, as of admission: a later
    // request in the queue finds them by the time it starts.
    let done = {
        let mut g = e.lock().unwrap();
        let begin = g
            .busy_until
            .unwrap_or_else(Instant::now)
            .max(Instant::now());
        let hit = g.cache.hit(&blocks).min(blocks.len().saturating_sub(1));
        g.requests += 1;
        g.blocks += blocks.len() as u64;
        g.cached += hit as u64;
        let end = begin + real(((blocks.len() - hit) * a.block_tokens) as f64 / a.prefill_rate);
        g.busy_until = Some(end);
        let cap = a.cache_tokens / a.block_tokens;
        g.cache.store(&blocks, cap);
        end
    };
    sleep_until(done).await;
    drop(waiting);
    let running = count(&e, |e, d| e.running = (e.running as i64 + d) as u64);
    let chunk = |s: &str, end: &str| {
        format!(
            "data: {{\"id\":\"chatcmpl-1\",\"object\":\"chat.completion.chunk\",\"created\":1,\"model\":\"{}\",\"choices\":[{{\"index\":0,\"delta\":{{\"content\":\"{s}\"}},\"finish_reason\":{end}}}]}}\n\n",
            a.model
        )
    };
    let (first, last) = (
        chunk("a", "null"),
        chunk("b", "\"length\"") + "data: [DONE]\n\n",
    );
    let wait = real(out as f64 * a.itl);
    let frames = futures_util::stream::unfold(
        (0, Some(first), Some(last), running),
        move |(i, mut f, mut l, r)| async move {
            match i {
                0 => Some((
                    Ok::<_, Infallible>(Frame::data(Bytes::from(f.take().unwrap()))),
                    (1, f, l, r),
                )),
                1 => {
                    tokio::time::sleep(wait).await;
                    Some((
                        Ok(Frame::data(Bytes::from(l.take().unwrap()))),
                        (2, f, l, r),
                    ))
                }
                _ => None,
            }
        },
    );
    struct Sync<S>(Mutex<std::pin::Pin<Box<S>>>);
    impl<S: futures_util::Stream> futures_util::Stream for Sync<S> {
        type Item = S::Item;
        fn poll_next(
            self: std::pin::Pin<&mut Self>,
            cx: &mut std::task::Context<'_>,
        ) -> std::task::Poll<Option<S::Item>> {
            self.0.lock().unwrap().as_mut().poll_next(cx)
        }
    }
    Ok(Response::builder()
        .header("content-type", "text/event-stream")
        .body(BodyExt::boxed(StreamBody::new(Sync(Mutex::new(Box::pin(
            frames,
        ))))))
        .unwrap())
}
#[tokio::main(flavor = "current_thread")]
async fn main() {
    let a = Arc::new(Args::parse());
    let mut tasks = vec![];
    for k in 0..a.workers {
        let (a, port, e) = (a.clone(), a.port + k, Shared::default());
        let l = tokio::net::TcpListener::bind(SocketAddr::from(([127, 0, 0, 1], port)))
            .await
            .expect("bind");
        tasks.push(tokio::spawn(async move {
            loop {
                let Ok((s, _)) = l.accept().await else {
                    continue;
                };
                let _ = s.set_nodelay(true);
                let (a, e) = (a.clone(), e.clone());
                tokio::spawn(async move {
                    let _ = hyper::server::conn::http1::Builder::new()
                        .serve_connection(
                            TokioIo::new(s),
                            service_fn(move |r| handle(r, a.clone(), e.clone(), port)),
                        )
                        .await;
                });
            }
        }));
    }
    println!("cachefleet: {} workers from port {}", a.workers, a.port);
    for t in tasks {
        let _ = t.await;
    }
}
