//! OpenTelemetry traces: one server span for each request that is sampled, and one client span for each try at a worker
//! or leg of a try.
//!
//! A request that is not sampled costs a look at its `traceparent` or one random number. One that is sampled collects
//! what happens in a [`Record`], with times that are known anyway; its spans are built on the exporter's thread, after
//! its end. Recording and settings are the same in every build; building spans and sending them needs the feature `otlp`.

mod context;
mod environment;
pub mod export;
#[cfg(feature = "otlp")]
mod names;
#[cfg(feature = "otlp")]
mod otlp;
#[cfg_attr(
    not(feature = "otlp"),
    expect(dead_code, reason = "the exporter uses the rest")
)]
mod queue;
mod record;
mod request_trace;
mod sampler;
pub mod settings;
#[cfg(feature = "otlp")]
mod spans;
#[cfg_attr(
    not(feature = "otlp"),
    expect(dead_code, reason = "the exporter uses the rest")
)]
mod tracer;

pub use self::context::TraceContext;
pub use self::export::Export;
#[cfg(feature = "otlp")]
pub use self::otlp::Exporter;
pub use self::queue::Metrics;
pub use self::record::{
    Decision, Event, Leg, Record, RequestEnd, RequestFields, ResponseFields, Try, Usage,
};
pub use self::request_trace::{RequestTrace, TrySpan};
pub use self::settings::Settings;
pub use self::tracer::Tracer;

/// Whether this build can export traces.
pub const IS_BUILT_IN: bool = cfg!(feature = "otlp");
