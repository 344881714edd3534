//! Numbers that the template engine cannot hold or writes otherwise than Python: integers above 128 bits are objects that only
//! print themselves and are numbers by their tests; floats are written by `float_text`. Pure.

use std::fmt;
use std::sync::Arc;

use minijinja::Value;
use minijinja::value::{Object, ObjectRepr, ValueKind};

/// An integer by its digits.
#[derive(Debug)]
struct Number {
    digits: Box<str>,
}

impl Object for Number {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.digits)
    }
}

/// An integer of a request, by its digits.
pub(crate) fn of_digits(digits: &str) -> Value {
    if let Ok(number) = digits.parse::<i128>() {
        return Value::from(number);
    }
    Value::from_object(Number {
        digits: digits.into(),
    })
}

/// The digits of an integer above 128 bits.
pub(super) fn digits(value: &Value) -> Option<&str> {
    value
        .downcast_object_ref::<Number>()
        .map(|number| &*number.digits)
}

pub(super) fn is_number(value: &Value) -> bool {
    value.kind() == ValueKind::Number || digits(value).is_some()
}

pub(super) fn is_integer(value: &Value) -> bool {
    digits(value).is_some() || value.kind() == ValueKind::Number && value.is_integer()
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
