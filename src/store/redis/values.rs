//! Writing and reading the values of a record: compression, and the pieces of large values.

use bytes::Bytes;

use super::client::{Redis, closing};
use super::packed::{
    BATCH_BYTES, LARGE_BYTES, PIECES_AT_A_TIME, Packed, bytes_to_unpack, is_split, pieces, unpack,
};
use super::reply::{Reply, malformed};
use super::request::{Kind, Request};
use super::scripts::{Call, Name};
use crate::store::{Error, FencingToken, ResponseKey};

/// How often reading is repeated because a value was replaced while its pieces were read. A value is replaced at
/// most this often: by finalize, cancel and finalize_cancelled.
pub(super) const REREADS_MAX: u32 = 3;

/// Values of this size and above are compressed (zstd) to a half or a third. Below it that costs more CPU than the room
/// in Redis is worth.
const COMPRESS_MIN: u64 = 4 << 10;

/// Who writes the pieces of a value.
pub(super) enum Writer {
    Creator(String),
    Owner(FencingToken),
    /// Any replica, of a response that runs.
    Canceller,
}

impl Redis {
    pub(super) async fn pack(&self, bytes: &Bytes) -> Result<Packed, Error> {
        if bytes.len() < LARGE_BYTES {
            return Ok(Packed::new(bytes, COMPRESS_MIN));
        }
        let bytes = bytes.clone();
        let packed = self
            .compression_thread
            .run(move || Packed::new(&bytes, COMPRESS_MIN));
        packed.await.ok_or_else(closing)
    }

    /// As [`Redis::pack`], for several values that may be large together.
    pub(super) async fn pack_all(&self, values: Vec<Bytes>) -> Result<Vec<Packed>, Error> {
        let bytes: usize = values.iter().map(Bytes::len).sum();
        let pack = move || {
            let packed = values.iter().map(|value| Packed::new(value, COMPRESS_MIN));
            packed.collect()
        };
        if bytes < LARGE_BYTES {
            return Ok(pack());
        }
        self.compression_thread.run(pack).await.ok_or_else(closing)
    }

    pub(super) async fn unpack(&self, packed: Vec<u8>) -> Result<Bytes, Error> {
        if bytes_to_unpack(&packed) < LARGE_BYTES {
            return unpack(packed);
        }
        let unpacked = self.compression_thread.run(move || unpack(packed));
        unpacked.await.ok_or_else(closing)?
    }

    /// Writes the pieces of large values, before the values themselves.
    pub(super) async fn put_pieces(
        &self,
        key: ResponseKey,
        values: &[(&'static str, Packed)],
        writer: &Writer,
    ) -> Result<(), Error> {
        for (name, packed) in values {
            for (field, piece) in packed.fields(name) {
                let call = Call::new(Name::CHUNK).key(self.keys.record(key));
                let call = call.arg(field).arg(piece.clone());
                let call = match writer {
                    Writer::Creator(token) => call.arg(token.clone()).arg("").arg(""),
                    Writer::Owner(fence) => call
                        .arg("")
                        .arg(fence.owner.to_string())
                        .number(fence.number),
                    Writer::Canceller => call.arg("").arg("").arg(""),
                };
                // A refusal is ignored here: the write of the value itself reports it.
                self.execute(Kind::Write, Request::Script(call)).await?;
            }
        }
        Ok(())
    }

    pub(super) async fn read(
        &self,
        key: ResponseKey,
        fields: &[&'static str],
    ) -> Result<Reply, Error> {
        let call = fields_of(self.keys.record(key), fields);
        self.call(Kind::Read, call).await
    }

    /// Reads fields of several responses of one root, in batches with a deadline each, so that small reads of
    /// other requests are not blocked. `None` for a missing response.
    pub(super) async fn values(
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
                .number(BATCH_BYTES as u64)
                .arg(is_continued.then(|| self.record_ttl_ms()));
            for field in fields {
                call = call.arg(*field);
            }
            let mut reply = self
                .call(Kind::Read, call.expecting(BATCH_BYTES as u64))
                .await?;
            if reply.is_empty() {
                return Err(malformed("Redis returned none of the requested values"));
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
            let mut call = Call::new(Name::FIELDS).key(hash);
            for piece in pieces {
                call = call.arg(piece.clone());
            }
            let mut reply = self
                .call(Kind::Read, call.expecting(BATCH_BYTES as u64))
                .await?;
            for _ in pieces {
                match reply.bytes()? {
                    Some(piece) => whole.extend_from_slice(&piece),
                    None => return Ok(None),
                }
            }
        }
        self.unpack(whole).await.map(Some)
    }
}

pub(super) fn fields_of(hash: String, fields: &[&'static str]) -> Call {
    let call = Call::new(Name::FIELDS).key(hash);
    fields.iter().fold(call, |call, field| call.arg(*field))
}
