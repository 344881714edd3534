//! What the engine-shaped servers have in common: their sockets, the pages that routers ask for, streamed answers.
use bytes::Bytes;
use futures_util::{Stream, StreamExt};
use http_body_util::{BodyExt, Full, StreamBody, combinators::BoxBody};
use hyper::{
    Request, Response,
    body::{Frame, Incoming},
    service::service_fn,
};
use hyper_util::rt::TokioIo;
use std::{
    convert::Infallible,
    net::SocketAddr,
    pin::Pin,
    sync::Mutex,
    task::{Context, Poll},
};

pub type Answer = Response<BoxBody<Bytes, Infallible>>;

pub fn answer(status: u16, kind: &str, text: String) -> Answer {
    Response::builder()
        .status(status)
        .header("content-type", kind)
        .body(Full::new(Bytes::from(text)).boxed())
        .unwrap()
}
pub fn json(text: String) -> Answer {
    answer(200, "application/json", text)
}
pub fn not_found() -> Answer {
    answer(404, "application/json", r#"{"detail":"Not Found"}"#.into())
}
pub fn models(model: &str) -> Answer {
    json(format!(
        r#"{{"object":"list","data":[{{"id":"{model}","object":"model","created":1,"owned_by":"vllm","root":"{model}","max_model_len":262144}}]}}"#
    ))
}
pub fn metrics(model: &str, running: u64, waiting: u64, kv_usage: f64) -> Answer {
    let labels = format!("engine=\"0\",model_name=\"{model}\"");
    let page = format!(
        "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{{{labels}}} {running}\n\
         # TYPE vllm:num_requests_waiting gauge\nvllm:num_requests_waiting{{{labels}}} {waiting}\n\
         # TYPE vllm:kv_cache_usage_perc gauge\nvllm:kv_cache_usage_perc{{{labels}}} {kv_usage}\n"
    );
    answer(200, "text/plain; version=0.0.4", page)
}
/// The answer of `/tokenize`: a token for four bytes of the text, whatever the request's shape.
pub fn tokenized(body: &[u8]) -> Answer {
    let id = |piece: &[u8]| {
        let hash = |sum: u32, byte: &u8| sum.wrapping_mul(31).wrapping_add(u32::from(*byte));
        (piece.iter().fold(0, hash) % 150_000).to_string()
    };
    let ids: Vec<String> = body.chunks(4).map(id).collect();
    json(format!(
        r#"{{"count":{},"max_model_len":262144,"tokens":[{}],"token_strs":null}}"#,
        ids.len(),
        ids.join(",")
    ))
}
pub fn generates(path: &str) -> bool {
    matches!(
        path,
        "/v1/chat/completions" | "/v1/completions" | "/v1/responses"
    )
}
pub async fn body_of(request: Request<Incoming>) -> Bytes {
    let body = request.into_body().collect().await;
    body.map(|body| body.to_bytes()).unwrap_or_default()
}
/// A streamed answer, each text of which is a piece.
pub fn events(texts: impl Stream<Item = String> + Send + 'static) -> Answer {
    let frames = texts.map(|text| Ok::<_, Infallible>(Frame::data(Bytes::from(text))));
    let frames = OneTask(Mutex::new(Box::pin(frames)));
    Response::builder()
        .header("content-type", "text/event-stream")
        .body(BodyExt::boxed(StreamBody::new(frames)))
        .unwrap()
}
/// BoxBody wants Sync; the stream is only ever polled by one task.
struct OneTask<S>(Mutex<Pin<Box<S>>>);
impl<S: Stream> Stream for OneTask<S> {
    type Item = S::Item;
    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<S::Item>> {
        self.0.lock().unwrap().as_mut().poll_next(cx)
    }
}
/// Serves a worker on each of the ports. `worker` gives what answers the requests of a port.
pub async fn serve<H, F>(name: &str, first_port: u16, workers: u16, worker: impl Fn(u16) -> H)
where
    H: Fn(Request<Incoming>) -> F + Clone + Send + Sync + 'static,
    F: Future<Output = Answer> + Send + 'static,
{
    let mut tasks = vec![];
    for port in first_port..first_port + workers {
        let handle = worker(port);
        let listener = tokio::net::TcpListener::bind(SocketAddr::from(([127, 0, 0, 1], port)))
            .await
            .expect("bind");
        tasks.push(tokio::spawn(async move {
            loop {
                let Ok((stream, _)) = listener.accept().await else {
                    continue;
                };
                let _ = stream.set_nodelay(true);
                let handle = handle.clone();
                let service = service_fn(move |request| {
                    let answer = handle(request);
                    async move { Ok::<_, Infallible>(answer.await) }
                });
                tokio::spawn(async move {
                    let _ = hyper::server::conn::http1::Builder::new()
                        .serve_connection(TokioIo::new(stream), service)
                        .await;
                });
            }
        }));
    }
    println!("{name}: {workers} workers from port {first_port}");
    for task in tasks {
        let _ = task.await;
    }
}
