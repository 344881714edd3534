//! The latest decisions, as the dashboard gets them: a bounded tail. Pure.

use std::collections::VecDeque;

use serde::Deserialize;
use serde_json::Value;

use super::state::shown;

/// The decisions that are kept, as many as the router keeps.
const MAX_DECISIONS: usize = 200;

/// Titles and widths of the table's columns, which fit into 80 columns.
pub(super) const COLUMNS: [(&str, usize); 7] = [
    ("TIME", 9),
    ("WORKER", 16),
    ("REASON", 15),
    ("PROMPT", 7),
    ("CACHED", 6),
    ("BEST", 5),
    ("MODEL", 12),
];

/// One event of the dashboard's stream, as far as it is about decisions.
#[derive(Debug, Deserialize)]
struct Event {
    columns: Option<Columns>,
    #[serde(default)]
    decisions: Vec<Vec<Value>>,
}

#[derive(Debug, Deserialize)]
struct Columns {
    decisions: Vec<String>,
}

/// The tail, oldest first.
#[derive(Debug, Default)]
pub(super) struct Decisions {
    columns: Vec<String>,
    rows: VecDeque<[String; COLUMNS.len()]>,
}

impl Decisions {
    /// Takes over the data of an event. An event that begins with the columns has every decision.
    pub(super) fn apply(&mut self, data: &str) -> Result<(), serde_json::Error> {
        let event: Event = serde_json::from_str(data)?;
        if let Some(columns) = event.columns {
            self.columns = columns.decisions;
            self.rows.clear();
        }
        for decision in &event.decisions {
            if self.rows.len() == MAX_DECISIONS {
                self.rows.pop_front();
            }
            let row = self.row(decision);
            self.rows.push_back(row);
        }
        Ok(())
    }

    /// The newest first; those that have `filter` in one of their cells.
    pub(super) fn rows(&self, filter: &str) -> Vec<&[String; COLUMNS.len()]> {
        let filter = filter.to_lowercase();
        let newest = self.rows.iter().rev();
        let has = |cells: &&[String; COLUMNS.len()]| {
            let mut cells = cells.iter();
            filter.is_empty() || cells.any(|cell| cell.to_lowercase().contains(&filter))
        };
        newest.filter(has).collect()
    }

    fn row(&self, decision: &[Value]) -> [String; COLUMNS.len()] {
        let value = |name: &str| {
            let index = self.columns.iter().position(|column| column == name)?;
            decision.get(index).filter(|value| !value.is_null())
        };
        let text = |name| value(name).and_then(Value::as_str).map(shown);
        let number = |name| value(name).and_then(Value::as_u64);
        let none = || "-".to_owned();
        let prompt = number("prompt_tokens").unwrap_or(0);
        let share = |name| match number(name) {
            Some(tokens) if prompt > 0 => format!("{} %", (tokens.min(prompt) * 100) / prompt),
            _ => none(),
        };
        let worker = match (text("prefill"), text("chosen")) {
            (Some(prefill), Some(decode)) => format!("{prefill} > {decode}"),
            (_, chosen) => chosen.unwrap_or_else(none),
        };
        [
            number("at").map_or_else(none, clock),
            worker,
            text("reason").map_or_else(none, |reason| reason.replace('_', " ")),
            prompt.to_string(),
            share("cached_tokens"),
            share("longest_tokens"),
            text("model").unwrap_or_else(none),
        ]
    }
}

/// The time of day in UTC, as in the log.
fn clock(unix_ms: u64) -> String {
    let seconds = unix_ms / 1_000 % 86_400;
    let (hours, minutes) = (seconds / 3_600, seconds / 60 % 60);
    format!("{hours:02}:{minutes:02}:{:02}Z", seconds % 60)
}

#[cfg(test)]
pub(super) mod tests {
    use serde_json::json;

    use super::*;

    /// The events of a stream with two decisions, one of them of a pair.
    pub(in crate::cli::top) fn two_decisions() -> Decisions {
        let all = json!({
            "columns": {"decisions": ["number", "at", "model", "reason", "chosen", "prefill", "prompt_tokens", "cached_tokens", "longest_tokens"]},
            "decisions": [[1, 3_723_000, "llama", "longest_prefix", "gpu-a", null, 1_000, 980, 980]],
        });
        let update = json!({"decisions": [[2, 3_724_000, "llama", "lower_cost", "gpu-b", "gpu-p", 400, 0, 390]]});
        let mut decisions = Decisions::default();
        for event in [all, json!({"sample": {}}), update] {
            decisions.apply(&event.to_string()).unwrap();
        }
        decisions
    }

    #[test]
    fn the_newest_decision_is_first_with_what_was_cached_and_what_was_best() {
        let decisions = two_decisions();
        let rows = decisions.rows("");
        assert_eq!(rows[0][..3], ["01:02:04Z", "gpu-p > gpu-b", "lower cost"]);
        assert_eq!(rows[0][3..], ["400", "0 %", "97 %", "llama"]);
        assert_eq!(rows[1][3..6], ["1000", "98 %", "98 %"]);
        assert_eq!(decisions.rows("GPU-P").len(), 1);
        assert!(decisions.rows("nothing").is_empty());
    }

    #[test]
    fn the_tail_is_bounded_and_a_stream_that_comes_again_replaces_it() {
        let mut decisions = two_decisions();
        for number in 0..300 {
            let update = json!({"decisions": [[number, 0, "m", "cold", "gpu-c", null, 1, 0, 0]]});
            decisions.apply(&update.to_string()).unwrap();
        }
        assert_eq!(decisions.rows("").len(), MAX_DECISIONS);
        let all = json!({"columns": {"decisions": ["number"]}, "decisions": []});
        decisions.apply(&all.to_string()).unwrap();
        assert!(decisions.rows("").is_empty());
        assert!(decisions.apply("{").is_err());
    }

    #[test]
    fn names_cannot_change_the_terminal() {
        let mut decisions = two_decisions();
        let all = json!({"columns": {"decisions": ["model"]}, "decisions": [["\u{1b}[31mred"]]});
        decisions.apply(&all.to_string()).unwrap();
        assert!(!decisions.rows("")[0][6].contains('\u{1b}'));
    }
}
