//! Filters and functions whose arguments or results Python's Jinja has otherwise than the template engine. Pure.

use minijinja::value::{Kwargs, Rest, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State, Value};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};

use super::arguments::{Arguments, Given, invalid};
use super::{number, python_text};

/// What `urlencode` writes as percent signs and digits.
const OUTSIDE_OF_PATHS: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'_')
    .remove(b'.')
    .remove(b'-')
    .remove(b'~')
    .remove(b'/');

/// Python's `pprint` breaks longer values into lines.
const MAX_PRINTED: usize = 79;

pub(super) fn install(environment: &mut Environment<'_>) {
    for name in ["length", "count"] {
        environment.add_filter(name, length);
    }
    for name in ["default", "d"] {
        environment.add_filter(name, default);
    }
    environment.add_filter("string", |value: &Value| match value.kind() {
        ValueKind::String => value.clone(),
        _ => python_text::str_of(value).into_owned().into(),
    });
    environment.add_filter("join", join);
    environment.add_filter("replace", replace);
    environment.add_filter("int", int);
    environment.add_filter("float", float);
    environment.add_filter("first", |value: &Value| end(value, true));
    environment.add_filter("last", |value: &Value| end(value, false));
    environment.add_filter("reverse", reverse);
    environment.add_filter("max", max);
    environment.add_filter("pprint", pprint);
    environment.add_filter("attr", attr);
    environment.add_filter(
        "sort",
        |state: &State<'_, '_>, value: Value, given: Given| {
            let named =
                Arguments::given(given, &["reverse", "case_sensitive", "attribute"])?.named()?;
            minijinja::filters::sort(state, value, named)
        },
    );
    environment.add_filter("dictsort", |value: &Value, given: Given| {
        let named = Arguments::given(given, &["case_sensitive", "by", "reverse"])?.named()?;
        minijinja::filters::dictsort(value, named)
    });
    environment.add_filter(
        "unique",
        |state: &State<'_, '_>, value: Value, given: Given| {
            let named = Arguments::given(given, &["case_sensitive", "attribute"])?.named()?;
            minijinja::filters::unique(state, value, named)
        },
    );
    environment.add_filter("urlencode", urlencode);
    environment.add_filter("truncate", truncate);
    environment.add_function("dict", dict);
    environment.add_function("namespace", |given: Given| {
        let values = dict(given)?;
        minijinja::functions::namespace(Some(values.into()))
    });
    environment.add_function("joiner", minijinja_contrib::globals::joiner);
    environment.add_function("cycler", |items: Rest<Value>| {
        minijinja_contrib::globals::cycler(items.to_vec())
    });
}

/// Of an undefined value zero.
fn length(value: &Value) -> Result<usize, Error> {
    if value.is_undefined() {
        return Ok(0);
    }
    if let Some(length) = value.len() {
        return Ok(length);
    }
    match value.kind() {
        ValueKind::Iterable => Ok(value.try_iter()?.count()),
        kind => Err(invalid(format!("{kind} has no length"))),
    }
}

fn default(value: Value, given: Given) -> Result<Value, Error> {
    let given = Arguments::given(given, &["default_value", "boolean"])?;
    let is_missing = value.is_undefined() || given.is("boolean")? && !value.is_true();
    if is_missing {
        Ok(given.get("default_value")?.unwrap_or_else(|| "".into()))
    } else {
        Ok(value)
    }
}

fn join(state: &State<'_, '_>, value: &Value, given: Given) -> Result<String, Error> {
    let given = Arguments::given(given, &["d", "attribute"])?;
    let between = given.get("d")?;
    let between = between.as_ref().map(python_text::str_of);
    let between = between.unwrap_or_default();
    let items = match given.some("attribute")? {
        Some(attribute) => {
            let attribute: Kwargs = [("attribute", attribute)].into_iter().collect();
            state
                .env()
                .empty_state()
                .apply_filter("map", &[value.clone(), attribute.into()])?
        }
        None => value.clone(),
    };
    if items.is_undefined() {
        return Ok(String::new());
    }
    if items.is_none() {
        return Err(invalid("none is not iterable"));
    }
    let mut text = String::new();
    for (number, item) in items.try_iter()?.enumerate() {
        if number > 0 {
            text.push_str(&between);
        }
        python_text::write_str(&mut text, &item);
    }
    Ok(text)
}

