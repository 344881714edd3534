//! Responses that run in the background: their transitions, their log, and what their owners are told of them.

use super::ask::Kind;
use super::keys::parse_member;
use super::reply::{Reply, odd, write_hint};
use super::responses::Writer;
use super::scripts::{Call, Name};
use super::{Redis, Request};
use crate::store::cancel::{NOTICES_MAX, What};
use crate::store::log::Kept;
use crate::store::{
    Amend, Batch, Cancel, Cancelled, Cas, Cursor, Error, Events, Fence, Final, Key, Notice, Owner,
};

impl Redis {
    /// A call that begins with record, log and the writer's right.
    pub(super) fn by(&self, name: Name, key: Key, fence: Fence) -> Call {
        Call::new(name)
            .key(self.keys.record(key))
            .key(self.keys.log(key))
            .arg(fence.owner.to_string())
            .number(fence.epoch)
    }

    pub(super) async fn start_record(&self, key: Key, fence: Fence) -> Result<Cas, Error> {
        let call = self.by(Name::START, key, fence);
        self.call(Kind::Write, call).await?.cas()
    }

    pub(super) async fn append_events(
        &self,
        key: Key,
        fence: Fence,
        batch: Batch,
    ) -> Result<Cas, Error> {
        let call = self
            .by(Name::APPEND, key, fence)
            .number(batch.first)
            .number(batch.last)
            .arg(batch.bytes)
            .number(self.keep.log_bytes_max)
            .number(self.record_ttl_ms());
        self.call(Kind::Write, call).await?.cas()
    }

    pub(super) async fn finalize_record(
        &self,
        key: Key,
        fence: Fence,
        end: Final,
    ) -> Result<Cas, Error> {
        let content = &end.content;
        self.check_size(content.response.len() + content.output.len() + end.cut.len())?;
        let mut values = vec![
            ("re", self.pack(&content.response).await?),
            ("ou", self.pack(&content.output).await?),
        ];
        if !end.cut.is_empty() {
            values.push(("cu", self.pack(&end.cut).await?));
        }
        self.put_pieces(key, &values, &Writer::Owner(fence)).await?;
        let mut call = self
            .by(Name::FINALIZE, key, fence)
            .arg(end.token.to_string())
            .arg(end.status.as_str())
            .number(self.record_ttl_ms())
            .number(self.keep.ephemeral_ttl_s * 1_000)
            .number(self.keep.log_ttl_s * 1_000)
            .number(self.keep.log_bytes_max);
        call = match end.batch {
            Some(batch) => call.number(batch.first).number(batch.last).arg(batch.bytes),
            None => call.arg("").arg("").arg(""),
        };
        call = call
            .field("hi", write_hint(&end.hint))
            .field("ol", content.output.len() as u64);
        for (name, packed) in values {
            call = call.field(name, packed.field);
        }
        let cas = self.call(Kind::Write, call).await?.cas()?;
        if cas == Cas::Done {
            self.unindex(Some(fence.owner), key);
        }
        Ok(cas)
    }

    pub(super) async fn cancel_record(&self, key: Key, cancel: Cancel) -> Result<Cancelled, Error> {
        self.check_size(cancel.response.len())?;
        let packed = self.pack(&cancel.response).await?;
        if !packed.pieces.is_empty() {
            // It is the response without its output: nobody's is a megabyte.
            let max = 1 << 20;
            return Err(Error::TooLarge {
                bytes: cancel.response.len() as u64,
                max,
            });
        }
        let call = Call::new(Name::CANCEL)
            .key(self.keys.record(key))
            .key(self.keys.log(key))
            .arg(cancel.token.to_string())
            .number(self.record_ttl_ms())
            .number(self.keep.ephemeral_ttl_s * 1_000)
            .number(self.keep.log_ttl_s * 1_000)
            .number(self.keep.log_bytes_max)
            .arg(cancel.event)
            .arg(packed.field);
        let mut reply = self.call(Kind::Write, call).await?;
        Ok(match reply.word()?.as_str() {
            "ok" => {
                let (was, owner) = (reply.status()?, reply.owner()?);
                if let Some(owner) = owner {
                    self.notify(owner, key, What::Cancelled).await;
                }
                self.unindex(owner, key);
                Cancelled::Done { was, owner }
            }
            "terminal" => Cancelled::Terminal(reply.status()?),
            "not_background" => Cancelled::NotBackground,
            "gone" => Cancelled::Gone,
            other => return Err(reply.unexpected(other)),
        })
    }

