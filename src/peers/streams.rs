//! The sending halves of the streams to other replicas.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio_util::sync::CancellationToken;

use super::link::Outgoing;
use super::metrics::Metrics;
use super::roster::StreamId;

/// A replaced stream, or a second one, stays open for this long: the other side may not have seen the new one yet, and would take the end
/// of the former one for the replica's end.
pub(super) const RETIRE_AFTER: Duration = Duration::from_secs(1);
/// Replaced streams beyond this number end at once.
const MAX_RETIRED: usize = 64;

#[derive(Debug, Default)]
pub(super) struct Streams {
    current: BTreeMap<StreamId, Stream>,
    /// Replaced ones, with the time at which they end.
    retired: VecDeque<(Instant, Stream)>,
}

#[derive(Debug)]
struct Stream {
    outgoing: Outgoing,
    /// A report did not fit, so the next one must be whole.
    has_missed: bool,
    end: CancellationToken,
}

impl Streams {
    /// A new stream, which is sent the whole state at once. Returns what ends it.
    pub(super) fn open(
        &mut self,
        id: StreamId,
        outgoing: Outgoing,
        metrics: &Metrics,
        whole: impl FnOnce() -> [Bytes; 2],
    ) -> CancellationToken {
        let end = CancellationToken::new();
        let mut stream = Stream {
            outgoing,
            has_missed: true,
            end: end.clone(),
        };
        stream.send(metrics, &[], whole);
        self.current.insert(id, stream);
        end
    }

    pub(super) fn len(&self) -> usize {
        self.current.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.current.is_empty()
    }

    /// The stream ends once what is queued is sent.
    pub(super) fn remove(&mut self, id: StreamId) {
        self.current.remove(&id);
    }

    /// Ends a stream whose replica is silent.
    pub(super) fn end(&self, id: StreamId) {
        if let Some(stream) = self.current.get(&id) {
            stream.end.cancel();
        }
    }

    /// Another stream has taken the place of this one.
    pub(super) fn retire(&mut self, now: Instant, id: StreamId) {
        if let Some(stream) = self.current.remove(&id) {
            self.retired.push_back((now + RETIRE_AFTER, stream));
        }
        self.end_retired(now);
    }

    pub(super) fn end_retired(&mut self, now: Instant) {
        while let Some((at, stream)) = self.retired.front() {
            if *at > now && self.retired.len() <= MAX_RETIRED {
                return;
            }
            stream.end.cancel();
            self.retired.pop_front();
        }
    }

    /// Sends messages to all, and the whole state to those that missed something. What does not fit is missed.
    pub(super) fn send(
        &mut self,
        metrics: &Metrics,
        messages: &[Bytes],
        mut whole: impl FnMut() -> [Bytes; 2],
    ) {
        let streams = self.current.values_mut();
        let sent = streams.map(|stream| stream.send(metrics, messages, &mut whole));
        metrics.on_sent(sent.sum());
    }

    /// Sends a message that is no state to all that missed nothing. False if one had no room.
    pub(super) fn send_once(&mut self, metrics: &Metrics, message: &Bytes) -> bool {
        let fits = |stream: &&mut Stream| {
            !stream.has_missed && stream.outgoing.try_send(Ok(message.clone())).is_ok()
        };
        let sent = self.current.values_mut().filter(fits).count();
        metrics.on_sent(sent * message.len());
        sent == self.current.len()
    }
}

impl Stream {
    /// The bytes that were sent.
    fn send(
        &mut self,
        metrics: &Metrics,
        messages: &[Bytes],
        whole: impl FnOnce() -> [Bytes; 2],
    ) -> usize {
        let whole = self.has_missed.then(whole);
        let messages = match &whole {
            Some(whole) => &whole[..],
            None => messages,
        };
        if self.outgoing.capacity() < messages.len() {
            if !self.has_missed {
                self.has_missed = true;
                metrics.skipped.inc();
            }
            return 0;
        }
        self.has_missed = false;
        for message in messages {
            // Fails only if the stream has ended, which its own task notices.
            let _ = self.outgoing.try_send(Ok(message.clone()));
        }
        messages.iter().map(Bytes::len).sum()
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::mpsc;
    use tonic::Status;

    use super::*;
    use crate::observe;
    use crate::observe::metrics::Registry;
    use crate::peers::handshake::{InstanceId, PeerIdentity, Side};
    use crate::peers::roster::{Admission, Roster};

    fn stream_id() -> StreamId {
        let peer = PeerIdentity {
            id: InstanceId::new(2),
            name: "".into(),
            release: "".into(),
            port: 0,
        };
        let second = Duration::from_secs(1);
        let mut roster = Roster::new(InstanceId::new(1), second, second, 1);
        match roster.admit(observe::now(), &peer, Side::Dialer, None) {
            Admission::First(id) => id,
            other => panic!("{other:?}"),
        }
    }

    fn received(receiver: &mut mpsc::Receiver<Result<Bytes, Status>>) -> Vec<Bytes> {
        let next = || receiver.try_recv().ok()?.ok();
        std::iter::from_fn(next).collect()
    }

    #[test]
    fn a_slow_replica_gets_the_newest_state_and_nothing_queues_up() {
        let metrics = Metrics::new(&Registry::default());
        let whole = |of: &'static str| move || [Bytes::from("names"), Bytes::from(of)];
        let (sender, mut receiver) = mpsc::channel(4);
        let mut streams = Streams::default();
        let _end = streams.open(stream_id(), sender, &metrics, whole("whole 0"));
        for number in 1..100 {
            let change = Bytes::from(format!("change {number}"));
            streams.send(&metrics, &[change], whole("whole"));
        }
        assert_eq!(
            received(&mut receiver),
            ["names", "whole 0", "change 1", "change 2"]
        );
        assert_eq!(metrics.skipped.get(), 1);
        streams.send(&metrics, &[Bytes::from("change 100")], whole("whole 100"));
        streams.send(&metrics, &[Bytes::from("change 101")], whole("no"));
        assert_eq!(
            received(&mut receiver),
            ["names", "whole 100", "change 101"]
        );
    }

    #[test]
    fn a_replaced_stream_ends_a_second_later() {
        let metrics = Metrics::new(&Registry::default());
        let (sender, mut receiver) = mpsc::channel(4);
        let (mut streams, now, id) = (Streams::default(), observe::now(), stream_id());
        let end = streams.open(id, sender, &metrics, Default::default);
        streams.retire(now, id);
        assert!(streams.is_empty());
        received(&mut receiver);
        streams.end_retired(now + Duration::from_millis(999));
        assert!(!end.is_cancelled() && !receiver.is_closed());
        streams.end_retired(now + RETIRE_AFTER);
        assert!(end.is_cancelled());
        assert_eq!(
            receiver.try_recv().err(),
            Some(mpsc::error::TryRecvError::Disconnected)
        );
    }
}