fn replace(value: &Value, given: Given) -> Result<String, Error> {
    let given = Arguments::given(given, &["old", "new", "count"])?;
    let text = |name| match given.get(name)? {
        Some(value) => Ok(python_text::str_of(&value).into_owned()),
        None => Err(Error::from(ErrorKind::MissingArgument)),
    };
    let (old, new) = (text("old")?, text("new")?);
    let text = python_text::str_of(value);
    Ok(match given.times("count")? {
        Some(count) => text.replacen(&old, &new, count),
        None => text.replace(&old, &new),
    })
}

/// The default stands for what is no number.
fn int(value: &Value, given: Given) -> Result<Value, Error> {
    let given = Arguments::given(given, &["default", "base"])?;
    let default = given.get("default")?;
    let base = given.integer("base")?.unwrap_or(10);
    let base = u32::try_from(base).map_err(|_| invalid("a base is not negative"))?;
    // An infinity is too large, and NaN is not smaller.
    let of_float = |float: f64| (float.abs() < 1e38).then(|| Value::from(float.trunc() as i128));
    let integer = match value.kind() {
        ValueKind::Bool => Some(Value::from(i64::from(value.is_true()))),
        ValueKind::Number if value.is_integer() => Some(value.clone()),
        ValueKind::Number => of_float(f64::try_from(value.clone())?),
        ValueKind::String => {
            let text = value.as_str().unwrap_or_default().trim();
            integer_of(text, base).or_else(|| float_of(text).and_then(of_float))
        }
        _ => number::digits(value).map(|_| value.clone()),
    };
    Ok(integer.or(default).unwrap_or_else(|| Value::from(0)))
}

/// Between digits may be one underscore.
fn without_underscores(text: &str) -> Option<String> {
    let is_odd = text.starts_with('_') || text.ends_with('_') || text.contains("__");
    (!is_odd).then(|| text.replace('_', ""))
}

fn integer_of(text: &str, base: u32) -> Option<Value> {
    let (sign, digits) = match text.strip_prefix('-') {
        Some(digits) => ("-", digits),
        None => ("", text.strip_prefix('+').unwrap_or(text)),
    };
    let prefixed = |prefix: [&str; 2]| prefix.iter().find_map(|prefix| digits.strip_prefix(prefix));
    let digits = match base {
        2 => prefixed(["0b", "0B"]).unwrap_or(digits),
        8 => prefixed(["0o", "0O"]).unwrap_or(digits),
        16 => prefixed(["0x", "0X"]).unwrap_or(digits),
        _ => digits,
    };
    let digits = without_underscores(digits)?;
    if digits.is_empty()
        || !(2..=36).contains(&base)
        || !digits.chars().all(|char| char.is_digit(base))
    {
        return None;
    }
    let text = format!("{sign}{digits}");
    match i128::from_str_radix(&text, base) {
        Ok(number) => Some(Value::from(number)),
        Err(_) => (base == 10).then(|| number::of_digits(text.trim_start_matches('0'))),
    }
}

fn float_of(text: &str) -> Option<f64> {
    without_underscores(text.trim())?.parse().ok()
}

fn float(value: &Value, given: Given) -> Result<Value, Error> {
    let default = Arguments::given(given, &["default"])?.get("default")?;
    let float = match value.kind() {
        ValueKind::Bool => Some(f64::from(u8::from(value.is_true()))),
        ValueKind::Number => Some(f64::try_from(value.clone())?),
        ValueKind::String => float_of(value.as_str().unwrap_or_default()),
        _ => number::digits(value).and_then(float_of),
    };
    let default = default.unwrap_or_else(|| Value::from(0.0));
    Ok(float.map_or(default, Value::from))
}

