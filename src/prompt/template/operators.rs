//! Python's operators where the template engine has them otherwise, as filters that `source` writes. Pure.

use std::fmt;
use std::sync::Arc;

use minijinja::value::{Object, ObjectRepr, Rest, Tuple, ValueKind};
use minijinja::{Environment, Error, ErrorKind, Value};

use super::arguments::invalid;
use super::{percent, python_text};

pub(super) const CONCATENATED: &str = "python_concat";
pub(super) const REST: &str = "python_rest";
pub(super) const SLICED: &str = "python_slice";
pub(super) const ITERATED: &str = "python_iter";
pub(super) const ATTRIBUTE: &str = "python_attribute";
pub(super) const UNDEFINED: &str = "python_undefined";
pub(super) const UNESCAPED: &str = "python_unescaped";

pub(super) fn install(environment: &mut Environment<'_>) {
    environment.add_filter(CONCATENATED, concatenated);
    environment.add_filter(REST, rest);
    environment.add_filter(SLICED, slice);
    environment.add_filter(ITERATED, iterated);
    environment.add_filter(ATTRIBUTE, attribute);
    environment.add_filter(UNDEFINED, |_: &Value| Value::UNDEFINED);
    environment.add_filter(UNESCAPED, unescaped);
}

/// Python finds these before a key of the same name.
pub(super) fn is_method_of_dict(name: &str) -> bool {
    matches!(
        name,
        "clear"
            | "copy"
            | "fromkeys"
            | "get"
            | "items"
            | "keys"
            | "pop"
            | "popitem"
            | "setdefault"
            | "update"
            | "values"
    )
}

fn concatenated(first: &Value, others: Rest<Value>) -> String {
    let mut text = String::new();
    for value in std::iter::once(first).chain(others.iter()) {
        python_text::write_str(&mut text, value);
    }
    text
}

/// `%`: of numbers the rest of a division, of a text its formatting.
fn rest(left: &Value, right: &Value) -> Result<Value, Error> {
    if let Some(format) = left.as_str() {
        return percent::format(format, right).map(Value::from);
    }
    remainder(left, right).ok_or_else(|| {
        invalid(format!(
            "cannot calculate {} % {}",
            left.kind(),
            right.kind()
        ))
    })
}

/// With the sign of the divisor.
fn remainder(left: &Value, right: &Value) -> Option<Value> {
    let integer = |value: &Value| match value.kind() {
        ValueKind::Bool => Some(i128::from(value.is_true())),
        ValueKind::Number if value.is_integer() => i128::try_from(value.clone()).ok(),
        _ => None,
    };
    if let (Some(left), Some(right)) = (integer(left), integer(right)) {
        let rest = left.checked_rem(right)?;
        let is_other_sign = rest != 0 && (rest < 0) != (right < 0);
        return Some(Value::from(if is_other_sign { rest + right } else { rest }));
    }
    let float = |value: &Value| match integer(value) {
        Some(integer) => Some(integer as f64),
        None if value.kind() == ValueKind::Number => f64::try_from(value.clone()).ok(),
        None => None,
    };
    let (left, right) = (float(left)?, float(right)?);
    if right == 0.0 {
        return None;
    }
    let rest = left % right;
    Some(Value::from(if rest == 0.0 {
        0.0_f64.copysign(right)
    } else if (rest < 0.0) != (right < 0.0) {
        rest + right
    } else {
        rest
    }))
}

/// A part of a text, a list or a tuple. What cannot be sliced has no such item.
fn slice(value: &Value, start: Value, stop: Value, step: Value) -> Result<Value, Error> {
    let bound = |bound: Value| {
        let given = (!bound.is_none()).then(|| i64::try_from(bound));
        given.transpose()
    };
    let step = bound(step)?.unwrap_or(1);
    let (start, stop) = (bound(start)?, bound(stop)?);
    if step == 0 {
        return Err(invalid("a slice's step is not zero"));
    }
    if let Some(text) = value.as_str() {
        if step == 1 && start.is_none_or(|at| at >= 0) && stop.is_none_or(|at| at >= 0) {
            let at = |index: i64| {
                let mut starts = text.char_indices().skip(index as usize);
                starts.next().map_or(text.len(), |(at, _)| at)
            };
            let (start, stop) = (at(start.unwrap_or(0)), stop.map_or(text.len(), at));
            return Ok(text.get(start..stop).unwrap_or_default().into());
        }
        let chars: Vec<char> = text.chars().collect();
        let part = indices(chars.len(), start, stop, step).map(|index| chars[index]);
        return Ok(part.collect::<String>().into());
    }
    match value.kind() {
        ValueKind::Seq | ValueKind::Iterable => {
            let items: Vec<Value> = value.try_iter()?.collect();
            let part = indices(items.len(), start, stop, step).map(|index| items[index].clone());
            let part: Vec<Value> = part.collect();
            Ok(if value.is_tuple() {
                Value::from(Tuple::from(part))
            } else {
                Value::from(part)
            })
        }
        ValueKind::Undefined => Err(Error::from(ErrorKind::UndefinedError)),
        _ => Ok(Value::UNDEFINED),
    }
}

/// The places that a slice takes of so many.
fn indices(
    length: usize,
    start: Option<i64>,
    stop: Option<i64>,
    step: i64,
) -> impl Iterator<Item = usize> {
    let length = i64::try_from(length).unwrap_or(i64::MAX);
    let (low, high) = if step > 0 {
        (0, length)
    } else {
        (-1, length - 1)
    };
    let clamped = |bound: i64| {
        let from_start = if bound < 0 {
            bound.saturating_add(length)
        } else {
            bound
        };
        from_start.clamp(low, high)
    };
    let (first, end) = if step > 0 { (low, high) } else { (high, low) };
    let mut next = start.map_or(first, clamped);
    let end = stop.map_or(end, clamped);
    std::iter::from_fn(move || {
        let is_left = if step > 0 { next < end } else { next > end };
        let index = usize::try_from(next).ok().filter(|_| is_left)?;
        next = next.saturating_add(step);
        Some(index)
    })
}

/// What a loop goes over. The characters of a text are counted beforehand, and nothing else is empty that cannot be gone over.
fn iterated(value: Value) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::String => {
            let chars = value.as_str().unwrap_or_default().chars();
            Ok(chars.map(Value::from).collect::<Vec<_>>().into())
        }
        ValueKind::None | ValueKind::Bool | ValueKind::Number => {
            Err(invalid(format!("{} is not iterable", value.kind())))
        }
        _ => Ok(value),
    }
}

/// A method that is not called: it is something, and has nothing.
#[derive(Debug)]
struct Method {
    name: Box<str>,
}

impl Object for Method {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "<built-in method {} of dict object>", self.name)
    }
}

/// Of a mapping the method; of a namespace, whose names are a template's own, what it has.
fn attribute(value: &Value, name: &str) -> Result<Value, Error> {
    let is_namespace = value
        .as_object()
        .is_some_and(|object| object.type_name().ends_with("Namespace"));
    if value.kind() == ValueKind::Map && !is_namespace {
        return Ok(Value::from_object(Method { name: name.into() }));
    }
    value.get_attr(name)
}

/// Nothing is escaped here, which is only right where it was asked for.
fn unescaped(is_escaped: &Value) -> Result<Value, Error> {
    if is_escaped.is_true() {
        Err(invalid("texts are not escaped"))
    } else {
        Ok(Value::from(""))
    }
}
