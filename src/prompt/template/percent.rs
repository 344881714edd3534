//! `%` of a text: the conversions of Python's printf style. Numbers are written by the template engine's own formatting,
//! values of other kinds as Python writes them. Pure.

use minijinja::formatting::{self, FormatStyle};
use minijinja::value::ValueKind;
use minijinja::{Error, Value};

use super::arguments::invalid;
use super::python_text;

pub(super) fn format(format: &str, argument: &Value) -> Result<String, Error> {
    let is_mapping = argument.kind() == ValueKind::Map;
    let given: Vec<Value> = if argument.is_tuple() {
        argument.try_iter()?.collect()
    } else {
        vec![argument.clone()]
    };
    let mut given = given.into_iter();
    let mut out = String::new();
    let mut rest = format;
    while let Some(at) = rest.find('%') {
        let (before, after) = rest.split_at(at);
        out.push_str(before);
        let conversion = Conversion::read(after).ok_or_else(|| invalid("incomplete format"))?;
        rest = &after[conversion.length..];
        if conversion.kind == '%' {
            out.push('%');
            continue;
        }
        let mut options = conversion.options.to_owned();
        let value = match conversion.key {
            Some(key) if is_mapping => argument.get_item(&Value::from(key))?,
            Some(_) => return Err(invalid("format requires a mapping")),
            None => {
                let mut next = || {
                    given
                        .next()
                        .ok_or_else(|| invalid("not enough arguments for format string"))
                };
                while let Some(at) = options.find('*') {
                    let width = integer(&next()?)?;
                    options.replace_range(at..=at, &width.to_string());
                }
                next()?
            }
        };
        let (kind, value) = match conversion.kind {
            's' => ('s', python_text::str_of(&value).into_owned().into()),
            'r' => ('s', python_text::repr_of(&value).into()),
            // Python takes the integer part of a float, and no text.
            'd' | 'i' | 'u' => ('d', integer(&value)?),
            kind => (kind, value),
        };
        let one = format!("%{options}{kind}");
        out.push_str(&formatting::format(FormatStyle::Printf, &one, &[value])?);
    }
    out.push_str(rest);
    if given.next().is_some() && argument_is_used_up(argument) {
        return Err(invalid("not all arguments converted"));
    }
    Ok(out)
}

/// Python lets mappings and lists be unused.
fn argument_is_used_up(argument: &Value) -> bool {
    argument.is_tuple() || !matches!(argument.kind(), ValueKind::Map | ValueKind::Seq)
}

fn integer(value: &Value) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::Bool => Ok(Value::from(i64::from(value.is_true()))),
        ValueKind::Number if value.is_integer() => Ok(value.clone()),
        ValueKind::Number => {
            let float = f64::try_from(value.clone())?;
            if float.is_finite() {
                Ok(Value::from(float.trunc() as i128))
            } else {
                Err(invalid("cannot convert to an integer"))
            }
        }
        kind => Err(invalid(format!("a number is required, not {kind}"))),
    }
}

/// One `%`, with what belongs to it.
struct Conversion<'f> {
    /// The name in parentheses.
    key: Option<&'f str>,
    /// Flags, width and precision.
    options: &'f str,
    kind: char,
    length: usize,
}

impl<'f> Conversion<'f> {
    fn read(text: &'f str) -> Option<Self> {
        let after = text.strip_prefix('%')?;
        let (key, options) = match after.strip_prefix('(') {
            Some(named) => {
                let (key, options) = named.split_once(')')?;
                (Some(key), options)
            }
            None => (None, after),
        };
        let is_option =
            |char: char| char.is_ascii_digit() || matches!(char, '-' | '+' | ' ' | '#' | '.' | '*');
        let end = options.find(|char| !is_option(char))?;
        let (options, after) = options.split_at(end);
        // Lengths as in C mean nothing.
        let kind = after.trim_start_matches(['h', 'l', 'L']);
        let char = kind.chars().next()?;
        Some(Self {
            key,
            options,
            kind: char,
            length: text.len() - kind.len() + char.len_utf8(),
        })
    }
}
