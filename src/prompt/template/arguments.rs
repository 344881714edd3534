//! Arguments of a filter, a function or a method, which in Python may be given by place or by name. Pure.

use std::borrow::Cow;

use minijinja::value::{Kwargs, Rest, ValueOrKwargs};
use minijinja::{Error, ErrorKind, Value};

/// What a filter or a function takes that has some.
pub(super) type Given = Rest<ValueOrKwargs>;

pub(super) struct Arguments<'a> {
    by_place: Cow<'a, [Value]>,
    by_name: Option<Kwargs>,
    names: &'a [&'static str],
}

impl<'a> Arguments<'a> {
    /// Of a method.
    pub(super) fn new(given: &'a [Value], names: &'a [&'static str]) -> Result<Self, Error> {
        Self::of(Cow::Borrowed(given), names)
    }

    /// Of a filter or a function.
    pub(super) fn given(given: Given, names: &'a [&'static str]) -> Result<Self, Error> {
        let values = given.iter().map(|value| (**value).clone());
        Self::of(Cow::Owned(values.collect()), names)
    }

    fn of(mut by_place: Cow<'a, [Value]>, names: &'a [&'static str]) -> Result<Self, Error> {
        let by_name = match by_place.last() {
            Some(last) if last.is_kwargs() => Some(Kwargs::try_from(last.clone())?),
            _ => None,
        };
        if by_name.is_some() {
            match &mut by_place {
                Cow::Borrowed(values) => *values = &values[..values.len() - 1],
                Cow::Owned(values) => drop(values.pop()),
            }
        }
        let Some(open) = names.get(by_place.len()..) else {
            return Err(Error::from(ErrorKind::TooManyArguments));
        };
        for name in by_name.iter().flat_map(|named| named.args()) {
            if !open.contains(&name) {
                return Err(invalid(format!("unexpected keyword argument {name:?}")));
            }
        }
        Ok(Self {
            by_place,
            by_name,
            names,
        })
    }

    /// An argument as it was given.
    pub(super) fn get(&self, name: &str) -> Result<Option<Value>, Error> {
        let place = self.names.iter().position(|known| *known == name);
        if let Some(value) = place.and_then(|place| self.by_place.get(place)) {
            return Ok(Some(value.clone()));
        }
        match &self.by_name {
            Some(named) if named.has(name) => named.get(name).map(Some),
            _ => Ok(None),
        }
    }

    /// An argument that is not none.
    pub(super) fn some(&self, name: &str) -> Result<Option<Value>, Error> {
        let value = self.get(name)?;
        Ok(value.filter(|value| !value.is_none()))
    }

    pub(super) fn is(&self, name: &str) -> Result<bool, Error> {
        let value = self.get(name)?;
        Ok(value.is_some_and(|value| value.is_true()))
    }

    pub(super) fn integer(&self, name: &str) -> Result<Option<i64>, Error> {
        self.some(name)?.map(i64::try_from).transpose()
    }

    /// How often at most; where it is negative as often as there is something.
    pub(super) fn times(&self, name: &str) -> Result<Option<usize>, Error> {
        let times = self.integer(name)?;
        Ok(times.and_then(|times| usize::try_from(times).ok()))
    }

    /// All by their names, for a filter of the template engine that takes them so.
    pub(super) fn named(self) -> Result<Kwargs, Error> {
        let mut all: Vec<(&str, Value)> = Vec::new();
        for name in self.names {
            if let Some(value) = self.get(name)? {
                all.push((name, value));
            }
        }
        Ok(all.into_iter().collect())
    }
}

/// What a filter, a function or a method says of what it cannot take.
pub(super) fn invalid(why: impl Into<Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::InvalidOperation, why)
}
