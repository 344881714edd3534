//! A scalar's text -> the JSON value that a schema takes there, or the bound that it breaks.

use std::time::Duration;

use serde_json::{Number, Value};

use super::schema::{allows, format, is_any, names};
use crate::http::client_address::{self, NETWORK};
use crate::units;

/// Time-outs and intervals beyond this are mistakes, and clocks overflow. A field's schema may name another
/// bound as `max`, and as `min` one other than "more than 0".
const MAX_DURATION: &str = "365d";

/// Stores and timers count in milliseconds: less would be 0 there, which stands for "for ever" or "at once".
const LEAST_DURATION: Duration = Duration::from_millis(1);

/// Sizes beyond this are mistakes, too, and sums of them overflow. A field's schema may name another bound as `max`.
const MAX_SIZE: &str = "1024TiB";

/// What a text is where one of these schemas is asked for. The error is the bound that it breaks, or `None`
/// where it is something else altogether.
pub(super) fn value(
    text: &str,
    may_be_typed: bool,
    schemas: &[&Value],
) -> Result<Value, Option<String>> {
    let typed = if may_be_typed {
        typed(text)
    } else {
        Value::String(text.to_owned())
    };
    if schemas.iter().any(|schema| is_any(schema)) {
        return Ok(typed);
    }
    if typed.is_null() && schemas.iter().any(|schema| allows(schema, "null")) {
        return Ok(Value::Null);
    }
    let mut broken = None;
    for schema in schemas {
        let fits = match &typed {
            Value::Number(number) => {
                let is_whole = number.is_u64() || number.is_i64();
                allows(schema, "number") || (is_whole && allows(schema, "integer"))
            }
            Value::Bool(_) => allows(schema, "boolean"),
            _ => false,
        };
        if fits {
            match out_of_range(&typed, schema) {
                None => return Ok(typed),
                bound => broken = broken.or(bound),
            }
        }
        if !allows(schema, "string") && names(schema).is_empty() {
            continue;
        }
        let names = names(schema);
        let is_text = match format(schema) {
            units::DURATION => units::parse_duration(text).is_ok(),
            units::SIZE => units::parse_size(text).is_ok(),
            NETWORK => client_address::parse(text).is_ok(),
            _ => {
                if names.is_empty() {
                    !typed.is_null()
                } else {
                    names.contains(&text)
                }
            }
        };
        if is_text {
            match unit_out_of_range(text, schema) {
                None => return Ok(Value::String(text.to_owned())),
                bound => broken = broken.or(bound),
            }
        }
    }
    Err(broken)
}

/// YAML's core schema, but for the rarer ways to write a number.
fn typed(text: &str) -> Value {
    match text {
        "" | "~" | "null" => return Value::Null,
        "true" => return Value::Bool(true),
        "false" => return Value::Bool(false),
        _ => {}
    }
    let float = || text.parse::<f64>().ok().and_then(Number::from_f64);
    let looks_like_one =
        text.starts_with(|first: char| first.is_ascii_digit() || "+-.".contains(first));
    let number = text.parse::<u64>().map(Number::from);
    let number = number.or_else(|_| text.parse::<i64>().map(Number::from));
    match number.ok().or_else(float) {
        Some(number) if looks_like_one => Value::Number(number),
        _ => Value::String(text.to_owned()),
    }
}

/// The bound of the schema that a number breaks.
fn out_of_range(number: &Value, schema: &Value) -> Option<String> {
    let (number, bound) = (number.as_f64()?, |key| schema.get(key));
    let value = |key| bound(key).and_then(Value::as_f64);
    let (min, max) = (value("minimum"), value("maximum"));
    // The derive macro writes bounds of the narrower types only.
    if max.is_none() && format(schema) == "uint32" && number > f64::from(u32::MAX) {
        return Some(format!("at most {}", u32::MAX));
    }
    let is_i32 = (f64::from(i32::MIN)..=f64::from(i32::MAX)).contains(&number);
    if min.is_none() && max.is_none() && format(schema) == "int32" && !is_i32 {
        return Some(format!("from {} to {}", i32::MIN, i32::MAX));
    }
    let is_low = min.is_some_and(|min| number < min);
    let is_high = max.is_some_and(|max| number > max);
    if !is_low && !is_high {
        return None;
    }
    Some(match (bound("minimum"), bound("maximum")) {
        (Some(min), Some(max)) => format!("from {min} to {max}"),
        (Some(min), None) => format!("at least {min}"),
        (None, Some(max)) => format!("at most {max}"),
        (None, None) => return None,
    })
}

/// The bound of the schema that a duration or a size breaks.
fn unit_out_of_range(text: &str, schema: &Value) -> Option<String> {
    let bound = |key| schema.get(key).and_then(Value::as_str);
    let (min, max) = (bound("min"), bound("max"));
    let (is_low, is_high, max) = match format(schema) {
        units::DURATION => {
            let value = units::parse_duration(text).ok()?;
            let max = max.unwrap_or(MAX_DURATION);
            let least = min.map(units::parse_duration).transpose().ok()?;
            let is_below_1ms = !value.is_zero() && value < LEAST_DURATION;
            if is_below_1ms && least.is_none_or(|least| least < LEAST_DURATION) {
                return Some("at least 1ms".to_owned());
            }
            let is_low = least.map_or(value.is_zero(), |least| value < least);
            (is_low, value > units::parse_duration(max).ok()?, Some(max))
        }
        units::SIZE => {
            let value = units::parse_size(text).ok()?;
            let is_low = match min {
                Some(min) => value < units::parse_size(min).ok()?,
                None => value == 0,
            };
            let max = max.unwrap_or(MAX_SIZE);
            (is_low, value > units::parse_size(max).ok()?, Some(max))
        }
        _ => return None,
    };
    match (is_low, is_high, min, max) {
        (true, _, Some(min), _) => Some(format!("at least {min}")),
        (true, _, None, _) => Some("more than 0".to_owned()),
        (_, true, _, Some(max)) => Some(format!("at most {max}")),
        _ => None,
    }
}
