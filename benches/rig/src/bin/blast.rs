//! A closed-loop HTTP/1.1 load generator: C keep-alive connections for S seconds against one URL,
//! POSTing bodies made from a template, reading answers to their end. Prints requests/s, time to
//! first byte and total time (p50/p99), the CPU time and peak memory that process --pid used
//! meanwhile (its children too), and failures. One line of JSON.
use bytes::Bytes;
use clap::Parser;
use hdrhistogram::Histogram;
use http_body_util::{BodyExt, Full};
use hyper::{Request, client::conn::http1};
use hyper_util::rt::TokioIo;
use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

#[derive(Parser, Clone)]
struct Args {
    #[arg(long, default_value = "127.0.0.1:8080")]
    addr: String,
    #[arg(long, default_value = "/v1/chat/completions")]
    path: String,
    #[arg(long, default_value_t = 16)]
    conns: usize,
    #[arg(long, default_value_t = 5.0)]
    secs: f64,
    #[arg(long)]
    stream: bool,
    /// responses are stored (for paths that end in /responses)
    #[arg(long)]
    store: bool,
    /// characters of prompt in each request
    #[arg(long, default_value_t = 2000)]
    prompt: usize,
    /// how many distinct prompts
    #[arg(long, default_value_t = 64)]
    distinct: usize,
    #[arg(long, default_value = "mock")]
    model: String,
    #[arg(long)]
    pid: Option<u32>,
    #[arg(long, default_value = "")]
    bearer: String,
}
fn kids(pid: u32) -> Vec<u32> {
    let mut v = vec![pid];
    if let Ok(d) = std::fs::read_dir(format!("/proc/{pid}/task")) {
        for t in d.flatten() {
            if let Ok(s) = std::fs::read_to_string(t.path().join("children")) {
                for k in s.split_whitespace().filter_map(|x| x.parse().ok()) {
                    v.extend(kids(k));
                }
            }
        }
    }
    v
}
fn cpu_us(pid: u32) -> u64 {
    kids(pid)
        .iter()
        .map(|p| {
            std::fs::read_to_string(format!("/proc/{p}/stat"))
                .ok()
                .and_then(|s| {
                    let f: Vec<&str> = s[s.rfind(')')? + 2..].split(' ').collect();
                    Some((f[11].parse::<u64>().ok()? + f[12].parse::<u64>().ok()?) * 10_000)
                })
                .unwrap_or(0)
        })
        .sum()
}
fn rss_kb(pid: u32) -> u64 {
    kids(pid)
        .iter()
        .map(|p| {
            std::fs::read_to_string(format!("/proc/{p}/status"))
                .ok()
                .and_then(|s| {
                    s.lines()
                        .find(|l| l.starts_with("VmHWM"))?
                        .split_whitespace()
                        .nth(1)?
                        .parse::<u64>()
                        .ok()
                })
                .unwrap_or(0)
        })
        .sum()
}
#[tokio::main(flavor = "current_thread")]
async fn main() {
    let a = Args::parse();
    let bodies: Vec<Bytes> = (0..a.distinct.max(1)).map(|i| {
        let text: String = format!("request {i} ").chars().chain("lorem ipsum dolor sit amet ".chars().cycle()).take(a.prompt).collect();
        let v = if a.path.ends_with("/responses") { serde_json::json!({"model": a.model, "input": text, "stream": a.stream, "store": a.store, "max_output_tokens": 64}) }
                else { serde_json::json!({"model": a.model, "messages": [{"role":"user","content":text}], "stream": a.stream, "max_tokens": 64}) };
        Bytes::from(v.to_string()) }).collect();
    let bodies = Arc::new(bodies);
    let (ok, bad, bytes) = (
        Arc::new(AtomicU64::new(0)),
        Arc::new(AtomicU64::new(0)),
        Arc::new(AtomicU64::new(0)),
    );
    let hist = || Arc::new(Mutex::new(Histogram::<u64>::new(3).unwrap()));
    let (ttfb, total) = (hist(), hist());
    let first_bad = Arc::new(Mutex::new(None::<String>));
    let cpu0 = a.pid.map(cpu_us);
    let start = Instant::now();
    let end = start + Duration::from_secs_f64(a.secs);
    let mut tasks = vec![];
    for c in 0..a.conns {
        let (a, bodies, ok, bad, bytes, ttfb, total, first_bad) = (
            a.clone(),
            bodies.clone(),
            ok.clone(),
            bad.clone(),
            bytes.clone(),
            ttfb.clone(),
            total.clone(),
            first_bad.clone(),
        );
        tasks.push(tokio::spawn(async move {
            // Each connection has prompts of its own, as long as they last.
            let mut i = c * a.distinct / a.conns.max(1);
            while Instant::now() < end {
                let Ok(s) = tokio::net::TcpStream::connect(&a.addr).await else {
                    bad.fetch_add(1, Relaxed);
                    tokio::time::sleep(Duration::from_millis(20)).await;
                    continue;
                };
                let _ = s.set_nodelay(true);
                let Ok((mut tx, conn)) = http1::handshake::<_, Full<Bytes>>(TokioIo::new(s)).await
                else {
                    bad.fetch_add(1, Relaxed);
                    continue;
                };
                tokio::spawn(conn);
                while Instant::now() < end {
                    i += 1;
                    let mut b = Request::post(&a.path)
                        .header("host", &a.addr)
                        .header("content-type", "application/json");
                    if !a.bearer.is_empty() {
                        b = b.header("authorization", format!("Bearer {}", a.bearer));
                    }
                    let r = b.body(Full::new(bodies[i % bodies.len()].clone())).unwrap();
                    let t = Instant::now();
                    if tx.ready().await.is_err() {
                        break;
                    }
                    let Ok(mut resp) = tx.send_request(r).await else {
                        bad.fetch_add(1, Relaxed);
                        break;
                    };
                    let good = resp.status().is_success();
                    let status = resp.status();
                    let mut first = None;
                    let mut n = 0u64;
                    let mut broke = false;
                    let mut text = vec![];
                    while let Some(f) = resp.body_mut().frame().await {
                        let Ok(f) = f else {
                            broke = true;
                            break;
                        };
                        if let Ok(d) = f.into_data() {
                            first.get_or_insert_with(|| t.elapsed());
                            n += d.len() as u64;
                            if !good {
                                text.extend_from_slice(&d)
                            }
                        }
                    }
                    bytes.fetch_add(n, Relaxed);
                    if broke || !good {
                        bad.fetch_add(1, Relaxed);
                        first_bad.lock().unwrap().get_or_insert_with(|| {
                            format!("{status} {}", String::from_utf8_lossy(&text))
                        });
                        if broke {
                            break;
                        }
                        continue;
                    }
                    ok.fetch_add(1, Relaxed);
                    ttfb.lock()
                        .unwrap()
                        .record(first.unwrap_or_default().as_micros() as u64)
                        .ok();
                    total
                        .lock()
                        .unwrap()
                        .record(t.elapsed().as_micros() as u64)
                        .ok();
                }
            }
        }));
    }
    for t in tasks {
        let _ = t.await;
    }
    let secs = start.elapsed().as_secs_f64();
    let (n, h, g) = (
        ok.load(Relaxed),
        ttfb.lock().unwrap(),
        total.lock().unwrap(),
    );
    let cpu = cpu0.map(|c| cpu_us(a.pid.unwrap()).saturating_sub(c));
    println!(
        "{}",
        serde_json::json!({
        "rps": (n as f64 / secs).round(), "ok": n, "bad": bad.load(Relaxed), "mb_s": bytes.load(Relaxed) as f64 / secs / 1e6,
        "ttfb_us": {"p50": h.value_at_quantile(0.5), "p99": h.value_at_quantile(0.99)}, "total_us": {"p50": g.value_at_quantile(0.5), "p99": g.value_at_quantile(0.99)},
        "cpu_us_per_req": cpu.map(|c| (c as f64 / n.max(1) as f64 * 10.0).round() / 10.0), "peak_rss_mb": a.pid.map(|p| rss_kb(p) / 1024),
        "first_bad": *first_bad.lock().unwrap() })
    );
}
