//! The operations on responses: create, read, history, delete.

use std::iter;

use bytes::Bytes;

use super::client::Redis;
use super::keys::{SEGMENT, pack_chain, split_chain, unpack_chain};
use super::packed::{BATCH_BYTES, is_split};
use super::reply::{Reply, malformed, read_hint, write_hint};
use super::request::Kind;
use super::scripts::{Arg, Call, Name};
use super::takeover::after_a_write;
use super::values::Writer;
use crate::ids::ResponseId;
use crate::observe;
use crate::store::cancel::NoticeKind;
use crate::store::meters::Op;
use crate::store::record::{Background, Content, InitialState, Retention};
use crate::store::{
    Chain, Commit, DeleteOutcome, Error, History, HistoryLimits, NewRecord, PutOutcome, Record,
    ResponseKey, Responses, StoreFuture, Turn, Turns,
};

/// If creating a record takes longer than this, a scan may have removed its entry in the owner's set.
const INDEX_FRESH_MS: u128 = 1_000;

impl Responses for Redis {
    fn create(&self, key: ResponseKey, record: NewRecord) -> StoreFuture<'_, ()> {
        self.meters.meter(Op::Create, move || async move {
            let _ = self.create_record(key, record, None).await?;
            Ok(())
        })
    }

    fn create_in_conversation(
        &self,
        key: ResponseKey,
        record: NewRecord,
        commit: Commit,
    ) -> StoreFuture<'_, PutOutcome> {
        self.meters.meter(Op::CreateInConversation, move || {
            self.create_record(key, record, Some(commit))
        })
    }

    fn get(&self, key: ResponseKey) -> StoreFuture<'_, Option<Record>> {
        self.meters.meter(Op::Get, move || async move {
            let fields = [
                "v", "st", "hi", "pa", "re", "ou", "bg", "own", "ep", "at", "rt", "sm", "sq",
            ];
            let mut reply = self.read(key, &fields).await?;
            if reply.version()?.is_none() {
                return Ok(None);
            }
            let status = reply.status()?;
            let hint = read_hint(&reply.word()?)?;
            let chain = reply.bytes()?.unwrap_or_default();
            let previous = unpack_chain(key.id.root(), &chain).pop();
            let (response, output) = (reply.whole("response")?, reply.whole("output")?);
            let background = match reply.text()? {
                None => None,
                Some(_) => Some(Background {
                    owner: reply.owner()?,
                    fencing_number: reply.count()?,
                    attempts: reply.count()? as u32,
                    retention: match reply.word()?.as_str() {
                        "e" => Retention::Ephemeral,
                        _ => Retention::Stored,
                    },
                    streams: reply.word()? == "1",
                    last_event: reply.last_event()?,
                }),
            };
            let content = if is_split(&response) || is_split(&output) {
                let values = self.values([key].into_iter(), &["re", "ou"], false).await?;
                // Deleted between the two reads.
                let Some(Some(values)) = values.into_iter().next() else {
                    return Ok(None);
                };
                let mut values = values.into_iter();
                Content {
                    response: values.next().unwrap_or_default(),
                    output: values.next().unwrap_or_default(),
                }
            } else {
                Content {
                    response: self.unpack(response).await?,
                    output: self.unpack(output).await?,
                }
            };
            Ok(Some(Record {
                status,
                hint,
                previous,
                content,
                background,
            }))
        })
    }

    fn input(&self, key: ResponseKey) -> StoreFuture<'_, Option<Bytes>> {
        self.meters.meter(Op::Input, move || async move {
            let mut reply = self.read(key, &["v", "rt", "in"]).await?;
            if reply.version()?.is_none() || reply.word()? == "e" {
                return Ok(None);
            }
            self.value(key, "in", reply.whole("input")?).await
        })
    }

    fn request(&self, key: ResponseKey) -> StoreFuture<'_, Option<Bytes>> {
        self.meters.meter(Op::Request, move || async move {
            let mut reply = self.read(key, &["v", "rq"]).await?;
            if reply.version()?.is_none() {
                return Ok(None);
            }
            match reply.bytes()? {
                Some(request) => self.value(key, "rq", request).await,
                None => Ok(None),
            }
        })
    }

    // One read for the requested response with the ids of its chain, and one for the rest of the chain (one per
    // batch if it is long); one between them for the ids of a chain of more than [`SEGMENT`] turns. The second also
    // extends the retention of the chain, because it is about to be continued.
    fn history(&self, key: ResponseKey, max: HistoryLimits) -> StoreFuture<'_, History> {
        self.meters.meter(Op::History, move || async move {
            let fields = [
                "v", "st", "rt", "hi", "pa", "an", "pb", "il", "ol", "in", "ou",
            ];
            let mut reply = self.read(key, &fields).await?;
            if reply.version()?.is_none() {
                return Ok(History::Missing(key.id));
            }
            let status = reply.status()?;
            if reply.word()? == "e" {
                return Ok(History::Missing(key.id));
            }
            if !status.is_terminal() {
                return Ok(History::Running(status));
            }
            if !status.is_continuable() {
                return Ok(History::Ended(status));
            }
            let hint = read_hint(&reply.word()?)?;
            let recent = unpack_chain(key.id.root(), &reply.bytes()?.unwrap_or_default());
            let anchors = unpack_chain(key.id.root(), &reply.bytes()?.unwrap_or_default());
            let bytes = reply.count()? + reply.count()? + reply.count()?;
            let count = anchors.len() * SEGMENT + recent.len() + 1;
            if count > max.turns || bytes > max.bytes {
                return Ok(History::TooLarge {
                    turns: count,
                    bytes,
                });
            }
            let own = (reply.whole("input")?, reply.whole("output")?);
            let is_own_split = is_split(&own.0) || is_split(&own.1);
            let (mut chain, missing_anchor) = self.whole_chain(key, &anchors, recent).await?;
            let mut requested: Vec<ResponseId> = chain.clone();
            if is_own_split {
                requested.push(key.id);
            }
            let mut turns = Vec::with_capacity(count);
            if !requested.is_empty() {
                let keys = requested.iter().map(|id| ResponseKey { id: *id, ..key });
                let values = self.values(keys, &["in", "ou"], true).await?;
                if values.len() != requested.len() {
                    return Err(malformed("Redis returned too few values"));
                }
                // The newest missing one, as a walk back from the end would find it.
                let missing = values.iter().rposition(Option::is_none);
                let missing = missing.map(|index| requested[index]).or(missing_anchor);
                if let Some(missing) = missing {
                    return Ok(History::Missing(missing));
                }
                for values in values.into_iter().flatten() {
                    let mut values = values.into_iter();
                    turns.push(Turn {
                        input: values.next().unwrap_or_default(),
                        output: values.next().unwrap_or_default(),
                    });
                }
            }
            if !is_own_split {
                turns.push(Turn {
                    input: self.unpack(own.0).await?,
                    output: self.unpack(own.1).await?,
                });
            }
            chain.push(key.id);
            Ok(History::Found(Turns {
                turns,
                chain: Chain {
                    ids: chain.into(),
                    bytes,
                },
                hint,
            }))
        })
    }

    fn keep_chain(&self, key: ResponseKey) -> StoreFuture<'_, Option<ResponseId>> {
        self.meters.meter(Op::KeepChain, move || async move {
            let mut reply = self.read(key, &["v", "pa", "an"]).await?;
            if reply.version()?.is_none() {
                return Ok(Some(key.id));
            }
            let recent = unpack_chain(key.id.root(), &reply.bytes()?.unwrap_or_default());
            let anchors = unpack_chain(key.id.root(), &reply.bytes()?.unwrap_or_default());
            let (mut chain, missing_anchor) = self.whole_chain(key, &anchors, recent).await?;
            chain.push(key.id);
            let call = Call::new(Name::KEEP)
                .keys(self.records(key, &chain))
                .number(self.record_ttl_ms());
            let mut reply = self.call(Kind::Read, call).await?;
            match reply.word()?.as_str() {
                "ok" => Ok(missing_anchor),
                "broken" => Ok(Some(missing(&mut reply, &chain)?)),
                other => Err(reply.unexpected(other)),
            }
        })
    }

    fn delete(&self, key: ResponseKey) -> StoreFuture<'_, DeleteOutcome> {
        self.meters.meter(Op::Delete, move || async move {
            let call = Call::new(Name::DELETE)
                .key(self.keys.record(key))
                .key(self.keys.log(key))
                .key(self.keys.deleted(key));
            let mut reply = self.call_replicated(Kind::WriteOnce, call).await?;
            match reply.word()?.as_str() {
                "ok" => {}
                "gone" => return Ok(DeleteOutcome::Gone),
                other => return Err(reply.unexpected(other)),
            }
            let was = reply.status()?;
            let owner = reply.owner()?.filter(|_| !was.is_terminal());
            if let Some(owner) = owner {
                self.notify(owner, key, NoticeKind::Deleted).await;
                self.unindex(Some(owner), key);
            }
            Ok(DeleteOutcome::Done { was, owner })
        })
    }
}

