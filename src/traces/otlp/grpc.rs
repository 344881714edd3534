//! OTLP over gRPC: a channel of tonic over our own sockets and TLS.

use std::io;
use std::sync::Arc;

use hyper::Uri;
use hyper_util::rt::TokioIo;
use opentelemetry_otlp::{Compression, SpanExporter, WithExportConfig, WithTonicConfig};
use tokio::net::TcpStream;
use tonic::metadata::{MetadataKey, MetadataMap, MetadataValue};
use tonic::transport::{Channel, Endpoint};

use crate::http::tls::{self, Protocol, Socket};
use crate::traces::export::Export;
use crate::traces::settings;

pub(super) fn sender(
    export: &Export,
    tls: Option<Arc<tls::Client>>,
) -> Result<SpanExporter, String> {
    let mut metadata = MetadataMap::new();
    for (name, value) in &export.headers {
        let name = MetadataKey::from_bytes(name.to_ascii_lowercase().as_bytes());
        let value = MetadataValue::try_from(value.expose());
        if let (Ok(name), Ok(value)) = (name, value) {
            metadata.insert(name, value);
        }
    }
    let builder = SpanExporter::builder()
        .with_tonic()
        .with_channel(channel(&export.endpoint.authority, tls)?)
        .with_metadata(metadata)
        .with_timeout(export.timeout);
    let builder = match export.compression {
        settings::Compression::None => builder,
        settings::Compression::Gzip => builder.with_compression(Compression::Gzip),
    };
    builder.build().map_err(|error| error.to_string())
}

/// Connects when it is used, and again after a failure.
fn channel(authority: &str, tls: Option<Arc<tls::Client>>) -> Result<Channel, String> {
    let failed = |error: &dyn std::fmt::Display| format!("{authority}: {error}");
    // The connector decides about TLS, and the origin says so to the server.
    let endpoint = Endpoint::from_shared(format!("http://{authority}"));
    let mut endpoint = endpoint.map_err(|error| failed(&error))?;
    if tls.is_some() {
        let origin: Result<Uri, _> = format!("https://{authority}").parse();
        endpoint = endpoint.origin(origin.map_err(|error| failed(&error))?);
    }
    let authority = authority.to_owned();
    let connector = tower::service_fn(move |_: Uri| connect(authority.clone(), tls.clone()));
    Ok(endpoint.connect_with_connector_lazy(connector))
}

async fn connect(authority: String, tls: Option<Arc<tls::Client>>) -> io::Result<TokioIo<Socket>> {
    let stream = TcpStream::connect(&authority).await?;
    let _ = stream.set_nodelay(true);
    let Some(tls) = tls else {
        return Ok(TokioIo::new(Socket::Clear(stream)));
    };
    let host = authority.rsplit_once(':');
    let host = host.map_or(authority.as_str(), |(host, _)| host);
    let socket = tls.connect(host, stream, Protocol::Http2).await?;
    Ok(TokioIo::new(socket))
}
