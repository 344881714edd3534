//! The operations on running background responses: start, append, finalize, cancel, and reading their events.

use bytes::Bytes;

use super::client::Redis;
use super::packed::Packed;
use super::reply::write_hint;
use super::request::Kind;
use super::scripts::{Call, Name};
use super::values::Writer;
use crate::store::cancel::NoticeKind;
use crate::store::log::LogState;
use crate::store::meters::Op;
use crate::store::record::{Content, Retention};
use crate::store::{
    BackgroundResponses, CancelOutcome, Cancellation, CancelledOutput, Error, EventBatch,
    FencingToken, Finalization, LoggedEvents, ResponseKey, Status, StoreFuture, WriteOutcome,
};

impl BackgroundResponses for Redis {
    fn start(&self, key: ResponseKey, fence: FencingToken) -> StoreFuture<'_, WriteOutcome> {
        self.meters.meter(Op::Start, move || async move {
            let call = self.fenced_call(Name::START, key, fence);
            self.call(Kind::Write, call).await?.write_outcome()
        })
    }

    fn append(
        &self,
        key: ResponseKey,
        fence: FencingToken,
        batch: EventBatch,
    ) -> StoreFuture<'_, WriteOutcome> {
        self.meters.meter(Op::Append, move || async move {
            let call = self
                .fenced_call(Name::APPEND, key, fence)
                .number(batch.first)
                .number(batch.last)
                .arg(batch.bytes)
                .number(self.keep.max_event_log)
                .arg(batch.tokens);
            self.call(Kind::Write, call).await?.write_outcome()
        })
    }

    fn finalize(
        &self,
        key: ResponseKey,
        fence: FencingToken,
        end: Finalization,
    ) -> StoreFuture<'_, WriteOutcome> {
        self.meters.meter(Op::Finalize, move || async move {
            let values = self
                .put_end(key, fence, &end.content, &end.delta_table)
                .await?;
            let ephemeral_ttl = self.keep.ephemeral.as_millis() as u64;
            let mut call = self
                .fenced_call(Name::FINALIZE, key, fence)
                .arg(end.token.to_string())
                .arg(end.status.as_str())
                .number(match end.retention {
                    Retention::Stored => self.record_ttl_ms(),
                    Retention::Ephemeral => ephemeral_ttl,
                })
                .number(ephemeral_ttl)
                .number(self.keep.event_logs.as_millis() as u64)
                .number(self.keep.max_event_log);
            call = match end.batch {
                Some(batch) => call.number(batch.first).number(batch.last).arg(batch.bytes),
                None => call.arg("").arg("").arg(""),
            };
            let mut committed = None;
            if let Some(commit) = &end.commit {
                let (with_items, items) = self.commit_in(call, commit).await?;
                (call, committed) = (with_items, Some(items));
            } else {
                call = call.arg("");
            }
            call = call
                .field("hi", write_hint(&end.hint))
                .field("ol", end.content.output.len() as u64);
            if end.retention == Retention::Ephemeral {
                call = call.field("rt", "e");
            }
            for (name, packed) in values {
                call = call.field(name, packed.field);
            }
            let mark = self.event_mark(key, end.status);
            if let Some(mark) = &mark {
                call = call.field("wh", mark.0.clone());
            }
            let mut reply = self.call_replicated(Kind::Write, call).await?;
            let outcome = reply.write_outcome()?;
            let put = match outcome {
                WriteOutcome::Done => reply.word()?,
                _ => String::new(),
            };
            if outcome == WriteOutcome::Done {
                let is_queued = match put.as_str() {
                    "again" => self.queue_left_event(key, end.status).await,
                    _ => self.queue_event(key, end.status, mark.as_ref()).await,
                };
                if is_queued {
                    self.unindex(Some(fence.owner), key);
                }
            }
            if let Some(items) = committed
                && put != "ok"
            {
                self.drop_items(items);
            }
            Ok(outcome)
        })
    }

    fn cancel(&self, key: ResponseKey, cancel: Cancellation) -> StoreFuture<'_, CancelOutcome> {
        self.meters.meter(Op::Cancel, move || async move {
            self.keep.check_size(cancel.response.len())?;
            let packed = [("re", self.pack(&cancel.response).await?)];
            let put = self.put_pieces(key, &packed, &Writer::Canceller).await;
            let [(name, packed)] = packed;
            let pieces: Vec<String> = packed.fields(name).map(|(field, _)| field).collect();
            // A cancel that is repeated writes others.
            let drop_pieces = || self.delete_pieces(self.keys.record(key), pieces);
            if let Err(error) = put {
                drop_pieces();
                return Err(error);
            }
            let call = Call::new(Name::CANCEL)
                .key(self.keys.record(key))
                .key(self.keys.log(key))
                .arg(cancel.token.to_string())
                .number(self.record_ttl_ms())
                .number(self.keep.ephemeral.as_millis() as u64)
                .number(self.keep.event_logs.as_millis() as u64)
                .number(self.keep.max_event_log)
                .arg(cancel.event)
                .arg(packed.field);
            let mark = self.event_mark(key, Status::Cancelled);
            let call = match &mark {
                Some(mark) => call.arg(mark.0.clone()),
                None => call,
            };
            let mut reply = match self.call_replicated(Kind::Write, call).await {
                Ok(reply) => reply,
                Err(error) => {
                    // A cluster's client repeats the call itself, so one that is unavailable now may have run before.
                    let is_unwritten = match error {
                        Error::Full { .. } => true,
                        Error::Unavailable { .. } => !self.is_cluster(),
                        _ => false,
                    };
                    // Otherwise the record may refer to them.
                    if is_unwritten {
                        drop_pieces();
                    }
                    return Err(error);
                }
            };
            let word = reply.word()?;
            if word != "ok" {
                drop_pieces();
            }
            Ok(match word.as_str() {
                "ok" => {
                    let (was, owner) = (reply.status()?, reply.owner()?);
                    if let Some(owner) = owner {
                        self.notify(owner, key, NoticeKind::Cancelled).await;
                    }
                    // Without a log nothing is left to store; otherwise a scan finds it until that is done.
                    let has_output = reply.text()?.is_some_and(|text| !text.is_empty());
                    // It may have been cancelled by a call before, whose reply was lost.
                    let is_queued = self.queue_left_event(key, Status::Cancelled).await;
                    if !has_output && is_queued {
                        self.unindex(owner, key);
                    }
                    CancelOutcome::Done { was, owner }
                }
                "terminal" => CancelOutcome::Terminal(reply.status()?),
                "not_background" => CancelOutcome::NotBackground,
                "gone" => CancelOutcome::Gone,
                other => return Err(reply.unexpected(other)),
            })
        })
    }

    fn finalize_cancelled(
        &self,
        key: ResponseKey,
        fence: FencingToken,
        output: CancelledOutput,
    ) -> StoreFuture<'_, WriteOutcome> {
        self.meters
            .meter(Op::FinalizeCancelled, move || async move {
                let values = self
                    .put_end(key, fence, &output.content, &output.delta_table)
                    .await?;
                let mut call = self
                    .fenced_call(Name::AMEND, key, fence)
                    .field("ol", output.content.output.len() as u64);
                for (name, packed) in values {
                    call = call.field(name, packed.field);
                }
                let mut reply = self.call_replicated(Kind::WriteOnce, call).await?;
                let outcome = reply.write_outcome()?;
                if matches!(outcome, WriteOutcome::Done | WriteOutcome::Terminal(_))
                    && self.queue_left_event(key, Status::Cancelled).await
                {
                    self.unindex(Some(fence.owner), key);
                }
                Ok(outcome)
            })
    }

    fn events(
        &self,
        key: ResponseKey,
        after: Option<u64>,
        bytes_max: u64,
    ) -> StoreFuture<'_, Option<LoggedEvents>> {
        self.meters.meter(Op::Events, move || {
            self.read_events(key, after, bytes_max, false)
        })
    }

    fn events_with_tokens(
        &self,
        key: ResponseKey,
        after: Option<u64>,
        bytes_max: u64,
    ) -> StoreFuture<'_, Option<LoggedEvents>> {
        self.meters.meter(Op::Events, move || {
            self.read_events(key, after, bytes_max, true)
        })
    }
}

