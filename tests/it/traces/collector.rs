//! An OpenTelemetry collector that keeps what it gets, over gRPC and over HTTP.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::io::Read;
use std::net::SocketAddr;
use std::sync::Arc;

use bytes::Bytes;
use flate2::read::GzDecoder;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::common::v1::{AnyValue, KeyValue};
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use parking_lot::Mutex;
use prost::Message;
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;
use warmroute::http::{Body, full, grpc};

use crate::cluster::eventually;

#[derive(Clone, Debug)]
pub(super) struct Collector {
    pub(super) address: SocketAddr,
    kept: Arc<Mutex<Kept>>,
}

#[derive(Debug, Default)]
struct Kept {
    spans: Vec<Span>,
    resource: BTreeMap<String, String>,
    /// The headers of the last export.
    headers: BTreeMap<String, String>,
    paths: Vec<String>,
}

/// A span with its attributes as text.
#[derive(Clone, Debug)]
pub(super) struct Span {
    pub(super) trace_id: String,
    pub(super) id: String,
    pub(super) parent: String,
    pub(super) name: String,
    pub(super) kind: SpanKind,
    pub(super) start: u64,
    pub(super) end: u64,
    pub(super) attributes: BTreeMap<String, String>,
    pub(super) events: Vec<(String, BTreeMap<String, String>)>,
    /// Trace and span.
    pub(super) links: Vec<(String, String)>,
    pub(super) is_error: bool,
}

impl Span {
    pub(super) fn get(&self, name: &str) -> &str {
        self.attributes.get(name).map_or("", |value| value)
    }

    pub(super) fn event(&self, name: &str) -> &BTreeMap<String, String> {
        let found = self.events.iter().find(|(known, _)| known == name);
        &found.unwrap_or_else(|| panic!("no {name}: {self:#?}")).1
    }
}

/// The spans of one trace: the request's own, and its tries by their start.
#[derive(Debug)]
pub(super) struct Trace {
    pub(super) server: Span,
    pub(super) tries: Vec<Span>,
}

fn plain(body: Bytes, is_compressed: bool) -> Bytes {
    if !is_compressed {
        return body;
    }
    let mut plain = Vec::new();
    let read = GzDecoder::new(&*body).read_to_end(&mut plain);
    read.expect("it is compressed by gzip");
    plain.into()
}

impl Collector {
    pub(super) async fn start() -> Self {
        Self::start_with(None).await
    }

