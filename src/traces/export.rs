//! What is exported, and to where: the settings with OpenTelemetry's environment variables, which win. Pure.

use std::collections::BTreeMap;
use std::time::Duration;

use hyper::Uri;

use super::environment::Environment;
use super::sampler::Sampler;
use super::settings::{Compression, Protocol, Settings};
use crate::http::tls::ClientSettings;
use crate::secret::Secret;

/// Added to an URL without a path, for OTLP over HTTP.
const HTTP_PATH: &str = "/v1/traces";

#[derive(Clone, Debug, PartialEq)]
pub struct Export {
    pub endpoint: Endpoint,
    pub protocol: Protocol,
    pub headers: BTreeMap<String, Secret>,
    pub compression: Compression,
    pub timeout: Duration,
    pub sampler: Sampler,
    /// `service.name` among them.
    pub resource: BTreeMap<String, String>,
    /// Spans.
    pub max_queue: usize,
    pub max_batch: usize,
    pub export_interval: Duration,
    pub export_timeout: Duration,
}

/// Where the collector listens.
#[derive(Clone, Debug, PartialEq)]
pub struct Endpoint {
    /// `host:port`.
    pub authority: String,
    /// Of OTLP over HTTP.
    pub path: String,
    pub tls: Option<ClientSettings>,
}

#[derive(Debug, PartialEq)]
pub struct Asked {
    /// `None` if nothing is exported.
    pub export: Option<Export>,
    /// Environment variables that cannot be used.
    pub warnings: Vec<String>,
}

/// What is wrong with settings: the key in `traces`, and what to write instead.
pub type Problem = (&'static str, String);

impl Settings {
    /// Everything that is wrong with the settings themselves.
    pub fn check(&self) -> Vec<Problem> {
        let mut problems = Vec::new();
        if let Err(error) = endpoint(&self.endpoint, self.protocol) {
            problems.push(("endpoint", error));
        }
        let is_https = self.endpoint.starts_with("https://");
        if self.tls.is_some() && !is_https && !self.endpoint.is_empty() {
            let message =
                "is for an `https` endpoint; write `endpoint: https://HOST:PORT`, or leave it out";
            problems.push(("tls", message.to_owned()));
        }
        for (name, value) in &self.headers {
            let is_name = hyper::header::HeaderName::from_bytes(name.as_bytes()).is_ok();
            let is_value = hyper::header::HeaderValue::from_str(value.expose()).is_ok();
            if !is_name || !is_value {
                let message = format!("`{name}` is no header, or its value cannot be sent in one");
                problems.push(("headers", message));
            }
        }
        problems
    }
}

/// What is asked for. `settings` are those of the configuration, if it has any; they were checked.
pub fn asked(settings: Option<&Settings>, read: &dyn Fn(&str) -> Option<String>) -> Asked {
    let mut environment = Environment::new(read);
    let export = is_on(settings.is_some(), &mut environment).then(|| {
        let settings = settings.cloned().unwrap_or_default();
        export(&settings, &mut environment)
    });
    Asked {
        export,
        warnings: environment.warnings,
    }
}

fn is_on(is_configured: bool, environment: &mut Environment<'_>) -> bool {
    if environment.is_true("OTEL_SDK_DISABLED") {
        return false;
    }
    let exporter = "OTEL_TRACES_EXPORTER";
    match environment.text(exporter).as_deref() {
        Some("none") => return false,
        Some("otlp") => return true,
        Some(other) => environment.wrong(exporter, other, "`otlp` or `none`"),
        None => {}
    }
    is_configured || environment.of_exporter("ENDPOINT").is_some()
}

fn export(settings: &Settings, environment: &mut Environment<'_>) -> Export {
    let protocol = protocol(settings, environment);
    let tls = |environment: &Environment<'_>| {
        let mut tls = settings.tls.clone().unwrap_or_default();
        let variables = [
            ("CERTIFICATE", &mut tls.ca),
            ("CLIENT_CERTIFICATE", &mut tls.certificate),
            ("CLIENT_KEY", &mut tls.key),
        ];
        for (name, file) in variables {
            if let Some((_, path)) = environment.of_exporter(name) {
                *file = path;
            }
        }
        tls
    };
    let configured = || {
        // Checked before.
        endpoint(&settings.endpoint, protocol).unwrap_or_else(|_| default_endpoint(protocol))
    };
    let (mut endpoint, is_https) = match environment.of_exporter("ENDPOINT") {
        None => configured(),
        Some((name, url)) => match of_environment(&name, &url, protocol, environment) {
            Ok(endpoint) => endpoint,
            Err(_) => {
                // It may have a password, or a token in its query.
                environment.unusable(
                    &name,
                    "`http://HOST:PORT` or `https://HOST:PORT`, without user and query",
                );
                configured()
            }
        },
    };
    endpoint.tls = is_https.then(|| tls(environment));
    let mut resource = settings.resource_attributes.clone();
    resource.insert("service.name".to_owned(), settings.service_name.clone());
    resource.extend(environment.pairs("OTEL_RESOURCE_ATTRIBUTES"));
    if let Some(name) = environment.text("OTEL_SERVICE_NAME") {
        resource.insert("service.name".to_owned(), name);
    }
    let compression = match environment.of_exporter("COMPRESSION") {
        Some((_, text)) if text == "gzip" => Compression::Gzip,
        _ => settings.compression,
    };
    let timeout = match environment.of_exporter("TIMEOUT") {
        None => None,
        Some((name, _)) => environment.milliseconds(&name),
    };
    let advanced = &settings.advanced;
    let timeout = timeout.unwrap_or(advanced.timeout);
    let max_queue = environment.count("OTEL_BSP_MAX_QUEUE_SIZE");
    let max_batch = environment.count("OTEL_BSP_MAX_EXPORT_BATCH_SIZE");
    let interval = environment.milliseconds("OTEL_BSP_SCHEDULE_DELAY");
    let export_timeout = environment.milliseconds("OTEL_BSP_EXPORT_TIMEOUT");
    Export {
        endpoint,
        protocol,
        headers: settings.headers.clone(),
        compression,
        timeout,
        sampler: sampler(settings.sample_ratio, environment),
        resource,
        max_queue: max_queue.unwrap_or(advanced.max_queue) as usize,
        max_batch: max_batch.unwrap_or(advanced.max_batch) as usize,
        export_interval: interval.unwrap_or(advanced.export_interval),
        export_timeout: export_timeout.unwrap_or(timeout).min(timeout),
    }
}

