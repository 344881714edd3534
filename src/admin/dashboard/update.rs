//! What viewers are sent each second: every row as it is now, and what has happened since the second before. One that
//! has nothing also gets what happened before.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use serde::Serialize;
use serde_json::{Value, json};

use super::changes::{Change, Changes};
use super::counts::Columns;
use super::history::{History, Sample};
use super::tables::{MODEL_COLUMNS, RANK_COLUMNS, Rows, WORKER_COLUMNS};
use crate::relay::account::decision_log::RecordedDecision;

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
    pub(super) slow: Slow,
}

/// What takes longer to read, and may have been read with an earlier sample.
#[derive(Debug, Default, Serialize)]
pub(super) struct Slow {
    pub(super) models: Rows,
    pub(super) ranks: Rows,
    pub(super) panels: BTreeMap<&'static str, Value>,
}

/// One event's data.
#[derive(Serialize)]
struct Message<'v> {
    sample: &'v Sample,
    workers: &'v Rows,
    #[serde(flatten)]
    slow: Option<&'v Slow>,
    changes: Vec<&'v Change>,
    decisions: Vec<Value>,
    #[serde(flatten)]
    first: Option<First<'v>>,
}

/// What a viewer gets once.
#[derive(Serialize)]
struct First<'v> {
    columns: Value,
    version: &'static str,
    history: &'v History,
}

/// What is new, as one event. `has_slow`: what takes longer to read was read again.
pub(super) fn update(
    view: &View,
    has_slow: bool,
    changes: Vec<&Change>,
    decisions: &[Arc<RecordedDecision>],
) -> Bytes {
    let message = Message {
        sample: &view.sample,
        workers: &view.workers,
        slow: has_slow.then_some(&view.slow),
        changes,
        decisions: decisions.iter().map(|decision| row(decision)).collect(),
        first: None,
    };
    event("update", &message)
}

/// Everything, for a viewer that has nothing.
pub(super) fn everything(
    view: &View,
    history: &History,
    changes: &Changes,
    decisions: &[Arc<RecordedDecision>],
) -> Bytes {
    let columns = json!({
        "counts": Columns::new(),
        "workers": WORKER_COLUMNS,
        "models": MODEL_COLUMNS,
        "ranks": RANK_COLUMNS,
        "decisions": DECISION_COLUMNS,
    });
    let message = Message {
        sample: &view.sample,
        workers: &view.workers,
        slow: Some(&view.slow),
        changes: changes.after(0),
        decisions: decisions.iter().map(|decision| row(decision)).collect(),
        first: Some(First {
            columns,
            version: env!("CARGO_PKG_VERSION"),
            history,
        }),
    };
    event("all", &message)
}

fn event(name: &str, message: &Message<'_>) -> Bytes {
    // Numbers, texts and maps of them always serialize, and compact JSON has no line break.
    let json = serde_json::to_string(message).unwrap_or_default();
    Bytes::from(format!("event: {name}\ndata: {json}\n\n"))
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

#[cfg(test)]
mod tests {
    use super::*;

    fn view(rows: &[(&str, u32)]) -> View {
        View {
            workers: rows.iter().map(|row| json!(row)).collect(),
            ..View::default()
        }
    }

    fn data(event: &Bytes) -> Value {
        let text = std::str::from_utf8(event).unwrap();
        let data = text.split_once("data: ").unwrap().1;
        assert!(data.ends_with("}\n\n"));
        serde_json::from_str(data).unwrap()
    }

    #[test]
    fn an_update_has_every_worker_and_what_takes_longer_only_when_it_was_read() {
        let mut view = view(&[("a", 1), ("</script>", 3)]);
        view.slow.panels = BTreeMap::from([("policy", json!("cache_aware"))]);
        let keys = |has_slow| -> Vec<String> {
            let found = data(&update(&view, has_slow, Vec::new(), &[]));
            assert_eq!(found["workers"], json!([["a", 1], ["</script>", 3]]));
            found.as_object().unwrap().keys().cloned().collect()
        };
        assert_eq!(keys(false), ["sample", "workers", "changes", "decisions"]);
        let all = [
            "sample",
            "workers",
            "models",
            "ranks",
            "panels",
            "changes",
            "decisions",
        ];
        assert_eq!(keys(true), all);
    }

    #[test]
    fn a_new_viewer_gets_the_columns_and_every_row() {
        let view = view(&[("a", 1)]);
        let event = everything(&view, &History::default(), &Changes::default(), &[]);
        assert!(event.starts_with(b"event: all\n"));
        let found = data(&event);
        assert_eq!(found["workers"], json!([["a", 1]]));
        assert_eq!(found["columns"]["workers"][0], "name");
        assert_eq!(found["history"], json!([]));
        assert_eq!(found["panels"], json!({}));
    }
}