impl Redis {
    /// A script call that starts with the record, its log and the fencing token of the writer.
    pub(super) fn fenced_call(&self, name: Name, key: ResponseKey, fence: FencingToken) -> Call {
        Call::new(name)
            .key(self.keys.record(key))
            .key(self.keys.log(key))
            .arg(fence.owner.to_string())
            .number(fence.number)
    }

    /// Packs what an ended response contains, and writes the pieces of large values. Returns the fields of its record.
    async fn put_end(
        &self,
        key: ResponseKey,
        fence: FencingToken,
        content: &Content,
        delta_table: &Bytes,
    ) -> Result<Vec<(&'static str, Packed)>, Error> {
        self.keep.check_size(content.size() + delta_table.len())?;
        let mut values = vec![
            ("re", self.pack(&content.response).await?),
            ("ou", self.pack(&content.output).await?),
        ];
        if !delta_table.is_empty() {
            values.push(("cu", self.pack(delta_table).await?));
        }
        self.put_pieces(key, &values, &Writer::Owner(fence)).await?;
        Ok(values)
    }

    async fn read_events(
        &self,
        key: ResponseKey,
        after: Option<u64>,
        bytes_max: u64,
        with_tokens: bool,
    ) -> Result<Option<LoggedEvents>, Error> {
        let call = Call::new(Name::EVENTS)
            .key(self.keys.record(key))
            .key(self.keys.log(key))
            .arg(after)
            .number(bytes_max)
            .arg(if with_tokens { "1" } else { "" });
        let mut reply = self.call(Kind::Read, call).await?;
        let word = reply.word()?;
        if word == "gone" {
            return Ok(None);
        }
        if !matches!(word.as_str(), "whole" | "overflowed" | "sealed") {
            return Err(reply.unexpected(&word));
        }
        let (status, last) = (reply.status()?, reply.last_event()?);
        let delta_table = reply.bytes()?.unwrap_or_default();
        let fencing_number = reply.count()?;
        let log = match word.as_str() {
            "whole" => LogState::Whole,
            "sealed" => LogState::Expired(self.unpack(delta_table).await?),
            _ => LogState::Overflowed,
        };
        let mut batches = Vec::new();
        while !reply.is_empty() {
            batches.push(EventBatch {
                first: reply.count()?,
                last: reply.count()?,
                bytes: reply.whole("batch")?.into(),
                tokens: if with_tokens {
                    reply.bytes()?.unwrap_or_default().into()
                } else {
                    Bytes::new()
                },
            });
        }
        Ok(Some(LoggedEvents {
            status,
            fencing_number,
            batches,
            last,
            log,
        }))
    }
}
