//! The exporter: reads records off their queue on a thread of its own, and sends their spans to a collector.

mod grpc;
mod http;

use std::io;
use std::sync::Arc;
use std::time::Duration;

use opentelemetry::KeyValue;
use opentelemetry_otlp::SpanExporter;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{SpanData, SpanExporter as _};
use tokio::time::Instant;
use tracing::{debug, warn};

use super::export::Export;
use super::names;
use super::queue::{Message, Metrics, Records};
use super::settings::Protocol;
use super::spans::spans;
use super::tracer::Tracer;
use crate::http::io_threads::OffloadThread;
use crate::http::tls;
use crate::observe;
use crate::observe::log_once::LogOnce;

/// A collector that fails is asked again after the interval, then after longer ones, up to this. Spans that come meanwhile are
/// lost, as they would be with it.
const PAUSE_MAX: Duration = Duration::from_secs(30);

/// Sends the spans of a [`Tracer`]. Dropped, it sends no more.
#[derive(Debug)]
pub struct Exporter {
    _thread: OffloadThread,
    tracer: Tracer,
}

impl Exporter {
    /// Starts one, and the tracer that it serves. It connects when there is something to send.
    pub fn start(
        export: &Export,
        clients: &tls::Clients,
        metrics: &Metrics,
    ) -> io::Result<(Self, Tracer)> {
        let (tracer, records) = Tracer::new(export.sampler, export.max_queue, metrics.clone());
        let thread = OffloadThread::start("traces")?;
        let tls = export
            .endpoint
            .tls
            .as_ref()
            .map(|settings| clients.get(settings));
        let sender = {
            // The channel of gRPC starts tasks.
            let _runtime = thread.runtime().enter();
            sender(export, tls).map_err(io::Error::other)?
        };
        let task = Task {
            sender,
            metrics: metrics.clone(),
            max_batch: export.max_batch,
            interval: export.export_interval,
            timeout: export.export_timeout,
            failures: 0,
            not_before: None,
            log: LogOnce::default(),
        };
        drop(thread.runtime().spawn(task.run(records)));
        let exporter = Self {
            _thread: thread,
            tracer: tracer.clone(),
        };
        Ok((exporter, tracer))
    }

    /// Sends what is left, for no longer than `limit`.
    pub async fn flush(&self, limit: Duration) {
        if tokio::time::timeout(limit, self.tracer.flush())
            .await
            .is_err()
        {
            warn!(?limit, "the last spans were not exported in time");
        }
    }
}

fn sender(export: &Export, tls: Option<Arc<tls::Client>>) -> Result<SpanExporter, String> {
    let mut sender = match export.protocol {
        Protocol::Grpc => grpc::sender(export, tls),
        Protocol::Http => http::sender(export, tls),
    }?;
    let own = [
        KeyValue::new("service.version", env!("CARGO_PKG_VERSION")),
        KeyValue::new("telemetry.sdk.language", "rust"),
        KeyValue::new("telemetry.sdk.name", "opentelemetry"),
    ];
    let asked = export.resource.iter();
    let asked = asked.map(|(key, value)| KeyValue::new(key.clone(), value.clone()));
    let resource = Resource::builder_empty()
        .with_schema_url(own.into_iter().chain(asked), names::SCHEMA_URL)
        .build();
    sender.set_resource(&resource);
    Ok(sender)
}

struct Task {
    sender: SpanExporter,
    metrics: Metrics,
    max_batch: usize,
    interval: Duration,
    timeout: Duration,
    /// Exports in a row that failed. What goes on is logged once.
    failures: u32,
    /// Until then nothing is sent, after failures.
    not_before: Option<Instant>,
    log: LogOnce,
}

impl Task {
    async fn run(mut self, mut records: Records) {
        let mut batch = Vec::new();
        let mut due: Option<Instant> = None;
        loop {
            let wait = observe::sleep_until(due.map(Instant::into_std));
            let message = tokio::select! {
                biased;
                message = records.next() => message,
                () = wait => {
                    self.export(std::mem::take(&mut batch)).await;
                    due = None;
                    continue;
                }
            };
            match message {
                Some(Message::Ended(record)) => {
                    batch.extend(spans(&record));
                    let now = Instant::from_std(observe::now());
                    due.get_or_insert(now + self.interval);
                    if batch.len() >= self.max_batch {
                        self.export(std::mem::take(&mut batch)).await;
                        due = None;
                    }
                }
                Some(Message::Flush(flushed)) => {
                    self.not_before = None;
                    self.export(std::mem::take(&mut batch)).await;
                    due = None;
                    let _ = flushed.send(());
                }
                None => return self.export(batch).await,
            }
        }
    }

    async fn export(&mut self, batch: Vec<SpanData>) {
        if batch.is_empty() {
            return;
        }
        let count = batch.len() as u64;
        if self.not_before.is_some_and(|at| Instant::now() < at) {
            self.metrics.failed.inc_by(count);
            return;
        }
        let sent = tokio::time::timeout(self.timeout, self.sender.export(batch)).await;
        let failure = match sent {
            Ok(Ok(())) => None,
            Ok(Err(error)) => Some(error.to_string()),
            Err(_) => Some("timed out".to_owned()),
        };
        let Some(error) = failure else {
            self.metrics.exported.inc_by(count);
            self.log.reset();
            if std::mem::take(&mut self.failures) > 0 {
                debug!("spans are exported again");
            }
            return;
        };
        self.metrics.failed.inc_by(count);
        let pause = self.interval.saturating_mul(1 << self.failures.min(10));
        self.not_before = Some(Instant::now() + pause.min(PAUSE_MAX));
        self.failures += 1;
        if self.log.should_log(observe::now(), &error) {
            warn!(error, "spans are not exported; requests go on without them");
        }
    }
}
