//! Readers of event streams, and the record of what they received, on which all must agree.

use std::collections::BTreeMap;
use std::time::Duration;

use super::encoder::{self, END, SimulatedEvent};
use super::owner::answer_to;
use super::store_request::{StoreReply, StoreRequest};
use super::{Event, Fleet, IN_PLACE_OF, REPLICAS, ReplyTo, TEXT, Violation};
use warmroute::responses::background::read_position::{Next, ReadPosition};
use warmroute::responses::background::run_step::{FIRST_EVENTS, Tail};
use warmroute::store::log::LogState;
use warmroute::store::{ResponseKey, Status};

/// Bytes per read from memory.
const TAIL_BYTES: usize = 64;
const CUT_BYTES: usize = 1 << 20;

#[derive(Debug)]
pub(super) struct Reader {
    pub(super) key: ResponseKey,
    pub(super) is_over: bool,
    /// The replica it reads at, that replica's incarnation, and the run it found there.
    at: Option<(usize, u64, Option<u64>)>,
    reading: ReadPosition,
    /// The number of the next event.
    next: u64,
    has_received: bool,
    has_received_end: bool,
    /// The log is gone: only the terminal event can be received.
    is_cut: bool,
    asked: u64,
}

impl Reader {
    pub(super) fn new(key: ResponseKey, after: Option<u64>) -> Self {
        Self {
            key,
            is_over: false,
            at: None,
            reading: ReadPosition::new(after),
            next: after.map_or(0, |after| after + 1),
            has_received: false,
            has_received_end: false,
            is_cut: false,
            asked: 0,
        }
    }
}

/// What any reader received of each response.
#[derive(Debug, Default)]
pub(super) struct Ledger(BTreeMap<ResponseKey, ReceivedStream>);

#[derive(Debug, Default)]
struct ReceivedStream {
    events: BTreeMap<u64, SimulatedEvent>,
    end: Option<u64>,
    /// The one run whose output was received.
    name: Option<u64>,
    is_cancelled: bool,
}

/// Whose words readers may receive of one response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Words {
    OfOneRun,
    /// The words of any run that wrote them, in the order of the answer.
    OfOneAnswer,
}

impl Ledger {
    pub(super) fn on_cancelled(&mut self, key: ResponseKey) {
        self.0.entry(key).or_default().is_cancelled = true;
    }

    pub(super) fn forget(&mut self, key: ResponseKey) {
        self.0.remove(&key);
    }

    /// Records a received event.
    fn on_event(
        &mut self,
        key: ResponseKey,
        event: &SimulatedEvent,
        words: Words,
    ) -> Result<(), String> {
        let stream = self.0.entry(key).or_default();
        let number = event.number;
        if event.kind == END {
            if stream.end.is_some_and(|end| end != number) {
                return Err(format!("it ends with {:?} and with {number}", stream.end));
            }
            stream.end = Some(number);
        } else {
            if stream.end.is_some_and(|end| end <= number) {
                return Err(format!("{event:?} was received beyond its end"));
            }
            let is_of_run = number >= FIRST_EVENTS && words == Words::OfOneRun;
            if is_of_run && *stream.name.get_or_insert(event.name) != event.name {
                return Err(format!(
                    "{event:?} was received, and words of {:?}",
                    stream.name
                ));
            }
        }
        if words == Words::OfOneAnswer && event.kind == "word" {
            let expected = answer_to(key).token(number - FIRST_EVENTS);
            if event.name != expected {
                return Err(format!("{event:?} {IN_PLACE_OF} {expected}"));
            }
        }
        let known = stream.events.entry(number).or_insert_with(|| event.clone());
        let is_same = if event.kind == END {
            // The terminal event may come from the record.
            known.kind == END
        } else {
            known == event
        };
        if is_same {
            Ok(())
        } else {
            Err(format!("{known:?} was received, and {event:?}"))
        }
    }
}

