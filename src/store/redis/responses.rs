//! Responses: create, read, history, delete; and packing of large values.

use bytes::Bytes;

use super::ask::Kind;
use super::keys::{member, pack_chain, unpack_chain};
use super::packed::{
    BATCH_BYTES, LARGE_BYTES, PIECES_AT_A_TIME, Packed, bytes_to_unpack, is_split, pieces, unpack,
};
use super::reply::{Reply, bytes, malformed, read_hint, write_hint};
use super::scripts::{Call, Name};
use super::{Redis, Request, closing};
use crate::ids::ResponseId;
use crate::observe;
use crate::store::cancel::NoticeKind;
use crate::store::record::{Background, Content, InitialState, Retention};
use crate::store::{
    Chain, DeleteOutcome, Error, FencingToken, History, HistoryLimits, NewRecord, Owner, Record,
    ResponseKey, Turn, Turns,
};

/// If creating a record takes longer than this, a scan may have removed its entry in the owner's set.
const INDEX_FRESH_MS: u128 = 1_000;
/// How often reading is repeated because a value was replaced while its pieces were read. A value is replaced at
/// most this often: by finalize, cancel and finalize_cancelled.
pub(super) const REREADS_MAX: u32 = 3;

impl Redis {
    pub(super) fn check_size(&self, bytes: usize) -> Result<(), Error> {
        let max = self.keep.max_record;
        match bytes as u64 {
            bytes if bytes > max => Err(Error::TooLarge { bytes, max }),
            _ => Ok(()),
        }
    }

    pub(super) async fn pack(&self, bytes: &Bytes) -> Result<Packed, Error> {
        let min = self.compress_min;
        if bytes.len() < LARGE_BYTES {
            return Ok(Packed::new(bytes, min));
        }
        let bytes = bytes.clone();
        let packed = self.packer.run(move || Packed::new(&bytes, min));
        packed.await.ok_or_else(closing)
    }

    /// As [`Redis::pack`], for several values that may be large together.
    pub(super) async fn pack_all(&self, values: Vec<Bytes>) -> Result<Vec<Packed>, Error> {
        let min = self.compress_min;
        let bytes: usize = values.iter().map(Bytes::len).sum();
        let pack = move || values.iter().map(|it| Packed::new(it, min)).collect();
        if bytes < LARGE_BYTES {
            return Ok(pack());
        }
        self.packer.run(pack).await.ok_or_else(closing)
    }

    pub(super) async fn unpack(&self, packed: Vec<u8>) -> Result<Bytes, Error> {
        if bytes_to_unpack(&packed) < LARGE_BYTES {
            return unpack(packed);
        }
        let unpacked = self.packer.run(move || unpack(packed));
        unpacked.await.ok_or_else(closing)?
    }

