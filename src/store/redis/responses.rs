//! The operations on responses: create, read, history, delete.

use bytes::Bytes;

use super::client::Redis;
use super::keys::{pack_chain, unpack_chain};
use super::packed::is_split;
use super::reply::{malformed, read_hint, write_hint};
use super::request::Kind;
use super::scripts::{Call, Name};
use super::values::Writer;
use crate::ids::ResponseId;
use crate::observe;
use crate::store::cancel::NoticeKind;
use crate::store::record::{Background, Content, InitialState, Retention};
use crate::store::{
    Chain, Commit, DeleteOutcome, Error, History, HistoryLimits, NewRecord, PutOutcome, Record,
    ResponseKey, Turn, Turns,
};

/// If creating a record takes longer than this, a scan may have removed its entry in the owner's set.
const INDEX_FRESH_MS: u128 = 1_000;

impl Redis {
    pub(super) async fn create_record(
        &self,
        key: ResponseKey,
        record: NewRecord,
        commit: Option<Commit>,
    ) -> Result<PutOutcome, Error> {
        let request = match &record.initial {
            InitialState::Finished { .. } => &Bytes::new(),
            InitialState::Background { request, .. } => request,
        };
        let NewRecord { input, content, .. } = &record;
        let bytes = input.len() + content.response.len() + content.output.len();
        self.check_size(bytes + request.len())?;
        let mut values = vec![
            ("in", self.pack(input).await?),
            ("re", self.pack(&content.response).await?),
            ("ou", self.pack(&content.output).await?),
        ];
        if !request.is_empty() {
            values.push(("rq", self.pack(request).await?));
        }
        let token = record.token.to_string();
        let started = observe::now();
        let fence = match record.initial {
            InitialState::Finished { .. } => None,
            InitialState::Background { fence, .. } => Some(fence),
        };
        if let Some(fence) = fence {
            // Before the record, so that a scan for orphans cannot miss it.
            self.index(fence, key).await?;
        }
        if values.iter().any(|(_, packed)| !packed.pieces.is_empty()) {
            let writer = Writer::Creator(token.clone());
            self.put_pieces(key, &values, &writer).await?;
        }

        let ttl = self.record_ttl_ms();
        let mut call = Call::new(Name::CREATE).key(self.keys.record(key));
        let parent = record.parent.as_ref().filter(|_| commit.is_none());
        if let Some(parent) = parent.and_then(|chain| chain.ids.last()) {
            call = call.key(self.keys.record(ResponseKey { id: *parent, ..key }));
        }
        call = call
            .arg(token)
            .number(match record.initial {
                InitialState::Finished { .. } => ttl,
                // It lives for as long as it runs.
                InitialState::Background { .. } => 0,
            })
            .number(ttl);
        let mut items = None;
        if let Some(commit) = &commit {
            let (with_items, prepared) = self.commit_in(call, commit).await?;
            (call, items) = (with_items, Some(prepared));
        } else {
            call = call.arg("");
        }
        call = call
            .field("hi", write_hint(&record.hint))
            .field("il", input.len() as u64)
            .field("ol", content.output.len() as u64);
        if let Some(chain) = &record.parent {
            call = call
                .field("pa", pack_chain(&chain.ids))
                .field("pb", chain.bytes);
        }
        for (name, packed) in values {
            call = call.field(name, packed.field);
        }
        call = match record.initial {
            InitialState::Finished { status } => call.field("st", status.as_str()),
            InitialState::Background {
                fence,
                retention,
                streams,
                ..
            } => call
                .field("st", "queued")
                .field("bg", "1")
                .field("own", fence.owner.to_string())
                .field("ep", fence.number)
                .field("at", "1")
                .field("sm", if streams { "1" } else { "0" })
                .field(
                    "rt",
                    match retention {
                        Retention::Stored => "s",
                        Retention::Ephemeral => "e",
                    },
                )
                .field("sq", "-1"),
        };
        let put = self.put_with(call, items).await?;
        if let Some(fence) = fence
            && (observe::now() - started).as_millis() > INDEX_FRESH_MS
        {
            self.index(fence, key).await?;
        }
        Ok(put)
    }

    pub(super) async fn get_record(&self, key: ResponseKey) -> Result<Option<Record>, Error> {
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
    }

    pub(super) async fn get_request(&self, key: ResponseKey) -> Result<Option<Bytes>, Error> {
        let mut reply = self.read(key, &["v", "rq"]).await?;
        if reply.version()?.is_none() {
            return Ok(None);
        }
        let Some(request) = reply.bytes()? else {
            return Ok(None);
        };
        if !is_split(&request) {
            return self.unpack(request).await.map(Some);
        }
        let values = self.values([key].into_iter(), &["rq"], false).await?;
        Ok(values.into_iter().flatten().flatten().next())
    }

    pub(super) async fn get_input(&self, key: ResponseKey) -> Result<Option<Bytes>, Error> {
        let mut reply = self.read(key, &["v", "rt", "in"]).await?;
        if reply.version()?.is_none() || reply.word()? == "e" {
            return Ok(None);
        }
        let input = reply.whole("input")?;
        if !is_split(&input) {
            return self.unpack(input).await.map(Some);
        }
        let values = self.values([key].into_iter(), &["in"], false).await?;
        Ok(values.into_iter().flatten().flatten().next())
    }

    /// One read for the requested response with the ids of its chain, and one for the rest of the chain (one per
    /// batch if it is long). The second also extends the retention of the chain, because it is about to be
    /// continued.
    pub(super) async fn get_history(
        &self,
        key: ResponseKey,
        max: HistoryLimits,
    ) -> Result<History, Error> {
        let fields = ["v", "st", "rt", "hi", "pa", "pb", "il", "ol", "in", "ou"];
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
        let mut chain = unpack_chain(key.id.root(), &reply.bytes()?.unwrap_or_default());
        let bytes = reply.count()? + reply.count()? + reply.count()?;
        let count = chain.len() + 1;
        if count > max.turns || bytes > max.bytes {
            return Ok(History::TooLarge {
                turns: count,
                bytes,
            });
        }
        let own = (reply.whole("input")?, reply.whole("output")?);
        let is_own_split = is_split(&own.0) || is_split(&own.1);
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
            if let Some(index) = missing {
                return Ok(History::Missing(requested[index]));
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
    }

    pub(super) async fn delete_record(&self, key: ResponseKey) -> Result<DeleteOutcome, Error> {
        let call = Call::new(Name::DELETE)
            .key(self.keys.record(key))
            .key(self.keys.log(key));
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
    }
}