/// The first or the last item; of nothing it is undefined.
fn end(value: &Value, is_first: bool) -> Result<Value, Error> {
    if value.is_undefined() {
        return Ok(Value::UNDEFINED);
    }
    match (is_first, value.kind()) {
        (true, _) => minijinja::filters::first(value),
        (false, ValueKind::Map) => Ok(value.try_iter()?.last().unwrap_or_default()),
        (false, _) => minijinja::filters::last(value.clone()),
    }
}

fn reverse(value: &Value) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::Map => {
            let mut keys: Vec<Value> = value.try_iter()?.collect();
            keys.reverse();
            Ok(keys.into())
        }
        _ => minijinja::filters::reverse(value),
    }
}

/// Of equal ones the first.
fn max(state: &State<'_, '_>, value: Value, given: Given) -> Result<Value, Error> {
    let named = Arguments::given(given, &["case_sensitive", "attribute"])?.named()?;
    let mut items: Vec<Value> = value.try_iter()?.collect();
    items.reverse();
    minijinja::filters::max(state, items.into(), named)
}

fn pprint(value: &Value) -> Result<String, Error> {
    let text = python_text::repr_of(value);
    if text.chars().count() > MAX_PRINTED {
        Err(invalid("only short values are printed like this"))
    } else {
        Ok(text)
    }
}

/// A mapping's keys are not its attributes.
fn attr(value: &Value, name: &str) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::Map => Ok(Value::UNDEFINED),
        ValueKind::Undefined => Err(Error::from(ErrorKind::UndefinedError)),
        _ => value.get_attr(name),
    }
}

/// A text as in a path.
fn urlencode(value: &Value) -> Result<String, Error> {
    let Some(text) = value.as_str() else {
        return Err(invalid("only a text can be encoded"));
    };
    Ok(utf8_percent_encode(text, OUTSIDE_OF_PATHS).to_string())
}

/// A text that is longer than its limit and a tolerance is cut at a word, or where it is.
fn truncate(value: &Value, given: Given) -> Result<String, Error> {
    let given = Arguments::given(given, &["length", "killwords", "end", "leeway"])?;
    let length = given.times("length")?.unwrap_or(255);
    let leeway = given.times("leeway")?.unwrap_or(5);
    let end = given.some("end")?;
    let end = end.as_ref().map_or("...".into(), python_text::str_of);
    let is_cut_in_words = given.is("killwords")?;
    let text = python_text::str_of(value);
    if text.chars().count() <= length.saturating_add(leeway) {
        return Ok(text.into_owned());
    }
    let kept = length
        .checked_sub(end.chars().count())
        .ok_or_else(|| invalid("the text's end is longer than its limit"))?;
    let kept: String = text.chars().take(kept).collect();
    let kept = match kept.rfind(' ') {
        Some(at) if !is_cut_in_words => &kept[..at],
        _ => &kept,
    };
    Ok(format!("{kept}{end}"))
}

/// A mapping, or pairs, and names.
fn dict(given: Given) -> Result<Value, Error> {
    let mut pairs: Vec<(Value, Value)> = Vec::new();
    for (number, given) in given.iter().enumerate() {
        match given.kind() {
            ValueKind::Map => {
                for key in given.try_iter()? {
                    let value = given.get_item(&key)?;
                    pairs.push((key, value));
                }
            }
            ValueKind::Seq | ValueKind::Iterable if number == 0 => {
                for pair in given.try_iter()? {
                    let pair: Vec<Value> = pair.try_iter()?.collect();
                    let [key, value] = pair.as_slice() else {
                        return Err(invalid("a mapping is made of pairs"));
                    };
                    pairs.push((key.clone(), value.clone()));
                }
            }
            ValueKind::Undefined if number == 0 => {}
            kind => return Err(invalid(format!("{kind} is no mapping"))),
        }
    }
    Ok(Value::from_pairs(pairs))
}