    /// Writes the pieces of large values, before the values themselves.
    pub(super) async fn put_pieces(
        &self,
        key: ResponseKey,
        values: &[(&'static str, Packed)],
        by: &Writer,
    ) -> Result<(), Error> {
        for (name, packed) in values {
            for (field, piece) in packed.fields(name) {
                let call = Call::new(Name::CHUNK).key(self.keys.record(key));
                let call = call.arg(field).arg(piece.clone());
                let call = match by {
                    Writer::Creator(token) => call.arg(token.clone()).arg("").arg(""),
                    Writer::Owner(fence) => call
                        .arg("")
                        .arg(fence.owner.to_string())
                        .number(fence.number),
                };
                // A refusal is ignored here: the write of the value itself reports it.
                self.ask(Kind::Write, Request::Script(call)).await?;
            }
        }
        Ok(())
    }

    pub(super) async fn create_record(
        &self,
        key: ResponseKey,
        record: NewRecord,
    ) -> Result<(), Error> {
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
        let begun = observe::now();
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
        if let Some(parent) = record.parent.as_ref().and_then(|past| past.ids.last()) {
            call = call.key(self.keys.record(ResponseKey { id: *parent, ..key }));
        }
        call = call
            .arg(token)
            .number(ttl)
            .field("hi", write_hint(&record.hint))
            .field("il", input.len() as u64)
            .field("ol", content.output.len() as u64);
        if let Some(past) = &record.parent {
            call = call
                .field("pa", pack_chain(&past.ids))
                .field("pb", past.bytes);
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
        let mut reply = self.call(Kind::Write, call).await?;
        match reply.word()?.as_str() {
            "ok" => {}
            "exists" => return Err(Error::Exists),
            other => return Err(reply.unexpected(other)),
        }
        if let Some(fence) = fence
            && (observe::now() - begun).as_millis() > INDEX_FRESH_MS
        {
            self.index(fence, key).await?;
        }
        Ok(())
    }

    /// Adds the response to the set of its owner.
    pub(super) async fn index(&self, fence: FencingToken, key: ResponseKey) -> Result<(), Error> {
        let mut note = redis::cmd("SADD");
        note.arg(self.keys.running(Some(fence.owner)))
            .arg(member(key));
        self.ask(Kind::Write, Request::Command(note)).await?;
        let note = self.owner_seen(fence.owner);
        self.ask(Kind::Write, Request::Command(note)).await?;
        Ok(())
    }

    pub(super) async fn read(&self, key: ResponseKey, fields: &[&str]) -> Result<Reply, Error> {
        let mut command = redis::cmd("HMGET");
        command.arg(self.keys.record(key)).arg(fields);
        Reply::new(self.ask(Kind::Read, Request::Command(command)).await?)
    }

    /// Reads fields of several responses of one root, in batches with a deadline each, so that small reads of
    /// other requests are not blocked. `None` for a missing response.
    async fn values(
        &self,
        keys: impl Iterator<Item = ResponseKey>,
        fields: &[&'static str],
        is_continued: bool,
    ) -> Result<Vec<Option<Vec<Bytes>>>, Error> {
        let keys: Vec<String> = keys.map(|key| self.keys.record(key)).collect();
        let mut found = Vec::with_capacity(keys.len());
        let mut rereads = 0;
        while found.len() < keys.len() {
            let mut call = Call::new(Name::VALUES)
                .keys(keys[found.len()..].iter().cloned())
                .number(BATCH_BYTES as u64);
            call = match is_continued {
                true => call.number(self.record_ttl_ms()),
                false => call.arg(""),
            };
            for field in fields {
                call = call.arg(*field);
            }
            let mut reply = self
                .call(Kind::Read, call.expecting(BATCH_BYTES as u64))
                .await?;
            if reply.is_empty() {
                return Err(malformed("no values of what was asked for"));
            }
            while !reply.is_empty() && found.len() < keys.len() {
                let values = match reply.value() {
                    redis::Value::Nil | redis::Value::Boolean(false) => None,
                    values => {
                        let key = &keys[found.len()];
                        match self.assemble_all(key, fields, Reply::new(values)?).await? {
                            Some(values) => Some(values),
                            // Replaced or deleted meanwhile: read it again.
                            None if rereads < REREADS_MAX => {
                                rereads += 1;
                                break;
                            }
                            None => return Err(malformed("a piece of a value is missing")),
                        }
                    }
                };
                found.push(values);
            }
        }
        Ok(found)
    }

    /// Assembles values from their fields. `None` if a piece is missing.
    async fn assemble_all(
        &self,
        key: &str,
        fields: &[&str],
        mut values: Reply,
    ) -> Result<Option<Vec<Bytes>>, Error> {
        let mut whole = Vec::with_capacity(fields.len());
        for name in fields {
            match self.assemble(key, name, values.whole(name)?).await? {
                Some(value) => whole.push(value),
                None => return Ok(None),
            }
        }
        Ok(Some(whole))
    }

    /// Assembles one value from its field and, if it is split, its pieces. `None` if a piece is missing.
    pub(super) async fn assemble(
        &self,
        hash: &str,
        name: &str,
        field: Vec<u8>,
    ) -> Result<Option<Bytes>, Error> {
        if !is_split(&field) {
            return self.unpack(field).await.map(Some);
        }
        let mut whole = Vec::new();
        for pieces in pieces(name, &field)?.chunks(PIECES_AT_A_TIME) {
            let mut command = redis::cmd("HMGET");
            command.arg(hash).arg(pieces);
            let bytes = BATCH_BYTES as u64;
            let asked = self.ask(Kind::Read, Request::Bulk { command, bytes });
            let mut reply = Reply::new(asked.await?)?;
            for _ in pieces {
                match reply.bytes()? {
                    Some(piece) => whole.extend_from_slice(&piece),
                    None => return Ok(None),
                }
            }
        }
        self.unpack(whole).await.map(Some)
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
        let past = reply.bytes()?.unwrap_or_default();
        let previous = unpack_chain(key.id.root(), &past).pop();
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
        let mut asked: Vec<ResponseId> = chain.clone();
        if is_own_split {
            asked.push(key.id);
        }
        let mut turns = Vec::with_capacity(count);
        if !asked.is_empty() {
            let keys = asked.iter().map(|id| ResponseKey { id: *id, ..key });
            let values = self.values(keys, &["in", "ou"], true).await?;
            if values.len() != asked.len() {
                return Err(malformed("not as many values as were asked for"));
            }
            // The newest missing one, as a walk back from the end would find it.
            let missing = values.iter().rposition(Option::is_none);
            if let Some(place) = missing {
                return Ok(History::Missing(asked[place]));
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
        let mut reply = self.call(Kind::WriteOnce, call).await?;
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

    /// Removes the response from the set of its owner. If this fails, a later scan removes it.
    pub(super) fn unindex(&self, owner: Option<Owner>, key: ResponseKey) {
        let mut command = redis::cmd("SREM");
        command.arg(self.keys.running(owner)).arg(member(key));
        self.send_detached(Request::Command(command));
    }

    /// Sends a notice to an owner. Without it the owner learns of the change half a second later.
    pub(super) async fn notify(&self, owner: Owner, key: ResponseKey, what: NoticeKind) {
        let notices = self.keys.notices(owner);
        let mut add = redis::cmd("XADD");
        add.arg(&notices)
            .arg("MAXLEN")
            .arg("~")
            .arg(crate::store::cancel::NOTICES_MAX)
            .arg("*")
            .arg("k")
            .arg(member(key))
            .arg("w")
            .arg(what.as_str());
        if self.ask(Kind::Write, Request::Command(add)).await.is_ok() {
            let mut expire = redis::cmd("EXPIRE");
            expire.arg(notices).arg(super::NOTICES_TTL_S);
            self.send_detached(Request::Command(expire));
        }
    }
}

/// Who writes the pieces of a value.
pub(super) enum Writer {
    Creator(String),
    Owner(FencingToken),
}

pub(super) fn first_bytes(value: redis::Value) -> Result<Option<Bytes>, Error> {
    Ok(bytes(value)?.map(Bytes::from))
}
