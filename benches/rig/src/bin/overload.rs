//! Requests that come whether or not the earlier ones were answered (an open loop, Poisson), against a router in front
//! of `cachefleet`. Prints one line of JSON: how many a second had their first token within `--target` (goodput), how
//! many were refused, how long the rest took.
use bytes::Bytes;
use clap::Parser;
use http_body_util::{BodyExt, Full};
use hyper::Request;
use hyper_util::{client::legacy::Client, rt::TokioExecutor};
use std::{
    sync::{Arc, Mutex},
    time::Duration,
};
use tokio::time::{Instant, sleep_until, timeout};

#[derive(Parser, Clone)]
struct Args {
    #[arg(long, default_value = "127.0.0.1:8080")]
    addr: String,
    /// requests a second
    #[arg(long)]
    rate: f64,
    /// seconds that are measured, after `--warmup`
    #[arg(long, default_value_t = 30.0)]
    secs: f64,
    #[arg(long, default_value_t = 10.0)]
    warmup: f64,
    /// seconds to the first token that count
    #[arg(long, default_value_t = 2.0)]
    target: f64,
    /// seconds after which a client disconnects
    #[arg(long, default_value_t = 30.0)]
    patience: f64,
    /// mean tokens of the prompts (log-normal; four bytes are a token)
    #[arg(long, default_value_t = 1000.0)]
    prompt: f64,
    #[arg(long, default_value_t = 0.8)]
    sigma: f64,
    /// prompts start with one of this many texts of half the mean length; 0: nothing is shared
    #[arg(long, default_value_t = 0)]
    prefixes: u64,
    #[arg(long, default_value_t = 20)]
    max_tokens: u64,
    /// sent as a header, NAME:VALUE
    #[arg(long)]
    header: Vec<String>,
    #[arg(long, default_value = "mock")]
    model: String,
    #[arg(long, default_value_t = 7)]
    seed: u64,
}

#[derive(Default)]
struct Seen {
    sent: u64,
    ttft: Vec<f64>,
    refused: Vec<f64>,
    gave_up: u64,
    failed: u64,
    /// Prompt tokens that were sent, and of the requests that were in time.
    tokens: u64,
    tokens_within: u64,
    first_failure: String,
}

fn text(tokens: usize, name: &str) -> String {
    let fill = "the quick brown fox jumps over the lazy dog and runs ";
    let chars = name.chars().chain(fill.chars().cycle());
    chars.take(tokens.max(8) * 4).collect()
}

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let a = Args::parse();
    let mut state = a.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut random = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        ((state >> 11) as f64 + 0.5) / (1u64 << 53) as f64
    };
    let client: Client<_, Full<Bytes>> = Client::builder(TokioExecutor::new())
        .pool_max_idle_per_host(4096)
        .build_http();
    let seen: Arc<Mutex<Seen>> = Arc::default();
    let headers: Vec<(String, String)> = a
        .header
        .iter()
        .filter_map(|header| header.split_once(':'))
        .map(|(name, value)| (name.to_owned(), value.trim().to_owned()))
        .collect();
    let (begin, mut at, mut number) = (Instant::now(), 0.0, 0u64);
    let mut tasks = Vec::new();
    while at < a.warmup + a.secs {
        at += -random().ln() / a.rate;
        let normal = (-2.0 * random().ln()).sqrt() * (std::f64::consts::TAU * random()).cos();
        let tokens = (a.prompt.ln() - a.sigma * a.sigma / 2.0 + a.sigma * normal).exp();
        let tokens = tokens.clamp(32.0, a.prompt * 8.0) as usize;
        let shared = match a.prefixes {
            0 => String::new(),
            count => {
                let prefix = (random() * count as f64) as u64;
                text(a.prompt as usize / 2, &format!("[prefix {prefix}] "))
            }
        };
        number += 1;
        let own = tokens.saturating_sub(shared.len() / 4).max(8);
        let length = (shared.len() / 4 + own) as u64;
        let prompt = shared + &text(own, &format!("[{} {number}] ", a.seed));
        let body = serde_json::json!({"model": a.model, "messages": [{"role": "user", "content": prompt}],
            "stream": true, "max_tokens": a.max_tokens})
        .to_string();
        let mut request = Request::post(format!("http://{}/v1/chat/completions", a.addr))
            .header("content-type", "application/json");
        for (name, value) in &headers {
            request = request.header(name, value);
        }
        let request = request.body(Full::new(Bytes::from(body))).unwrap();
        sleep_until(begin + Duration::from_secs_f64(at)).await;
        let (client, seen, is_measured) = (client.clone(), seen.clone(), at > a.warmup);
        let target = a.target;
        let patience = Duration::from_secs_f64(a.patience);
        tasks.push(tokio::spawn(async move {
            let sent = Instant::now();
            let answer = async {
                let mut answer = client.request(request).await.map_err(|error| error.to_string())?;
                let status = answer.status().as_u16();
                if status == 429 || status == 503 {
                    let _ = answer.body_mut().collect().await;
                    return Ok(None);
                }
                if status != 200 {
                    return Err(format!("status {status}"));
                }
                let mut first = None;
                while let Some(frame) = answer.body_mut().frame().await {
                    let frame = frame.map_err(|error| error.to_string())?;
                    if frame.is_data() {
                        first.get_or_insert_with(|| sent.elapsed().as_secs_f64());
                    }
                }
                first.map(Some).ok_or_else(|| "empty".to_owned())
            };
            let answer = timeout(patience, answer).await;
            if !is_measured {
                return;
            }
            let mut seen = seen.lock().unwrap();
            seen.sent += 1;
            seen.tokens += length;
            match answer {
                Ok(Ok(Some(first))) => {
                    seen.ttft.push(first);
                    if first <= target {
                        seen.tokens_within += length;
                    }
                }
                Ok(Ok(None)) => seen.refused.push(sent.elapsed().as_secs_f64()),
                Err(_) => seen.gave_up += 1,
                Ok(Err(error)) => {
                    seen.failed += 1;
                    if seen.first_failure.is_empty() {
                        seen.first_failure = error;
                    }
                }
            }
        }));
    }
    for task in tasks {
        let _ = task.await;
    }
    let mut seen = seen.lock().unwrap();
    seen.ttft.sort_by(f64::total_cmp);
    seen.refused.sort_by(f64::total_cmp);
    let within = seen.ttft.iter().filter(|ttft| **ttft <= a.target).count();
    let quantile = |values: &[f64], q: f64| {
        let value = values.get(((values.len() as f64 - 1.0).max(0.0) * q) as usize);
        value.map_or(0.0, |value| (value * 1000.0).round() / 1000.0)
    };
    println!(
        "{}",
        serde_json::json!({"rate": a.rate, "sent": seen.sent, "within": within,
            "share_within": within as f64 / seen.sent.max(1) as f64, "goodput": within as f64 / a.secs,
            "tokens_s": seen.tokens as f64 / a.secs, "goodput_tokens_s": seen.tokens_within as f64 / a.secs,
            "answered": seen.ttft.len(), "refused": seen.refused.len(), "gave_up": seen.gave_up,
            "failed": seen.failed, "first_failure": seen.first_failure,
            "ttft_p50": quantile(&seen.ttft, 0.5), "ttft_p99": quantile(&seen.ttft, 0.99),
            "refused_after_p50": quantile(&seen.refused, 0.5)})
    );
}
