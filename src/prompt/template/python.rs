//! What chat templates expect from Python: `tojson` as `json.dumps` writes it, `strftime_now`, `raise_exception`,
//! what counts as a sequence, and the `{% generation %}` tag. Pure: the time is a template variable.

use std::fmt::Write;

use jiff::tz::TimeZone;
use minijinja::value::ValueKind;
use minijinja::{Environment, Error, ErrorKind, State, Value};

use super::arguments::{Arguments, Given, invalid};
use super::{dates, filters, methods, number, operators, python_text, texts};

/// Maximum nesting of JSON: more than any schema has, and less than our stack allows.
const MAX_DEPTH: usize = 128;

/// The variable with the time of the request, in seconds since 1970. Templates cannot use it, since its name has a space.
pub(crate) const fn now_key() -> &'static str {
    "warmroute now"
}

pub(super) fn install(environment: &mut Environment<'_>) {
    operators::install(environment);
    methods::install(environment);
    filters::install(environment);
    texts::install(environment);
    environment.add_filter("tojson", tojson);
    environment.add_function("raise_exception", raise_exception);
    environment.add_function("strftime_now", strftime_now);
    environment.add_test("sequence", is_sequence);
    environment.add_test("iterable", is_iterable);
    environment.add_test("number", |value: &Value| {
        number::is_number(value) || value.kind() == ValueKind::Bool
    });
    environment.add_test("integer", number::is_integer);
    environment.add_test("float", number::is_float);
    environment.add_test("callable", is_callable);
    environment.add_filter("items", items);
    environment.set_formatter(|out, state, value| {
        // Nothing is escaped.
        if let Some(text) = value.as_str() {
            return Ok(out.write_str(text)?);
        }
        if value.is_undefined() {
            return minijinja::escape_formatter(out, state, value);
        }
        Ok(out.write_str(&python_text::str_of(value))?)
    });
}

fn raise_exception(message: String) -> Result<Value, Error> {
    Err(invalid(message))
}

/// Engines use their local time zone; the router uses UTC, which is the default of containers.
fn strftime_now(state: &State<'_, '_>, format: &str) -> Result<String, Error> {
    let now = state
        .lookup(now_key())
        .and_then(|value| value.as_i64())
        .ok_or_else(|| invalid("no time was given"))?;
    let now = jiff::Timestamp::from_second(now).map_err(|error| invalid(error.to_string()))?;
    dates::format(format, &now.to_zoned(TimeZone::UTC)).map_err(|error| invalid(error.to_string()))
}

/// In Python, everything with a length and an index is a sequence, also strings and mappings.
fn is_sequence(value: &Value) -> bool {
    matches!(
        value.kind(),
        // Of what is neither a list nor a text there are only ranges.
        ValueKind::Seq
            | ValueKind::Iterable
            | ValueKind::String
            | ValueKind::Map
            | ValueKind::Undefined
    )
}

/// The template engine also iterates over nothing where a value is none, and Python does not.
fn is_iterable(value: &Value) -> bool {
    match value.kind() {
        ValueKind::None => false,
        ValueKind::String | ValueKind::Undefined => true,
        _ => value.try_iter().is_ok(),
    }
}

/// Functions, macros and methods.
fn is_callable(value: &Value) -> bool {
    value.kind() == ValueKind::Plain && !number::is_number(value)
}

/// The pairs of a mapping; none of an undefined value.
fn items(value: &Value) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::Undefined => Ok(Value::from(Vec::<Value>::new())),
        ValueKind::Map => minijinja::filters::items(value),
        _ => Err(invalid("can only get item pairs from a mapping")),
    }
}

/// `{% generation %}` marks the text of the assistant for training. It renders nothing and opens a scope, so it is
/// replaced by `{% with %}`.
pub(super) fn without_generation_tags(source: &str) -> String {
    let mut plain = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start);
        plain.push_str(before);
        let Some(end) = tag.find("%}") else {
            rest = tag;
            break;
        };
        let (tag, after) = tag.split_at(end + 2);
        let inside = &tag[2..tag.len() - 2];
        match inside.trim_matches(['-', '+', ' ', '\t', '\n', '\r']) {
            "generation" => plain.push_str(&tag.replace("generation", "with")),
            "endgeneration" => plain.push_str(&tag.replace("endgeneration", "endwith")),
            _ => plain.push_str(tag),
        }
        rest = after;
    }
    plain.push_str(rest);
    plain
}

/// The arguments of `json.dumps`.
struct JsonStyle {
    ascii: bool,
    sorted: bool,
    indent: Option<String>,
    comma: String,
    colon: String,
}

