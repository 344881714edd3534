//! What Redis answers, taken apart. What does not look as expected is an error, never a panic.

use std::vec;

use redis::Value;

use crate::store::{Error, Owner, RoutingHint, Status, WriteOutcome};

use super::keys::parse_owner;

/// An array, from its front.
pub(super) struct Reply(vec::IntoIter<Value>);

pub(super) fn odd(reason: impl Into<String>) -> Error {
    Error::Unreadable(reason.into().into())
}

impl Reply {
    pub(super) fn new(value: Value) -> Result<Self, Error> {
        match value {
            Value::Array(values) | Value::Set(values) => Ok(Self(values.into_iter())),
            _ => Err(odd("Redis did not answer with an array")),
        }
    }

    pub(super) fn value(&mut self) -> Value {
        self.0.next().unwrap_or(Value::Nil)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.len() == 0
    }

    /// `None` for what is not there.
    pub(super) fn bytes(&mut self) -> Result<Option<Vec<u8>>, Error> {
        bytes(self.value())
    }

    pub(super) fn whole(&mut self, what: &str) -> Result<Vec<u8>, Error> {
        self.bytes()?
            .ok_or_else(|| odd(format!("{what} is missing")))
    }

    pub(super) fn text(&mut self) -> Result<Option<String>, Error> {
        match self.bytes()? {
            Some(bytes) => String::from_utf8(bytes)
                .map(Some)
                .map_err(|_| odd("no text")),
            None => Ok(None),
        }
    }

    pub(super) fn word(&mut self) -> Result<String, Error> {
        Ok(self.text()?.unwrap_or_default())
    }

    pub(super) fn number(&mut self) -> Result<Option<i64>, Error> {
        match self.text()? {
            Some(text) => text.parse().map(Some).map_err(|_| odd("no number")),
            None => Ok(None),
        }
    }

    pub(super) fn count(&mut self) -> Result<u64, Error> {
        let number = self.number()?.unwrap_or(0);
        u64::try_from(number).map_err(|_| odd("a negative count"))
    }

    /// -1 for none.
    pub(super) fn last_event(&mut self) -> Result<Option<u64>, Error> {
        Ok(self.number()?.and_then(|number| number.try_into().ok()))
    }

    pub(super) fn status(&mut self) -> Result<Status, Error> {
        let word = self.word()?;
        Status::parse(&word).ok_or_else(|| odd(format!("`{word}` is no status")))
    }

    /// Empty for none.
    pub(super) fn owner(&mut self) -> Result<Option<Owner>, Error> {
        match self.word()?.as_str() {
            "" => Ok(None),
            text => parse_owner(text).map(Some).ok_or_else(|| odd("no owner")),
        }
    }

    /// The version that a record begins with. `None`: there is no record.
    pub(super) fn version(&mut self) -> Result<Option<()>, Error> {
        match self.number()? {
            None => Ok(None),
            Some(1) => Ok(Some(())),
            Some(newer) => Err(odd(format!(
                "written by a newer release, as version {newer}"
            ))),
        }
    }

    pub(super) fn cas(&mut self) -> Result<WriteOutcome, Error> {
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
            other => return Err(self.unexpected(other)),
        })
    }

    /// The error for an outcome that has no meaning here.
    pub(super) fn unexpected(&mut self, word: &str) -> Error {
        match word {
            "newer" => odd("written by a newer release"),
            word => odd(format!("Redis answered `{word}`")),
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
        _ => return Err(odd("Redis answered with something nested")),
    })
}

/// As `["model", "worker" or null]`.
pub(super) fn write_hint(hint: &RoutingHint) -> String {
    // Texts alone: it cannot fail.
    serde_json::to_string(&(&*hint.model, hint.worker.as_deref())).unwrap_or_default()
}

pub(super) fn read_hint(text: &str) -> Result<RoutingHint, Error> {
    let (model, worker): (String, Option<String>) =
        serde_json::from_str(text).map_err(|_| odd("no hint"))?;
    Ok(RoutingHint {
        model: model.into(),
        worker: worker.map(Into::into),
    })
}
