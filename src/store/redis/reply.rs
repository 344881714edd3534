//! Parses replies of Redis. A malformed reply is an error, never a panic.

use std::vec;

use redis::Value;

use super::keys::parse_owner;
use crate::store::{CommitRefusal, Error, Owner, RoutingHint, Status, WriteOutcome};

/// An array, read element by element.
pub(super) struct Reply(vec::IntoIter<Value>);

pub(super) fn malformed(reason: impl Into<String>) -> Error {
    Error::Unreadable(reason.into().into())
}

impl Reply {
    pub(super) fn new(value: Value) -> Result<Self, Error> {
        match value {
            Value::Array(values) | Value::Set(values) => Ok(Self(values.into_iter())),
            _ => Err(malformed("expected an array from Redis")),
        }
    }

    pub(super) fn value(&mut self) -> Value {
        self.0.next().unwrap_or(Value::Nil)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.len() == 0
    }

    /// `None` for nil.
    pub(super) fn bytes(&mut self) -> Result<Option<Vec<u8>>, Error> {
        bytes(self.value())
    }

    pub(super) fn whole(&mut self, what: &str) -> Result<Vec<u8>, Error> {
        self.bytes()?
            .ok_or_else(|| malformed(format!("{what} is missing")))
    }

    pub(super) fn text(&mut self) -> Result<Option<String>, Error> {
        match self.bytes()? {
            Some(bytes) => String::from_utf8(bytes)
                .map(Some)
                .map_err(|_| malformed("expected text")),
            None => Ok(None),
        }
    }

    pub(super) fn word(&mut self) -> Result<String, Error> {
        Ok(self.text()?.unwrap_or_default())
    }

    pub(super) fn number(&mut self) -> Result<Option<i64>, Error> {
        match self.text()? {
            Some(text) => text
                .parse()
                .map(Some)
                .map_err(|_| malformed("expected a number")),
            None => Ok(None),
        }
    }

    pub(super) fn count(&mut self) -> Result<u64, Error> {
        let number = self.number()?.unwrap_or(0);
        u64::try_from(number).map_err(|_| malformed("a negative count"))
    }

    /// -1 for none.
    pub(super) fn last_event(&mut self) -> Result<Option<u64>, Error> {
        Ok(self.number()?.and_then(|number| number.try_into().ok()))
    }

    pub(super) fn status(&mut self) -> Result<Status, Error> {
        let word = self.word()?;
        Status::parse(&word).ok_or_else(|| malformed(format!("`{word}` is not a status")))
    }

    /// Empty for none.
    pub(super) fn owner(&mut self) -> Result<Option<Owner>, Error> {
        match self.word()?.as_str() {
            "" => Ok(None),
            text => parse_owner(text)
                .map(Some)
                .ok_or_else(|| malformed("invalid owner")),
        }
    }

    /// Checks the version of a record. `None` if there is no record.
    pub(super) fn version(&mut self) -> Result<Option<()>, Error> {
        match self.number()? {
            None => Ok(None),
            Some(1 | 2) => Ok(Some(())),
            Some(newer) => Err(malformed(format!(
                "written by a newer release (record version {newer})"
            ))),
        }
    }

    pub(super) fn write_outcome(&mut self) -> Result<WriteOutcome, Error> {
        let word = self.word()?;
        Ok(match word.as_str() {
            "ok" => WriteOutcome::Done,
            "gone" => WriteOutcome::Gone,
            "fenced" => WriteOutcome::Fenced,
            "terminal" => WriteOutcome::Terminal(self.status()?),
            "duplicate" => WriteOutcome::Duplicate {
                last: self.count()?,
            },
            "gap" => WriteOutcome::Gap {
                last: self.last_event()?,
            },
            "overflow" => WriteOutcome::Overflow,
            "not_added" => WriteOutcome::NotAdded(self.commit_refusal()?),
            other => return Err(self.unexpected(other)),
        })
    }

    fn commit_refusal(&mut self) -> Result<CommitRefusal, Error> {
        Ok(match self.word()?.as_str() {
            "gone" => CommitRefusal::Gone,
            "unlocked" => CommitRefusal::Unlocked,
            "taken" => CommitRefusal::Taken,
            "too_large" => CommitRefusal::TooLarge,
            "damaged" => CommitRefusal::Damaged,
            other => return Err(self.unexpected(other)),
        })
    }

    pub(super) fn unexpected(&mut self, word: &str) -> Error {
        match word {
            "newer" => malformed("written by a newer release"),
            "damaged" => Error::DamagedConversation,
            word => malformed(format!("unexpected outcome `{word}` from Redis")),
        }
    }
}

pub(super) fn bytes(value: Value) -> Result<Option<Vec<u8>>, Error> {
    Ok(match value {
        Value::Nil | Value::Boolean(false) => None,
        Value::BulkString(bytes) => Some(bytes),
        Value::SimpleString(text) => Some(text.into_bytes()),
        Value::Int(number) => Some(number.to_string().into_bytes()),
        Value::Okay => Some(b"OK".to_vec()),
        _ => return Err(malformed("unexpected nested value from Redis")),
    })
}

/// Encodes `["model", "worker" or null]`.
pub(super) fn write_hint(hint: &RoutingHint) -> String {
    // Strings only: encoding cannot fail.
    serde_json::to_string(&(&*hint.model, hint.worker.as_deref())).unwrap_or_default()
}

pub(super) fn read_hint(text: &str) -> Result<RoutingHint, Error> {
    let (model, worker): (String, Option<String>) =
        serde_json::from_str(text).map_err(|_| malformed("invalid routing hint"))?;
    Ok(RoutingHint {
        model: model.into(),
        worker: worker.map(Into::into),
    })
}
