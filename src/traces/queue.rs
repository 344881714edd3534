//! Records on their way to the exporter. A full queue drops a record and counts its spans; no request waits.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;

use prometheus::{IntCounter, IntCounterVec};
use tokio::sync::{mpsc, oneshot};

use super::record::Record;
use crate::observe::metrics::Registry;

#[derive(Clone, Debug)]
pub struct Metrics {
    pub(super) exported: IntCounter,
    pub(super) failed: IntCounter,
    dropped: IntCounter,
}

impl Metrics {
    pub fn new(registry: &Registry) -> Self {
        let spans: IntCounterVec = registry.counters(
            "warmroute_trace_spans_total",
            "Spans of sampled requests, by outcome: exported, export_failed (the collector did not take them), \
             queue_full (dropped, because the collector is too slow or away).",
            &["outcome"],
        );
        let of = |outcome| spans.with_label_values(&[outcome]);
        Self {
            exported: of("exported"),
            failed: of("export_failed"),
            dropped: of("queue_full"),
        }
    }
}

#[derive(Debug)]
pub(super) enum Message {
    Ended(Box<Record>),
    /// Answered once everything before it was exported or lost.
    Flush(oneshot::Sender<()>),
}

/// The requests' end.
#[derive(Clone, Debug)]
pub(super) struct Queue(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    /// Spans in the queue.
    spans: Arc<AtomicUsize>,
    max_spans: usize,
    metrics: Metrics,
    /// Not bounded itself: `spans` is.
    sender: mpsc::UnboundedSender<Message>,
}

/// The exporter's end.
#[derive(Debug)]
pub(super) struct Records {
    spans: Arc<AtomicUsize>,
    receiver: mpsc::UnboundedReceiver<Message>,
}

pub(super) fn queue(max_spans: usize, metrics: Metrics) -> (Queue, Records) {
    let (sender, receiver) = mpsc::unbounded_channel();
    let spans = Arc::new(AtomicUsize::new(0));
    let shared = Shared {
        spans: spans.clone(),
        max_spans,
        metrics,
        sender,
    };
    (Queue(Arc::new(shared)), Records { spans, receiver })
}

impl Queue {
    /// Takes a record, or drops it.
    pub(super) fn offer(&self, record: Box<Record>) {
        let Shared {
            spans,
            max_spans,
            metrics,
            sender,
        } = &*self.0;
        let count = record.spans();
        let before = spans.fetch_add(count, Relaxed);
        if before + count > *max_spans || sender.send(Message::Ended(record)).is_err() {
            spans.fetch_sub(count, Relaxed);
            metrics.dropped.inc_by(count as u64);
        }
    }

    /// Resolves once everything that was offered before is exported or lost.
    pub(super) async fn flush(&self) {
        let (sender, flushed) = oneshot::channel();
        if self.0.sender.send(Message::Flush(sender)).is_ok() {
            let _ = flushed.await;
        }
    }
}

impl Records {
    /// `None` once there are no requests any more that could end.
    pub(super) async fn next(&mut self) -> Option<Message> {
        let message = self.receiver.recv().await?;
        if let Message::Ended(record) = &message {
            self.spans.fetch_sub(record.spans(), Relaxed);
        }
        Some(message)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::time::SystemTime;

    use super::*;
    use crate::observe;
    use crate::traces::TraceContext;

    pub(in crate::traces) fn record() -> Record {
        let context = TraceContext {
            trace_id: 0x4bf9_2f35_77b3_4da6_a3ce_929d_0e0e_4736,
            span_id: 7,
            is_sampled: true,
        };
        Record::new(context, observe::now(), SystemTime::UNIX_EPOCH)
    }

    #[tokio::test]
    async fn a_full_queue_drops_and_counts_and_takes_again_once_there_is_room() {
        let metrics = Metrics::new(&Registry::default());
        let (queue, mut records) = queue(2, metrics.clone());
        for _ in 0..5 {
            queue.offer(Box::new(record()));
        }
        assert_eq!(metrics.dropped.get(), 3);
        assert!(matches!(records.next().await, Some(Message::Ended(_))));
        queue.offer(Box::new(record()));
        assert_eq!(metrics.dropped.get(), 3);
        queue.offer(Box::new(record()));
        assert_eq!(metrics.dropped.get(), 4);
    }

    #[tokio::test]
    async fn without_an_exporter_everything_is_dropped_and_a_flush_ends() {
        let metrics = Metrics::new(&Registry::default());
        let (queue, records) = queue(100, metrics.clone());
        drop(records);
        queue.offer(Box::new(record()));
        assert_eq!(metrics.dropped.get(), 1);
        queue.flush().await;
    }
}
