//! From what the router is now to what viewers are sent: everything to one that has nothing, else what has changed.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::Arc;

use bytes::Bytes;
use serde::Serialize;
use serde_json::{Value, json};

use super::changes::Changes;
use super::counts::Columns;
use super::history::{History, Sample};
use super::rows::Rows;
use super::tables::{MODEL_COLUMNS, RANK_COLUMNS, WORKER_COLUMNS};
use crate::relay::account::decision_log::RecordedDecision;

/// Columns of a decision's row.
const DECISION_COLUMNS: [&str; 15] = [
    "number",
    "at",
    "model",
    "api",
    "policy",
    "reason",
    "chosen",
    "prefill",
    "prompt_tokens",
    "cached_tokens",
    "longest_tokens",
    "new_tokens",
    "cost",
    "candidates",
    "attempt",
];

/// The router as viewers see it.
#[derive(Debug, Default)]
pub(super) struct View {
    pub(super) sample: Sample,
    pub(super) workers: Rows,
    /// Models, ranks and panels take longer to read and may be those of the view before.
    pub(super) models: Arc<Rows>,
    pub(super) ranks: Arc<Rows>,
    pub(super) panels: Arc<BTreeMap<&'static str, Value>>,
}

/// What is new since the view before: JSON, as one event.
pub(super) fn update(
    before: &View,
    view: &View,
    changes: &Changes,
    last_change: u64,
    decisions: &[Arc<RecordedDecision>],
) -> Bytes {
    let mut message = Message::new(&view.sample);
    let tables = [
        ("workers", &before.workers, &view.workers),
        ("models", &before.models, &view.models),
        ("ranks", &before.ranks, &view.ranks),
    ];
    for (name, before, now) in tables {
        if let Some(change) = now.change_since(before) {
            message.add(name, &change);
        }
    }
    let has_changed = |(name, value): &(&&str, &Value)| before.panels.get(**name) != Some(*value);
    let panels: BTreeMap<&&str, &Value> = view.panels.iter().filter(has_changed).collect();
    if !panels.is_empty() {
        message.add_value("panels", &panels);
    }
    let changes = changes.after(last_change);
    if !changes.is_empty() {
        message.add_value("changes", &changes);
    }
    if !decisions.is_empty() {
        message.add_value("decisions", &rows(decisions));
    }
    message.event("update")
}

/// Everything, for a viewer that has nothing.
pub(super) fn everything(
    view: &View,
    history: &History,
    changes: &Changes,
    decisions: &[Arc<RecordedDecision>],
) -> Bytes {
    let mut message = Message::new(&view.sample);
    message.add_value(
        "columns",
        &json!({
            "counts": Columns::new(),
            "workers": WORKER_COLUMNS,
            "models": MODEL_COLUMNS,
            "ranks": RANK_COLUMNS,
            "decisions": DECISION_COLUMNS,
        }),
    );
    message.add_value("version", &env!("CARGO_PKG_VERSION"));
    message.add("history", &history.json());
    message.add("workers", &view.workers.all());
    message.add("models", &view.models.all());
    message.add("ranks", &view.ranks.all());
    message.add_value("panels", &*view.panels);
    message.add_value("changes", &changes.after(0));
    message.add_value("decisions", &rows(decisions));
    message.event("all")
}

fn rows(decisions: &[Arc<RecordedDecision>]) -> Vec<Value> {
    decisions.iter().map(|decision| row(decision)).collect()
}

fn row(decision: &RecordedDecision) -> Value {
    let explanation = &decision.explanation;
    let disaggregation = explanation.disaggregation.as_ref();
    let prefill = disaggregation.and_then(|disaggregation| disaggregation.prefill.as_ref());
    // The worker that computes the prompt.
    let computes = prefill.or(explanation.chosen.as_ref());
    let scores = match (prefill, disaggregation) {
        (Some(_), Some(disaggregation)) => &disaggregation.workers,
        _ => &explanation.workers,
    };
    let mut scores = scores.iter();
    let rank = explanation.chosen_rank.filter(|_| prefill.is_none());
    let score = scores.find(|score| Some(&score.worker) == computes && score.rank == rank);
    let chosen = explanation
        .chosen
        .as_ref()
        .map(|chosen| match explanation.chosen_rank {
            Some(rank) => format!("{chosen} rank {rank}"),
            None => chosen.clone(),
        });
    json!([
        decision.number,
        decision.at_unix_ms,
        explanation.model,
        decision.api,
        explanation.policy,
        explanation.reason,
        chosen,
        prefill,
        explanation.prompt_tokens,
        score.map(|score| score.cached_tokens),
        decision.longest_cached_tokens,
        score.map(|score| score.new_tokens),
        score.map(|score| score.cost_ms.round()),
        explanation.candidates,
        decision.attempt,
    ])
}

/// A JSON object under construction.
struct Message(String);

impl Message {
    fn new(sample: &Sample) -> Self {
        let mut message = Self("{".to_owned());
        message.add_value("sample", sample);
        message
    }

    fn add(&mut self, name: &str, json: &str) {
        let comma = if self.0.len() > 1 { "," } else { "" };
        // Writing to a String cannot fail.
        let _ = write!(self.0, "{comma}\"{name}\":{json}");
    }

    fn add_value(&mut self, name: &str, value: &impl Serialize) {
        // Numbers, texts and maps of them always serialize.
        let json = serde_json::to_string(value).unwrap_or_else(|_| "null".to_owned());
        self.add(name, &json);
    }

    fn event(self, name: &str) -> Bytes {
        // Compact JSON has no line break.
        Bytes::from(format!("event: {name}\ndata: {}}}\n\n", self.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view(rows: &[(&str, u32)]) -> View {
        let mut view = View::default();
        for (name, requests) in rows {
            view.workers.add(name, &(name, requests));
        }
        view
    }

    fn data(event: &Bytes) -> Value {
        let text = std::str::from_utf8(event).unwrap();
        let data = text.split_once("data: ").unwrap().1;
        assert!(data.ends_with("}\n\n"));
        serde_json::from_str(data).unwrap()
    }

    #[test]
    fn an_update_has_what_changed_and_nothing_else() {
        let changes = Changes::default();
        let mut before = view(&[("a", 1), ("</script>", 2)]);
        let mut after = view(&[("a", 1), ("</script>", 3)]);
        let round_robin = BTreeMap::from([("policy", json!("round_robin"))]);
        before.panels = Arc::new(round_robin);
        let cache_aware = [("policy", json!("cache_aware")), ("peers", json!(null))];
        after.panels = Arc::new(BTreeMap::from(cache_aware));
        let found = data(&update(&before, &after, &changes, 0, &[]));
        let keys: Vec<&String> = found.as_object().unwrap().keys().collect();
        assert_eq!(keys, ["sample", "workers", "panels"]);
        assert_eq!(found["workers"], json!({"set": [["</script>", 3]]}));
        let panels = json!({"peers": null, "policy": "cache_aware"});
        assert_eq!(found["panels"], panels);
        let same = data(&update(&after, &after, &changes, 0, &[]));
        assert_eq!(same.as_object().unwrap().len(), 1);
    }

    #[test]
    fn a_new_viewer_gets_the_columns_and_every_row() {
        let event = everything(
            &view(&[("a", 1)]),
            &History::default(),
            &Changes::default(),
            &[],
        );
        assert!(event.starts_with(b"event: all\n"));
        let found = data(&event);
        assert_eq!(found["workers"], json!({"all": [["a", 1]]}));
        assert_eq!(found["columns"]["workers"][0], "name");
        assert_eq!(found["history"], json!([]));
    }
}