impl Redis {
    pub(super) async fn create_record(
        &self,
        key: ResponseKey,
        record: NewRecord,
        commit: Option<Commit>,
    ) -> Result<PutOutcome, Error> {
        let (fence, request) = match &record.initial {
            InitialState::Finished { .. } => (None, Bytes::new()),
            InitialState::Background { fence, request, .. } => (Some(*fence), request.clone()),
        };
        let NewRecord { input, content, .. } = &record;
        self.keep.check_size(record.size())?;
        let mut values = vec![
            ("in", self.pack(input).await?),
            ("re", self.pack(&content.response).await?),
            ("ou", self.pack(&content.output).await?),
        ];
        if !request.is_empty() {
            values.push(("rq", self.pack(&request).await?));
        }
        let token = record.token.to_string();
        let started = observe::now();
        if let Some(fence) = fence {
            // Before the record, so that a scan for orphans cannot miss it.
            self.index(fence, key).await?;
        }
        if values.iter().any(|(_, packed)| !packed.pieces.is_empty()) {
            let writer = Writer::Creator(token.clone());
            self.put_pieces(key, &values, &writer).await?;
        }

        let mut fields: Vec<(&'static str, Arg)> = vec![
            ("hi", write_hint(&record.hint).into()),
            ("il", (input.len() as u64).into()),
            ("ol", (content.output.len() as u64).into()),
        ];
        if let Some(chain) = &record.parent {
            let (recent, anchors) = split_chain(&chain.ids);
            fields.push(("pa", pack_chain(recent).into()));
            fields.push(("pb", chain.bytes.into()));
            if !anchors.is_empty() {
                fields.push(("an", pack_chain(&anchors).into()));
                fields.push(("v", "2".into()));
            }
        }
        let values = values.into_iter();
        fields.extend(values.map(|(name, packed)| (name, packed.field.into())));
        match record.initial {
            InitialState::Finished { status } => fields.push(("st", status.as_str().into())),
            InitialState::Background {
                fence,
                retention,
                streams,
                ..
            } => fields.extend([
                ("st", "queued".into()),
                ("bg", "1".into()),
                ("own", fence.owner.to_string().into()),
                ("ep", fence.number.into()),
                ("at", "1".into()),
                ("sm", if streams { "1" } else { "0" }.into()),
                (
                    "rt",
                    match retention {
                        Retention::Stored => "s",
                        Retention::Ephemeral => "e",
                    }
                    .into(),
                ),
                ("sq", "-1".into()),
            ]),
        }

        let ttl = self.record_ttl_ms();
        // A background response lives for as long as it runs.
        let own_ttl = if fence.is_some() { 0 } else { ttl };
        let begin = |keys: Vec<String>| {
            Call::new(Name::CREATE)
                .key(self.keys.record(key))
                .keys(keys)
                .arg(token.clone())
                .number(own_ttl)
                .number(ttl)
        };
        let with_fields = |call: Call| {
            let fields = fields.iter().cloned();
            fields.fold(call, |call, (name, value)| call.field(name, value))
        };
        let mut put = PutOutcome::Done;
        if let Some(commit) = &commit {
            let (call, items) = self.commit_in(begin(Vec::new()), commit).await?;
            put = self.put_with(with_fields(call), items).await?;
        } else {
            let chain = record.parent.as_ref();
            let ids: &[ResponseId] = chain.map_or(&[], |chain| &chain.ids);
            let mut is_put = false;
            if let [first, .., last] = ids {
                let ends = [*first, *last];
                let records = self.records(key, &ends);
                let keys = iter::once(self.keys.deleted(key)).chain(records).collect();
                is_put = self.put(with_fields(begin(keys).arg("ends")), ids).await?;
            }
            if !is_put {
                let keys = self.records(key, ids).collect();
                self.put(with_fields(begin(keys).arg("")), ids).await?;
            }
        }
        if let Some(fence) = fence
            && (observe::now() - started).as_millis() > INDEX_FRESH_MS
        {
            self.index(fence, key).await.map_err(after_a_write)?;
        }
        Ok(put)
    }

