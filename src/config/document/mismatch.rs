//! What serde complains of, kept apart by kind: what can be said to the operator, and whether it
//! only follows from another problem, depends on the kind.

use std::fmt;

use serde::de::{Error, Expected, Unexpected};

use super::tree::NodeId;

/// The head of a wrong value is enough to recognise it.
const FOUND_CHARS_MAX: usize = 60;

#[derive(Debug)]
pub(super) struct Mismatch {
    /// The innermost value that was being read.
    pub(super) node: Option<NodeId>,
    pub(super) kind: Kind,
}

#[derive(Debug)]
pub(super) enum Kind {
    /// `shape` is what was found without its content: "string", "integer".
    Expected {
        expected: String,
        found: String,
        shape: &'static str,
    },
    Variant {
        found: String,
        known: &'static [&'static str],
    },
    Missing(&'static str),
    /// A list or tuple that is too short, perhaps because an item was removed.
    Length(String),
    /// From a type's own check: `try_from`, `deserialize_with`.
    Custom(String),
    /// A secret's value is never told.
    Secret(String),
}

impl Mismatch {
    fn of(kind: Kind) -> Self {
        Self { node: None, kind }
    }

    pub(super) fn secret(message: String) -> Self {
        Self::of(Kind::Secret(message))
    }

    /// Says where, unless something further inside has said so already.
    pub(super) fn at(mut self, node: NodeId) -> Self {
        self.node.get_or_insert(node);
        self
    }

    /// `written` is the value's text before substitution, and then the value is not told.
    pub(super) fn message(&self, written: Option<&str>) -> String {
        match (&self.kind, written) {
            (
                Kind::Expected {
                    expected, found, ..
                },
                None,
            ) => {
                format!("expected {expected}, found {found}")
            }
            (
                Kind::Expected {
                    expected, shape, ..
                },
                Some(written),
            ) => {
                format!("expected {expected}, found the {shape} that `{written}` stands for")
            }
            (Kind::Variant { found, known }, None) => match nearest(found, known) {
                Some(near) => format!("unknown value `{found}`; did you mean `{near}`?"),
                None => format!("unknown value `{found}`; expected {}", one_of(known)),
            },
            (Kind::Variant { known, .. }, Some(written)) => {
                format!(
                    "expected {}, found what `{written}` stands for",
                    one_of(known)
                )
            }
            (Kind::Missing(field), _) => format!("missing field `{field}`"),
            (Kind::Custom(_), Some(written)) => {
                // The check's own words may quote the value.
                format!("what `{written}` stands for is not valid here")
            }
            (Kind::Length(message) | Kind::Custom(message) | Kind::Secret(message), _) => {
                message.clone()
            }
        }
    }
}

impl Error for Mismatch {
    fn custom<T: fmt::Display>(message: T) -> Self {
        Self::of(Kind::Custom(message.to_string()))
    }

    fn invalid_type(found: Unexpected<'_>, expected: &dyn Expected) -> Self {
        let shape = shape(&found);
        let found = match found {
            Unexpected::Str(text) => format!("string \"{}\"", head(text)),
            Unexpected::Unit => "nothing".to_owned(),
            Unexpected::Seq => "a list".to_owned(),
            Unexpected::Map => "a map".to_owned(),
            other => other.to_string(),
        };
        let expected = match expected.to_string() {
            // Rust's words; the file has maps and lists.
            name if name.starts_with("struct ") => "a map".to_owned(),
            name if name == "a sequence" => "a list".to_owned(),
            other => other,
        };
        Self::of(Kind::Expected {
            expected,
            found,
            shape,
        })
    }

    fn invalid_value(found: Unexpected<'_>, expected: &dyn Expected) -> Self {
        Self::invalid_type(found, expected)
    }

    fn invalid_length(length: usize, expected: &dyn Expected) -> Self {
        Self::of(Kind::Length(format!(
            "expected {expected}, found {length} items"
        )))
    }

    fn unknown_variant(found: &str, known: &'static [&'static str]) -> Self {
        Self::of(Kind::Variant {
            found: head(found),
            known,
        })
    }

    fn missing_field(field: &'static str) -> Self {
        Self::of(Kind::Missing(field))
    }
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message(None))
    }
}

impl std::error::Error for Mismatch {}

fn shape(found: &Unexpected<'_>) -> &'static str {
    match found {
        Unexpected::Bool(_) => "boolean",
        Unexpected::Unsigned(_) | Unexpected::Signed(_) => "integer",
        Unexpected::Float(_) => "number",
        Unexpected::Str(_) => "string",
        Unexpected::Unit => "empty value",
        _ => "value",
    }
}

fn head(text: &str) -> String {
    match text.char_indices().nth(FOUND_CHARS_MAX) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

pub(super) fn one_of(known: &[&str]) -> String {
    let quoted: Vec<String> = known.iter().map(|name| format!("`{name}`")).collect();
    match quoted.as_slice() {
        [] => "nothing".to_owned(),
        [only] => only.clone(),
        several => format!("one of {}", several.join(", ")),
    }
}

/// The known name that `name` is probably a slip of: a third of it may differ.
pub(super) fn nearest<'n>(name: &str, known: &[&'n str]) -> Option<&'n str> {
    // The distance costs the product of the lengths, and no real key is this long.
    if name.len() > FOUND_CHARS_MAX {
        return None;
    }
    let slips_max = (name.chars().count() / 3).max(1);
    let folded = name.to_lowercase().replace('-', "_");
    let distance =
        |known: &str| strsim::damerau_levenshtein(&folded, &known.to_lowercase().replace('-', "_"));
    let scored = known.iter().map(|known| (distance(known), *known));
    let best = scored.min_by_key(|(slips, _)| *slips)?;
    (best.0 <= slips_max).then_some(best.1)
}
