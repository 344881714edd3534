//! Rows of a table that viewers keep: each is a JSON array that begins with the row's key. A viewer gets all of them
//! once, then those that changed. Pure.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde::Serialize;

/// A table's rows by their key.
#[derive(Debug, Default)]
pub(super) struct Rows(BTreeMap<String, String>);

impl Rows {
    /// Adds a row, which begins with its key. The last of two with the same key counts.
    pub(super) fn add(&mut self, key: &str, row: &impl Serialize) {
        // Numbers and texts always serialize.
        let json = serde_json::to_string(row).unwrap_or_default();
        self.0.insert(key.to_owned(), json);
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// All rows, for a viewer that has none.
    pub(super) fn all(&self) -> String {
        let rows: Vec<&str> = self.0.values().map(String::as_str).collect();
        format!("{{\"all\":[{}]}}", rows.join(","))
    }

    /// What a viewer that has the rows `before` needs; `None` if it has these.
    pub(super) fn change_since(&self, before: &Rows) -> Option<String> {
        let is_new = |(key, row): &(&String, &String)| before.0.get(*key) != Some(row);
        let set: Vec<&str> = self
            .0
            .iter()
            .filter(is_new)
            .map(|(_, row)| row.as_str())
            .collect();
        let gone: Vec<&String> = before
            .0
            .keys()
            .filter(|key| !self.0.contains_key(*key))
            .collect();
        if set.is_empty() && gone.is_empty() {
            return None;
        }
        let mut json = format!("{{\"set\":[{}]", set.join(","));
        if !gone.is_empty() {
            // Texts always serialize, and writing to a String cannot fail.
            let gone = serde_json::to_string(&gone).unwrap_or_default();
            let _ = write!(json, ",\"gone\":{gone}");
        }
        json.push('}');
        Some(json)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::Value;

    use super::*;

    fn rows(values: &BTreeMap<String, u8>) -> Rows {
        let mut rows = Rows::default();
        for (key, value) in values {
            rows.add(key, &(key, value));
        }
        rows
    }

    /// What a viewer does with a change.
    fn apply(table: &mut BTreeMap<String, Value>, change: &str) {
        let change: Value = serde_json::from_str(change).unwrap();
        if change["all"].is_array() {
            table.clear();
        }
        for list in ["all", "set"] {
            for row in change[list].as_array().into_iter().flatten() {
                table.insert(row[0].as_str().unwrap().to_owned(), row[1].clone());
            }
        }
        for key in change["gone"].as_array().into_iter().flatten() {
            table.remove(key.as_str().unwrap());
        }
    }

    #[test]
    fn only_what_changed_is_sent() {
        let values = |pairs: &[(&str, u8)]| {
            let pairs = pairs.iter();
            rows(
                &pairs
                    .map(|(key, value)| ((*key).to_owned(), *value))
                    .collect(),
            )
        };
        let before = values(&[("a", 1), ("b", 2), ("<script>", 3)]);
        let after = values(&[("a", 1), ("b", 3)]);
        let change = after.change_since(&before);
        let expected = r#"{"set":[["b",3]],"gone":["<script>"]}"#;
        assert_eq!(change.as_deref(), Some(expected));
        assert_eq!(after.change_since(&after), None);
        assert_eq!(after.all(), r#"{"all":[["a",1],["b",3]]}"#);
        assert_eq!(after.len(), 2);
    }

    proptest! {
        #[test]
        fn a_viewer_that_gets_every_change_has_every_row(
            steps in prop::collection::vec(prop::collection::btree_map("[a-e\"<]", 0u8..4, 0..6), 1..8)
        ) {
            let mut table = BTreeMap::new();
            let mut before = rows(&steps[0]);
            apply(&mut table, &before.all());
            for values in &steps {
                let after = rows(values);
                if let Some(change) = after.change_since(&before) {
                    apply(&mut table, &change);
                }
                before = after;
                let expected: BTreeMap<String, Value> =
                    values.iter().map(|(key, value)| (key.clone(), Value::from(*value))).collect();
                prop_assert_eq!(&table, &expected);
            }
        }
    }
}