impl Fleet {
    pub(super) fn on_read(&mut self, reader: usize) -> Result<(), Violation> {
        let found = &self.readers[reader];
        if found.is_over {
            return Ok(());
        }
        let key = found.key;
        if !self.acknowledged.contains(&key) {
            self.read_later(reader, 300..1_500);
            return Ok(());
        }
        if !self.streams.get(&key).is_some_and(|streams| *streams) {
            self.readers[reader].is_over = true;
            return Ok(());
        }
        let now = self.now();
        let place = match found.at {
            Some((at, incarnation, run)) if self.is_there(at, incarnation) => {
                Some((at, incarnation, run))
            }
            Some(_) => {
                if found.has_received_end {
                    self.readers[reader].is_over = true;
                    return Ok(());
                }
                // The connection broke: it resumes elsewhere after the last received number.
                self.counts.resumed += 1;
                let found = &mut self.readers[reader];
                if found.has_received {
                    found.reading = ReadPosition::new(found.next.checked_sub(1));
                }
                None
            }
            None => None,
        };
        let Some((at, incarnation, run)) = place.or_else(|| {
            // Half of the readers connect to the replica that runs the response.
            let runs = |at: &usize| {
                self.is_there(*at, self.replicas[*at].incarnation)
                    && self.replicas[*at].table.find(key).is_some()
            };
            let runs = (0..REPLICAS).find(runs).filter(|_| self.random.bool());
            let at = runs.or_else(|| self.open())?;
            let replica = &self.replicas[at];
            let run = replica.table.find(key).map(|run| run.serial);
            Some((at, replica.incarnation, run))
        }) else {
            self.read_later(reader, 300..1_500);
            return Ok(());
        };
        let replica = &self.replicas[at];
        if replica.paused_until > now {
            let when = replica.paused_until;
            self.world.set(when, Event::Read(reader));
            return Ok(());
        }
        self.readers[reader].at = Some((at, incarnation, run));
        let after = self.readers[reader].reading.after;
        if let Some(serial) = run {
            let running = replica.table.find(key).filter(|run| run.serial == serial);
            let running = running.or_else(|| replica.left.get(&serial));
            match running.map_or(Tail::NotRunning, |run| run.state.tail(after, TAIL_BYTES)) {
                Tail::InMemory { text, last, is_end } => {
                    let next = self.readers[reader].reading.on_tail(text, last, is_end);
                    let text = text.to_vec();
                    self.counts.received_from_memory += u64::from(!text.is_empty());
                    return self.on_read_here(reader, &text, next);
                }
                Tail::InStore => {}
                Tail::NotRunning => self.readers[reader].at = Some((at, incarnation, None)),
            }
        }
        self.ask_for(reader, StoreRequest::Events(key, after));
        Ok(())
    }

    fn is_there(&self, at: usize, incarnation: u64) -> bool {
        let replica = &self.replicas[at];
        replica.is_up && replica.incarnation == incarnation && !replica.is_draining
    }

    fn read_later(&mut self, reader: usize, range: std::ops::Range<u64>) {
        let when = self.now() + self.ms(range);
        self.world.set(when, Event::Read(reader));
    }

    fn ask_for(&mut self, reader: usize, ask: StoreRequest) {
        self.names += 1;
        let asked = self.names;
        self.readers[reader].asked = asked;
        if let Some((at, ..)) = self.readers[reader].at {
            self.send(at, ReplyTo::Reader { reader, asked }, ask);
            // In case the replica is lost before the reply arrives.
            self.read_later(reader, 4_000..5_000);
        }
    }

