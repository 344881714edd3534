//! Collects the [`Record`] of a sampled request while it runs. Whoever works on the request shares it; the last one that
//! drops it hands the record to the exporter.

use std::sync::Arc;
use std::time::Instant;

use hyper::HeaderMap;
use parking_lot::Mutex;

use super::context::{TRACEPARENT, TraceContext};
use super::queue::Queue;
use super::record::{Event, Record, RequestEnd, Try};
use crate::observe;

#[derive(Debug)]
pub struct RequestTrace {
    context: TraceContext,
    /// Taken when this is dropped.
    record: Mutex<Option<Box<Record>>>,
    queue: Queue,
}

impl RequestTrace {
    pub(super) fn new(record: Record, queue: Queue) -> Arc<Self> {
        Arc::new(Self {
            context: record.context,
            record: Mutex::new(Some(Box::new(record))),
            queue,
        })
    }

    /// The request's own span.
    pub fn context(&self) -> TraceContext {
        self.context
    }

    pub fn event(&self, at: Instant, event: Event) {
        self.update(|record| record.push_event(at, event));
    }

    /// The response that the request generates belongs to this conversation.
    pub fn set_conversation(&self, id: &str) {
        self.update(|record| record.conversation = Some(id.into()));
    }

    pub fn end(&self, at: Instant, end: RequestEnd) {
        self.update(|record| {
            record.ended = Some(at);
            record.end = end;
        });
    }

    /// Begins the span of a try, whose id is not set.
    pub fn begin_try(self: &Arc<Self>, mut tried: Try) -> Box<TrySpan> {
        tried.span_id = fastrand::u64(1..);
        Box::new(TrySpan {
            trace: self.clone(),
            tried: Some(tried),
        })
    }

    fn update(&self, change: impl FnOnce(&mut Record)) {
        if let Some(record) = &mut *self.record.lock() {
            change(record);
        }
    }
}

impl Drop for RequestTrace {
    fn drop(&mut self) {
        if let Some(record) = self.record.get_mut().take() {
            self.queue.offer(record);
        }
    }
}

/// One try at a worker. Dropping it ends its span, if it has not ended before: it was cancelled then.
#[derive(Debug)]
pub struct TrySpan {
    trace: Arc<RequestTrace>,
    /// `None` once it has ended.
    tried: Option<Try>,
}

impl TrySpan {
    /// Makes this try the parent of what the worker does.
    pub fn put_into(&self, headers: &mut HeaderMap) {
        if let Some(tried) = &self.tried {
            let context = TraceContext {
                span_id: tried.span_id,
                ..self.trace.context
            };
            headers.insert(TRACEPARENT, context.header());
        }
    }

    pub fn update(&mut self, change: impl FnOnce(&mut Try)) {
        if let Some(tried) = &mut self.tried {
            change(tried);
        }
    }

    pub fn on_first_token(&mut self, now: Instant) {
        if let Some(tried) = &mut self.tried
            && tried.first_token.is_none()
        {
            tried.first_token = Some(now);
            self.trace.event(now, Event::FirstToken);
        }
    }

    pub fn fail(&mut self, now: Instant, kind: &'static str, message: String) {
        self.update(|tried| tried.error = Some((kind, message)));
        self.end(now);
    }

    pub fn end(&mut self, now: Instant) {
        if let Some(mut tried) = self.tried.take() {
            tried.ended = Some(now);
            self.trace.update(|record| record.push_try(tried));
        }
    }
}

/// The kind of error of a try whose request was given up: as a rule the client has disconnected.
const CANCELLED: &str = "cancelled";

impl Drop for TrySpan {
    fn drop(&mut self) {
        if self.tried.is_some() {
            self.fail(observe::now(), CANCELLED, String::new());
        }
    }
}
