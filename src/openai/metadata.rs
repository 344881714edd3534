//! The `metadata` of a request: a few short texts that the router keeps for its client. Pure.

use std::collections::BTreeMap;

use crate::json_scan::Scan;
use crate::openai::error::ApiError;

/// OpenAI's bounds. Lengths are of characters.
const PAIRS_MAX: usize = 16;
const KEY_MAX: usize = 64;
const VALUE_MAX: usize = 512;

/// Reads the raw JSON of `metadata`. Of a repeated key the last value counts, as in engines.
pub fn read(raw: &str) -> Result<BTreeMap<String, String>, ApiError> {
    let wrong = |why: String| Err(ApiError::wrong_value("metadata", why));
    let mut pairs = Vec::new();
    let scan = Scan::<true>::new(raw);
    if scan
        .whole_object(|key, value| pairs.push((key, value)))
        .is_none()
    {
        return Err(ApiError::wrong_type("metadata", "an object of strings"));
    }
    let mut metadata = BTreeMap::new();
    for (key, value) in pairs {
        let text = value
            .starts_with('"')
            .then(|| Scan::<false>::new(value).text());
        let Some(value) = text.flatten() else {
            return Err(ApiError::wrong_type(&format!("metadata.{key}"), "a string"));
        };
        if key.chars().count() > KEY_MAX {
            return wrong(format!("a key may have at most {KEY_MAX} characters"));
        }
        if value.chars().count() > VALUE_MAX {
            return wrong(format!("a value may have at most {VALUE_MAX} characters"));
        }
        metadata.insert(key.into_owned(), value.into_owned());
        if metadata.len() > PAIRS_MAX {
            return wrong(format!("an object may have at most {PAIRS_MAX} pairs"));
        }
    }
    Ok(metadata)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_are_read_within_openais_bounds() {
        let found = read(r#" {"b":"\u00e9\n", "a":"", "b":"2"} "#).unwrap();
        let expected = [("a", ""), ("b", "2")].map(|(key, value)| (key.into(), value.into()));
        assert_eq!(found, BTreeMap::<String, String>::from(expected));
        let pairs = |count: usize| {
            let pairs: Vec<String> = (0..count).map(|n| format!(r#""k{n}":"v""#)).collect();
            format!("{{{}}}", pairs.join(","))
        };
        assert_eq!(read(&pairs(16)).unwrap().len(), 16);
        let long = |key: usize, value: usize| {
            format!(r#"{{"{}":"{}"}}"#, "k".repeat(key), "é".repeat(value))
        };
        assert!(read(&long(64, 512)).is_ok());
        for (wrong, param) in [
            (pairs(17), "metadata"),
            (long(65, 1), "metadata"),
            (long(1, 513), "metadata"),
            (r#"{"k":1}"#.to_owned(), "metadata.k"),
            (r#"{"k":null}"#.to_owned(), "metadata.k"),
            ("[]".to_owned(), "metadata"),
            ("{".to_owned(), "metadata"),
        ] {
            assert_eq!(read(&wrong).unwrap_err().param_or_empty(), param, "{wrong}");
        }
    }
}
