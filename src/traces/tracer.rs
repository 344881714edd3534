//! Decides which requests are traced, and begins their traces.

use std::sync::Arc;
use std::time::Instant;

use hyper::HeaderMap;

use super::context::{TRACESTATE, TraceContext};
use super::queue::{Metrics, Queue, Records, queue};
use super::record::Record;
use super::request_trace::RequestTrace;
use super::sampler::Sampler;
use crate::observe;

/// Begins traces, with the sampling of one configuration. By default it begins none.
#[derive(Clone, Debug, Default)]
pub struct Tracer(Option<On>);

#[derive(Clone, Debug)]
struct On {
    sampler: Sampler,
    queue: Queue,
}

impl Tracer {
    /// One that fills a queue of so many spans, and the queue's other end.
    pub(super) fn new(sampler: Sampler, max_spans: usize, metrics: Metrics) -> (Self, Records) {
        let (queue, records) = queue(max_spans, metrics);
        (Self(Some(On { sampler, queue })), records)
    }

    /// The tracer of the next configuration, with the same queue.
    #[must_use]
    pub fn successor(&self, sampler: Sampler) -> Self {
        let on = self.0.as_ref().map(|on| On {
            sampler,
            queue: on.queue.clone(),
        });
        Self(on)
    }

    /// The trace of a request, if it is sampled.
    pub fn begin(&self, headers: &HeaderMap) -> Option<Arc<RequestTrace>> {
        let on = self.0.as_ref()?;
        let parent = TraceContext::of_headers(headers);
        let trace_id = on.sampler.sample(parent.as_ref(), || fastrand::u128(..))?;
        let mut record = record(trace_id);
        if let Some(parent) = parent {
            record.parent = Some(parent.span_id);
            record.state = headers.get(TRACESTATE).cloned();
        }
        Some(RequestTrace::new(record, on.queue.clone()))
    }

    /// The trace of a background response, if its create was sampled: a trace of its own with a link to it.
    pub fn begin_background(&self, create: Option<TraceContext>) -> Option<Arc<RequestTrace>> {
        let on = self.0.as_ref()?;
        let create = create.filter(|create| create.is_sampled)?;
        let mut record = record(fastrand::u128(1..));
        record.link = Some(create);
        Some(RequestTrace::new(record, on.queue.clone()))
    }

    /// Resolves once all spans of requests that have ended are exported or lost.
    pub async fn flush(&self) {
        if let Some(on) = &self.0 {
            on.queue.flush().await;
        }
    }
}

fn record(trace_id: u128) -> Record {
    let context = TraceContext {
        trace_id,
        span_id: fastrand::u64(1..),
        is_sampled: true,
    };
    let now: Instant = observe::now();
    Record::new(context, now, observe::wall_clock())
}
