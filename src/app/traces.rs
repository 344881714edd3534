//! Starts the export of traces, if the configuration or OpenTelemetry's environment variables ask for it.

use std::io;
#[cfg(feature = "otlp")]
use std::time::Duration;

use crate::config::Config;
use crate::fleet::registry::Registry;
use crate::observe::metrics;
use crate::traces::export::asked;
use crate::traces::{self, Metrics, Tracer};

/// What is left of the spans at the end of a drain is exported within this time: a collector that is away must not
/// keep a pod from ending.
#[cfg(feature = "otlp")]
const FLUSH: Duration = Duration::from_secs(3);

/// The export of traces; nothing if it is off.
#[derive(Debug)]
pub(super) struct Traces {
    #[cfg(feature = "otlp")]
    exporter: Option<traces::Exporter>,
}

/// What this process's environment and the configuration ask for.
fn of_process(config: &Config) -> traces::export::Asked {
    asked(config.traces.as_ref(), &|name| std::env::var(name).ok())
}

/// What is wrong with what the environment asks for.
pub(super) fn warnings(config: &Config) -> Vec<String> {
    let mut asked = of_process(config);
    // The configuration was checked: only the environment can ask for traces in such a build.
    if asked.export.is_some() && !traces::IS_BUILT_IN {
        let warning = "OpenTelemetry's environment variables ask for traces, but this build cannot export them: it was \
                       made without the feature `otlp`; build from source with `make dist`, which has all features, or \
                       with `cargo build --release --features otlp`";
        asked.warnings.push(warning.to_owned());
    }
    asked.warnings
}

impl Traces {
    pub(super) fn start(
        config: &Config,
        fleet: &Registry,
        registry: &metrics::Registry,
    ) -> io::Result<(Self, Tracer)> {
        let metrics = Metrics::new(registry);
        Self::with(of_process(config).export.as_ref(), fleet, &metrics)
    }

    #[cfg(feature = "otlp")]
    fn with(
        export: Option<&traces::Export>,
        fleet: &Registry,
        metrics: &Metrics,
    ) -> io::Result<(Self, Tracer)> {
        let Some(export) = export else {
            return Ok((Self { exporter: None }, Tracer::default()));
        };
        let named = |error| io::Error::other(format!("traces cannot be exported: {error}"));
        let (exporter, tracer) =
            traces::Exporter::start(export, fleet.tls(), metrics).map_err(named)?;
        let endpoint = &export.endpoint;
        tracing::info!(
            collector = endpoint.authority,
            tls = endpoint.tls.is_some(),
            protocol = ?export.protocol,
            "traces are exported"
        );
        let exporter = Some(exporter);
        Ok((Self { exporter }, tracer))
    }

    #[cfg(not(feature = "otlp"))]
    fn with(_: Option<&traces::Export>, _: &Registry, _: &Metrics) -> io::Result<(Self, Tracer)> {
        Ok((Self {}, Tracer::default()))
    }

    /// Exports what is left, for a while.
    pub(super) async fn flush(&self) {
        #[cfg(feature = "otlp")]
        if let Some(exporter) = &self.exporter {
            exporter.flush(FLUSH).await;
        }
    }
}

/// The tracer of the next configuration.
pub(super) fn successor(running: &Tracer, config: &Config) -> Tracer {
    match of_process(config).export {
        Some(export) => running.successor(export.sampler),
        // To turn traces on or off needs a restart.
        None => running.clone(),
    }
}