    pub(super) fn on_reader_said(
        &mut self,
        reader: usize,
        asked: u64,
        said: StoreReply,
    ) -> Result<(), Violation> {
        if self.readers[reader].asked != asked || self.readers[reader].is_over {
            return Ok(());
        }
        let key = self.readers[reader].key;
        match said {
            StoreReply::Events(Ok(Some(read))) => {
                let mut out = Vec::new();
                let reading = &mut self.readers[reader].reading;
                let next = reading.on_read(&read, CUT_BYTES, &mut out);
                self.readers[reader].is_cut |= read.log == LogState::Overflowed;
                if next == Next::End {
                    self.tell(reader, &out)?;
                    self.ask_for(reader, StoreRequest::Get(key));
                    return Ok(());
                }
                self.on_read_here(reader, &out, next)
            }
            StoreReply::Record(Ok(Some(record))) => {
                let number = record
                    .background
                    .and_then(|background| background.last_event);
                let end = format!("event: {END}\ndata: {} 0\n\n", number.unwrap_or_default());
                self.tell(reader, end.as_bytes())?;
                self.readers[reader].is_over = true;
                Ok(())
            }
            StoreReply::Events(Ok(None)) | StoreReply::Record(Ok(None)) => {
                if !self.store.is_gone(key) {
                    let reason = "the store answered a reader that it is not there";
                    return Err(Violation::new(self.now(), key, reason));
                }
                self.readers[reader].is_over = true;
                Ok(())
            }
            _ => {
                self.read_later(reader, 100..900);
                Ok(())
            }
        }
    }

    fn on_read_here(&mut self, reader: usize, text: &[u8], next: Next) -> Result<(), Violation> {
        self.tell(reader, text)?;
        match next {
            Next::Over => {
                let found = &mut self.readers[reader];
                found.is_over = true;
                if !found.has_received_end {
                    let key = found.key;
                    return Err(Violation::new(self.now(), key, "a reader received no end"));
                }
            }
            Next::More => self.read_later(reader, 0..5),
            Next::Wait | Next::End => self.read_later(reader, 100..900),
            // Those of a response that a failover has touched are over.
            Next::Lost { last } if self.readers[reader].has_received => {
                let key = self.readers[reader].key;
                let reason = format!("a reader is told that events after {last:?} are lost");
                return Err(Violation::new(self.now(), key, reason));
            }
            // It came with a number that no reader had received.
            Next::Lost { .. } => self.readers[reader].is_over = true,
        }
        // Some readers disconnect and resume elsewhere.
        if self.random.u8(..16) == 0
            && let Some((at, _, run)) = self.readers[reader].at
        {
            self.readers[reader].at = Some((at, u64::MAX, run));
        }
        Ok(())
    }

    /// A reader receives events.
    fn tell(&mut self, reader: usize, text: &[u8]) -> Result<(), Violation> {
        let now = self.now();
        let key = self.readers[reader].key;
        let broken = |reason: String| Err(Violation::new(now, key, reason));
        let Some(events) = encoder::parse_events(text) else {
            let text = String::from_utf8_lossy(text).into_owned();
            return broken(format!("a reader received {text:?}"));
        };
        let record = self.store.get(now, key);
        let stored = record
            .as_ref()
            .and_then(|record| record.background)
            .and_then(|background| background.last_event);
        for event in events {
            let found = &mut self.readers[reader];
            let is_end = event.kind == END;
            // A reader that asked for events after the end receives the terminal event.
            let is_again = is_end && !found.has_received && event.number < found.next;
            let is_far = is_end && found.is_cut && event.number > found.next;
            let is_next = event.number == found.next || is_again || is_far;
            if found.has_received_end || !is_next {
                return broken(format!("a reader at {} received {event:?}", found.next));
            }
            found.next = event.number + 1;
            found.has_received = true;
            found.has_received_end = is_end;
            self.counts.received += 1;
            let is_rolled_back = self.rolled_back.contains(&key);
            if !is_rolled_back && !self.store.is_gone(key) && stored < Some(event.number) {
                return broken(format!("{event:?} was received before it was stored"));
            }
            let is_terminal = record
                .as_ref()
                .is_none_or(|record| record.status.is_terminal());
            if is_end && !is_terminal {
                return broken(format!("{event:?} was received of what runs"));
            }
            let words = if self.is_continued {
                Words::OfOneAnswer
            } else {
                Words::OfOneRun
            };
            if let Err(reason) = self.ledger.on_event(key, &event, words) {
                return broken(reason);
            }
        }
        Ok(())
    }

