//! Numbers that the template engine writes otherwise than Python, wherever they become text: floats that need an exponent, and
//! integers above 64 bits. They are objects that only print themselves and are otherwise numbers by their tests. Pure.

use std::fmt;
use std::sync::Arc;

use minijinja::Value;
use minijinja::value::{Object, ObjectRepr, ValueKind};

/// A number by the text that Python writes.
#[derive(Debug)]
pub(in crate::prompt) struct Number {
    text: Box<str>,
    is_integer: bool,
}

impl Object for Number {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// A float of a request.
pub(in crate::prompt) fn of_float(float: f64) -> Value {
    let text = float_text(float);
    let plain = Value::from(float);
    if plain.to_string() == text {
        return plain;
    }
    Value::from_object(Number {
        text: text.into(),
        is_integer: false,
    })
}

/// An integer of a request, by its digits.
pub(in crate::prompt) fn of_digits(digits: &str) -> Value {
    if let Ok(number) = digits.parse::<i128>() {
        return Value::from(number);
    }
    Value::from_object(Number {
        text: digits.into(),
        is_integer: true,
    })
}

pub(super) fn is_number(value: &Value) -> bool {
    value.kind() == ValueKind::Number || value.downcast_object_ref::<Number>().is_some()
}

pub(super) fn is_integer(value: &Value) -> bool {
    match value.downcast_object_ref::<Number>() {
        Some(number) => number.is_integer,
        None => value.kind() == ValueKind::Number && value.is_integer(),
    }
}

pub(super) fn is_float(value: &Value) -> bool {
    is_number(value) && !is_integer(value)
}

/// `repr` of a float: the shortest digits that read back, with an exponent below 1e-4 and from 1e16.
pub(super) fn float_text(float: f64) -> String {
    if float.is_nan() {
        return "nan".to_owned();
    }
    if float.is_infinite() {
        return if float > 0.0 { "inf" } else { "-inf" }.to_owned();
    }
    let size = float.abs();
    if size != 0.0 && !(1e-4..1e16).contains(&size) {
        let text = format!("{float:e}");
        let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
        let (sign, exponent) = match exponent.strip_prefix('-') {
            Some(exponent) => ('-', exponent),
            None => ('+', exponent),
        };
        return format!("{digits}e{sign}{exponent:0>2}");
    }
    let text = float.to_string();
    if text.contains('.') {
        text
    } else {
        text + ".0"
    }
}
