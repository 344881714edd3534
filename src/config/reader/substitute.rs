//! `${NAME}` and `${NAME:-default}` in a text.

/// Text after substitution.
#[derive(Debug, PartialEq)]
pub(super) struct Substituted {
    pub(super) text: String,
    /// The text was one `${NAME}` and nothing else, so that its value may be a number.
    pub(super) is_whole: bool,
    /// A variable was put in; `$$` alone does not count.
    pub(super) changed: bool,
}

/// Replaces `${NAME}` and `${NAME:-default}`; `$$` is a dollar sign, and so is a `$` before
/// anything else. As in a shell, the default also stands in for a variable that is set to nothing.
/// A variable's value is not substituted again. All problems of one text come together.
pub(super) fn substitute(
    text: &str,
    env: &dyn Fn(&str) -> Option<String>,
) -> Result<Substituted, Vec<String>> {
    let mut done = Substituted {
        text: String::with_capacity(text.len()),
        is_whole: false,
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
        done.is_whole = after.is_empty() && text.len() == inside.len() + "${}".len();
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
    if !starts_well
        || !name
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
    {
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