    /// The text of a completed stream is that of an unbroken run: each token once, in their order.
    fn check_answer(
        &mut self,
        now: Duration,
        key: ResponseKey,
        whole: &[u8],
    ) -> Result<(), Violation> {
        let answer = answer_to(key);
        let expected = answer.next(answer.length());
        let tokens = encoder::tokens(&encoder::parse_events(whole).unwrap_or_default());
        if tokens != expected {
            let reason = format!("{TEXT} {tokens:?}, and not {expected:?}");
            return Err(Violation::new(now, key, reason));
        }
        self.counts.joined += u64::from(self.store.starts(key) > 1);
        Ok(())
    }

    /// Reads the whole stream after everything has ended.
    pub(super) fn read_whole(&mut self, key: ResponseKey) -> Result<(), Violation> {
        let reader = self.readers.len();
        self.readers.push(Reader::new(key, None));
        let now = self.now();
        let mut whole = Vec::new();
        for _ in 0..10_000 {
            let after = self.readers[reader].reading.after;
            let Some(read) = self.store.events(now, key, after) else {
                return Err(Violation::new(now, key, "it has no events"));
            };
            let mut out = Vec::new();
            let next = self.readers[reader]
                .reading
                .on_read(&read, CUT_BYTES, &mut out);
            self.readers[reader].is_cut |= read.log == LogState::Overflowed;
            self.tell(reader, &out)?;
            whole.extend_from_slice(&out);
            match next {
                Next::More => {}
                Next::Wait => return Err(Violation::new(now, key, "its events do not end")),
                Next::End => {
                    let record = self.store.get(now, key);
                    let record = record.ok_or_else(|| Violation::new(now, key, "it is gone"))?;
                    let number = record
                        .background
                        .and_then(|background| background.last_event);
                    let end = format!("event: {END}\ndata: {} 0\n\n", number.unwrap_or_default());
                    self.tell(reader, end.as_bytes())?;
                    break;
                }
                Next::Over => break,
                Next::Lost { .. } => return Err(Violation::new(now, key, "its events are lost")),
            }
        }
        self.readers[reader].is_over = true;
        if !self.readers[reader].has_received_end {
            return Err(Violation::new(now, key, "it has no end"));
        }
        let record = self.store.get(now, key);
        let status = record.as_ref().map(|record| record.status);
        if self.is_continued && status == Some(Status::Completed) && !self.readers[reader].is_cut {
            self.check_answer(now, key, &whole)?;
        }
        // What is retrieved is what was streamed.
        let output = record
            .map(|record| record.content.output)
            .unwrap_or_default();
        if !output.is_empty() && !self.readers[reader].is_cut {
            self.counts.outputs_compared += 1;
            let streamed = encoder::parse_events(&whole).unwrap_or_default();
            let streamed = streamed.into_iter().filter(|event| event.kind != END);
            let streamed: Vec<_> = streamed.collect();
            let output = encoder::parse_events(&output).unwrap_or_default();
            if streamed != output {
                let reason = format!("{streamed:?} was streamed, and {output:?} is stored");
                return Err(Violation::new(now, key, reason));
            }
        }
        let is_cancelled = self
            .ledger
            .0
            .get(&key)
            .is_some_and(|stream| stream.is_cancelled);
        if is_cancelled && status != Some(Status::Cancelled) {
            let reason = format!("its cancel was answered, and it is {status:?}");
            return Err(Violation::new(now, key, reason));
        }
        Ok(())
    }
}

const _: () = assert!(REPLICAS > 1);