fn protocol(settings: &Settings, environment: &mut Environment<'_>) -> Protocol {
    let Some((name, text)) = environment.of_exporter("PROTOCOL") else {
        return settings.protocol;
    };
    match text.as_str() {
        "grpc" => Protocol::Grpc,
        "http/protobuf" => Protocol::Http,
        other => {
            environment.wrong(&name, other, "`grpc` or `http/protobuf`");
            settings.protocol
        }
    }
}

fn sampler(ratio: f64, environment: &mut Environment<'_>) -> Sampler {
    const NAME: &str = "OTEL_TRACES_SAMPLER";
    let argument = |environment: &mut Environment<'_>| {
        let parse = |text: &str| {
            text.parse()
                .ok()
                .filter(|ratio| (0.0..=1.0).contains(ratio))
        };
        let ratio = environment.parsed("OTEL_TRACES_SAMPLER_ARG", "a number from 0 to 1", parse);
        ratio.unwrap_or(1.0)
    };
    let Some(name) = environment.text(NAME) else {
        return Sampler::new(ratio, true);
    };
    match name.as_str() {
        "always_on" => Sampler::new(1.0, false),
        "always_off" => Sampler::new(0.0, false),
        "traceidratio" => Sampler::new(argument(environment), false),
        "parentbased_always_on" => Sampler::new(1.0, true),
        "parentbased_always_off" => Sampler::new(0.0, true),
        "parentbased_traceidratio" => Sampler::new(argument(environment), true),
        other => {
            let expected =
                "`always_on`, `always_off`, `traceidratio`, or one of these after `parentbased_`";
            environment.wrong(NAME, other, expected);
            Sampler::new(ratio, true)
        }
    }
}

/// Where a collector listens, by default at the port and the path of the protocol.
fn endpoint_at(host: &str, port: Option<u16>, path: &str, protocol: Protocol) -> Endpoint {
    let (default_port, default_path) = match protocol {
        Protocol::Grpc => (4_317, ""),
        Protocol::Http => (4_318, HTTP_PATH),
    };
    let path = match path {
        "" | "/" => default_path,
        path => path,
    };
    Endpoint {
        authority: format!("{host}:{}", port.unwrap_or(default_port)),
        path: path.to_owned(),
        tls: None,
    }
}

fn default_endpoint(protocol: Protocol) -> (Endpoint, bool) {
    (endpoint_at("localhost", None, "", protocol), false)
}

/// The endpoint of an URL, without its TLS settings, and whether it has TLS.
fn endpoint(url: &str, protocol: Protocol) -> Result<(Endpoint, bool), String> {
    const EXPECTED: &str = "`http://HOST:PORT` or `https://HOST:PORT`";
    if url.is_empty() {
        return Ok(default_endpoint(protocol));
    }
    let wrong = || format!("`{url}` is no URL of a collector; write {EXPECTED}");
    let uri: Uri = url.parse().map_err(|_| wrong())?;
    let is_https = match uri.scheme_str() {
        Some("http") => false,
        Some("https") => true,
        _ => return Err(wrong()),
    };
    let host = uri
        .host()
        .filter(|host| !host.is_empty())
        .ok_or_else(wrong)?;
    let has_user = uri
        .authority()
        .is_some_and(|authority| authority.as_str().contains('@'));
    if has_user || uri.query().is_some() {
        return Err(wrong());
    }
    let endpoint = endpoint_at(host, uri.port_u16(), uri.path(), protocol);
    Ok((endpoint, is_https))
}

/// The endpoint of a variable. `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT` is the whole URL; the general one is that of all
/// signals, so that the path is added.
fn of_environment(
    name: &str,
    url: &str,
    protocol: Protocol,
    environment: &Environment<'_>,
) -> Result<(Endpoint, bool), String> {
    // gRPC's targets often stand without a scheme.
    let url = if url.contains("://") {
        url.to_owned()
    } else {
        let insecure = environment.of_exporter("INSECURE");
        let is_secure = insecure.is_some_and(|(_, text)| text.eq_ignore_ascii_case("false"));
        format!("{}://{url}", if is_secure { "https" } else { "http" })
    };
    let (mut endpoint, is_https) = endpoint(&url, protocol)?;
    if protocol == Protocol::Http {
        let path = url
            .parse::<Uri>()
            .map_or(String::new(), |uri| uri.path().to_owned());
        endpoint.path = match name.contains("_TRACES_") {
            true if path.is_empty() => "/".to_owned(),
            true => path,
            false => format!("{}{HTTP_PATH}", path.trim_end_matches('/')),
        };
    }
    Ok((endpoint, is_https))
}

#[cfg(test)]
mod tests;
