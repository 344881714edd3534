//! Plays a Mooncake-format trace against a router in front of `cachefleet`, in scaled time, and prints
//! what the engines' caches saw and what the client felt: one line of JSON. TTFT is in simulated seconds.
use bytes::Bytes;
use clap::Parser;
use http_body_util::{BodyExt, Full};
use hyper::Request;
use hyper_util::{client::legacy::Client, rt::TokioExecutor};
use std::{
    sync::{Arc, Mutex},
    time::Duration,
};
use tokio::time::{Instant, sleep_until};

#[derive(Parser, Clone)]
struct Args {
    #[arg(long)]
    trace: String,
    #[arg(long, default_value = "127.0.0.1:8080")]
    addr: String,
    /// must equal cachefleet's
    #[arg(long, default_value_t = 20.0)]
    speedup: f64,
    /// how much faster than recorded the requests arrive, in simulated time
    #[arg(long, default_value_t = 2.0)]
    rate: f64,
    #[arg(long, default_value_t = 4000)]
    requests: usize,
    #[arg(long, default_value_t = 128)]
    block_bytes: usize,
    /// spread arrivals that share a time stamp over this many recorded ms
    #[arg(long, default_value_t = 3000.0)]
    dither_ms: f64,
    #[arg(long, default_value_t = 9100)]
    fleet_port: u16,
    #[arg(long, default_value_t = 8)]
    workers: u16,
    #[arg(long, default_value = "mock")]
    model: String,
}
#[tokio::main(flavor = "current_thread")]
async fn main() {
    let a = Args::parse();
    let mut seed = 7u64;
    let mut rnd = move || {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        (seed >> 11) as f64 / (1u64 << 53) as f64
    };
    let mut reqs: Vec<(f64, String, u64)> = std::fs::read_to_string(&a.trace)
        .expect("trace")
        .lines()
        .take(a.requests)
        .map(|l| {
            let v: serde_json::Value = serde_json::from_str(l).expect("trace line");
            let text: String = v["hash_ids"]
                .as_array()
                .unwrap()
                .iter()
                .map(|h| {
                    let mut s = format!("[{}]", h);
                    let fill = "the quick brown fox jumps over the lazy dog and runs "
                        .chars()
                        .cycle()
                        .skip(h.as_u64().unwrap() as usize % 53);
                    s.extend(fill.take(a.block_bytes - s.len()));
                    s
                })
                .collect();
            (
                v["timestamp"].as_f64().unwrap() + rnd() * a.dither_ms,
                text,
                v["output_length"].as_u64().unwrap().max(1),
            )
        })
        .collect();
    reqs.sort_by(|x, y| x.0.total_cmp(&y.0));
    let client: Client<_, Full<Bytes>> = Client::builder(TokioExecutor::new())
        .pool_max_idle_per_host(512)
        .build_http();
    let stats = |c: Client<_, Full<Bytes>>, a: Args| async move {
        let mut out = vec![];
        for k in 0..a.workers {
            let r = c
                .request(
                    Request::get(format!("http://127.0.0.1:{}/stats", a.fleet_port + k))
                        .body(Full::default())
                        .unwrap(),
                )
                .await
                .expect("stats");
            let b = r.into_body().collect().await.unwrap().to_bytes();
            let v: serde_json::Value = serde_json::from_slice(&b).unwrap();
            out.push([
                v["requests"].as_u64().unwrap(),
                v["blocks"].as_u64().unwrap(),
                v["cached"].as_u64().unwrap(),
            ]);
        }
        out
    };
    let before = stats(client.clone(), a.clone()).await;
    let ttft = Arc::new(Mutex::new(Vec::<f64>::new()));
    let bad = Arc::new(Mutex::new((0u64, String::new())));
    let t0 = Instant::now();
    let first = reqs[0].0;
    let mut tasks = vec![];
    for (ts, text, out) in reqs {
        let at = t0 + Duration::from_secs_f64((ts - first) / 1000.0 / a.rate / a.speedup);
        sleep_until(at).await;
        let (c, a, ttft, bad) = (client.clone(), a.clone(), ttft.clone(), bad.clone());
        tasks.push(tokio::spawn(async move {
            let body = serde_json::json!({"model": a.model, "messages": [{"role": "user", "content": text}], "stream": true, "max_tokens": out}).to_string();
            let t = Instant::now();
            let r = c.request(Request::post(format!("http://{}/v1/chat/completions", a.addr)).header("content-type", "application/json").body(Full::new(Bytes::from(body))).unwrap()).await;
            let fail = |s: String| { let mut b = bad.lock().unwrap(); b.0 += 1; if b.1.is_empty() { b.1 = s } };
            let mut r = match r { Ok(r) if r.status().is_success() => r, Ok(r) => return fail(r.status().to_string()), Err(e) => return fail(e.to_string()) };
            let mut seen = false;
            while let Some(f) = r.body_mut().frame().await {
                match f { Ok(f) => if f.is_data() && !seen { seen = true; ttft.lock().unwrap().push(t.elapsed().as_secs_f64() * a.speedup) }, Err(e) => return fail(e.to_string()) }
            }
        }));
    }
    for t in tasks {
        let _ = t.await;
    }
    let after = stats(client, a.clone()).await;
    let d: Vec<[u64; 3]> = after
        .iter()
        .zip(&before)
        .map(|(x, y)| [x[0] - y[0], x[1] - y[1], x[2] - y[2]])
        .collect();
    let sum = |i: usize| d.iter().map(|x| x[i]).sum::<u64>() as f64;
    let mut v = ttft.lock().unwrap().clone();
    v.sort_by(f64::total_cmp);
    let q = |p: f64| {
        v.get(((v.len() as f64 - 1.0) * p) as usize)
            .copied()
            .unwrap_or(0.0)
    };
    let r3 = |x: f64| (x * 1000.0).round() / 1000.0;
    println!(
        "{}",
        serde_json::json!({"ok": v.len(), "bad": bad.lock().unwrap().0, "first_bad": bad.lock().unwrap().1, "cached_share": r3(sum(2) / sum(1).max(1.0)),
        "ttft_s": {"mean": r3(v.iter().sum::<f64>() / v.len().max(1) as f64), "p50": r3(q(0.5)), "p90": r3(q(0.9)), "p99": r3(q(0.99))},
        "requests_per_worker": d.iter().map(|x| x[0]).collect::<Vec<_>>(), "wall_s": r3(t0.elapsed().as_secs_f64())})
    );
}