    /// The value of a field that was read, with its pieces if it is large. `None`: it was deleted meanwhile.
    async fn value(
        &self,
        key: ResponseKey,
        name: &'static str,
        field: Vec<u8>,
    ) -> Result<Option<Bytes>, Error> {
        if !is_split(&field) {
            return self.unpack(field).await.map(Some);
        }
        let values = self.values([key].into_iter(), &[name], false).await?;
        Ok(values.into_iter().flatten().flatten().next())
    }

    /// Writes a record that continues `chain`. False if all records of that must be looked at first.
    async fn put(&self, call: Call, chain: &[ResponseId]) -> Result<bool, Error> {
        let mut reply = self.call_replicated(Kind::Write, call).await?;
        match reply.word()?.as_str() {
            "ok" | "again" => Ok(true),
            "whole" => Ok(false),
            "exists" => Err(Error::Exists),
            "broken" => Err(Error::BrokenChain(missing(&mut reply, chain)?)),
            other => Err(reply.unexpected(other)),
        }
    }

    fn records(&self, key: ResponseKey, ids: &[ResponseId]) -> impl Iterator<Item = String> {
        let record = move |id: &ResponseId| self.keys.record(ResponseKey { id: *id, ..key });
        ids.iter().map(record)
    }

    /// The chain of a record, oldest first: the ids that its anchors have, and its own. If an anchor is missing, the chain
    /// begins with the newest of those, which is returned besides.
    async fn whole_chain(
        &self,
        key: ResponseKey,
        anchors: &[ResponseId],
        recent: Vec<ResponseId>,
    ) -> Result<(Vec<ResponseId>, Option<ResponseId>), Error> {
        let (mut chain, mut missing, mut found) = (Vec::new(), None, 0);
        while found < anchors.len() {
            let left = &anchors[found..];
            let call = Call::new(Name::VALUES)
                .keys(self.records(key, left))
                .number(BATCH_BYTES as u64)
                .arg("")
                .arg("pa");
            let call = call.expecting((left.len() * SEGMENT * size_of::<u128>()) as u64);
            let mut reply = self.call(Kind::Read, call).await?;
            if reply.is_empty() {
                return Err(malformed("Redis returned none of the requested values"));
            }
            while found < anchors.len() && !reply.is_empty() {
                match reply.value() {
                    redis::Value::Nil | redis::Value::Boolean(false) => {
                        chain.clear();
                        missing = Some(anchors[found]);
                    }
                    values => {
                        let packed = Reply::new(values)?.whole("chain")?;
                        let ids = unpack_chain(key.id.root(), &packed);
                        // Older releases wrote all that is before it.
                        let from = ids.len().checked_sub(SEGMENT);
                        let from =
                            from.ok_or_else(|| malformed("a part of a chain is too short"))?;
                        chain.extend_from_slice(&ids[from..]);
                    }
                }
                found += 1;
            }
        }
        chain.extend(recent);
        Ok((chain, missing))
    }
}

/// The response of the chain that a script found missing.
fn missing(reply: &mut Reply, chain: &[ResponseId]) -> Result<ResponseId, Error> {
    let place = usize::try_from(reply.count()?).ok();
    let found = place.and_then(|place| chain.get(place)).copied();
    found.ok_or_else(|| malformed("no response of the chain is at the place that is missing"))
}
