//! Engines that keep a prefix cache, for measuring how well a router uses it: K workers on consecutive
//! ports, each with an LRU over prompt blocks, one prefill queue and free decoding. Simulated time runs
//! `--speedup` times faster than the clock. A prompt is cut into blocks of `--block-bytes` bytes of its
//! last user message; each stands for `--block-tokens` tokens. `GET /stats` counts requests, blocks and cached blocks.
use clap::Parser;
use hyper::{Method, Request, body::Incoming};
use std::{
    collections::{BTreeMap, HashMap},
    hash::{Hash, Hasher},
    sync::{Arc, Mutex},
    time::Duration,
};
use tokio::time::{Instant, sleep_until};
use warmroute_rig::{
    Answer, answer, body_of, events, generates, json, metrics, models, not_found, serve, tokenized,
};

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

async fn handle(req: Request<Incoming>, a: Arc<Args>, e: Shared, port: u16) -> Answer {
    let path = req.uri().path().to_string();
    if req.method() == Method::GET {
        let g = e.lock().unwrap();
        return match path.as_str() {
            "/health" | "/health_generate" | "/ping" => json("{}".into()),
            "/v1/models" => models(&a.model),
            "/metrics" => metrics(&a.model, g.running, g.waiting, 0.1),
            "/stats" => json(format!(
                r#"{{"port":{port},"requests":{},"blocks":{},"cached":{}}}"#,
                g.requests, g.blocks, g.cached
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
    let Ok(v) = serde_json::from_slice::<serde_json::Value>(&body) else {
        return answer(400, "application/json", "{}".into());
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
    events(futures_util::stream::unfold(
        (0, Some(first), Some(last), running),
        move |(i, mut f, mut l, r)| async move {
            match i {
                0 => Some((f.take().unwrap(), (1, f, l, r))),
                1 => {
                    tokio::time::sleep(wait).await;
                    Some((l.take().unwrap(), (2, f, l, r)))
                }
                _ => None,
            }
        },
    ))
}
#[tokio::main(flavor = "current_thread")]
async fn main() {
    let a = Arc::new(Args::parse());
    serve("cachefleet", a.port, a.workers, |port| {
        let (a, e) = (a.clone(), Shared::default());
        move |request| handle(request, a.clone(), e.clone(), port)
    })
    .await;
}