    pub(super) async fn amend_record(
        &self,
        key: Key,
        fence: Fence,
        amend: Amend,
    ) -> Result<Cas, Error> {
        let content = &amend.content;
        self.check_size(content.response.len() + content.output.len() + amend.cut.len())?;
        let mut values = vec![
            ("re", self.pack(&content.response).await?),
            ("ou", self.pack(&content.output).await?),
        ];
        if !amend.cut.is_empty() {
            values.push(("cu", self.pack(&amend.cut).await?));
        }
        self.put_pieces(key, &values, &Writer::Owner(fence)).await?;
        let mut call = self
            .by(Name::AMEND, key, fence)
            .field("ol", content.output.len() as u64);
        for (name, packed) in values {
            call = call.field(name, packed.field);
        }
        self.call(Kind::WriteOnce, call).await?.cas()
    }

    pub(super) async fn read_events(
        &self,
        key: Key,
        after: Option<u64>,
        bytes_max: u64,
    ) -> Result<Option<Events>, Error> {
        let call = Call::new(Name::EVENTS)
            .key(self.keys.record(key))
            .key(self.keys.log(key))
            .arg(after.map_or(String::new(), |after| after.to_string()))
            .number(bytes_max);
        let mut reply = self.call(Kind::Read, call).await?;
        let word = reply.word()?;
        if word == "gone" {
            return Ok(None);
        }
        if !matches!(word.as_str(), "whole" | "overflowed" | "sealed") {
            return Err(reply.unexpected(&word));
        }
        let (status, last) = (reply.status()?, reply.last_event()?);
        let cut = reply.bytes()?.unwrap_or_default();
        let kept = match word.as_str() {
            "whole" => Kept::Whole,
            "sealed" => Kept::Sealed(self.unpack(cut).await?),
            _ => Kept::Overflowed,
        };
        let mut batches = Vec::new();
        while !reply.is_empty() {
            batches.push(Batch {
                first: reply.count()?,
                last: reply.count()?,
                bytes: reply.whole("batch")?.into(),
            });
        }
        Ok(Some(Events {
            status,
            batches,
            last,
            kept,
        }))
    }

    pub(super) async fn read_notices(
        &self,
        owner: Owner,
        after: Cursor,
    ) -> Result<(Vec<Notice>, Cursor), Error> {
        let mut range = redis::cmd("XRANGE");
        range
            .arg(self.keys.notices(owner))
            .arg(format!("({}-{}", after.0, after.1))
            .arg("+")
            .arg("COUNT")
            .arg(NOTICES_MAX);
        let mut reply = Reply::new(self.ask(Kind::Read, Request::Command(range)).await?)?;
        let (mut notices, mut cursor) = (Vec::new(), after);
        while !reply.is_empty() {
            let mut entry = Reply::new(reply.value())?;
            let id = entry.word()?;
            let (ms, number) = id.split_once('-').ok_or_else(|| odd("no stream id"))?;
            let number_of = |text: &str| text.parse().map_err(|_| odd("no stream id"));
            cursor = Cursor(number_of(ms)?, number_of(number)?);
            let mut fields = Reply::new(entry.value())?;
            let (_, key, _, what) = (
                fields.word()?,
                fields.word()?,
                fields.word()?,
                fields.word()?,
            );
            let what = match what.as_str() {
                "cancelled" => What::Cancelled,
                "deleted" => What::Deleted,
                // Of a newer release; whoever runs it finds out by asking.
                _ => continue,
            };
            let at_ms = cursor.0;
            notices.extend(parse_member(&key).map(|key| Notice { key, what, at_ms }));
        }
        Ok((notices, cursor))
    }
}