fn tojson(value: &Value, given: Given) -> Result<Value, Error> {
    let names = ["ensure_ascii", "indent", "separators", "sort_keys"];
    let given = Arguments::given(given, &names)?;
    let indent = given.some("indent")?;
    let indent = indent.map(|indent| match indent.as_str() {
        Some(text) => text.to_owned(),
        None => " ".repeat(indent.as_i64().unwrap_or(0).clamp(0, 64) as usize),
    });
    let (comma, colon) = match given.some("separators")? {
        Some(pair) => (
            pair.get_item_by_index(0)?.to_string(),
            pair.get_item_by_index(1)?.to_string(),
        ),
        None if indent.is_some() => (",".to_owned(), ": ".to_owned()),
        None => (", ".to_owned(), ": ".to_owned()),
    };
    let style = JsonStyle {
        ascii: given.is("ensure_ascii")?,
        sorted: given.is("sort_keys")?,
        indent,
        comma,
        colon,
    };
    let mut out = String::new();
    write_json(&mut out, value, &style, 0)?;
    Ok(Value::from_safe_string(out))
}

fn write_json(
    out: &mut String,
    value: &Value,
    style: &JsonStyle,
    depth: usize,
) -> Result<(), Error> {
    let no_json = |why: &str| Err(Error::new(ErrorKind::BadSerialization, why.to_owned()));
    if depth > MAX_DEPTH {
        return no_json("nested too deeply");
    }
    match value.kind() {
        ValueKind::None => out.push_str("null"),
        ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
        ValueKind::Number => match float(value) {
            Some(float) => out.push_str(&json_float(float)),
            None => out.push_str(&value.to_string()),
        },
        ValueKind::Plain if number::digits(value).is_some() => {
            out.push_str(&value.to_string());
        }
        ValueKind::String => write_text(out, value.as_str().unwrap_or_default(), style.ascii),
        ValueKind::Seq | ValueKind::Iterable => {
            let mut items = value.try_iter()?.peekable();
            if items.peek().is_none() {
                out.push_str("[]");
                return Ok(());
            }
            out.push('[');
            for (i, item) in items.enumerate() {
                if i > 0 {
                    out.push_str(&style.comma);
                }
                new_line(out, style, depth + 1);
                write_json(out, &item, style, depth + 1)?;
            }
            new_line(out, style, depth);
            out.push(']');
        }
        ValueKind::Map => {
            let mut keys: Vec<Value> = value.try_iter()?.collect();
            if keys.is_empty() {
                out.push_str("{}");
                return Ok(());
            }
            if style.sorted {
                keys.sort();
            }
            out.push('{');
            for (i, key) in keys.iter().enumerate() {
                if i > 0 {
                    out.push_str(&style.comma);
                }
                new_line(out, style, depth + 1);
                match key.as_str() {
                    Some(text) => write_text(out, text, style.ascii),
                    None => {
                        let mut text = String::new();
                        write_json(&mut text, key, style, depth + 1)?;
                        write_text(out, &text, style.ascii);
                    }
                }
                out.push_str(&style.colon);
                write_json(out, &value.get_item(key)?, style, depth + 1)?;
            }
            new_line(out, style, depth);
            out.push('}');
        }
        ValueKind::Undefined => return no_json("an undefined value is not JSON"),
        _ => return no_json("a value that is not JSON"),
    }
    Ok(())
}

fn new_line(out: &mut String, style: &JsonStyle, depth: usize) {
    if let Some(indent) = &style.indent {
        out.push('\n');
        for _ in 0..depth {
            out.push_str(indent);
        }
    }
}

fn write_text(out: &mut String, text: &str, ascii: bool) {
    out.push('"');
    let mut from = 0;
    for (at, char) in text.char_indices() {
        let plain = match char {
            '"' | '\\' | '\0'..='\x1f' => false,
            ' '..='~' => true,
            _ => !ascii,
        };
        if plain {
            continue;
        }
        out.push_str(&text[from..at]);
        from = at + char.len_utf8();
        match char {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\x0c' => out.push_str("\\f"),
            '\x08' => out.push_str("\\b"),
            _ => {
                for unit in char.encode_utf16(&mut [0; 2]) {
                    // Writing to a String cannot fail.
                    let _ = write!(out, "\\u{unit:04x}");
                }
            }
        }
    }
    out.push_str(&text[from..]);
    out.push('"');
}

/// The value of a number that is not an integer.
fn float(value: &Value) -> Option<f64> {
    if value.kind() != ValueKind::Number || value.is_integer() {
        return None;
    }
    f64::try_from(value.clone()).ok()
}

fn json_float(float: f64) -> String {
    if float.is_nan() {
        "NaN".to_owned()
    } else if float.is_infinite() {
        if float > 0.0 { "Infinity" } else { "-Infinity" }.to_owned()
    } else {
        number::float_text(float)
    }
}
