//! Choices that were worse than those of policies that know no costs. Pure.

use super::finding::Finding;
use super::observed::Observed;
use super::workers;
use crate::routing::hindsight::WORSE;

pub(super) fn examine(observed: &Observed) -> Vec<Finding> {
    let models = workers::by_model(observed).into_iter();
    models
        .filter_map(|(model, _)| of_model(observed, model))
        .collect()
}

const METRIC: &str = "warmroute_hindsight_seconds";

fn of_model(observed: &Observed, model: &str) -> Option<Finding> {
    let mean = |policy| observed.value(METRIC, &[("model", model), ("policy", policy)]);
    let chosen = mean("chosen")?;
    let (policy, other) = ["least_load", "round_robin"]
        .into_iter()
        .filter_map(|policy| Some((policy, mean(policy)?)))
        .min_by(|(_, a), (_, b)| a.total_cmp(b))?;
    (chosen > WORSE * other).then(|| Finding {
        rule: "choice_worse_than_others",
        cost: (1.0 - other / chosen).clamp(0.01, 1.0),
        problem: format!(
            "requests of {model} take {chosen:.2} s where they are sent, and would have taken {other:.2} s with {policy} \
             (the last ten minutes, played again)"
        ),
        effect: "answers take longer than they need to",
        change: "remove `prefill_rate` and `slots` of workers: what is learnt is mostly right (GET /fleet shows it). Without them, report \
                 what POST /explain shows of such a request; `routing: {policy: least_load}` is better until then"
            .to_owned(),
        ..Finding::default()
    })
}
