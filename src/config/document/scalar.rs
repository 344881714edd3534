//! What a piece of text stands for: the types of unquoted YAML 1.2 scalars, and `${NAME}`.

use super::tree::Scalar;

/// The core schema of YAML 1.2. Differs from YAML 1.1 in what people know of it: `yes`, `on` and
/// `12:30` are strings.
pub(super) fn typed(text: &str) -> Result<Scalar, String> {
    match text {
        "" | "~" | "null" | "Null" | "NULL" => return Ok(Scalar::Null),
        "true" | "True" | "TRUE" => return Ok(Scalar::Bool(true)),
        "false" | "False" | "FALSE" => return Ok(Scalar::Bool(false)),
        _ => {}
    }
    let (negative, magnitude) = match text.as_bytes()[0] {
        b'-' => (true, &text[1..]),
        b'+' => (false, &text[1..]),
        _ => (false, text),
    };
    if matches!(magnitude, ".inf" | ".Inf" | ".INF") || matches!(text, ".nan" | ".NaN" | ".NAN") {
        return Err(format!("`{text}` is not a finite number"));
    }
    if is_all(magnitude, |byte| byte.is_ascii_digit()) {
        return integer(text, negative, magnitude, 10);
    }
    // The core schema gives these two no sign.
    if let Some(digits) = text
        .strip_prefix("0x")
        .filter(|digits| is_all(digits, |byte| byte.is_ascii_hexdigit()))
    {
        return integer(text, false, digits, 16);
    }
    if let Some(digits) = text
        .strip_prefix("0o")
        .filter(|digits| is_all(digits, |byte| matches!(byte, b'0'..=b'7')))
    {
        return integer(text, false, digits, 8);
    }
    if is_float(magnitude) {
        return match text.parse::<f64>() {
            Ok(number) if number.is_finite() => Ok(Scalar::Float(number)),
            _ => Err(format!(
                "`{text}` is too large for a number; put it in quotes if it is a string"
            )),
        };
    }
    Ok(Scalar::Text(text.to_owned()))
}

fn integer(text: &str, negative: bool, digits: &str, radix: u32) -> Result<Scalar, String> {
    let too_large =
        || format!("`{text}` is too large for an integer; put it in quotes if it is a string");
    let magnitude = u64::from_str_radix(digits, radix).map_err(|_| too_large())?;
    if negative {
        return 0i64
            .checked_sub_unsigned(magnitude)
            .map(Scalar::Int)
            .ok_or_else(too_large);
    }
    Ok(i64::try_from(magnitude).map_or(Scalar::Uint(magnitude), Scalar::Int))
}

/// `[0-9]+(\.[0-9]*)?` or `\.[0-9]+`, then `([eE][-+]?[0-9]+)?`.
fn is_float(magnitude: &str) -> bool {
    let digit = |byte: u8| byte.is_ascii_digit();
    let (mantissa, exponent) = match magnitude.split_once(['e', 'E']) {
        Some((mantissa, exponent)) => (mantissa, Some(exponent)),
        None => (magnitude, None),
    };
    let exponent_fits =
        exponent.is_none_or(|text| is_all(text.strip_prefix(['-', '+']).unwrap_or(text), digit));
    let mantissa_fits = match mantissa.split_once('.') {
        None => is_all(mantissa, digit),
        Some(("", fraction)) => is_all(fraction, digit),
        Some((whole, fraction)) => is_all(whole, digit) && fraction.bytes().all(digit),
    };
    exponent_fits && mantissa_fits
}

fn is_all(text: &str, fits: impl Fn(u8) -> bool) -> bool {
    !text.is_empty() && text.bytes().all(fits)
}

/// Text after substitution.
#[derive(Debug, PartialEq)]
pub(super) struct Substituted {
    pub(super) text: String,
    /// The whole of it was one `${NAME}`.
    pub(super) alone: bool,
    /// A variable was put in; `$$` alone does not count.
    pub(super) changed: bool,
}

/// Replaces `${NAME}` and `${NAME:-default}`; `$$` is a dollar sign, and so is a `$` before
/// anything else. As in a shell, the default also stands in for a variable that is set to nothing.
/// What is put in is not looked at again. All complaints about one text come together.
pub(super) fn substitute(
    text: &str,
    env: &dyn Fn(&str) -> Option<String>,
) -> Result<Substituted, Vec<String>> {
    let mut done = Substituted {
        text: String::with_capacity(text.len()),
        alone: false,
        changed: false,
    };
    let mut problems = Vec::new();
    let mut rest = text;
    while let Some(dollar) = rest.find('$') {
        done.text.push_str(&rest[..dollar]);
        rest = &rest[dollar + 1..];
        if let Some(after) = rest.strip_prefix('$') {
            done.text.push('$');
            rest = after;
            continue;
        }
        let Some(inside) = rest.strip_prefix('{') else {
            done.text.push('$');
            continue;
        };
        let Some((inside, after)) = inside.split_once('}') else {
            problems.push("`${` without `}`; write `$${` for the characters themselves".to_owned());
            rest = "";
            break;
        };
        match lookup(inside, env) {
            Ok(value) => done.text.push_str(&value),
            Err(problem) => problems.push(problem),
        }
        done.changed = true;
        done.alone = after.is_empty() && text.len() == inside.len() + "${}".len();
        rest = after;
    }
    done.text.push_str(rest);
    if problems.is_empty() {
        Ok(done)
    } else {
        Err(problems)
    }
}

fn lookup(inside: &str, env: &dyn Fn(&str) -> Option<String>) -> Result<String, String> {
    let (name, default) = match inside.split_once(":-") {
        Some((name, default)) => (name, Some(default)),
        None => (inside, None),
    };
    let starts_well = name.starts_with(|first: char| first.is_ascii_alphabetic() || first == '_');
    if !starts_well || !is_all(name, |byte| byte.is_ascii_alphanumeric() || byte == b'_') {
        return Err(format!(
            "`{name}` is not the name of an environment variable"
        ));
    }
    match (env(name), default) {
        (Some(value), Some(default)) if value.is_empty() => Ok(default.to_owned()),
        (Some(value), _) => Ok(value),
        (None, Some(default)) => Ok(default.to_owned()),
        (None, None) => Err(format!(
            "environment variable `{name}` is not set, and there is no default (`${{{name}:-default}}`)"
        )),
    }
}
