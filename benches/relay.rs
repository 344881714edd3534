//! A whole request over real sockets: through the router, and straight to the same engine.
//!
//! The difference of the two is what the router adds for one client at a time. Budget: 100 µs. CPU
//! a request under load, beside other proxies, is measured from outside; the README has the table.

use std::net::SocketAddr;

use criterion::{Criterion, criterion_group, criterion_main};
use http_body_util::{BodyExt, Full};
use hyper::Request;
use serde_json::json;
use tokio::net::TcpListener;
use warmroute::app::App;
use warmroute::config::Config;
use warmroute::fleet::discovery::WorkerSpec;
use warmroute::http::client::{Pool, Settings};
use warmroute::http::drain::Tasks;
use warmroute::sim::step_time::AnswerTimes;
use warmroute::sim::worker;

fn relay(criterion: &mut Criterion) {
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let tasks = Tasks::default();
    let (engine, app) = runtime.block_on(async {
        let engine = worker::bind(worker::Settings {
            decode_ms: 0,
            answer_times: AnswerTimes::NONE,
            prefill_tokens_per_second: u32::MAX.try_into().expect("not zero"),
            ..worker::Settings::default()
        })
        .await
        .expect("a free port");
        let address = engine.addr();
        tasks.spawn(engine.run(tasks.stopped()));
        let worker = WorkerSpec {
            url: format!("http://{address}"),
            ..WorkerSpec::default()
        };
        let config = Config {
            workers: vec![worker],
            ..Config::default()
        };
        let free = async || TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let app = App::start(&config, free().await, free().await).expect("a router");
        while !app.fleet().snapshot().is_ready() {
            tokio::task::yield_now().await;
        }
        (address, app)
    });
    let body = json!({"model": "sim", "max_tokens": 1,
        "messages": [{"role": "user", "content": "lorem ipsum dolor sit amet ".repeat(74)}]})
    .to_string();
    let mut group = criterion.benchmark_group("relay");
    for (name, address) in [
        ("direct", engine),
        ("through_the_router", app.api_address()),
    ] {
        let pool = Pool::new(address.to_string(), Settings::default());
        group.bench_function(name, |bencher| {
            bencher.iter(|| runtime.block_on(ask(&pool, address, &body)));
        });
    }
    group.finish();
    runtime.block_on(async {
        app.drain().await;
        tasks.drain(std::time::Duration::from_secs(1)).await;
    });
}

async fn ask(pool: &std::sync::Arc<Pool>, address: SocketAddr, body: &str) -> usize {
    let request = Request::post("/v1/chat/completions")
        .header("host", address.to_string())
        .header("content-type", "application/json")
        .body(Full::new(body.to_owned().into()))
        .expect("a good request");
    let answer = pool.send(request).await.expect("an answer");
    assert!(answer.status().is_success());
    answer
        .into_body()
        .collect()
        .await
        .expect("a whole answer")
        .to_bytes()
        .len()
}

criterion_group!(benches, relay);
criterion_main!(benches);
