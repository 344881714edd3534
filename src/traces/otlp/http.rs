//! OTLP over HTTP: the router's own client carries the requests.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::header::{HOST, HeaderValue};
use hyper::{Request, Response};
use opentelemetry_http::{HttpClient, HttpError};
use opentelemetry_otlp::{Compression, Protocol, SpanExporter, WithExportConfig, WithHttpConfig};

use crate::http::client::{self, Pool};
use crate::http::tls;
use crate::traces::export::Export;
use crate::traces::settings;

/// Of a collector's answer: how many spans it did not take.
const MAX_ANSWER_BYTES: usize = 1 << 20;

pub(super) fn sender(
    export: &Export,
    tls: Option<Arc<tls::Client>>,
) -> Result<SpanExporter, String> {
    let endpoint = &export.endpoint;
    let scheme = if tls.is_some() { "https" } else { "http" };
    let url = format!("{scheme}://{}{}", endpoint.authority, endpoint.path);
    let client = Client {
        pool: Pool::with_tls(endpoint.authority.clone(), connections(), tls),
        timeout: export.timeout,
    };
    let headers = export.headers.iter();
    let headers: HashMap<_, _> = headers
        .map(|(name, value)| (name.clone(), value.expose().to_owned()))
        .collect();
    let builder = SpanExporter::builder()
        .with_http()
        .with_http_client(client)
        .with_protocol(Protocol::HttpBinary)
        .with_endpoint(url)
        .with_headers(headers)
        .with_timeout(export.timeout);
    let builder = match export.compression {
        settings::Compression::None => builder,
        settings::Compression::Gzip => builder.with_compression(Compression::Gzip),
    };
    builder.build().map_err(|error| error.to_string())
}

/// Exports are seconds apart.
fn connections() -> client::Settings {
    client::Settings {
        idle_connection_timeout: Duration::from_secs(30),
        max_idle_connections: 1,
        ..client::Settings::default()
    }
}

#[derive(Debug)]
struct Client {
    pool: Arc<Pool>,
    timeout: Duration,
}

impl Client {
    async fn send(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let (mut head, body) = request.into_parts();
        head.headers
            .insert(HOST, HeaderValue::from_str(self.pool.authority())?);
        head.uri = client::origin_form(&head.uri);
        let build = || Request::from_parts(head.clone(), Full::new(body.clone()));
        let answer = match self.pool.send(build()).await {
            // Spans that arrive twice have the same ids.
            Err(client::Error::Stale { .. }) => self.pool.send_anew(build()).await?,
            answer => answer?,
        };
        let (head, body) = answer.into_parts();
        let body = Limited::new(body, MAX_ANSWER_BYTES).collect().await?;
        Ok(Response::from_parts(head, body.to_bytes()))
    }
}

type Answer<'a> = Pin<Box<dyn Future<Output = Result<Response<Bytes>, HttpError>> + Send + 'a>>;

impl HttpClient for Client {
    // As the macro `async_trait` writes it.
    fn send_bytes<'life0, 'async_trait>(
        &'life0 self,
        request: Request<Bytes>,
    ) -> Answer<'async_trait>
    where
        'life0: 'async_trait,
        Self: 'async_trait,
    {
        Box::pin(async move { tokio::time::timeout(self.timeout, self.send(request)).await? })
    }
}