    pub(super) async fn start_with(tls: Option<TlsAcceptor>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let collector = Self {
            address: listener.local_addr().unwrap(),
            kept: Arc::default(),
        };
        let served = collector.clone();
        tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let served = served.clone();
                let serve = service_fn(move |request| {
                    let served = served.clone();
                    async move { Ok::<_, Infallible>(served.answer(request).await) }
                });
                let tls = tls.clone();
                tokio::spawn(async move {
                    let builder = auto::Builder::new(TokioExecutor::new());
                    let Some(tls) = tls else {
                        let _ = builder.serve_connection(TokioIo::new(stream), serve).await;
                        return;
                    };
                    if let Ok(stream) = tls.accept(stream).await {
                        let _ = builder.serve_connection(TokioIo::new(stream), serve).await;
                    }
                });
            }
        });
        collector
    }

    async fn answer(&self, request: Request<Incoming>) -> Response<Body> {
        let path = request.uri().path().to_owned();
        let headers = request.headers().iter().map(|(name, value)| {
            let value = String::from_utf8_lossy(value.as_bytes());
            (name.to_string(), value.into_owned())
        });
        let headers: BTreeMap<String, String> = headers.collect();
        let is_grpc = grpc::is_grpc(&request);
        let is_compressed = |header| headers.get(header).is_some_and(|value| value == "gzip");
        let body = request.into_body().collect().await.unwrap().to_bytes();
        let body = if is_grpc {
            // The frame's flag and length.
            assert_eq!(body[0] == 1, is_compressed("grpc-encoding"));
            plain(body.slice(5..), body[0] == 1)
        } else {
            plain(body, is_compressed("content-encoding"))
        };
        let export = ExportTraceServiceRequest::decode(body).unwrap();
        let mut kept = self.kept.lock();
        kept.paths.push(path);
        kept.headers = headers;
        for of_resource in export.resource_spans {
            let resource = of_resource.resource.unwrap_or_default();
            kept.resource = texts(&resource.attributes);
            let spans = of_resource
                .scope_spans
                .into_iter()
                .flat_map(|scope| scope.spans);
            kept.spans.extend(spans.map(span));
        }
        if is_grpc {
            grpc::answer(Once(Some(grpc::frame(b""))))
        } else {
            Response::new(full(Bytes::new()))
        }
    }

    pub(super) fn spans(&self) -> Vec<Span> {
        self.kept.lock().spans.clone()
    }

    pub(super) fn resource(&self) -> BTreeMap<String, String> {
        self.kept.lock().resource.clone()
    }

    pub(super) fn headers(&self) -> BTreeMap<String, String> {
        self.kept.lock().headers.clone()
    }

    pub(super) fn paths(&self) -> Vec<String> {
        self.kept.lock().paths.clone()
    }

    /// The traces of so many requests, in the order of their starts.
    pub(super) async fn traces(&self, count: usize) -> Vec<Trace> {
        let is_root = |span: &&Span| span.kind != SpanKind::Client;
        eventually("the spans come", async || {
            self.spans().iter().filter(is_root).count() >= count
        })
        .await;
        let mut spans = self.spans();
        spans.sort_by_key(|span| span.start);
        let roots = spans.iter().filter(is_root);
        let traces = roots.map(|root| Trace {
            server: root.clone(),
            tries: spans
                .iter()
                .filter(|span| span.kind == SpanKind::Client && span.parent == root.id)
                .cloned()
                .collect(),
        });
        traces.collect()
    }

    /// The trace of the only request.
    pub(super) async fn trace(&self) -> Trace {
        let mut traces = self.traces(1).await;
        assert_eq!(traces.len(), 1, "{traces:#?}");
        traces.remove(0)
    }
}

/// A stream of one message.
struct Once(Option<Bytes>);

impl futures_core::Stream for Once {
    type Item = Result<Bytes, tonic::Status>;

    fn poll_next(
        mut self: std::pin::Pin<&mut Self>,
        _: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Self::Item>> {
        std::task::Poll::Ready(self.0.take().map(Ok))
    }
}

fn span(span: opentelemetry_proto::tonic::trace::v1::Span) -> Span {
    let events = span.events.iter();
    let links = span.links.iter();
    Span {
        trace_id: hex(&span.trace_id),
        id: hex(&span.span_id),
        parent: hex(&span.parent_span_id),
        kind: span.kind(),
        start: span.start_time_unix_nano,
        end: span.end_time_unix_nano,
        attributes: texts(&span.attributes),
        events: events
            .map(|event| (event.name.clone(), texts(&event.attributes)))
            .collect(),
        links: links
            .map(|link| (hex(&link.trace_id), hex(&link.span_id)))
            .collect(),
        is_error: span.status.as_ref().is_some_and(|status| status.code == 2),
        name: span.name,
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn texts(attributes: &[KeyValue]) -> BTreeMap<String, String> {
    let attributes = attributes.iter();
    attributes
        .map(|attribute| (attribute.key.clone(), text(attribute.value.as_ref())))
        .collect()
}

fn text(value: Option<&AnyValue>) -> String {
    match value.and_then(|value| value.value.as_ref()) {
        Some(Value::StringValue(text)) => text.clone(),
        Some(Value::BoolValue(value)) => value.to_string(),
        Some(Value::IntValue(number)) => number.to_string(),
        Some(Value::DoubleValue(number)) => number.to_string(),
        Some(Value::ArrayValue(array)) => {
            let values = array.values.iter().map(|value| text(Some(value)));
            values.collect::<Vec<_>>().join(",")
        }
        _ => String::new(),
    }
}
